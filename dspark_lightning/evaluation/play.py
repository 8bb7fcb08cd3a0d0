"""Playing conversations: the target answers turn by turn, with the draft's help, and every round is recorded."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_lightning.datamodules.loss_mask import ChatRenderer
from dspark_lightning.datamodules.prompts import Conversation
from dspark_lightning.datamodules.rows import BadRow, Message
from dspark_lightning.decoding.generate import end_tokens
from dspark_lightning.decoding.plain import decode_plainly
from dspark_lightning.decoding.records import AnswerRecord
from dspark_lightning.decoding.row import DecodedRow
from dspark_lightning.decoding.sampling import place_generator
from dspark_lightning.decoding.settings import check_decoding, check_positions, check_threshold
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.target import HFDSparkTargetModel


@dataclass(frozen=True)
class DecodeSettings:
    """How answers are decoded.

    Raises:
        ValueError: a value out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0  # 0 is greedy
    confidence_threshold: float = 0.0  # see `speculative_generate`
    seed: int = 0  # an answer's random numbers follow from it and from the answer's place in the data
    compare: bool = True  # whether the target also answers alone, to be timed

    def __post_init__(self) -> None:
        check_decoding(self.max_new_tokens, self.temperature, self.confidence_threshold)


class Player:
    """Plays conversations with one pair.

    Args:
        target: captures the draft's features.
        draft: in eval mode, on the target's device and in its dtype.
        renderer: writes prompts as they are trained.
        settings: of the decoding.

    Raises:
        ValueError: a threshold for a draft without a confidence head.
    """

    def __init__(
        self, target: HFDSparkTargetModel, draft: DSparkDraft, renderer: ChatRenderer, settings: DecodeSettings
    ) -> None:
        check_threshold(draft, settings.confidence_threshold)
        self.target, self.draft, self.renderer, self.settings = target, draft, renderer, settings
        self.device = draft.fc.weight.device
        self.stops = set(end_tokens(target.model))

    def play(self, conversation: Conversation) -> Iterator[AnswerRecord]:
        """Answer the questions one after the other, each behind the answers before.

        Raises:
            ValueError: the template refuses the conversation, or it grows longer than the target can read.
        """
        messages = list(conversation.before)
        for turn, question in enumerate(conversation.questions):
            messages.append({"role": "user", "content": question})
            prompt = self._prompt(conversation, messages)
            self._check_length(conversation, len(prompt))
            record, tokens = self._answer(conversation, turn, prompt)
            yield record
            answer = self.renderer.tokenizer.decode(tokens, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer})

    def warm_up(self, conversation: Conversation) -> None:
        """Decode a little and forget it, so that what the first call costs falls on no answer."""
        prompt = self._prompt(
            conversation, [*conversation.before, {"role": "user", "content": conversation.questions[0]}]
        )
        self._decode(prompt, 2 * self.draft.block_size, self._generator("warm-up"))
        self._decode_plainly(prompt, 2, self._generator("warm-up"))

    def _answer(self, conversation: Conversation, turn: int, prompt: Tensor) -> tuple[AnswerRecord, list[int]]:
        place, most = f"{conversation.dataset}/{conversation.index}/{turn}", self.settings.max_new_tokens
        start = self._clock()
        row = self._decode(prompt, most, self._generator(place))
        seconds = self._clock() - start
        alone, alone_seconds = None, None
        if self.settings.compare:
            start = self._clock()
            alone = self._decode_plainly(prompt, most, self._generator(place))
            alone_seconds = self._clock() - start
        known = [each.confidence for each in row.rounds if each.confidence is not None]
        record = AnswerRecord(
            dataset=conversation.dataset,
            conversation=conversation.index,
            turn=turn,
            prompt_tokens=len(prompt),
            new_tokens=len(row.tokens),
            proposed=[each.proposed for each in row.rounds],
            judged=[each.judged for each in row.rounds],
            accepted=[each.accepted for each in row.rounds],
            confidence=known if self.draft.enable_confidence_head else None,
            seconds=seconds,
            plain_seconds=alone_seconds,
            plain_tokens=None if alone is None else len(alone),
            same_as_plain=None if alone is None or self.settings.temperature else alone == row.tokens,
        )
        return record, row.tokens

    def _prompt(self, conversation: Conversation, messages: list[Message]) -> Tensor:
        try:
            return torch.tensor(self.renderer.encode_prompt(messages, conversation.tools), device=self.device)
        except BadRow as error:
            raise ValueError(f"{conversation.place}: {error}") from error

    def _decode(self, prompt: Tensor, most: int, generator: torch.Generator) -> DecodedRow:
        settings = self.settings
        row = DecodedRow(
            self.target, self.draft, prompt, settings.temperature, settings.confidence_threshold, generator
        )
        row.run(most, self.stops)
        return row

    def _decode_plainly(self, prompt: Tensor, most: int, generator: torch.Generator) -> list[int]:
        return decode_plainly(self.target, prompt, most, self.settings.temperature, self.stops, generator)

    def _generator(self, place: str) -> torch.Generator:
        return place_generator(self.settings.seed, place, self.device)

    def _clock(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _check_length(self, conversation: Conversation, prompt_tokens: int) -> None:
        try:
            check_positions(self.target.model.config, prompt_tokens, self.settings.max_new_tokens)
        except ValueError as error:
            raise ValueError(f"{conversation.place}: {error}") from error
