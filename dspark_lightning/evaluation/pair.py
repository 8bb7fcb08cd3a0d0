"""An exported draft beside its target, ready to decode."""

from typing import cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.offload import input_device
from dspark_lightning.target import HFDSparkTargetModel


def check_sizes(target_config: PretrainedConfig, draft_config: PretrainedConfig) -> None:
    """Check that a draft is for a target of this size.

    Raises:
        ValueError: it is not; names the size and both values.
    """
    text = target_config.get_text_config()
    for name, own, theirs in (
        ("hidden_size", draft_config.hidden_size, text.hidden_size),
        ("vocab_size", draft_config.vocab_size, text.vocab_size),
        ("num_target_layers", draft_config.num_target_layers, text.num_hidden_layers),
    ):
        if own not in (None, theirs):  # a folder of another tool may not say how many layers
            raise ValueError(f"the draft was trained for a target with {name} {own}, this target has {theirs}")


def pair_up(model: PreTrainedModel, draft: DSparkDraft) -> HFDSparkTargetModel:
    """Put a draft on its target's device, in its dtype, and share what the two have in common.

    Args:
        model: the target.
        draft: its embedding and head are replaced by the target's where they hold the same values.

    Returns:
        the target, ready to give features.

    Raises:
        ValueError: the draft is for a target of another size.
    """
    check_sizes(model.config, draft.config)
    target = HFDSparkTargetModel(model, draft.target_layer_ids)
    module = cast(nn.Module, draft)
    module.to(input_device(model.get_input_embeddings()), model.dtype).eval()
    same = []
    for name, source in (("embed_tokens", target.embed_tokens), ("lm_head", target.lm_head)):
        mine, theirs = getattr(draft, name), cast(Tensor, source.weight).to(draft.fc.weight.device)
        same.append(torch.equal(mine.weight.to(torch.bfloat16), theirs.to(torch.bfloat16)))  # the file holds bf16
        if same[-1]:
            mine.weight = nn.Parameter(theirs.detach(), requires_grad=False)
    if not all(same):
        rank_zero_warn("the draft's embedding and head are not those of this target: was it trained for another one?")
    return target
