"""The `dspark` command: LightningCLI for training, and the tools beside it."""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any, NoReturn, get_args

import jsonargparse
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger

# Importing these makes their short names known to the command line.
import dspark_lightning.callbacks
import dspark_lightning.datamodules  # noqa: F401
from dspark_lightning import __version__
from dspark_lightning.checkpoints import check_checkpoint
from dspark_lightning.module import DSparkModule
from dspark_lightning.tools.calibrate import calibrate
from dspark_lightning.tools.check import check
from dspark_lightning.tools.evaluate import evaluate
from dspark_lightning.tools.export import export
from dspark_lightning.tools.inspect_data import inspect_data, parse_shown
from dspark_lightning.tools.precompute import parse_filling, precompute
from dspark_lightning.tools.regenerate import regenerate
from dspark_lightning.tools.report import report
from dspark_lightning.tools.schedule import schedule
from dspark_lightning.usage import OneLineParser, OneLineTrainingParser, UsageError, check_classes, explain


def read_whole_numbers_first() -> None:
    """Have `limit_val_batches: 1` of a trainer mean one batch, and not 1.0, all of them.

    typing keeps unions that were asked for before: where a module has asked for float or int, Lightning's int or float
    becomes the same, and the parser tries float first.
    """
    annotations = Trainer.__init__.__annotations__
    for name, kind in annotations.items():
        kinds = get_args(kind)
        if int in kinds and float in kinds[: kinds.index(int)]:
            annotations[name] = reduce(or_, [int, *(each for each in kinds if each is not int)])


read_whole_numbers_first()


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

    def instantiate_classes(self) -> None:
        """Build everything, if the configuration names nothing but classes."""
        check_classes(self.config)
        super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the trainer.

        Raises:
            ValueError: Lightning cannot do with a value of a kind that its annotations allow.
        """
        try:
            trainer: Trainer = super().instantiate_trainer(**kwargs)
        except TypeError as error:
            raise ValueError(f"the trainer cannot be built: {error}") from error
        if trainer.accumulate_grad_batches < 1:
            raise ValueError(
                f"trainer.accumulate_grad_batches must be at least 1, got {trainer.accumulate_grad_batches}"
            )
        interval = trainer.val_check_interval
        if isinstance(interval, int) and interval < 1:
            raise ValueError(
                f"trainer.val_check_interval must be at least 1 batch, or a share in 0.0..1.0, got {interval}"
            )
        return trainer

    def _set_seed(self) -> None:
        try:
            super()._set_seed()
        except ValueError as error:
            raise ValueError(f"seed_everything: {error}") from error

    def before_fit(self) -> None:
        """Refuse a checkpoint that cannot be read before anything is loaded."""
        self._check_checkpoint(required=False)

    def before_validate(self) -> None:
        """Refuse to measure a draft that was never trained."""
        self._check_checkpoint(required=True)

    def before_test(self) -> None:
        """Refuse to measure a draft that was never trained."""
        self._check_checkpoint(required=True)

    def after_fit(self) -> None:
        """Print what was learned, where it is, and how to look at it."""
        log_dir = self.trainer.log_dir  # agreed upon by all ranks, so all of them have to ask
        if self.trainer.is_global_zero:
            print(summary(self.trainer, log_dir))

    def _check_checkpoint(self, required: bool) -> None:
        options = self.config[self.config["subcommand"]]
        ckpt_path = options["ckpt_path"]
        if ckpt_path is None:
            if required and self.model.hparams["draft_init"] is None:
                raise ValueError("ckpt_path is not set: the draft would have random weights; give --ckpt_path")
        elif ckpt_path not in ("best", "last", "hpc"):
            check_checkpoint(ckpt_path, type(self.trainer.strategy))


class PartsCLI(DSparkCLI):
    """Takes the command line of `fit` and builds its trainer, module and datamodule, for a tool; nothing is trained."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Do nothing."""


class DataCLI(PartsCLI):
    """Builds what data is read with."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """One process on the CPU, whatever machines the configuration is for."""
        del kwargs
        self.trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
        self.trainer.strategy.connect(self.model)
        self.datamodule.trainer = self.trainer
        return self.trainer


class SaveConfig(SaveConfigCallback):
    """Saves the configuration beside the logs; without a logger that would be the user's working folder."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save, unless there is no logger."""
        if trainer.loggers:
            super().setup(trainer, pl_module, stage)


def summary(trainer: Trainer, log_dir: str | None) -> str:
    """Say in a few lines what a fit reached on the validation rows.

    Args:
        trainer: after `fit`.
        log_dir: of the trainer.
    """
    values = {name.removeprefix("val/"): float(v) for name, v in trainer.callback_metrics.items() if "val/" in name}
    rates = [value for name, value in values.items() if name.startswith("accept_rate@")]
    lines = [f"Trained {trainer.global_step} steps" + (f"; logs in {log_dir}" if log_dir else "")]
    if "tau" in values:
        lines += [
            f"Held-out rows: {values['tau']:.2f} tokens per target pass (tau), at most {len(rates) + 1}",
            "Acceptance by position in the block: " + " ".join(f"{rate:.2f}" for rate in rates),
        ]
    if "tau_decode" in values:
        lines.append(f"Decoding: {values['tau_decode']:.2f} tokens per target pass (tau_decode)")
    if any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
        lines.append(f"Curves: tensorboard --logdir {log_dir}")
    return "\n".join(lines)


TOOLS: dict[str, Callable[..., None]] = {
    "regenerate": regenerate,
    "export": export,
    "check": check,
    "evaluate": evaluate,
    "calibrate": calibrate,
    "schedule": schedule,
    "report": report,
}


_TOOL_NAMES = [*TOOLS, "data inspect", "precompute"]


def main(args: ArgsType = None) -> None:
    """Run `dspark SUBCOMMAND ...`; errors in what the user gave end with one line on stderr and exit code 2."""
    # Lightning's and torch's own calls: nothing for the user to do
    for pattern in (
        ".*was deprecated in v4.49.0",
        ".*LeafSpec",
        ".*assuming the intent is to load in a single process",
        ".*Total length of .* across ranks is zero",
        "LightningCLI's args parameter",
    ):
        warnings.filterwarnings("ignore", message=pattern)
    if os.getcwd() not in sys.path:  # where the user's own modules are; behind all others, so that none is shadowed
        sys.path.append(os.getcwd())
    given = sys.argv[1:] if args is None else args
    argv = list(given) if isinstance(given, Sequence) else []  # LightningCLI also takes what was parsed already
    try:
        _run(argv, args)
    except UsageError as error:
        _end(explain(error, argv))
    except (ValueError, RuntimeError, MisconfigurationException) as error:
        message = _message_for_the_user(error)
        if message is None:
            raise
        _end(message)


def _run(argv: list[str], args: ArgsType) -> None:
    """Run the command that a command line begins with; everything else is LightningCLI's."""
    if argv[:2] == ["data", "inspect"]:
        shown, rest = parse_shown(argv[2:])
        inspect_data(run_lightning(["fit", *rest], cli=DataCLI).datamodule, shown)
    elif argv[:1] == ["precompute"]:
        filling, rest = parse_filling(argv[1:])
        precompute(run_lightning(["fit", *rest], cli=PartsCLI), filling)
    elif argv and argv[0] in TOOLS:
        run_tool(argv[0], argv[1:])
    elif (args and not argv) or (argv and (argv[0].startswith("-") or argv[0] in DSparkCLI.subcommands())):
        run_lightning(args)
    else:
        known = ", ".join([*DSparkCLI.subcommands(), *_TOOL_NAMES])
        raise ValueError(f"there is no command {argv[0]!r}; known are {known}" if argv else f"give a command: {known}")


def _end(message: str) -> NoReturn:
    print(f"dspark: error: {message}", file=sys.stderr)
    sys.exit(2)


def run_tool(name: str, args: list[str]) -> None:
    """Run one of `TOOLS`; what it requires is given by name, or by place where `args` starts with a value.

    Args:
        name: of the tool.
        args: the rest of the command line.
    """
    given = Counter(arg.partition("=")[0] for arg in args if arg.startswith("--") and not arg.endswith("+"))
    for option, times in given.items():
        if times > 1:  # the last one alone would count
            raise ValueError(
                f"{option} is given {times} times; where several values are taken, give {option}+ for more"
            )
    by_place = bool(args) and not args[0].startswith("-")
    jsonargparse.auto_cli(
        TOOLS[name], args=args, prog=f"dspark {name}", as_positional=by_place, parser_class=OneLineParser
    )


def _message_for_the_user(error: BaseException | None) -> str | None:
    """The message of the error that this package or Lightning's checks raised; None leaves a bug its traceback.

    jsonargparse raises errors of its own around those of a constructor, so the whole chain is searched.
    """
    while error is not None:
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        module = "" if frame is None else str(frame.tb_frame.f_globals.get("__name__"))
        # Lightning raises plain ones over settings of the trainer.
        ours = isinstance(error, ValueError) and module.startswith(("dspark_lightning", "lightning.pytorch"))
        ours |= module.startswith("lightning.fabric.accelerators") or module == "lightning.fabric.connector"
        # Lightning's own over a rank that has no batch at all
        ours |= isinstance(error, RuntimeError) and "within local rank has zero length" in str(error)
        if isinstance(error, MisconfigurationException) or ours:
            return str(error)
        if isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error):
            return (
                "the connection to another rank is lost, whose own message says why it ended: "
                f"{str(error).splitlines()[0]}. To go on, start again with the last checkpoint as --ckpt_path"
            )
        if isinstance(error, ValueError) and "in DataLoader worker process" in str(error):
            return str(error).strip().splitlines()[-1].partition(": ")[2]
        error = error.__cause__ or error.__context__
    return None


def run_lightning(args: ArgsType = None, run: bool = True, cli: type[DSparkCLI] = DSparkCLI) -> DSparkCLI:
    """Build the trainer, the module and the datamodule from a configuration, and run the subcommand.

    Args:
        args: command line; None reads sys.argv.
        run: False only builds them (`.trainer`, `.model`, `.datamodule`).
        cli: what builds and runs.
    """
    return cli(
        DSparkModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        save_config_callback=SaveConfig,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={
            "version": __version__,
            "description": "Train DSpark drafters with Lightning. "
            f"Tools beside the subcommands below: {', '.join(_TOOL_NAMES)} (dspark TOOL --help).",
        },
        parser_class=OneLineTrainingParser,
        args=args,
        run=run,
    )
