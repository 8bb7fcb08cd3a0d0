"""The quickstart learns what the README says it learns."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "quickstart_figures.py"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_drafter_is_worth_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    figures = runpy.run_path(str(SCRIPT))
    quickstart = figures["train"]()
    tau = figures["held_out_tau"](quickstart)
    assert tau >= 3.0
    assert figures["held_out_tau_without_context"](quickstart) <= 0.7 * tau
    assert figures["held_out_tau"](figures["train"]("--model.init_args.markov_rank=0")) < tau - 0.05
