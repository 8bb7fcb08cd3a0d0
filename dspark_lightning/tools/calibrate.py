"""`dspark calibrate`: temperatures that make a draft's confidences believable."""

import json
import shlex
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from dspark_lightning.decoding.records import block_size, check_whole_blocks, read_records, records_digest
from dspark_lightning.evaluation.calibration import calibrate as fit_and_measure
from dspark_lightning.evaluation.rounds import gather_rounds
from dspark_lightning.replace import write_text
from dspark_lightning.tools.command import command_line


def calibrate(records: Path, output: Path | None = None, holdout: float = 0.5, seed: int = 0) -> None:
    """Fit sequential temperature scaling on decode records, and show the calibration error before and after.

    The temperatures are fitted on some conversations and measured on the others. They are written as JSON, for
    `dspark schedule` and serving engines.

    Args:
        records: the records.jsonl that `dspark evaluate` wrote, of answers that are not in the training data and that
            were decoded with whole blocks.
        output: file to write; default: calibration.json beside the records.
        holdout: share of the conversations that is kept for measuring.
        seed: which ones.
    """
    if not 0 < holdout < 1:
        raise ValueError(f"holdout must lie between 0 and 1, got {holdout}")
    if seed < 0:
        raise ValueError(f"seed must be 0 or more, got {seed}")
    path = output or records.parent / "calibration.json"
    answers = read_records(records)
    size = block_size(answers)
    for answer in answers:
        check_whole_blocks(answer, size)
    rounds = gather_rounds(answers, size)
    if rounds.confidence is None:
        raise ValueError(f"{str(records)!r} holds no confidences: the draft has no confidence head to calibrate")
    count = int(rounds.conversation.max()) + 1
    held = round(holdout * count)
    if not 0 < held < count:
        raise ValueError(
            f"{str(records)!r} holds {count} conversation(s), which holdout {holdout} cannot split: evaluate more"
        )
    test = np.isin(rounds.conversation, np.random.default_rng(seed).permutation(count)[:held])
    names = ", ".join(dict.fromkeys(each.dataset for each in answers))
    result = fit_and_measure(rounds.select(~test), rounds.select(test), names)
    if result["ece_before"] is None:
        raise ValueError(f"{str(records)!r}: no block was proposed in the conversations kept for measuring")
    about = {"command": command_line(), "records_digest": records_digest(records)}
    write_text(path, json.dumps(result | about, indent=2) + "\n")
    table = Table("position", "temperature", "ECE before", "ECE after", title="Predicted survival, on other answers")
    for k, temperature in enumerate(result["temperatures"], 1):
        errors = (result[name][k - 1] for name in ("ece_before_by_position", "ece_after_by_position"))
        table.add_row(f"@{k}", f"{temperature:.2f}", *("" if each is None else f"{each:.4f}" for each in errors))
    Console().print(table)
    print(
        f"Fitted on {result['num_samples']} rounds of {count - held} conversations, measured on {held} others: "
        f"mean ECE {result['ece_before']:.4f} before, {result['ece_after']:.4f} after"
    )
    print(f"Temperatures written to {path}")
    if (result["ece_after"] or 0) >= (result["ece_before"] or 0):
        print("They do not help on the other conversations: fit them on more answers before you use them")
    else:
        following = [
            "dspark",
            "schedule",
            "--records",
            str(records),
            "--temperatures",
            str(path),
            "--profile",
            "TARGET",
        ]
        print(f"Next: {shlex.join(following)}")
