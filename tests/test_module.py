"""DSparkModule under a real Trainer, against tiny random targets."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from dspark_lightning.families import Qwen3DSpark
from dspark_lightning.loss import EPS, compute_dspark_loss
from dspark_lightning.module import DSparkModule
from helpers import seeded, tiny_qwen3

ARGS: dict[str, Any] = {
    "target": "tiny",
    "mask_token_id": 96,
    "num_draft_layers": 2,
    "block_size": 4,
    "num_anchors": 4,
    "markov_rank": 8,
    "warmup_ratio": 0.0,
}


class TinyDSpark(Qwen3DSpark):
    """Brings its target as an object, through the hook for that."""

    target_seed = 0

    def load_target(self) -> PreTrainedModel:
        return tiny_qwen3(self.target_seed)


def rows(count: int = 8, length: int = 24) -> list[dict[str, torch.Tensor]]:
    """Random rows; every row supervises another stretch, so that batches weigh differently."""
    with seeded(3):
        return [
            {
                "input_ids": torch.randint(3, 90, (length,)),
                "attention_mask": torch.ones(length, dtype=torch.int64),
                "loss_mask": (torch.arange(length) >= 3 + 2 * i).long(),
                "row_id": torch.tensor(i),
            }
            for i in range(count)
        ]


def trainer(tmp_path: Path, **kwargs: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return Trainer(**{"max_epochs": 1, "enable_checkpointing": False, "default_root_dir": tmp_path, **quiet, **kwargs})


def weights(module: DSparkModule) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def fit(tmp_path: Path, batch_size: int = 2, **kwargs: Any) -> TinyDSpark:
    module = TinyDSpark(**ARGS)
    trainer(tmp_path, **kwargs).fit(module, DataLoader(rows(), batch_size=batch_size))
    return module


@pytest.mark.parametrize(("batch_size", "accumulate"), [(1, 8), (2, 4), (4, 2)])
def test_accumulation_weighs_every_supervised_token_the_same(tmp_path: Path, batch_size: int, accumulate: int) -> None:
    whole = fit(tmp_path, 8, max_epochs=3, gradient_clip_val=1.0)
    parts = fit(tmp_path, batch_size, max_epochs=3, gradient_clip_val=1.0, accumulate_grad_batches=accumulate)
    torch.testing.assert_close(weights(parts), weights(whole), atol=1e-5, rtol=0)


def test_one_step_of_sgd_is_the_gradient_of_the_loss(tmp_path: Path) -> None:
    module = TinyDSpark(**ARGS, optimizer=lambda params: torch.optim.SGD(params, lr=1.0), min_lr_ratio=1.0)
    module.configure_model()
    before = weights(module)
    batch = next(iter(DataLoader(rows(), batch_size=8)))
    loss = compute_dspark_loss(
        outputs=module(batch), loss_decay_gamma=4.0, ce_loss_alpha=0.1, l1_loss_alpha=0.9, confidence_head_alpha=1.0
    )
    loss.backward()
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    trainer(tmp_path, max_steps=1).fit(module, DataLoader([batch], batch_size=None))
    for name, grad in grads.items():
        torch.testing.assert_close(weights(module)[name], before[name] - grad, atol=2e-6, rtol=1e-4)


def test_a_batch_without_anchors_changes_nothing(tmp_path: Path) -> None:
    module = TinyDSpark(**ARGS)
    module.configure_model()
    before = weights(module)
    batch = next(iter(DataLoader(rows(), batch_size=4)))
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    trainer(tmp_path).fit(module, DataLoader([batch], batch_size=None))
    torch.testing.assert_close(weights(module), before, atol=0, rtol=0)


def test_only_the_draft_is_trained_saved_and_counted(tmp_path: Path) -> None:
    module = fit(tmp_path)
    assert all(name.startswith("draft.") for name in module.state_dict())
    target = module.target.model
    torch.testing.assert_close(target.state_dict(), tiny_qwen3(0).state_dict(), atol=0, rtol=0)
    assert not target.training and not any(p.requires_grad for p in target.parameters())
    assert not module.draft.embed_tokens.weight.requires_grad and not module.draft.lm_head.weight.requires_grad


def test_embedding_and_head_are_not_held_twice() -> None:
    module = TinyDSpark(**ARGS)
    module.configure_model()
    assert module.draft.embed_tokens.weight.data_ptr() == module.target.embed_tokens.weight.data_ptr()
    assert module.draft.lm_head.weight.data_ptr() == module.target.lm_head.weight.data_ptr()


def test_configure_model_builds_once() -> None:
    module = TinyDSpark(**ARGS)
    module.configure_model()
    draft = module.draft
    module.configure_model()
    assert module.draft is draft


def test_validation_draws_the_same_anchors_every_time(tmp_path: Path) -> None:
    module = TinyDSpark(**ARGS)
    module.configure_model()
    batch = next(iter(DataLoader(rows(), batch_size=8)))
    first, again = (module.validation_step(batch, 0)["terms"] for _ in range(2))
    torch.testing.assert_close(first, again, atol=0, rtol=0)


def test_anchors_differ_between_epochs_and_not_between_batches() -> None:
    module = TinyDSpark(**ARGS)
    module.configure_model()
    data = rows()
    together = module(next(iter(DataLoader(data, batch_size=8))), epoch=1)
    alone = module(next(iter(DataLoader(data[3:4], batch_size=1))), epoch=1)
    assert torch.equal(together.target_ids[3:4], alone.target_ids)
    other = module(next(iter(DataLoader(data, batch_size=8))), epoch=2)
    assert not torch.equal(together.target_ids, other.target_ids)


def test_the_global_generator_is_left_alone() -> None:
    module = TinyDSpark(**ARGS)
    module.configure_model()
    before = torch.random.get_rng_state()
    batch = next(iter(DataLoader(rows(), batch_size=8, generator=torch.Generator())))
    module.train()(batch, epoch=1)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_returned_loss_is_the_numerator(tmp_path: Path) -> None:
    module = fit(tmp_path, max_steps=1)
    out = module.training_step(next(iter(DataLoader(rows(), batch_size=8))), 0)
    terms = out["terms"]
    torch.testing.assert_close(out["loss"].detach(), terms["loss"] * (terms["loss_den"] + EPS))


def checkpoint(tmp_path: Path, **args: Any) -> Path:
    module = TinyDSpark(**ARGS | args)
    run = trainer(tmp_path, max_steps=2)
    run.fit(module, DataLoader(rows(), batch_size=2))
    run.save_checkpoint(tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


CHANGES = {
    "mask_token_id": (95, 96, 95),
    "block_size": (5, 4, 5),
    "target_layer_ids": ([0, 3], [1, 3], [0, 3]),
    "markov_rank": (4, 8, 4),
    "markov_head_type": ("rnn", "vanilla", "rnn"),
    "confidence_head_with_markov": (False, True, False),
    "confidence_head_alpha": (0.0, True, False),
    "num_draft_layers": (1, 2, 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_shape_is_refused_with_both_values(tmp_path: Path, name: str) -> None:
    value, saved, ours = CHANGES[name]
    path = checkpoint(tmp_path)
    module = TinyDSpark(**ARGS | {"target_layer_ids": [1, 3]} | {name: value})
    with pytest.raises(ValueError) as error:
        trainer(tmp_path, max_steps=4).fit(module, DataLoader(rows(), batch_size=2), ckpt_path=path)
    assert f" {saved!r}, this run has {ours!r}" in str(error.value) and "\n" not in str(error.value)


def test_another_target_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    module = TinyDSpark(**ARGS)
    module.target_seed = 1
    with pytest.raises(
        ValueError, match=r"trained for the target 'tiny' \(weights \w+\), this run has 'tiny' \(weights"
    ):
        trainer(tmp_path).validate(module, DataLoader(rows(), batch_size=2), ckpt_path=path)


def test_a_changed_learning_rate_holds_after_resuming(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    module = TinyDSpark(**ARGS, min_lr_ratio=1.0, optimizer=lambda params: torch.optim.AdamW(params, lr=0.5))
    run = trainer(tmp_path, max_epochs=9, max_steps=3)
    run.fit(module, DataLoader(rows(), batch_size=2), ckpt_path=path)
    assert run.global_step == 3
    assert run.optimizers[0].param_groups[0]["lr"] == 0.5


def test_a_subclass_may_bring_its_own_optimizer(tmp_path: Path) -> None:
    class Plain(TinyDSpark):
        def configure_optimizers(self) -> torch.optim.Optimizer:  # type: ignore[override]
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    run = trainer(tmp_path, max_epochs=-1, max_steps=2)
    run.fit(Plain(**ARGS), DataLoader(rows(), batch_size=2))
    assert run.global_step == 2 and run.optimizers[0].param_groups[0]["lr"] == 0.1


def test_hyper_parameters_are_plain_data(tmp_path: Path) -> None:
    loaded = torch.load(checkpoint(tmp_path), weights_only=True)
    assert loaded["hyper_parameters"]["mask_token_id"] == 96
    assert not any("target" in name for name in loaded["state_dict"])


def test_a_loaded_checkpoint_is_settled() -> None:
    """One written inside an accumulation window goes back to its last step; see datamodules/resume.py."""
    module = TinyDSpark(**ARGS)
    module.configure_model()
    counter = {"ready": 5, "started": 5, "processed": 5, "completed": 5}
    batches = {"current": dict(counter), "total": dict(counter), "is_last_batch": False}
    checkpoint: dict[str, Any] = {
        "global_step": 2,
        "ChatDataModule": {"epoch": 0, "batches": 5, "pending": 1},
        "loops": {"fit_loop": {"epoch_progress": {}, "epoch_loop.batch_progress": batches}},
    }
    module.on_load_checkpoint(checkpoint | {"dspark": module.identity()})
    assert checkpoint["ChatDataModule"] == {"epoch": 0, "batches": 4, "pending": 0}
    assert set(batches["current"].values()) == set(batches["total"].values()) == {4}


def test_load_from_checkpoint_restores_the_draft(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    loaded = TinyDSpark.load_from_checkpoint(path)
    torch.testing.assert_close(weights(loaded), torch.load(path, weights_only=True)["state_dict"], atol=0, rtol=0)


def test_another_family_is_refused() -> None:
    class Other(TinyDSpark):
        spec = None

    Other.spec = type("Spec", (), {})()  # type: ignore[assignment]  # any spec that is not the target's
    with pytest.raises(ValueError, match="Other does not serve a 'qwen3' target"):
        Other(**ARGS).configure_model()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
        ({"num_anchors": 0}, "num_anchors must be an integer of at least 1, got 0"),
        ({"markov_head_type": "lstm"}, "markov_head_type must be one of vanilla, gated, rnn, got 'lstm'"),
        ({"warmup_ratio": 1.5}, "warmup_ratio must lie in 0..1, got 1.5"),
    ],
)
def test_wrong_values_are_refused_at_once(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TinyDSpark(**ARGS | change)


def test_a_batch_without_row_ids_is_named(tmp_path: Path) -> None:
    batch = next(iter(DataLoader(rows(), batch_size=2)))
    del batch["row_id"]
    with pytest.raises(ValueError, match="the batch has no 'row_id'"):
        trainer(tmp_path).fit(TinyDSpark(**ARGS), DataLoader([batch], batch_size=None))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_precisions_train(tmp_path: Path, precision: Any) -> None:
    module = fit(tmp_path, max_epochs=2, precision=precision)
    assert all(torch.isfinite(value).all() for value in module.state_dict().values())
    expected = torch.float32 if precision != "bf16-true" else torch.bfloat16
    assert module.draft.fc.weight.dtype == expected


def test_blocks_that_no_row_needs_are_left_out() -> None:
    few, many = (TinyDSpark(**ARGS | {"num_anchors": n}) for n in (24, 500))
    batch = next(iter(DataLoader(rows(), batch_size=8)))
    for module in (few, many):
        module.configure_model()
    wide, narrow = many(batch), few(batch)
    assert wide.block_keep_mask.shape[1] == int(wide.block_keep_mask.sum(-1).max()) == 20  # 21 supervised tokens
    assert torch.equal(wide.target_ids, narrow.target_ids)


def test_an_endless_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the number of steps is inf: set trainer\.max_steps or trainer\.max_epochs"):
        fit(tmp_path, max_epochs=-1)


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    batch = next(iter(DataLoader(rows(), batch_size=8)))
    module = TinyDSpark(**ARGS, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
    module.configure_model()
    before = module.validation_step(batch, 0)["terms"]["loss"]
    trainer(tmp_path, max_epochs=60).fit(module, DataLoader([batch], batch_size=None))
    assert module.validation_step(batch, 0)["terms"]["loss"] < 0.7 * before
