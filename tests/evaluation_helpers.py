"""A draft for the embedded target, not trained but moved away from its start, exported for the evaluation's tests."""

from pathlib import Path
from typing import Any

from dspark_lightning.cli import main
from dspark_lightning.decoding.records import AnswerRecord
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.registry import build_draft_model
from dspark_lightning.embedded import embedded_path
from dspark_lightning.export import export_draft
from dspark_lightning.loading import load_target
from dspark_lightning.target import HFDSparkTargetModel
from family_helpers import ARGS, shake
from helpers import seeded


def embedded_pair(**changes: Any) -> tuple[HFDSparkTargetModel, DSparkDraft]:
    """The embedded target and an untrained draft for it."""
    model = load_target(str(embedded_path()))
    with seeded(1):
        draft = build_draft_model(model.config, **(ARGS | changes))
    target = HFDSparkTargetModel(model, draft.target_layer_ids)
    draft.initialize_embeddings_and_head(embed_tokens=target.embed_tokens, lm_head=target.lm_head)
    shake(draft)
    return target, draft


def export_untrained(folder: Path, **changes: Any) -> Path:
    """Write it as a folder."""
    return export_draft(embedded_pair(**changes)[1], folder / "dspark-draft")


def evaluate(draft: Path, *options: str) -> None:
    defaults = {"--target": "embedded", "--accelerator": "cpu", "--max_new_tokens": "10"}
    common = [part for pair in defaults.items() if pair[0] not in options for part in pair]
    main(["evaluate", "--draft", str(draft), *common, *options])


def decoded_record(index: int, accepted: list[int]) -> AnswerRecord:
    whole = [ARGS["block_size"]] * len(accepted)
    return AnswerRecord("d", index, 0, 6, 24, whole, whole, accepted, None, 1.0, None, None)
