"""Every golden case. golden/README.md says what the cases hold and what is free."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.testing import assert_close

from dspark_lightning.anchors import (
    block_label_indices,
    build_anchor_candidate_mask,
    build_eval_mask,
    context_doc_ids,
    create_noise_embed,
    create_position_ids,
)
from dspark_lightning.attention import AttentionKind, block_visibility
from dspark_lightning.decoding.sampling import logits_to_probs
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.registry import build_draft_model
from dspark_lightning.heads import build_markov_head
from dspark_lightning.loss import compute_dspark_loss
from dspark_lightning.outputs import DSparkForwardOutput
from helpers import GoldenCase, load_case, tiny_qwen3_config

# This case's other terms differ on purpose: ours knows the acceptance whenever it is given a teacher.
LOSS_AND_CE_ONLY = "qwen3_no_markov_no_confidence"
DRAFTS = (
    "deepseek_v4",
    "gemma4",
    "gemma4_noeq",
    "glm_5_2",
    "glm_5_2_yarn",
    "kimi_k3",
    "minimax_m3",
    "qwen3_confidence_without_markov",
    "qwen3_embedding_feature",
    "qwen3_few_anchors",
    "qwen3_gated",
    "qwen3_moe",
    LOSS_AND_CE_ONLY,
    "qwen3_packed",
    "qwen3_rnn",
    "qwen3_vanilla",
    "qwen3_yarn",
)
HEADS = ("vanilla", "gated", "rnn")
TERMS = {
    "loss",
    "ce_loss",
    "l1_loss",
    "confidence_loss",
    "accept_rate_per_pos_num",
    "accept_rate_per_pos_den",
    "tau_num",
    "tau_den",
    "confidence_abs_error_num",
    "confidence_bias_num",
    "confidence_cumprod_bias_num",
    "confidence_diag_den",
}
VALUES = {"rtol": 1e-5, "atol": 1e-5}


@dataclass
class Run:
    """A golden draft case after our forward and backward pass."""

    name: str
    golden: GoldenCase
    draft: DSparkDraft
    output: DSparkForwardOutput
    terms: dict[str, Tensor]


def build_golden_draft(golden: GoldenCase) -> DSparkDraft:
    case, fields = golden.case, dict(golden.case["target_config"])
    if case["target_config_class"] == "GlmMoeDsaConfig":
        del fields["layer_types"]  # all alike, and named differently before transformers 5.24: the class knows
    target_config = getattr(transformers, case["target_config_class"])(**fields)
    draft = build_draft_model(target_config, **case["model_args"])
    draft.load_state_dict(golden.state, strict=True)
    return draft


@pytest.fixture(scope="module", params=DRAFTS)
def run(request: pytest.FixtureRequest) -> Run:
    golden = load_case(f"draft/{request.param}")
    case = golden.case
    draft = build_golden_draft(golden)
    output = draft(**golden.inputs)
    for tensor in (output.draft_logits, output.confidence_pred):
        if tensor is not None:
            tensor.retain_grad()
    loss, terms = compute_dspark_loss(outputs=output, **case["loss"], return_terms=True)
    loss.backward()
    return Run(request.param, golden, draft, output, terms)


def assert_gradient(ours: Tensor | None, expected: Tensor, name: str) -> None:
    assert ours is not None, f"{name} has no gradient"
    error = (ours - expected).abs().max() / expected.abs().max()
    assert error <= 1e-4, f"the gradient of {name} is off by {error:.1e} of its largest entry"


def test_masks_and_labels(run: Run) -> None:
    expected, output = run.golden.expected, run.output
    assert torch.equal(output.eval_mask, expected["eval_mask"])
    assert torch.equal(output.block_keep_mask, expected["block_keep_mask"])
    assert torch.equal(output.target_ids[output.eval_mask], expected["target_ids"][output.eval_mask])
    assert output.eval_mask.any()


def test_logits_and_confidence(run: Run) -> None:
    expected, output, keep = run.golden.expected, run.output, run.output.block_keep_mask
    assert_close(output.draft_logits[keep], expected["draft_logits"][keep], **VALUES)
    assert (output.confidence_pred is None) == ("confidence_pred" not in expected)
    if output.confidence_pred is not None:
        assert_close(output.confidence_pred[keep], expected["confidence_pred"][keep], **VALUES)


def test_teacher_logits(run: Run) -> None:
    counts = run.output.eval_mask
    if "aligned_target_logits" not in run.golden.expected:
        assert run.name == LOSS_AND_CE_ONLY
        return
    expected = run.golden.expected["aligned_target_logits"]
    assert_close(run.output.aligned_target_logits[counts], expected[counts], **VALUES)


def test_loss_terms(run: Run) -> None:
    expected = {name.removeprefix("term."): value for name, value in run.golden.expected.items() if "term." in name}
    assert expected.keys() == TERMS
    names = {"loss", "ce_loss"} if run.name == LOSS_AND_CE_ONLY else TERMS
    for name in names:
        assert_close(
            run.terms[name].reshape(-1), expected[name], **VALUES, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_gradients_at_the_outputs(run: Run) -> None:
    expected = run.golden.expected
    assert_gradient(run.output.draft_logits.grad, expected["grad_draft_logits"], "draft_logits")
    if run.output.confidence_pred is not None:
        assert_gradient(run.output.confidence_pred.grad, expected["grad_confidence_pred"], "confidence_pred")


def test_parameter_gradients(run: Run) -> None:
    trainable = {name: p for name, p in run.draft.named_parameters() if p.requires_grad}
    assert trainable.keys() == run.golden.grads.keys()
    for name, parameter in trainable.items():
        assert_gradient(parameter.grad, run.golden.grads[name], name)


@pytest.mark.parametrize("attention", ["split", "dense"])
@pytest.mark.parametrize("name", DRAFTS)
def test_the_loss_from_hidden_states(name: str, attention: AttentionKind) -> None:
    """The form that training uses: the same terms and parameter gradients, whatever the attention."""
    golden = load_case(f"draft/{name}")
    case, expected = golden.case, golden.expected
    draft = build_golden_draft(golden)
    draft.attention = attention
    loss, terms = compute_dspark_loss(
        outputs=draft(**golden.inputs, output="hidden"), **case["loss"], return_terms=True
    )
    loss.backward()
    for term in {"loss", "ce_loss"} if name == LOSS_AND_CE_ONLY else TERMS:
        assert_close(terms[term].reshape(-1), expected[f"term.{term}"], **VALUES)
    for parameter, gradient in golden.grads.items():
        assert_gradient(draft.get_parameter(parameter).grad, gradient, parameter)


@pytest.fixture(scope="module")
def common() -> GoldenCase:
    return load_case("common/anchors_and_masks")


def packing(golden: GoldenCase, packed: bool, *names: str) -> dict[str, Tensor]:
    return {name: golden.inputs[name] for name in names} if packed else {}


@pytest.mark.parametrize(("packed", "suffix"), [(False, ""), (True, "_packed")])
def test_candidates(common: GoldenCase, packed: bool, suffix: str) -> None:
    extra = packing(common, packed, "doc_remaining")
    candidates = build_anchor_candidate_mask(common.case["seq_len"], common.inputs["loss_mask"], **extra)
    assert torch.equal(candidates, common.expected[f"candidates{suffix}"])


@pytest.mark.parametrize(("packed", "suffix"), [(False, ""), (True, "_packed")])
def test_eval_mask(common: GoldenCase, packed: bool, suffix: str) -> None:
    names = ("loss_mask", "label_indices", "safe_label_indices", "block_keep_mask")
    given = {name: common.inputs[name] for name in names}
    extra = packing(common, packed, "doc_remaining", "anchor_positions")
    mask = build_eval_mask(common.case["seq_len"], **given, **extra)
    assert torch.equal(mask, common.expected[f"eval_mask{suffix}"])


def test_label_indices(common: GoldenCase) -> None:
    anchors, case = common.inputs["anchor_positions"], common.case
    indices, safe = block_label_indices(anchors, case["block_size"], case["seq_len"])
    kept = common.inputs["block_keep_mask"]
    assert torch.equal(indices[kept], common.inputs["label_indices"][kept])
    assert torch.equal(safe[kept], common.inputs["safe_label_indices"][kept])


@pytest.mark.parametrize(("packed", "suffix"), [(False, ""), (True, "_packed")])
def test_block_positions(common: GoldenCase, packed: bool, suffix: str) -> None:
    extra = packing(common, packed, "context_position_ids")
    positions = create_position_ids(common.inputs["anchor_positions"], common.case["block_size"], **extra)
    assert torch.equal(positions, common.expected[f"position_ids{suffix}"])


@pytest.mark.parametrize(("packed", "suffix"), [(False, ""), (True, "_packed")])
def test_visibility(common: GoldenCase, packed: bool, suffix: str) -> None:
    anchors, keep = common.inputs["anchor_positions"], common.inputs["block_keep_mask"]
    extra = packing(common, packed, "seq_lens")
    visible = block_visibility(common.case["seq_len"], anchors, keep, common.case["block_size"], **extra)
    assert torch.equal(visible, common.expected[f"visible{suffix}"])


def test_document_ids(common: GoldenCase) -> None:
    doc_ids = context_doc_ids(common.inputs["seq_lens"], common.case["seq_len"], "cpu")
    assert torch.equal(doc_ids, common.expected["doc_ids"])


def test_block_input(common: GoldenCase) -> None:
    embed = nn.Embedding.from_pretrained(common.inputs["embedding"])
    given = [common.inputs[name] for name in ("input_ids", "anchor_positions", "block_keep_mask")]
    noise = create_noise_embed(embed, *given, common.case["mask_token_id"], common.case["block_size"])
    assert torch.equal(noise, common.expected["noise_embed"])


@pytest.mark.parametrize("kind", HEADS)
def test_teacher_forced_head(kind: str) -> None:
    golden = load_case(f"markov/{kind}")
    head = build_markov_head(SimpleNamespace(**golden.case))
    head.load_state_dict(golden.state, strict=True)
    logits = head(golden.inputs["base_logits"], golden.inputs["token_ids"], golden.inputs["hidden_states"])
    assert_close(logits, golden.expected["block_logits"], **VALUES)


@pytest.mark.parametrize("kind", HEADS)
def test_greedy_block(kind: str) -> None:
    golden = load_case(f"markov/{kind}")
    case, inputs = golden.case, golden.inputs
    config = tiny_qwen3_config(vocab_size=case["vocab_size"], hidden_size=case["hidden_size"])
    heads = {"markov_rank": case["markov_rank"], "markov_head_type": kind}
    draft = build_draft_model(config, mask_token_id=1, num_draft_layers=1, **heads)
    draft.markov_head.load_state_dict(golden.state, strict=True)
    first, hidden = inputs["token_ids"][:, 0, 0], inputs["hidden_states"][:, 0]
    tokens, corrected = draft.sample_draft_tokens(inputs["base_logits"][:, 0], first, hidden_states=hidden)
    assert torch.equal(tokens, golden.expected["greedy_tokens"])
    assert_close(corrected, golden.expected["greedy_corrected_logits"], **VALUES)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_probabilities(temperature: float) -> None:
    golden = load_case("sampling/probs")
    assert golden.case["temperatures"] == [0.0, 0.7, 1.0]
    probs = logits_to_probs(golden.inputs["logits"], temperature)
    assert_close(probs, golden.expected[f"t{temperature}"], **VALUES)
