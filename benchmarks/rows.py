"""Real chat rows in the shape of a benchmark's batches."""

from itertools import islice

from torch.nn import functional as F

from benchmarks.sizes import Size
from dspark_lightning.datamodules import ChatDataModule

BATCHES = 4
"""Averaged over, because rows differ in how much of them is supervised."""

NO_TOKEN = -1
"""Stands for the draft's mask token, which the data must not hold."""


def load_rows(
    data: str, target: str, gguf_file: str | None, size: Size
) -> tuple[tuple[list[list[int]], list[list[int]]], ...]:
    """Encode the first batches of training, padded on the right.

    Args:
        data: see `ChatDataModule`.
        target: whose tokenizer encodes.
        gguf_file: that holds it, if one does.
        size: of the batches; ids are taken modulo its vocabulary.

    Returns:
        ids and loss_mask [B, S] of each batch.
    """
    datamodule = ChatDataModule(
        data,
        tokenizer=target,
        gguf_file=gguf_file,
        mask_token_id=NO_TOKEN,
        max_length=size.seq_len,
        batch_size=size.batch,
        min_supervised_tokens=2 * size.block_size,
    )
    datamodule.setup("fit")
    batches = []
    for batch in islice(datamodule.train_dataloader(), BATCHES):
        behind = (0, size.seq_len - batch["input_ids"].shape[1])
        ids, mask = (F.pad(batch[name], behind) for name in ("input_ids", "loss_mask"))
        batches.append(((ids % size.mask_token_id).tolist(), mask.tolist()))
    return tuple(batches)
