"""One row as people read it, with its supervised part marked."""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase

_LONGEST = 400  # characters of one stretch


class Piece(NamedTuple):
    """The text of one token, or of several that only together are whole characters."""

    text: str
    supervised: bool
    special: bool  # a token of the template's, not of the text


def pieces(tokenizer: PreTrainedTokenizerBase, input_ids: Tensor, loss_mask: Tensor) -> Iterator[Piece]:
    """Cut a row into its tokens.

    Args:
        tokenizer: Decodes the ids.
        input_ids: [S].
        loss_mask: [S].
    """
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    ids, mask = input_ids.tolist(), loss_mask.tolist()
    before: list[int] = []  # decoded too, for some tokenizers write a token differently at the beginning
    piece: list[int] = []
    for i, token in enumerate(ids):
        piece.append(token)
        text = _decode(tokenizer, before + piece)[len(_decode(tokenizer, before)) :]
        if text.endswith("\ufffd") and i + 1 < len(ids) and mask[i + 1] == mask[i]:
            continue  # part of a character
        yield Piece(text, bool(mask[i]), token in special)
        before, piece = [] if text.endswith("\ufffd") else piece, []


def preview(tokenizer: PreTrainedTokenizerBase, input_ids: Tensor, loss_mask: Tensor) -> str:
    """Text of a row, special tokens included, with supervised stretches between ⟦ and ⟧ and long ones shortened.

    Args:
        tokenizer: Decodes the ids.
        input_ids: [S].
        loss_mask: [S].
    """
    text = ""
    for supervised, stretch in groupby(pieces(tokenizer, input_ids, loss_mask), key=lambda piece: piece.supervised):
        part = "".join(piece.text for piece in stretch)
        if len(part) > _LONGEST:
            part = f"{part[: _LONGEST // 2]} ... {part[-_LONGEST // 2 :]}"
        text += f"⟦{part}⟧" if supervised else part
    return text


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
