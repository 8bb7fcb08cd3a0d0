"""Decode records: what happened in every round of every answer. Evaluation, calibration and scheduling read them.

A file has one JSON object a line, one for each answer, with the fields of `AnswerRecord`.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dspark_lightning.decoding.row import Round
from dspark_lightning.replace import write_text


@dataclass(frozen=True)
class AnswerRecord:
    """One answer, round by round."""

    dataset: str
    conversation: int  # number of its line in the dataset's file, from 0
    turn: int  # from 0
    prompt_tokens: int  # with all turns before
    new_tokens: int  # in the answer, its stop token included
    proposed: list[int]  # of each round, tokens that the target verified behind the anchor
    judged: list[int]  # of these, up to and with the token that ended the answer
    accepted: list[int]  # of these
    confidence: (
        list[list[float]] | None
    )  # of each round, confidence logits of all K drafted tokens; None without a head
    seconds: float  # for the whole answer, prompt included
    plain_seconds: float | None  # the target alone on the same prompt; None when not measured
    plain_tokens: int | None  # which it gave
    same_as_plain: bool | None = None  # whether they are the answer, at temperature 0

    @property
    def rounds(self) -> list[Round]:
        """The rounds one by one."""
        known: Sequence[list[float] | None] = self.confidence or [None] * len(self.proposed)
        return [Round(*each) for each in zip(self.proposed, self.judged, self.accepted, known, strict=True)]


def write_records(path: Path, records: Iterable[AnswerRecord]) -> None:
    """Write one line for each answer."""
    write_text(path, "".join(json.dumps(asdict(record)) + "\n" for record in records))


def read_records(path: Path) -> list[AnswerRecord]:
    """Read what `write_records` wrote.

    Raises:
        ValueError: the file cannot be read, or a line of it; names file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the decode records {str(path)!r}: {error}") from error
    records = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]
    if not records:
        raise ValueError(f"{str(path)!r} holds no decode records: write some with dspark evaluate")
    return records


def _parse(line: str, where: str) -> AnswerRecord:
    try:
        record = AnswerRecord(**json.loads(line))
        consistent = len(record.rounds) == len(record.accepted) and all(
            0 <= each.accepted <= each.judged <= each.proposed for each in record.rounds
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} is no decode record as dspark evaluate writes them: {error}") from error
    if not consistent:
        raise ValueError(f"{where} is no decode record: a round accepted more tokens than were proposed")
    return record


def block_size(records: Sequence[AnswerRecord]) -> int:
    """K, as far as the records tell: of the confidences, else the longest proposal."""
    sizes = [len(each.confidence or ()) or each.proposed for record in records for each in record.rounds]
    return max(sizes, default=0)
