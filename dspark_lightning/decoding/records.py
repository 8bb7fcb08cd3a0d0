"""Decode records: what happened in every round of every answer. Evaluation, calibration and scheduling read them.

A file has one JSON object a line, one for each answer, with the fields of `AnswerRecord`.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

from dspark_lightning.decoding.row import Round
from dspark_lightning.replace import write_text
from dspark_lightning.typed_json import build, parse


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
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder: give the records.jsonl in it")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the decode records {str(path)!r}: {error}") from error
    records = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]
    if not records:
        raise ValueError(f"{str(path)!r} holds no decode records: write some with dspark evaluate")
    _check_same_draft(records, path)
    return records


def _parse(line: str, where: str) -> AnswerRecord:
    try:
        record = build(AnswerRecord, parse(line))
        problem = _problem(record)
    except ValueError as error:
        problem = str(error)
    if problem:
        raise ValueError(f"{where} is no decode record as dspark evaluate writes them: {problem}")
    return record


def _problem(record: AnswerRecord) -> str | None:
    """What cannot be true of an answer."""
    rounds = list(zip(record.proposed, record.judged, record.accepted, strict=False))
    if not len(record.proposed) == len(record.judged) == len(record.accepted):
        return "proposed, judged and accepted are not of one length"
    for proposed, judged, accepted in rounds:
        if not 0 <= accepted <= judged <= proposed:
            return f"a round proposed {proposed} tokens, of which {judged} were judged and {accepted} accepted"
    if min(record.conversation, record.turn, record.prompt_tokens, record.new_tokens - 1, record.seconds) < 0:
        return "a count or a time is below what it can be"
    if record.confidence is not None:
        sizes = {len(row) for row in record.confidence}
        if len(record.confidence) != len(rounds) or len(sizes) > 1 or (sizes and min(sizes) < max(record.proposed)):
            return "confidence is not one list of K numbers for each round"
    return None


def _check_same_draft(records: Sequence[AnswerRecord], path: Path) -> None:
    """Refuse answers of drafts with other blocks or other heads."""
    sizes = {None if each.confidence is None else len(each.confidence[0]) for each in records if each.proposed}
    if len(sizes) > 1:
        named = ", ".join("none" if size is None else str(size) for size in sizes)
        raise ValueError(f"{str(path)!r} holds confidences of several drafts (tokens in a round: {named})")


def records_digest(path: Path) -> str:
    """Tells one file of records from another."""
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def check_whole_blocks(record: AnswerRecord, size: int) -> None:
    """Refuse blocks that a confidence threshold cut: what their other tokens were worth is not known.

    Blocks are shorter only where the answer may have no more tokens: to this place reach all of them, and no others go
    further. Those that a threshold cut do not.

    Args:
        record: of an answer.
        size: K.

    Raises:
        ValueError: names the answer.
    """
    starts = list(accumulate((count + 1 for count in record.accepted), initial=1))  # the first token has no round
    reach = [start + count for start, count in zip(starts, record.proposed, strict=False)]
    if any(end < max(reach) for end, count in zip(reach, record.proposed, strict=True) if count < size):
        raise ValueError(
            f"the decode record of conversation {record.conversation}, turn {record.turn} of {record.dataset!r} has "
            "blocks that were cut: decode with whole blocks, without a confidence threshold"
        )


def block_size(records: Sequence[AnswerRecord]) -> int:
    """K, as far as the records tell: of the confidences, else the longest proposal."""
    sizes = [len(each.confidence or ()) or each.proposed for record in records for each in record.rounds]
    return max(sizes, default=0)
