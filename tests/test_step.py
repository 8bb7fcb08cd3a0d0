"""The training step as a whole: no waiting for the device, no second way to the same numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import DataLoader
from transformers import masking_utils

from dspark_lightning import compute_dspark_loss
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.registry import build_draft_model
from dspark_lightning.metrics import AcceptanceMetric
from dspark_lightning.module import DSparkModule
from dspark_lightning.outputs import DSparkHiddenOutput
from helpers import seeded, tiny_qwen3_config
from test_module import ARGS, TinyDSpark, rows, trainer

S, N, K, F = 24, 3, 4, 2
ALPHAS = {"loss_decay_gamma": 4.0, "ce_loss_alpha": 0.1, "l1_loss_alpha": 0.9, "confidence_head_alpha": 1.0}
PACKED = {
    "position_ids": torch.cat([torch.arange(10), torch.arange(14)]).expand(2, -1),
    "seq_lens": torch.tensor([[10, 14]] * 2),
    "doc_remaining": torch.cat([torch.arange(9, -1, -1), torch.arange(13, -1, -1)]).expand(2, -1),
}
HOLES = {"attention_mask": torch.ones(2, S).index_fill(1, torch.tensor([1, 5]), 0)}


def make_draft(head: str = "vanilla", **changes: Any) -> DSparkDraft:
    with seeded(0):
        return build_draft_model(
            tiny_qwen3_config(initializer_range=0.2, **changes),
            mask_token_id=96,
            num_draft_layers=F,
            block_size=K,
            num_anchors=N,
            markov_rank=8,
            markov_head_type=head,
        )


def inputs() -> dict[str, Tensor]:
    with seeded(1):
        return {
            "input_ids": torch.randint(0, 96, (2, S)),
            "target_hidden_states": torch.randn(2, S, F * 32),
            "loss_mask": (torch.arange(S) > 3).long().expand(2, -1),
            "target_last_hidden_states": torch.randn(2, S, 32),
            "anchor_positions": torch.tensor([[4, 9, 20], [6, 13, 0]]),
            "block_keep_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]) > 0,
        }


def gradients(draft: DSparkDraft, given: dict[str, Tensor]) -> dict[str, Tensor]:
    draft.zero_grad()
    compute_dspark_loss(draft(**given, output="hidden"), **ALPHAS).backward()
    return {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}


def assert_same_gradients(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max().clamp(min=1e-8)
        assert_close(ours[name] / scale, gradient / scale, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("extra", [{}, PACKED, HOLES], ids=["plain", "packed", "masked"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_no_wait_for_the_device(head: str, extra: dict[str, Tensor]) -> None:
    """On the meta device nothing can be read back: any wait for a value would raise."""
    draft = make_draft(head).to("meta")
    on_cpu = ("loss_mask", "anchor_positions", "block_keep_mask", "seq_lens", "doc_remaining", "attention_mask")
    given = {name: x if name in on_cpu else x.to("meta") for name, x in (inputs() | extra).items()}
    loss, terms = compute_dspark_loss(draft(**given, output="hidden"), **ALPHAS, return_terms=True)
    loss.backward()
    assert all(p.grad.device.type == "meta" for p in draft.parameters() if p.requires_grad)
    metric = AcceptanceMetric(K, 0.1, 0.9, 1.0).to("meta")
    metric.update(terms)
    assert metric.nums.device.type == "meta"


def test_the_module_neither_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch as a trainer hands it over: tensors on the device, what is sampled from on the CPU as well.

    transformers reads one value back when it looks for packed rows in a target's positions; we cannot spare it that.
    """
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    module = TinyDSpark(**ARGS)
    module.configure_model()
    assert module.draft is not None and module.target is not None
    batch = module.on_before_batch_transfer(next(iter(DataLoader(rows(), batch_size=4))), 0)
    module.draft.to("meta")
    module.target.model.to("meta")
    moved = module.transfer_batch_to_device(batch, torch.device("meta"), 0)
    assert moved["input_ids"].device.type == moved["loss_mask"].device.type == "meta"
    loss, terms = module._loss(moved, epoch=0)
    loss.backward()
    assert {term.device.type for term in terms.values()} == {"meta"}


def test_training_never_makes_dense_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = DSparkDraft.forward

    def forward(self: DSparkDraft, **kwargs: Any) -> Any:
        seen.append(original(self, **kwargs))
        return seen[-1]

    monkeypatch.setattr(DSparkDraft, "forward", forward)
    trainer(tmp_path, limit_val_batches=1).fit(
        TinyDSpark(**ARGS), DataLoader(rows(), batch_size=2), DataLoader(rows(), batch_size=2)
    )
    assert len(seen) > 4 and all(isinstance(output, DSparkHiddenOutput) for output in seen)


def test_anchors_on_another_device_are_the_same_anchors() -> None:
    """Whether the hook of the trainer ran does not change the numbers."""
    module = TinyDSpark(**ARGS)
    module.configure_model()
    batch = next(iter(DataLoader(rows(), batch_size=4)))
    with_hook = module._loss(module.on_before_batch_transfer(batch, 0), epoch=2)[1]
    without = module._loss(batch, epoch=2)[1]
    assert all(torch.equal(with_hook[name], without[name]) for name in without)


@pytest.mark.parametrize("extra", [{}, PACKED, HOLES], ids=["plain", "packed", "masked"])
def test_split_attention_trains_like_the_dense_mask(extra: dict[str, Tensor]) -> None:
    draft = make_draft()
    seen = []
    for kind in ("dense", "split"):
        draft.attention = kind  # type: ignore[assignment]
        seen.append(gradients(draft, inputs() | extra))
    assert_same_gradients(seen[1], seen[0])


def test_a_soft_capped_head() -> None:
    draft = make_draft()
    draft.logit_softcap = 2.0
    given = inputs()
    output = draft(**given)
    biased = output.draft_logits - draft.markov_head(0 * output.draft_logits, *previous(draft, given))
    assert biased.abs().max() <= 2.0 + 1e-5 and output.aligned_target_logits.abs().max() <= 2.0
    compute_dspark_loss(output, **ALPHAS).backward()
    expected = {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}
    assert_same_gradients(gradients(draft, given), expected)


def previous(draft: DSparkDraft, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Previous tokens, and hidden states that the vanilla head does not read."""
    anchors = given["anchor_positions"].unsqueeze(-1) + torch.arange(K)
    ids = given["input_ids"].gather(1, anchors.clamp(max=S - 1).flatten(1)).view(2, N, K)
    return ids, torch.zeros(2, N, K, 32)


def test_activation_checkpointing_changes_no_number() -> None:
    plain, checkpointed = make_draft().train(), make_draft().train()
    checkpointed.checkpoint_activations()
    runs = []
    for draft in (plain, checkpointed):
        runs.append(0)
        draft.layers[0].self_attn.register_forward_hook(lambda *_: runs.__setitem__(-1, runs[-1] + 1))
        draft.seen = gradients(draft, inputs())  # type: ignore[assignment]
    assert all(torch.equal(plain.seen[name], checkpointed.seen[name]) for name in plain.seen)
    assert runs == [1, 2]  # the second time in the backward pass


def test_the_flags_reach_the_draft(tmp_path: Path) -> None:
    module = TinyDSpark(**ARGS, attention="dense", activation_checkpointing=True)
    module.configure_model()
    assert module.draft.attention == "dense" and module.draft.layers[0].gradient_checkpointing
    plain = TinyDSpark(**ARGS)
    plain.configure_model()
    assert plain.draft.attention == "auto" and not plain.draft.layers[0].gradient_checkpointing
    batch = next(iter(DataLoader(rows(), batch_size=4)))
    losses = [m._loss(batch, epoch=0)[0] for m in (module.train(), plain.train())]
    assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_compiled_draft_trains_the_same(tmp_path: Path) -> None:
    results = []
    for compiled in (False, True):
        module = TinyDSpark(**ARGS, torch_compile=compiled)
        trainer(tmp_path, max_epochs=2).fit(module, DataLoader(rows(), batch_size=2))
        results.append({name: value.detach() for name, value in module.state_dict().items()})
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        assert_close(results[1][name], value, rtol=1e-3, atol=1e-4)


def test_attention_must_be_known() -> None:
    with pytest.raises(ValueError, match="attention must be one of auto, dense, split, flex, got 'fast'"):
        TinyDSpark(**ARGS, attention="fast").configure_model()
    with pytest.raises(ValueError, match="attention 'flex' needs CUDA, but the draft is on cpu"):
        TinyDSpark(**ARGS, attention="flex").configure_model()


def test_anchors_must_lie_in_the_row() -> None:
    given = inputs()
    given["anchor_positions"] = torch.tensor([[4, 9, 20], [6, 13, S]])
    with pytest.raises(ValueError, match=r"anchor_positions must lie in 0\.\.23, got \[\[4, 9, 20\], \[6, 13, 24\]\]"):
        make_draft()(**given)


def test_the_row_with_most_anchors_decides_how_many_are_kept() -> None:
    module = TinyDSpark(**ARGS | {"num_anchors": 500})
    module.configure_model()
    kept = [
        module(next(iter(DataLoader(order, batch_size=8)))).block_keep_mask.sum(-1).tolist()
        for order in (rows(), rows()[::-1])
    ]
    assert kept[0] == kept[1][::-1] == [20, 18, 16, 14, 12, 10, 8, 6]


def test_output_must_be_known() -> None:
    with pytest.raises(ValueError, match="output must be one of logits, hidden, got 'probs'"):
        make_draft()(**inputs(), output="probs")


def test_right_padding_needs_no_mask_at_the_target() -> None:
    module = TinyDSpark(**ARGS)
    module.configure_model()
    seen: list[Tensor | None] = []
    original = module.target.generate_batch

    def generate_batch(ids: Tensor, mask: Tensor | None, *args: Any, **options: Any) -> Any:
        seen.append(mask)
        return original(ids, mask, *args, **options)

    module.target.generate_batch = generate_batch  # type: ignore[method-assign]
    batch = next(iter(DataLoader(rows(), batch_size=4)))
    batch["attention_mask"][:, 20:] = 0
    batch["loss_mask"][:, 20:] = 0
    terms = module._loss(batch, epoch=0)[1]
    left = batch | {"attention_mask": batch["attention_mask"].clone().index_fill_(1, torch.tensor([0]), 0)}
    module._loss(left, epoch=0)
    assert seen[0] is None and torch.equal(seen[1], left["attention_mask"])
    cut = {name: value[:, :20] if value.dim() == 2 else value for name, value in batch.items()}
    unpadded = module._loss(cut, epoch=0)[1]
    assert_close(terms["loss"], unpadded["loss"], rtol=1e-5, atol=1e-6)


def test_a_module_is_what_it_was(tmp_path: Path) -> None:
    """`attention` belongs to the run: it is no part of a checkpoint's identity."""
    dense, auto = (TinyDSpark(**ARGS, attention=kind) for kind in ("dense", "auto"))
    for module in (dense, auto):
        module.configure_model()
    assert dense.identity() == auto.identity()
    assert isinstance(dense, DSparkModule)


def test_one_reduction_for_all_denominators(tmp_path: Path) -> None:
    """The three losses share one denominator, summed over ranks once per optimizer step."""
    run = trainer(tmp_path, accumulate_grad_batches=2)
    reduced = []
    original = run.strategy.reduce

    def reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_floating_point():  # whole numbers are flags: when to stop, whether all is finite
            reduced.append(tensor.shape)
        return original(tensor, *args, **kwargs)

    run.strategy.reduce = reduce  # type: ignore[method-assign]
    run.fit(TinyDSpark(**ARGS), DataLoader(rows(), batch_size=2))
    assert run.global_step == 2 and reduced == [torch.Size([])] * 2
