"""Packed or not, the same anchors give the same loss, metrics and gradients: for every target that can be packed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from dspark_lightning.datamodules.collate import collate_rows
from dspark_lightning.datamodules.packing import join_documents
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.registry import build_draft_model
from dspark_lightning.loss import compute_dspark_loss
from dspark_lightning.target import HFDSparkTargetModel, is_right_padded
from family_helpers import ARGS, LOSS, build_pair, shake
from helpers import TINY, seeded, tiny_llama
from packing_helpers import documents, grid

LENGTHS = (20, 9, 13, 5)  # two are longer than the sliding windows of 16 (Gemma) and 8 (Mistral)
PACKS = ((0, 1), (2, 3))  # 29 and 18 tokens, padded to 32
ANCHORS = ([3, 8, 15, 16], [4, 5], [3, 11], [3])  # in each document
Pair = tuple[HFDSparkTargetModel, DSparkDraft]


def pair_of(model: PreTrainedModel) -> Pair:
    with seeded(1):
        draft = build_draft_model(model.config, **ARGS)
    target = HFDSparkTargetModel(model, draft.target_layer_ids)
    draft.initialize_embeddings_and_head(embed_tokens=target.embed_tokens, lm_head=target.lm_head)
    return target, draft


def mistral() -> PreTrainedModel:
    with seeded(0):
        return MistralForCausalLM(MistralConfig(**TINY, head_dim=8, sliding_window=8)).eval()


PAIRS: dict[str, Callable[[], Pair]] = {
    "gemma4": lambda: build_pair("gemma4"),
    "qwen3": lambda: build_pair("qwen3"),
    "qwen3_moe": lambda: build_pair("qwen3_moe"),
    "gemma4_noeq": lambda: build_pair("gemma4_noeq"),
    "gemma4_unified": lambda: build_pair("gemma4_unified"),
    "glm_moe_dsa": lambda: build_pair("glm_moe_dsa"),
    "llama": lambda: pair_of(tiny_llama()),
    "mistral": lambda: pair_of(mistral()),
}


EACH = [pytest.param(name, marks=[] if name in ("gemma4", "qwen3") else pytest.mark.slow) for name in PAIRS]


def outcome(pair: Pair, batch: dict[str, Tensor], anchors: list[list[int]]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Sums of the loss terms and the gradients of the numerator of the loss, as a training step makes them."""
    target, draft = pair
    assert is_right_padded(batch["attention_mask"])
    packing = {name: batch.get(name) for name in ("position_ids", "seq_lens", "doc_remaining")}
    captured = target.generate_batch(batch["input_ids"], None, batch["loss_mask"], **packing)
    places = grid(anchors) | {"attention_mask": batch["attention_mask"]}
    draft.zero_grad()
    outputs = draft(**vars(captured), **places, output="hidden")
    loss, terms = compute_dspark_loss(outputs=outputs, **LOSS, return_terms=True)
    (loss * terms["loss_den"]).backward()
    sums = {name: x for name, x in terms.items() if name.endswith(("_num", "_den", "_tokens", "_anchors"))}
    return sums, {name: p.grad.clone() for name, p in draft.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("attention", ["dense", "split"])
@pytest.mark.parametrize("family", EACH)
def test_packing_changes_no_number(family: str, attention: Any) -> None:
    pair = PAIRS[family]()
    shake(pair[1])
    pair[1].attention = attention
    items = documents(*LENGTHS)
    alone = collate_rows(items, pad_token_id=0, max_length=64)
    packed = collate_rows([join_documents([items[i] for i in pack]) for pack in PACKS], pad_token_id=0, max_length=64)
    assert packed["input_ids"].shape == (2, 32) and alone["input_ids"].shape == (4, 24)
    starts = {i: sum(LENGTHS[j] for j in pack if j < i) for pack in PACKS for i in pack}
    in_packs = [[starts[i] + anchor for i in pack for anchor in ANCHORS[i]] for pack in PACKS]
    expected, expected_gradients = outcome(pair, alone, list(ANCHORS))
    terms, gradients = outcome(pair, packed, in_packs)
    assert terms["kept_anchors"] == 9 and terms["supervised_tokens"] > 18
    assert {"ce_loss_num", "l1_loss_num", "confidence_loss_num", "loss_den", "tau_num"} <= terms.keys()
    for name, value in expected.items():
        assert_close(terms[name], value, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    for name, gradient in expected_gradients.items():
        scale = gradient.abs().max()
        assert scale > 0, f"{name} has no gradient"
        assert (gradients[name] - gradient).abs().max() <= 1e-5 * scale, name


def test_the_documents_of_a_pack_would_matter_if_they_were_seen() -> None:
    """One row of the same tokens has other features: so the equality above says something."""
    target, _ = build_pair("gemma4")
    packed = collate_rows([join_documents(documents(*LENGTHS))], pad_token_id=0, max_length=64)
    tokens = (packed["input_ids"], None, packed["loss_mask"])
    apart = target.generate_batch(*tokens, packed["position_ids"], packed["seq_lens"]).target_hidden_states
    as_one = target.generate_batch(*tokens).target_hidden_states
    assert torch.allclose(apart[:, :20], as_one[:, :20], atol=1e-4)
    assert not torch.allclose(apart[:, 20:], as_one[:, 20:], atol=1e-2)


@pytest.mark.parametrize("family", EACH)
def test_a_target_attends_document_by_document_unless_it_has_to_see_the_whole_row(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = PAIRS[family]()
    packed = collate_rows([join_documents(documents(20, 9)), join_documents(documents(13))], 0, max_length=64)
    places = (packed["position_ids"], packed["seq_lens"])
    seen: list[int] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        seen.append(key.shape[2])
        return attend(query, key, value, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    target.generate_batch(packed["input_ids"], None, packed["loss_mask"], *places)
    whole_rows = family == "glm_moe_dsa"  # an indexer chooses what a token sees
    assert set(seen) == ({32} if whole_rows else {20, 9, 13})
    assert target.model.config.get_text_config()._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", EACH)
def test_what_stands_in_the_padding_of_a_pack_is_seen_by_nothing(family: str) -> None:
    target, draft = PAIRS[family]()
    packed = collate_rows([join_documents(documents(20, 9))], pad_token_id=0, max_length=64)
    sums = []
    for fill in (0, 7):
        ids = torch.where(packed["attention_mask"] == 1, packed["input_ids"], fill)
        sums.append(outcome((target, draft), packed | {"input_ids": ids}, [[3, 8, 24, 25]])[0])
    for name, value in sums[0].items():
        assert_close(sums[1][name], value, rtol=0, atol=1e-6)
