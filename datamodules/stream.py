"""Training rows read as a stream, a block at a time, for corpora that are too large to be encoded beforehand.

A block is read, encoded, sorted out and, if asked for, packed like a whole data set; then it is permuted and cut into
batches. What is left over goes into the next block, so no row is lost. Behind the last row the stream starts over.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, Self

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node
from torch import Tensor
from torch.utils.data import IterableDataset as TorchIterableDataset

from dspark_lightning.datamodules.encode import RowEncoder
from dspark_lightning.datamodules.packing import PackedRows
from dspark_lightning.datamodules.rowset import RowSet
from dspark_lightning.datamodules.sampler import mix
from dspark_lightning.datamodules.source import Source, Stream, reason

PASS = 2**40
"""Added to the ids of the rows with each pass, for anchors are drawn from them: each pass trains others."""

Item = dict[str, Tensor]


@dataclass(frozen=True)
class BlockStart:
    """Where a block begins, for one rank.

    Attributes:
        stream: State of the stream before its first row, as `datasets` gives it.
        passes: How often the stream has been read to its end.
        block: Its number in this pass.
        rows: How many rows of this pass came before it.
        bad: How many of them could not be used, by what is wrong with them.
        usable: Whether any of them could be trained.
        carried: What the blocks before left over.
    """

    stream: dict[str, Any]
    passes: int = 0
    block: int = 0
    rows: int = 0
    bad: Mapping[str, int] = field(default_factory=dict)
    usable: bool = False
    carried: tuple[Item, ...] = ()

    def state(self) -> dict[str, Any]:
        """Plain data, for a checkpoint."""
        carried = [{name: values.tolist() for name, values in item.items()} for item in self.carried]
        return asdict(replace(self, carried=())) | {"bad": dict(self.bad), "carried": carried}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Self:
        """What `state` was called on."""
        carried = tuple({name: torch.tensor(values) for name, values in item.items()} for item in state["carried"])
        return cls(**state | {"carried": carried})


@dataclass(frozen=True)
class Filter:
    """Encodes the rows of a block and keeps those that are trained.

    Attributes:
        encoder: Encodes them.
        min_supervised_tokens: Rows with fewer are left out.
        validation: Rows that must not be trained.
    """

    encoder: RowEncoder
    min_supervised_tokens: int
    validation: RowSet | None

    def __call__(self, source: Source, bad: Counter[str]) -> RowSet:
        """The rows of a source; `bad` as in `RowEncoder.encode_once`."""
        table = self.encoder.encode_once(source, bad)
        rows = RowSet(f"train_data {source.name}", table, np.arange(len(table)), source.place)
        rows = rows.usable(self.min_supervised_tokens)
        return rows if self.validation is None else rows.without_rows_of(self.validation)


@dataclass(eq=False)
class StreamReader(TorchIterableDataset[Any]):
    """The batches of one rank without end, from any batch on.

    Iterating gives pairs: of a start and a batch where a block begins (but not of the one begun with), else of None and
    a batch. The last item may be a ValueError instead: raised in a worker, it would come out as a traceback of many
    lines.

    Attributes:
        source: The stream.
        filter: Turns a block into the rows to train.
        collate: Makes a batch of items.
        stream_rows: Rows of a block.
        batch_size: Items of a batch on this rank.
        seed: Of the permutations, which also depend on the pass and the number of the block.
        pack_to: Tokens of a pack; None leaves rows as they are.
        ranks: How many ranks share the stream.
        rank: This one.
        start: The block to begin with; None is the first.
        skip: How many of its batches to leave out.
    """

    source: Stream
    filter: Filter
    collate: Callable[[list[Item]], dict[str, Tensor]]
    stream_rows: int
    batch_size: int
    seed: int
    pack_to: int | None = None
    ranks: int = 1
    rank: int = 0
    start: BlockStart | None = None
    skip: int = 0

    def __post_init__(self) -> None:
        self._share: IterableDataset = split_dataset_by_node(self.source.rows, self.rank, self.ranks)
        self.first = BlockStart(self._share.state_dict())
        # `datasets` gives a rank whole files where they can be shared out evenly, else one row in so many.
        self._has_own_files = self.ranks > 1 and self.source.rows.num_shards % self.ranks == 0

    def first_rows(self) -> RowSet:
        """The rows of the first block, which a run of its own reads again."""
        return self._encode(self.first, self._read(self._open(self.first)), Counter())

    def fingerprint(self, first: RowSet) -> str:
        """Tells streams apart by their files and by what is trained of `first`, the rows of the first block."""
        origin = f"{self.source.is_json} {self.source.rows.num_shards}".encode()
        trained = first.column("row_id").tobytes() + first.column("digest").tobytes()
        return hashlib.blake2b(origin + trained, digest_size=8).hexdigest()

    def __iter__(self) -> Iterator[tuple[BlockStart | None, dict[str, Tensor]] | ValueError]:
        try:
            yield from self._batches(self.start or self.first, self.skip)
        except ValueError as error:
            yield error

    def _batches(self, start: BlockStart, skip: int) -> Iterator[tuple[BlockStart | None, dict[str, Tensor]]]:
        rows, told = self._open(start), True
        while True:
            block, bad = self._read(rows), Counter(start.bad)
            examples = self._encode(start, block, bad)
            pool = _Pool(start.carried, examples if self.pack_to is None else PackedRows.of(examples, self.pack_to))
            order = torch.randperm(len(pool), generator=self._generator(start)).tolist()
            whole = len(order) - len(order) % self.batch_size
            for first in range(skip * self.batch_size, whole, self.batch_size):
                yield None if told else start, self.collate([pool[i] for i in order[first : first + self.batch_size]])
                told = True
            usable, carried = start.usable or len(examples) > 0, tuple(pool[i] for i in order[whole:])
            start = self._behind(start, len(block), bad, usable, carried)
            if start.block == 0:
                rows = self._open(start)
            skip, told = 0, False

    def _behind(
        self, start: BlockStart, count: int, bad: Mapping[str, int], usable: bool, carried: tuple[Item, ...]
    ) -> BlockStart:
        """Where the block behind that of `start` begins, of which `count` rows were read: in this pass or the next."""
        read = start.rows + count
        if count == self.stream_rows:
            state = self._share.state_dict()
            return BlockStart(state, start.passes, start.block + 1, read, bad, usable, carried)
        if not usable:
            raise ValueError(f"{self.source.name}: no usable row in the {read} rows{self._whose}")
        return BlockStart(self.first.stream, start.passes + 1, carried=carried)

    def _open(self, start: BlockStart) -> Iterator[dict[str, Any]]:
        self._share.load_state_dict(start.stream)
        return iter(self._share)

    def _read(self, rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
        try:
            return list(islice(rows, self.stream_rows))
        except Exception as error:  # of a file that is damaged or gone: OSError, pyarrow's and others
            raise ValueError(f"{self.source.name} cannot be read on: {reason(error)}") from error

    def _encode(self, start: BlockStart, block: list[dict[str, Any]], bad: Counter[str]) -> RowSet:
        numbers = start.rows + np.arange(len(block))
        row_ids = numbers * self.ranks + self.rank + start.passes * PASS
        table = Dataset.from_list(block, features=self.source.rows.features) if block else Dataset.from_dict({})
        return self.filter(Source(self.source.name, table, row_ids, self._place, self.source.is_json), bad)

    def _place(self, row_id: int) -> str:
        row = row_id % PASS
        if self._has_own_files:
            return f"{self.source.name}, row {row // self.ranks + 1}{self._whose}"
        return self.source.place(row)

    @property
    def _whose(self) -> str:
        return f" of rank {self.rank}" if self.ranks > 1 else ""

    def _generator(self, start: BlockStart) -> torch.Generator:
        return torch.Generator().manual_seed(mix(self.seed, start.passes, start.block))


@dataclass(frozen=True)
class _Pool:
    """What a block's batches are drawn from: what was left over before, and the block's own."""

    carried: tuple[Item, ...]
    examples: RowSet | PackedRows

    def __len__(self) -> int:
        return len(self.carried) + len(self.examples)

    def __getitem__(self, index: int) -> Item:
        behind = index - len(self.carried)
        return self.examples[behind] if behind >= 0 else self.carried[index]
