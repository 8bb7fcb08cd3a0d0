"""What a draft promises, whatever its family: weights, heads, labels, and shapes at the edges."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import PretrainedConfig, Qwen3PreTrainedModel

import dspark_lightning
from dspark_lightning.anchors import row_generator
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.qwen3 import Qwen3DSparkModel
from dspark_lightning.drafts.registry import build_draft_model
from dspark_lightning.loss import compute_dspark_loss
from dspark_lightning.rope import rope_errors
from helpers import seeded, tiny_qwen3, tiny_qwen3_config

ARGS = {"mask_token_id": 96, "num_draft_layers": 2, "block_size": 4, "num_anchors": 3, "markov_rank": 8}
LOSS = {"loss_decay_gamma": 4.0, "ce_loss_alpha": 0.1, "l1_loss_alpha": 0.9, "confidence_head_alpha": 1.0}
S = 16


def make_draft(config: PretrainedConfig | None = None, seed: int = 0, **changes: Any) -> DSparkDraft:
    with seeded(seed):
        return build_draft_model(config or tiny_qwen3_config(), **{**ARGS, **changes})


def inputs(seq_len: int = S, features: int = 2, rows: int = 2) -> dict[str, Tensor]:
    with seeded(0):
        return {
            "input_ids": torch.randint(0, 96, (rows, seq_len)),
            "target_hidden_states": torch.randn(rows, seq_len, features * 32),
            "loss_mask": torch.ones(rows, seq_len, dtype=torch.int64),
            "target_last_hidden_states": torch.randn(rows, seq_len, 32),
        }


def anchored(*anchors: int) -> dict[str, Tensor]:
    positions = torch.tensor([anchors, anchors])
    return inputs() | {"anchor_positions": positions, "block_keep_mask": torch.ones_like(positions).bool()}


def loss_of(draft: DSparkDraft, given: dict[str, Tensor]) -> Tensor:
    return compute_dspark_loss(draft(**given), **LOSS)


def test_public_attributes() -> None:
    draft = make_draft(target_layer_ids=[0, 2, 4])
    assert isinstance(draft, Qwen3PreTrainedModel)
    assert type(draft)._no_split_modules == ["Qwen3DSparkDecoderLayer"]
    assert {type(layer).__name__ for layer in draft.layers} == {"Qwen3DSparkDecoderLayer"}
    assert (draft.block_size, draft.mask_token_id, draft.num_anchors) == (4, 96, 3)
    assert draft.target_layer_ids == [0, 2, 4] and draft.enable_confidence_head is True
    for name in (
        "embed_tokens",
        "norm",
        "rotary_emb",
        "fc",
        "hidden_norm",
        "lm_head",
        "markov_head",
        "confidence_head",
    ):
        assert isinstance(getattr(draft, name), nn.Module), name


def test_heads_can_be_left_out() -> None:
    draft = make_draft(markov_rank=0, confidence_head_alpha=0.0)
    assert draft.markov_head is None and draft.confidence_head is None and not draft.enable_confidence_head
    assert draft(**inputs()).confidence_pred is None
    assert draft.predict_confidence_step(torch.zeros(2, 32)) is None


@pytest.mark.parametrize(
    ("changes", "width"), [({}, 40), ({"markov_rank": 0}, 32), ({"confidence_head_with_markov": False}, 32)]
)
def test_width_of_the_confidence_head(changes: dict[str, Any], width: int) -> None:
    draft = make_draft(**changes)
    assert draft.confidence_head.proj.weight.shape == (1, width)
    assert draft.config.confidence_head_with_markov == (width == 40)
    assert draft(**inputs()).confidence_pred.shape == (2, 3, 4)


def test_initial_weights() -> None:
    draft = make_draft(tiny_qwen3_config(vocab_size=1000, hidden_size=128), mask_token_id=1, markov_rank=64)
    for name, parameter in draft.named_parameters():
        if name.endswith("bias"):
            assert parameter.abs().max() == 0, name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        elif parameter.numel() > 1000:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name
            assert parameter.mean().abs() < 0.002, name
    assert {p.dtype for p in draft.parameters()} == {torch.float32}


def test_initial_weights_follow_from_the_seed() -> None:
    first, same, other = (make_draft(seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


def describe_a_draft() -> str:
    """Numbers that depend on every weight, on a forward pass and on the anchors drawn."""
    draft, given = make_draft(seed=5), anchored(2, 7)
    weights = sum(p.double().abs().sum().item() for p in draft.parameters())
    anchors = torch.randperm(1000, generator=row_generator(1, 2, 3))[:5].tolist()
    return f"{weights} {draft(**given).draft_logits.double().sum().item()} {anchors}"


def test_another_process_gives_the_same_draft() -> None:
    folders = (Path(__file__).parent, Path(dspark_lightning.__file__).parent.parent)
    environment = {**os.environ, "PYTHONHASHSEED": "1234", "PYTHONPATH": os.pathsep.join(map(str, folders))}
    script = "import conftest, test_draft_model; print(test_draft_model.describe_a_draft())"
    command = [sys.executable, "-c", script]
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == describe_a_draft()


# Embedding and head -----------------------------------------------------------------------------------------------


def with_targets_weights(freeze: bool = True, **target_changes: Any) -> tuple[DSparkDraft, nn.Module]:
    target, draft = tiny_qwen3(seed=7, **target_changes), make_draft()
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    draft.initialize_embeddings_and_head(embed_tokens=embed, lm_head=head, freeze=freeze)
    return draft, target


def shares_memory(draft: DSparkDraft, target: nn.Module) -> list[bool]:
    pairs = ((draft.embed_tokens, target.get_input_embeddings()), (draft.lm_head, target.get_output_embeddings()))
    return [a.weight.data_ptr() == b.weight.data_ptr() for a, b in pairs]


def test_embedding_and_head_are_frozen_from_the_start() -> None:
    frozen = {name for name, p in make_draft().named_parameters() if not p.requires_grad}
    assert frozen == {"embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_weights_are_the_targets_memory(tied: bool) -> None:
    draft, target = with_targets_weights(tie_word_embeddings=tied)
    assert shares_memory(draft, target) == [True, True]
    assert not draft.embed_tokens.weight.requires_grad and not draft.lm_head.weight.requires_grad
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight)


@pytest.mark.parametrize("tied", [False, True])
def test_trainable_weights_are_copies(tied: bool) -> None:
    draft, target = with_targets_weights(freeze=False, tie_word_embeddings=tied)
    assert shares_memory(draft, target) == [False, False]
    assert draft.embed_tokens.weight.requires_grad and draft.lm_head.weight.requires_grad
    assert torch.equal(draft.embed_tokens.weight, target.get_input_embeddings().weight)
    assert draft.embed_tokens.weight.data_ptr() != draft.lm_head.weight.data_ptr()


def test_unfreezing_later_copies_and_refreezing_keeps() -> None:
    draft, target = with_targets_weights()
    draft.set_embedding_head_trainable(True)
    assert shares_memory(draft, target) == [False, False] and draft.lm_head.weight.requires_grad
    own = draft.lm_head.weight
    draft.set_embedding_head_trainable(True)
    assert draft.lm_head.weight is own
    draft.set_embedding_head_trainable(False)
    assert draft.lm_head.weight is own and not own.requires_grad


@pytest.mark.parametrize("freeze", [True, False])
def test_training_never_changes_the_target(freeze: bool) -> None:
    draft, target = with_targets_weights(freeze)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(draft, inputs()).backward()
        optimizer.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight) == freeze


def test_weights_of_another_size_are_refused() -> None:
    target = tiny_qwen3(vocab_size=50)
    with pytest.raises(ValueError, match=r"embed_tokens has shape \(50, 32\), the draft needs \(97, 32\)"):
        make_draft().initialize_embeddings_and_head(
            embed_tokens=target.get_input_embeddings(), lm_head=target.get_output_embeddings()
        )


# The forward pass -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_every_slot_gets_the_right_previous_token(kind: str) -> None:
    """Slot 0 reads the anchor token, slot k the label of slot k - 1."""
    draft, given = make_draft(markov_head_type=kind), anchored(2, 7)
    nn.init.normal_(draft.markov_head.markov_w1.weight)
    with_bias = draft(**given).draft_logits
    w2 = draft.markov_head.markov_w2.weight.detach().clone()
    nn.init.zeros_(draft.markov_head.markov_w2.weight)
    seen: dict[str, Tensor] = {}
    draft.markov_head.register_forward_pre_hook(lambda module, args: seen.update(hidden=args[2]))
    without = draft(**given).draft_logits
    prev = torch.stack([given["input_ids"][:, anchor : anchor + 4] for anchor in (2, 7)], dim=1)
    expected = draft.markov_head.latents(prev, seen["hidden"]) @ w2.T
    assert expected.abs().max() > 0.01
    assert_close(with_bias - without, expected, rtol=1e-4, atol=1e-5)


def test_the_confidence_head_gets_the_right_previous_token() -> None:
    draft, given = make_draft(), anchored(2, 7)
    nn.init.zeros_(draft.confidence_head.proj.weight)
    draft.confidence_head.proj.weight.data[0, 32:] = 1.0
    prev = torch.stack([given["input_ids"][:, anchor : anchor + 4] for anchor in (2, 7)], dim=1)
    assert_close(draft(**given).confidence_pred, draft.markov_head.markov_w1(prev).sum(-1))


def test_labels_and_teacher() -> None:
    """Slot k predicts token anchor + k + 1, whose teacher is the target's state at anchor + k."""
    draft, given = make_draft(), anchored(2, 7)
    draft.set_embedding_head_trainable(True)  # even then the teacher teaches, and does not learn
    output = draft(**given)
    for block, anchor in enumerate((2, 7)):
        assert torch.equal(output.target_ids[:, block], given["input_ids"][:, anchor + 1 : anchor + 5])
        states = given["target_last_hidden_states"][:, anchor : anchor + 4]
        assert_close(output.aligned_target_logits[:, block], draft.lm_head(states))
    assert not output.aligned_target_logits.requires_grad


def test_slot_zero_is_trained_and_measured() -> None:
    draft = make_draft()
    output = draft(**anchored(2, 7))
    output.draft_logits.retain_grad()
    loss, terms = compute_dspark_loss(output, **LOSS, return_terms=True)
    loss.backward()
    assert (output.draft_logits.grad[:, :, 0].abs().sum(-1) > 0).all()
    assert terms["accept_rate_per_pos_den"].tolist() == [4, 4, 4, 4]


def test_without_the_targets_last_states_there_is_no_teacher() -> None:
    given = inputs()
    del given["target_last_hidden_states"]
    assert make_draft()(**given).aligned_target_logits is None


def test_every_trainable_weight_gets_a_gradient() -> None:
    draft = make_draft(markov_head_type="rnn")
    loss_of(draft, inputs()).backward()
    for name, parameter in draft.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_batch_without_anchors(kind: str) -> None:
    draft, given = make_draft(markov_head_type=kind), inputs()
    given["loss_mask"].zero_()
    loss = loss_of(draft, given)
    loss.backward()
    assert loss == 0
    for name, parameter in draft.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and (parameter.grad == 0).all(), name


def test_a_row_without_anchors_changes_nothing_for_the_others() -> None:
    draft, given = make_draft(), anchored(2, 7)
    alone = {name: tensor[:1] for name, tensor in given.items()}
    given["loss_mask"][1] = 0
    given["block_keep_mask"][1], given["anchor_positions"][1] = False, 0
    assert_close(loss_of(draft, given), loss_of(draft, alone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seq_len", [1, 2, 3, 5])
def test_sequences_shorter_than_a_block(seq_len: int) -> None:
    draft = make_draft()
    output = draft(**inputs(seq_len))
    assert int(output.block_keep_mask[0].sum()) == min(3, seq_len - 1)
    assert output.eval_mask.sum(-1).max() == min(4, seq_len - 1)
    loss_of(draft, inputs(seq_len)).backward()
    assert all(p.grad.isfinite().all() for p in draft.parameters() if p.requires_grad)


def test_a_block_of_one_slot() -> None:
    draft = make_draft(block_size=1)
    assert draft(**inputs()).draft_logits.shape == (2, 3, 1, 97)
    assert loss_of(draft, inputs()).isfinite()


def test_anchors_are_sampled_when_none_are_given() -> None:
    with seeded(0):
        first, second = (make_draft()(**inputs()) for _ in range(2))
    assert first.block_keep_mask.all()
    assert not torch.equal(first.target_ids, second.target_ids)


@pytest.mark.parametrize("left_out", ["anchor_positions", "block_keep_mask"])
def test_anchors_come_with_their_keep_mask(left_out: str) -> None:
    given = anchored(2, 7)
    del given[left_out]
    with pytest.raises(ValueError, match="given together"):
        make_draft()(**given)


def test_positions_count_from_zero_unless_given() -> None:
    draft, positions = make_draft(), torch.arange(S).expand(2, -1)
    with_positions = draft(**anchored(2, 7), position_ids=positions).draft_logits
    assert torch.equal(with_positions, draft(**anchored(2, 7)).draft_logits)


def test_confidence_that_reads_the_token_asks_for_it() -> None:
    with pytest.raises(ValueError, match="prev_token_ids must be given"):
        make_draft().predict_confidence_step(torch.zeros(2, 32))
    assert make_draft(confidence_head_with_markov=False).predict_confidence_step(torch.zeros(2, 32)).shape == (2,)


def test_compute_logits_leaves_the_bias_out() -> None:
    draft, hidden = make_draft(), torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    assert_close(draft.compute_logits(hidden), hidden @ draft.lm_head.weight.T)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("mode", ["autocast", "bf16 draft", "bf16 target"])
def test_lower_precision_stays_close(mode: str, kind: str) -> None:
    draft, given = make_draft(tiny_qwen3_config(initializer_range=0.1), markov_head_type=kind), anchored(2, 7)
    reference = loss_of(draft, given)
    if mode == "bf16 draft":
        draft.bfloat16()
    elif mode == "bf16 target":
        draft.embed_tokens.bfloat16(), draft.lm_head.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        output = draft(**given)
        loss = compute_dspark_loss(output, **LOSS)
    assert output.confidence_pred.dtype == loss.dtype == torch.float32
    assert_close(loss, reference, rtol=0.02, atol=0)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in draft.parameters() if p.requires_grad)
    assert rope_errors(draft) == []


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_gradient_checkpointing_changes_nothing() -> None:
    gradients = []
    for checkpointed in (False, True):
        draft = make_draft().train()
        if checkpointed:
            draft.gradient_checkpointing_enable()
            assert all(layer.gradient_checkpointing for layer in draft.layers)
        loss_of(draft, anchored(2, 7)).backward()
        gradients.append(draft.layers[0].self_attn.k_proj.weight.grad)
    assert_close(*gradients)


def test_a_draft_learns() -> None:
    """Features that name the next tokens: the loss must fall far below that of a guess."""
    draft, given = make_draft(num_anchors=12), inputs()
    with seeded(0):
        optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=0.01)
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = compute_dspark_loss(draft(**given), None, 1.0, 0.0, 0.0)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(97.0).log().item(), abs=0.1)
    assert losses[-1] < 1.0


def test_save_pretrained_round_trip(tmp_path: Path) -> None:
    draft = make_draft(markov_head_type="gated")
    draft.save_pretrained(tmp_path)
    loaded = Qwen3DSparkModel.from_pretrained(tmp_path)
    assert draft.state_dict().keys() == loaded.state_dict().keys()
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in draft.state_dict().items())
    assert rope_errors(loaded) == []
