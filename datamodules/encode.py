"""From a source to a table of token ids and loss masks, kept in the cache of `datasets`."""

import hashlib
import inspect
import json
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import transformers
from datasets import Dataset, Features, Sequence, Value

from dspark_lightning.datamodules import loss_mask, rows
from dspark_lightning.datamodules.loss_mask import ChatRenderer, Encoded, Span
from dspark_lightning.datamodules.rows import BadRow, TokenRow, id_digest, parse_row
from dspark_lightning.datamodules.source import Source, reason

FEATURES = Features(
    {
        "row_id": Value("int64"),  # index in the unsliced source
        "input_ids": Sequence(Value("int32")),
        "loss_mask": Sequence(Value("uint8")),
        "supervised": Value("int32"),  # tokens with loss_mask on
        "cut": Value("bool"),  # was longer than max_length
        "weight": Value("float32"),  # of its tokens in the loss
        "digest": Value("int64"),  # of input_ids and pictures: equal rows have equal digests
        "id_digest": Value("int64"),  # of the id that the row came with; 0 without one
        "fault": Value("string"),  # why the row cannot be used, in a few words; "" for a good one
        "error": Value("string"),  # the place of a bad row and what is wrong; "" for good rows and for blank lines
    }
)


class EncodedRow(NamedTuple):
    """A row as it is trained."""

    input_ids: npt.NDArray[np.int32]  # [tokens]
    loss_mask: npt.NDArray[np.uint8]  # [tokens]
    cut: bool = False  # was longer than max_length
    media: bytes = b""  # tells rows apart whose tokens are the same: a hash of their pictures
    weight: float = 1.0  # of its tokens in the loss


_EMPTY = EncodedRow(np.empty(0, np.int32), np.empty(0, np.uint8))
_BLANK = BadRow("a blank line", "blank lines")  # stands in the table, but is nobody's fault


@dataclass(frozen=True)
class RowEncoder:
    """Turns the rows of a source into a table with `FEATURES`.

    Attributes:
        renderer: Renders and tokenises conversations.
        max_length: Only so many first tokens of a row are kept.
        mask_token_id: The draft's mask token: no row may contain it.
        max_bad_rows: So many rows may be malformed.
    """

    renderer: ChatRenderer
    max_length: int
    mask_token_id: int
    max_bad_rows: int = 0

    def encode(self, source: Source) -> Dataset:
        """The table of a source, from the cache when source, tokenizer, template, settings and this code are the same.

        Raises:
            ValueError: More than `max_bad_rows` malformed rows, a row with the mask token, or an unusable template;
                the row is named. The cache cannot be written.
        """
        bad = Counter[str]()

        def encode_batch(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
            return self._encode_batch(source, batch, source.row_ids[indices].tolist(), bad)

        try:
            return source.table.map(
                encode_batch,
                batched=True,
                with_indices=True,
                remove_columns=source.table.column_names,
                features=FEATURES,
                new_fingerprint=self._fingerprint(source),
                desc=f"Tokenising {source.name}",
            )
        except OSError as error:
            raise ValueError(f"{source.name}: {reason(error)}") from error

    def encode_once(self, source: Source, bad: Counter[str]) -> Dataset:
        """The table of a source that is read once: in memory, without the cache.

        Args:
            source: The rows.
            bad: How many bad rows were found before it, by kind, which count as well; its own are added.

        Raises:
            ValueError: As `encode`.
        """
        columns = self._encode_batch(source, source.table[:], source.row_ids.tolist(), bad)
        return Dataset.from_dict(columns, features=FEATURES)

    def _fingerprint(self, source: Source) -> str:
        # Not the one that `datasets` would take, which does not always tell one tokenizer from another.
        origin = [source.fingerprint, source.is_json, hashlib.blake2b(source.row_ids.tobytes()).hexdigest()]
        settings = [self.max_length, self.mask_token_id, self.max_bad_rows, transformers.__version__]
        state = json.dumps([origin, settings, self._state()], sort_keys=True, default=str)
        return hashlib.blake2b(state.encode(), digest_size=16).hexdigest()

    def _state(self) -> list[Any]:
        """What the encoding of a record depends on, its code included."""
        code = [inspect.getsource(module) for module in (loss_mask, rows, sys.modules[__name__])]
        return [code, self.renderer.state()]

    def _encode_batch(
        self, source: Source, batch: dict[str, list[Any]], row_ids: list[int], bad: Counter[str]
    ) -> dict[str, list[Any]]:
        records: dict[int, object] = {}
        results: dict[int, EncodedRow | BadRow] = {}
        for i, row_id in enumerate(row_ids):
            try:
                if (record := source.record(batch, i)) is None:
                    results[row_id] = _BLANK
                else:
                    records[row_id] = record
            except BadRow as error:
                results[row_id] = error
        results |= self._encode_records(records, source)
        table_rows = [
            self._table_row(source, row_id, results[row_id], bad) | {"id_digest": id_digest(records.get(row_id))}
            for row_id in row_ids
        ]
        return {name: [row[name] for row in table_rows] for name in FEATURES}

    def _encode_records(self, records: dict[int, object], source: Source) -> dict[int, EncodedRow | BadRow]:
        """Encode records, by row id; all at once, which is faster."""
        results: dict[int, EncodedRow | BadRow] = {}
        chats: dict[int, tuple[str, list[Span]]] = {}
        weights: dict[int, float] = {}
        for row_id, record in records.items():
            try:
                row = parse_row(record)
                weights[row_id] = row.weight
                if isinstance(row, TokenRow):
                    results[row_id] = self._cut(self._token_row(row), row.weight)
                else:
                    chats[row_id] = self.renderer.render(row, self.max_length)
            except BadRow as error:
                results[row_id] = error
            except ValueError as error:
                raise ValueError(f"{source.place(row_id)}: {error}") from error
        encoded = self.renderer.encode(list(chats.values()))
        return results | {row_id: self._cut(pair, weights[row_id]) for row_id, pair in zip(chats, encoded, strict=True)}

    def _cut(self, encoded: Encoded, weight: float) -> EncodedRow:
        ids, mask = encoded
        return EncodedRow(ids[: self.max_length], mask[: self.max_length], len(ids) > self.max_length, weight=weight)

    def _table_row(self, source: Source, row_id: int, result: EncodedRow | BadRow, bad: Counter[str]) -> dict[str, Any]:
        fault = error = ""
        if isinstance(result, BadRow):
            fault = result.kind
            if result is not _BLANK:
                error = f"{source.place(row_id)}: {result}"
                bad[fault] += 1
                if bad.total() > self.max_bad_rows:
                    kinds = ", ".join(f"{count} {kind}" for kind, count in bad.items())
                    limit = f"max_bad_rows {self.max_bad_rows}"
                    raise ValueError(f"{error} ({bad.total()} bad rows, {limit}: {kinds})") from result
            result = _EMPTY
        ids, mask, cut, media, weight = result
        content = hashlib.blake2b(ids.tobytes() + media, digest_size=8).digest()
        masked = np.flatnonzero(ids == self.mask_token_id)
        if len(masked):
            token = self.renderer.tokenizer.convert_ids_to_tokens(self.mask_token_id)
            raise ValueError(
                f"{source.place(row_id)}: token {masked[0]} of the row is {token!r}, the mask_token_id "
                f"{self.mask_token_id}: the mask token must be one that the data never holds"
            )
        return {
            "row_id": row_id,
            "input_ids": ids,
            "loss_mask": mask,
            "supervised": int(mask.sum()),
            "cut": cut,
            "weight": weight,
            "digest": int.from_bytes(content, "little", signed=True),
            "fault": fault,
            "error": error,
        }

    def _token_row(self, row: TokenRow) -> Encoded:
        size = len(self.renderer.tokenizer)
        outside = [token for token in row.input_ids if not 0 <= token < size]
        if outside:
            raise BadRow(
                f"input_ids holds {outside[0]}, but the tokenizer has the ids 0 to {size - 1}", "unusable input_ids"
            )
        return np.array(row.input_ids, np.int32), np.array(row.loss_mask, np.uint8)
