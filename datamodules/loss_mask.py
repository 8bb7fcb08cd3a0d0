"""From a conversation to token ids and loss mask: rendering by the chat template, and the spans that are supervised.

The ids are those of the whole rendering, as a serving engine sees it. Supervised are the assistant's text, its tool
calls included, and the end-of-turn token after it; not what the template writes before (the generation prompt) or
behind (a newline), for the target never does. Of the turns of other roles, on request, the content alone.

Spans come from the template's `{% generation %}` tags when it has them. Otherwise from prefixes: the turns before an
assistant turn, rendered with the generation prompt, must begin the rendering that ends with that turn, and this one
the whole rendering. A template that rewrites history (drops earlier reasoning, say) breaks that, and is refused by
name.

The content of another role's turn is what differs when the conversation is rendered again with a probe in its place.

A token counts as supervised when all its characters lie inside a span; one that straddles a border is not what the
target wrote after the prompt alone.
"""

import copy
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from dspark_lightning.datamodules.rows import BadRow, Chat, Message

Span = tuple[int, int]
"""First character, and the one after the last."""

Encoded = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]
"""Token ids and loss mask of a row, both [tokens]."""

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_PROBE = "Zq7answer"
_CHARACTERS = 16
"""A rendering with more characters than this for each token of max_length is not tokenised as a whole."""
_MARGIN = 64
"""Tokens behind the last one needed that are still tokenised: close to a cut, text may be split differently."""
_TURNS = 64
"""A conversation with more turns than this is not rendered again and again as a whole."""


class _Turn(NamedTuple):
    """An assistant turn in a rendering. `start` to `end` is supervised; behind `written` the template closes it."""

    start: int
    written: int
    end: int


class ChatRenderer:
    """Renders conversations and marks what is supervised.

    Args:
        tokenizer: A fast tokenizer; its chat template is used unless `chat_template` is given.
        chat_template: Jinja template, or None for the tokenizer's.
        template_name: How errors call the template.
        template_kwargs: Options of the template, such as `enable_thinking`.
        supervise: "all" assistant turns, or the "last" one only.
        supervise_roles: Roles whose turns are supervised; the assistant's are in any case.
        supervise_reasoning: False leaves `<think>...</think>` and the `reasoning_content` of a turn unsupervised.

    Raises:
        ValueError: A tokenizer without character offsets.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        template_name: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
        supervise: Literal["all", "last"] = "all",
        supervise_roles: Sequence[str] = ("assistant",),
        supervise_reasoning: bool = True,
    ) -> None:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if not tokenizer.is_fast:
            raise ValueError(
                f"the tokenizer {name} ({type(tokenizer).__name__}) gives no character offsets, which the loss mask "
                "needs: use a fast tokenizer (tokenizer.json)"
            )
        self.tokenizer = tokenizer
        self.template_name = template_name or f"the chat template of {name}"
        self.template_kwargs = template_kwargs or {}
        self.supervise = supervise
        self.supervise_roles = sorted(supervise_roles)
        self.supervise_reasoning = supervise_reasoning
        self._given_template = chat_template
        # Post-processors add special tokens, which the template has written already, and shorten offsets by blanks.
        self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self._backend.post_processor = None
        self._backend.no_truncation()
        self._backend.no_padding()

    @cached_property
    def template(self) -> str:
        """The Jinja source.

        Raises:
            ValueError: The tokenizer has none and none was given.
        """
        template = self.tokenizer.chat_template if self._given_template is None else self._given_template
        if isinstance(template, dict):
            template = template.get("default")
        if not template:
            found = "does not exist" if self._given_template is None else "is empty"
            raise ValueError(f"{self.template_name} {found}: give chat_template, the path of a Jinja file")
        return str(template)

    def state(self) -> list[Any]:
        """Everything that ids and masks depend on beside the conversation, as plain data."""
        template = self.tokenizer.chat_template if self._given_template is None else self._given_template
        vocabulary = hashlib.blake2b(self._backend.to_str().encode()).hexdigest()
        options = [self.template_kwargs, self.supervise, self.supervise_roles, self.supervise_reasoning]
        return [vocabulary, self.tokenizer.special_tokens_map, template, *options]

    def encode(self, chats: Sequence[tuple[str, list[Span]]]) -> list[Encoded]:
        """Tokenise renderings with their supervised spans."""
        encoded = []
        encodings = self._backend.encode_batch([text for text, _ in chats], add_special_tokens=False)
        for (_, spans), encoding in zip(chats, encodings, strict=True):
            first, last = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
            mask = np.zeros(len(first), dtype=bool)
            for start, end in spans:
                mask |= (first >= start) & (last <= end) & (last > first)
            encoded.append((np.array(encoding.ids, dtype=np.int32), mask.astype(np.uint8)))
        return encoded

    def render(self, chat: Chat, max_length: int | None = None) -> tuple[str, list[Span]]:
        """Render a conversation and find its supervised spans.

        Args:
            chat: The conversation.
            max_length: So many first tokens are needed: of a far longer rendering only a beginning is returned that
                holds them and more. None keeps it whole.

        Raises:
            BadRow: The template refuses the conversation, or an assistant turn answers nothing.
            ValueError: No trustworthy spans can be had from this template for this conversation.
        """
        text = self._render(chat.messages, chat.tools)
        _check_characters(text)
        needed, last = self._needed(text, max_length), _assistant_turns(chat.messages)[-1]
        chat, text = self._beginning(chat, text, needed)
        answers = [i for i in _assistant_turns(chat.messages) if self.supervise == "all" or i == last]
        by_tag = _GENERATION_TAG.search(self.template) is not None
        turns = (self._turns_by_tag if by_tag else self._turns_by_prefix)(chat, text, answers) if answers else []
        spans = [(turn.start, turn.end) for turn in turns]
        if chat.truncated and last in answers:
            spans[-1] = turns[-1].start, turns[-1].written
        if not self.supervise_reasoning:
            if self._hides_reasoning and any("reasoning_content" in message for message in chat.messages):
                raise self._unusable("writes reasoning_content without <think> tags: it cannot be left unsupervised")
            spans = [part for span in spans for part in _answers(text, span)]
        spans += self._other_spans(chat, text)
        if any(start == 0 for start, _ in spans):
            raise self._unusable("gives a conversation that is to be supervised from its first character on")
        return text[:needed], spans

    def render_turns(self, messages: list[Message], tools: list[Any] | None = None) -> str:
        """Render turns as they are, with nothing behind them.

        Raises:
            BadRow: The template refuses them.
        """
        return self._render(messages, tools)

    def encode_prompt(self, messages: list[Message], tools: list[Any] | None = None) -> list[int]:
        """Token ids of turns and of what the template writes before the answer to them.

        Raises:
            BadRow: The template refuses them.
        """
        text = self._render(messages, tools, add_generation_prompt=True)
        if not text:
            raise BadRow(f"{self.template_name} writes nothing for the conversation")
        _check_characters(text)
        return [token for token, _ in self.encode_text(text)]

    def encode_text(self, text: str) -> list[tuple[int, Span]]:
        """Token ids of a rendering, each with its place in the text."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return list(zip(encoding.ids, encoding.offsets, strict=True))

    def _needed(self, text: str, max_length: int | None) -> int:
        """How many first characters of a text are enough for its first max_length tokens."""
        if max_length is None:
            return len(text)
        size = _CHARACTERS * max_length
        while size < len(text):
            offsets = self._backend.encode(text[:size], add_special_tokens=False).offsets
            if len(offsets) > max_length + 2 * _MARGIN:
                return int(offsets[max_length + _MARGIN][1])
            size *= 4
        return len(text)

    def _beginning(self, chat: Chat, text: str, needed: int) -> tuple[Chat, str]:
        """The first turns of a conversation and their text, enough for so many characters of the whole text."""
        count = _TURNS
        while needed < len(text) and count < len(chat.messages):
            part = self._render(chat.messages[:count], chat.tools)
            if len(part) > needed and part.startswith(text[:needed]):
                return replace(chat, messages=chat.messages[:count]), part
            count *= 2
        return chat, text

    def _turns_by_tag(self, chat: Chat, text: str, answers: list[int]) -> list[_Turn]:
        spans = self._tags(chat.messages, chat.tools)
        if not spans:
            raise self._unusable("has {% generation %} tags, but reaches none of them in a conversation with an answer")
        if self.supervise == "last":
            before = chat.messages[: answers[-1]]
            earlier = len(self._tags(before, chat.tools)) if before else 0
            spans = spans[min(earlier, len(spans) - 1) :]
        turns = []
        for start, end in spans:
            # Tags around the bare content leave out the end-of-turn token behind it.
            outside = len(self._end_of_turn) if text.startswith(self._end_of_turn, end) else 0
            turns.append(_Turn(start, self._written_end(text, start, end), end + outside))
        return turns

    def _turns_by_prefix(self, chat: Chat, text: str, answers: list[int]) -> list[_Turn]:
        messages, tools = chat.messages, chat.tools
        turns = []
        for i in answers:
            if i == 0:
                raise BadRow("the conversation begins with an assistant turn, which answers nothing", "no question")
            prompt = self._render(messages[:i], tools, add_generation_prompt=True)
            upto = text if i + 1 == len(messages) else self._render(messages[: i + 1], tools)
            if not upto.startswith(prompt):
                raise self._unusable(
                    f"has no {{% generation %}} tags, and turn {i + 1} does not begin with the generation prompt that "
                    f"ends in {prompt[-30:]!r}: set chat_template_kwargs as in serving, or use a template with tags"
                )
            if not text.startswith(upto):
                other = ", or supervise: last" if self.supervise == "all" else ""
                raise self._unusable(
                    f"has no {{% generation %}} tags and rewrites history: turn {i + 1} of {len(messages)} reads "
                    f"differently once others follow: use a template with tags{other}"
                )
            written = self._written_end(upto, len(prompt), len(upto))
            end = written + len(self._end_of_turn) if upto.startswith(self._end_of_turn, written) else written
            turns.append(_Turn(len(prompt), written, end))
        return turns

    def _other_spans(self, chat: Chat, text: str) -> list[Span]:
        """Where the contents of supervised turns stand that are not the assistant's."""
        messages, spans = chat.messages, list[Span]()
        for i, message in enumerate(messages):
            if message["role"] == "assistant" or message["role"] not in self.supervise_roles:
                continue
            for content, probe in _with_probe(message):
                rendered = self._render([*messages[:i], probe, *messages[i + 1 :]], chat.tools)
                before, _, behind = rendered.partition(_PROBE)
                start, end = len(before), len(text) - len(behind)
                around = start <= end and text[:start] == before and text[end:] == behind and _PROBE not in behind
                if not around or text[start:end].strip() != content.strip():
                    raise self._unusable(
                        f"does not write the content of turn {i + 1} ({message['role']}) once and as it is: it cannot "
                        f"be supervised; take {message['role']} out of supervise_roles"
                    )
                spans.append((start, end))
        return spans

    def _written_end(self, text: str, start: int, end: int) -> int:
        """Where the assistant's text ends and the template's closing of the turn begins."""
        if self._end_of_turn:
            found = text.rfind(self._end_of_turn, start, end)
            return end if found < 0 else found
        return end - len(self._closing) if text.endswith(self._closing, start, end) else end

    @cached_property
    def _closing(self) -> str:
        """What the template writes behind the text of the last assistant turn."""
        before, found, closing = self._probe(content=_PROBE).rpartition(_PROBE)
        if not found:
            raise self._unusable(f"does not write the content of an answer; it gives {before + closing!r}")
        return closing

    @cached_property
    def _end_of_turn(self) -> str:
        """The closing text up to its first added token, such as "<|im_end|>"; else all but its trailing blanks."""
        tokens = [token for token in self.tokenizer.get_added_vocab() if token.strip() and token in self._closing]
        if not tokens:
            return self._closing.rstrip()
        first = min(tokens, key=lambda token: (self._closing.index(token), -len(token)))
        return self._closing[: self._closing.index(first) + len(first)]

    @cached_property
    def _hides_reasoning(self) -> bool:
        """Whether the template writes `reasoning_content`, but not as `<think>...</think>`."""
        _, found, behind = self._probe(content="b", reasoning_content=_PROBE).partition(_PROBE)
        return bool(found) and "</think>" not in behind

    def _probe(self, **answer: str) -> str:
        try:
            return self._render([{"role": "user", "content": "a"}, {"role": "assistant", **answer}], None)
        except BadRow as error:
            raise self._unusable(f"cannot render a question with its answer: {error}") from error

    def _render(self, messages: list[Message], tools: list[Any] | None, add_generation_prompt: bool = False) -> str:
        return self._rendered(messages, tools, add_generation_prompt=add_generation_prompt)[0]

    def _tags(self, messages: list[Message], tools: list[Any] | None) -> list[Span]:
        """What lies between {% generation %} tags."""
        return self._rendered(messages, tools, return_assistant_tokens_mask=True)[1]

    def _rendered(self, messages: list[Message], tools: list[Any] | None, **options: Any) -> tuple[str, list[Span]]:
        # What `apply_chat_template` calls; unlike it, this hands out where the generation tags lie in the text.
        template_kwargs = {**self.tokenizer.special_tokens_map, **self.template_kwargs}
        try:
            rendered: Any = render_jinja_template(
                conversations=[messages], tools=tools, chat_template=self.template, **options, **template_kwargs
            )
        except TemplateSyntaxError as error:
            raise ValueError(
                f"{self.template_name} is not a Jinja template: {error.message} (line {error.lineno})"
            ) from error
        except Exception as error:  # whatever the template's code may raise
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise BadRow(
                f"{self.template_name} refuses the conversation: {reason}", "refused by the template"
            ) from error
        (text,), spans = rendered
        return text, [(start, end) for start, end in spans[0]] if spans else []

    def _unusable(self, what: str) -> ValueError:
        return ValueError(f"no loss mask: {self.template_name} {what}")


def read_template(path: str) -> str:
    """Read a chat template from a Jinja file.

    Raises:
        ValueError: There is no such file, or it is no text.
    """
    if not Path(path).is_file():
        raise ValueError(f"chat_template {path!r}: no such file")
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template {path!r} cannot be read as UTF-8 text: {error}") from error


def _check_characters(text: str) -> None:
    if not text.isascii() and re.search("[\ud800-\udfff]", text):
        raise BadRow("the text holds half of a surrogate pair, which is no character", "half a character")


def _assistant_turns(messages: list[Message]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _with_probe(message: Message) -> Iterator[tuple[str, Message]]:
    """Each text of a turn, and the turn with the probe in place of it."""
    content = message["content"]
    if isinstance(content, str):
        yield content, {**message, "content": _PROBE}
        return
    for i, part in enumerate(content):
        if part["type"] == "text":
            yield part["text"], {**message, "content": [*content[:i], {**part, "text": _PROBE}, *content[i + 1 :]]}


def _answers(text: str, span: Span) -> Iterator[Span]:
    """The parts of a span outside `<think>...</think>`; the block may be open already, or never closed."""
    start, end = span
    closing, opening = text.find("</think>", start, end), text.find("<think>", start, end)
    if closing >= 0 and not start <= opening < closing:  # the generation prompt has opened the block
        start = closing + len("</think>")
    for match in _THINK.finditer(text, start, end):
        if match.start() > start:
            yield start, match.start()
        start = match.end()
    if start < end:
        yield start, end
