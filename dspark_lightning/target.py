"""The frozen target: capturing the features a draft reads.

Feature of layer i: the output of decoder layer i (`hidden_states[i + 1]` in the Hugging Face convention); -1 is the
embedding output; the last layer's feature is the state after the final norm.
Shapes: B samples, S sequence length, H hidden size, F feature layers, L target layers.
"""

import hashlib
import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers import PretrainedConfig, PreTrainedModel

from dspark_lightning.decoding.projection import project
from dspark_lightning.document_attention import attending_by_document
from dspark_lightning.offload import input_device, onloaded, with_weights
from dspark_lightning.precision import without_autocast

# Kinds of layers that keep packed documents apart where position_ids restart, and why others do not.
# (deepseek_sparse_attention is what older versions of transformers call indexed_attention.)
_PACKABLE_LAYERS = ("full_attention", "sliding_attention", "indexed_attention", "deepseek_sparse_attention")
# Kinds of layers that see nothing of padding before a row. Others anchor windows or blocks to places in the row.
_LEFT_PADDABLE_LAYERS = (*_PACKABLE_LAYERS, "linear_attention")
_NOT_MEDIA = ("inputs_embeds", "past_key_values", "cache", "cache_position", "use_cache", "labels", "kwargs")
_UNPACKABLE_LAYERS = {
    "compressed_sparse_attention": "whose compressor windows span documents",
    "heavily_compressed_attention": "whose compressor windows span documents",
    "minimax_m3_sparse": "whose blocks are anchored to positions in the row",
    "linear_attention": "whose recurrent state runs on through documents",
}


def build_target_layer_ids(num_target_layers: int, num_feature_layers: int) -> list[int]:
    """Spread F feature layers over a target of L layers, away from the embedding and the last layer.

    Those two train but cannot be captured by every serving engine.

    Args:
        num_target_layers: L.
        num_feature_layers: F.

    Returns:
        F strictly increasing ids in [0, L-2] (36 layers, 5 features: 1, 9, 17, 25, 33).

    Raises:
        ValueError: F < 1 or F > L-1.
    """
    last, count = num_target_layers - 1, num_feature_layers
    if count == 1 and num_target_layers >= 1:
        return [num_target_layers // 2 if num_target_layers > 2 else 0]
    if not 1 <= count <= last:
        raise ValueError(
            f"cannot pick {count} feature layers from a target of {num_target_layers} layers: "
            f"num_feature_layers must be between 1 and {max(last, 1)}"
        )
    if count <= num_target_layers - 3:
        return [round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count)]
    return [round(i * (num_target_layers - 2) / (count - 1)) for i in range(count)]


def validate_target_layer_ids(layer_ids: Sequence[int], num_target_layers: int) -> list[int]:
    """Check feature layer ids: not empty, strictly increasing, in {-1} and [0, L-1].

    Args:
        layer_ids: 0-based decoder layers; -1 is the embedding.
        num_target_layers: L.

    Returns:
        the ids as a list.

    Raises:
        ValueError: names the ids and what is wrong with them.
    """
    ids = list(layer_ids)
    last = num_target_layers - 1
    if not ids:
        raise ValueError("target_layer_ids is empty: name at least one layer, or leave it out for the default spread")
    if any(not -1 <= i <= last for i in ids):
        raise ValueError(f"target_layer_ids {ids} must lie in -1..{last}: the target has {num_target_layers} layers")
    if any(a >= b for a, b in pairwise(ids)):
        raise ValueError(f"target_layer_ids {ids} must be strictly increasing, such as {sorted(set(ids))}")
    return ids


def extract_context_feature(hidden_states: Sequence[Tensor], layer_ids: Sequence[int]) -> Tensor:
    """Concatenate the features of `layer_ids` from a Hugging Face `hidden_states` tuple.

    Args:
        hidden_states: L + 1 tensors [B, S, H]; hyper-connection targets give [B, S, C, H], of which the mean over
            the C streams is taken.
        layer_ids: F ids, see the module docstring.

    Returns:
        [B, S, F*H].
    """
    return torch.cat([_merge_streams(hidden_states[i + 1]) for i in layer_ids], dim=-1)


def _merge_streams(hidden: Tensor) -> Tensor:
    return hidden.mean(dim=2) if hidden.dim() == 4 else hidden


@dataclass
class DSparkTargetBatch:
    """What the draft reads of the target, beside the batch it came from.

    Attributes:
        target_hidden_states: the feature layers side by side, [B, S, F*H].
        target_last_hidden_states: [B, S, H], after the final norm.
        input_ids: [B, S].
        loss_mask: [B, S].
        position_ids: [B, S], inside the document when packed.
        seq_lens: lengths of the documents of packed rows, [B, M].
        doc_remaining: tokens left in the document of packed rows, [B, S].
    """

    target_hidden_states: Tensor
    target_last_hidden_states: Tensor
    input_ids: Tensor
    loss_mask: Tensor
    position_ids: Tensor | None = None
    seq_lens: Tensor | None = None
    doc_remaining: Tensor | None = None


class HFDSparkTargetModel:
    """A frozen Hugging Face target that yields features, without ever running its lm_head.

    Not an `nn.Module`: a LightningModule that holds it keeps the target out of its parameters, checkpoints and casts.

    Args:
        model: the target; it is put into eval mode and frozen.
        target_layer_ids: feature layers, F strictly increasing ids in {-1} and [0, L-1].

    Raises:
        ValueError: wrong layer ids, or a model whose decoder layers cannot be found.
    """

    def __init__(self, model: PreTrainedModel, target_layer_ids: Sequence[int]) -> None:
        self.model = cast(PreTrainedModel, model.eval().requires_grad_(False))
        inner = getattr(model.base_model, "language_model", None)
        self._wraps_causal_lm = getattr(inner, "model", None) is self.decoder
        self.num_layers = len(cast(nn.ModuleList, self.decoder.layers))
        self.target_layer_ids = validate_target_layer_ids(target_layer_ids, self.num_layers)
        # What the backbone takes beside text: pixel values, grids, token types. FSDP1's wrapper would hide it later.
        taken = set(inspect.signature(model.base_model.forward).parameters)
        self.media_arguments = frozenset(taken - {"self", "input_ids", "attention_mask", "position_ids", *_NOT_MEDIA})

    @property
    def decoder(self) -> nn.Module:
        """The text stack; looked up, since sharding puts wrappers in its place."""
        return find_decoder(self.model)

    @property
    def embed_tokens(self) -> nn.Module:
        """The target's token embedding; where its weight is offloaded, a copy that holds it."""
        return with_weights(self.model.get_input_embeddings())

    @property
    def lm_head(self) -> nn.Module:
        """The target's output projection; where its weight is offloaded, a copy that holds it."""
        return with_weights(cast(nn.Module, self.model.get_output_embeddings()))

    def generate_batch(
        self,
        input_ids: Tensor,  # [B, S]
        attention_mask: Tensor | None,  # [B, S]
        loss_mask: Tensor,  # [B, S]
        position_ids: Tensor | None = None,  # [B, S]
        seq_lens: Tensor | None = None,  # [B, M]
        doc_remaining: Tensor | None = None,  # [B, S]
        **multimodal: Any,
    ) -> DSparkTargetBatch:
        """Run the target's backbone once and collect its features.

        For packed rows (`seq_lens` given) the documents are told apart by `position_ids`, which restart in each
        document, and no attention mask is passed: a 2-D mask beside them would let documents see each other. Nor is
        one passed beside media when it only hides tokens at the end of rows, which no other position sees: a hidden
        picture would shift the pictures of the following rows in targets that count them by the mask.

        Args:
            input_ids: token ids.
            attention_mask: 0 = not a real token.
            loss_mask: handed on.
            position_ids: inside the documents of packed rows; None leaves positions to the target.
            seq_lens: document lengths of packed rows.
            doc_remaining: handed on.
            **multimodal: whatever else the target's processor returned: pixels, grids, token types.

        Returns:
            the features, on the device of `input_ids` wherever the target's layers are.

        Raises:
            ValueError: packed rows without position_ids, or for a target that would mix their documents.
        """
        positions = position_ids
        if seq_lens is not None:
            positions, attention_mask = self._packed_positions(position_ids), None
        elif multimodal and attention_mask is not None and is_right_padded(attention_mask):
            attention_mask = None
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": positions, **multimodal}
        self.model.eval()
        in_packs = None if multimodal else seq_lens
        with nullcontext() if in_packs is None else attending_by_document(self.decoder, in_packs):
            features = self._run(inputs, with_media=bool(multimodal))
        device, last = input_ids.device, features[self.num_layers - 1]
        # Outside inference mode again: the concatenation and the copy are ordinary tensors that autograd may save.
        return DSparkTargetBatch(
            target_hidden_states=torch.cat([features[i].to(device) for i in self.target_layer_ids], dim=-1),
            target_last_hidden_states=last.to(device, copy=True),
            input_ids=input_ids,
            loss_mask=loss_mask,
            position_ids=position_ids,
            seq_lens=seq_lens,
            doc_remaining=doc_remaining,
        )

    def decode(self, input_ids: Tensor, cache: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Run tokens [B, n] behind those that a cache holds.

        The target has to be in eval mode: walking its modules each time would cost as much as a layer.

        Args:
            input_ids: token ids.
            cache: the cache by the name of the argument that takes it; the tokens are added to it.

        Returns:
            features [B, n, F*H] and states after the final norm [B, n, H].
        """
        features = self._run({"input_ids": input_ids}, with_media=False, cache=cache)
        joined = torch.cat([features[i].to(input_ids.device) for i in self.target_layer_ids], dim=-1)
        return joined, features[self.num_layers - 1].to(input_ids.device, copy=True)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The target's logits [..., V] of states [..., H] after the final norm."""
        logits = project(self.lm_head, hidden)
        cap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _run(self, inputs: dict[str, Any], with_media: bool, cache: dict[str, Any] | None = None) -> dict[int, Tensor]:
        """Run the backbone. Returns the features [B, S, H] by layer id, always with the last layer's."""
        # A causal LM in the place of a text stack would run its head too. It is entered only to place other media.
        backbone = self.decoder if self._wraps_causal_lm and not with_media else self.model.base_model
        device = input_device(self.model.get_input_embeddings())
        inputs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        features: dict[int, Tensor] = {}
        sources = {i: self._module_of(i) for i in (*self.target_layer_ids, self.num_layers - 1)}
        handles = [source.register_forward_hook(_keep_output(features, i)) for i, source in sources.items()]
        # A half-precision target runs as it is served. Autocast would round its fp32 parts: routers, indexers, streams.
        as_served = self.model.dtype in (torch.bfloat16, torch.float16)
        # FSDP counts versions of what it gathers, which tensors made in inference mode do not have.
        sharded = isinstance(self.model.base_model, (FSDP, FSDPModule))
        no_grad = torch.no_grad() if sharded else torch.inference_mode()
        try:
            with no_grad, without_autocast(device) if as_served else nullcontext():
                backbone(**inputs, **(cache or {}), use_cache=cache is not None)
        finally:
            for handle in handles:
                handle.remove()
        return features

    def _packed_positions(self, position_ids: Tensor | None) -> Tensor:
        """Positions [B, S] in the form in which this target's mask follows them."""
        if position_ids is None:
            raise ValueError("packed rows (seq_lens) need position_ids that restart in each document, got None")
        config = self.model.config
        check_packing(config)
        text = config.get_text_config()
        attention = str(getattr(text, "_attn_implementation", None))
        if "flash" in attention and len(position_ids) > 1:
            raise ValueError(
                f"a batch of {len(position_ids)} packed rows cannot be run with attn_implementation {attention!r}, "
                "which tells documents apart in a batch of 1 only: set batch_size to 1, or use 'sdpa'"
            )
        if "mrope_section" in (getattr(text, "rope_parameters", None) or {}):
            # Three axes of media positions; only a fourth, in front of them, is looked at for documents.
            return position_ids.expand(4, -1, -1)
        return position_ids

    def fingerprint(self) -> str:
        """Identify the target by its weights: a short hash over a sample of every parameter, rounded to bf16.

        The rounding makes it the same whether the target was loaded in bf16 or in fp32.
        """
        digest = hashlib.blake2b(digest_size=8)
        # Tied weights count once. While they are offloaded, only the model's own list tells that they are tied.
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        names = {name for name, _ in self.model.named_parameters()} - set(tied)
        for prefix, module in self.model.named_modules():
            with onloaded(module):
                for name, parameter in module.named_parameters(prefix, recurse=False):
                    if name in names:
                        flat = parameter.detach().flatten()
                        sample = flat[:: max(1, flat.numel() // 64)][:64].to(torch.bfloat16).float().cpu()
                        digest.update(f"{name}{tuple(parameter.shape)}".encode())
                        digest.update(sample.numpy().tobytes())
        return digest.hexdigest()

    def _module_of(self, layer_id: int) -> nn.Module:
        """The module whose output is a feature; the last layer's comes from the final norm."""
        if layer_id == -1:
            return self.model.get_input_embeddings()
        if layer_id == self.num_layers - 1:
            return cast(nn.Module, self.decoder.norm)
        return cast(nn.ModuleList, self.decoder.layers)[layer_id]


def is_right_padded(attention_mask: Tensor) -> bool:
    """Whether padding [B, S] only follows real tokens; no causal target then sees it, and needs no mask."""
    return bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all())


def _keep_output(features: dict[int, Tensor], layer_id: int) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        hidden = output[0] if isinstance(output, tuple) else output
        features[layer_id] = _merge_streams(hidden)

    return hook


def check_packing(config: PretrainedConfig) -> None:
    """Refuse targets that mix the documents of packed rows, whatever positions and masks they are given.

    Args:
        config: the target's config; the `layer_types` of its text part decide. Without any, all is plain attention.

    Raises:
        ValueError: names the kind of layer and why it mixes documents.
    """
    for kind in getattr(config.get_text_config(), "layer_types", None) or ():
        if kind not in _PACKABLE_LAYERS:
            reason = _UNPACKABLE_LAYERS.get(kind, "which are not known to keep documents apart")
            raise ValueError(
                f"rows cannot be packed for a {config.model_type!r} target: it has {kind!r} layers, {reason}; "
                "train on unpacked rows"
            )


def reads_left_padded(config: PretrainedConfig) -> bool:
    """Whether a target gives rows that are padded on the left the numbers that they have alone.

    Args:
        config: the target's config; the `layer_types` of its text part decide.
    """
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    return all(kind in _LEFT_PADDABLE_LAYERS for kind in kinds)


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """Find the text stack: the module that owns the decoder layers and the final norm.

    Raises:
        ValueError: no such module where Hugging Face models keep it.
    """
    base = model.base_model
    inner = getattr(base, "language_model", None)
    for candidate in (inner, getattr(inner, "model", None), base):
        if candidate is not None and hasattr(candidate, "layers") and hasattr(candidate, "norm"):
            return cast(nn.Module, candidate)
    raise ValueError(f"{type(model).__name__} has no decoder layers where they are looked for: .layers beside .norm")
