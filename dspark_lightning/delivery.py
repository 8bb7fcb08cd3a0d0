"""Weights that only rank 0 has read reach the other ranks.

N ranks that each read a target would hold N copies of it in memory, often those of one machine. So rank 0 reads it, the
others build it empty (on the meta device), and it is sent a part at a time, straight to the device that trains.
"""

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_distributed() -> bool:
    """Whether several ranks train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def world_size() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if is_distributed() else 1


def process_rank() -> int:
    """The number of this rank, from 0."""
    return dist.get_rank() if is_distributed() else 0


def reads_for_others() -> bool:
    """Whether this rank is the one that reads; True when it is alone."""
    return process_rank() == 0


T = TypeVar("T")


def gather_values(value: T) -> list[T]:
    """What each rank gives, in the order of the ranks."""
    if not is_distributed():
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_or_none(make: Callable[[], T]) -> T:
    """What `make` returns on this rank.

    Raises:
        ValueError: that of any rank, on every rank, so that none is left waiting for one that stopped.
    """
    problem: ValueError | None = None
    try:
        value = make()
    except ValueError as error:
        problem = error
    problems = gather_values(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    for theirs in problems:
        if theirs is not None:
            raise ValueError(theirs)
    return value


def from_rank_0(make: Callable[[], T]) -> T:
    """What `make` returns on rank 0, on every rank."""
    values = [make()] if reads_for_others() else [None]
    if is_distributed():
        dist.broadcast_object_list(values, src=0)
    return cast(T, values[0])


class Delivery:
    """Brings a model's tensors to a device of every rank, a part at a time; all ranks deliver the same parts in order.

    Where a rank built the model empty, all take the values of rank 0; otherwise each keeps its own.

    Args:
        model: what parts will be delivered of.
        device: where they go.

    Raises:
        ValueError: an empty model has other tensors than rank 0's.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self._names = {module: name for name, module in model.named_modules()}
        self._done: set[nn.Module] = set()
        # Tied weights stay tied. Of others nothing is kept: a part may be split, and its whole weights must go.
        uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        self._tied = {id(parameter): parameter for parameter in model.parameters() if uses[id(parameter)] > 1}
        self._made: dict[int, nn.Parameter] = {}  # of the tied ones
        empty = any(tensor.is_meta for tensor in chain(model.parameters(), model.buffers()))
        self._dtypes: dict[str, torch.dtype] | None = None
        if is_distributed() and any(gather_values(empty)):
            mine = {name: (tuple(x.shape), x.dtype) for name, x in _tensors(model)}
            theirs = from_rank_0(lambda: mine)
            for name in sorted(mine.keys() | theirs.keys()):
                here, there = (shapes.get(name, (None,))[0] for shapes in (mine, theirs))
                if here != there:
                    raise ValueError(
                        f"the target's {name!r} has shape {there} on rank 0 and {here} where it was built from its "
                        "config: override load_target to load it whole on every rank"
                    )
            self._dtypes = {name: dtype for name, (_, dtype) in theirs.items()}

    def __call__(self, part: nn.Module) -> None:
        """Deliver what belongs to a module and to those inside it, except parts delivered before."""
        for module in part.modules():
            if module in self._done or module not in self._names:
                continue
            self._done.add(module)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = self._parameter(self._path(module, name), parameter)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self._tensor(self._path(module, name), buffer)

    def _path(self, module: nn.Module, name: str) -> str:
        prefix = self._names[module]
        return f"{prefix}.{name}" if prefix else name

    def _parameter(self, path: str, parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) in self._made:
            return self._made[id(parameter)]
        data, made = self._tensor(path, parameter.data), parameter
        if parameter.is_meta:
            made = nn.Parameter(data, requires_grad=parameter.requires_grad)
        else:
            made.data = data
        if id(parameter) in self._tied:
            self._made[id(parameter)] = made
        return made

    def _tensor(self, path: str, tensor: Tensor) -> Tensor:
        if self._dtypes is None:
            return tensor.to(self.device)
        if tensor.is_meta:
            tensor = torch.empty(tensor.shape, dtype=self._dtypes[path], device=self.device)
        tensor = tensor.to(self.device).contiguous()
        dist.broadcast(tensor, src=0)
        return tensor


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
