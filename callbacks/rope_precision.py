"""Refuse or repair rotary frequencies that lost their precision.

Example:
    >>> from lightning.pytorch import Trainer
    >>> trainer = Trainer(callbacks=[RopePrecisionCheck(on_error="repair")], precision="bf16-true")  # doctest: +SKIP
"""

from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.utils.hooks import RemovableHandle

from dspark_lightning.rope import repair_rope, rope_errors, rotary_modules


class RopePrecisionCheck(Callback):
    """Compare the rotary frequencies of draft and target with freshly computed ones, by value.

    A forward pre-hook on the rotary modules looks at the first forward of every training epoch, validation, test and
    prediction (so after every load), and at the first one after every save. No earlier moment would do: FSDP casts
    buffers inside its own forward, the first time and again after it has collected a state dict. No later one either:
    here the frequencies have not been used yet, so a repaired run never computes with wrong ones.

    Args:
        on_error: "raise" stops the run; "repair" puts the right frequencies back and warns once.

    Raises:
        ValueError: on_error is something else.
    """

    def __init__(self, on_error: Literal["raise", "repair"] = "raise") -> None:
        if on_error not in ("raise", "repair"):
            raise ValueError(f"on_error must be 'raise' or 'repair', got {on_error!r}")
        self.on_error = on_error
        self._hooks: dict[str, list[RemovableHandle]] = {}
        self._warned: set[str] = set()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the next forward."""
        del trainer
        self._arm(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the next forward."""
        del trainer
        self._arm(pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the next forward."""
        del trainer
        self._arm(pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the next forward."""
        del trainer
        self._arm(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Look at the next forward."""
        del trainer, checkpoint
        self._arm(pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave no hook behind."""
        del trainer, pl_module, stage
        for name in list(self._hooks):
            self._disarm(name)

    def _arm(self, pl_module: LightningModule) -> None:
        for name, model in (("draft", pl_module.draft), ("target", getattr(pl_module.target, "model", None))):
            self._disarm(name)
            if isinstance(model, nn.Module):
                check = partial(self._check, name, model)
                self._hooks[name] = [rotary.register_forward_pre_hook(check) for _, rotary in rotary_modules(model)]

    def _disarm(self, name: str) -> None:
        for hook in self._hooks.pop(name, ()):
            hook.remove()

    def _check(self, name: str, model: nn.Module, rotary: nn.Module, inputs: tuple[object, ...]) -> None:
        del rotary, inputs
        self._disarm(name)
        errors = rope_errors(model)
        if not errors:
            return
        problem = f"RoPE frequencies of the {name} are wrong: {'; '.join(errors)}."
        if self.on_error == "raise":
            raise ValueError(
                f"{problem} Set trainer.precision to 32-true or bf16-mixed; in place of FSDPStrategy take "
                "dspark_lightning.strategies.DSparkFSDPStrategy, or give it a mixed_precision whose buffer_dtype is "
                "torch.float32; or set RopePrecisionCheck's on_error to 'repair'"
            )
        with torch.inference_mode(False):  # buffers made in inference mode could not be used in training
            repair_rope(model)
        if name not in self._warned:
            self._warned.add(name)
            rank_zero_warn(f"{problem} They were computed anew in float32.")
