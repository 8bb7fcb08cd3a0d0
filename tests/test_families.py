"""What must hold for the draft of every family."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import AutoConfig

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.registry import build_draft_model, resolve_dspark_draft_spec
from dspark_lightning.export import export_draft
from dspark_lightning.loss import compute_dspark_loss
from dspark_lightning.pretrained import load_pretrained_draft
from dspark_lightning.rope import rope_errors
from family_helpers import ARGS, FAMILIES, LOSS, VARIANTS, build_pair, shake, token_ids
from tiny_target import build_tiny_target

ALL = FAMILIES | VARIANTS
ANCHORS = {
    "anchor_positions": torch.tensor([[0, 3, 9, 17, 24, 30], [2, 5, 6, 20, 0, 0]]),
    "block_keep_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]) > 0,
}


def batch_of(family: str, **changes: Any) -> tuple[DSparkDraft, dict[str, Any]]:
    target, draft = build_pair(family, **changes)
    ids = token_ids()
    return draft, {**vars(target.generate_batch(ids, None, torch.ones_like(ids))), **ANCHORS}


@pytest.mark.parametrize("family", ALL)
def test_the_registry_gives_every_target_its_draft(family: str) -> None:
    config = build_tiny_target(family).config
    draft = build_draft_model(config, **ARGS)
    assert type(draft).__name__ == ALL[family]
    assert draft.config.architectures == [ALL[family]]
    assert type(draft)._no_split_modules == [type(draft.layers[0]).__name__]
    assert draft.config.num_target_layers == 4 and len(draft.layers) == 2
    assert resolve_dspark_draft_spec(["NoSuchClass", config.model_type]).model_class is type(draft)


@pytest.mark.parametrize("family", ALL)
def test_weights_start_normal_and_biases_at_zero(family: str) -> None:
    _, draft = build_pair(family, markov_head_type="rnn", confidence_head_alpha=1.0)
    norm_start = 0.0 if "minimax" in family else 1.0  # MiniMax stores the weight of a norm minus one
    seen = set()
    for name, value in draft.state_dict().items():
        if name in ("embed_tokens.weight", "lm_head.weight"):
            continue
        kind = "matrix" if value.dim() == 2 else name.rpartition(".")[2] if "sinks" not in name else "sinks"
        seen.add(kind)
        if kind == "matrix":  # five standard errors of the mean and of the standard deviation
            assert abs(value.mean()) < 5 * 0.02 / value.numel() ** 0.5, name
            assert abs(value.std() - 0.02) < 5 * 0.02 / (2 * value.numel()) ** 0.5, name
        else:
            start = {"bias": 0.0, "sinks": 0.0, "layer_scalar": 1.0, "weight": norm_start}[kind]
            assert torch.equal(value, torch.full_like(value, start)), name
    assert {"matrix", "bias", "weight"} <= seen


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("family", ALL)
def test_hidden_form_and_split_attention_equal_the_plain_form(family: str, head: str) -> None:
    draft, batch = batch_of(family, markov_head_type=head)
    shake(draft)
    results = []
    for attention, output in (("dense", "logits"), ("split", "hidden")):
        draft.attention = attention
        draft.zero_grad()
        loss, terms = compute_dspark_loss(outputs=draft(**batch, output=output), **LOSS, return_terms=True)
        loss.backward()
        results.append((terms, {n: p.grad.clone() for n, p in draft.named_parameters() if p.requires_grad}))
    (plain, plain_grads), (fast, fast_grads) = results
    assert plain["supervised_tokens"] > 0
    for name in plain:
        assert_close(fast[name], plain[name], rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    for name, gradient in plain_grads.items():
        assert gradient.abs().max() > 0, f"{name} has no gradient"
        assert (fast_grads[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max(), name


@pytest.mark.parametrize("family", ALL)
def test_blocks_see_the_past_and_themselves_only(family: str) -> None:
    """Features at and behind an anchor, and everything of another block, leave a block's logits alone."""
    draft, batch = batch_of(family)
    shake(draft)
    plain = draft(**batch).draft_logits

    def logits(**changes: Tensor) -> Tensor:
        return draft(**{**batch, **changes}).draft_logits

    for anchor, block in ((9, 2), (24, 4)):
        features = batch["target_hidden_states"].clone()
        features[0, anchor:] += 1.0
        changed = logits(target_hidden_states=features)
        assert_close(changed[0, : block + 1], plain[0, : block + 1])
        features = batch["target_hidden_states"].clone()
        features[0, anchor - 1] += 1.0
        changed = logits(target_hidden_states=features)
        assert (changed[0, block] - plain[0, block]).abs().max() > 1e-4
    other = batch["input_ids"].clone()
    other[0, 9] = 7  # the anchor token of block 2
    changed = logits(input_ids=other)
    assert (changed[0, 2] - plain[0, 2]).abs().max() > 1e-4
    # Block 1 has the token as no anchor and, in its four slots behind position 3, no previous token of it either.
    assert_close(changed[0, [0, 1, 3, 4, 5]], plain[0, [0, 1, 3, 4, 5]])


def expected_angles(family: str) -> Tensor:
    """Radians per position of each pair of channels, by the published formulas, for the tiny targets."""

    def powers(theta: float, dim: int) -> Tensor:
        return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    return {
        "qwen3": lambda: powers(1e4, 16).repeat(2),
        # Of 16 pairs the first quarter turns; the exponent still runs over the whole head.
        "gemma4": lambda: torch.cat([powers(1e6, 32)[:4], torch.zeros(12, dtype=torch.float64)]).repeat(2),
        "deepseek_v4": lambda: powers(1e4, 16),
        "glm_moe_dsa": lambda: powers(1e4, 8),
        "minimax_m3_vl": lambda: powers(1e4, 8).repeat(2),
    }[family]()


def from_meta(draft: DSparkDraft) -> DSparkDraft:
    with torch.device("meta"):
        empty = type(draft)(draft.config)
    empty.to_empty(device="cpu")
    empty.load_state_dict(draft.state_dict())
    return empty


def bf16_from_meta(draft: DSparkDraft) -> DSparkDraft:
    with torch.device("meta"):
        empty = type(draft)(draft.config)
    return empty.to(torch.bfloat16).to_empty(device="cpu")


JOURNEYS: dict[str, Callable[[DSparkDraft], nn.Module]] = {
    "fresh": lambda draft: draft,
    "to bf16": lambda draft: draft.to(torch.bfloat16),
    "a parent to bf16": lambda draft: nn.ModuleDict({"draft": draft}).to(torch.bfloat16)["draft"],
    "from meta": from_meta,
    "bf16 from meta": bf16_from_meta,
}


@pytest.mark.parametrize("journey", JOURNEYS)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "kimi_linear"])
def test_rope_keeps_its_values(family: str, journey: str) -> None:
    draft = JOURNEYS[journey](build_pair(family)[1])
    positions = torch.tensor([[0, 1, 500, 4000]])
    cos, sin = draft.rope_tables(torch.zeros(1, 1), positions)
    angles = positions.double().unsqueeze(-1) * expected_angles(family)
    # fp32 rounds an angle of 4000 radians by 1.2e-4; a table in bf16 would be off by more than 10 radians.
    assert_close(cos.double(), angles.cos(), rtol=0, atol=5e-4)
    assert_close(sin.double(), angles.sin(), rtol=0, atol=5e-4)
    assert rope_errors(draft) == []


def test_kimi_has_no_rope() -> None:
    draft = build_pair("kimi_linear")[1]
    assert draft.rotary_emb is None and draft.rope_tables(torch.zeros(1, 1), torch.zeros(1, 1)) is None
    assert not [name for name, _ in draft.named_buffers()]


@pytest.mark.parametrize("family", ALL)
def test_a_draft_from_meta_computes_the_same(family: str) -> None:
    draft, batch = batch_of(family)
    shake(draft)
    assert torch.equal(from_meta(draft)(**batch).draft_logits, draft(**batch).draft_logits)


@pytest.mark.parametrize("family", ALL)
def test_export_round_trip(family: str, tmp_path: Path) -> None:
    draft, batch = batch_of(family)
    shake(draft)
    draft.to(torch.bfloat16)
    loaded = load_pretrained_draft(export_draft(draft, tmp_path / "a-dspark"))
    assert type(loaded) is type(draft)
    assert loaded.state_dict().keys() == draft.state_dict().keys()
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), draft.state_dict().values(), strict=True)
    )
    assert torch.equal(loaded(**batch).draft_logits, draft.eval()(**batch).draft_logits)
    again = load_pretrained_draft(export_draft(loaded, tmp_path / "b-dspark"))
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("a-dspark", "b-dspark")]
    assert configs[0] == configs[1] and rope_errors(again) == []


@pytest.mark.parametrize(
    ("family", "theta", "scaling"),
    [
        ("qwen3", 1e4, None),
        ("gemma4", 1e6, None),
        ("deepseek_v4", 1e4, None),
        ("glm_moe_dsa", 1e4, None),
        ("kimi_linear", None, None),
        ("minimax_m3_vl", 1e4, None),
    ],
)
def test_the_exported_config_has_the_rope_of_the_draft(
    family: str, theta: float | None, scaling: dict[str, Any] | None, tmp_path: Path
) -> None:
    """Engines read the older flat fields; for targets with several kinds of layers they are those of the draft's.

    Gemma's scaling stands in rope_parameters only: transformers would not read its own config with a flat one beside.
    """
    export_draft(build_pair(family)[1], tmp_path / "dspark")
    config = json.loads((tmp_path / "dspark" / "config.json").read_text())
    assert (config["rope_theta"], config.get("rope_scaling")) == (theta, scaling)


@pytest.mark.parametrize("family", ALL)
def test_transformers_reads_the_exported_folder(family: str, tmp_path: Path) -> None:
    """Its config by AutoConfig, and the whole by the draft's own class, as an engine built on transformers would."""
    draft, batch = batch_of(family)
    shake(draft)
    folder = export_draft(draft.to(torch.bfloat16), tmp_path / "dspark")
    config = AutoConfig.from_pretrained(folder)
    assert type(config) is type(draft.config) and config.target_layer_ids == draft.target_layer_ids
    loaded = type(draft).from_pretrained(folder, dtype=torch.bfloat16)
    assert torch.equal(loaded(**batch).draft_logits, draft.eval()(**batch).draft_logits)


@pytest.mark.parametrize("family", ALL)
def test_hugging_faces_own_loading(family: str, tmp_path: Path) -> None:
    """Tables that are not saved come back, whatever way a user loads the draft."""
    draft, batch = batch_of(family)
    draft.set_embedding_head_trainable(True)  # apart from the target's, which may be tied
    shake(draft)
    draft.save_pretrained(tmp_path)
    loaded = type(draft).from_pretrained(tmp_path)
    assert rope_errors(loaded) == []
    assert torch.equal(loaded(**batch).draft_logits, draft.eval()(**batch).draft_logits)


@pytest.mark.parametrize("family", ALL)
def test_packed_documents_equal_each_alone(family: str) -> None:
    """The draft's side of packing: the features of a document do not depend on the others."""
    target, draft = build_pair(family)
    shake(draft)
    lengths, anchors = (14, 18), ([1, 6, 11], [2, 9, 15])
    parts = token_ids(rows=1).split(lengths, dim=1)
    alone = []
    for ids, starts in zip(parts, anchors, strict=True):
        features = vars(target.generate_batch(ids, None, torch.ones_like(ids)))
        places = {"anchor_positions": torch.tensor([starts]), "block_keep_mask": torch.ones(1, 3, dtype=torch.bool)}
        alone.append((features, draft(**features, **places)))
    joined: dict[str, Any] = {
        name: torch.cat([features[name] for features, _ in alone], dim=1)
        for name in ("input_ids", "loss_mask", "target_hidden_states", "target_last_hidden_states")
    }
    packed = draft(
        **joined,
        position_ids=torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0),
        seq_lens=torch.tensor([lengths]),
        doc_remaining=torch.cat([torch.arange(n - 1, -1, -1) for n in lengths]).unsqueeze(0),
        anchor_positions=torch.tensor([[*anchors[0], *(lengths[0] + a for a in anchors[1])]]),
        block_keep_mask=torch.ones(1, 6, dtype=torch.bool),
    )
    counts = packed.eval_mask
    assert torch.equal(counts, torch.cat([output.eval_mask for _, output in alone], dim=1))
    assert 0 < counts.sum() < counts.numel()
    for name in ("draft_logits", "aligned_target_logits", "confidence_pred"):
        expected = torch.cat([getattr(output, name) for _, output in alone], dim=1)
        assert_close(getattr(packed, name)[counts], expected[counts], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma4", "gemma4_noeq", "gemma4_unified", "glm_moe_dsa"])
def test_target_and_draft_on_packed_rows(family: str) -> None:
    """The whole of it: two packed rows through the target give the loss terms of the four documents one by one.

    Two documents are longer than Gemma's window of 16.
    """
    target, draft = build_pair(family)
    shake(draft)
    lengths, anchors = [(24, 8), (11, 21)], [([2, 17], [3]), ([5], [1, 13])]
    ids = token_ids()
    total: dict[str, Tensor] = {}
    for row, starts_of_row in enumerate(anchors):
        for part, starts in zip(ids[row : row + 1].split(lengths[row], dim=1), starts_of_row, strict=True):
            batch = vars(target.generate_batch(part, None, torch.ones_like(part)))
            keep = torch.ones(1, len(starts), dtype=torch.bool)
            output = draft(**batch, anchor_positions=torch.tensor([starts]), block_keep_mask=keep)
            _, terms = compute_dspark_loss(outputs=output, **LOSS, return_terms=True)
            total = {name: value + total.get(name, 0) for name, value in terms.items()}
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    remaining = torch.stack([torch.cat([torch.arange(n - 1, -1, -1) for n in row]) for row in lengths])
    batch = vars(target.generate_batch(ids, None, torch.ones_like(ids), positions, torch.tensor(lengths), remaining))
    starts = torch.tensor([[2, 17, 24 + 3], [5, 11 + 1, 11 + 13]])
    output = draft(**batch, anchor_positions=starts, block_keep_mask=torch.ones(2, 3, dtype=torch.bool))
    _, packed = compute_dspark_loss(outputs=output, **LOSS, return_terms=True)
    sums = [name for name in packed if name.endswith(("_num", "_den", "_tokens", "_anchors"))]
    assert {"ce_loss_num", "l1_loss_num", "confidence_loss_num", "loss_den", "tau_num"} <= set(sums)
    for name in sums:
        assert_close(packed[name], total[name], rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
