"""The run as a whole: find what is done, keep what comes in, and say how it ended."""

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn

from dspark_lightning.regeneration.dialogue import Dialogue, Keep
from dspark_lightning.regeneration.output import OutputFiles, PartialFile
from dspark_lightning.regeneration.scripts import Failure, Script, Scripts
from dspark_lightning.regeneration.tally import Tally, failure_table


class Job:
    """Rows to be answered, and the files they go to.

    Args:
        rows: of the data.
        files: of the output.
    """

    def __init__(self, rows: Scripts, files: OutputFiles) -> None:
        self.rows, self.files = rows, files
        self.done: set[str] = set()  # keys of the rows answered in runs before
        self._seconds = 0.0
        self._claim: Callable[[], object] = lambda: None

    def begin(self, settings: Mapping[str, Any], about: Mapping[str, Any]) -> set[str]:
        """Find what has been answered before; arguments and errors as for `OutputFiles.begin`."""
        identity = {**settings, "rows": f"{len(self.rows.scripts)}, digest {self.rows.digest}"}
        done = self.files.begin(identity, about)
        self._claim = partial(self.files.claim, identity, about)
        print(f"Settings: {', '.join(f'{name} {value}' for name, value in settings.items() if value is not None)}")
        if done:
            print(f"{len(done):,} of {len(self.rows.scripts):,} rows have been answered before")
        return done

    @property
    def unanswered(self) -> list[Script]:
        """What runs before have left."""
        return [script for script in self.rows.scripts if script.key not in self.done]

    def collect(self, answer: Callable[[Keep], None], rank: int, total: int) -> Tally:
        """Store dialogues as they are finished.

        Args:
            answer: hands finished dialogues to what it is given.
            rank: number of this process; the first shows a progress bar.
            total: rows that this process will answer.

        Raises:
            ValueError: another run writes the same output, or it cannot be written.
        """
        tally = Tally()
        if not total:
            return tally
        with closing(PartialFile(self.files.partial(rank))) as file, _progress(total, rank == 0) as show:
            self._claim()  # where `begin` was called

            def keep(dialogues: Sequence[Dialogue]) -> None:
                file.append(each.row() for each in dialogues if each.failure is None)
                tally.add(dialogues)
                show(tally)

            began = time.monotonic()
            answer(keep)
            self._seconds = time.monotonic() - began
        return tally

    def conclude(self, tally: Tally, refused: Sequence[Failure], given_up: Sequence[str] = ()) -> int:
        """Write the output, unless rows are left that no server could take, and say how it ended.

        Args:
            tally: of all processes.
            refused: rows that could not even be asked.
            given_up: what is wrong with the servers, if none was left.

        Returns:
            the exit code of the command: 1 if a row has no answer.
        """
        output = self.files.output
        failures = [*self.rows.refused, *refused, *tally.failed]
        known = self.done | tally.keys | {str(failure.id) for failure in failures}
        left = [script for script in self.rows.scripts if script.key not in known]
        failures += [Failure(each.id, each.place, "no server is left", "; ".join(given_up)) for each in left]
        if tally.keys or tally.failed:
            print(tally.summary(self._seconds))
        if left:
            self.files.list_failures(failures)
            print(f"{len(left):,} rows are left, but no server is. Give the same command again to go on")
        else:
            count = self.files.finish((script.key for script in self.rows.scripts), failures)
            complete = "is complete" if not (tally.keys or failures) else "written"
            print(f"{output} {complete}: {count:,} of {len(self.rows.scripts) + len(self.rows.refused):,} rows")
        if failures:
            Console().print(failure_table(failures))
            print(f"They are listed in {self.files.failures}; the same command tries them again")
        if output.exists():
            command = ["dspark", "fit", "--config", "CONFIG", "--data.init_args.train_data", str(output)]
            print(f"Next: {shlex.join(command)}")
        return 1 if failures else 0


@contextmanager
def _progress(total: int, visible: bool) -> Iterator[Callable[[Tally], None]]:
    """A progress bar on stderr, which is shown what was counted so far."""
    speed = TextColumn("{task.completed}/{task.total} rows, {task.fields[speed]:,.0f} tokens/s")
    columns = (*Progress.get_default_columns(), speed)
    began = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as progress:
        task = progress.add_task("Answering", total=total, speed=0.0)

        def show(tally: Tally) -> None:
            seconds = max(time.monotonic() - began, 1e-9)
            progress.update(task, completed=len(tally.keys) + len(tally.failed), speed=tally.tokens / seconds)

        yield show
