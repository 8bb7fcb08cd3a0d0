"""The frozen target: loading it, and capturing the features a draft reads.

Feature of layer i: the output of decoder layer i (`hidden_states[i + 1]` in the Hugging Face convention); -1 is the
embedding output; the last layer's feature is the state after the final norm.
Shapes: B samples, S sequence length, H hidden size, F feature layers, L target layers.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from dspark_lightning.embedded import embedded_path


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
    """Check feature layer ids: not empty, strictly increasing, in {-1} and [0, L-1]. Returns them as a list.

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
    """What the draft reads of the target, beside the batch it came from."""

    target_hidden_states: Tensor  # [B, S, F*H]
    target_last_hidden_states: Tensor  # [B, S, H], after the final norm
    input_ids: Tensor  # [B, S]
    loss_mask: Tensor  # [B, S]
    position_ids: Tensor | None = None  # [B, S], inside the document when packed
    seq_lens: Tensor | None = None  # [B, M]
    doc_remaining: Tensor | None = None  # [B, S]


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
        self.decoder = find_decoder(model)
        self.num_layers = len(cast(nn.ModuleList, self.decoder.layers))
        self.target_layer_ids = validate_target_layer_ids(target_layer_ids, self.num_layers)

    @property
    def embed_tokens(self) -> nn.Module:
        """The target's token embedding."""
        return self.model.get_input_embeddings()

    @property
    def lm_head(self) -> nn.Module:
        """The target's output projection."""
        return cast(nn.Module, self.model.get_output_embeddings())

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
        document, and no attention mask is passed: a 2-D mask beside them would let documents see each other.

        Raises:
            ValueError: packed rows without position_ids.
        """
        if seq_lens is not None:
            if position_ids is None:
                raise ValueError("packed rows (seq_lens) need position_ids that restart in each document, got None")
            attention_mask = None
        self.model.eval()
        features: dict[int, Tensor] = {}
        handles = [self._module_of(i).register_forward_hook(_keep_output(features, i)) for i in self.target_layer_ids]
        try:
            with torch.inference_mode():
                output = self.model.base_model(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    position_ids=position_ids,
                    use_cache=False,
                    **multimodal,
                )
        finally:
            for handle in handles:
                handle.remove()
        last = output.last_hidden_state
        if self.num_layers - 1 in features:
            features[self.num_layers - 1] = last
        # Outside inference mode again: the concatenation and the clone are ordinary tensors that autograd may save.
        return DSparkTargetBatch(
            target_hidden_states=torch.cat([features[i] for i in self.target_layer_ids], dim=-1),
            target_last_hidden_states=last.clone(),
            input_ids=input_ids,
            loss_mask=loss_mask,
            position_ids=position_ids,
            seq_lens=seq_lens,
            doc_remaining=doc_remaining,
        )

    def fingerprint(self) -> str:
        """Identify the target by its weights: a short hash over a sample of every parameter, rounded to bf16.

        The rounding makes it the same whether the target was loaded in bf16 or in fp32.
        """
        digest = hashlib.blake2b(digest_size=8)
        for name, parameter in self.model.named_parameters():
            flat = parameter.detach().flatten()
            sample = flat[:: max(1, flat.numel() // 64)][:64].to(torch.bfloat16).float().cpu()
            digest.update(f"{name}{tuple(parameter.shape)}".encode())
            digest.update(sample.numpy().tobytes())
        return digest.hexdigest()

    def _module_of(self, layer_id: int) -> nn.Module:
        if layer_id == -1:
            return self.embed_tokens
        return cast(nn.ModuleList, self.decoder.layers)[layer_id]


def _keep_output(features: dict[int, Tensor], layer_id: int) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        hidden = output[0] if isinstance(output, tuple) else output
        features[layer_id] = _merge_streams(hidden)

    return hook


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """Find the text stack: the module that owns the decoder layers and the final norm.

    Raises:
        ValueError: no such module where Hugging Face models keep it.
    """
    base = model.base_model
    for candidate in (getattr(base, "language_model", None), base):
        if candidate is not None and hasattr(candidate, "layers") and hasattr(candidate, "norm"):
            return cast(nn.Module, candidate)
    raise ValueError(f"{type(model).__name__} has no decoder layers where they are looked for: .layers beside .norm")


def target_source(target: str) -> str:
    """Resolve the name of a target: "embedded" is the tiny one that ships with the package.

    Raises:
        ValueError: a path that does not exist.
    """
    if target == "embedded":
        return str(embedded_path())
    looks_like_path = target.startswith((".", "~", os.sep)) or target.count("/") > 1
    path = Path(target).expanduser()
    if looks_like_path and not path.exists():
        raise ValueError(f"target {target!r} does not exist: give a folder, a hub id such as org/name, or 'embedded'")
    return str(path) if path.exists() else target


def load_target_config(target: str, trust_remote_code: bool = False) -> PretrainedConfig:
    """Read the target's config. Arguments and errors as for `load_target`."""
    return cast(PretrainedConfig, _load(AutoConfig, target, None, trust_remote_code=trust_remote_code))


def load_target(
    target: str,
    gguf_file: str | None = None,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a target for capturing.

    Args:
        target: model folder, hub id, or "embedded".
        gguf_file: name of a GGUF file inside it, for quantised checkpoints (needs the extra `gguf`).
        dtype: of the weights.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        ValueError: the target cannot be read; one line that names it.
    """
    model, info = _load(
        AutoModelForCausalLM,
        target,
        gguf_file,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        ignore_mismatched_sizes=True,  # so that they come back below, with their names
        output_loading_info=True,
    )
    # transformers would go on with random numbers in their place.
    for name, saved, needed in sorted(info["mismatched_keys"]):
        raise ValueError(
            f"the target {target!r} has {name!r} of shape {tuple(saved)}, its config asks for {tuple(needed)}"
        )
    for name in sorted(info["missing_keys"]):
        raise ValueError(f"the target {target!r} has no weights for {name!r}")
    return cast(PreTrainedModel, model)


def _load(auto_class: Any, target: str, gguf_file: str | None, **kwargs: Any) -> Any:
    source = target_source(target)
    if gguf_file is not None:
        kwargs["gguf_file"] = gguf_file
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    try:
        return auto_class.from_pretrained(source, **kwargs)
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        file = f" (file {gguf_file!r})" if gguf_file else ""
        raise ValueError(f"cannot read the target {target!r}{file}: {reason}") from error
    finally:
        hf_logging.set_verbosity(verbosity)
