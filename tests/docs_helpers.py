"""The pages of the documentation, taken apart: their blocks of code, the commands in them, their links and headings."""

import re
import subprocess
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
}

# In place of every program: note down what it was called with. `python -c` prints a word, for the line that asked.
# TARGET is what one block of the README sets for later ones.
_RECORDER = """
command_not_found_handle() {
  printf -v command '%s\\x1f' "$@"; printf '%s\\x1e' "$command" >> commands.txt  # at once: some run side by side
  if [ "$1 $2" = "python -c" ]; then echo what-python-printed; fi
}
PATH=/nowhere
TARGET=my-target
"""


@dataclass(frozen=True)
class Block:
    """One block of code."""

    page: str  # from the root of the repository
    line: int
    language: str  # "" for an indented block
    text: str

    @property
    def first_line(self) -> str:
        return self.text.splitlines()[0]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def tokens(page: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(PAGES[page].read_text())


def blocks(page: str) -> list[Block]:
    found = [token for token in tokens(page) if token.type in ("fence", "code_block")]
    return [Block(page, token.map[0] + 1, token.info.strip(), token.content) for token in found if token.map]


def links(page: str) -> list[str]:
    """Targets of links and pictures."""
    children = [child for token in tokens(page) for child in token.children or []]
    targets = [child.attrs.get("href") or child.attrs.get("src") for child in children]
    return [str(target) for target in targets if target]


def anchors(page: str) -> set[str]:
    """What can stand behind a # in a link to this page, by the rule that mkdocs and repository hosts share."""
    parsed = tokens(page)
    titles = [parsed[i + 1].children or [] for i, token in enumerate(parsed) if token.type == "heading_open"]
    plain = ["".join(child.content for child in title) for title in titles]
    ascii_only = [unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode() for text in plain]
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text).strip().lower()) for text in ascii_only}


def commands(text: str, folder: Path) -> list[list[str]]:
    """The command lines of a shell block as the programs would get them; bash runs the block, but no program.

    Args:
        text: of the block.
        folder: to run it in.
    """
    record = folder / "commands.txt"
    record.write_text("")
    shell = ["bash", "-eu", "-c", _RECORDER + text]
    run = subprocess.run(shell, cwd=folder, capture_output=True, text=True, check=False, timeout=30)
    assert run.returncode == 0 and not run.stderr, f"{text}{run.stderr}"
    return [line.split("\x1f")[:-1] for line in record.read_text().split("\x1e")[:-1]]
