"""The overlays of configs/strategy, each on top of every configuration."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import DDPStrategy

from dspark_lightning.cli import run_lightning
from dspark_lightning.strategies import DSparkFSDP2Strategy, DSparkFSDPStrategy
from test_cli import CONFIGS

OVERLAYS = sorted((Path(__file__).parent.parent / "configs" / "strategy").glob("*.yaml"))
CLASSES = {"ddp": DDPStrategy, "fsdp": DSparkFSDPStrategy, "fsdp2": DSparkFSDP2Strategy}
QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"


@pytest.fixture(scope="module")
def parser() -> LightningArgumentParser:
    """That of the command, as it is once it has built everything."""
    return run_lightning([f"--config={QUICKSTART}", "--trainer.logger=false"], run=False).parser


@pytest.fixture(scope="module")
def merged(parser: LightningArgumentParser) -> Callable[..., dict[str, Any]]:
    """All settings that some files give together, defaults included."""

    @cache
    def settings(*paths: Path) -> dict[str, Any]:
        given = parser.parse_args([f"--config={path}" for path in paths])
        given.pop("config")
        loaded: dict[str, Any] = given.as_dict()
        return loaded

    return settings


def test_there_is_an_overlay_for_each_strategy() -> None:
    assert [path.stem for path in OVERLAYS] == sorted(CLASSES)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_an_overlay_changes_the_strategy_and_nothing_else(
    overlay: Path, path: Path, merged: Callable[..., dict[str, Any]]
) -> None:
    before, after = merged(path), merged(path, overlay)
    strategy = yaml.safe_load(overlay.read_text())["trainer"]["strategy"]
    assert after["trainer"]["strategy"]["class_path"] == strategy["class_path"]
    assert after["trainer"]["strategy"]["init_args"].items() >= strategy["init_args"].items()
    assert without_strategy(after) == without_strategy(before)


def without_strategy(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"trainer": {k: v for k, v in settings["trainer"].items() if k != "strategy"}}


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_the_strategy_is_built(overlay: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    strategy = run_lightning([f"--config={QUICKSTART}", f"--config={overlay}"], run=False).trainer.strategy
    assert type(strategy) is CLASSES[overlay.stem]
    if isinstance(strategy, DDPStrategy):
        assert strategy._ddp_kwargs["gradient_as_bucket_view"] and not strategy._ddp_kwargs["find_unused_parameters"]


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_an_overlay_says_what_it_is_for_and_how_it_is_used(overlay: Path) -> None:
    first, second, *_ = overlay.read_text().splitlines()
    assert first.startswith("# ") and first.endswith(".")
    assert second == f"#   dspark fit --config configs/qwen3_4b.yaml --config configs/strategy/{overlay.name}"
    assert yaml.safe_load(overlay.read_text()).keys() == {"trainer"}
