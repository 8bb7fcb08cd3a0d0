"""What is split, and what is refused, without several ranks; `test_ranks_*.py` have those."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.distributed.utils import _to_kwargs

import dspark_lightning.delivery as delivery
import dspark_lightning.module as module_file
import dspark_lightning.sharding as sharding
from dspark_lightning import Qwen3DSpark
from dspark_lightning.delivery import Delivery, all_or_none
from dspark_lightning.host import OnHost, host_copies, unboxed
from dspark_lightning.loading import load_empty_target, load_target, load_target_config
from dspark_lightning.sharding import data_parallel_mesh, gathered, shard_draft, shard_target, target_units
from dspark_lightning.strategies import DSparkFSDPStrategy
from dspark_lightning.target import HFDSparkTargetModel
from family_helpers import build_pair
from tiny_target import build_tiny_target
from vlm_helpers import tiny_vlm


def mesh(**sizes: int) -> DeviceMesh:
    """Stands for a mesh with these dimensions; it answers which of them is asked for."""
    total = 1
    for size in sizes.values():
        total *= size
    fake = SimpleNamespace(mesh_dim_names=tuple(sizes), shape=tuple(sizes.values()), size=lambda: total)
    return cast(DeviceMesh, type("Mesh", (SimpleNamespace,), {"__getitem__": lambda self, name: name})(**vars(fake)))


def test_the_ranks_of_a_pair_are_those_of_data_parallelism() -> None:
    assert data_parallel_mesh(None) is None
    chosen: Any = data_parallel_mesh(mesh(data_parallel=8, tensor_parallel=1))
    assert chosen == "data_parallel"


@pytest.mark.parametrize("other", ["tensor_parallel", "pipeline_parallel"])
def test_other_kinds_of_parallelism_are_refused(other: str) -> None:
    with pytest.raises(ValueError, match=f"has {other}_size 4, must be 1: set data_parallel_size to 8 and"):
        data_parallel_mesh(mesh(data_parallel=2, **{other: 4}))


def test_units_of_a_text_target() -> None:
    model = build_tiny_target("qwen3")
    assert target_units(model) == [*model.model.layers, model.model.embed_tokens]


def test_units_of_a_target_that_reads_pictures() -> None:
    """Vision blocks too, and the text stack, which may run by itself."""
    model, _ = tiny_vlm("qwen3_vl")
    text, vision = model.model.language_model, model.model.visual
    assert len(text.layers) > 1 and len(vision.blocks) > 1
    blocks = [*vision.blocks, *vision.deepstack_merger_list]
    assert target_units(model) == [*text.layers, *blocks, text.embed_tokens, text]


def test_experts_are_no_units_of_their_own() -> None:
    model = build_tiny_target("qwen3_moe")
    assert target_units(model) == [*model.model.layers, model.model.embed_tokens]


def test_an_empty_target_has_the_shapes_of_a_read_one() -> None:
    read, empty = load_target("embedded"), load_empty_target("embedded")
    assert all(parameter.is_meta for parameter in empty.parameters())
    shapes = [{name: p.shape for name, p in model.named_parameters()} for model in (read, empty)]
    assert shapes[0] == shapes[1]


def test_delivery_takes_each_part_once_and_keeps_ties() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    parameters = list(model.parameters())
    deliver = Delivery(model, torch.device("cpu"))
    deliver(model["a"])
    model["a"].bias = torch.nn.Parameter(torch.empty(2, device="meta"))  # would not survive a second delivery
    deliver(model)
    assert model["a"].bias.is_meta
    assert model["a"].weight is model["b"].weight is parameters[0]


def test_delivery_holds_on_to_nothing_that_may_be_split() -> None:
    """Else every rank would have the whole target until the last part is split."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in "ab"})
    deliver = Delivery(model, torch.device("cpu"))
    deliver(model["a"])
    whole = weakref.ref(model["a"].weight)
    model["a"].weight = torch.nn.Parameter(torch.empty(1))
    gc.collect()
    assert whole() is None
    deliver(model)


def test_one_rank_alone_raises_its_own_error() -> None:
    def fail() -> None:
        raise ValueError("no such target")

    with pytest.raises(ValueError, match="no such target"):
        all_or_none(fail)
    assert all_or_none(lambda: 3) == 3


def test_a_whole_module_needs_no_gathering() -> None:
    module = torch.nn.Linear(2, 2)
    before = module.weight
    with gathered(module):
        assert module.weight is before


def test_a_boxed_tensor_stays_where_it_is() -> None:
    """Whoever moves batches and arguments to an accelerator leaves it on the CPU."""
    tensor = torch.ones(2)
    box, meta = OnHost(tensor), torch.device("meta")
    assert move_data_to_device({"x": box}, meta)["x"] is box
    _, (arguments,) = _to_kwargs((), {"x": box, "y": tensor}, meta, False)
    assert arguments["x"] is box and arguments["y"].is_meta
    assert unboxed(box) is tensor and unboxed(tensor) is tensor and unboxed(None) is None


def test_the_batch_brings_its_boxes() -> None:
    names = ("input_ids", "attention_mask", "loss_mask", "row_id")
    batch = {name: torch.zeros(2, dtype=torch.int64) for name in names}
    boxes = Qwen3DSpark("embedded", mask_token_id=5).on_before_batch_transfer(batch, 0)["on_host"]
    assert boxes.keys() == {"attention_mask", "loss_mask", "row_id"}
    assert all(isinstance(box, OnHost) for box in boxes.values())
    packed = batch | {name: torch.zeros(2, 2) for name in ("seq_lens", "doc_remaining")}
    assert host_copies(packed).keys() == {*boxes, "seq_lens", "doc_remaining"}


def test_gradients_are_summed_in_fp32_and_nothing_else_is_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DSparkFSDPStrategy().mixed_precision_config == MixedPrecision(reduce_dtype=torch.float32)
    own = MixedPrecision(param_dtype=torch.bfloat16)
    assert DSparkFSDPStrategy(mixed_precision=own).mixed_precision_config is own
    policies = []

    def record(module: torch.nn.Module, mesh: object, mp_policy: MixedPrecisionPolicy) -> torch.nn.Module:
        policies.append(mp_policy)
        return module

    monkeypatch.setattr(sharding, "fully_shard", record)
    _, draft = build_pair("qwen3")
    shard_draft(draft, mesh(data_parallel=2))
    assert policies == [MixedPrecisionPolicy(reduce_dtype=torch.float32)] * 5  # 2 layers, embedding, head, root


def test_a_users_policy_is_for_the_draft_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target keeps the dtypes in which it was loaded."""
    options = []

    def record(module: torch.nn.Module, **given: object) -> torch.nn.Module:
        options.append(given)
        return module

    monkeypatch.setattr(sharding, "wrap", record)
    target, draft = build_pair("qwen3")
    shard_draft(draft, None)
    assert all("mixed_precision" not in given for given in options)
    options.clear()
    shard_target(target, None, lambda part: None)
    assert options and all(given["mixed_precision"] is None for given in options)


def test_weights_of_another_dtype_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    ignored: dict[torch.nn.Module, Any] = {}

    def record(module: torch.nn.Module, ignored_states: Any, **given: object) -> torch.nn.Module:
        ignored[module] = ignored_states
        return module

    monkeypatch.setattr(sharding, "wrap", record)
    model = build_tiny_target("qwen3").to(torch.bfloat16)
    layer = model.model.layers[1]
    layer.input_layernorm.float()
    shard_target(HFDSparkTargetModel(model, [1]), None, lambda part: None)
    assert ignored[layer] == [layer.input_layernorm.weight]
    assert not any(ignored[unit] for unit in (model.model.layers[0], model.model.embed_tokens))


def test_another_target_on_rank_0_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    read = load_target("embedded")
    theirs = {name: (tuple(p.shape), p.dtype) for name, p in read.named_parameters(remove_duplicate=False)}
    theirs["model.norm.weight"] = ((3,), torch.float32)
    monkeypatch.setattr(delivery, "is_distributed", lambda: True)
    monkeypatch.setattr(delivery, "gather_values", lambda value: [False, value])
    monkeypatch.setattr(delivery, "from_rank_0", lambda make: theirs)
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' has shape \(3,\) on rank 0 and \(128,\) where"):
        Delivery(load_empty_target("embedded"), torch.device("cpu"))


def test_a_quantised_target_is_read_by_each_rank_and_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_target_config("embedded")
    config.quantization_config = {"quant_method": "fp8"}
    read: list[str] = []
    monkeypatch.setattr(module_file, "load_target_config", lambda *args, **options: config)
    monkeypatch.setattr(module_file, "load_target", lambda target, *args, **options: read.append(target))
    monkeypatch.setattr(module_file, "reads_for_others", lambda: False)
    Qwen3DSpark("embedded", mask_token_id=5).load_target()
    assert read == ["embedded"]
    monkeypatch.setattr(Qwen3DSpark, "_shards", True)
    with pytest.raises(ValueError, match="'embedded' is quantised and cannot be split: set shard_target to false"):
        Qwen3DSpark("embedded", mask_token_id=5).load_target()
    Qwen3DSpark("embedded", mask_token_id=5, shard_target=False).load_target()
    assert read == ["embedded"] * 2
