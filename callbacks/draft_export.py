"""Export the draft, ready to serve, with every checkpoint and at the end of the fit.

Example:
    >>> from lightning.pytorch import Trainer
    >>> trainer = Trainer(callbacks=[DraftExport("runs/drafts")])  # doctest: +SKIP

    writes runs/drafts/dspark-step=500, ... and runs/drafts/dspark-draft.
"""

import shutil
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.export import export_draft, serve_command
from dspark_lightning.sharding import full_state_dict, is_sharded


class DraftExport(Callback):
    """Write `dspark-step=N` with every checkpoint that is saved, and `dspark-draft` at the end of every fit.

    The weights are those of the checkpoint. A step's folder is deleted once ModelCheckpoint has deleted the checkpoints
    saved at that step (when the next one is written, or at the end of the fit). `dspark-draft` is also written when the
    fit ends before any checkpoint, and when it is interrupted by Ctrl-C; a second fit replaces it. With fast_dev_run
    nothing is written, as for checkpoints.

    Args:
        dirpath: parent of the folders; None takes the trainer's log_dir.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = dirpath
        self._parent = Path()
        self._checkpoints: dict[Path, set[Path]] = {}  # what ModelCheckpoint saved at the step of each folder

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Fix the parent folder; log_dir is agreed upon by all ranks."""
        del pl_module
        if stage == "fit":
            self._parent = Path(self.dirpath or trainer.log_dir or trainer.default_root_dir)
            self._checkpoints = {}
            if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
                try:  # now, not after hours of training
                    self._parent.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    reason = error.strerror or error
                    raise ValueError(f"DraftExport cannot write to {str(self._parent)!r}: {reason}") from error

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Export what is about to be saved, once per step however many checkpoints it has."""
        del checkpoint
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
        path = self._export(trainer, pl_module, self._parent / "dspark-draft")
        hp = pl_module.hparams
        rank_zero_info(f"Next: {serve_command(path, hp['target'], hp['block_size'])}")

    def _export(self, trainer: Trainer, pl_module: LightningModule, folder: Path) -> Path:
        draft = cast(DSparkDraft, pl_module.draft)
        weights = full_state_dict(draft)  # with the help of all ranks
        if trainer.is_global_zero:
            export_draft(draft, folder, weights)
            rank_zero_info(f"Draft exported to {folder}")
        return folder

    def _delete_stale(self) -> None:
        """Delete the folders of steps whose checkpoints are known, and gone."""
        for folder, checkpoints in list(self._checkpoints.items()):
            if checkpoints and not any(path.exists() for path in checkpoints):
                shutil.rmtree(folder, ignore_errors=True)
                del self._checkpoints[folder]


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
