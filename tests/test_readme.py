"""The README's Python runs as it stands, and the commands and tables of all pages name what exists."""

import re
from pathlib import Path

import pytest

from dspark_lightning import DSPARK_DRAFT_REGISTRY

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_examples_in_python_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    training, decoding = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(training, "README.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    tau = float(re.search(r"tau (\d\.\d\d)", printed)[1])  # type: ignore[index]
    assert 1.0 < tau <= 8.0
    assert (tmp_path / "drafts/dspark-draft/model.safetensors").exists()
    exec(compile(decoding, "README.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "the target's own answer: True" in printed
    assert float(printed.rpartition(": ")[2]) > 1


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_configurations_exist(page: Path) -> None:
    links = [page.parent / link for link in re.findall(r"\]\(([^)#]+)\)", page.read_text())]
    configs = [ROOT / path for path in re.findall(r"--config (configs/\S+\.yaml)", page.read_text())]
    assert links and configs
    assert [path for path in links + configs if not path.exists()] == []


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
