"""Answers in process, by the target in transformers.

Rows of similar length are answered together, padded on the left, and go through all their turns together. Which rows
those are follows from the data and the batch size alone, not from what was answered before a kill: a resumed run
repeats the very same batches, so its answers are those of an unbroken one in every precision.

Shapes: B rows, S prompt tokens, L new tokens.
"""

from collections.abc import Sequence, Set
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dspark_lightning.datamodules.loss_mask import ChatRenderer
from dspark_lightning.datamodules.rows import BadRow, Message
from dspark_lightning.datamodules.tokenizer import padding_token_id
from dspark_lightning.decoding.generate import end_tokens
from dspark_lightning.decoding.sampling import place_generator
from dspark_lightning.decoding.settings import check_positions
from dspark_lightning.offload import input_device
from dspark_lightning.regeneration.dialogue import Dialogue, Keep, Unanswered
from dspark_lightning.regeneration.sampling import SampleByRow, Sampling
from dspark_lightning.regeneration.scripts import Failure, Script
from dspark_lightning.target import reads_left_padded


class LocalTarget:
    """Answers scripts with a target that is loaded here.

    Args:
        model: the target; it is put into eval mode.
        renderer: writes prompts as they are trained.
        sampling: what was asked for.
        seed: the random numbers of an answer follow from it, the row's id and the turn.
    """

    def __init__(self, model: PreTrainedModel, renderer: ChatRenderer, sampling: Sampling, seed: int) -> None:
        cast(nn.Module, model).eval()
        self.model, self.renderer, self.seed = model, renderer, seed
        self.stops = set(end_tokens(model))
        self.pad = padding_token_id(renderer.tokenizer)
        self.device = input_device(model.get_input_embeddings())
        self.settings = sampling.resolve(model.generation_config)
        self.settings.eos_token_id, self.settings.pad_token_id = sorted(self.stops) or None, self.pad
        assert self.settings.max_new_tokens is not None
        self.max_new_tokens: int = self.settings.max_new_tokens

    def groups(self, scripts: Sequence[Script], size: int) -> tuple[list[list[Script]], list[Failure]]:
        """Put scripts together that are answered together, those with the longest prompts first.

        Args:
            scripts: all of them, also those that have been answered.
            size: of a group; targets that see padding before a row get groups of one.

        Returns:
            the groups, and the scripts whose first prompt cannot be had.
        """
        dialogues = [Dialogue(script) for script in scripts]
        lengths: dict[str, int] = {}
        for each in dialogues:
            with each.failing():
                lengths[each.script.key] = len(self.prompt(each))
        failed = [each.failure for each in dialogues if each.failure is not None]
        able = [script for script in scripts if script.key in lengths]
        able.sort(key=lambda script: (-lengths[script.key], script.key))
        size = size if reads_left_padded(self.model.config) else 1
        return [able[i : i + size] for i in range(0, len(able), size)], failed

    def answer(self, groups: Sequence[Sequence[Script]], done: Set[str], keep: Keep) -> None:
        """Answer groups of scripts.

        Args:
            groups: of which those are left out that have been answered as a whole.
            done: the keys of the scripts that have been answered; where others of their group have not, they are
                played along, but not kept again.
            keep: is given the dialogues of each group.
        """
        for group in groups:
            if any(script.key not in done for script in group):
                dialogues = [Dialogue(script) for script in group]
                self.play(dialogues)
                keep([each for each in dialogues if each.script.key not in done])

    def play(self, dialogues: Sequence[Dialogue]) -> None:
        """Play dialogues to their ends, turn by turn together."""
        while active := [each for each in dialogues if not each.finished]:
            prompts: dict[Dialogue, list[int]] = {}
            for each in active:
                with each.failing():
                    prompts[each] = self.prompt(each)
            answers = self.generate(list(prompts.values()), [each.place for each in prompts])
            for (each, prompt), tokens in zip(prompts.items(), answers, strict=True):
                with each.failing():
                    self._add(each, prompt, tokens)

    def prompt(self, dialogue: Dialogue) -> list[int]:
        """Token ids that the next answer of a dialogue follows.

        Raises:
            Unanswered: the template refuses the turns, or the answer could grow longer than the target can read.
        """
        try:
            prompt = self.renderer.encode_prompt(dialogue.messages, dialogue.script.tools)
        except BadRow as error:
            raise Unanswered("refused by the chat template", str(error)) from error
        try:
            check_positions(self.model.config, len(prompt), self.max_new_tokens)
        except ValueError as error:
            raise Unanswered("too long for the target", str(error)) from error
        return prompt

    def generate(self, prompts: Sequence[Sequence[int]], places: Sequence[str]) -> list[list[int]]:
        """Continue prompts.

        Args:
            prompts: B lists of token ids.
            places: what tells each answer from all others; its random numbers follow from it.

        Returns:
            the new tokens of each, a stop token included; without one the answer was cut.
        """
        if not prompts:
            return []
        input_ids, attention_mask = self._pad(prompts)
        options: dict[str, Any] = {}
        if self.settings.do_sample:
            generators = [place_generator(self.seed, place, self.device) for place in places]
            options["custom_generate"] = SampleByRow(generators)
        try:
            output = cast(Any, self.model).generate(
                input_ids, attention_mask=attention_mask, generation_config=self.settings, **options
            )
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"no memory for {len(prompts)} rows of {input_ids.shape[1]} prompt tokens and {self.max_new_tokens} "
                "new ones: set a smaller batch_size, and the run goes on where it stopped"
            ) from error
        new = output[:, input_ids.shape[1] :].tolist()
        return [row[: next((i + 1 for i, token in enumerate(row) if token in self.stops), len(row))] for row in new]

    def _pad(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Token ids and attention mask, both [B, S], padded on the left."""
        longest = max(map(len, prompts))
        ids = [[self.pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return torch.tensor(ids, device=self.device), torch.tensor(mask, device=self.device)

    def _add(self, dialogue: Dialogue, prompt: list[int], tokens: list[int]) -> None:
        """Add an answer to a dialogue as text, and look whether the text gives its tokens back."""
        truncated = not tokens or tokens[-1] not in self.stops
        written = tokens if truncated else tokens[:-1]
        text = self.renderer.tokenizer.decode(written, skip_special_tokens=True)
        message: Message = {"role": "assistant", "content": text}
        dialogue.rewritten += not self._reads_back(dialogue, message, [*prompt, *written])
        dialogue.answer(message, len(tokens), truncated)

    def _reads_back(self, dialogue: Dialogue, message: Message, tokens: list[int]) -> bool:
        try:
            text = self.renderer.render_turns([*dialogue.messages, message], dialogue.script.tools)
        except BadRow:
            return False
        read = [token for token, _ in self.renderer.encode_text(text)]
        return read[: len(tokens)] == tokens
