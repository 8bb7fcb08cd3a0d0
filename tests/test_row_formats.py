from typing import Any

import pytest

from dspark_lightning.datamodules.rows import BadRow, Chat, TokenRow, parse_row

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
TEXT_PARTS = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER, ASSISTANT]},
        {"conversations": [USER, ASSISTANT]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"conversations": [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "hello"}]},
        {"conversation": [USER, {"role": "assistant", "content": TEXT_PARTS}]},
        {"prompt": "hi", "response": "hello"},
        {"prompt": "hi", "response": "hello", "messages": None, "tools": None, "truncated": None},
        {"messages": [{**USER, "tool_calls": None}, {**ASSISTANT, "reasoning_content": None}], "tools": []},
    ],
)
def test_every_format_has_one_normal_form(record: dict[str, Any]) -> None:
    assert parse_row(record) == Chat([USER, ASSISTANT])


def test_what_stands_beside_the_text_is_kept() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1, "b": None}}}]}
    row = parse_row({"messages": [USER, call], "tools": '[{"name": "f", "description": null}]', "truncated": True})
    assert row == Chat(
        [
            USER,
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}], "content": ""},
        ],
        truncated=True,
        tools=[{"name": "f"}],
    )


def test_tokenised_rows_pass_through() -> None:
    assert parse_row({"input_ids": [5, 6, 7], "loss_mask": [False, True, True]}) == TokenRow([5, 6, 7], [0, 1, 1])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1], "expected an object with the fields of a row, got list"),
        ({"text": "hi", "id": 3}, r"the fields are \['id', 'text'\]"),
        ({"messages": []}, r"messages must be a list of turns, got \[\]"),
        ({"messages": "hi"}, "messages must be a list of turns, got 'hi'"),
        ({"messages": ["hi"]}, "a turn must be an object with role and content, got 'hi'"),
        ({"messages": [USER]}, r"no assistant turn; the roles are \['user'\]"),
        ({"messages": [USER, {"role": "bot", "content": "x"}]}, "unknown role 'bot'; known are system,"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "unknown role 'alien'"),
        ({"messages": [USER, {"role": "assistant"}]}, "content of the assistant turn must be text, got None"),
        ({"messages": [USER, {"role": "assistant", "content": 3}]}, "must be text, got 3"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}, ASSISTANT]},
            "the user turn has a part of type 'image', .* images need a VLM datamodule",
        ),
        ({"messages": [USER, ASSISTANT], "tools": "{"}, "tools is text that is not JSON"),
        ({"messages": [USER, ASSISTANT], "tools": {"name": "f"}}, "tools must be a list"),
        ({"input_ids": [1, 2]}, "input_ids needs a loss_mask of its 2 entries, got none"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "input_ids needs a loss_mask of its 2 entries, got 1"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "loss_mask 0 or 1"),
        ({"input_ids": ["a"], "loss_mask": [0]}, "input_ids must be integers"),
    ],
)
def test_bad_rows_say_why(record: object, message: str) -> None:
    with pytest.raises(BadRow, match=message):
        parse_row(record)
