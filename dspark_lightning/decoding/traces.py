"""What decoded rounds tell a simulation of serving, as arrays.

Shapes: N rounds of all answers, K block size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark_lightning.decoding.records import AnswerRecord, block_size, check_whole_blocks
from dspark_lightning.decoding.row import Round
from dspark_lightning.decoding.sps import Floats, Ints
from dspark_lightning.evaluation.reliability import sigmoid


@dataclass(frozen=True)
class Traces:
    """Rounds that were decoded with whole blocks."""

    proposed: Ints  # [N]
    accepted: Ints  # [N]
    gained: Ints  # [N], tokens of the answer: those accepted and the one behind them, unless a stop token was accepted
    confidence: Floats | None  # [N, K], calibrated; NaN where nothing was proposed; None without a confidence head
    answers: list[Ints]  # the numbers of each answer's rounds
    block_size: int  # K


def build_traces(records: Sequence[AnswerRecord], temperatures: Sequence[float] | None = None) -> Traces:
    """Collect the rounds of decoded answers.

    Args:
        records: decoded with whole blocks.
        temperatures: K, by which the confidence logits are divided; None leaves these as they are.

    Raises:
        ValueError: nothing was drafted, blocks were cut by a threshold, or numbers do not belong together.
    """
    size = block_size(records)
    answers = [record for record in records if record.accepted]  # one token alone takes no round
    if not answers or not size:
        raise ValueError("the decode records hold no drafted token: decode answers of several tokens with a draft")
    rounds = [each for record in answers for each in record.rounds]
    proposed = np.array([each.proposed for each in rounds])
    accepted = np.array([each.accepted for each in rounds])
    gained, ends = accepted + 1, np.cumsum([len(record.accepted) for record in answers])
    gained[ends - 1] -= [_cut_by_stop(record, size) for record in answers]
    return Traces(
        proposed=proposed,
        accepted=accepted,
        gained=gained,
        confidence=_confidence(rounds, size, temperatures),
        answers=np.split(np.arange(len(rounds)), ends[:-1]),
        block_size=size,
    )


def _cut_by_stop(record: AnswerRecord, size: int) -> int:
    """1 if a drafted stop token ended the answer, so that no token came behind it, else 0."""
    check_whole_blocks(record, size)
    end = 1 + sum(record.accepted) + len(record.accepted)  # the first token comes with the prompt
    cut = end - record.new_tokens
    if cut not in (0, 1):
        raise ValueError(
            f"the decode record of conversation {record.conversation}, turn {record.turn} of {record.dataset!r} has "
            f"{record.new_tokens} new tokens, but its rounds gave {end}"
        )
    return cut


def _confidence(rounds: Sequence[Round], size: int, temperatures: Sequence[float] | None) -> Floats | None:
    """Calibrated confidences [N, K], NaN behind what was proposed."""
    logits = [each.confidence for each in rounds if each.confidence is not None]
    if len(logits) < len(rounds):
        return None
    if lengths := {len(row) for row in logits} - {size}:
        raise ValueError(f"the decode records have confidences of {min(lengths)} and of {size} tokens: use one draft's")
    if temperatures is not None and len(temperatures) != size:
        raise ValueError(
            f"{len(temperatures)} temperatures do not fit blocks of {size} tokens: take those of this draft"
        )
    scaled = np.array(logits) / (1.0 if temperatures is None else np.array(temperatures))
    proposed = np.array([each.proposed for each in rounds])
    return np.where(np.arange(size) < proposed[:, None], sigmoid(scaled), np.nan)
