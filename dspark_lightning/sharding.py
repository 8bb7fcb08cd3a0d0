"""Target and draft split over the ranks: FSDP1 (`FSDPStrategy`) and FSDP2 (`ModelParallelStrategy`).

A unit is what is gathered at once while it runs: a decoder layer, a vision block, an embedding, the draft's head. What
is in none of them belongs to the root.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullStateDictConfig,
    MixedPrecisionPolicy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import wrap
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.target import HFDSparkTargetModel, find_decoder

# FSDP2 warns of writing to them, which nothing here does.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def data_parallel_mesh(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The ranks over which `ModelParallelStrategy` shards; None under every other strategy.

    Raises:
        ValueError: a dimension other than data_parallel has several ranks, which would all see the same rows.
    """
    if mesh is None:
        return None
    for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True):
        if name != "data_parallel" and size > 1:
            raise ValueError(
                f"the strategy has {name}_size {size}, must be 1: set data_parallel_size to {mesh.size()} and "
                "tensor_parallel_size to 1, or take dspark_lightning.strategies.DSparkFSDP2Strategy, which does"
            )
    return mesh["data_parallel"]


def shard_draft(draft: DSparkDraft, mesh: DeviceMesh | None) -> DSparkDraft:
    """Split the draft.

    Args:
        draft: whole, on any device.
        mesh: the ranks, for FSDP2. None takes FSDP1 with the settings of the running `FSDPStrategy`.
    """
    return cast(DSparkDraft, _shard(draft, draft_units(draft), mesh))


def shard_target(target: HFDSparkTargetModel, mesh: DeviceMesh | None, deliver: Callable[[nn.Module], None]) -> None:
    """Split the target in place, all but its head, which is given up: only the draft's copy of it is ever used.

    Args:
        target: not yet on its device.
        mesh: as for `shard_draft`.
        deliver: called with each unit just before it is split.
    """
    model = target.model
    head = cast(nn.Module, model.get_output_embeddings())
    head.weight = nn.Parameter(cast(Tensor, head.weight).to("meta"), requires_grad=False)
    # A frozen unit has nothing to reduce, and its dtypes are those it was loaded in.
    sharded = _shard(model.base_model, target_units(model), mesh, deliver, mixed_precision=None)
    if isinstance(sharded, FSDPModule):  # a root waits for its backward pass, and there is none
        sharded.set_reshard_after_forward(True, recurse=False)
    if model.base_model is model:
        target.model = cast(PreTrainedModel, sharded)
    else:
        setattr(model, model.base_model_prefix, sharded)


def draft_units(draft: DSparkDraft) -> list[nn.Module]:
    """The draft's layers, and its frozen embedding and head, which may have another dtype."""
    return [*draft.layers, draft.embed_tokens, draft.lm_head]


def target_units(model: PreTrainedModel) -> list[nn.Module]:
    """The target's decoder layers, the blocks of its other towers, its embedding and its text stack.

    The last two run by themselves: a vision-language target embeds its text before the text stack runs.
    """
    decoder = find_decoder(model)
    inside = set(decoder.modules())
    blocks = [
        block
        for module in model.base_model.modules()
        if isinstance(module, nn.ModuleList) and module not in inside
        for block in module
    ]
    nested = {module for block in blocks for module in block.modules() if module is not block}
    towers = [block for block in blocks if block not in nested]
    stack = [decoder] if decoder is not model.base_model else []
    layers = cast(Iterable[nn.Module], decoder.layers)
    return [*layers, *towers, model.get_input_embeddings(), *stack]


def _shard(
    root: nn.Module,
    units: Iterable[nn.Module],
    mesh: DeviceMesh | None,
    before: Callable[[nn.Module], None] = lambda module: None,
    **options: object,
) -> nn.Module:
    """Split weights over the ranks, unit by unit, so that no rank needs room for more than one whole unit.

    Args:
        root: what is split.
        units: modules inside it, inner ones first.
        mesh: the ranks, for FSDP2. None takes FSDP1 with the settings of the running `FSDPStrategy`, and leaves
            everything whole under any other strategy.
        before: called with each unit, then with the root, before it is split.
        **options: of FSDP1, in place of the strategy's.

    Returns:
        the root, under FSDP1 inside a wrapper.
    """
    names = {module: name for name, module in root.named_modules()}
    for unit in units:
        before(unit)
        parent, _, child = names[unit].rpartition(".")
        setattr(root.get_submodule(parent), child, _shard_one(unit, mesh, options))
    before(root)
    return _shard_one(root, mesh, options)


def _shard_one(module: nn.Module, mesh: DeviceMesh | None, options: dict[str, object]) -> nn.Module:
    if mesh is not None:
        return cast(
            nn.Module, fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        )
    # FSDP1 flattens a unit's parameters into one, which must have one dtype: the few others of a target stay whole.
    own = list(_own_parameters(module))
    sizes: Counter[torch.dtype] = Counter()
    for parameter in own:
        sizes[parameter.dtype] += parameter.numel()
    others = [p for p in own if p.dtype != max(sizes, key=sizes.__getitem__) and not p.requires_grad]
    return wrap(module, auto_wrap_policy=None, ignored_states=others or None, **options)


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters in no unit inside the module."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDP):
            yield from _own_parameters(child)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Have a unit's own weights whole inside the body, for use without calling the unit."""
    if isinstance(module, FSDP):
        with FSDP.summon_full_params(module, recurse=False, writeback=False):
            yield
    elif isinstance(module, FSDPModule):
        module.unshard()
        try:
            yield
        finally:
            module.reshard()
    else:
        yield


def is_sharded(module: nn.Module) -> bool:
    """Whether ranks hold parts of a module."""
    return any(isinstance(part, (FSDP, FSDPModule)) for part in module.modules())


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """A module's weights, whole; those of a sharded one are there on rank 0 only, and all ranks have to call this."""
    if any(isinstance(part, FSDP) for part in module.modules()):
        offload = next(module.parameters()).device.type != "cpu"
        config = FullStateDictConfig(offload_to_cpu=offload, rank0_only=True)
        with FSDP.state_dict_type(module, StateDictType.FULL_STATE_DICT, config):
            return module.state_dict()
    state = module.state_dict()
    if not is_sharded(module):
        return state
    whole = ((name, x.full_tensor() if isinstance(x, DTensor) else x) for name, x in state.items())
    return {name: x.cpu() for name, x in whole if torch.distributed.get_rank() == 0}
