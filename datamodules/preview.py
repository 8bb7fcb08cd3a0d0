"""One row as people read it, with its supervised part marked."""

from itertools import groupby

from torch import Tensor
from transformers import PreTrainedTokenizerBase

_LONGEST = 400  # characters of one stretch


def preview(tokenizer: PreTrainedTokenizerBase, input_ids: Tensor, loss_mask: Tensor) -> str:
    """Text of a row, special tokens included, with supervised stretches between ⟦ and ⟧ and long ones shortened.

    Args:
        tokenizer: Decodes the ids.
        input_ids: [S].
        loss_mask: [S].
    """
    text = ""
    for supervised, stretch in groupby(
        zip(loss_mask.tolist(), input_ids.tolist(), strict=True), key=lambda pair: pair[0]
    ):
        piece = str(tokenizer.decode([token for _, token in stretch], clean_up_tokenization_spaces=False))
        if len(piece) > _LONGEST:
            piece = f"{piece[: _LONGEST // 2]} ... {piece[-_LONGEST // 2 :]}"
        text += f"⟦{piece}⟧" if supervised else piece
    return text
