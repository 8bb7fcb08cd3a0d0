"""Acceptance as training measures it is acceptance as decoding finds it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dspark_lightning.decoding.records import AnswerRecord
from dspark_lightning.decoding.row import DecodedRow
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.registry import build_draft_model
from dspark_lightning.evaluation.summary import summarise
from dspark_lightning.target import HFDSparkTargetModel
from family_helpers import ARGS, shake
from helpers import seeded
from tiny_target import build_tiny_target


def outputs_of(target: HFDSparkTargetModel, draft: DSparkDraft, runs: int) -> list[tuple[Tensor, DecodedRow]]:
    """Sequences [1, S + L] sampled at temperature 1 behind different prompts of 6 tokens."""
    generator, outputs = torch.Generator().manual_seed(0), []
    for _ in range(runs):
        prompt = torch.randint(6, 12, (6,), generator=generator)
        row = DecodedRow(target, draft, prompt, 1.0, generator=generator)
        row.run(25, set())
        outputs.append((torch.cat([prompt, torch.tensor(row.tokens)]).unsqueeze(0), row))
    return outputs


def teacher_forced(target: HFDSparkTargetModel, draft: DSparkDraft, ids: Tensor, anchors: list[int]) -> Tensor:
    """Acceptance at the first position behind each anchor, as in training."""
    ones, places = torch.ones_like(ids), torch.tensor([anchors])
    with torch.no_grad():
        keep = torch.ones_like(places).bool()
        out = draft(**vars(target.generate_batch(ids, ones, ones)), anchor_positions=places, block_keep_mask=keep)
    p, q = out.draft_logits[0, :, 0].softmax(-1), out.aligned_target_logits[0, :, 0].softmax(-1)
    return 1 - (p - q).abs().sum(-1) / 2


def round_starts(row: DecodedRow) -> list[int]:
    """Positions of the anchors of an answer behind 6 prompt tokens, of rounds that proposed anything."""
    accepted = [each.accepted for each in row.rounds]
    return [6 + sum(accepted[:i]) + i for i, each in enumerate(row.rounds) if each.proposed]


@pytest.fixture(scope="module")
def sampled() -> tuple[HFDSparkTargetModel, list[DSparkDraft], list[tuple[Tensor, DecodedRow]]]:
    """A target, two drafts, of which the second agrees with it much less, and what is decoded with the first."""
    model, drafts = build_tiny_target("qwen3", vocab_size=12), []
    for _ in range(2):
        with seeded(1):
            draft = build_draft_model(model.config, **ARGS)
        draft.initialize_embeddings_and_head(model.get_input_embeddings(), model.get_output_embeddings())
        shake(draft)
        drafts.append(draft)
    with torch.no_grad():
        drafts[1].norm.weight.mul_(-1)
    target = HFDSparkTargetModel(model, drafts[0].target_layer_ids)
    return target, drafts, outputs_of(target, drafts[0], 80)


@pytest.mark.parametrize("everywhere", [False, True], ids=["where rounds began", "at every token"])
def test_acceptance_of_training_is_that_of_decoding(everywhere: bool, sampled: Any) -> None:
    """Teacher-forced accept_rate@1 on what the target says at temperature 1, in the interval of the decoded one."""
    target, drafts, outputs = sampled
    records = [recorded(i, row) for i, (_, row) in enumerate(outputs)]
    low, high = summarise(records, ARGS["block_size"])["conditional_intervals"][0]
    rates = []
    for draft in drafts:
        places = [list(range(6, ids.shape[1] - 1)) if everywhere else round_starts(row) for ids, row in outputs]
        parts = [teacher_forced(target, draft, ids, p) for (ids, _), p in zip(outputs, places, strict=True)]
        rates.append(torch.cat(parts).mean().item())
    assert low < rates[0] < high and high - low < 0.1, (low, rates, high)
    assert not low < rates[1] < high, (low, rates, high)


def recorded(index: int, row: DecodedRow) -> AnswerRecord:
    proposed, judged, accepted, _ = map(list, zip(*row.rounds, strict=True))
    return AnswerRecord("d", index, 0, 6, len(row.tokens), proposed, judged, accepted, None, 1.0, None, None)
