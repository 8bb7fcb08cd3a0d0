"""What `dspark regenerate` finds to be answered in rows, and the ids that rows keep."""

from pathlib import Path
from typing import Any

import pytest

from chat_helpers import chat, datasets_cache, write_jsonl  # noqa: F401
from dspark_lightning.regeneration.scripts import Scripts, Turns, load_scripts

SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "seen"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def load(folder: Path, *rows: Any, turns: Turns = "all") -> Scripts:
    return load_scripts(write_jsonl(folder / "rows.jsonl", list(rows)), None, turns)


@pytest.mark.parametrize(
    ("row", "all_turns", "last_turn"),
    [
        ({"prompt": "a"}, [[user("a")]], [[user("a")]]),
        ({"prompt": "a", "response": "x"}, [[user("a")]], [[user("a")]]),
        ({"turns": ["a", "b"]}, [[user("a")], [user("b")]], [[user("a")], [user("b")]]),
        (chat("a", "x", "b", "y"), [[user("a")], [user("b")]], [[user("a"), assistant("x"), user("b")]]),
        (chat("a", "x", "b"), [[user("a")], [user("b")]], [[user("a"), assistant("x"), user("b")]]),
        ({"messages": [SYSTEM, user("a"), user("b"), assistant("x")]}, [[SYSTEM, user("a"), user("b")]], None),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "x"}]}, [[user("a")]], None),
        ({"messages": [user("a"), CALL]}, [[user("a")]], [[user("a")]]),
    ],
)
def test_what_is_said_before_each_answer(
    row: dict[str, Any], all_turns: list[Any], last_turn: list[Any] | None, tmp_path: Path
) -> None:
    """Without last_turn it is the same as all_turns."""
    (script,) = load(tmp_path, row).scripts
    assert script.said == all_turns
    (script,) = load(tmp_path, row, turns="last").scripts
    assert script.said == (all_turns if last_turn is None else last_turn)


def test_turns_of_tools_are_kept_before_the_last_answer_and_refused_otherwise(tmp_path: Path) -> None:
    row = {"messages": [user("a"), CALL, RESULT, assistant("x")]}
    (script,) = load(tmp_path, row, turns="last").scripts
    assert script.said == [[user("a"), CALL, RESULT]]
    (failure,) = load(tmp_path, row).refused
    assert failure.reason == "no conversation to answer" and failure.place == f"{tmp_path / 'rows.jsonl'}:1"
    assert failure.detail == "a conversation with tool calls cannot be answered anew turn by turn: set turns to last"


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        ("{", "not JSON"),
        ({"text": "a"}, "expected turns, prompt, messages or conversations; the fields are ['text']"),
        ({"messages": [assistant("x"), user("a")]}, "an answer at the very beginning answers nothing"),
        ({"messages": [user("a"), SYSTEM]}, "an answer behind a system turn answers nothing"),
        ({"messages": [SYSTEM]}, "an answer behind a system turn answers nothing"),
        (chat("a", "x", " "), "a user turn is empty"),
        ({"input_ids": [1, 2], "loss_mask": [0, 1], "messages": [user("a")]}, "rows of input_ids are no conversations"),
    ],
)
def test_other_rows_are_named_and_the_rest_is_answered(row: Any, detail: str, tmp_path: Path) -> None:
    rows = load(tmp_path, {"prompt": "a"}, row)
    (failure,) = rows.refused
    assert failure.place == f"{tmp_path / 'rows.jsonl'}:2" and failure.detail.startswith(detail)
    assert [script.said for script in rows.scripts] == [[[user("a")]]]


def test_rows_keep_ids_of_their_own(tmp_path: Path) -> None:
    rows = load(tmp_path, {"prompt": "a", "id": 7}, {"prompt": "a", "id": "x"}, {"text": "no conversation", "id": 9})
    assert [script.id for script in rows.scripts] == [7, "x"] and rows.refused[0].id == 9


@pytest.mark.parametrize("ids", [[1, 1, 2], [1, "1", 2], [1, None, 2], [1, True, 2], [1, [3], 2]])
def test_other_ids_give_way_to_hashes_of_the_conversation(ids: list[Any], tmp_path: Path) -> None:
    rows = [{"prompt": text, "id": id} for text, id in zip("aba", ids, strict=True)]
    first, other, again = (script.key for script in load(tmp_path, *rows).scripts)
    assert again == f"{first}-2" and len({first, other, again}) == 3
    assert [script.key for script in load(tmp_path, rows[1], rows[0]).scripts] == [other, first]  # wherever they are


def test_further_fields_are_kept(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    row = {**chat("a", "x"), "tools": [tool], "weight": 0.5, "truncated": True, "source": None}
    (script,) = load(tmp_path, row).scripts
    assert (script.fields, script.tools) == ({"weight": 0.5}, [tool])


def test_the_digest_is_that_of_the_rows(tmp_path: Path) -> None:
    digests = [load(tmp_path, {"prompt": "a"}, {"prompt": text}).digest for text in "bbc"]
    assert digests[0] == digests[1] != digests[2]
