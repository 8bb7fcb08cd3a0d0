import pytest
import torch

from chat_helpers import SPECIAL, byte_tokenizer
from dspark_lightning.datamodules.collate import collate_rows
from dspark_lightning.datamodules.preview import preview


def row(length: int, row_id: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(1, length + 1)
    return {"input_ids": ids, "loss_mask": ids % 2, "row_id": torch.tensor(row_id)}


def test_right_padding_by_hand() -> None:
    batch = collate_rows([row(3, 40), row(5, 2)], pad_token_id=9, max_length=100)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9, 9, 9, 9, 9], [1, 2, 3, 4, 5, 9, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]]
    assert batch["loss_mask"].tolist() == [[1, 0, 1, 0, 0, 0, 0, 0], [1, 0, 1, 0, 1, 0, 0, 0]]
    assert batch["row_id"].tolist() == [40, 2]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_weights_are_padded_beside_the_mask() -> None:
    rows = [row(3, 0) | {"loss_weights": torch.full((3,), 0.5)}, row(8, 1) | {"loss_weights": torch.ones(8)}]
    weights = collate_rows(rows, pad_token_id=9, max_length=100)["loss_weights"]
    assert weights.tolist() == [[0.5] * 3 + [0] * 5, [1] * 8]
    assert weights.dtype == torch.float32


@pytest.mark.parametrize(
    ("longest", "max_length", "size"), [(8, 100, 8), (9, 100, 16), (9, 12, 12), (12, 12, 12), (1, 3, 3)]
)
def test_length_of_a_batch(longest: int, max_length: int, size: int) -> None:
    batch = collate_rows([row(1, 0), row(longest, 1)], pad_token_id=0, max_length=max_length)
    assert batch["input_ids"].shape == (2, size)
    assert batch["attention_mask"].sum(1).tolist() == [1, longest]


def test_preview_marks_what_is_supervised_and_shortens_what_is_long() -> None:
    tokenizer = byte_tokenizer()
    text = "ask" + "x" * 500 + "answer"
    ids = torch.tensor([*tokenizer(text)["input_ids"], SPECIAL.index("<|im_end|>"), *tokenizer("\n")["input_ids"]])
    mask = torch.zeros_like(ids)
    mask[-8:-1] = 1
    assert preview(tokenizer, ids, mask) == "ask" + "x" * 197 + " ... " + "x" * 200 + "⟦answer<|im_end|>⟧\n"
