"""What has to be answered: the rows of the data as scripts, each under an id that stays the same.

A script says what stands before each answer that the target has to write. Everything between two answers (a system
prompt, the user, results of tools) is said as it is in the row.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dspark_lightning.datamodules.prompts import RawRow, read_chat, read_rows
from dspark_lightning.datamodules.rows import TURN_KEYS, BadRow, Chat, Message
from dspark_lightning.embedded import embedded_data

Turns = Literal["all", "last"]

_CONVERSATION = (*TURN_KEYS, "turns", "prompt", "response", "tools")
_ASKING = ("user", "tool")  # roles that an answer follows


@dataclass(frozen=True)
class Failure:
    """A row without an answer."""

    id: str | int | None  # None where the row could not be read
    place: str  # file and line, for people
    reason: str  # in few words, the same for all rows of the kind
    detail: str


@dataclass(frozen=True)
class Script:
    """What is answered in one row."""

    id: str | int
    place: str  # file and line, for people
    said: list[list[Message]]  # before each answer, what was not yet said before the one before
    tools: list[Any] | None
    fields: dict[str, Any]  # of the row, beside the conversation

    @property
    def key(self) -> str:
        """The id as text: no two scripts have the same."""
        return str(self.id)


@dataclass(frozen=True)
class Scripts:
    """The rows of the data."""

    scripts: list[Script]
    refused: list[Failure]  # rows that cannot be answered
    digest: str  # of all rows in their order


def load_scripts(data: str | Sequence[str], limit: int | None, turns: Turns) -> Scripts:
    """Read what has to be answered.

    Args:
        data: one or several of what `load_source` takes; "embedded" are the training chats of the embedded target.
        limit: so many first rows of each are taken; None takes all.
        turns: whether every answer of a row is written again, or the last one behind the others as they are. A row
            that ends with a question gets an answer to it, rows of `turns` get all of theirs.

    Raises:
        ValueError: nothing can be read there.
    """
    rows = list(read_rows(data, limit, embedded_data("train")))
    scripts, refused = [], []
    ids = _ids([row.record for row in rows])
    for row, id in zip(rows, ids, strict=True):
        try:
            scripts.append(_script(row, id, turns))
        except BadRow as error:
            refused.append(Failure(id, row.place, "no conversation to answer", str(error)))
    records = [None if isinstance(row.record, BadRow) else row.record for row in rows]
    return Scripts(scripts, refused, _digest(records))


def _script(row: RawRow, id: str | int | None, turns: Turns) -> Script:
    chat = read_chat(row.record)
    assert isinstance(row.record, Mapping) and id is not None  # what `read_chat` has checked
    record = {name: value for name, value in row.record.items() if value is not None}
    said = [[message] for message in chat.messages] if "turns" in record else list(_said(chat, turns))
    fields = {name: value for name, value in record.items() if name not in (*_CONVERSATION, "id", "truncated")}
    return Script(id, row.place, said, chat.tools, fields)


def _said(chat: Chat, turns: Turns) -> Iterator[list[Message]]:
    """What stands before each answer to be written."""
    messages = chat.messages
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers or answers[-1] + 1 < len(messages):
        answers.append(len(messages))  # the last turn is a question
    if turns == "last":
        answers = answers[-1:]
    elif any(message["role"] == "tool" or "tool_calls" in message for message in messages[: answers[-1]]):
        raise BadRow("a conversation with tool calls cannot be answered anew turn by turn: set turns to last")
    for start, end in zip([0, *(i + 1 for i in answers)], answers, strict=False):
        asking = messages[start:end]
        if not asking or asking[-1]["role"] not in _ASKING:
            behind = f"behind a {messages[end - 1]['role']} turn" if end else "at the very beginning"
            raise BadRow(f"an answer {behind} answers nothing; the roles are {[m['role'] for m in messages]}")
        yield asking


def _ids(records: Sequence[object]) -> list[str | int | None]:
    """The rows' own ids if each has one of its own, else hashes of the conversations, numbered where they are equal."""
    rows = [record for record in records if isinstance(record, Mapping)]
    own = [row.get("id") for row in rows]
    if all(isinstance(id, str | int) and not isinstance(id, bool) for id in own) and len(set(map(str, own))) == len(
        own
    ):
        ids: Iterator[Any] = iter(own)
    else:
        ids = _hashes(rows)
    return [next(ids) if isinstance(record, Mapping) else None for record in records]


def _hashes(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    seen: Counter[str] = Counter()
    for row in rows:
        digest = _digest({name: row[name] for name in _CONVERSATION if row.get(name) is not None})
        seen[digest] += 1
        yield digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
