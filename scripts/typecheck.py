"""Run mypy --strict over the package as it is installed, the benchmarks and the scripts.

mypy knows neither setuptools' package-dir nor `__path__`: pointed at the checkout it does not find callbacks/ and
datamodules/, or skips them in silence. So it reads a scratch tree of links laid out like the wheel.

    python scripts/typecheck.py
"""

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def link_installed_layout(tree: Path) -> None:
    """Link the files of every package folder of pyproject.toml into `tree`, where the wheel has them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for package, folder in settings["tool"]["setuptools"]["package-dir"].items():
        inside = tree.joinpath(*package.split("."))
        inside.mkdir(exist_ok=True)
        for entry in (ROOT / folder).iterdir():
            (inside / entry.name).symlink_to(entry)


def main() -> int:
    """Check the linked tree.

    Returns:
        mypy's exit status.
    """
    with tempfile.TemporaryDirectory() as scratch:
        link_installed_layout(Path(scratch))
        for folder in ("benchmarks", "scripts"):
            (Path(scratch) / folder).symlink_to(ROOT / folder)
        options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
        command = [sys.executable, "-m", "mypy", *options, "dspark_lightning", "benchmarks", "scripts"]
        return subprocess.run(command, cwd=scratch, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
