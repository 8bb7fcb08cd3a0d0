"""What became of the rows of a run: counts, and a table of those that failed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.markup import escape
from rich.table import Table

from dspark_lightning.regeneration.dialogue import Dialogue
from dspark_lightning.regeneration.scripts import Failure


@dataclass
class Tally:
    """What was answered."""

    keys: set[str] = field(default_factory=set)  # of the rows answered
    answers: int = 0
    tokens: int = 0
    truncated: int = 0
    rewritten: int = 0  # answers with other tokens once the chat template has written them
    failed: list[Failure] = field(default_factory=list)

    def add(self, dialogues: Iterable[Dialogue]) -> None:
        """Count finished dialogues."""
        for each in dialogues:
            if each.failure is not None:
                self.failed.append(each.failure)
                continue
            self.keys.add(each.script.key)
            self.answers += each.turn
            self.tokens += each.tokens
            self.truncated += each.truncated
            self.rewritten += each.rewritten

    def include(self, other: "Tally") -> None:
        """Add what another process has answered."""
        self.keys |= other.keys
        self.answers += other.answers
        self.tokens += other.tokens
        self.truncated += other.truncated
        self.rewritten += other.rewritten
        self.failed += other.failed

    def summary(self, seconds: float) -> str:
        """In a line or two for people.

        Args:
            seconds: that the answers took.
        """
        text = (
            f"Answered {len(self.keys):,} rows: {self.answers:,} answers, {self.truncated:,} of them cut at the token "
            f"limit, {self.tokens:,} tokens in {seconds:,.0f} s ({self.tokens / max(seconds, 1e-9):,.0f} tokens/s)"
        )
        if self.rewritten:
            text += f"\n{self.rewritten:,} of {self.answers:,} answers read differently when rendered again"
        return text


def failure_table(failures: Sequence[Failure]) -> Table:
    """The rows without an answer, counted by reason, with the first of each as an example."""
    table = Table("reason", "rows", "for example", title="Rows without an answer")
    for reason in dict.fromkeys(failure.reason for failure in failures):
        same = [failure for failure in failures if failure.reason == reason]
        table.add_row(escape(reason), f"{len(same):,}", escape(f"{same[0].place}: {same[0].detail}"))
    return table
