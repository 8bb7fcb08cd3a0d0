"""One row of chat data, from any of the formats that are read, in one normal form.

Read are `messages`, `conversations` (also with from/value) or `conversation`: a list of turns; `prompt` +
`response`; and `input_ids` + `loss_mask` for rows that are tokenised already. Beside the turns a row may hold
`tools` (JSON schemas, handed to the chat template) and `truncated` (true when the last answer was cut at a token
limit). Every row may hold `weight` (0 or more, default 1: how much its tokens count in the loss beside those of other
rows; 0 leaves the row out) and `id` (of rows with the same one only the first is taken). Null stands for a missing
field. Rows of different formats may stand in one file.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark_lightning.typed_json import parse

Message = dict[str, Any]

TURN_KEYS = ("messages", "conversations", "conversation")
ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_LARGEST_WEIGHT = float(np.finfo(np.float32).max)


class BadRow(ValueError):
    """A row that cannot be used.

    Args:
        reason: Says why, without the place, which the caller knows.
        kind: A few words under which rows with the same fault are counted.
    """

    def __init__(self, reason: str, kind: str = "malformed") -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True)
class Chat:
    """A conversation with at least one assistant turn.

    Attributes:
        messages: Turns with `role`, `content` (text, or parts for a vision-language target) and whatever else the
            chat template reads (`tool_calls`, ...).
        truncated: The last assistant turn was cut at a token limit: its target never wrote an end-of-turn token.
        tools: JSON schemas of the tools offered, or None.
        weight: Of each supervised token in the loss.
    """

    messages: list[Message]
    truncated: bool = False
    tools: list[Any] | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class TokenRow:
    """A row that came tokenised: ids, and 1 for each supervised token; `weight` as in `Chat`."""

    input_ids: list[int]
    loss_mask: list[int]
    weight: float = 1.0


ReadContent = Callable[[object, str], Any]
"""From the content of a turn and its role to what the chat template is given as `content`."""


def parse_row(record: object, read_content: ReadContent | None = None, *, needs_answer: bool = True) -> Chat | TokenRow:
    """Bring one record into normal form.

    Args:
        record: One row, as it was read.
        read_content: Checks and converts the content of each turn. Default: only text is taken.
        needs_answer: Whether there must be an assistant turn, and no empty turn of user or assistant.

    Raises:
        BadRow: The record has none of the formats, an unknown role, content that is not text, an empty turn, no
            assistant turn, or a weight that is no weight.
    """
    if not isinstance(record, Mapping):
        raise BadRow(f"expected an object with the fields of a row, got {type(record).__name__}")
    record = {key: value for key, value in record.items() if value is not None}
    weight = row_weight(record)
    if "input_ids" in record:
        return _token_row(record, weight)
    messages = [_message(turn, read_content or _text) for turn in _turns(record)]
    if needs_answer:
        _check_turns(messages)
    truncated = record.get("truncated", False)
    if not isinstance(truncated, bool):
        raise BadRow(f"truncated must be true or false, got {_short(truncated)}")
    return Chat(messages, truncated, _tools(record.get("tools")), weight)


def row_weight(record: Mapping[str, Any]) -> float:
    """The `weight` of a record; 1 where it has none.

    Raises:
        BadRow: It is no number, negative, or not finite as a 32-bit float.
    """
    value = record.get("weight")
    if value is None:
        return 1.0
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LARGEST_WEIGHT:
        return float(value)
    raise BadRow(f"weight must be a number, 0 or positive and finite, got {_short(value)}", "bad weight")


def id_digest(record: object) -> int:
    """A hash of the record's `id`, as a signed 64-bit number; 0 where it has none."""
    name = record.get("id") if isinstance(record, Mapping) else None
    if name is None:
        return 0
    return int.from_bytes(hashlib.blake2b(repr(name).encode(), digest_size=8).digest(), "little", signed=True)


def _check_turns(messages: Sequence[Message]) -> None:
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise BadRow(f"no assistant turn; the roles are {_short(roles)}", "no assistant turn")
    for i, message in enumerate(messages):
        says_more = message["role"] == "assistant" and any(map(message.get, ("tool_calls", "reasoning_content")))
        if message["role"] in ("user", "assistant") and not says_more and _is_blank(message["content"]):
            raise BadRow(f"the {message['role']} turn is empty (turn {i + 1} of {len(messages)})", "empty turn")


def _is_blank(content: Any) -> bool:
    parts = [{"text": content}] if isinstance(content, str) else content
    return all(not str(part.get("text", "picture")).strip() for part in parts)


def _token_row(record: Mapping[str, Any], weight: float) -> TokenRow:
    ids, mask = record["input_ids"], record.get("loss_mask")
    for name, values in (("input_ids", ids), ("loss_mask", mask)):
        if not isinstance(values, Sequence | None) or isinstance(values, str):
            raise BadRow(f"{name} must be a list of integers, got {_short(values)}", "unusable input_ids")
    if mask is None or len(mask) != len(ids):
        raise BadRow(
            f"input_ids needs a loss_mask of its {len(ids)} entries, got {'none' if mask is None else len(mask)}",
            "unusable input_ids",
        )
    if not all(isinstance(token, int) for token in ids) or not all(flag in (0, 1) for flag in mask):
        raise BadRow("input_ids must be integers and loss_mask 0 or 1", "unusable input_ids")
    return TokenRow(list(ids), [int(flag) for flag in mask], weight)


def _turns(record: Mapping[str, Any]) -> Sequence[Any]:
    for key in TURN_KEYS:
        if key in record:
            turns = record[key]
            if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
                raise BadRow(f"{key} must be a list of turns, got {_short(turns)}", "no turns")
            return turns
    if "prompt" in record and "response" in record:
        return [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record["response"]}]
    raise BadRow(
        "expected messages, conversations, prompt and response, or input_ids and loss_mask; "
        f"the fields are {_short(sorted(map(str, record)))}",
        "unknown fields",
    )


def _message(turn: object, read_content: ReadContent) -> Message:
    if not isinstance(turn, Mapping):
        raise BadRow(f"a turn must be an object with role and content, got {_short(turn)}", "no turns")
    message: Message = {key: _without_nulls(value) for key, value in turn.items() if value is not None}
    if "from" in message and "role" not in message:
        sender = str(message.pop("from"))
        message = {"role": _SHAREGPT_ROLES.get(sender, sender), "content": message.pop("value", None), **message}
    role = message.get("role")
    if role not in ROLES:
        known = f"known are {', '.join(ROLES)} (in from/value rows also human, gpt)"
        raise BadRow(f"unknown role {_short(role)}; {known}", "unknown role")
    message["content"] = read_content(message.get("content", "" if "tool_calls" in message else None), role)
    return message


def _text(content: object, role: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRow(f"the content of the {role} turn must be text, got {_short(content)}", "content is no text")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise BadRow(
                f"the {role} turn has a part of type {_short(kind)}, but only text is read here; images need a VLM "
                "datamodule",
                "content is no text",
            )
    return "".join(part["text"] for part in content)


def _tools(tools: object) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = parse(tools)
        except ValueError as error:
            raise BadRow(f"tools is text that is not JSON: {error}", "unusable tools") from error
    if not tools:
        return None
    if not isinstance(tools, list):
        raise BadRow(f"tools must be a list of JSON schemas, got {_short(tools)}", "unusable tools")
    return [_without_nulls(tool) for tool in tools]


def _without_nulls(value: object) -> object:
    # Arrow tables give every struct every field of the column, null where the row had none.
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
