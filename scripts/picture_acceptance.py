"""Does the picture reach the draft? Acceptance with the features of the true picture, and with those of a wrong one.

    dspark fit --config configs/quickstart_vlm.yaml
    python scripts/picture_acceptance.py runs/quickstart_vlm/version_0/dspark-draft

The held-out rows run through the target twice, with their own picture and with that of another row. The draft proposes
from the features of either; its proposals are held against what the target says of the true picture. The interval of
the ratio is a bootstrap over rows.
"""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from dspark_lightning.anchors import row_generator, sample_anchor_positions
from dspark_lightning.datamodules import VLMDataModule
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.loading import load_target
from dspark_lightning.pretrained import load_pretrained_draft
from dspark_lightning.target import HFDSparkTargetModel

TARGET = "embedded-pictures"
TEXT = {"input_ids", "attention_mask", "loss_mask", "row_id"}
RESAMPLES = 10_000


@dataclass(frozen=True)
class Acceptance:
    """Accepted probability of each of R rows, summed over its supervised slots, with the true and a wrong picture."""

    true: Tensor  # [R]
    wrong: Tensor  # [R]
    slots: Tensor  # [R]

    def rates(self) -> tuple[float, float]:
        """accept_rate with the true picture, and with a wrong one."""
        return tuple((side.sum() / self.slots.sum()).item() for side in (self.true, self.wrong))  # type: ignore[return-value]

    def interval(self) -> tuple[float, float]:
        """95 % of the bootstrap distribution of the ratio of both."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(len(self.slots), (RESAMPLES, len(self.slots)), generator=generator)
        ratios = self.true[drawn].sum(dim=1) / self.wrong[drawn].sum(dim=1)
        low, high = ratios.quantile(torch.tensor([0.025, 0.975])).tolist()
        return low, high


def held_out_rows(mask_token_id: int, rows: str = "train") -> VLMDataModule:
    """The held-out rows of the picture task, set up for validation; `rows` is a slice of them, such as "train[:20]"."""
    data = VLMDataModule(
        "embedded",
        val_data="embedded",
        val_split=rows,
        tokenizer=TARGET,
        mask_token_id=mask_token_id,
        max_length=80,
        batch_size=10,
    )
    data.setup("validate")
    return data


@torch.no_grad()
def picture_acceptance(draft: DSparkDraft, data: VLMDataModule, target: HFDSparkTargetModel) -> Acceptance:
    """Measure a draft on the validation rows of a set up datamodule, each with one picture of the same size."""
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    for batch in cast(Iterable[dict[str, Tensor]], data.val_dataloader()):
        if len(batch["row_id"]) > 1:  # a wrong picture is another row's
            columns.extend(_measured(draft, target, batch))
    true, wrong, slots = (torch.stack(column) for column in zip(*columns, strict=True))
    return Acceptance(true, wrong, slots)


def _measured(
    draft: DSparkDraft, target: HFDSparkTargetModel, batch: dict[str, Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    rows, ids, mask = len(batch["row_id"]), batch["input_ids"], batch["loss_mask"]
    media = {name: values for name, values in batch.items() if name not in TEXT}
    pixels = media["pixel_values"].unflatten(0, (rows, -1)).roll(1, dims=0).flatten(0, 1)
    captured = vars(target.generate_batch(ids, None, mask, **media))
    misled = target.generate_batch(ids, None, mask, **{**media, "pixel_values": pixels})
    generators = [row_generator(0, 0, row) for row in batch["row_id"].tolist()]
    anchors, keep = sample_anchor_positions(ids.shape[1], mask, draft.num_anchors, "cpu", generators=generators)
    sums = []
    for features in (captured["target_hidden_states"], misled.target_hidden_states):
        output = draft(
            **{**captured, "target_hidden_states": features},
            anchor_positions=anchors,
            block_keep_mask=keep,
            attention_mask=batch["attention_mask"],
        )
        drafted, taught = (x.float().softmax(dim=-1) for x in (output.draft_logits, output.aligned_target_logits))
        accepted = 1 - (drafted - taught).abs().sum(dim=-1) / 2
        sums.append((accepted * output.eval_mask).sum(dim=(1, 2)))
    return zip(*sums, output.eval_mask.sum(dim=(1, 2)), strict=True)


def main() -> None:
    """Print both rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("draft", help="folder of the exported draft")
    draft = load_pretrained_draft(parser.parse_args().draft)
    cast(nn.Module, draft).float()
    data = held_out_rows(draft.mask_token_id)
    target = HFDSparkTargetModel(load_target(TARGET), draft.target_layer_ids)
    measured = picture_acceptance(draft, data, target)
    (true, wrong), (low, high) = measured.rates(), measured.interval()
    print(f"accept_rate over {len(measured.slots)} held-out rows: true picture {true:.3f}, wrong picture {wrong:.3f}")
    print(f"ratio {true / wrong:.2f}, 95 % interval {low:.2f} to {high:.2f}")


if __name__ == "__main__":
    main()
