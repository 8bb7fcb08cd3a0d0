"""The picture reaches the draft: `configs/quickstart_vlm.yaml`, and the script that measures it."""

from pathlib import Path

import pytest
import torch

from dspark_lightning.cli import main
from dspark_lightning.datamodules import VLMDataModule
from dspark_lightning.drafts.registry import build_draft_model
from dspark_lightning.loading import load_target
from dspark_lightning.pretrained import load_pretrained_draft
from dspark_lightning.target import HFDSparkTargetModel
from picture_acceptance import TARGET, Acceptance, held_out_rows, picture_acceptance

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart_vlm.yaml"


def test_rates_and_interval() -> None:
    """Of rows that are all alike the bootstrap draws the same ratio every time."""
    alike = Acceptance(torch.full((9,), 6.0), torch.full((9,), 4.0), torch.full((9,), 8.0))
    assert alike.rates() == (0.75, 0.5) and alike.interval() == pytest.approx((1.5, 1.5))
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(2, 400, generator=generator)
    low, high = Acceptance(noise[0], noise[1], torch.ones(400)).interval()
    # Mean 1/2, variance 1/12 each: the ratio of two means of 400 has a standard error of about sqrt(2/3/400).
    assert low < 1.0 < high
    assert high - low == pytest.approx(2 * 1.96 * (2 / 3 / 400) ** 0.5, rel=0.15)


def test_an_untrained_draft_does_not_tell_pictures_apart() -> None:
    data: VLMDataModule = held_out_rows(mask_token_id=8, rows="train[:20]")
    model = load_target(TARGET)
    torch.manual_seed(0)
    draft = build_draft_model(model.config, mask_token_id=8, num_draft_layers=1, num_anchors=8, markov_rank=8)
    target = HFDSparkTargetModel(model, draft.target_layer_ids)
    draft.initialize_embeddings_and_head(embed_tokens=target.embed_tokens, lm_head=target.lm_head)
    measured = picture_acceptance(draft, data, target)
    true, wrong = measured.rates()
    assert len(measured.slots) == 20 and measured.slots.min() > 0
    assert 0 < true < 0.05 and 0 < wrong < 0.05  # a teacher that is sure of one word of 430


@pytest.mark.slow
def test_acceptance_falls_with_a_wrong_picture(tmp_path: Path) -> None:
    main(["fit", "--config", str(CONFIG), f"--trainer.logger.init_args.save_dir={tmp_path}"])
    draft = load_pretrained_draft(tmp_path / "quickstart_vlm" / "version_0" / "dspark-draft").float()
    target = HFDSparkTargetModel(load_target(TARGET), draft.target_layer_ids)
    measured = picture_acceptance(draft, held_out_rows(draft.mask_token_id), target)
    true, wrong = measured.rates()
    assert true > 0.6
    assert true / wrong >= 1.3 and measured.interval()[0] > 1.0
