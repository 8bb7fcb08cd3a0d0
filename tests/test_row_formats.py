import math
from typing import Any

import pytest

from dspark_lightning.datamodules.rows import BadRow, Chat, TokenRow, id_digest, parse_row

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


def test_turns_that_may_be_empty() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    thought = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    empty = [{"role": role, "content": ""} for role in ("system", "developer", "tool")]
    turns = [empty[0], empty[1], USER, call, empty[2], thought]
    assert parse_row({"messages": turns}) == Chat(turns)
    assert parse_row({"messages": [{"role": "user", "content": ""}]}, needs_answer=False) == Chat(
        [{"role": "user", "content": ""}]
    )


def test_weights_and_ids() -> None:
    assert parse_row({"messages": [USER, ASSISTANT], "weight": 0.5}) == Chat([USER, ASSISTANT], weight=0.5)
    assert parse_row({"input_ids": [5], "loss_mask": [1], "weight": 0}) == TokenRow([5], [1], weight=0)
    assert parse_row({"messages": [USER, ASSISTANT], "weight": None}) == Chat([USER, ASSISTANT])
    assert id_digest({"id": "a"}) == id_digest({"id": "a", "x": 1}) != id_digest({"id": "b"})
    assert id_digest({"id": None}) == id_digest({}) == id_digest(None) == 0 != id_digest({"id": 0})


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
        ({"messages": None}, r"the fields are \[\]"),
        ({"messages": [None]}, "a turn must be an object with role and content, got None"),
        ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, r"the assistant turn is empty \(turn 2 of 2\)"),
        ({"messages": [{"role": "user", "content": ""}, ASSISTANT]}, "the user turn is empty"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": " "}]}, ASSISTANT]},
            "the user turn is empty",
        ),
        ({"prompt": "hi", "response": ""}, "the assistant turn is empty"),
        *(
            (
                {"prompt": "hi", "response": "hello", "weight": weight},
                "weight must be a number, 0 or positive and finite",
            )
            for weight in (-1, math.nan, math.inf, 1e39, 10**400, True, "2")
        ),
    ],
)
def test_bad_rows_say_why(record: object, message: str) -> None:
    with pytest.raises(BadRow, match=message):
        parse_row(record)
