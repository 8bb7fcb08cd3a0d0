"""`dspark report`: one HTML page about a run."""

from pathlib import Path

from dspark_lightning.replace import write_text
from dspark_lightning.report.data import read_run
from dspark_lightning.report.page import render


def report(run: Path, output: Path | None = None) -> None:
    """Write one HTML page about a run: its training, its evaluation, its calibration and its schedule.

    `dspark report RUN` is enough. The page needs nothing beside it; it opens in any browser, and says which command
    makes what it could not show.

    Args:
        run: folder of a run, such as runs/quickstart/version_0.
        output: file to write; report.html in the run's folder when not given.
    """
    path = (run / "report.html" if output is None else output).expanduser()
    if path.is_dir():
        raise ValueError(
            f"output {str(path)!r} is a folder: give the file to write, such as {str(path / 'report.html')!r}"
        )
    write_text(path, render(read_run(run.expanduser())))
    print(f"Report written to {path} ({path.stat().st_size / 1000:,.0f} kB): open it in a browser")
