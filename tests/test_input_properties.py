"""What holds for any rows, documents, settings and orders, on inputs that hypothesis draws.

The run of every day draws few examples, always the same; the slow one draws many.
"""

import json
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark_lightning import build_draft_model, export_draft, load_pretrained_draft
from dspark_lightning.anchors import sample_anchor_positions
from dspark_lightning.datamodules.collate import collate_rows
from dspark_lightning.datamodules.packing import first_fit_decreasing, join_documents
from dspark_lightning.features.shard import DamagedShard, FeatureRow, read_index, read_row, write_shard
from dspark_lightning.regeneration.output import OutputFiles, PartialFile
from feature_helpers import random_row
from helpers import tiny_qwen3_config

FAST = settings(deadline=None, derandomize=True, max_examples=30, database=None)
MANY = settings(FAST, max_examples=300)
PAD = 99

Property = Callable[[Any], None]
Row = dict[str, Tensor]


def row(ids: list[int], mask: list[int], row_id: int) -> Row:
    return {"input_ids": torch.tensor(ids), "loss_mask": torch.tensor(mask), "row_id": torch.tensor(row_id)}


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Up to 5 rows of up to 20 tokens."""
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    ids, bits = st.integers(0, 50), st.integers(0, 1)
    return [
        row(draw(st.lists(ids, min_size=n, max_size=n)), draw(st.lists(bits, min_size=n, max_size=n)), i)
        for i, n in enumerate(lengths)
    ]


def batches_hold_their_rows(drawn: list[Row]) -> None:
    """Nothing is shifted, cut or changed; what is behind a row is padding, and no more than the next multiple of 8."""
    longest = max(len(each["input_ids"]) for each in drawn)
    for max_length in (longest, 64):
        batch = collate_rows(drawn, PAD, max_length)
        size = batch["input_ids"].shape[1]
        assert size <= max_length and longest <= size < longest + 8
        for i, each in enumerate(drawn):
            n = len(each["input_ids"])
            assert torch.equal(batch["input_ids"][i, :n], each["input_ids"])
            assert torch.equal(batch["loss_mask"][i, :n], each["loss_mask"])
            assert batch["attention_mask"][i].tolist() == [1] * n + [0] * (size - n)
            assert (batch["input_ids"][i, n:] == PAD).all() and not batch["loss_mask"][i, n:].any()
            assert batch["row_id"][i] == i


def joined_documents_come_apart_again(drawn: list[Row]) -> None:
    """By `seq_lens` alone, whole and in their order; positions and what remains count each from its own start."""
    pack = join_documents(drawn)
    lengths = pack["seq_lens"].tolist()
    parts = {name: pack[name].split(lengths) for name in ("input_ids", "loss_mask", "position_ids", "doc_remaining")}
    assert len(lengths) == len(drawn) and pack["doc_row_ids"].tolist() == list(range(len(drawn)))
    for i, each in enumerate(drawn):
        assert torch.equal(parts["input_ids"][i], each["input_ids"])
        assert torch.equal(parts["loss_mask"][i], each["loss_mask"])
        assert parts["position_ids"][i].tolist() == list(range(lengths[i]))
        assert (parts["position_ids"][i] + parts["doc_remaining"][i]).tolist() == [lengths[i] - 1] * lengths[i]


def anchors_start_supervised_pairs_of_one_document(drawn: list[Row]) -> None:
    """Sorted and distinct, the anchor and the token behind it supervised and in one document; as many as there are."""
    batch = collate_rows([join_documents(drawn)], PAD, 128)
    mask, remaining = batch["loss_mask"], batch["doc_remaining"]
    document = torch.repeat_interleave(torch.arange(len(drawn)), batch["seq_lens"][0]).tolist()
    possible = [i for i in range(len(document) - 1) if mask[0, i] and mask[0, i + 1] and document[i] == document[i + 1]]
    for wanted in (1, 3, 200):
        positions, keep = sample_anchor_positions(mask.shape[1], mask, wanted, "cpu", remaining)
        chosen = positions[keep].tolist()
        assert len(chosen) == min(wanted, len(possible)) and set(chosen) <= set(possible)
        assert chosen == sorted(set(chosen)) and not positions[~keep].any()


def packs_hold_each_document_once(drawn: list[Row]) -> None:
    """None is too full, and there are never more than if each pack was closed as soon as a document does not fit."""
    lengths, capacity = [len(each["input_ids"]) for each in drawn] * 3, 20
    documents, bounds = first_fit_decreasing(np.array(lengths), capacity)
    packs = [documents[a:b].tolist() for a, b in pairwise(bounds.tolist())]
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in pack) <= capacity for pack in packs)
    closed, free = 0, 0
    for length in sorted(lengths, reverse=True):
        if length > free:
            closed, free = closed + 1, capacity
        free -= length
    assert len(packs) <= closed


def shards_return_what_was_written(drawn: list[Row]) -> None:
    """In any order; and with any one byte changed, that or an error."""
    written = {int(each["row_id"]): random_row(len(each["input_ids"]), i, 2) for i, each in enumerate(drawn)}
    noise = int(sum(each["input_ids"].sum() for each in drawn))
    order = sorted(written, key=lambda i: (i * 7 + noise) % 11)
    with TemporaryDirectory() as folder:
        path = write_shard(Path(folder), "owner", order, [written[i] for i in order])
        assert shard_rows(path) == {i: as_lists(each) for i, each in written.items()}
        content = bytearray(path.read_bytes())
        for place in range(noise % 17, len(content), 97):
            changed = bytearray(content)
            changed[place] ^= 1 + (noise + place) % 255
            path.write_bytes(changed)
            try:
                read = shard_rows(path)
            except DamagedShard:
                continue
            assert read == {i: as_lists(each) for i, each in written.items()}, f"byte {place} of {len(content)}"


def shard_rows(path: Path) -> dict[int, list[Any]]:
    index = read_index(path, "owner")
    spans = zip(index.row_ids, index.offsets, index.offsets[1:], index.checksums, strict=False)
    return {int(i): as_lists(read_row(path, int(a), int(b), int(check))) for i, a, b, check in spans}


def as_lists(each: FeatureRow) -> list[Any]:
    return [tensor.tolist() for tensor in each]


def answers_end_up_in_the_order_of_the_data(drawn: list[Row]) -> None:
    """The file is the same whichever process has answered which row, and when."""
    keys = [f"{i}/{each['input_ids'][0]}" for i, each in enumerate(drawn)]
    lines = "".join(f"{json.dumps({'id': key, 'n': len(key)})}\n" for key in keys)
    with TemporaryDirectory() as folder:
        files = OutputFiles(Path(folder) / "answers.jsonl")
        files.begin({}, {})
        by_noise = sorted(range(len(keys)), key=lambda i: int(drawn[i]["input_ids"].sum()))
        for i in by_noise:
            partial = PartialFile(files.partial(len(drawn[i]["input_ids"]) % 3))
            partial.append([{"id": keys[i], "n": len(keys[i])}])
            partial.close()
        assert files.finish(keys, []) == len(keys)
        assert files.output.read_text() == lines


PROPERTIES: list[Property] = [
    batches_hold_their_rows,
    joined_documents_come_apart_again,
    anchors_start_supervised_pairs_of_one_document,
    packs_hold_each_document_once,
    shards_return_what_was_written,
    answers_end_up_in_the_order_of_the_data,
]


@pytest.mark.parametrize("holds", PROPERTIES, ids=lambda each: each.__name__)
def test_for_some_rows(holds: Property) -> None:
    FAST(given(rows())(holds))()


@pytest.mark.slow
@pytest.mark.parametrize("holds", PROPERTIES, ids=lambda each: each.__name__)
def test_for_many_rows(holds: Property) -> None:
    MANY(given(rows())(holds))()


DRAFTS = st.fixed_dictionaries(
    {
        "num_draft_layers": st.integers(1, 2),
        "block_size": st.integers(1, 9),
        "num_anchors": st.integers(1, 600),
        "markov_rank": st.sampled_from([0, 4, 7]),
        "markov_head_type": st.sampled_from(["vanilla", "gated", "rnn"]),
        "confidence_head_alpha": st.sampled_from([0.0, 1.0]),
        "confidence_head_with_markov": st.booleans(),
        "target_layer_ids": st.lists(st.integers(-1, 5), min_size=1, max_size=3, unique=True).map(sorted),
        "mask_token_id": st.integers(0, 96),
    }
)


def drafts_survive_export(drawn: dict[str, Any]) -> None:
    """Every setting, and the weights as bf16 holds them."""
    if drawn["markov_rank"] == 0:
        drawn = drawn | {"confidence_head_with_markov": False}
    draft = build_draft_model(tiny_qwen3_config(), **drawn)
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that some engine cannot serve it
        loaded = load_pretrained_draft(export_draft(draft, Path(folder) / "dspark"))
    before, after = (each.config.to_dict() for each in (draft, loaded))
    names = drawn.keys() - {"num_draft_layers", "confidence_head_alpha"} | {
        "num_hidden_layers",
        "enable_confidence_head",
    }
    assert {name: after[name] for name in names} == {name: before[name] for name in names}
    assert loaded.block_size == drawn["block_size"] and loaded.target_layer_ids == drawn["target_layer_ids"]
    expected = {name: tensor.bfloat16() for name, tensor in draft.state_dict().items()}
    torch.testing.assert_close(dict(loaded.state_dict()), expected, atol=0, rtol=0)


def test_for_some_drafts() -> None:
    settings(FAST, max_examples=12)(given(DRAFTS)(drafts_survive_export))()


@pytest.mark.slow
def test_for_many_drafts() -> None:
    settings(FAST, max_examples=200)(given(DRAFTS)(drafts_survive_export))()
