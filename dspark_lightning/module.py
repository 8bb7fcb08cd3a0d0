"""The LightningModule: one frozen target and the draft that learns to speak for it."""

import warnings
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, ClassVar, cast

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PretrainedConfig, PreTrainedModel

from dspark_lightning.anchors import row_generator, sample_anchor_positions
from dspark_lightning.attention import AttentionKind, check_attention
from dspark_lightning.building import new_draft
from dspark_lightning.callbacks import AcceptanceMetrics, FiniteSteps, RankAgreement, RopePrecisionCheck
from dspark_lightning.capture import capture
from dspark_lightning.checkpoints import name_optimizer_states, prepare_checkpoints
from dspark_lightning.datamodules.resume import hand_over_position, settle_progress
from dspark_lightning.delivery import Delivery, all_or_none, from_rank_0, reads_for_others
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.config import DraftArgs
from dspark_lightning.drafts.registry import resolve_dspark_draft_spec
from dspark_lightning.drafts.spec import DraftSpec
from dspark_lightning.features.stored_target import StoredTarget, stored_target
from dspark_lightning.host import OnHost, boxes_of, host_copies
from dspark_lightning.identity import check_identity
from dspark_lightning.loading import is_quantized, load_empty_target, load_target, load_target_config
from dspark_lightning.loss import EPS, check_loss_arguments, compute_dspark_loss
from dspark_lightning.outputs import DSparkForwardOutput, DSparkHiddenOutput, OutputKind
from dspark_lightning.precision import target_dtype
from dspark_lightning.schedule import group_settings, restore_settings, warmup_cosine
from dspark_lightning.sharding import data_parallel_mesh, gathered, shard_draft, shard_target
from dspark_lightning.target import DSparkTargetBatch, HFDSparkTargetModel

# Lightning finds the hook below worth a warning wherever a datamodule is used; nothing is wrong with that.
warnings.filterwarnings("ignore", message=r".*overridden `on_before_batch_transfer` in `LightningModule`")

_BATCH_KEYS = ("input_ids", "attention_mask", "loss_mask", "row_id")
_NOT_BUILT = "the draft is not built yet: call configure_model() first, or run through a Trainer"


def default_optimizer(params: Iterable[Any]) -> Optimizer:
    """AdamW with the published settings: learning rate 6e-4, betas 0.9 and 0.95, no weight decay."""
    return AdamW(params, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.0)


class DSparkModule(LightningModule):
    """Train a DSpark draft for a frozen target of any registered family.

    The target stays outside the module tree: it is never trained, saved, cast or counted. Its dtype follows the
    trainer's precision (bf16 for the bf16 precisions). The draft shares its frozen embedding and head with it.

    Args:
        target: model folder, hub id, or "embedded" and "embedded-pictures" for the tiny targets that ship with the
            package.
        mask_token_id: token whose embedding fills the slots to predict; must be given, and never occur in the data.
        gguf_file: name of a GGUF file in the target's folder.
        num_draft_layers: decoder layers of the draft.
        block_size: tokens proposed per block, K.
        num_anchors: blocks trained per row, N.
        markov_rank: rank of the Markov head; 0 leaves it out.
        markov_head_type: vanilla, gated or rnn.
        confidence_head_with_markov: whether the confidence head also reads the previous token.
        confidence_head_alpha: weight of the confidence loss; 0 leaves the confidence head out.
        target_layer_ids: feature layers; None spreads num_draft_layers of them.
        loss_decay_gamma: slots are weighted exp(-k / gamma); None weighs them alike.
        ce_loss_alpha: weight of the cross entropy.
        l1_loss_alpha: weight of the total variation term.
        optimizer: makes the optimizer from the trainable parameters; see `default_optimizer`.
        warmup_ratio: share of the steps with a rising learning rate.
        min_lr_ratio: fraction of the peak learning rate at the end of the cosine.
        seed: of the draft's initial weights and of the anchors.
        draft_init: folder of a draft to start from, in any layout that `load_pretrained_draft` takes.
        attention: auto, dense, split or flex: how block attention is computed; auto takes the fastest for the device.
        activation_checkpointing: whether the draft's layers are run again in the backward pass instead of being kept.
        torch_compile: whether the draft's layers are compiled.
        trust_remote_code: whether code that comes with the target may run.
        attn_implementation: how the target attends: eager, sdpa, flash_attention_2 or another that transformers knows;
            None leaves it to transformers.
        device_map: "auto" spreads a target that is too big for one GPU over this machine's GPUs, memory and disk; a
            mapping from module names places each module. None puts it whole on the device that trains.
        shard_target: whether the target is split over the ranks too, under a strategy that splits the draft (FSDP1 or
            FSDP2); False keeps a whole copy on every rank.

    Raises:
        ValueError: a value out of range; one line that names it.
    """

    spec: ClassVar[DraftSpec | None] = None
    """The family this module is bound to; None takes the one that the target's config asks for."""

    def __init__(
        self,
        target: str,
        mask_token_id: int | None = None,
        gguf_file: str | None = None,
        num_draft_layers: int = 5,
        block_size: int = 7,
        num_anchors: int = 512,
        markov_rank: int = 256,
        markov_head_type: str = "vanilla",
        confidence_head_with_markov: bool = True,
        confidence_head_alpha: float = 1.0,
        target_layer_ids: list[int] | None = None,
        loss_decay_gamma: float | None = 4.0,
        ce_loss_alpha: float = 0.1,
        l1_loss_alpha: float = 0.9,
        optimizer: OptimizerCallable = default_optimizer,
        warmup_ratio: float = 0.04,
        min_lr_ratio: float = 0.1,
        seed: int = 0,
        draft_init: str | None = None,
        attention: AttentionKind = "auto",
        activation_checkpointing: bool = False,
        torch_compile: bool = False,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        device_map: str | dict[str, int | str] | None = None,
        shard_target: bool = True,
    ) -> None:
        super().__init__()
        # Plain data only: a sharded checkpoint could not be read back otherwise.
        self.save_hyperparameters(ignore=["optimizer"])
        self.draft_args = DraftArgs.of({field.name: self.hparams[field.name] for field in fields(DraftArgs)})
        check_loss_arguments(loss_decay_gamma, ce_loss_alpha, l1_loss_alpha, confidence_head_alpha)
        for name, value in (("warmup_ratio", warmup_ratio), ("min_lr_ratio", min_lr_ratio)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must lie in 0..1, got {value}")
        if not -(2**63) <= seed < 2**64:
            raise ValueError(f"seed must fit into 64 bits, got {seed}")
        self.optimizer = optimizer
        self.draft: DSparkDraft | None = None
        self.target: HFDSparkTargetModel | None = None
        self._fingerprint = ""
        self._window_den: Tensor | float = 0.0
        self._configured_groups: list[dict[str, Any]] = []

    # Building -----------------------------------------------------------------------------------------------------

    def load_target(self) -> PreTrainedModel:
        """Load the frozen target: whole on rank 0, without weights on the others, which get them from rank 0.

        Override this to bring a model object of your own, whole on every rank.

        Raises:
            ValueError: the target cannot be read, or not this way: `device_map` beside several processes on this
                machine, a quantised target that would have to be split.
        """
        hp, dtype = self.hparams, target_dtype(self._trainer)
        if self._trainer is not None:
            processes = self.trainer.num_devices
            if hp["device_map"] is not None and processes > 1:
                raise ValueError(
                    f"device_map {hp['device_map']!r} needs a single process, this machine runs {processes}, each of "
                    "which would claim all devices: set trainer.devices to 1, or leave device_map out"
                )
        quantized = False
        if hp["gguf_file"] is None:  # what cannot work is refused before gigabytes are read
            config = load_target_config(hp["target"], trust_remote_code=hp["trust_remote_code"])
            self._resolve_spec(config).build_config(config, self.draft_args)
            quantized = is_quantized(config)
            if quantized and self._shards and hp["shard_target"]:
                raise ValueError(
                    f"the target {hp['target']!r} is quantised and cannot be split: set shard_target to false"
                )
        source = (hp["target"], hp["gguf_file"], dtype, hp["trust_remote_code"], hp["attn_implementation"])
        if reads_for_others() or quantized or hp["device_map"] is not None:
            return load_target(*source, device_map=hp["device_map"])
        return load_empty_target(*source)

    def configure_model(self) -> None:
        """Build target and draft, once, and split them under FSDP; Lightning calls this before every entry point."""
        prepare_checkpoints(self._trainer)
        if self.draft is not None:
            return
        device = torch.device("cpu") if self._trainer is None else self.trainer.strategy.root_device
        check_attention(self.hparams["attention"], device)  # before gigabytes are read
        mesh = data_parallel_mesh(self.device_mesh)
        stored = stored_target(self._trainer)
        draft = (
            self._build_pair(device, mesh)
            if stored is None
            else self._build_draft(stored.to(device, target_dtype(self._trainer)))
        )
        self.draft = shard_draft(draft, mesh) if self._shards else draft

    def _build_draft(self, stored: StoredTarget) -> DSparkDraft:
        """The draft for features from a cache, which also keeps all that it needs of the target."""
        spec = self._resolve_spec(stored.config)
        config = spec.build_config(stored.config, self.draft_args)
        stored.check_layer_ids(config.target_layer_ids)
        self._fingerprint = stored.fingerprint
        return new_draft(spec, config, stored.embed_tokens, stored.lm_head, self.hparams)

    def _build_pair(self, device: torch.device, mesh: DeviceMesh | None) -> DSparkDraft:
        """The target, at its place on the devices, and the draft for it."""
        model = all_or_none(self.load_target)
        spec = self._resolve_spec(model.config)
        config = spec.build_config(model.config, self.draft_args)
        target = HFDSparkTargetModel(model, config.target_layer_ids)
        self._fingerprint = from_rank_0(target.fingerprint)
        mapped = self.hparams["device_map"] is not None or hasattr(model, "hf_device_map")  # it is where it belongs
        deliver = Delivery(model, device)
        if not mapped:
            deliver(model.get_input_embeddings())
            deliver(cast(nn.Module, model.get_output_embeddings()))
        draft = new_draft(spec, config, target.embed_tokens, target.lm_head, self.hparams)
        if self._shards and self.hparams["shard_target"] and not mapped:
            shard_target(target, mesh, deliver)
        elif not mapped:
            deliver(cast(nn.Module, model))
        self.target = target
        return draft

    @property
    def _shards(self) -> bool:
        """Whether the strategy splits models over ranks."""
        strategy = None if self._trainer is None else self.trainer.strategy
        return isinstance(strategy, (FSDPStrategy, ModelParallelStrategy))

    def _resolve_spec(self, config: PretrainedConfig) -> DraftSpec:
        spec = resolve_dspark_draft_spec([*(config.architectures or ()), config.model_type])
        if self.spec is not None and spec is not self.spec:
            other = spec.model_class.__name__.removesuffix("Model")
            raise ValueError(
                f"{type(self).__name__} does not serve a {config.model_type!r} target: use {other} or DSparkModule"
            )
        return spec

    def configure_callbacks(self) -> list[Callback]:
        """Add the callbacks that no run should miss, where the trainer does not have them already."""
        present: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        kinds = (AcceptanceMetrics, FiniteSteps, RankAgreement, RopePrecisionCheck)
        return [kind() for kind in kinds if not any(isinstance(callback, kind) for callback in present)]

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Build the optimizer over the trainable parameters and the warmup-cosine schedule.

        Raises:
            ValueError: the number of steps is unknown, or the optimizer refuses its settings.
        """
        try:
            optimizer = self.optimizer([p for p in self.parameters() if p.requires_grad])
        except (TypeError, ValueError) as error:
            raise ValueError(f"the optimizer cannot be built: {error}") from error
        total_steps = self.trainer.estimated_stepping_batches
        if not 0 < total_steps < float("inf"):
            raise ValueError(f"the number of steps is {total_steps}: set trainer.max_steps or trainer.max_epochs")
        scheduler = warmup_cosine(
            optimizer, int(total_steps), self.hparams["warmup_ratio"], self.hparams["min_lr_ratio"]
        )
        self._configured_groups = group_settings(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """Make this run's optimizer settings hold: a resumed checkpoint has just put back its own."""
        if self._configured_groups:  # a subclass may bring its own configure_optimizers
            scheduler = cast(LambdaLR, self.trainer.lr_scheduler_configs[0].scheduler)
            restore_settings(self.trainer.optimizers[0], scheduler, self._configured_groups)

    # Steps --------------------------------------------------------------------------------------------------------

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        """Capture features, sample anchors, draft, and return the loss numerator with the terms of its metrics."""
        loss, terms = self._loss(batch, epoch=self.current_epoch)
        # The numerator is backpropagated; `on_before_optimizer_step` divides by the denominator of the whole window.
        # Lightning divides by accumulate_grad_batches, so that factor is put back.
        numerator = loss * (terms["loss_den"] + EPS) * self.trainer.accumulate_grad_batches
        self._window_den = self._window_den + terms["loss_den"]
        return {"loss": numerator, "terms": terms}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        """Terms of one batch, with anchors that are the same in every validation run."""
        return {"terms": self._loss(batch, epoch=0)[1]}

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        """As `validation_step`."""
        return self.validation_step(batch, batch_idx)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> DSparkTargetBatch:
        """The target's features of one batch."""
        return capture(self.target, batch)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Normalise the gradients by the weights of all supervised slots of the window, over all ranks.

        So every supervised token weighs the same, however the window was cut into micro-batches and ranks.
        """
        den = self.trainer.strategy.reduce(torch.as_tensor(self._window_den, device=self.device), reduce_op="sum")
        scale = self.trainer.world_size / (den + EPS)  # gradients are averaged over ranks, the loss is a sum
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale.to(parameter.grad.dtype))
        self._window_den = 0.0

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip as the trainer says. By norm, FSDP1 alone knows that of all ranks together; Lightning would refuse."""
        if gradient_clip_val and gradient_clip_algorithm != "value" and isinstance(self.draft, FSDP):
            self.draft.clip_grad_norm_(gradient_clip_val)
        elif any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]):
            # `FiniteSteps` leaves none of a step to skip, which torch cannot clip by value.
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_before_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int) -> dict[str, Any]:
        """Keep what anchors are sampled from on the CPU too, so that no step waits for the accelerator."""
        del dataloader_idx
        return {**batch, "on_host": host_copies(batch)}

    def forward(
        self, batch: dict[str, Any], epoch: int = 0, output: OutputKind = "logits"
    ) -> DSparkForwardOutput | DSparkHiddenOutput:
        """Capture the target's features for a batch and draft its blocks.

        Args:
            batch: input_ids, attention_mask, loss_mask [B, S] and row_id [B]; for a vision-language target also what
                its processor returns beside them.
            epoch: which draw of anchors; validation uses 0.
            output: see the draft's `forward`.

        Raises:
            ValueError: a key is missing from the batch.
        """
        missing = [key for key in _BATCH_KEYS if key not in batch]
        if missing:
            raise ValueError(f"the batch has no {missing[0]!r}: a datamodule must give {', '.join(_BATCH_KEYS)}")
        if self.draft is None:
            raise RuntimeError(_NOT_BUILT)
        on_host = boxes_of(batch)
        host = {name: box.tensor for name, box in on_host.items()}
        generators = [row_generator(self.hparams["seed"], epoch, row) for row in host["row_id"].tolist()]
        mask, remaining = host["loss_mask"], host.get("doc_remaining")
        anchors, keep = sample_anchor_positions(
            mask.shape[1], mask, self.draft.num_anchors, "cpu", remaining, generators
        )
        used = max(1, int(keep.sum(dim=-1).max()))  # places that no row fills would cost the heads full compute
        captured = capture(self.target, {**batch, "on_host": on_host})
        boxes = {name: box for name, box in on_host.items() if name != "row_id"}
        boxes |= {"anchor_positions": OnHost(anchors[:, :used]), "block_keep_mask": OnHost(keep[:, :used])}
        drafted: DSparkForwardOutput | DSparkHiddenOutput = self.draft(**vars(captured) | boxes, output=output)
        return drafted

    def _loss(self, batch: dict[str, Any], epoch: int) -> tuple[Tensor, dict[str, Tensor]]:
        hp, outputs = self.hparams, self(batch, epoch, output="hidden")
        head = cast(DSparkDraft, self.draft).lm_head
        with gathered(head):
            return compute_dspark_loss(
                outputs=outputs._replace(head=head.weight),
                loss_decay_gamma=hp["loss_decay_gamma"],
                ce_loss_alpha=hp["ce_loss_alpha"],
                l1_loss_alpha=hp["l1_loss_alpha"],
                confidence_head_alpha=hp["confidence_head_alpha"],
                return_terms=True,
            )

    # Checkpoints --------------------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """What this run trains for; saved with every checkpoint and compared on load."""
        if self.draft is None:
            raise RuntimeError(_NOT_BUILT)
        return {
            "target": self.hparams["target"],
            "target_fingerprint": self._fingerprint,
            "draft_config": self.draft.config.to_dict(),
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the run's identity."""
        checkpoint["dspark"] = self.identity()
        name_optimizer_states(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another target, mask token, block size, layers or heads; go on exactly where it was.

        Raises:
            ValueError: names the field and both values.
        """
        if "dspark" not in checkpoint:
            raise ValueError("the checkpoint was not written by a DSparkModule: it has no 'dspark'")
        check_identity(self.identity(), checkpoint["dspark"])
        if self._trainer is not None:
            rank_zero_info(f"Going on at step {checkpoint['global_step']} of {self.trainer.ckpt_path}")
            hand_over_position(checkpoint, self.trainer.datamodule)  # type: ignore[attr-defined]
        settle_progress(checkpoint)
