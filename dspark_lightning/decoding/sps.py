"""SPS: how many decoding steps a second a target makes, by the number of tokens in a step.

Shapes: R users, K drafted tokens, n any.
"""

import json
import math
import statistics
import time
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.progress import track
from transformers import PreTrainedModel

from dspark_lightning.decoding.cached_target import cache_argument, empty_cache
from dspark_lightning.replace import write_text
from dspark_lightning.target import HFDSparkTargetModel
from dspark_lightning.typed_json import parse

_WARM_UP, _TIMED = 2, 7  # steps
_PREFILL_TOKENS = 8192  # at once, over all sequences

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SpsCurve:
    """Steps per second over batch tokens; the fields are those of the JSON file.

    Between samples the seconds of a step are linear in its tokens. Below the first sample a step takes as long as there
    (few tokens are no faster: the weights are read all the same), above the last one the last line goes on.

    Raises:
        ValueError: what is wrong with the samples.
    """

    sample_batch_tokens: list[int]  # increasing
    sample_steps_per_sec: list[float]  # at each of them
    max_batch_tokens: int  # what a step can hold

    def __post_init__(self) -> None:
        tokens, rates, limit = self.sample_batch_tokens, self.sample_steps_per_sec, self.max_batch_tokens
        if not _all_numbers(tokens, int) or not _all_numbers(rates, (int, float)) or not _all_numbers([limit], int):
            raise ValueError(
                "sample_batch_tokens must be a list of integers, sample_steps_per_sec one of numbers, max_batch_tokens "
                f"an integer, got {tokens!r}, {rates!r}, {limit!r}"
            )
        if not tokens or len(tokens) != len(rates):
            raise ValueError(
                "sample_batch_tokens and sample_steps_per_sec must have one entry for each sample, got "
                f"{len(tokens)} and {len(rates)}"
            )
        if tokens[0] < 1 or any(a >= b for a, b in pairwise(tokens)):
            raise ValueError(f"sample_batch_tokens must increase from 1 or more, got {tokens}")
        if any(not 0 < rate < math.inf for rate in rates):
            raise ValueError(f"sample_steps_per_sec must all be positive, got {rates}")
        if limit < 1:
            raise ValueError(f"max_batch_tokens must be 1 or more, got {limit}")

    def seconds(self, tokens: Ints) -> Floats:
        """Seconds of a step with so many tokens [n]."""
        places, known = np.array(self.sample_batch_tokens, float), 1 / np.array(self.sample_steps_per_sec, float)
        slope = (known[-1] - known[-2]) / (places[-1] - places[-2]) if len(places) > 1 else 0.0
        beyond = np.maximum(tokens - places[-1], 0)
        return np.asarray(np.interp(tokens, places, known) + max(slope, 0.0) * beyond)

    def steps_per_second(self, tokens: Ints) -> Floats:
        """Steps a second with so many tokens [n]; 0 above max_batch_tokens, so that no search goes there."""
        return np.where(tokens > self.max_batch_tokens, 0.0, 1 / self.seconds(tokens))


def _all_numbers(values: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(values, list) and all(isinstance(x, kind) and not isinstance(x, bool) for x in values)


def write_sps(path: Path, curve: SpsCurve) -> None:
    """Write a curve as JSON."""
    write_text(path, json.dumps(asdict(curve)) + "\n")


def read_sps(path: Path) -> SpsCurve:
    """Read a curve.

    Raises:
        ValueError: the file cannot be read, or holds no curve; names it.
    """
    needed = {field.name for field in fields(SpsCurve)}
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the SPS curve {str(path)!r}: {error}") from error
    if not isinstance(content, dict) or set(content) != needed:
        found = ", ".join(sorted(content)) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{str(path)!r} is no SPS curve: it must hold {', '.join(sorted(needed))}, found {found}")
    try:
        return SpsCurve(**content)
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no SPS curve: {error}") from error


def measure_sps(target: PreTrainedModel, users: int, block_size: int, context: int) -> SpsCurve:
    """Measure a target's curve on the device where it is.

    Up to `users` tokens, each belongs to a sequence of its own, as in decoding without a draft; above, all `users`
    sequences have as many tokens each, as where a draft's blocks are verified. A step is what verification needs of the
    target: its features and the logits of all tokens, behind `context` cached ones. Sizes double; each takes the median
    of 7 steps, which follow each other as in decoding, and no longer than a larger one, to which it could be padded:
    noise must not stop Algorithm 1.

    Args:
        target: a causal LM; it is put into eval mode and frozen.
        users: sequences at most, R.
        block_size: drafted tokens at most, K; a curve ends at R (K + 1).
        context: tokens before, in every sequence.

    Raises:
        ValueError: a number below 1, or too little memory on the device for a size.
    """
    if min(users, block_size, context) < 1:
        raise ValueError(
            f"measuring needs at least 1 user, drafted token and token before, got {users}, {block_size}, {context}"
        )
    model = HFDSparkTargetModel(target, [0])  # any feature will do
    shapes = [(rows, 1) for rows in _doubling(users)] + [(users, each) for each in _doubling(block_size + 1)[1:]]
    seconds = [_median_seconds(model, rows, each, context) for rows, each in track(shapes, "Measuring")]
    least = np.minimum.accumulate(seconds[::-1])[::-1]
    return SpsCurve([rows * each for rows, each in shapes], (1 / least).tolist(), users * (block_size + 1))


def _doubling(last: int) -> list[int]:
    """1, 2, 4, ... below `last`, and `last`."""
    return [2**i for i in range(last.bit_length()) if 2**i < last] + [last]


def _median_seconds(model: HFDSparkTargetModel, rows: int, each: int, context: int) -> float:
    """Seconds of a step that takes tokens [rows, each]."""
    device, vocabulary = model.model.device, model.model.config.get_text_config().vocab_size
    count = context + each * (_WARM_UP + _TIMED)
    tokens = torch.randint(vocabulary, (rows, count), generator=torch.Generator().manual_seed(0)).to(device)
    prompt, blocks = tokens[:, :context], tokens[:, context:].split(each, dim=1)
    cache, seconds = {cache_argument(model.decoder): empty_cache(model)}, []
    try:
        for piece in prompt.split(max(1, _PREFILL_TOKENS // rows), dim=1):
            model.decode(piece, cache)
        for block in blocks:
            start = _now(device)
            with torch.inference_mode():
                model.compute_logits(model.decode(block, cache)[1])
            seconds.append(_now(device) - start)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"{device} ran out of memory measuring {rows} sequences of {context} tokens: take fewer users"
        ) from error
    return statistics.median(seconds[_WARM_UP:])


def _now(device: torch.device) -> float:
    """The clock, once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
