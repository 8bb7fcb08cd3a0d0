"""A family that the package does not know: see `made_up_family`."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dspark_lightning import DSPARK_DRAFT_REGISTRY, build_draft_model, load_pretrained_draft, register_draft_family
from dspark_lightning.cli import run_lightning
from dspark_lightning.embedded import embedded_path
from helpers import TINY, seeded
from made_up_family import MADE_UP, MadeUpConfig, MadeUpDSparkModel, MadeUpForCausalLM

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made-up")
    with seeded(0):
        MadeUpForCausalLM(MadeUpConfig(**{**TINY, "vocab_size": 1024}, head_dim=8)).save_pretrained(folder)
    for file in embedded_path().glob("*token*"):
        shutil.copy(file, folder)
    shutil.copy(embedded_path() / "chat_template.jinja", folder)
    return folder


@pytest.mark.parametrize("module", ["made_up_family.MadeUpDSpark", "dspark_lightning.DSparkModule"])
def test_it_trains_exports_and_loads(target: Path, tmp_path: Path, module: str) -> None:
    settings = {
        "model.class_path": module,
        "model.init_args.target": target,
        "model.init_args.num_draft_layers": 2,
        "model.init_args.activation_checkpointing": "true",
        "trainer.logger.init_args.save_dir": tmp_path,
        "trainer.max_steps": 8,
        "model.init_args.warmup_ratio": 0.0,
        "trainer.val_check_interval": 8,
        "trainer.limit_val_batches": 2,
        "trainer.log_every_n_steps": 1,
        "trainer.enable_progress_bar": "false",
    }
    arguments = ["fit", "--config", str(QUICKSTART), *(f"--{name}={value}" for name, value in settings.items())]
    cli = run_lightning(arguments)
    assert type(cli.model.draft) is MadeUpDSparkModel
    (folder,) = tmp_path.glob("*/version_0/dspark-draft")
    losses = [event.value for event in EventAccumulator(str(folder.parent)).Reload().Scalars("train/loss")]
    assert len(losses) == 8 and losses[-1] < 0.9 * losses[0]
    loaded = load_pretrained_draft(folder)
    assert type(loaded) is MadeUpDSparkModel
    expected = {name: value.to(torch.bfloat16) for name, value in cli.model.draft.state_dict().items()}
    written = load_file(folder / "model.safetensors")
    assert written.keys() == expected.keys() == loaded.state_dict().keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_a_target_has_one_family() -> None:
    register_draft_family(MADE_UP)  # the same again changes nothing
    with pytest.raises(ValueError, match="'llama' is already served by Qwen3DSparkModel"):
        register_draft_family(replace(MADE_UP, architectures=(), model_types=("new", "llama")))
    assert "new" not in DSPARK_DRAFT_REGISTRY


def test_it_starts_like_all_others() -> None:
    config = MadeUpConfig(**TINY, head_dim=8)
    with seeded(0):
        draft = build_draft_model(config, mask_token_id=5, num_draft_layers=1)
    weight = draft.layers[0].mlp[0].weight
    assert abs(weight.std() - 0.02) < 5 * 0.02 / (2 * weight.numel()) ** 0.5
    assert torch.equal(draft.layers[0].query.bias, torch.zeros(32))
