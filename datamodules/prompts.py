"""Conversations to be played: what the user says, turn after turn; the answers are the target's.

Read are `turns` (a list of what the user says), `prompt`, and the rows that are trained on (`messages`,
`conversations`), whose own answers are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dspark_lightning.datamodules.rows import TURN_KEYS, BadRow, Chat, Message, parse_row
from dspark_lightning.datamodules.source import load_source
from dspark_lightning.embedded import embedded_data

_BEFORE = ("system", "developer")


@dataclass(frozen=True)
class Conversation:
    """What one conversation is played from."""

    dataset: str  # name of the file, without its suffix
    index: int  # of its row there, from 0
    place: str  # file and line, for people
    questions: list[str]  # what the user says, turn by turn
    before: list[Message]  # turns before the first question: the system prompt
    tools: list[Any] | None = None  # JSON schemas of the tools offered


@dataclass(frozen=True)
class RawRow:
    """One row as it was read."""

    dataset: str  # name of the file, without its suffix
    index: int  # there, from 0
    place: str  # file and line, for people
    record: object  # the parsed JSON or the columns; a BadRow where there is none


def load_conversations(data: str | Sequence[str], limit: int | None = None) -> list[Conversation]:
    """Read conversations.

    Args:
        data: one or several of what `load_source` takes: files, a hub id, or "embedded", the held-out chats of the
            embedded target.
        limit: so many first rows of each are taken; None takes all.

    Raises:
        ValueError: nothing can be read there, or a row is no conversation; names file and line.
    """
    return [_conversation(row) for row in read_rows(data, limit, embedded_data("heldout"))]


def read_rows(data: str | Sequence[str], limit: int | None, embedded: Path) -> Iterator[RawRow]:
    """Read rows, without the blank lines.

    Args:
        data: one or several of what `load_source` takes.
        limit: so many first rows of each are taken; None takes all.
        embedded: what "embedded" stands for.

    Raises:
        ValueError: nothing can be read there, or there is no row.
    """
    names = [data] if isinstance(data, str) else list(data)
    if not names:
        raise ValueError("data is empty: give at least one file with conversations")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be 1 or more, got {limit}")
    short = [Path(name).stem for name in names]
    datasets = [stem if short.count(stem) == 1 else name for stem, name in zip(short, names, strict=True)]
    for name, dataset in zip(names, datasets, strict=True):
        rows = list(islice(_read(name, dataset, embedded), limit))
        if not rows:
            raise ValueError(f"data {name!r} holds no conversation")
        yield from rows


def _read(data: str, dataset: str, embedded: Path) -> Iterator[RawRow]:
    source = load_source("data", data, "train", embedded)
    for row, row_id in enumerate(source.row_ids.tolist()):
        try:
            record = source.record(source.table[row : row + 1], 0)
        except BadRow as error:
            record = error
        if record is not None:  # a blank line
            yield RawRow(dataset, row_id, source.place(row_id), record)


def _conversation(row: RawRow) -> Conversation:
    try:
        chat = read_chat(row.record)
        before, questions = _split(chat)
    except BadRow as error:
        raise ValueError(f"{row.place}: {error}") from error
    return Conversation(row.dataset, row.index, row.place, questions, before, chat.tools)


def read_chat(record: object) -> Chat:
    """Bring a row in normal form that need not have an answer; `turns` and `prompt` become turns of the user.

    Raises:
        BadRow: it is no conversation.
    """
    if isinstance(record, BadRow):
        raise record
    if not isinstance(record, Mapping):
        raise BadRow(f"expected an object with the fields of a conversation, got {type(record).__name__}")
    fields = {key: value for key, value in record.items() if value is not None}
    if "turns" in fields or ("prompt" in fields and not any(key in fields for key in TURN_KEYS)):
        turns = fields.get("turns", [fields.get("prompt")])
        if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
            raise BadRow(f"turns must be a list of what the user says, got {turns!r}")
        fields = {**fields, "messages": [{"role": "user", "content": turn} for turn in turns]}
    if not any(key in fields for key in TURN_KEYS):
        raise BadRow(f"expected turns, prompt, messages or conversations; the fields are {sorted(map(str, fields))}")
    chat = parse_row(fields, needs_answer=False)
    if not isinstance(chat, Chat):
        raise BadRow("rows of input_ids are no conversations: give turns, prompt or messages")
    for message in chat.messages:
        if message["role"] == "user" and not message["content"].strip():
            raise BadRow("a user turn is empty")
    return chat


def _split(chat: Chat) -> tuple[list[Message], list[str]]:
    """Turns before the first question, and the questions."""
    roles = [message["role"] for message in chat.messages]
    first = next((i for i, role in enumerate(roles) if role not in _BEFORE), len(roles))
    said = [message for message in chat.messages[first:] if message["role"] != "assistant"]
    if not said:
        raise BadRow(f"no user turn; the roles are {roles}")
    for message in said:
        if message["role"] != "user":
            raise BadRow(f"a {message['role']} turn behind the first question cannot be played: only user turns can")
    return chat.messages[:first], [message["content"] for message in said]
