"""Export the draft, ready to serve, with every checkpoint and at the end of the fit.

Example:
    >>> from lightning.pytorch import Trainer
    >>> trainer = Trainer(callbacks=[DraftExport("runs/drafts")])  # doctest: +SKIP

    writes runs/drafts/dspark-step=500, ... and runs/drafts/dspark-draft.
"""

import shutil
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.export import check_export_path, export_draft
from dspark_lightning.serving.decode_check import PROMPTS, keep_decoded
from dspark_lightning.serving.engines import serve_command
from dspark_lightning.serving.record import ExportRecord, Validation
from dspark_lightning.serving.run_record import (
    held_out_prompts,
    keep_record,
    kept_record,
    last_validation,
    run_record,
)
from dspark_lightning.sharding import full_state_dict, is_sharded
from dspark_lightning.target import HFDSparkTargetModel

_FINAL = "dspark-draft"


class DraftExport(Callback):
    """Write `dspark-step=N` with every checkpoint that is saved, and `dspark-draft` at the end of every fit.

    The weights are those of the checkpoint. A step's folder is deleted once ModelCheckpoint has deleted the checkpoints
    saved at that step (when the next one is written, or at the end of the fit). `dspark-draft` is also written when the
    fit ends before any checkpoint, and when it is interrupted by Ctrl-C; a second fit replaces it. With fast_dev_run
    nothing is written, as for checkpoints.

    Beside the weights lie a model card and `dspark.json`, with the last validation and the first prompts of its rows.
    Every folder is checked before it takes its place. At the end of a fit the target, where it is loaded whole, decodes
    the prompts with the draft as the folder has it; `dspark check` compares what it gets with what came out then.

    Args:
        dirpath: parent of the folders; None takes the trainer's log_dir.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = dirpath
        self._parent = Path()
        self._validation: Validation | None = None
        self._prompts: list[list[int]] = []
        self._checkpoints: dict[Path, set[Path]] = {}  # what ModelCheckpoint saved at the step of each folder

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Fix the parent folder; log_dir is agreed upon by all ranks."""
        del pl_module
        if stage == "fit":
            self._parent = Path(self.dirpath or trainer.log_dir or trainer.default_root_dir)
            self._checkpoints, self._validation, self._prompts = {}, None, []
            if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
                try:  # now, not after hours of training
                    self._parent.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    reason = error.strerror or error
                    raise ValueError(f"DraftExport cannot write to {str(self._parent)!r}: {reason}") from error
                check_export_path(self._parent / _FINAL)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep the first prompts of the held-out rows."""
        del batch_idx, dataloader_idx
        if trainer.is_global_zero and len(self._prompts) < PROMPTS:
            target = _target(pl_module)
            media = frozenset() if target is None else target.media_arguments
            self._prompts = [*self._prompts, *held_out_prompts(batch, media)][:PROMPTS]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep what was measured."""
        del pl_module
        if not trainer.sanity_checking:
            self._validation = last_validation(trainer)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on with what the resumed run knew: this one may end before its first validation."""
        del trainer, pl_module
        record = kept_record(checkpoint)
        if record is not None:
            self._validation, self._prompts = record.validation, record.prompts

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Export what is about to be saved, once per step however many checkpoints it has."""
        keep_record(self._record(trainer, pl_module), checkpoint)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder = self._parent / f"dspark-step={trainer.global_step}"
        if folder not in self._checkpoints:  # on every rank alike
            if trainer.is_global_zero:
                self._delete_stale()
            self._export(trainer, pl_module, folder)
        self._checkpoints.setdefault(folder, set()).update(_about_to_be_saved(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Export the final draft and say how to serve it."""
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            if trainer.is_global_zero:
                self._delete_stale()
            self._export_final(trainer, pl_module)
            if trainer.is_global_zero:
                self._decode(trainer, pl_module, self._parent / _FINAL)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Ctrl-C ends a fit too, except that ranks which hold parts of the draft no longer wait for each other."""
        if isinstance(exception, KeyboardInterrupt) and trainer.global_step > 0:
            if not is_sharded(cast(nn.Module, pl_module.draft)):
                self._export_final(trainer, pl_module)
            else:
                saved = _last_saved(trainer)
                way = f"; run: dspark export --ckpt_path {saved}" if saved else ", and no checkpoint was saved"
                rank_zero_info(f"No draft is exported{way}")

    def _export_final(self, trainer: Trainer, pl_module: LightningModule) -> None:
        path = self._export(trainer, pl_module, self._parent / _FINAL)
        hp = pl_module.hparams
        rank_zero_info(f"Next: {serve_command(path, hp['target'], hp['block_size'])}")

    def _export(self, trainer: Trainer, pl_module: LightningModule, folder: Path) -> Path:
        draft = cast(DSparkDraft, pl_module.draft)
        weights = full_state_dict(draft)  # with the help of all ranks
        if trainer.is_global_zero:
            export_draft(draft, folder, weights, record=self._record(trainer, pl_module))
            rank_zero_info(f"Draft exported to {folder}")
        return folder

    def _record(self, trainer: Trainer, pl_module: LightningModule) -> ExportRecord:
        return run_record(trainer, pl_module, self._validation, self._prompts)

    def _decode(self, trainer: Trainer, pl_module: LightningModule, folder: Path) -> None:
        """Decode with the folder, on this rank alone; what takes other ranks or other devices too is left out."""
        target = _target(pl_module)
        missing = _not_decodable(pl_module, target, self._prompts)
        if target is None or missing:
            way = ": dspark export --target adds it" if self._prompts else ""
            rank_zero_info(f"{folder} keeps no decoding to compare with, since {missing}{way}")
            return
        try:
            keep_decoded(target.model, folder, self._record(trainer, pl_module))
        except (ValueError, torch.OutOfMemoryError) as error:  # the draft is there, and that is what matters
            rank_zero_warn(f"{folder} keeps no decoding to compare with: {str(error).splitlines()[0]}")

    def _delete_stale(self) -> None:
        """Delete the folders of steps whose checkpoints are known, and gone."""
        for folder, checkpoints in list(self._checkpoints.items()):
            if checkpoints and not any(path.exists() for path in checkpoints):
                shutil.rmtree(folder, ignore_errors=True)
                del self._checkpoints[folder]


def _target(pl_module: LightningModule) -> HFDSparkTargetModel | None:
    """The target of the run; None where the features come from a cache, or from a module of another kind."""
    return cast(HFDSparkTargetModel | None, getattr(pl_module, "target", None))


def _not_decodable(
    pl_module: LightningModule, target: HFDSparkTargetModel | None, prompts: list[list[int]]
) -> str | None:
    """Why the draft is not decoded with; None where it can be."""
    if target is None:
        return "this run does not load the target"
    if is_sharded(target.model):
        return "the target is split over the ranks"
    if pl_module.hparams.get("device_map") is not None:
        return "the target is spread over devices"
    return None if prompts else "no validation has seen a held-out row that begins with a prompt"


def _last_saved(trainer: Trainer) -> Path | None:
    """The newest checkpoint of this run."""
    last = {Path(x.last_model_path) for x in _model_checkpoints(trainer) if x.last_model_path}
    saved = [path for path in last | _best(trainer) if path.exists()]
    return max(saved, key=lambda path: path.stat().st_mtime, default=None)


def _about_to_be_saved(trainer: Trainer) -> set[Path]:
    """The checkpoints that ModelCheckpoint counts as its own already, but that are not there yet."""
    return {path for path in _best(trainer) if not path.exists()}


def _best(trainer: Trainer) -> set[Path]:
    """The checkpoints that ModelCheckpoint keeps for their score."""
    named = (path for x in _model_checkpoints(trainer) for path in (*x.best_k_models, x.best_model_path))
    return {Path(path) for path in named if path}


def _model_checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
