"""Decode a fixed set of prompts with the draft, during fits and in tests: acceptance as it is, not as estimated.

Example:
    >>> from lightning.pytorch import Trainer
    >>> trainer = Trainer(callbacks=[DecodeAcceptance("prompts.jsonl", every_n_steps=500)])  # doctest: +SKIP

    logs val/tau_decode and val/acceptance_decode@1..K every 500 steps; trainer.test(...) logs test/tau_decode, ...
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn

from dspark_lightning.callbacks.window import write_scalars
from dspark_lightning.datamodules.loss_mask import ChatRenderer
from dspark_lightning.datamodules.prompts import Conversation, load_conversations
from dspark_lightning.datamodules.tokenizer import load_tokenizer
from dspark_lightning.delivery import is_distributed
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.evaluation.evaluate import play_all, scalars
from dspark_lightning.evaluation.play import DecodeSettings, Player
from dspark_lightning.evaluation.summary import summarise
from dspark_lightning.pretrained import build_draft_from_config
from dspark_lightning.sharding import full_state_dict, is_sharded
from dspark_lightning.target import HFDSparkTargetModel


class DecodeAcceptance(Callback):
    """Play conversations and log what `dspark evaluate` reports of them: `val/...` in a fit, `test/...` in a test.

    The prompts are rendered by the datamodule's template. The ranks share the conversations; only where the target is
    split over them do all play all, for they have to run it together. The numbers are the same either way. Where the
    target is not loaded, since the features come from a cache, it warns and decodes nothing.

    Args:
        data: what `dspark evaluate` takes: files with turns, prompts or messages, a hub id, or "embedded".
        every_n_steps: optimizer steps between two evaluations in a fit.
        limit: so many first conversations of each dataset; None takes all.
        max_new_tokens: of each answer.
        temperature: 0 is greedy.
        seed: of the random numbers.

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self,
        data: str | list[str],
        every_n_steps: int = 1000,
        limit: int | None = 16,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be 1 or more, got {every_n_steps}")
        self.settings = DecodeSettings(max_new_tokens, temperature, seed=seed, compare=False)
        self.data, self.every_n_steps, self.limit = data, every_n_steps, limit
        self._conversations: list[Conversation] = []
        self._evaluated_step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read the conversations, so that what is wrong with them shows before anything is trained."""
        del trainer, pl_module
        if stage in ("fit", "test"):
            self._conversations = load_conversations(self.data, self.limit)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A resumed run does not evaluate the step it starts from."""
        self._evaluated_step = trainer.global_step
        if pl_module.target is None:
            rank_zero_warn("DecodeAcceptance needs the target, which this run does not load: it decodes nothing")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """Evaluate every n optimizer steps, once for all micro-batches of a step."""
        del outputs, batch, batch_idx
        step = trainer.global_step
        if step % self.every_n_steps or step == self._evaluated_step or pl_module.target is None:
            return
        self._evaluated_step = step
        values = self._decode(trainer, pl_module, "val")
        pl_module.log_dict(values, logger=False, on_step=True, on_epoch=False)  # for ModelCheckpoint's monitor
        write_scalars(trainer, values)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate once."""
        if pl_module.target is None:
            return
        pl_module.log_dict(self._decode(trainer, pl_module, "test"))

    def _decode(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> dict[str, float]:
        own = cast(DSparkDraft, pl_module.draft)
        target = cast(HFDSparkTargetModel, pl_module.target)
        with torch.no_grad(), _ready_to_decode(own, target) as draft:
            player = Player(target, draft, _renderer(trainer, pl_module), self.settings)
            records = play_all(player, self._conversations)
        return {f"{stage}/{name}": value for name, value in scalars(summarise(records, draft.block_size)).items()}


@contextmanager
def _ready_to_decode(draft: DSparkDraft, target: HFDSparkTargetModel) -> Iterator[DSparkDraft]:
    """The draft in eval mode, whole, and not compiled: blocks over a context that grows would compile again and again.

    The head of a target that is split was given up; for the time being it is the draft's.
    """
    compiled = any(getattr(layer, "_compiled_call_impl", None) is not None for layer in draft.layers)
    whole = _whole_copy(draft) if is_sharded(draft) or compiled else draft
    module, training = cast(nn.Module, whole), draft.training
    head = cast(nn.Module, target.model.get_output_embeddings())
    given_up = head.weight
    if cast(torch.Tensor, given_up).is_meta:
        head.weight = nn.Parameter(whole.lm_head.weight, requires_grad=False)
    module.eval()
    try:
        yield whole
    finally:
        head.weight = given_up
        module.train(training)


def _whole_copy(draft: DSparkDraft) -> DSparkDraft:
    """The draft of all ranks together, on each of them."""
    state, device = full_state_dict(draft), next(draft.parameters()).device
    dtypes = {name: tensor.dtype for name, tensor in draft.state_dict().items()}
    copy = build_draft_from_config(draft.config.to_dict())
    cast(nn.Module, copy).to(device)
    for name, parameter in copy.named_parameters():
        parameter.data = parameter.data.to(dtypes.get(name, parameter.dtype))
    for name, tensor in copy.state_dict().items():
        if name in state:  # on rank 0 only, where the draft is split
            tensor.copy_(state[name])
        if is_distributed() and is_sharded(draft):
            dist.broadcast(tensor, src=0)
    return copy


def _renderer(trainer: Trainer, pl_module: LightningModule) -> ChatRenderer:
    """The datamodule's, so that prompts read as in training; else one of the target's tokenizer."""
    renderer = getattr(trainer.datamodule, "renderer", None)  # type: ignore[attr-defined]
    if isinstance(renderer, ChatRenderer):
        return renderer
    hp = pl_module.hparams
    return ChatRenderer(load_tokenizer(hp["target"], hp["gguf_file"], hp["trust_remote_code"]))
