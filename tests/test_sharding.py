"""What is split, and what is refused, without several ranks; `test_ranks_*.py` have those."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.utils import _to_kwargs

from dspark_lightning import Qwen3DSpark
from dspark_lightning.delivery import Delivery, all_or_none
from dspark_lightning.host import OnHost, unboxed
from dspark_lightning.loading import load_empty_target, load_target
from dspark_lightning.sharding import data_parallel_mesh, gathered, target_units
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
