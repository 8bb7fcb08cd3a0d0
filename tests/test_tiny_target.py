"""scripts/tiny_target.py: its models, and the folder that its command writes."""

import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import tiny_target
from dspark_lightning.embedded import embedded_path
from dspark_lightning.loading import load_target
from tiny_target import TINY_TARGETS, build_tiny_target

FAMILIES = [
    "qwen3",
    "qwen3_moe",
    "gemma4",
    "gemma4_noeq",
    "gemma4_unified",
    "deepseek_v4",
    "glm_moe_dsa",
    "minimax_m3_vl",
    "minimax_m3_text",
    "kimi_linear",
    "kimi_k25",
]
SERVED = FAMILIES[:-1]
ROOT = Path(__file__).parent.parent


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["tiny_target.py", *arguments])
    tiny_target.main()


def test_the_families() -> None:
    assert list(TINY_TARGETS) == FAMILIES
    with pytest.raises(ValueError) as error:
        build_tiny_target("gpt5")
    assert str(error.value) == f"there is no tiny target 'gpt5': known are {', '.join(FAMILIES)}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_target(family: str) -> None:
    state = torch.random.get_rng_state()
    model, again = (build_tiny_target(family, vocab_size=300) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not model.training
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    text = model.config.get_text_config()
    assert (text.vocab_size, text.num_hidden_layers, text.pad_token_id, text.eos_token_id) == (300, 4, 0, 1)
    assert sum(parameter.numel() for parameter in model.parameters()) < 400_000
    with torch.no_grad():
        logits = model(input_ids=torch.arange(2, 290).view(4, 72)).logits
    assert logits.std().item() == pytest.approx(2.0, abs=0.15)


def test_another_seed_is_another_model() -> None:
    first, second = (build_tiny_target("qwen3", seed=seed).lm_head.weight for seed in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("family", SERVED)
def test_the_command_writes_a_target(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "targets" / family
    run(monkeypatch, family, str(folder))
    model = load_target(str(folder))
    expected = build_tiny_target(family, vocab_size=1024)
    assert type(model) is type(expected)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))

    tokenizer, embedded = (AutoTokenizer.from_pretrained(path) for path in (folder, embedded_path()))
    chat = [{"role": "user", "content": "What is 2 + 2?"}]
    assert tokenizer.apply_chat_template(chat) == embedded.apply_chat_template(chat)
    assert (tokenizer.mask_token_id, len(tokenizer)) == (5, 1024)

    wrote, following = capsys.readouterr().out.splitlines()
    assert wrote.startswith(f"Wrote {folder}: {type(model).__name__}, ")
    assert wrote.endswith(" parameters, vocabulary of 1,024 tokens")
    config = re.fullmatch(f"Next: dspark fit --config (\\S+) --model.init_args.target {folder}", following)[1]
    assert (ROOT / config).is_file()


def test_the_command_refuses_an_unknown_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        run(monkeypatch, "gpt5", str(tmp_path / "x"))
    assert error.value.code == 2 and not (tmp_path / "x").exists()
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert all(name in complaint for name in ["'gpt5'", *SERVED])
