"""The `dspark` command: LightningCLI for training, and the tools beside it."""

import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import jsonargparse
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningCLI

# Importing these makes their short names known to the command line.
import dspark_lightning.callbacks
import dspark_lightning.datamodules  # noqa: F401
from dspark_lightning import __version__
from dspark_lightning.export import check_export_name, export_draft, load_checkpoint_draft, serve_command
from dspark_lightning.module import DSparkModule


class DSparkCLI(LightningCLI):
    """LightningCLI that lets the command line win over a checkpoint's hyper-parameters."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's subcommands that a `DSparkModule` has steps for."""
        known = LightningCLI.subcommands()
        return {name: known[name] for name in ("fit", "validate", "test")}

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would silently replace values given on the command line by the checkpoint's.

        The module compares the two itself and refuses what cannot change.
        """

    def after_fit(self) -> None:
        """Print what was learned, where it is, and how to look at it."""
        if self.trainer.is_global_zero:
            print(summary(self.trainer))


def summary(trainer: Trainer) -> str:
    """Say in a few lines what a fit reached on the validation rows.

    Args:
        trainer: after `fit`.
    """
    values = {name.removeprefix("val/"): float(v) for name, v in trainer.callback_metrics.items() if "val/" in name}
    rates = [value for name, value in values.items() if name.startswith("accept_rate@")]
    lines = [f"Trained {trainer.global_step} steps; logs in {trainer.log_dir}"]
    if "tau" in values:
        lines += [
            f"Held-out rows: {values['tau']:.2f} tokens per target pass (tau), at most {len(rates) + 1}",
            "Acceptance by position in the block: " + " ".join(f"{rate:.2f}" for rate in rates),
        ]
    return "\n".join([*lines, f"Curves: tensorboard --logdir {trainer.log_dir}"])


def export(ckpt_path: Path, output: Path) -> None:
    """Write the draft of a training checkpoint as a folder that serving engines load.

    Args:
        ckpt_path: checkpoint file of a `DSparkModule`.
        output: folder to write; its name must contain "dspark" and not "dflash".
    """
    check_export_name(output)
    draft, target = load_checkpoint_draft(ckpt_path)
    path = export_draft(draft, output)
    print(f"Draft exported to {path}\nNext: {serve_command(path, target, draft.block_size)}")


TOOLS: dict[str, Callable[..., None]] = {"export": export}


def main(args: ArgsType = None) -> None:
    """Run `dspark SUBCOMMAND ...`; errors in what the user gave end with one line on stderr and exit code 2."""
    for message in (".*was deprecated in v4.49.0", ".*LeafSpec"):  # Lightning's own calls: nothing for the user to do
        warnings.filterwarnings("ignore", message=message)
    argv = sys.argv[1:] if args is None else args
    try:
        if isinstance(argv, Sequence) and argv and argv[0] in TOOLS:
            jsonargparse.auto_cli(TOOLS[argv[0]], args=list(argv[1:]), prog=f"dspark {argv[0]}", as_positional=False)
        else:
            run_lightning(args)
    except (ValueError, MisconfigurationException) as error:
        message = _message_for_the_user(error)
        if message is None:
            raise
        print(f"dspark: error: {message}", file=sys.stderr)
        sys.exit(2)


def _message_for_the_user(error: BaseException | None) -> str | None:
    """The message of the error that this package or Lightning's checks raised; None leaves a bug its traceback.

    jsonargparse raises errors of its own around those of a constructor, so the whole chain is searched.
    """
    while error is not None:
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        ours = frame is not None and str(frame.tb_frame.f_globals.get("__name__")).startswith("dspark_lightning")
        if isinstance(error, MisconfigurationException) or (isinstance(error, ValueError) and ours):
            return str(error)
        error = error.__cause__ or error.__context__
    return None


def run_lightning(args: ArgsType = None, run: bool = True) -> DSparkCLI:
    """Build the trainer, the module and the datamodule from a configuration, and run the subcommand.

    Args:
        args: command line; None reads sys.argv.
        run: False only builds them (`.trainer`, `.model`, `.datamodule`).
    """
    return DSparkCLI(
        DSparkModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={
            "version": __version__,
            "description": "Train DSpark drafters with Lightning. "
            f"Tools beside the subcommands below: {', '.join(TOOLS)} (dspark TOOL --help).",
        },
        args=args,
        run=run,
    )
