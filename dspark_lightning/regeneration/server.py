"""One server that speaks the OpenAI chat protocol (vLLM, SGLang, llama.cpp and others), and what it is asked.

A server that fails pauses as a whole, longer each time; one that fails `retries` times more in a row is given up. The
client's own retries are off: they would ask the same server again, and no other could take over meanwhile.
"""

import asyncio
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import openai
from openai.types.chat import ChatCompletion

from dspark_lightning.datamodules.rows import Message
from dspark_lightning.decoding.sampling import place_seed
from dspark_lightning.regeneration.dialogue import Dialogue, Unanswered
from dspark_lightning.regeneration.sampling import Sampling
from dspark_lightning.typed_json import parse

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds that a server is left alone after its first failure, and at most."""

_UNUSABLE = (401, 403, 404)  # status codes with which every request would end
_PASSING = (408, 409, 425, 429)  # as those of 500 and more: the same request may succeed later
_STOPPED = ("abort", "error")  # reasons of vLLM and SGLang for an answer that they did not finish


@dataclass(frozen=True)
class ServerSettings:
    """How servers are asked.

    Raises:
        ValueError: a value out of range.
    """

    urls: Sequence[str]  # such as http://localhost:8000/v1
    concurrency: int = 32  # requests at a time, of each server
    retries: int = 5
    timeout: float = 600.0  # seconds for one answer

    def __post_init__(self) -> None:
        if not self.urls:
            raise ValueError("server is empty: give the address of at least one")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"server {url!r} is no address: must be like http://localhost:8000/v1")
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be 1 or more, got {self.concurrency}")
        if self.retries < 0:
            raise ValueError(f"retries must be 0 or more, got {self.retries}")
        if not 0 < self.timeout < float("inf"):
            raise ValueError(f"timeout must be above 0 seconds, got {self.timeout}")


@dataclass(frozen=True)
class Request:
    """What is the same in all requests. Values that are None are not sent: the server then takes its own."""

    model: str
    sampling: Sampling
    seed: int | None = None
    template_kwargs: Mapping[str, Any] | None = None

    def arguments(self, dialogue: Dialogue) -> dict[str, Any]:
        """Arguments of the client's call for the next answer of a dialogue."""
        sampling, script = self.sampling, dialogue.script
        seed = None if self.seed is None else place_seed(self.seed, f"{script.key}/{dialogue.turn}")
        options = {
            "tools": script.tools,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            "seed": seed,
        }
        beyond = {"top_k": sampling.top_k, "chat_template_kwargs": self.template_kwargs}  # the protocol itself
        return {
            "model": self.model,
            "messages": [_as_sent(message) for message in dialogue.messages],
            "extra_body": {name: value for name, value in beyond.items() if value is not None},
            **{name: value for name, value in options.items() if value is not None},
        }


@dataclass(frozen=True)
class Reply:
    """What came back for one request."""

    message: Message
    tokens: int  # 0 where the server does not count
    truncated: bool


class Server:
    """One server, and how it is doing.

    Args:
        url: of its API.
        settings: of all servers.
    """

    def __init__(self, url: str, settings: ServerSettings) -> None:
        key = os.environ.get("OPENAI_API_KEY") or "none"
        self.url, self.retries = url, settings.retries
        timeout = openai.Timeout(settings.timeout, connect=min(settings.timeout, 10.0))
        self.client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=timeout)
        self.failures = 0  # in a row
        self.problem = ""
        self._failed_at, self._resumes_at = 0.0, 0.0

    @property
    def given_up(self) -> bool:
        """Whether it failed too often in a row."""
        return self.failures > self.retries

    @property
    def pause(self) -> float:
        """Seconds that it is to be left alone."""
        return self._resumes_at - time.monotonic()

    def succeeded(self) -> None:
        """Note an answer."""
        self.failures = 0

    def failed(self, began: float, problem: str, wait: float = 0.0) -> None:
        """Note a failure. Requests that were under way when the server first failed count once together.

        Args:
            began: when the request was sent.
            problem: what went wrong.
            wait: seconds that the server asked for.
        """
        if began < self._failed_at or self.given_up:
            return
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**self.failures) * random.uniform(0.5, 1.0)
        self.failures, self.problem, self._failed_at = self.failures + 1, problem, time.monotonic()
        self._resumes_at = self._failed_at + max(pause, min(wait, LONGEST_PAUSE))

    async def ask(self, arguments: Mapping[str, Any]) -> Reply:
        """Send one request, and note how it went.

        Raises:
            Passing: something that may succeed later.
            Unanswered: the server refuses this request, or would not finish the answer.
            ValueError: the server refuses all requests.
        """
        began = time.monotonic()
        try:
            reply = await self._ask(arguments)
        except Passing as error:
            self.failed(began, str(error), error.wait)
            raise
        self.succeeded()
        return reply

    async def _ask(self, arguments: Mapping[str, Any]) -> Reply:
        try:
            reply: ChatCompletion = await self.client.chat.completions.create(**arguments)
        except openai.APIStatusError as error:
            raise self._refusal(error) from error
        except openai.APIError as error:  # no connection, a lost one, no answer in time, or none that can be read
            raise Passing(_first_line(f"{error.message} {error.__cause__ or ''}")) from error
        except json.JSONDecodeError as error:
            raise Passing("the reply is no JSON") from error
        if not isinstance(reply, ChatCompletion) or not reply.choices:
            raise Passing("the reply holds no answer")
        return _read(reply)

    def _refusal(self, error: openai.APIStatusError) -> Exception:
        """What an error that the server sent means."""
        status, text = error.status_code, _first_line(error.message)
        if status in _UNUSABLE:
            hint = "; the key is read from OPENAI_API_KEY" if status in (401, 403) else ""
            return ValueError(f"server {self.url!r} refuses all requests: {text}{hint}")
        if status in _PASSING or status >= 500:
            wait = error.response.headers.get("retry-after", "")
            return Passing(text, float(wait) if wait.isdecimal() else 0.0, busy=status == 429)
        return Unanswered("refused by the server", text)


class Passing(Exception):
    """A request failed in a way that may pass.

    Args:
        problem: what went wrong.
        wait: seconds that the server asked for.
        busy: whether the server only had too much to do, which is no fault of the row's.
    """

    def __init__(self, problem: str, wait: float = 0.0, busy: bool = False) -> None:
        super().__init__(problem)
        self.wait, self.busy = wait, busy


def served_model(settings: ServerSettings) -> str:
    """The one model that the first server offers.

    Raises:
        ValueError: it cannot be asked, or offers several.
    """
    return asyncio.run(_served_model(settings))


async def _served_model(settings: ServerSettings) -> str:
    server = Server(settings.urls[0], settings)
    try:
        names = [model.id async for model in server.client.models.list()]
    except openai.APIError as error:
        raise ValueError(f"server {server.url!r} does not tell its models: {_first_line(error.message)}") from error
    finally:
        await server.client.close()
    if len(names) != 1:
        raise ValueError(f"server {server.url!r} offers {names}: give the one to ask as target")
    return names[0]


def _as_sent(message: Message) -> Message:
    """A turn as the protocol has it: what a tool is called with is text there."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function") or {})
        if not isinstance(function.get("arguments", ""), str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({"type": "function", **call, "function": function})
    return {**message, "tool_calls": calls}


def _read(reply: Any) -> Reply:
    """The answer in a reply, of which the client has not checked that it is what the protocol says."""
    try:
        choice = reply.choices[0]
        message, reason = _message_of(choice.message), choice.finish_reason
        tokens = int((reply.usage and reply.usage.completion_tokens) or 0)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise Passing(_first_line(f"the reply cannot be read: {error}")) from error
    if reason in _STOPPED:
        raise Passing(f"the server stopped in the middle of the answer: finish_reason {reason!r}")
    if reason == "content_filter":
        raise Unanswered("cut by a content filter", "the server has filtered the answer")
    return Reply(message, tokens, reason == "length")


def _message_of(reply: Any) -> Message:
    """An answer as chat templates read it."""
    message: Message = {"role": "assistant", "content": reply.content or ""}
    further = reply.model_extra or {}
    reasoning = further.get("reasoning_content") or further.get("reasoning")
    for text in (message["content"], reasoning or ""):
        if not isinstance(text, str):
            raise TypeError(f"its text is of type {type(text).__name__}")
    if reasoning:
        message["reasoning_content"] = reasoning
    if reply.tool_calls:
        message["tool_calls"] = [_call(call.model_dump(exclude_none=True, warnings=False)) for call in reply.tool_calls]
    return message


def _call(call: dict[str, Any]) -> dict[str, Any]:
    # Where the target wrote none or no JSON, or the server has read it already, it stays as it is.
    with suppress(KeyError, TypeError, ValueError):
        call["function"]["arguments"] = parse(call["function"]["arguments"])
    return call


def _first_line(text: str) -> str:
    return (text.strip() or "no reason given").splitlines()[0][:300]
