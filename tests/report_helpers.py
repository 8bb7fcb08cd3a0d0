"""A run folder with everything that `dspark report` shows, in known values."""

import json
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

RELIABILITY: dict[str, Any] = {
    "count": 90,
    "ece": 0.037,
    "auc": 0.812,
    "brier": 0.163,
    "bins": [
        {"low": 0.2, "high": 0.4, "count": 30, "confidence": 0.3, "acceptance": 0.25},
        {"low": 0.8, "high": 1.0, "count": 60, "confidence": 0.9, "acceptance": 0.95},
    ],
}
SUMMARY: dict[str, Any] = {
    "conversations": 12,
    "answers": 17,
    "rounds": 1200,
    "new_tokens": 2724,
    "tokens_drafted": 2400,
    "tokens_verified": 2391,
    "tokens_accepted": 1524,
    "tau": 2.27,
    "tau_interval": [2.19, 2.36],
    "accepted_lengths": [300, 276, 624],
    "survival": [0.75, 0.52],
    "conditional_acceptance": [0.75, 0.693],
    "conditional_counts": [1200, 891],
    "speedup": {"ratio": 1.46, "low": 1.41, "high": 1.53, "tokens_per_second": 141.6, "plain_tokens_per_second": 96.9},
    "thresholds": [
        {"threshold": 0.0, "tau": 2.27, "verified_per_round": 1.99, "accepted_share": 0.64},
        {"threshold": 0.5, "tau": 2.08, "verified_per_round": 1.37, "accepted_share": None},
    ],
    "confidence": {"pooled": RELIABILITY, "by_position": [RELIABILITY, RELIABILITY]},
}
EVALUATION: dict[str, Any] = {
    "command": "dspark evaluate --draft d-dspark",
    "draft": "d-dspark",
    "target": "models/my-target",
    "block_size": 2,
    "temperature": 0.7,
    "max_new_tokens": 64,
    "confidence_threshold": 0.0,
    "seed": 3,
    "machine": {"torch": "2.13.0"},
    "records_digest": "a1",
    "overall": SUMMARY,
    "datasets": {"gsm8k": SUMMARY | {"tau": 2.61}, "chat": SUMMARY | {"tau": 1.94}},
}
CALIBRATION: dict[str, Any] = {
    "command": "dspark calibrate --draft d-dspark",
    "dataset": "chat rows",
    "num_samples": 1500,
    "temperatures": [1.24, 0.87],
    "ece_before": 0.091,
    "ece_after": 0.022,
    "ece_before_by_position": [0.071, 0.111],
    "ece_after_by_position": [0.018, 0.026],
    "survival_bins_before": [RELIABILITY["bins"], RELIABILITY["bins"]],
    "survival_bins_after": [RELIABILITY["bins"], []],
    "records_digest": "a1",
}
SCHEDULE: dict[str, Any] = {
    "command": "dspark schedule --evaluation e",
    "records_digest": "a1",
    "curve": {"sample_batch_tokens": [1, 8], "sample_steps_per_sec": [90, 70], "max_batch_tokens": 64},
    "temperatures": None,
    "results": [
        {
            "concurrency": load,
            "policy": policy,
            "tokens_per_second": 1234.5 * load,
            "tokens_per_second_per_user": 1234.5,
            "verified_per_request": 1.75,
            "accepted_per_request": 1.25,
        }
        for policy in ("no draft", "scheduler")
        for load in (1, 8)
    ],
}
FILES = {"evaluation": EVALUATION, "calibration": CALIBRATION, "schedule": SCHEDULE}


def write_events(folder: Path, steps: list[int], values: dict[str, float], suffix: str = "") -> None:
    """An event file in which every tag has the same value at all steps."""
    with SummaryWriter(str(folder), filename_suffix=suffix) as writer:
        for step in steps:
            for tag, value in values.items():
                writer.add_scalar(tag, value, step)


def write_json(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    (folder / "evaluation").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / "evaluation" / f"{name}.json").write_text(json.dumps(content))


def make_run(folder: Path) -> Path:
    """A run with everything in it."""
    values = {"train/loss": 0.9, "train/ce_loss": 1.1, "train/tau": 2.5, "val/tau": 2.4375}
    values |= {f"{stage}/accept_rate@{k}": 0.6 for stage in ("train", "val") for k in (1, 2)}
    write_events(folder, [9, 1233], values)
    (folder / "config.yaml").write_text("model:\n  init_args:\n    target: models/my-target\n    block_size: 2\n")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints/last.ckpt").touch()
    write_json(folder, FILES)
    return folder
