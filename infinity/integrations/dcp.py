"""Distributed checkpoint: planners of torch.distributed.checkpoint that hold one tensor at a time in RAM.

```python
model_state, optimizer_state = get_state_dict(model, runtime.optimizer)
state = {"model": model_state, "optimizer": optimizer_state}
dcp.save(state, storage_writer=FileSystemWriter(path, single_file_per_rank=False), planner=SavePlanner())
dcp.load(state, checkpoint_id=path, planner=LoadPlanner())
```

The checkpoint is the one that torch's `get_state_dict` and `dcp.save` write, and the load needs no
`set_state_dict`. With `single_file_per_rank=True` torch's writer keeps every tensor of a file in RAM.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from infinity.activations.heap import HeapGuard
from infinity.api import several_ranks
from infinity.checkpoint.run_state import modules_with_extra_state
from infinity.checkpoint.safetensors_files import persistent
from infinity.errors import ConfigError
from infinity.model.paged_parameter import PagedParameter
from infinity.optim.paged_optimizer import PagedOptimizer
from infinity.system import machine

_HOLES = 8 << 20
"""Bytes by which resident memory may grow before holes in the heap, which copies of former tensors leave, are
returned to the kernel.
"""


class PagedTensor(Tensor):
    """Stands for a tensor in pages: has its shape and dtype, on the CPU, and no bytes."""

    read: Callable[[], Tensor]
    """Returns a copy of the tensor."""
    write: Callable[[Tensor], None]
    """Replaces the tensor."""
    state: StateOfParameter | None
    """The state of which it is an entry; None for a parameter."""

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        read: Callable[[], Tensor],
        write: Callable[[Tensor], None],
        state: StateOfParameter | None = None,
    ) -> PagedTensor:
        at = torch.device("cpu")
        made: PagedTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=at)
        made.read, made.write, made.state = read, write, state
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.is_pinned.default:
            return False
        raise ConfigError(
            f"{func} was called on a tensor in pages that is to be saved or loaded.",
            "Give dcp.save planner=SavePlanner() and dcp.load planner=LoadPlanner(), of "
            "infinity.integrations.dcp; async_save cannot be used.",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PagedTensor({list(self.shape)}, {self.dtype})"


class StateOfParameter:
    """The optimizer's state of one parameter, of which planners read and write one entry at a time.

    The entries that are read of it together are copies of one moment, each given once. Those that are written
    replace the state when the last of them has come.
    """

    def __init__(self, optimizer: PagedOptimizer, parameter: PagedParameter) -> None:
        self._optimizer = optimizer
        self._parameter = parameter
        self._copies: dict[str, Tensor] = {}
        self._written: dict[str, Tensor] = {}
        self.awaited: set[str] = set()
        """Names of the entries that will be written."""

    @property
    def exists(self) -> bool:
        """Whether the parameter has a state."""
        return self._parameter in self._optimizer.state

    def read(self, name: str) -> Tensor:
        """Return a copy of an entry, on the CPU."""
        found = self._copies.pop(name, None)
        if found is None:
            self._copies = self._optimizer.state.copies(self._parameter)
            found = self._copies.pop(name)
        return found

    def write(self, name: str, value: Tensor) -> None:
        """Take an entry's new value."""
        self._written[name] = value
        if self._written.keys() == self.awaited:
            self._optimizer.state[self._parameter] = self._written
            self._written = {}


class _Group(dict[str, Any]):
    """The options of a param group with the names of its parameters. Options that are set are set in the
    optimizer's group, too.
    """

    def __init__(self, group: dict[str, Any], names: list[str]) -> None:
        super().__init__({**group, "params": names})
        self._group = group

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if name != "params":
            self._group[name] = value


def get_state_dict(
    model: nn.Module, optimizer: PagedOptimizer | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what torch's get_state_dict of `torch.distributed.checkpoint.state_dict` returns, with a
    PagedTensor for each tensor in pages.

    model: is offloaded. optimizer: `runtime.optimizer`, or None, whose dictionary is empty. Buffers are the
    model's own tensors. Raises ConfigError with several ranks, and for modules with extra states.
    """
    if several_ranks(None):
        raise ConfigError(
            "A run of several ranks was to be saved or loaded by tensors of one rank.",
            "Use runtime.save(path) and runtime.load(path), or torch's own get_state_dict.",
        )
    for path, _ in modules_with_extra_state(model):
        raise ConfigError(
            f"The module {path} has an extra state, which is not saved one tensor at a time.",
            "Use runtime.save(path) and runtime.load(path), or torch's own get_state_dict.",
        )
    tensors: dict[str, Any] = {}
    names: dict[int, str] = {}
    for each in persistent(model).values():
        for name in each.names:
            tensors[name] = (
                _of_parameter(each.tensor) if isinstance(each.tensor, PagedParameter) else each.tensor
            )
        names[id(each.tensor)] = each.names[0]
    if optimizer is None:
        return tensors, {}
    states, groups = {}, []
    for group in optimizer.param_groups:
        members = [names[id(each)] for each in group["params"]]
        groups.append(_Group(group, members))
        for name, each in zip(members, group["params"], strict=True):
            if each.requires_grad:
                states[name] = _of_state(optimizer, each)
    return tensors, {"state": states, "param_groups": groups}


def _of_parameter(parameter: PagedParameter) -> PagedTensor:
    place = parameter._place

    @torch.no_grad()
    def write(value: Tensor) -> None:
        parameter.copy_(value)

    return PagedTensor(
        parameter.shape, parameter.dtype, read=lambda: place.pager.copy(place, "cpu"), write=write
    )


def _of_state(optimizer: PagedOptimizer, parameter: PagedParameter) -> dict[str, PagedTensor]:
    state = StateOfParameter(optimizer, parameter)

    def entry(name: str, shape: Sequence[int]) -> PagedTensor:
        return PagedTensor(
            shape,
            torch.float32,
            read=lambda: state.read(name),
            write=lambda value: state.write(name, value),
            state=state,
        )

    shapes: dict[str, Sequence[int]] = {"step": ()} if optimizer._rule.counts_steps else {}
    shapes |= {name: parameter.shape for name in optimizer._rule.moments}
    if parameter.dtype != torch.float32:
        shapes["master"] = parameter.shape
    return {name: entry(name, shape) for name, shape in shapes.items()}


class SavePlanner(DefaultSavePlanner):
    """Copies a tensor from its pages when it is written."""

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Leave out the states of parameters that have none."""
        super().set_up_planner(state_dict, *args, **kwargs)
        self._heap = HeapGuard(machine.resident_bytes() + _HOLES)
        self.state_dict = {
            name: value
            for name, value in self.state_dict.items()
            if not (isinstance(value, PagedTensor) and value.state is not None and not value.state.exists)
        }

    def lookup_object(self, index: Any) -> Any:
        """Return the object to be written, for a PagedTensor a copy of the tensor."""
        found = super().lookup_object(index)
        if not isinstance(found, PagedTensor):
            return found
        gc.collect(1)  # torch.save of torch 2.6 leaves what it has written in a circle
        self._heap.allocated(found.nbytes)
        return found.read()


class LoadPlanner(DefaultLoadPlanner):
    """Writes a tensor to its pages when it has been read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read: dict[str, tuple[Tensor, int]] = {}
        """Name -> a tensor that is being read, and the number of its elements that are still to come."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Await those entries of optimizer states that the checkpoint has, after all parameters."""
        super().set_up_planner(state_dict, metadata, *args, **kwargs)
        self._heap = HeapGuard(machine.resident_bytes() + _HOLES)
        first, then = {}, {}
        for name, value in self.state_dict.items():
            state = value.state if isinstance(value, PagedTensor) else None
            if state is None:
                first[name] = value
            elif name in metadata.state_dict_metadata:
                then[name] = value
                state.awaited.add(str(self.mappings[name][-1]))
        self.state_dict = first | then

    def resolve_tensor(self, read_item: Any) -> Tensor:
        """Return the part of a new tensor in RAM into which `read_item` is read."""
        name = read_item.dest_index.fqn
        paged = self.state_dict[name]
        if not isinstance(paged, PagedTensor):
            part: Tensor = super().resolve_tensor(read_item)
            return part
        if name not in self._read:
            self._read[name] = torch.empty(paged.shape, dtype=paged.dtype), paged.numel()
        part = self.transform_tensor(read_item, self._read[name][0])
        return part

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        """Write a tensor to its pages when its last part has been read."""
        name = read_item.dest_index.fqn
        if name not in self._read:
            return
        whole, left = self._read.pop(name)
        left -= math.prod(read_item.lengths)
        if left:
            self._read[name] = whole, left
        else:
            self.state_dict[name].write(whole)
            self._heap.allocated(whole.nbytes)
