"""The unshifted collate for rows with pictures."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import ProcessorMixin

from dspark_lightning.datamodules.loss_mask import ChatRenderer
from dspark_lightning.datamodules.rows import BadRow
from dspark_lightning.datamodules.tokenizer import padding_token_id
from dspark_lightning.datamodules.vlm_encode import VlmEncoder, VlmRow, with_white_image
from dspark_lightning.datamodules.vlm_rows import parse_vlm_row


def dspark_vlm_collate_fn(
    examples: Sequence[Mapping[str, Any]],
    processor: ProcessorMixin,
    max_length: int,
    inject_fake_image: bool = True,
) -> dict[str, Tensor]:
    """Turn rows with and without pictures into one batch for a vision-language target.

    Nothing is shifted or cut by one, and there are no labels. Rows are padded on the right to max_length, always.
    Supervised are the assistant's text and its end-of-turn token, never a vision token.

    Args:
        examples: Conversations with parts of type text, image or video; see `dspark_lightning.datamodules.vlm_rows`. A
            `row_id` is passed on.
        processor: The target's, with its chat template.
        max_length: S. A picture that does not fit whole is left out, with all that follows it in its row.
        inject_fake_image: Whether a row without pictures gets a small white one behind its last token, so that every
            rank runs the vision tower. attention_mask and loss_mask are 0 there: no other position sees it.

    Returns:
        `input_ids`, `attention_mask`, `loss_mask` [B, S] int64, `row_id` [B] where given, and pixels and grids as the
        processor gives them.

    Raises:
        ValueError: A row that cannot be used; names it and the reason. Or a max_length without room.
    """
    return VlmCollator(_plain_encoder(processor, max_length), inject_fake_image)(examples)


@lru_cache(maxsize=8)
def _plain_encoder(processor: ProcessorMixin, max_length: int) -> VlmEncoder:
    return VlmEncoder(processor, max_length, vlm_renderer(processor))


def vlm_renderer(processor: ProcessorMixin, **options: Any) -> ChatRenderer:
    """A renderer with the processor's tokenizer and chat template. Options: those of `ChatRenderer`."""
    options.setdefault("chat_template", None)
    if options["chat_template"] is None:
        options["chat_template"] = getattr(processor, "chat_template", None)
    return ChatRenderer(processor.tokenizer, **options)


class Origin(NamedTuple):
    """Where a row comes from."""

    folder: Path | None  # where its relative paths start
    name: Callable[[], str]  # its file and line, which only errors ask for


class VlmCollator:
    """`dspark_vlm_collate_fn` with an encoder of one's own.

    Args:
        encoder: Encodes the rows.
        inject_fake_image: See `dspark_vlm_collate_fn`.
    """

    def __init__(self, encoder: VlmEncoder, inject_fake_image: bool = True) -> None:
        self.encoder, self.inject_fake_image = encoder, inject_fake_image
        self.pad_token_id = padding_token_id(encoder.processor.tokenizer)

    def encode(self, example: object, folder: Path | None = None) -> tuple[VlmRow, int]:
        """One row, with the white picture behind it where it has none, and how many of its tokens are real.

        Args:
            example: One row, as it was read.
            folder: Where relative paths of its pictures start.

        Raises:
            BadRow: The row cannot be used.
            ValueError: No row could be, with this template, processor or max_length.
        """
        chat = parse_vlm_row(example, folder)
        row = self.encoder.encode(chat)
        if self.inject_fake_image and not row.media:
            return with_white_image(row, self.encoder, chat)
        return row, len(row.input_ids)

    def __call__(
        self, examples: Sequence[Mapping[str, Any]], origins: Sequence[Origin] | None = None
    ) -> dict[str, Tensor]:
        """One batch; see `dspark_vlm_collate_fn`. `origins`: of each row, for its relative paths and for errors."""
        length = self.encoder.max_length
        batch: dict[str, list[Tensor]] = {name: [] for name in ("input_ids", "attention_mask", "loss_mask")}
        media: dict[str, list[Tensor]] = {}
        for place, example in enumerate(examples):
            try:
                row, real = self.encode(example, None if origins is None else origins[place].folder)
            except BadRow as error:
                name = _number(example, place) if origins is None else origins[place].name()
                raise ValueError(f"{name}: {error}") from error
            batch["input_ids"].append(_pad(row.input_ids, length, self.pad_token_id))
            batch["loss_mask"].append(_pad(row.loss_mask, length))
            batch["attention_mask"].append((torch.arange(length) < real).long())
            for name, values in row.per_token.items():
                batch.setdefault(name, []).append(_pad(values, length))
            for name, values in row.media.items():
                media.setdefault(name, []).append(values)
        numbers = [torch.as_tensor(example["row_id"]) for example in examples if "row_id" in example]
        tensors = {name: torch.stack(values) for name, values in batch.items()}
        tensors |= {"row_id": torch.stack(numbers)} if numbers else {}
        return tensors | {name: torch.cat(values) for name, values in media.items()}


def _number(example: object, place: int) -> str:
    """How errors call a row that came without its origin: by its number, or by its place in the batch."""
    return f"row {example.get('row_id', place) if isinstance(example, Mapping) else place}"


def _pad(values: Tensor, length: int, fill: int = 0) -> Tensor:
    return F.pad(values, (0, length - len(values)), value=fill)
