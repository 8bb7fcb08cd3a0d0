"""The datamodule for chat data with pictures."""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dspark_lightning.datamodules import images, vision_tokens, vlm_collate, vlm_encode, vlm_rows
from dspark_lightning.datamodules.chat import ChatDataModule
from dspark_lightning.datamodules.encode import EncodedRow, RowEncoder
from dspark_lightning.datamodules.processor import load_processor
from dspark_lightning.datamodules.rows import BadRow, row_weight
from dspark_lightning.datamodules.rowset import RowSet
from dspark_lightning.datamodules.sampler import FILLER
from dspark_lightning.datamodules.settings import Settings
from dspark_lightning.datamodules.source import Source
from dspark_lightning.datamodules.vlm_collate import Origin, VlmCollator, vlm_renderer
from dspark_lightning.datamodules.vlm_encode import VlmEncoder
from dspark_lightning.embedded import embedded_pictures_data
from dspark_lightning.loading import target_source


class VLMDataModule(ChatDataModule):
    """`ChatDataModule` for rows with pictures, for vision-language targets.

    When set up, every row is encoded once, pictures included, and the result is cached: so unreadable pictures, rows
    without enough supervised tokens and pictures that do not fit are known, and counted, before training begins.
    Batches are made by `dspark_vlm_collate_fn`, of max_length tokens always.

    Args:
        *args: Those of `ChatDataModule`, without `packing` and `stream_rows`.
        inject_fake_image: Whether a row without pictures gets a small white one behind its last token, hidden from all
            other positions, so that every rank runs the vision tower in every step.
        **kwargs: Those of `ChatDataModule`. Data sets with image columns are read too, and relative paths of pictures
            start at the folder of the file that names them; `tokenizer` is the folder or hub id of the processor.
            "embedded" stands for the picture task that ships with the package.

    Raises:
        ValueError: As `ChatDataModule`.
    """

    def __init__(self, *args: Any, inject_fake_image: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.packing:
            raise ValueError("packing is true, but pictures cannot be packed: leave it out for a VLMDataModule")
        if self.stream_rows is not None:
            raise ValueError(
                f"stream_rows is {self.stream_rows}, but rows with pictures cannot be streamed: leave it out"
            )
        self.inject_fake_image = inject_fake_image

    def _new_encoder(self, settings: Settings) -> RowEncoder:
        processor = load_processor(target_source(settings.tokenizer), settings.trust_remote_code)
        renderer = vlm_renderer(processor, **self._renderer_options())
        return VlmRowEncoder(
            renderer,
            self.max_length,
            settings.mask_token_id,
            self.max_bad_rows,
            collator=VlmCollator(VlmEncoder(processor, self.max_length, renderer), self.inject_fake_image),
        )

    def _embedded_data(self, split: Literal["train", "heldout"]) -> Path:
        return embedded_pictures_data(split)

    def _new_rows(self, name: str, source: Source) -> RowSet:
        table = self._encoder.encode(source)
        return VlmRowSet(name, table, np.arange(len(table)), source.place, source=source)

    def collate_for(self, split: str = "train") -> Callable[[Any], dict[str, Tensor]]:
        """What makes batches of the rows of a split. Needs `setup`."""
        del split
        return partial(_collate, collator=cast(VlmRowEncoder, self._encoder).collator)


@dataclass(frozen=True, kw_only=True)
class VlmRowEncoder(RowEncoder):
    """`RowEncoder` for rows with pictures: what the collator makes of each, without its hidden white picture."""

    collator: VlmCollator

    def _state(self) -> list[Any]:
        processor = self.collator.encoder.processor
        code = [inspect.getsource(module) for module in (images, vision_tokens, vlm_collate, vlm_encode, vlm_rows)]
        return [*super()._state(), code, repr(processor), self.collator.inject_fake_image]

    def _fingerprint(self, source: Source) -> str:
        """Also of the picture files that the rows name: another picture may have another number of tokens."""
        digest = hashlib.blake2b(super()._fingerprint(source).encode(), digest_size=16)
        # Columns of pictures hold these themselves; they belong to the fingerprint of the table, and are not read here.
        names = [name for name, feature in source.table.features.items() if "Image(" not in repr(feature)]
        table = source.table.select_columns(names)
        for start in range(0, 0 if source.rows is not None else len(table), 1000):
            batch = table[start : start + 1000]
            for i, row_id in enumerate(source.row_ids[start : start + 1000].tolist()):
                for path in picture_files(source, batch, i, row_id):
                    stat = path.stat()
                    digest.update(f"{path}:{stat.st_size}:{stat.st_mtime_ns}".encode())
        return digest.hexdigest()

    def _encode_records(self, records: dict[int, object], source: Source) -> dict[int, EncodedRow | BadRow]:
        results: dict[int, EncodedRow | BadRow] = {}
        for row_id, record in records.items():
            try:
                row, real = self.collator.encode(record, source.folder_of(row_id))
                ids, mask = (values[:real].numpy() for values in (row.input_ids, row.loss_mask))
                pictures = hashlib.blake2b(b"".join(x.numpy().tobytes() for x in row.media.values())).digest()
                weight = row_weight(cast(Mapping[str, Any], record))
                results[row_id] = EncodedRow(ids.astype(np.int32), mask.astype(np.uint8), row.cut, pictures, weight)
            except BadRow as error:
                results[row_id] = error
            except ValueError as error:
                raise ValueError(f"{source.place(row_id)}: {error}") from error
        return results


@dataclass(frozen=True, eq=False, kw_only=True)
class VlmRowSet(RowSet):
    """Kept rows; item i is a dict of the row's `record`, its `origin` and whether it is a `filler`.

    Where any kept row has a weight other than 1, every item also has its `weight`.
    """

    source: Source

    @cached_property
    def places(self) -> npt.NDArray[np.int64]:
        """Where in the table of the source each kept row stands."""
        order = np.argsort(self.source.row_ids)
        found: npt.NDArray[np.int64] = order[np.searchsorted(self.source.row_ids[order], self.column("row_id"))]
        return found

    def __getitem__(self, index: int) -> dict[str, Any]:
        place = int(self.places[max(index, 0)])
        row_id = int(self.source.row_ids[place])
        record = cast(Mapping[str, Any], self.source.record(self.source.table[place : place + 1], 0))
        origin = Origin(self.source.folder_of(row_id), partial(self.source.place, row_id))
        item = {"record": {**record, "row_id": row_id}, "origin": origin, "filler": index == FILLER}
        return item | ({"weight": float(self.column("weight")[max(index, 0)])} if self.weighted else {})


def picture_files(source: Source, batch: dict[str, list[Any]], i: int, row_id: int) -> list[Path]:
    """The picture files that row i of a batch names, as far as they exist."""
    try:
        record = source.record(batch, i)
    except BadRow:
        return []
    texts = [text for text in vlm_rows.sources(record) if isinstance(text, str) and len(text) < 4096]
    paths = (images.image_path(text, source.folder_of(row_id)) for text in texts)
    return [path for path in paths if path is not None]


def _collate(items: Sequence[Mapping[str, Any]], collator: VlmCollator) -> dict[str, Tensor]:
    batch = collator([item["record"] for item in items], [item["origin"] for item in items])
    batch["loss_mask"][torch.tensor([item["filler"] for item in items])] = 0
    if "weight" in items[0]:
        weights = torch.tensor([item["weight"] for item in items]).unsqueeze(1)
        batch["loss_weights"] = weights * batch["attention_mask"]
    return batch
