"""What all drafts share: block input, context, labels, heads, sampling steps, freezing.

A family adds its layers, norms and rotary embedding; `drafts/qwen3.py` is the one to read first.
Shapes: B samples, S sequence length, N anchors, K block size, M kept blocks, C context length, H hidden size,
F feature layers, V vocabulary.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, Self, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from dspark_lightning.anchors import (
    block_label_indices,
    build_eval_mask,
    create_noise_embed,
    create_position_ids,
    sample_anchor_positions,
)
from dspark_lightning.attention import AttentionKind, BlockAttention, block_visibility, build_attention
from dspark_lightning.blocks import list_blocks
from dspark_lightning.decoding.projection import project
from dspark_lightning.decoding.sample_block import sample_block
from dspark_lightning.drafts.rotation import Rope
from dspark_lightning.heads import AcceptRatePredictor, build_markov_head
from dspark_lightning.host import unboxed
from dspark_lightning.outputs import DSparkForwardOutput, DSparkHiddenOutput, OutputKind
from dspark_lightning.rope import repair_rope
from dspark_lightning.slots import plan_slots


class DSparkDraft(PreTrainedModel):
    """Base of the drafts; a family names its parts.

    Args:
        config: the draft's config, with the fields of `shared_draft_fields`.
    """

    config_class: type[PretrainedConfig]
    config: PretrainedConfig
    layer_class: ClassVar[type[nn.Module]]
    """One decoder layer, made from the config: a `GradientCheckpointingLayer` called with (hidden [M, K, H],
    context [B, C, H], rope, context_rope, attention), where the two ropes are what `rope_tables` returns."""
    norm_class: ClassVar[type[nn.Module]]
    """RMSNorm in the family's style, made from (H, eps=)."""
    rotary_class: ClassVar[type[nn.Module] | None]
    """Hugging Face rotary module, made from the config; None for a family without RoPE."""
    rope_label: ClassVar[str | None] = None
    """Which of several RoPE tables the layers use, where the rotary module holds one per kind of layer."""
    embedding_class: ClassVar[type[nn.Embedding]] = nn.Embedding
    attention: AttentionKind = "auto"
    """How block attention is computed; a property of the run, not of the draft, so it is not in the config."""
    logit_softcap: float | None = None
    """Logits of the head are logit_softcap * tanh(logits / logit_softcap), before the Markov bias."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(self.layer_class(config) for _ in range(config.num_hidden_layers))
        self.rotary_emb = None if self.rotary_class is None else self.rotary_class(config)
        hidden, num_features = config.hidden_size, len(config.target_layer_ids)
        self.block_size: int = config.block_size
        self.mask_token_id: int = config.mask_token_id
        self.num_anchors: int = config.num_anchors
        self.target_layer_ids: list[int] = list(config.target_layer_ids)
        self.attention_dropout: float = getattr(config, "attention_dropout", None) or 0.0
        self.enable_confidence_head: bool = config.enable_confidence_head
        self.confidence_head_with_markov: bool = config.confidence_head_with_markov
        self.embed_tokens = self.embedding_class(config.vocab_size, hidden)
        self.fc = nn.Linear(num_features * hidden, hidden, bias=False)
        self.hidden_norm = self.make_norm()
        self.norm = self.make_norm()
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)
        self.markov_head = build_markov_head(config)
        self.confidence_head: AcceptRatePredictor | None = None
        if self.enable_confidence_head:
            extra = config.markov_rank if self.confidence_head_with_markov else 0
            self.confidence_head = AcceptRatePredictor(hidden + extra)
        self.set_embedding_head_trainable(False)
        self.post_init()  # type: ignore[no-untyped-call]

    def make_norm(self) -> nn.Module:
        """One RMSNorm over H."""
        return self.norm_class(self.config.hidden_size, eps=self.config.rms_norm_eps)

    def rope_tables(self, states: Tensor, position_ids: Tensor) -> Rope | None:
        """Cos and sin for `position_ids` [X, L], in the dtype of `states` [X, L, H]; None without RoPE."""
        if self.rotary_emb is None:
            return None
        label = () if self.rope_label is None else (self.rope_label,)
        return cast(Rope, self.rotary_emb(states, position_ids, *label))

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """The RoPE settings in use, as transformers names them; empty without RoPE."""
        parameters: dict[str, Any] = (self.rotary_emb is not None and self.config.rope_parameters) or {}
        return dict(parameters if self.rope_label is None else parameters[self.rope_label])

    def forward_backbone(
        self,
        hidden: Tensor,  # [M, K, H]
        context: Tensor,  # [B, C, H]
        position_ids: Tensor,  # [M, K]
        context_position_ids: Tensor,  # [B, C]
        attention: BlockAttention,
    ) -> Tensor:
        """Run the decoder layers over the block tokens. Returns [M, K, H], before the final norm."""
        rope, context_rope = self.rope_tables(hidden, position_ids), self.rope_tables(context, context_position_ids)
        for layer in self.layers:
            hidden = layer(hidden, context, rope, context_rope, attention)
        return hidden

    def forward(
        self,
        input_ids: Tensor,  # [B, S]
        target_hidden_states: Tensor,  # [B, S, F*H]
        loss_mask: Tensor,  # [B, S]
        target_last_hidden_states: Tensor | None = None,  # [B, S, H]
        position_ids: Tensor | None = None,  # [B, S]
        seq_lens: Tensor | None = None,  # [B, D]
        doc_remaining: Tensor | None = None,  # [B, S]
        anchor_positions: Tensor | None = None,  # [B, N]
        block_keep_mask: Tensor | None = None,  # [B, N]
        attention_mask: Tensor | None = None,  # [B, S]
        output: OutputKind = "logits",
        loss_weights: Tensor | None = None,  # [B, S]
    ) -> DSparkForwardOutput | DSparkHiddenOutput:
        """Draft the block behind every anchor, teacher forced.

        Which blocks and slots count is worked out on the device of `anchor_positions`. Given on the CPU, together with
        the masks and lengths, nothing on the way waits for an accelerator; under FSDP they need an `OnHost` box.

        Args:
            input_ids: token ids, nothing shifted.
            target_hidden_states: features of `target_layer_ids`, concatenated.
            loss_mask: 1 = supervised.
            target_last_hidden_states: states after the target's final norm; None leaves the teacher out.
            position_ids: positions inside the documents of packed rows; None counts from 0.
            seq_lens: document lengths of packed rows, zero padded.
            doc_remaining: tokens left in the document, for packed rows.
            anchor_positions: given together with block_keep_mask, these replace sampling.
            block_keep_mask: False marks dummy blocks.
            attention_mask: 0 = never visible as context.
            output: "logits" projects every slot to the vocabulary, "hidden" leaves that to `compute_dspark_loss`.
            loss_weights: what the tokens of a document count in the loss; read at the anchors. None counts all alike.

        Raises:
            ValueError: only one of anchor_positions and block_keep_mask, or an unknown output.
        """
        if output not in get_args(OutputKind):
            raise ValueError(f"output must be one of {', '.join(get_args(OutputKind))}, got {output!r}")
        loss_mask, attention_mask, seq_lens = unboxed(loss_mask), unboxed(attention_mask), unboxed(seq_lens)
        anchor_positions, block_keep_mask = unboxed(anchor_positions), unboxed(block_keep_mask)
        doc_remaining, loss_weights = unboxed(doc_remaining), unboxed(loss_weights)
        seq_len, device = input_ids.shape[1], input_ids.device
        if (anchor_positions is None) != (block_keep_mask is None):
            raise ValueError("anchor_positions and block_keep_mask must be given together")
        if anchor_positions is None or block_keep_mask is None:
            anchor_positions, block_keep_mask = sample_anchor_positions(
                seq_len, loss_mask, self.num_anchors, loss_mask.device, doc_remaining
            )
        host, block_keep_mask = anchor_positions.device, block_keep_mask.bool()
        if (
            host.type == "cpu"
            and anchor_positions.numel()
            and not 0 <= anchor_positions.min() <= anchor_positions.max() < seq_len
        ):
            raise ValueError(f"anchor_positions must lie in 0..{seq_len - 1}, got {anchor_positions.tolist()}")
        visible_to = (anchor_positions, block_keep_mask, seq_lens, attention_mask)
        hidden = self._run_blocks(input_ids, target_hidden_states, position_ids, *visible_to)
        labels, safe_labels = block_label_indices(anchor_positions, self.block_size, seq_len)
        eval_mask = build_eval_mask(
            seq_len,
            loss_mask.to(host),
            labels,
            safe_labels,
            block_keep_mask,
            None if doc_remaining is None else doc_remaining.to(host),
            anchor_positions,
        )
        # The anchor's token, then the labels: slot k follows token k and predicts token k + 1.
        path = torch.cat([anchor_positions.unsqueeze(-1), safe_labels], dim=-1).to(device, non_blocking=True)
        tokens = input_ids.gather(1, path.flatten(1)).view_as(path)
        prev_ids, target_ids = tokens[..., :-1], tokens[..., 1:]
        teacher_positions = (safe_labels - 1).clamp(min=0)
        shared: dict[str, Any] = {
            "target_ids": target_ids,
            "eval_mask": eval_mask.to(device, non_blocking=True),
            "block_keep_mask": block_keep_mask.to(device, non_blocking=True),
            "confidence_pred": self.predict_confidence_step(hidden, prev_ids),
        }
        if loss_weights is not None:
            block_weights = loss_weights.to(host).float().gather(1, anchor_positions)
            shared["block_weights"] = block_weights.to(device, non_blocking=True)
        markov = self.markov_head
        if output == "hidden":
            return DSparkHiddenOutput(
                hidden=hidden,
                latents=None if markov is None else markov.latents(prev_ids, hidden),
                teacher_hidden=target_last_hidden_states,
                plan=plan_slots(eval_mask, teacher_positions, seq_len),
                head=self.lm_head.weight,
                markov_w2=None if markov is None else markov.markov_w2.weight,
                softcap=self.logit_softcap,
                **shared,
            )
        logits = self.compute_logits(hidden)
        return DSparkForwardOutput(
            draft_logits=logits if markov is None else markov(logits, prev_ids, hidden),
            aligned_target_logits=self._teacher_logits(target_last_hidden_states, teacher_positions.to(device)),
            **shared,
        )

    def _run_blocks(
        self,
        input_ids: Tensor,
        target_hidden_states: Tensor,
        position_ids: Tensor | None,
        anchor_positions: Tensor,
        block_keep_mask: Tensor,
        seq_lens: Tensor | None,
        attention_mask: Tensor | None,
    ) -> Tensor:
        """From ids and features to normed block states [B, N, K, H], zeros in dummies."""
        seq_len, device = input_ids.shape[1], input_ids.device
        host, dtype = anchor_positions.device, self.fc.weight.dtype
        seq_lens, attention_mask = (None if x is None else x.to(host) for x in (seq_lens, attention_mask))
        static = device.type == "cuda"  # compiled kernels like shapes that stay
        listed = list_blocks(seq_len, anchor_positions, block_keep_mask, seq_lens, attention_mask, trim=not static)
        length = listed.context_length
        attention = build_attention(
            self.attention,
            listed,
            lambda: block_visibility(
                length,
                anchor_positions,
                block_keep_mask,
                self.block_size,
                seq_lens,
                None if attention_mask is None else attention_mask[:, :length],
            ),
            dropout=self.training and self.attention_dropout > 0,
            device=device,
        )
        blocks = listed.to(device)
        anchor_ids = input_ids[blocks.rows, blocks.anchors].unsqueeze(-1)  # [M, 1], rows of one token each
        noise = create_noise_embed(
            self.embed_tokens,
            anchor_ids,
            torch.zeros_like(anchor_ids),
            blocks.gather(block_keep_mask.to(device)).unsqueeze(-1),
            self.mask_token_id,
            self.block_size,
        ).to(dtype)
        context = self.hidden_norm(self.fc(target_hidden_states[:, :length].to(dtype)))
        if position_ids is None:
            position_ids = torch.arange(seq_len, device=device).expand(input_ids.shape[0], -1)
        first_positions = position_ids[blocks.rows, blocks.anchors].unsqueeze(-1)
        positions = create_position_ids(first_positions, self.block_size)
        hidden = self.forward_backbone(noise, context, positions, position_ids[:, :length], attention)
        return blocks.scatter(self.norm(hidden))

    @torch.no_grad()
    def _teacher_logits(self, last_hidden: Tensor | None, positions: Tensor) -> Tensor | None:
        """The teacher's logits [B, N, K, V] at `positions` [B, N, K], through the draft's frozen copy of the head."""
        if last_hidden is None:
            return None
        index = positions.flatten(1).unsqueeze(-1).expand(-1, -1, last_hidden.shape[-1])
        return self.compute_logits(last_hidden.gather(1, index).view(*positions.shape, -1))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Project states [..., H] to logits [..., V], without the Markov bias."""
        logits = project(self.lm_head, hidden.to(self.lm_head.weight.dtype))
        if self.logit_softcap is not None:
            logits = self.logit_softcap * torch.tanh(logits / self.logit_softcap)
        return logits

    def predict_confidence_step(self, hidden: Tensor, prev_token_ids: Tensor | None = None) -> Tensor | None:
        """Confidence logits [...] fp32 for states [..., H]; None without a confidence head.

        Args:
            hidden: normed backbone states.
            prev_token_ids: previous tokens [...], read when the head was built with the Markov embedding.

        Raises:
            ValueError: the head needs prev_token_ids and got None.
        """
        if self.confidence_head is None:
            return None
        if not self.confidence_head_with_markov or self.markov_head is None:
            confidence: Tensor = self.confidence_head(hidden)
            return confidence
        if prev_token_ids is None:
            raise ValueError("prev_token_ids must be given: this confidence head reads the Markov embedding, got None")
        prev = self.markov_head.markov_w1(prev_token_ids)
        confidence = self.confidence_head(torch.cat([hidden.float(), prev.float()], dim=-1))
        return confidence

    def sample_draft_tokens(
        self,
        base_logits: Tensor,  # [B, K, V]
        first_prev_token_ids: Tensor,  # [B]
        temperature: float = 0.0,
        hidden_states: Tensor | None = None,  # [B, K, H]
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Sample a block left to right through the Markov head.

        Args:
            base_logits: logits of the block without Markov bias.
            first_prev_token_ids: the anchor tokens.
            temperature: 0 is greedy.
            hidden_states: normed backbone states; the gated and rnn heads need them.
            generator: source of randomness on the logits' device.

        Returns:
            tokens [B, K] and the corrected logits [B, K, V] they were drawn from.
        """
        block = sample_block(self.markov_head, base_logits, first_prev_token_ids, temperature, hidden_states, generator)
        return block.tokens, block.logits

    def sample_draft_token_step(
        self,
        base_logits: Tensor,  # [B, V]
        prev_token_ids: Tensor,  # [B]
        temperature: float = 0.0,
        hidden_states: Tensor | None = None,  # [B, H]
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`sample_draft_tokens` for the first slot of a block: tokens [B] and corrected logits [B, V]."""
        hidden = None if hidden_states is None else hidden_states.unsqueeze(1)
        tokens, logits = self.sample_draft_tokens(
            base_logits.unsqueeze(1), prev_token_ids, temperature, hidden, generator
        )
        return tokens.squeeze(1), logits.squeeze(1)

    def initialize_embeddings_and_head(self, embed_tokens: nn.Module, lm_head: nn.Module, freeze: bool = True) -> None:
        """Take embedding and head from the target.

        Args:
            embed_tokens: the target's embedding [V, H].
            lm_head: the target's head [V, H].
            freeze: frozen weights share the target's memory; trainable ones are copied.

        Raises:
            ValueError: the shapes do not fit.
        """
        for name, source in (("embed_tokens", embed_tokens), ("lm_head", lm_head)):
            module = getattr(self, name)
            weight = cast(Tensor, source.weight)
            if weight.shape != module.weight.shape:
                raise ValueError(
                    f"the target's {name} has shape {tuple(weight.shape)}, the draft needs {tuple(module.weight.shape)}"
                )
            module.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.set_embedding_head_trainable(not freeze)

    def set_embedding_head_trainable(self, trainable: bool) -> None:
        """Freeze or unfreeze embedding and head; unfreezing gives them memory of their own, apart from the target's."""
        for module in (self.embed_tokens, self.lm_head):
            if trainable and not module.weight.requires_grad:
                module.weight = nn.Parameter(module.weight.detach().clone())
            module.weight.requires_grad_(trainable)

    def checkpoint_activations(self) -> None:
        """Run the decoder layers again in the backward pass instead of keeping what they computed."""
        for layer in cast(Iterable[Any], self.layers):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def _init_weights(self, module: nn.Module) -> None:
        """Normal with `initializer_range`, biases zero; `from_pretrained` leaves tables that are not saved to this."""
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        if module is self.rotary_emb:
            repair_rope(module)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Casting and moving keep RoPE fp32; materialising from the meta device gives it its values back."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        repair_rope(self)
        return self
