"""A short decode with the folder as it lies there: a draft that was trained well must not serve badly.

Greedy decoding is deterministic, so on one machine the same weights give the same tau; other devices and dtypes round
differently, and where two tokens are almost equally likely the texts part.
"""

import warnings
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from dspark_lightning.decoding.generate import speculative_generate
from dspark_lightning.decoding.settings import check_positions
from dspark_lightning.evaluation.pair import pair_up
from dspark_lightning.machine import describe_machine
from dspark_lightning.pretrained import load_pretrained_draft
from dspark_lightning.serving.card import write_about
from dspark_lightning.serving.findings import Verdict, error, ok, skipped, warning
from dspark_lightning.serving.folder import read_folder
from dspark_lightning.serving.record import RECORD_FILE, Decoded, ExportRecord

PROMPTS, NEW_TOKENS = 4, 32
"""What is decoded at an export: so many prompts, and so many tokens behind each at most."""
TOLERANCE = 0.1
"""Share by which tau may differ on another machine or in another dtype, and on GPUs."""
_OTHER = "the folder does not hold what was exported, or for another target"


def decode_prompts(
    model: PreTrainedModel, folder: Path, prompts: list[list[int]], max_new_tokens: int = NEW_TOKENS
) -> Decoded | None:
    """Load a draft from its folder and decode with it.

    Args:
        model: the target, whole, on its device; the draft follows it there.
        folder: of the draft.
        prompts: token ids of each; those that are too long for the target are left out.
        max_new_tokens: of each answer.

    Returns:
        what came out; None where no block was ever drafted.

    Raises:
        ValueError: the folder cannot be read, its draft does not fit the target, or a prompt holds what is no token.
    """
    draft = load_pretrained_draft(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the draft's embedding and head are not those")  # a check of its own
        pair_up(model, draft)
    vocabulary = draft.config.vocab_size
    strange = next((token for prompt in prompts for token in prompt if not 0 <= token < vocabulary), None)
    if strange is not None:
        raise ValueError(f"a prompt of {RECORD_FILE} holds the token {strange}, must lie in 0..{vocabulary - 1}")
    device = draft.fc.weight.device
    answers: list[list[int]] = []
    for prompt in prompts:
        if not prompt or not _fits(model, len(prompt) + max_new_tokens):
            continue
        ids = torch.tensor([prompt], device=device)
        answers += speculative_generate(model, draft, ids, max_new_tokens=max_new_tokens).accepted_lengths
    accepted = [count for answer in answers for count in answer]
    if not accepted:
        return None
    attention = str(getattr(model.config, "_attn_implementation", None))
    return Decoded(
        tau=1 + sum(accepted) / len(accepted),
        rounds=len(accepted),
        max_new_tokens=max_new_tokens,
        dtype=str(model.dtype).removeprefix("torch."),
        machine={**describe_machine(device), "device": device.type, "attention": attention},
        accepted=answers,
    )


def keep_decoded(model: PreTrainedModel, folder: Path, record: ExportRecord) -> ExportRecord:
    """Decode with a folder that was just written, and keep in its record and on its card what came out.

    Args:
        model: the target, whole, on its device.
        folder: of the export.
        record: of it, with prompts.

    Returns:
        the record as it is now.

    Raises:
        ValueError: the folder cannot be read or written, or its draft does not fit the target.
    """
    record = replace(record, decoded=decode_prompts(model, folder, record.prompts))
    write_about(folder, read_folder(folder).draft.config, record, folder.name)
    return record


def check_decode(model: PreTrainedModel, folder: Path, record: ExportRecord | None) -> Verdict:
    """Decode the prompts of a folder's record, and compare tau with the one of its export."""
    if record is None or not record.prompts:
        return skipped("the folder keeps no prompts to decode: dspark export writes them where the run validated some")
    stored = record.decoded
    found = decode_prompts(model, folder, record.prompts, NEW_TOKENS if stored is None else stored.max_new_tokens)
    if found is None:
        line = "nothing is drafted: the target ends every answer with its first token, or has no room for the prompts"
        return skipped(line) if stored is None else error(f"{line}; tau was {stored.tau:.2f} at the export")
    line = f"tau is {found.tau:.2f} over {found.rounds} rounds"
    if stored is None:
        return skipped(f"{line}, nothing to compare with: dspark export --target keeps it")
    exact = (found.machine, found.dtype) == (stored.machine, stored.dtype) and found.machine["device"] == "cpu"
    tolerance = 0.0 if exact else TOLERANCE
    line = f"{line}, was {stored.tau:.2f} at the export (tolerance {tolerance:.0%})"
    if abs(found.tau - stored.tau) <= tolerance * stored.tau + 1e-9:
        if exact and stored.accepted not in (None, found.accepted):  # few prompts: their mean can be the same by chance
            return error(f"{line}, but other rounds accept: {_OTHER}")
        return ok(line)
    if found.tau < stored.tau:
        return error(f"{line}: {_OTHER}")
    return warning(f"{line}: better than then, so something else has changed")


def _fits(model: PreTrainedModel, tokens: int) -> bool:
    try:
        check_positions(model.config, tokens, 0)
    except ValueError:
        return False
    return True
