"""Rows that count more or less than others: in the loss and its denominator, nowhere else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import DataLoader

from chat_helpers import MASK_ID, chat, save_tokenizer, write_jsonl
from chat_helpers import datasets_cache as datasets_cache
from dspark_lightning import compute_dspark_loss
from dspark_lightning.datamodules import ChatDataModule
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.registry import build_draft_model
from dspark_lightning.outputs import OutputKind
from helpers import seeded, tiny_qwen3_config
from test_module import ARGS, TinyDSpark, fit, rows, trainer
from test_module import weights as weights_of

S, K = 24, 4
ALPHAS = {"loss_decay_gamma": 4.0, "ce_loss_alpha": 0.1, "l1_loss_alpha": 0.9, "confidence_head_alpha": 1.0}
LOSSES = ("loss", "ce_loss", "l1_loss", "confidence_loss")


def draft() -> DSparkDraft:
    with seeded(0):
        return build_draft_model(
            tiny_qwen3_config(initializer_range=0.2),
            mask_token_id=96,
            num_draft_layers=2,
            block_size=K,
            num_anchors=3,
            markov_rank=8,
        )


def inputs() -> dict[str, Tensor]:
    """Two rows; the anchors of the second stand where a packed row has its second document."""
    with seeded(1):
        return {
            "input_ids": torch.randint(0, 96, (2, S)),
            "target_hidden_states": torch.randn(2, S, 2 * 32),
            "loss_mask": (torch.arange(S) > 3).long().expand(2, -1),
            "target_last_hidden_states": torch.randn(2, S, 32),
            "anchor_positions": torch.tensor([[4, 9, 20], [6, 13, 0]]),
            "block_keep_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]) > 0,
        }


def solve(given: dict[str, Any], output: OutputKind = "hidden") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Terms of the loss, and the gradients of the draft's parameters."""
    model = draft()
    loss, terms = compute_dspark_loss(model(**given, output=output), **ALPHAS, return_terms=True)
    loss.backward()
    return terms, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def one_row(given: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    return {name: values[row : row + 1] for name, values in given.items()}


def by_row(*weights: float) -> Tensor:
    return torch.tensor(weights).unsqueeze(1).expand(-1, S)


@pytest.mark.parametrize("output", ["logits", "hidden"])
def test_equal_weights_change_nothing(output: OutputKind) -> None:
    plain, plain_gradients = solve(inputs(), output)
    terms, gradients = solve(inputs() | {"loss_weights": by_row(2.0, 2.0)}, output)
    for name in LOSSES:
        assert_close(terms[name], plain[name], atol=1e-6, rtol=0)
    assert_close(terms["loss_den"], 2 * plain["loss_den"])
    for name, gradient in plain_gradients.items():
        assert_close(gradients[name], gradient, atol=1e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("output", ["logits", "hidden"])
def test_the_loss_of_two_weights_follows_from_that_of_each_row(output: OutputKind) -> None:
    alone = [solve(one_row(inputs(), row), output) for row in (0, 1)]
    dens = [factor * float(terms["loss_den"]) for factor, (terms, _) in zip((1.0, 0.5), alone, strict=True)]
    terms, gradients = solve(inputs() | {"loss_weights": by_row(1.0, 0.5)}, output)
    assert float(terms["loss_den"]) == pytest.approx(sum(dens))
    for name in LOSSES:
        expected = sum(den * float(row[name]) for den, (row, _) in zip(dens, alone, strict=True)) / sum(dens)
        assert float(terms[name]) == pytest.approx(expected, abs=1e-6), name
        assert float(terms[name]) != pytest.approx(float(solve(inputs(), output)[0][name]), abs=1e-4), name
    for name, gradient in gradients.items():
        expected_gradient = sum(den * row[name] for den, (_, row) in zip(dens, alone, strict=True)) / sum(dens)
        assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_what_is_measured_does_not_know_weights() -> None:
    plain, _ = solve(inputs())
    terms, _ = solve(inputs() | {"loss_weights": by_row(1.0, 0.1)})
    measured = plain.keys() - {*LOSSES, "loss_den", *(f"{name}_num" for name in LOSSES)}
    assert {"tau_num", "accept_rate_per_pos_num", "confidence_abs_error_num", "supervised_tokens"} <= measured
    for name in measured:
        assert_close(terms[name], plain[name], msg=lambda m, n=name: f"{n}: {m}")


def test_documents_of_one_packed_row_weigh_differently() -> None:
    """A row with two documents is one without weights whose loss sums are taken apart by document."""
    packed = one_row(inputs(), 0) | {
        "anchor_positions": torch.tensor([[4, 12, 18]]),
        "position_ids": torch.cat([torch.arange(10), torch.arange(14)]).unsqueeze(0),
        "seq_lens": torch.tensor([[10, 14]]),
        "doc_remaining": torch.cat([torch.arange(9, -1, -1), torch.arange(13, -1, -1)]).unsqueeze(0),
    }
    weights = torch.tensor([[3.0] * 10 + [0.25] * 14])
    outputs = draft()(**packed, loss_weights=weights, output="hidden")
    assert outputs.block_weights is not None and outputs.block_weights.tolist() == [[3.0, 0.25, 0.25]]
    parts = []
    for keep in ([[True, False, False]], [[False, True, True]]):
        parts.append(solve(packed | {"block_keep_mask": torch.tensor(keep)})[0])
    terms, _ = solve(packed | {"loss_weights": weights})
    for name in ("ce_loss_num", "l1_loss_num", "confidence_loss_num", "loss_den"):
        expected = 3.0 * float(parts[0][name]) + 0.25 * float(parts[1][name])
        assert float(terms[name]) == pytest.approx(expected, rel=1e-5), name


def weighted_rows() -> list[dict[str, Tensor]]:
    return [row | {"loss_weights": torch.full((24,), 0.25 * (1 + i))} for i, row in enumerate(rows())]


@pytest.mark.parametrize(("batch_size", "accumulate"), [(1, 8), (4, 2)])
def test_a_window_of_weighted_rows_is_the_same_however_it_is_cut(
    tmp_path: Path, batch_size: int, accumulate: int
) -> None:
    trained = []
    for size, batches in ((8, 1), (batch_size, accumulate)):
        module = TinyDSpark(**ARGS)
        loader = DataLoader(weighted_rows(), batch_size=size)
        trainer(tmp_path, max_epochs=2, accumulate_grad_batches=batches).fit(module, loader)
        trained.append(weights_of(module))
    assert_close(trained[1], trained[0], atol=1e-5, rtol=0)
    unweighted = weights_of(fit(tmp_path, 8, max_epochs=2))
    assert any((unweighted[name] - value).abs().max() > 1e-3 for name, value in trained[0].items())


def datamodule(tmp_path: Path, rows: list[Any]) -> ChatDataModule:
    data = ChatDataModule(
        write_jsonl(tmp_path / "train.jsonl", rows),
        val_data=write_jsonl(tmp_path / "val.jsonl", [chat("v", "validate")]),
        tokenizer=save_tokenizer(tmp_path / "tokenizer"),
        mask_token_id=MASK_ID,
        batch_size=3,
    )
    data.setup("fit")
    return data


def test_weights_of_rows_come_with_the_batches(tmp_path: Path) -> None:
    tokenised = {"input_ids": [10, 11, 12], "loss_mask": [0, 1, 1], "weight": 0.5}
    data = datamodule(tmp_path, [chat("q", "one"), chat("q", "two", weight=3), tokenised, chat("q", "none", weight=0)])
    [batch] = data.train_dataloader()
    weights = dict(zip(batch["row_id"].tolist(), batch["loss_weights"], strict=True))
    assert weights.keys() == {0, 1, 2}
    for row, mask in zip(batch["row_id"].tolist(), batch["attention_mask"], strict=True):
        assert weights[row].tolist() == (mask * [1.0, 3.0, 0.5][row]).tolist()
    [unweighted] = data.val_dataloader()
    assert "loss_weights" not in unweighted


def test_weights_reach_the_loss_of_the_module() -> None:
    module = TinyDSpark(**ARGS)
    module.configure_model()
    batch = next(iter(DataLoader(weighted_rows(), batch_size=8)))
    boxed = module.on_before_batch_transfer(batch, 0)
    for given in (batch, boxed):
        outputs = module(given, output="hidden")
        expected = 0.25 * torch.arange(1.0, 9.0).unsqueeze(1).expand(outputs.block_keep_mask.shape)
        assert_close(outputs.block_weights, expected)
