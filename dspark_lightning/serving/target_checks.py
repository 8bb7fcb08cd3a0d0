"""What can be told from the folder and its target together."""

from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dspark_lightning.datamodules.loss_mask import ChatRenderer
from dspark_lightning.datamodules.rows import BadRow
from dspark_lightning.decoding.generate import end_tokens
from dspark_lightning.drafts.registry import build_draft_config, resolve_dspark_draft_spec
from dspark_lightning.evaluation.pair import check_sizes
from dspark_lightning.offload import onloaded
from dspark_lightning.serving.findings import Verdict, error, ok, warning
from dspark_lightning.serving.folder import DraftFolder, stored_tensor
from dspark_lightning.target import HFDSparkTargetModel


def check_family(folder: DraftFolder, model: PreTrainedModel) -> Verdict:
    """The draft is of the target's family and size."""
    try:
        spec = resolve_dspark_draft_spec([*(model.config.architectures or ()), model.config.model_type])
        check_sizes(model.config, folder.draft.config)
    except ValueError as refusal:
        return error(str(refusal))
    own, right = type(folder.draft).__name__, spec.model_class.__name__
    if own != right:
        return error(f"the draft is a {own}, must be a {right} for a {model.config.model_type!r} target")
    text = model.config.get_text_config()
    return ok(f"{own}, {text.num_hidden_layers} layers, hidden_size {text.hidden_size}, vocab_size {text.vocab_size}")


def check_target_rope(folder: DraftFolder, model: PreTrainedModel) -> Verdict:
    """The draft counts positions as a draft of this target does; one that was trained otherwise may have reasons."""
    config = folder.draft.config
    names = ("mask_token_id", "block_size", "num_anchors", "markov_rank", "target_layer_ids")
    args = {name: getattr(config, name) for name in names} | {"num_draft_layers": config.num_hidden_layers}
    with torch.device("meta"):
        right = type(folder.draft)(build_draft_config(model.config, args)).rope_parameters
    own = folder.draft.rope_parameters
    if own != right:
        return warning(f"RoPE is {own}, a draft trained for this target has {right}")
    return ok(f"rope_theta {own['rope_theta']}, as the target's" if own else "no RoPE")


def check_copied(folder: DraftFolder, target: HFDSparkTargetModel, name: str) -> Verdict:
    """The embedding or the head is the target's, in bf16 bit for bit.

    Args:
        folder: of the draft.
        target: of the same size.
        name: embed_tokens or lm_head.
    """
    source = getattr(target, name)
    with onloaded(source):
        theirs = cast(Tensor, source.weight).detach().to("cpu", torch.bfloat16)
    own = stored_tensor(folder.path, f"{name}.weight").to(torch.bfloat16)
    if own.shape != theirs.shape:
        return error(f"{name}.weight has shape {tuple(own.shape)}, the target's has {tuple(theirs.shape)}")
    rows = int((own != theirs).any(dim=-1).sum())
    if rows:
        return error(f"{rows} of {len(own)} rows of {name}.weight are not the target's, must be equal in bfloat16")
    return ok(f"{len(own)} rows of {name}.weight equal the target's in bfloat16")


def check_mask_in_text(folder: DraftFolder, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Verdict:
    """The mask token is none that text holds: not the end of an answer, not in the template, not an ordinary one."""
    mask = folder.draft.mask_token_id
    if mask >= len(tokenizer):
        return ok(f"{mask} is no token of the tokenizer, which has {len(tokenizer)}")
    token, advice = tokenizer.decode([mask]), "take a token that never occurs in text"
    if mask in end_tokens(model) or mask == tokenizer.eos_token_id:
        return error(f"mask_token_id {mask} is {token!r}, which ends answers: {advice}")
    if mask in _template_tokens(tokenizer):
        return error(f"mask_token_id {mask} is {token!r}, which the chat template writes: {advice}")
    if mask not in tokenizer.added_tokens_decoder:
        return warning(f"mask_token_id {mask} is {token!r}, which text can hold: {advice}")
    return ok(f"{mask} is {token!r}, which text does not hold")


def _template_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """What the chat template writes around a question; nothing where there is no template."""
    try:
        return set(ChatRenderer(tokenizer).encode_prompt([{"role": "user", "content": "1"}]))
    except (BadRow, ValueError):
        return set()
