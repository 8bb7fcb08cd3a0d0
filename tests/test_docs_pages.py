"""What the pages point at exists, the site builds, and their tables name what there is."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs_helpers import PAGES, ROOT, anchors, links
from dspark_lightning import DSPARK_DRAFT_REGISTRY


def dead_links(page: str) -> list[str]:
    """Relative links of a page to a file, or to a heading of a page, that is not there."""
    dead = []
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        file = (PAGES[page].parent / path).resolve() if path else PAGES[page]
        inside = file.is_relative_to(ROOT) and file.exists()
        if not inside or (anchor and anchor not in anchors(str(file.relative_to(ROOT)))):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES)
def test_no_link_is_dead(page: str) -> None:
    assert dead_links(page) == []


def test_dead_links_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `name`: it's [here](#one-name-its-here)\n\n[a](#two) [b](b.md) ![c](c.png) [d](https://d)\n")
    monkeypatch.setitem(PAGES, "page.md", page)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert dead_links("page.md") == ["#two", "b.md", "c.png"]


@pytest.mark.parametrize("page", PAGES)
def test_configurations_that_are_named_exist(page: str) -> None:
    named = set(re.findall(r"configs/[\w./-]+\.yaml", PAGES[page].read_text()))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_front_page_leads_everywhere() -> None:
    """The README names every guide and what lies beside it."""
    guides = {page for page in PAGES if page.startswith("docs/") and not page.startswith("docs/api/")}
    assert (guides | {"CHANGELOG.md", "CONTRIBUTING.md", "NOTICE", "LICENSE"}) - set(links("README.md")) == set()


def build_site(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` does."""
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def test_the_site_builds_and_fetches_nothing(tmp_path: Path) -> None:
    run = build_site(ROOT, tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    for page in PAGES:
        if page.startswith("docs/"):
            html = (tmp_path / page.removeprefix("docs/")).with_suffix(".html").read_text()
            fetched = re.findall(r"<(?:link|script|img|iframe)[^>]*(?:src|href)=\"?(https?:[^\" >]*)", html)
            assert fetched == [], page
    callbacks = (tmp_path / "api/callbacks.html").read_text()
    assert 'id="dspark_lightning.callbacks.DraftExport"' in callbacks and "dirpath" in callbacks


@pytest.mark.slow
def test_a_dead_link_a_lost_page_and_a_drifted_docstring_end_the_build(tmp_path: Path) -> None:
    for name in ("callbacks", "datamodules", "configs", "pyproject.toml", "mkdocs.yml"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("docs", "scripts", "dspark_lightning"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("assets"))
    (tmp_path / "docs/lost.md").write_text("# Lost\n\n[x](nowhere.md) [y](data.md#nothing)\n")
    with (tmp_path / "docs/api/target.md").open("a") as page:
        page.write("\n::: dspark_lightning.drafted\n")
    with (tmp_path / "dspark_lightning/__init__.py").open("a") as code:
        code.write('\ndef drafted(new: int) -> None:\n    """Do.\n\n    Args:\n        old: a number.\n    """\n')
    run = build_site(tmp_path, tmp_path / "site")
    assert run.returncode == 1
    for named in ("lost.md", "nowhere.md", "#nothing", "'old'"):
        assert named in run.stderr, run.stderr


def test_the_table_of_targets_is_complete() -> None:
    """Every family's row names its classes, every type that is dispatched on is there, and every configuration."""
    table = (ROOT / "docs" / "targets.md").read_text()
    specs = set(DSPARK_DRAFT_REGISTRY.values())
    assert len(specs) >= 6
    for spec in specs:
        if spec.model_class.__module__.startswith("dspark_lightning."):
            assert f"`{spec.model_class.__name__}`, `{spec.model_class.__name__.removesuffix('Model')}`" in table
    configs = {str(path.relative_to(ROOT / "configs").with_suffix("")) for path in (ROOT / "configs").rglob("*.yaml")}
    pairs = {name for name in configs if not name.startswith("strategy/")}
    assert [name for name in pairs - {"quickstart"} if f"`{name}`" not in table] == []
