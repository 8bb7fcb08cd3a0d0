"""Conversations to be played are read from every form of row."""

import re
from pathlib import Path
from typing import Any

import pytest

from chat_helpers import DEFAULT_SYSTEM, byte_tokenizer, chat, datasets_cache, write_jsonl  # noqa: F401
from dspark_lightning.datamodules.loss_mask import ChatRenderer
from dspark_lightning.datamodules.prompts import load_conversations
from dspark_lightning.datamodules.rows import Chat

SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize(
    ("row", "questions", "before"),
    [
        ({"turns": ["a", "b"]}, ["a", "b"], []),
        ({"prompt": "a"}, ["a"], []),
        ({"prompt": "a", "response": "x"}, ["a"], []),
        (chat("a", "x", "b", "y"), ["a", "b"], []),
        ({"messages": [SYSTEM, {"role": "user", "content": "a"}]}, ["a"], [SYSTEM]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "x"}]}, ["a"], []),
    ],
)
def test_what_the_user_says_is_taken(
    row: dict[str, Any], questions: list[str], before: list[Any], tmp_path: Path
) -> None:
    (conversation,) = load_conversations(write_jsonl(tmp_path / "rows.jsonl", [row]))
    assert (conversation.questions, conversation.before) == (questions, before)
    assert (conversation.dataset, conversation.index) == ("rows", 0)


def test_tools_reach_the_conversation(tmp_path: Path) -> None:
    (conversation,) = load_conversations(write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "tools": [TOOL]}]))
    assert conversation.tools == [TOOL]


def test_rows_keep_their_numbers_and_datasets_their_names(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "math.jsonl", [{"prompt": "a"}, "", {"prompt": "b"}, {"prompt": "c"}])
    second = write_jsonl(tmp_path / "code.jsonl", [{"prompt": "d"}])
    read = load_conversations([first, second], limit=2)
    assert [(each.dataset, each.index, each.questions) for each in read] == [
        ("math", 0, ["a"]),
        ("math", 2, ["b"]),
        ("code", 0, ["d"]),
    ]


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        paths.append(write_jsonl(tmp_path / folder / "rows.jsonl", [{"prompt": "a"}]))
    assert [each.dataset for each in load_conversations(paths)] == paths


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"turns": []}, "turns must be a list of what the user says, got []"),
        ({"turns": "hello"}, "turns must be a list of what the user says, got 'hello'"),
        ({"turns": [3]}, "the content of the user turn must be text, got 3"),
        ({"turns": ["a", " "]}, "a user turn is empty"),
        ({"text": "a"}, "expected turns, prompt, messages or conversations; the fields are ['text']"),
        ({"messages": [SYSTEM]}, "no user turn; the roles are ['system']"),
        (chat("a") | {"messages": [*chat("a")["messages"], {"role": "tool", "content": "x"}]}, "a tool turn behind"),
        ([1], "expected an object with the fields of a conversation, got list"),
        ("{", "not JSON"),
    ],
)
def test_other_rows_are_refused_by_line(row: Any, error: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a"}, row])
    with pytest.raises(ValueError, match=re.escape(f"{path}:2: {error}")):
        load_conversations(path)


def test_nothing_to_play_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    with pytest.raises(ValueError, match="limit must be 1 or more, got 0"):
        load_conversations(path, limit=0)
    with pytest.raises(ValueError, match="data is empty"):
        load_conversations([])


def test_a_prompt_ends_where_the_answer_begins() -> None:
    """The ids are those that training sees before the answer, the default system prompt included."""
    renderer = ChatRenderer(byte_tokenizer(DEFAULT_SYSTEM))
    messages = chat("hi", "yo")["messages"]
    prompt = renderer.encode_prompt(messages[:1])
    text = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt == [token for token, _ in renderer.encode_text(text)]
    ((ids, mask),) = renderer.encode([renderer.render(Chat(messages))])
    assert prompt == ids[: int(mask.argmax())].tolist()
