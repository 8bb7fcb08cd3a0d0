"""One row of chat data, from any of the formats that are read, in one normal form.

Read are `messages`, `conversations` (also with from/value) or `conversation`: a list of turns; `prompt` +
`response`; and `input_ids` + `loss_mask` for rows that are tokenised already. Beside the turns a row may hold
`tools` (JSON schemas, handed to the chat template) and `truncated` (true when the last answer was cut at a token
limit).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

TURN_KEYS = ("messages", "conversations", "conversation")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


class BadRow(ValueError):
    """A row that cannot be used; the message says why, without the place, which the caller knows."""


@dataclass(frozen=True)
class Chat:
    """A conversation with at least one assistant turn.

    Attributes:
        messages: Turns with `role`, `content` (text, or parts for a vision-language target) and whatever else the
            chat template reads (`tool_calls`, ...).
        truncated: The last assistant turn was cut at a token limit: its target never wrote an end-of-turn token.
        tools: JSON schemas of the tools offered, or None.
    """

    messages: list[Message]
    truncated: bool = False
    tools: list[Any] | None = None


@dataclass(frozen=True)
class TokenRow:
    """A row that came tokenised: ids, and 1 for each supervised token."""

    input_ids: list[int]
    loss_mask: list[int]


ReadContent = Callable[[object, str], Any]
"""From the content of a turn and its role to what the chat template is given as `content`."""


def parse_row(record: object, read_content: ReadContent | None = None, *, needs_answer: bool = True) -> Chat | TokenRow:
    """Bring one record into normal form.

    Args:
        record: One row, as it was read.
        read_content: Checks and converts the content of each turn. Default: only text is taken.
        needs_answer: Whether there must be an assistant turn.

    Raises:
        BadRow: The record has none of the formats, an unknown role, content that is not text, or no assistant turn.
    """
    if not isinstance(record, Mapping):
        raise BadRow(f"expected an object with the fields of a row, got {type(record).__name__}")
    record = {key: value for key, value in record.items() if value is not None}
    if "input_ids" in record:
        return _token_row(record)
    messages = [_message(turn, read_content or _text) for turn in _turns(record)]
    if needs_answer and not any(message["role"] == "assistant" for message in messages):
        raise BadRow(f"no assistant turn; the roles are {[message['role'] for message in messages]}")
    truncated = record.get("truncated", False)
    if not isinstance(truncated, bool):
        raise BadRow(f"truncated must be true or false, got {_short(truncated)}")
    return Chat(messages, truncated, _tools(record.get("tools")))


def _token_row(record: Mapping[str, Any]) -> TokenRow:
    ids, mask = record["input_ids"], record.get("loss_mask")
    for name, values in (("input_ids", ids), ("loss_mask", mask)):
        if not isinstance(values, Sequence | None) or isinstance(values, str):
            raise BadRow(f"{name} must be a list of integers, got {_short(values)}")
    if mask is None or len(mask) != len(ids):
        raise BadRow(
            f"input_ids needs a loss_mask of its {len(ids)} entries, got {'none' if mask is None else len(mask)}"
        )
    if not all(isinstance(token, int) for token in ids) or not all(flag in (0, 1) for flag in mask):
        raise BadRow("input_ids must be integers and loss_mask 0 or 1")
    return TokenRow(list(ids), [int(flag) for flag in mask])


def _turns(record: Mapping[str, Any]) -> Sequence[Any]:
    for key in TURN_KEYS:
        if key in record:
            turns = record[key]
            if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
                raise BadRow(f"{key} must be a list of turns, got {_short(turns)}")
            return turns
    if "prompt" in record and "response" in record:
        return [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record["response"]}]
    raise BadRow(
        "expected messages, conversations, prompt and response, or input_ids and loss_mask; "
        f"the fields are {sorted(map(str, record))}"
    )


def _message(turn: object, read_content: ReadContent) -> Message:
    if not isinstance(turn, Mapping):
        raise BadRow(f"a turn must be an object with role and content, got {_short(turn)}")
    message: Message = {key: _without_nulls(value) for key, value in turn.items() if value is not None}
    if "from" in message and "role" not in message:
        sender = str(message.pop("from"))
        message = {"role": _SHAREGPT_ROLES.get(sender, sender), "content": message.pop("value", None), **message}
    role = message.get("role")
    if role not in _ROLES:
        raise BadRow(f"unknown role {role!r}; known are {', '.join(_ROLES)} (in from/value rows also human, gpt)")
    message["content"] = read_content(message.get("content", "" if "tool_calls" in message else None), role)
    return message


def _text(content: object, role: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRow(f"the content of the {role} turn must be text, got {_short(content)}")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise BadRow(
                f"the {role} turn has a part of type {kind!r}, but only text is read here; images need a VLM datamodule"
            )
    return "".join(part["text"] for part in content)


def _tools(tools: object) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise BadRow(f"tools is text that is not JSON: {error}") from error
    if not tools:
        return None
    if not isinstance(tools, list):
        raise BadRow(f"tools must be a list of JSON schemas, got {_short(tools)}")
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
