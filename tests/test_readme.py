"""The README's Python runs as it stands, and its commands name what exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_for_a_lightning_project_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    tau = float(re.search(r"tau (\d\.\d\d)", printed)[1])  # type: ignore[index]
    assert 1.0 < tau <= 8.0
    assert (tmp_path / "drafts/dspark-draft/model.safetensors").exists()


def test_links_and_configurations_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    configs = re.findall(r"--config (configs/\S+\.yaml)", README)
    assert links and configs
    assert [path for path in links + configs if not (ROOT / path).exists()] == []
