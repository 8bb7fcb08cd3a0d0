"""AcceptanceMetric: known values, and independence of batches, ranks, casts and pickling."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from dspark_lightning.loss import compute_dspark_loss
from dspark_lightning.metrics import AcceptanceMetric, acceptance_compute
from dspark_lightning.outputs import DSparkForwardOutput
from fakes import ALPHAS, fake_terms
from helpers import load_case

LOSS_ARGS = {"loss_decay_gamma": 4.0, **ALPHAS}  # as in the golden case


def golden_outputs() -> tuple[DSparkForwardOutput, dict[str, Tensor]]:
    expected = load_case("draft/qwen3_vanilla").expected
    given = {name: expected[name] for name in DSparkForwardOutput._fields if name in expected}
    return DSparkForwardOutput(**given), expected


def rows(outputs: DSparkForwardOutput, start: int, stop: int) -> DSparkForwardOutput:
    return DSparkForwardOutput(*(None if value is None else value[start:stop] for value in outputs))  # type: ignore[arg-type]


def filled(*batches: dict[str, Tensor], block_size: int = 2) -> AcceptanceMetric:
    metric = AcceptanceMetric(block_size, **ALPHAS)
    for terms in batches:
        metric.update(terms)
    return metric


def assert_same(values: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert values.keys() == others.keys()
    for name, value in values.items():
        torch.testing.assert_close(value, others[name], rtol=1e-5, atol=1e-6, msg=name)


def test_golden_values_by_name() -> None:
    outputs, expected = golden_outputs()
    values = filled(compute_dspark_loss(outputs=outputs, **LOSS_ARGS, return_terms=True)[1], block_size=5).compute()
    for name in ("loss", "ce_loss", "l1_loss", "confidence_loss"):
        assert values[name].item() == pytest.approx(expected[f"term.{name}"].item(), rel=1e-5)
    assert values["accept_rate@1"].item() == pytest.approx(4.659259 / 12, rel=1e-5)
    assert values["accept_rate@4"].item() == pytest.approx(3.968110 / 10, rel=1e-5)
    assert values["tau"].item() == pytest.approx(19.055815 / 12, rel=1e-5)
    assert values["confidence_bias"].item() == pytest.approx(15.204338 / 36.052025, rel=1e-5)
    assert values["confidence_abs_error"].item() == pytest.approx(15.387211 / 36.052025, rel=1e-5)
    assert values["confidence_cumprod_bias"].item() == pytest.approx(14.092061 / 36.052025, rel=1e-5)
    assert values["supervised_tokens"].item() == outputs.eval_mask.sum().item()
    assert values["kept_anchors"].item() == outputs.block_keep_mask.sum().item()


def test_loss_is_the_weighted_sum_of_its_terms() -> None:
    outputs, _ = golden_outputs()
    values = filled(compute_dspark_loss(outputs=outputs, **LOSS_ARGS, return_terms=True)[1], block_size=5).compute()
    weighted = 0.1 * values["ce_loss"] + 0.9 * values["l1_loss"] + values["confidence_loss"]
    assert values["loss"].item() == pytest.approx(weighted.item(), rel=1e-6)


def test_accept_rate_weighs_slots_not_positions() -> None:
    values = filled(fake_terms(0), fake_terms(2)).compute()
    assert values["accept_rate@1"].item() == 0.5
    assert values["accept_rate@2"].item() == 0.25
    assert values["accept_rate"].item() == pytest.approx((0.5 * 6 + 0.25 * 4) / 10)


def test_batch_split_does_not_matter() -> None:
    outputs, _ = golden_outputs()
    parts = [outputs, rows(outputs, 0, 1), rows(outputs, 1, 2)]
    whole, first, second = [compute_dspark_loss(outputs=x, **LOSS_ARGS, return_terms=True)[1] for x in parts]
    assert_same(filled(first, second, block_size=5).compute(), filled(whole, block_size=5).compute())


def test_ranks_are_summed() -> None:
    rank0, rank1 = filled(fake_terms(0), fake_terms(5)), filled(fake_terms(3))
    other = iter([rank1.nums, rank1.dens, rank1.counts])
    rank0.sync(dist_sync_fn=lambda state, group: [state, next(other)], distributed_available=lambda: True)
    merged = acceptance_compute(rank0.nums, rank0.dens, rank0.counts, rank0.alphas)
    assert_same(merged, filled(fake_terms(0), fake_terms(5), fake_terms(3)).compute())


def test_zero_denominator_is_left_out() -> None:
    terms = {name: torch.zeros_like(value) for name, value in fake_terms(1).items()}
    assert filled(terms).compute().keys() == {"supervised_tokens", "kept_anchors"}


def test_position_never_reached_is_left_out() -> None:
    terms = fake_terms(1) | {"accept_rate_per_pos_den": torch.tensor([4.0, 0.0])}
    values = filled(terms).compute()
    assert "accept_rate@1" in values
    assert "accept_rate@2" not in values


def test_no_confidence_head_and_no_teacher_leave_their_values_out() -> None:
    names = ("ce_loss_num", "loss_den", "supervised_tokens", "kept_anchors")
    values = filled({name: fake_terms(2)[name] for name in names}).compute()
    assert values.keys() == {"ce_loss", "loss", "supervised_tokens", "kept_anchors"}
    assert values["loss"].item() == pytest.approx(0.1 * 6 / 4)


def test_a_cast_of_the_module_around_it_changes_nothing() -> None:
    metric = AcceptanceMetric(2, **ALPHAS)
    module = nn.ModuleDict({"metric": metric, "layer": nn.Linear(1, 1)}).to(torch.bfloat16)
    for _ in range(600):
        metric.update(fake_terms(1))
    module.to(torch.bfloat16)
    values = metric.compute()
    assert module["layer"].weight.dtype == torch.bfloat16
    assert (metric.nums.dtype, metric.counts.dtype) == (torch.float32, torch.int64)
    assert values["supervised_tokens"].item() == 600 * 5
    assert values["tau"].item() == pytest.approx(3.5 / 3)


def test_pickle_and_copy_keep_the_sums() -> None:
    metric = filled(fake_terms(1))
    for twin in (pickle.loads(pickle.dumps(metric)), copy.deepcopy(metric)):
        twin.update(fake_terms(4))
        assert_same(twin.compute(), filled(fake_terms(1), fake_terms(4)).compute())


def test_reset_forgets() -> None:
    metric = filled(fake_terms(7))
    metric.reset()
    metric.update(fake_terms(1))
    assert_same(metric.compute(), filled(fake_terms(1)).compute())


def test_terms_of_another_block_size_are_refused() -> None:
    with pytest.raises(ValueError, match="2 positions, but the metric was made for block_size 7"):
        filled(fake_terms(1), block_size=7)
