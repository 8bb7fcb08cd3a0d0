"""From a conversation with pictures to token ids, loss mask and the tensors of its pictures.

The processor of the target writes the ids, with as many placeholders as a picture has features. The loss mask comes
from the rendered text, as for text rows: between the placeholders both have the same tokens, in the same order.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import ProcessorMixin

from dspark_lightning.datamodules.loss_mask import ChatRenderer
from dspark_lightning.datamodules.processor import has_video_processor
from dspark_lightning.datamodules.rows import BadRow
from dspark_lightning.datamodules.vision_tokens import placeholder_spans, vision_token_ids
from dspark_lightning.datamodules.vlm_rows import VlmChat

_WHITE = Image.new("RGB", (56, 56), "white")


@dataclass(frozen=True)
class VlmRow:
    """One encoded row of S tokens."""

    input_ids: Tensor  # int64 [S]
    loss_mask: Tensor  # int64 [S]
    per_token: dict[str, Tensor]  # what else the processor says of each token, [S]
    media: dict[str, Tensor]  # pixels, grids, ... of the row's pictures, stacked along the first axis
    cut: bool = False  # was longer than max_length


class VlmEncoder:
    """Encodes rows for one target.

    Args:
        processor: The target's.
        max_length: Only so many first tokens of a row are kept; a picture that does not fit whole is left out, with all
            that follows.
        renderer: Renders conversations and marks what is supervised; its tokenizer is the processor's.
    """

    def __init__(self, processor: ProcessorMixin, max_length: int, renderer: ChatRenderer) -> None:
        self.processor, self.max_length, self.renderer = processor, max_length, renderer
        self._vision_ids = sorted(vision_token_ids(processor))
        parts = (getattr(processor, name, None) for name in ("image_processor", "video_processor", "feature_extractor"))
        self._media_names = {name for part in parts for name in getattr(part, "model_input_names", ())}

    def encode(self, row: VlmChat) -> VlmRow:
        """Encode one row.

        Raises:
            BadRow: The processor or the template refuses it, or a video does not fit.
            ValueError: No loss mask can be had from this template, or the processor changes text around pictures.
        """
        if row.videos and not has_video_processor(self.processor):
            raise BadRow("the row has a video, and reading videos needs torchvision: pip install torchvision")
        text, spans = self.renderer.render(row.chat)
        ((plain_ids, plain_mask),) = self.renderer.encode([(text, spans)])
        encoded = self._process(text, row.images, row.videos)
        is_text = ~torch.isin(encoded.input_ids, torch.tensor(self._vision_ids))
        plain_text = ~np.isin(plain_ids, self._vision_ids)
        if not np.array_equal(encoded.input_ids[is_text].numpy(), plain_ids[plain_text]):
            raise ValueError(
                f"no loss mask: {type(self.processor).__name__} changes the text of the chat template around pictures"
            )
        encoded.loss_mask[is_text] = torch.from_numpy(plain_mask[plain_text].astype(np.int64))
        return self.fit(encoded, row, self.max_length)

    def fit(self, encoded: VlmRow, row: VlmChat, length: int) -> VlmRow:
        """Cut a row to `length` tokens, in front of the placeholders of the first picture that does not fit whole.

        Raises:
            BadRow: A video would be cut.
        """
        if len(encoded.input_ids) <= length:
            return encoded
        spans = placeholder_spans(encoded.input_ids, self.processor)
        length = min((start for start, end in spans if start < length < end), default=length)
        kept = sum(end <= length for _, end in spans)
        media = encoded.media
        if kept < len(spans):
            if row.videos or len(spans) != len(row.images):  # which tensors belong to which span is not known then
                raise BadRow(f"its videos or pictures do not fit into max_length {self.max_length} whole")
            media = self._process(self.placeholder * kept, row.images[:kept], []).media if kept else {}
        return VlmRow(
            encoded.input_ids[:length],
            encoded.loss_mask[:length],
            {name: values[:length] for name, values in encoded.per_token.items()},
            media,
            cut=True,
        )

    @cached_property
    def placeholder(self) -> str:
        """What the chat template writes for a picture."""
        chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]
        try:
            text = self.renderer.render_turns(chat)
        except BadRow as error:
            raise ValueError(f"no text can be had for a white picture: {error}") from error
        encoding = self.renderer.encode_text(text)
        places = [span for i, span in encoding if i in set(self._vision_ids)]
        if not places:
            raise ValueError(f"{self.renderer.template_name} writes nothing for a part of type 'image'")
        return text[places[0][0] : places[-1][1]]

    @cached_property
    def white_image(self) -> VlmRow:
        """A small white picture: the tokens that stand for it, unsupervised, and its tensors."""
        return self._process(self.placeholder, [_WHITE], [])

    def _process(self, text: str, images: list[Image.Image], videos: list[Any]) -> VlmRow:
        """The row as the processor writes it, nothing supervised."""
        media: dict[str, Any] = {"images": [images]} if images else {}
        media |= {"videos": [videos]} if videos else {}
        try:
            # The template has written the special tokens already.
            features: dict[str, Tensor] = dict(
                self.processor(text=[text], add_special_tokens=False, return_tensors="pt", **media)
            )
        except Exception as error:  # whatever a processor raises over a picture, or over placeholders in a text
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise BadRow(f"{type(self.processor).__name__} refuses the row: {reason}") from error
        ids, _ = features.pop("input_ids"), features.pop("attention_mask")
        per_token = {
            name: values[0]
            for name, values in features.items()
            if values.shape == ids.shape and name not in self._media_names  # a grid of one picture can be [1, 3] too
        }
        rest = {name: values for name, values in features.items() if name not in per_token}
        return VlmRow(ids[0], torch.zeros_like(ids[0]), per_token, rest)


def with_white_image(row: VlmRow, encoder: VlmEncoder, chat: VlmChat) -> tuple[VlmRow, int]:
    """Append a white picture behind a row without any, so that a batch always runs the vision tower.

    The row's text is cut first where both do not fit. Behind the last token nothing sees the picture.

    Args:
        row: Encoded, without media.
        encoder: It comes from.
        chat: It comes from.

    Returns:
        the row, and how many of its tokens are real.

    Raises:
        ValueError: max_length leaves no room for text.
    """
    white = encoder.white_image
    room = encoder.max_length - len(white.input_ids)
    if room < 2:
        raise ValueError(
            f"max_length {encoder.max_length} has no room for text beside a white picture of {len(white.input_ids)} "
            f"tokens: must be at least {len(white.input_ids) + 2}"
        )
    row = encoder.fit(row, chat, room)
    real = len(row.input_ids)
    nothing = torch.zeros(real, dtype=torch.int64)
    joined = replace(
        row,
        input_ids=torch.cat([row.input_ids, white.input_ids]),
        loss_mask=torch.cat([row.loss_mask, white.loss_mask]),
        per_token={
            name: torch.cat([row.per_token.get(name, nothing), values]) for name, values in white.per_token.items()
        },
        media=white.media,
    )
    return joined, real
