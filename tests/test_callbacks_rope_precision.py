"""RopePrecisionCheck in real fits: every way to spoil the frequencies is seen before they are used, or repaired."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dspark_lightning.callbacks import RopePrecisionCheck
from fakes import FakeDSpark, fake_loader, tiny_trainer
from helpers import tiny_qwen3_config


class CPUFSDP(FSDPStrategy):
    """FSDP on the CPU: Lightning hands torch the index of the device, which a CPU has not."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FSDP(model, mixed_precision=self.mixed_precision_config, device_id=self.root_device, **self.kwargs)


@pytest.fixture
def one_process_group() -> Iterator[None]:
    """Leave no process group to the other tests."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


POSITIONS = torch.arange(8).unsqueeze(0)
RIGHT = Qwen3RotaryEmbedding(tiny_qwen3_config()).inv_freq


class Draft(nn.Module):
    """A weight and a rotary module whose frequencies it remembers having used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.rotary_emb = Qwen3RotaryEmbedding(tiny_qwen3_config())
        self.used: list[Tensor] = []

    def forward(self) -> Tensor:
        cos, _ = self.rotary_emb(torch.ones(1), POSITIONS)
        self.used.append(self.rotary_emb.inv_freq.clone())
        return self.weight * cos.sum()


class Target:
    """Stands for HFDSparkTargetModel, outside the module tree."""

    def __init__(self, rotary: nn.Module) -> None:
        self.model = nn.Sequential(rotary)


class RotaryDSpark(FakeDSpark):
    """A draft and a target with rotary modules; `spoil` is called on a stage's first step."""

    def __init__(self, target: Target | None = None) -> None:
        super().__init__()
        self.draft = Draft()
        self.target = target

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        if self.target is not None:
            self.target.model[0](torch.ones(1), POSITIONS, *LAYER_TYPE.get(type(self.target.model[0]), ()))
        return {"loss": self.draft(), "terms": batch["terms"]}

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        return self.training_step(batch, batch_idx)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        return self.training_step(batch, batch_idx)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        return self.training_step(batch, batch_idx)


LAYER_TYPE = {Gemma4TextRotaryEmbedding: ("sliding_attention",)}
SPOIL = {
    "bf16": lambda x: x.bfloat16(),
    "garbage": torch.zeros_like,
    "cast and cast back": lambda x: x.bfloat16().float(),
    "nan": lambda x: x * float("nan"),
}


def spoil(rotary: nn.Module, name: str, kind: str) -> None:
    setattr(rotary, name, SPOIL[kind](getattr(rotary, name)))


def run(tmp_path: Path, module: RotaryDSpark, entry: str = "fit", **arguments: Any) -> RopePrecisionCheck:
    check = RopePrecisionCheck(arguments.pop("on_error", "raise"))
    trainer = tiny_trainer(tmp_path, callbacks=[check, *arguments.pop("callbacks", ())], max_epochs=2, **arguments)
    loaders = (fake_loader(0, 1), fake_loader(2)) if entry == "fit" else (fake_loader(0),)
    getattr(trainer, entry)(module, *loaders)
    return check


@pytest.mark.parametrize("kind", SPOIL)
def test_spoiled_draft_is_refused_before_it_is_used(kind: str, tmp_path: Path) -> None:
    module = RotaryDSpark()
    spoil(module.draft.rotary_emb, "inv_freq", kind)
    with pytest.raises(
        ValueError, match=r"RoPE frequencies of the draft are wrong: rotary_emb\.inv_freq .*32-true"
    ) as e:
        run(tmp_path, module)
    assert "\n" not in str(e.value)
    assert module.draft.used == []


def test_bf16_true_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rotary_emb\.inv_freq is bfloat16"):
        run(tmp_path, RotaryDSpark(), precision="bf16-true")


@pytest.mark.parametrize("entry", ["fit", "validate", "test", "predict"])
def test_target_is_checked_too_at_every_entry(entry: str, tmp_path: Path) -> None:
    module = RotaryDSpark(Target(Qwen3RotaryEmbedding(tiny_qwen3_config())))
    spoil(module.target.model[0], "inv_freq", "cast and cast back")
    with pytest.raises(ValueError, match=r"of the target are wrong: 0\.inv_freq is off by"):
        run(tmp_path, module, entry)


@pytest.mark.parametrize("layer_type", ["sliding_attention", "full_attention"])
def test_rotary_with_several_tables(layer_type: str, tmp_path: Path) -> None:
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=16, global_head_dim=16)
    config = Gemma4TextConfig(**sizes, layer_types=["sliding_attention", "full_attention"])
    module = RotaryDSpark(Target(Gemma4TextRotaryEmbedding(config)))
    run(tmp_path, module)
    spoil(module.target.model[0], f"{layer_type}_inv_freq", "bf16")
    with pytest.raises(ValueError, match=f"of the target are wrong: 0.{layer_type}_inv_freq is bfloat16"):
        run(tmp_path, module)


def test_nothing_wrong_is_silent_and_leaves_no_hook(tmp_path: Path) -> None:
    module = RotaryDSpark(Target(Qwen3RotaryEmbedding(tiny_qwen3_config())))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*RoPE.*")
        run(tmp_path, module, on_error="repair")
    rotaries = [module.draft.rotary_emb, module.target.model[0]]
    assert [len(rotary._forward_pre_hooks) for rotary in rotaries] == [0, 0]


@pytest.mark.parametrize("kind", SPOIL)
def test_repair_comes_before_the_first_use(kind: str, tmp_path: Path) -> None:
    module = RotaryDSpark()
    spoil(module.draft.rotary_emb, "inv_freq", kind)
    with pytest.warns(UserWarning, match=r"of the draft are wrong: rotary_emb.inv_freq .* computed anew in float32"):
        run(tmp_path, module, on_error="repair")
    assert len(module.draft.used) == 7  # the sanity check's batch and two epochs of 2 + 1
    assert all(torch.equal(used, RIGHT) for used in module.draft.used)


def test_a_save_is_followed_by_a_check(tmp_path: Path) -> None:
    class SaveAndSpoil(Callback):
        """What FSDP does: a forward that follows a collected state dict finds its buffers cast again."""

        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: object) -> None:
            trainer.save_checkpoint(tmp_path / "a.ckpt")
            spoil(pl_module.draft.rotary_emb, "inv_freq", "bf16")

    module = RotaryDSpark()
    with pytest.warns(UserWarning, match="of the draft are wrong"):
        run(tmp_path, module, on_error="repair", callbacks=[SaveAndSpoil()])
    assert all(torch.equal(used, RIGHT) for used in module.draft.used)


def test_fsdp_casts_buffers_inside_its_forward(one_process_group: None, tmp_path: Path) -> None:
    options = {"strategy": CPUFSDP(), "precision": "bf16-mixed"}
    with pytest.raises(ValueError, match=r"rotary_emb\.inv_freq is bfloat16"):
        run(tmp_path, RotaryDSpark(), **options)
    module = RotaryDSpark()
    with pytest.warns(UserWarning, match="of the draft are wrong"):
        run(tmp_path, module, on_error="repair", **options | {"strategy": CPUFSDP()})
    assert all(torch.equal(used, RIGHT) for used in module.draft.used)


def test_repair_under_inference_mode_leaves_a_trainable_draft(tmp_path: Path) -> None:
    module = RotaryDSpark()
    spoil(module.draft.rotary_emb, "inv_freq", "bf16")
    with pytest.warns(UserWarning, match="of the draft are wrong"):
        run(tmp_path, module, "validate", on_error="repair")
    assert not module.draft.rotary_emb.inv_freq.is_inference()
    run(tmp_path, module)


def test_unknown_on_error_is_refused() -> None:
    with pytest.raises(ValueError, match="on_error must be 'raise' or 'repair', got 'ignore'"):
        RopePrecisionCheck("ignore")  # type: ignore[arg-type]
