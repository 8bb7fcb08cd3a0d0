"""The frozen target: layer ids, feature capture against Hugging Face's own hidden states, loading."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dspark_lightning.loading import load_target, load_target_config
from dspark_lightning.target import (
    DSparkTargetBatch,
    HFDSparkTargetModel,
    build_target_layer_ids,
    extract_context_feature,
    find_decoder,
    validate_target_layer_ids,
)
from helpers import TINY, seeded, tiny_llama, tiny_qwen3

MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}


def build(model_class: type[PreTrainedModel], config: object) -> PreTrainedModel:
    with seeded(0):
        return model_class(config).eval()


TARGETS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": tiny_qwen3,
    "llama": tiny_llama,
    "qwen3_moe": lambda: build(Qwen3MoeForCausalLM, Qwen3MoeConfig(**TINY, **MOE)),
    "mistral": lambda: build(MistralForCausalLM, MistralConfig(**TINY, head_dim=8)),
    "qwen2": lambda: build(Qwen2ForCausalLM, Qwen2Config(**TINY)),
}
EVERY_KIND = [-1, 0, 3, 5]  # the embedding, the first, an inner and the last layer
S = 12


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> HFDSparkTargetModel:
    model = TARGETS[request.param]()
    with seeded(1):  # a norm of ones would hide a feature taken before it
        nn.init.uniform_(model.model.norm.weight, 0.5, 2.0)
    return HFDSparkTargetModel(model, EVERY_KIND)


def token_ids(rows: int = 2, length: int = S) -> Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(0))


def capture(target: HFDSparkTargetModel, input_ids: Tensor, mask: Tensor | None = None) -> DSparkTargetBatch:
    mask = torch.ones_like(input_ids) if mask is None else mask
    return target.generate_batch(input_ids, mask, torch.ones_like(input_ids))


@pytest.mark.parametrize(
    ("layers", "features", "ids"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (40, 5, [1, 10, 19, 28, 37]),
        (30, 5, [1, 8, 14, 20, 27]),
        (4, 3, [0, 1, 2]),
        (4, 2, [0, 2]),
        (5, 2, [1, 2]),
        (6, 5, [0, 1, 2, 3, 4]),
        (6, 4, [0, 1, 3, 4]),
        (36, 1, [18]),
        (3, 1, [1]),
        (2, 1, [0]),
        (3, 2, [0, 1]),
    ],
)
def test_default_spread(layers: int, features: int, ids: list[int]) -> None:
    assert build_target_layer_ids(layers, features) == ids


def test_every_default_spread_can_be_served() -> None:
    for layers in range(2, 100):
        for features in range(1, min(layers, 12)):
            ids = build_target_layer_ids(layers, features)
            assert len(ids) == features
            assert ids == validate_target_layer_ids(ids, layers - 1), "strictly increasing, without the last layer"
            assert ids[0] >= 0


@pytest.mark.parametrize(("layers", "features"), [(4, 4), (4, 0), (4, -1), (2, 2), (36, 36)])
def test_an_impossible_spread_names_both_numbers(layers: int, features: int) -> None:
    with pytest.raises(ValueError, match=f"{features} feature layers .* {layers} layers"):
        build_target_layer_ids(layers, features)


@pytest.mark.parametrize("ids", [[0], [-1], [5], [-1, 0, 5], (1, 3), [0, 1, 2, 3, 4, 5]])
def test_good_layer_ids_come_back_as_a_list(ids: list[int]) -> None:
    assert validate_target_layer_ids(ids, 6) == list(ids)


@pytest.mark.parametrize(
    ("ids", "complaint"),
    [
        ([], "empty"),
        ([0, 6], r"\[0, 6\] must lie in -1\.\.5"),
        ([-2, 0], r"\[-2, 0\] must lie in -1\.\.5"),
        ([3, 1], r"\[3, 1\] must be strictly increasing, such as \[1, 3\]"),
        ([1, 1], r"\[1, 1\] must be strictly increasing"),
    ],
)
def test_wrong_layer_ids_are_explained(ids: list[int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as error:
        validate_target_layer_ids(ids, 6)
    assert "target_layer_ids" in str(error.value) and "\n" not in str(error.value)


def test_extract_context_feature() -> None:
    hidden = [torch.full((1, 2, 3), float(i)) for i in range(5)]
    feature = extract_context_feature(hidden, [-1, 1, 3])
    assert feature.shape == (1, 2, 9)
    assert feature[0, 0].tolist() == [0] * 3 + [2] * 3 + [4] * 3


def test_hyper_connection_streams_are_averaged() -> None:
    streams = torch.arange(24.0).view(1, 2, 4, 3)
    assert torch.equal(extract_context_feature([streams], [-1]), streams.mean(dim=2))


def test_capture_equals_output_hidden_states(target: HFDSparkTargetModel) -> None:
    ids = token_ids()
    hidden = target.model(ids, output_hidden_states=True).hidden_states
    batch = capture(target, ids)
    assert batch.target_hidden_states.shape == (2, S, 4 * 32)
    assert_close(batch.target_hidden_states, extract_context_feature(hidden, EVERY_KIND), rtol=0, atol=1e-6)
    assert_close(batch.target_last_hidden_states, hidden[-1], rtol=0, atol=1e-6)


def test_the_head_on_the_last_states_gives_the_targets_logits(target: HFDSparkTargetModel) -> None:
    ids = token_ids()
    logits = target.lm_head(capture(target, ids).target_last_hidden_states)
    assert_close(logits, target.model(ids).logits, rtol=1e-5, atol=1e-5)


def test_the_head_is_never_run(target: HFDSparkTargetModel) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("lm_head was run")

    handle = target.lm_head.register_forward_pre_hook(refuse)
    try:
        assert capture(target, token_ids()).target_hidden_states.isfinite().all()
    finally:
        handle.remove()


@pytest.mark.parametrize("padding", [1, 4, 20])
def test_right_padding_is_exact(target: HFDSparkTargetModel, padding: int) -> None:
    ids = token_ids()
    padded_ids, mask = (nn.functional.pad(x, (0, padding)) for x in (ids, torch.ones_like(ids)))
    plain, padded = capture(target, ids), capture(target, padded_ids, mask)
    assert_close(padded.target_hidden_states[:, :S], plain.target_hidden_states, rtol=1e-5, atol=1e-5)
    assert_close(padded.target_last_hidden_states[:, :S], plain.target_last_hidden_states, rtol=1e-5, atol=1e-5)
    assert padded.target_hidden_states.isfinite().all()


def test_packed_documents_equal_each_alone(target: HFDSparkTargetModel) -> None:
    lengths = (5, 7)
    ids = token_ids(rows=1)
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    ones, seq_lens = torch.ones_like(ids), torch.tensor([lengths])
    packed = target.generate_batch(ids, ones, ones, position_ids=positions, seq_lens=seq_lens)
    alone = [capture(target, part).target_hidden_states for part in ids.split(lengths, dim=1)]
    assert_close(packed.target_hidden_states, torch.cat(alone, dim=1), rtol=1e-5, atol=1e-5)
    leaking = capture(target, ids).target_hidden_states
    assert not torch.allclose(packed.target_hidden_states, leaking, atol=1e-2)


def test_packed_rows_need_positions(target: HFDSparkTargetModel) -> None:
    ids = token_ids()
    with pytest.raises(ValueError, match="position_ids"):
        target.generate_batch(ids, None, ids, seq_lens=torch.tensor([[S], [S]]))


def test_the_batch_carries_its_inputs() -> None:
    ids, extra = token_ids(), torch.zeros(2, S, dtype=torch.int64)
    target = HFDSparkTargetModel(tiny_qwen3(), [1])
    batch = target.generate_batch(ids, torch.ones_like(ids), extra, doc_remaining=extra)
    assert batch.input_ids is ids and batch.loss_mask is extra and batch.doc_remaining is extra
    assert batch.position_ids is None and batch.seq_lens is None


@pytest.mark.parametrize("layer_ids", [[2], EVERY_KIND])
def test_features_can_be_trained_on(layer_ids: list[int]) -> None:
    batch = capture(HFDSparkTargetModel(tiny_qwen3(), layer_ids), token_ids())
    layer = nn.Linear(batch.target_hidden_states.shape[-1], 1, bias=False)
    (layer(batch.target_hidden_states).sum() + (layer.weight.sum() * batch.target_last_hidden_states).sum()).backward()
    expected = batch.target_hidden_states.sum(dim=(0, 1)) + batch.target_last_hidden_states.sum()
    assert_close(layer.weight.grad[0], expected, rtol=1e-4, atol=1e-4)
    batch.target_hidden_states.add_(1.0)  # an inference tensor would refuse


def test_the_target_is_frozen_and_in_eval_mode() -> None:
    model = tiny_qwen3(attention_dropout=0.5).train()
    target = HFDSparkTargetModel(model, [1, 3])
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    first = capture(target, token_ids()).target_hidden_states
    model.train()
    assert torch.equal(capture(target, token_ids()).target_hidden_states, first)
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


def test_no_hook_is_left_behind() -> None:
    target = HFDSparkTargetModel(tiny_qwen3(), EVERY_KIND)
    capture(target, token_ids())
    with pytest.raises(IndexError):
        capture(target, torch.full((1, 4), 5000))
    assert not [m for m in target.model.modules() if m._forward_hooks]


def test_wrong_layer_ids_for_the_model() -> None:
    with pytest.raises(ValueError, match="the target has 6 layers"):
        HFDSparkTargetModel(tiny_qwen3(), [0, 6])


def test_a_model_without_decoder_layers_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1, n_positions=8))
    with pytest.raises(ValueError, match="GPT2LMHeadModel"):
        find_decoder(model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("targets") / "tiny"
    tiny_qwen3().bfloat16().save_pretrained(path)
    return path


def edited(folder: Path, tmp_path: Path, config: bytes | None = None, weights: bytes | None = None) -> str:
    """A copy of the target with one file replaced."""
    for name, content in (("config.json", config), ("model.safetensors", weights)):
        (tmp_path / name).write_bytes((folder / name).read_bytes() if content is None else content)
    return str(tmp_path)


def fingerprint(model: PreTrainedModel) -> str:
    return HFDSparkTargetModel(model, [1]).fingerprint()


def test_the_fingerprint_does_not_depend_on_the_dtype(folder: Path) -> None:
    bf16, fp32 = (load_target(str(folder), dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    assert bf16.dtype == torch.bfloat16 and fp32.dtype == torch.float32
    assert fingerprint(bf16) == fingerprint(fp32) == fingerprint(tiny_qwen3().bfloat16()) == fingerprint(tiny_qwen3())


def test_the_fingerprint_does_not_depend_on_the_layer_ids() -> None:
    assert len({HFDSparkTargetModel(tiny_qwen3(), ids).fingerprint() for ids in ([1], [0, 4])}) == 1


@pytest.mark.parametrize("other", [lambda: tiny_qwen3(seed=1), tiny_llama, lambda: tiny_qwen3(num_hidden_layers=5)])
def test_the_fingerprint_tells_targets_apart(other: Callable[[], PreTrainedModel]) -> None:
    assert fingerprint(other()) != fingerprint(tiny_qwen3())


def test_the_fingerprint_sees_fine_tuning() -> None:
    model = tiny_qwen3()
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(1.02)
    assert fingerprint(model) != fingerprint(tiny_qwen3())


def test_loading_gives_the_saved_target(folder: Path) -> None:
    loaded, saved = load_target(str(folder)), tiny_qwen3().bfloat16().float()
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), saved.parameters(), strict=True))
    assert load_target_config(str(folder)).hidden_size == 32


@pytest.mark.parametrize("load", [load_target, load_target_config])
@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "nowhere", "org/nowhere"])
def test_a_target_that_is_not_there(name: str, load: Callable[[str], object]) -> None:
    with pytest.raises(ValueError) as error:
        load(name)
    assert name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("config", [b"{", b"{}", b'{"model_type": "unheard_of"}'])
def test_a_target_with_a_broken_config(folder: Path, tmp_path: Path, config: bytes) -> None:
    with pytest.raises(ValueError) as error:
        load_target(edited(folder, tmp_path, config=config))
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("weights", [b"", b"junk", "truncated"])
def test_a_target_with_broken_weights(folder: Path, tmp_path: Path, weights: bytes | str) -> None:
    content = (folder / "model.safetensors").read_bytes()[:5000] if isinstance(weights, str) else weights
    with pytest.raises(ValueError) as error:
        load_target(edited(folder, tmp_path, weights=content))
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("change", ["missing", "renamed", "reshaped"])
def test_weights_that_do_not_fit_are_refused(folder: Path, tmp_path: Path, change: str) -> None:
    """Hugging Face would fill the gaps with random numbers, and the draft would learn to predict noise."""
    weights = load_file(folder / "model.safetensors")
    head = weights.pop("lm_head.weight")
    if change == "renamed":
        weights["other.lm_head.weight"] = head
    elif change == "reshaped":
        weights["lm_head.weight"] = head[:5].contiguous()
    source = edited(folder, tmp_path)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head\.weight") as error:
        load_target(source)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_a_gguf_file_that_is_not_there(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.gguf") as error:
        load_target(str(folder), gguf_file="none.gguf")
    assert str(folder) in str(error.value) and "\n" not in str(error.value)
