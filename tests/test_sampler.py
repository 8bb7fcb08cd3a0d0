import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils.data.distributed import DistributedSampler

from dspark_lightning.datamodules.sampler import FILLER, ResumableSampler, RowLoader


def sampler(rows: int, batch_size: int = 1, *, shuffle: bool = True, epoch: int = 0, **kwargs: int) -> ResumableSampler:
    made = ResumableSampler(range(rows), batch_size, shuffle=shuffle, **kwargs)
    made.set_epoch(epoch)
    return made


def batches(made: ResumableSampler, batch_size: int) -> list[list[int]]:
    rows = list(made)
    return [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]


def test_lightning_takes_it_for_its_own() -> None:
    assert isinstance(sampler(3), DistributedSampler)


def test_order_depends_on_seed_and_epoch_only() -> None:
    orders = {(seed, epoch): tuple(sampler(9, seed=seed, epoch=epoch)) for seed in range(3) for epoch in range(3)}
    assert len(set(orders.values())) == 9  # seed + epoch would give 5
    assert all(sorted(order) == list(range(9)) for order in orders.values())
    torch.manual_seed(1)
    assert tuple(sampler(9, batch_size=3, seed=1, epoch=2)) == orders[1, 2]


@pytest.mark.parametrize("rows", [8, 11])
def test_two_ranks_see_in_each_step_what_one_rank_sees(rows: int) -> None:
    one = batches(sampler(rows, 4, seed=5, epoch=1), 4)
    ranks = [batches(sampler(rows, 2, seed=5, epoch=1, num_replicas=2, rank=rank), 2) for rank in (0, 1)]
    assert [left + right for left, right in zip(*ranks, strict=True)] == one


def test_training_leaves_out_the_incomplete_global_batch() -> None:
    made = sampler(11, 2, num_replicas=2, rank=1)
    assert len(made) == len(list(made)) == 4
    with pytest.raises(
        ValueError, match=r"^3 training rows do not fill one global batch of 4 \(batch_size 2 x 2 ranks\)"
    ):
        sampler(3, 2, num_replicas=2)


@pytest.mark.parametrize("rows", range(1, 13))
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_validation_sees_every_row_once_in_equally_many_steps(rows: int, ranks: int) -> None:
    made = [sampler(rows, 2, shuffle=False, num_replicas=ranks, rank=rank) for rank in range(ranks)]
    seen = [list(one) for one in made]
    assert {len(one) for one in seen} == {len(made[0])}
    assert sorted(row for one in seen for row in one if row != FILLER) == list(range(rows))
    assert sum(row == FILLER for one in seen for row in one) == -rows % ranks


def test_one_rank_validates_in_the_order_of_the_rows() -> None:
    assert list(sampler(5, 2, shuffle=False, epoch=3)) == [0, 1, 2, 3, 4]


class FakeTrainer:
    """Epoch and batches trained, as a trainer counts them."""

    def __init__(self, epoch: int = 0, trained: int = 0) -> None:
        self.epoch, self.trained = epoch, trained

    def __call__(self) -> tuple[int, int]:
        return self.epoch, self.trained


def resumable(progress: Callable[[], tuple[int, int]], rows: int = 10, batch_size: int = 2) -> ResumableSampler:
    return ResumableSampler(range(rows), batch_size, shuffle=True, seed=7, progress=progress)


def test_resume_skips_what_was_trained_not_what_was_fetched() -> None:
    trainer = FakeTrainer(epoch=1, trained=5)
    made = resumable(trainer)
    fetched = [row for row, _ in zip(made, range(8), strict=False)]  # four batches, as workers do
    trainer.trained += 2
    state = made.state_dict(batches_per_epoch=5)
    layout = {"seed": 7, "pack_tokens": 0, "num_rows": 10, "global_batch_size": 2}
    assert state == {"epoch": 1, "batches": 2, "pending": 0, **layout}

    resumed = resumable(trainer)
    resumed.load_state_dict(state)
    assert list(resumed)[:4] == fetched[4:]
    assert len(resumed) == 10  # of the whole epoch
    trainer.epoch = 2
    assert len(list(resumed)) == 10


def test_state_counts_on_after_a_resume() -> None:
    trainer = FakeTrainer(epoch=1, trained=107)
    made = resumable(trainer)
    made.load_state_dict(made.state_dict(5) | {"epoch": 1, "batches": 3})
    assert made.state_dict(5)["batches"] == 3  # nothing has run yet
    next(iter(made))
    trainer.trained += 1
    assert made.state_dict(5)["batches"] == 4
    trainer.trained += 1
    assert (made.state_dict(5)["epoch"], made.state_dict(5)["batches"]) == (2, 0)


def test_state_counts_the_batches_since_the_last_optimizer_step() -> None:
    trainer = FakeTrainer()
    made = resumable(trainer)
    next(iter(made))
    pending = []
    for trainer.trained in range(6):
        pending.append(made.state_dict(5, accumulate_grad_batches=3)["pending"])
    assert pending == [0, 1, 2, 0, 1, 0]  # the last batch of an epoch always steps


def test_an_epoch_trained_to_its_end_gives_no_rows_again() -> None:
    made = resumable(FakeTrainer(epoch=1))
    made.load_state_dict(made.state_dict(5) | {"epoch": 2, "batches": 0})
    assert list(made) == []
    assert made.state_dict(5)["epoch"] == 2


@pytest.mark.parametrize(
    ("name", "then", "message"),
    [
        ("seed", 3, "in the middle of epoch 4 with seed 3, this run has 7: resume with 3"),
        ("num_rows", 12, "with num_rows 12, this run has 10"),
        ("global_batch_size", 4, "with global_batch_size 4 (batch_size x ranks), this run has 2"),
    ],
)
def test_another_order_is_refused_inside_an_epoch_only(name: str, then: int, message: str) -> None:
    made = resumable(FakeTrainer())
    state = made.state_dict(5) | {"epoch": 4, name: then}
    made.load_state_dict(state)
    with pytest.raises(ValueError, match=re.escape(message)):
        made.load_state_dict(state | {"batches": 1})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loader_reads_the_order_at_the_first_batch(num_workers: int) -> None:
    trainer = FakeTrainer()
    loader = RowLoader(range(10), batch_size=2, sampler=resumable(trainer), num_workers=num_workers)
    early: Iterator[torch.Tensor] = iter(loader)
    trainer.epoch = 1
    expected = list(resumable(FakeTrainer(epoch=1)))
    assert torch.cat(list(early)).tolist() == expected
