"""How answers are sampled: settings, and random numbers that belong to each row.

`generate` draws the tokens of a whole batch from one source of random numbers, so what a row gets depends on which
rows stand beside it. Here each row has its own: the largest of log p + Gumbel noise is a sample from p, so noise
is added behind everything else that shapes the distribution, and the largest score is taken. An answer then depends
neither on the batch it is in, nor on what was answered before.

Shapes: B rows, S tokens, V vocabulary.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from dspark_lightning.decoding.settings import check_max_new_tokens, check_temperature

MAX_NEW_TOKENS = 1024
"""Of targets that recommend no number."""

_UNRELATED = (  # fields of a generation config that do not change answers, or are always the same here
    "transformers_version",
    "_from_model_config",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "num_beams",
    "num_return_sequences",
    "pad_token_id",
)


@dataclass(frozen=True)
class Sampling:
    """What was asked for; None leaves it to what the target recommends.

    Raises:
        ValueError: a value out of range.
    """

    temperature: float | None = None  # 0 is greedy
    top_p: float | None = None
    top_k: int | None = None  # 0 takes all tokens
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.temperature is not None:
            check_temperature(self.temperature)
        if self.max_new_tokens is not None:
            check_max_new_tokens(self.max_new_tokens)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all tokens) or more, got {self.top_k}")
        for name, value in (("top_p", self.top_p), ("top_k", self.top_k)):
            if self.temperature == 0 and value is not None:
                raise ValueError(f"{name} {value} has no effect at temperature 0: leave one of them out")

    def resolve(self, recommended: GenerationConfig | None) -> GenerationConfig:
        """What `generate` is told: all that the target recommends, under what was asked for.

        top_k is 0 where neither names one, as in serving engines; `generate` alone would take 50.

        Args:
            recommended: the generation config that came with the target.
        """
        config = copy.deepcopy(recommended) if recommended is not None else GenerationConfig()
        asked = (self.temperature, self.top_p, self.top_k)
        sampled = any(value is not None for value in asked) or bool(config.do_sample)
        config.do_sample = sampled and self.temperature != 0
        for name, asked_for, usual in zip(("temperature", "top_p", "top_k"), asked, (1.0, 1.0, 0), strict=True):
            there = getattr(config, name) if asked_for is None else asked_for
            setattr(config, name, (usual if there is None else there) if config.do_sample else None)
        config.max_new_tokens = self.max_new_tokens or config.max_new_tokens or MAX_NEW_TOKENS
        config.max_length = None
        config.num_beams = config.num_return_sequences = 1
        return config


def describe_sampling(config: GenerationConfig) -> dict[str, Any]:
    """All that shapes a target's answers, as plain data; what the config leaves open is left out."""
    return {
        name: value for name, value in config.to_diff_dict().items() if name not in _UNRELATED and value is not None
    }


class SampleByRow:
    """What `generate` takes as `custom_generate`: its own loop, with random numbers of each row.

    Args:
        generators: B sources of random numbers, on the device of the prompts.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.noise = RowNoise(generators)

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,  # [B, S]
        logits_processor: LogitsProcessorList,
        generation_config: GenerationConfig,
        **others: Any,
    ) -> Tensor:
        """Returns the prompts and their answers, [B, S + L]."""
        processors = LogitsProcessorList([*logits_processor, self.noise])
        generation_config.do_sample = False  # the largest of the noisy scores is the sample
        tokens: Tensor = model._sample(
            input_ids, logits_processor=processors, generation_config=generation_config, **others
        )
        return tokens


class RowNoise(LogitsProcessor):
    """Adds Gumbel noise to scores, from one source of random numbers for each row.

    Args:
        generators: B of them, on the device of the scores.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = generators

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [B, V] whose largest entry is a sample from their softmax."""
        del input_ids
        noise = torch.empty_like(scores, dtype=torch.float32)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        # -log of an exponential is Gumbel; 0 would make it infinite, also where a token is ruled out
        return scores - noise.clamp_min_(torch.finfo(torch.float32).tiny).log_()
