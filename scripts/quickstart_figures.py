"""What the quickstart's drafter learns, and what its parts are worth.

    python scripts/quickstart_figures.py

trains `configs/quickstart.yaml` twice, with its Markov head and without, and prints held-out tau for both and for the
first with the target's features set to zero.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from dspark_lightning.cli import DSparkCLI, run_lightning

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "quickstart.yaml"


def train(*options: str) -> DSparkCLI:
    """Fit the quickstart, with further command-line options."""
    return run_lightning(["fit", "--config", str(CONFIG), *options])


def held_out_tau(cli: DSparkCLI) -> float:
    """Tau on the held-out rows, with the weights as they are now."""
    values = cli.trainer.validate(cli.model, cli.datamodule, verbose=False)
    return float(values[0]["val/tau"])


def held_out_tau_without_context(cli: DSparkCLI) -> float:
    """Tau on the held-out rows when the draft sees zeros for the target's features."""

    def zero_features(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        del module
        return args, kwargs | {"target_hidden_states": torch.zeros_like(kwargs["target_hidden_states"])}

    handle = cli.model.draft.register_forward_pre_hook(zero_features, with_kwargs=True)
    try:
        return held_out_tau(cli)
    finally:
        handle.remove()


def main() -> None:
    """Print the three figures."""
    quickstart = train()
    full, blind = held_out_tau(quickstart), held_out_tau_without_context(quickstart)
    parallel = held_out_tau(train("--model.init_args.markov_rank=0"))
    print(f"held-out tau, quickstart               {full:.2f}")
    print(f"held-out tau, context features zeroed  {blind:.2f} ({blind / full:.2f} of it)")
    print(f"held-out tau, markov_rank 0            {parallel:.2f}")


if __name__ == "__main__":
    main()
