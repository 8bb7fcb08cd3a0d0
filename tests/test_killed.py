"""Commands that are killed at random moments: given again, they end as if nothing had been."""

from pathlib import Path

import pytest

from fault_kinds import KINDS, Stage
from kill_helpers import moments

KILLS = 2
"""Of a command before it may end."""
ROUNDS = [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 10))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("round_", ROUNDS)
def test_a_killed_command_goes_on_to_the_end_of_an_unbroken_one(
    kind: str,
    round_: int,
    stage: Stage,
    tmp_path: Path,
) -> None:
    arguments, look, same = KINDS[kind]
    whole, seconds = stage.unbroken(kind)
    folder = tmp_path / "run"
    stage.prepare(kind, folder)
    for moment in moments(KILLS, seconds, f"{kind} {round_}"):
        ended = stage.commands.run(folder, arguments, kill_after=moment)
        assert ended.code in (-9, 0), ended.output[-3000:]  # what is left may be done sooner
        look(folder)
    stage.commands.finish(folder, arguments)
    look(folder)
    same(folder, whole)
