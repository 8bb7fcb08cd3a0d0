"""The datamodule for chat data in text."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from dspark_lightning.datamodules.arguments import check_numbers, check_stream, check_supervision, check_validation
from dspark_lightning.datamodules.collate import collate_rows
from dspark_lightning.datamodules.encode import RowEncoder
from dspark_lightning.datamodules.loss_mask import ChatRenderer, read_template
from dspark_lightning.datamodules.packing import PackedRows, refuse_unpackable_target
from dspark_lightning.datamodules.preview import preview
from dspark_lightning.datamodules.rowset import RowSet
from dspark_lightning.datamodules.sampler import ResumableSampler, RowLoader
from dspark_lightning.datamodules.settings import Settings, resolve_settings
from dspark_lightning.datamodules.source import Source, load_source, open_stream
from dspark_lightning.datamodules.stream import Filter, StreamReader
from dspark_lightning.datamodules.stream_loader import StreamLoader, new_stream_loader
from dspark_lightning.datamodules.tokenizer import load_tokenizer, padding_token_id
from dspark_lightning.delivery import all_or_none
from dspark_lightning.embedded import embedded_data

_FIRST_ROW = "The first row, its supervised part between ⟦ and ⟧:"


class ChatDataModule(LightningDataModule):
    """Chat rows, rendered by the target's chat template, with the assistant's tokens supervised.

    Batches are dicts of int64 tensors: `input_ids`, `attention_mask`, `loss_mask` [B, S], padded on the right, and
    `row_id` [B], the index of the row in its source (the same number may stand for a training row and a validation
    row); where any row has a `weight` other than 1, also of `loss_weights` [B, S], float32. Training order is a
    permutation drawn from (seed, epoch), without the last incomplete global batch; validation takes every row,
    unshuffled. A checkpoint in the middle of an epoch resumes with the next row not trained (a module of your own calls
    `dspark_lightning.datamodules.resume.settle_progress` in `on_load_checkpoint`). `test` runs on the validation rows.

    With `packing`, training rows are packs of documents, and batches also hold, in int64, `position_ids` [B, S], which
    restart in each document (and in the padding), `doc_remaining` [B, S], how many tokens of its document follow each
    token, `seq_lens` [B, M], the documents' lengths, filled up with 0, and `doc_row_ids` [B, M], their rows, filled up
    with -1; `row_id` is that of the first document. With the same anchors this changes no loss and no gradient.
    Validation rows are never packed, so that packed and unpacked runs can be compared.

    A stream (`stream_rows`) has no end: after a pass it starts over, in another order and with other anchors, and the
    rows that do not fill a batch go into the next block. An epoch is the whole run of `trainer.max_steps` steps, which
    must be set. A checkpoint resumes with the next batch not trained, on as many ranks and with the same settings
    and files; more rows may have been appended to the last file.

    Attached to a trainer, what is left out here comes from the hyper-parameters of the module: `tokenizer` and
    `gguf_file` from its target, `mask_token_id`, `min_supervised_tokens` from block_size, `seed`.

    Args:
        train_data: Path or glob of .jsonl, .json or .parquet files, "embedded" (rows that ship with the package), a
            hub id, `org/name` or `org/name:config`, or the import path of a function that returns a sequence of rows,
            `package.module:function`. Row formats: see `dspark_lightning.datamodules.rows`.
        val_data: Validation rows, likewise ("embedded": the held-out ones). Training rows identical to one of them are
            left out. Default: train_data if val_split is given, else none.
        train_split: Split of train_data, with an optional slice: "train[:370]". Files have the one split "train".
        val_split: Split of val_data. Default: "train".
        val_fraction: Instead of val_data or val_split, the share of train_data held out; a hash of each row decides.
        tokenizer: Folder or hub id of the target, or "embedded".
        gguf_file: Name of the GGUF file in it that holds the tokenizer, if one does.
        mask_token_id: The draft's mask token. Data that contains it is refused.
        max_length: Only so many first tokens of a row are kept.
        batch_size: Rows of a batch on one rank, in training and validation.
        num_workers: Processes that read and pad rows; 0 does it in the main process. A stream has one at most.
        supervise: "all" assistant turns, or the "last" one only, then without other roles.
        supervise_roles: Roles whose turns are supervised: the assistant, and if wanted system, developer, user, tool.
            Of the assistant's turns these are all that it wrote, with its tool calls and the end of turn; of the
            others the content alone.
        supervise_reasoning: False leaves `<think>...</think>` unsupervised.
        min_supervised_tokens: Rows with fewer supervised tokens (after cutting to max_length) are left out. Default:
            twice the block_size of the module; without a module 2, the least that has an anchor.
        chat_template: Path of a Jinja file used instead of the tokenizer's own template.
        chat_template_kwargs: Options of the template, such as `enable_thinking: false`; give the same ones when
            serving.
        max_bad_rows: So many rows of a source that cannot be used are skipped, counted by what is wrong with them, and
            the first of each kind is named; one more is an error. In a stream each rank counts its own, in each pass.
        seed: Seed of the training order. Default: the module's; without a module 0.
        packing: Whether training rows are packed to max_length: the longest first, each into the first pack in which it
            fits. `batch_size` then counts packs in training, and the module's `num_anchors` is shared by all documents
            of a pack: raise it with the number of documents in one. Only for targets whose layers keep documents apart;
            see `dspark_lightning.target.check_packing`.
        stream_rows: None encodes all training rows before training. A number reads them as a stream, so many at a time
            on each rank, neither kept in a cache nor held together. Such a block is packed by itself and put in an
            order drawn from (seed, pass, block); blocks follow one another as they stand in the data. For JSON Lines,
            parquet and data sets of the hub.

    Raises:
        ValueError: An argument out of range; when set up, data or templates that cannot be used, in one line.
    """

    _settings: Settings  # these two are there once rows are loaded
    _encoder: RowEncoder

    def __init__(
        self,
        train_data: str,
        val_data: str | None = None,
        train_split: str = "train",
        val_split: str | None = None,
        val_fraction: float = 0.0,
        tokenizer: str | None = None,
        gguf_file: str | None = None,
        mask_token_id: int | None = None,
        max_length: int = 4096,
        batch_size: int = 1,
        num_workers: int = 0,
        supervise: Literal["all", "last"] = "all",
        supervise_roles: Sequence[str] = ("assistant",),
        supervise_reasoning: bool = True,
        min_supervised_tokens: int | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        max_bad_rows: int = 0,
        seed: int | None = None,
        packing: bool = False,
        stream_rows: int | None = None,
    ) -> None:
        super().__init__()
        check_numbers(
            max_length=(max_length, 2),
            batch_size=(batch_size, 1),
            num_workers=(num_workers, 0),
            min_supervised_tokens=(min_supervised_tokens, 2),
            max_bad_rows=(max_bad_rows, 0),
            stream_rows=(stream_rows, 1),
        )
        check_supervision(supervise, supervise_roles)
        check_validation(val_data, val_split, val_fraction)
        if stream_rows is not None:
            check_stream(stream_rows, num_workers, val_fraction, train_split)
        self.train_data, self.train_split = train_data, train_split
        self.val_data = train_data if val_data is None and val_split is not None else val_data
        self.val_split, self.val_fraction = val_split or "train", val_fraction
        self._embedded_val: Literal["train", "heldout"] = "train" if val_data is None else "heldout"
        self.tokenizer, self.gguf_file, self.mask_token_id = tokenizer, gguf_file, mask_token_id
        self.max_length, self.batch_size, self.num_workers = max_length, batch_size, num_workers
        self.packing, self.stream_rows = packing, stream_rows
        self.supervise, self.supervise_roles, self.supervise_reasoning = supervise, supervise_roles, supervise_reasoning
        self.min_supervised_tokens, self.max_bad_rows, self.seed = min_supervised_tokens, max_bad_rows, seed
        self.chat_template, self.chat_template_kwargs = chat_template, chat_template_kwargs
        self._rows: dict[str, RowSet] = {}
        self._packs: PackedRows | None = None
        self._stream: StreamLoader | None = None
        self._sampler: ResumableSampler | None = None

    @property
    def renderer(self) -> ChatRenderer:
        """Renders conversations as they are trained. Needs `setup`."""
        return self._encoder.renderer

    @property
    def row_sets(self) -> Mapping[str, RowSet]:
        """The rows that are loaded, by split: "val" and "train"."""
        return self._rows

    def prepare_data(self) -> None:
        """Encode the rows on one process of each node, so that the others find them in the cache."""
        function = self.trainer.state.fn if self.trainer else None
        self.load(function.value if function else "fit")

    def setup(self, stage: str) -> None:
        """Load the rows of a stage: "fit", "validate" or "test"."""
        self.load(stage)
        if stage == "fit" and self.stream_rows is not None:
            self._stream = self._open_stream(self.stream_rows)
        elif stage == "fit":
            progress = partial(_progress, self.trainer) if self.trainer else None
            self._sampler = self._new_sampler(self._packs or self._rows["train"], shuffle=True, progress=progress)

    def train_dataloader(self) -> RowLoader | StreamLoader:
        """Batches of training rows."""
        if self._stream is not None:
            return self._stream
        if self._sampler is None:
            raise RuntimeError('call setup("fit") before train_dataloader()')
        return self._new_loader(self._packs or self._rows["train"], self._sampler)

    def val_dataloader(self) -> RowLoader | list[RowLoader]:
        """Batches of validation rows; an empty list when there are none."""
        if "val" not in self._rows:
            return []
        return self._new_loader(self._rows["val"], self._new_sampler(self._rows["val"], shuffle=False))

    def test_dataloader(self) -> RowLoader | list[RowLoader]:
        """The batches of `val_dataloader`."""
        return self.val_dataloader()

    def state_dict(self) -> dict[str, Any]:
        """Epoch and batches trained, or the place in the stream, and what the order depends on."""
        if self._stream is not None and self.trainer is not None:
            return self._stream.position(self.trainer.fit_loop.max_batches)
        if self._sampler is None or self.trainer is None:
            return {}
        return self._sampler.state_dict(self.trainer.fit_loop.max_batches, self.trainer.accumulate_grad_batches)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the batches trained. Called after `setup`; without training rows there is nothing to do.

        Raises:
            ValueError: The order would be another one, and rows would be lost or repeated.
        """
        if self._stream is None and self._sampler is None:
            return
        then = state_dict.get("stream_rows")
        if then != self.stream_rows:
            raise ValueError(
                f"the checkpoint was written with stream_rows {then}, this run has {self.stream_rows}: rows would be "
                f"lost or repeated, so resume with {then}"
            )
        if self._stream is not None:
            self._stream.go_on(state_dict)
        elif self._sampler is not None:
            self._sampler.load_state_dict(state_dict)

    def preview(self, index: int = 0) -> str:
        """Text of a row, its supervised part between ⟦ and ⟧. Needs `setup`.

        Args:
            index: Which of the training rows kept, or of the validation rows when only these were loaded.
        """
        rows = self._rows.get("train") or self._rows["val"]
        row = rows.encoded(index)
        return preview(self._encoder.renderer.tokenizer, row["input_ids"], row["loss_mask"])

    def load(self, stage: str) -> None:
        """Read and encode the rows of a stage, unless that is done."""
        module = self.trainer.lightning_module if self.trainer else None
        hparams = getattr(module, "hparams", {})
        if self.packing and stage == "fit":
            refuse_unpackable_target(hparams)
        settings = self._resolve(hparams)
        if settings != getattr(self, "_settings", None):
            self._settings, self._encoder, self._rows = settings, self._new_encoder(settings), {}
        loaded = len(self._rows)
        if self.val_data is not None and "val" not in self._rows:
            self._keep("val", self._read("val_data", self.val_data, self.val_split, self._embedded_val))
        is_stream = self.stream_rows is not None
        if (stage == "fit" or self.val_fraction) and "train" not in self._rows and not is_stream:
            train = self._read("train_data", self.train_data, self.train_split, "train")
            if "val" in self._rows:
                train = train.without_rows_of(self._rows["val"])
            elif self.val_fraction:
                train, held_out = train.split(self.val_fraction)
                self._keep("val", held_out)
            self._keep("train", train)
        if stage != "fit" and "val" not in self._rows:
            raise ValueError(f"no rows to {stage} on: set val_data, val_split or val_fraction")
        if len(self._rows) > loaded and not (is_stream and stage == "fit"):
            rank_zero_info(f"{_FIRST_ROW}\n{self.preview()}")

    def _open_stream(self, stream_rows: int) -> StreamLoader:
        """The stream's loader."""
        if self.trainer and self.trainer.max_steps == -1:
            raise ValueError(f"stream_rows {stream_rows} reads rows without end: set trainer.max_steps")
        reader, first = self.read_first_block(stream_rows)
        return new_stream_loader(reader, first, self.num_workers, self.trainer)

    def read_first_block(self, stream_rows: int) -> tuple[StreamReader, RowSet]:
        """Open the stream and tell what its first block holds, which then stands in `row_sets`. Needs `load`."""
        replicas = self._replicas()
        reader = StreamReader(
            open_stream("train_data", self.train_data, self.train_split, self._embedded_data("train")),
            Filter(self._encoder, self._settings.min_supervised_tokens, self._rows.get("val")),
            self.collate_for(),
            stream_rows,
            self.batch_size,
            self._settings.seed,
            self.max_length if self.packing else None,
            ranks=replicas.get("num_replicas", 1),
            rank=replicas.get("rank", 0),
        )
        first = all_or_none(reader.first_rows)
        self._show_first(first)
        return reader, first

    def _show_first(self, rows: RowSet) -> None:
        """Tell what the first block of a stream holds."""
        self._tell_losses(rows)
        packs = [PackedRows.of(rows, self.max_length).summary()] if self.packing else []
        for line in (rows.summary(), *packs):
            rank_zero_info(f"The first block of {line}")
        if len(rows):
            self._rows["train"] = rows
            rank_zero_info(f"{_FIRST_ROW}\n{self.preview()}")

    def _read(self, argument: str, data: str, split: str, embedded_split: Literal["train", "heldout"]) -> RowSet:
        source = load_source(argument, data, split, self._embedded_data(embedded_split))
        rows = self._new_rows(f"{argument} {source.name}", source).usable(self._settings.min_supervised_tokens)
        self._tell_losses(rows)
        return rows

    def _tell_losses(self, rows: RowSet) -> None:
        for loss, bad in rows.losses():
            (rank_zero_warn if bad else rank_zero_info)(f"Left out of {rows.name}: {loss}")

    def _embedded_data(self, split: Literal["train", "heldout"]) -> Path:
        return embedded_data(split)

    def _new_rows(self, name: str, source: Source) -> RowSet:
        table = self._encoder.encode(source)
        return RowSet(name, table, np.arange(len(table)), source.place)

    def _keep(self, side: str, rows: RowSet) -> None:
        rank_zero_info(rows.summary())
        if not len(rows):
            raise ValueError(f"no row is left of {rows.summary()}")
        self._rows[side] = rows
        if side == "train" and self.packing:
            self._packs = PackedRows.of(rows, self.max_length)
            rank_zero_info(self._packs.summary())

    def _resolve(self, hparams: Mapping[str, Any]) -> Settings:
        return resolve_settings(
            hparams,
            tokenizer=self.tokenizer,
            gguf_file=self.gguf_file,
            mask_token_id=self.mask_token_id,
            min_supervised_tokens=self.min_supervised_tokens,
            seed=self.seed,
        )

    def _new_encoder(self, settings: Settings) -> RowEncoder:
        tokenizer = load_tokenizer(settings.tokenizer, settings.gguf_file, settings.trust_remote_code)
        renderer = ChatRenderer(tokenizer, **self._renderer_options())
        return RowEncoder(renderer, self.max_length, settings.mask_token_id, self.max_bad_rows)

    def _renderer_options(self) -> dict[str, Any]:
        template = None
        if self.chat_template is not None:
            template = read_template(self.chat_template)
        return {
            "chat_template": template,
            "template_name": self.chat_template,
            "template_kwargs": self.chat_template_kwargs,
            "supervise": self.supervise,
            "supervise_roles": self.supervise_roles,
            "supervise_reasoning": self.supervise_reasoning,
        }

    def _new_sampler(
        self, rows: RowSet | PackedRows, *, shuffle: bool, progress: Callable[[], tuple[int, int]] | None = None
    ) -> ResumableSampler:
        seed, replicas = self._settings.seed, self._replicas()
        return ResumableSampler(rows, self.batch_size, shuffle=shuffle, seed=seed, progress=progress, **replicas)

    def _replicas(self) -> dict[str, int]:
        """Number of ranks and this one, by the names that samplers take; empty for a single one."""
        replicas: dict[str, int] = (self.trainer and self.trainer.distributed_sampler_kwargs) or {}
        return replicas

    def _new_loader(self, rows: RowSet | PackedRows, sampler: ResumableSampler) -> RowLoader:
        return RowLoader(
            rows,
            batch_size=self.batch_size,
            sampler=sampler,
            collate_fn=self.collate_for("val" if rows is self._rows.get("val") else "train"),
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )

    def collate_for(self, split: str = "train") -> Callable[[Any], dict[str, torch.Tensor]]:
        """What makes batches of the rows of a split. Needs `setup`."""
        del split
        pad_token_id = padding_token_id(self._encoder.renderer.tokenizer)
        return partial(collate_rows, pad_token_id=pad_token_id, max_length=self.max_length)


def _progress(trainer: Trainer) -> tuple[int, int]:
    """The epoch, and the batches trained since the run began, over all its resumes."""
    return trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_progress.total.processed  # type: ignore[attr-defined]
