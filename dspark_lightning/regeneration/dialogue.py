"""A conversation while it is answered, and the row that it becomes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dspark_lightning.datamodules.rows import Message
from dspark_lightning.regeneration.scripts import Failure, Script


class Unanswered(ValueError):
    """A script that cannot be answered.

    Args:
        reason: in few words, the same for all scripts of the kind.
        detail: what happened to this one.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Dialogue:
    """A script being played.

    Attributes:
        messages: what was said so far, the target's answers among it.
        turn: how many answers the target has written.
        truncated: whether the last of them was cut at a token limit.
        tokens: of the answers.
        rewritten: how many of them have other tokens once the chat template has written them.
        failure: why there is nothing more to come.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.messages = list(script.said[0])
        self.turn = self.tokens = self.rewritten = 0
        self.truncated = False
        self.failure: Failure | None = None

    @property
    def finished(self) -> bool:
        """Whether no answer is to come. Rows can mark their last answer as cut, so a cut one is the last."""
        return self.failure is not None or self.truncated or self.turn == len(self.script.said)

    @property
    def place(self) -> str:
        """What tells the next answer from all others; its random numbers follow from it."""
        return f"{self.script.key}/{self.turn}"

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Take note of an `Unanswered` in the body."""
        try:
            yield
        except Unanswered as error:
            self.failure = Failure(self.script.id, self.script.place, error.reason, str(error))

    def answer(self, message: Message, tokens: int, truncated: bool) -> None:
        """Add an answer, and what is said behind it.

        Raises:
            Unanswered: there is no text in it, or it calls a tool in the middle of the conversation.
        """
        if not message["content"].strip() and "tool_calls" not in message:
            why = f"cut after {tokens} tokens: raise max_new_tokens" if truncated else "the target ended it at once"
            raise Unanswered("empty answer", f"answer {self.turn + 1} holds no text, {why}")
        self.messages.append(message)
        self.turn, self.tokens, self.truncated = self.turn + 1, self.tokens + tokens, truncated
        if not self.finished:
            if "tool_calls" in message:
                raise Unanswered("tool call", f"answer {self.turn} calls a tool, and the row holds no result for it")
            self.messages += self.script.said[self.turn]

    def row(self) -> dict[str, Any]:
        """The finished conversation as a row to be trained on, with the fields that it had beside."""
        row: dict[str, Any] = {"id": self.script.id, "messages": self.messages}
        if self.truncated:
            row["truncated"] = True
        if self.script.tools is not None:
            row["tools"] = self.script.tools
        return row | self.script.fields


Keep = Callable[[Sequence[Dialogue]], None]
"""Stores dialogues as soon as they are finished."""
