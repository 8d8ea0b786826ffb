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
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from infinity.api import several_ranks
from infinity.checkpoint.run_state import modules_with_extra_state
from infinity.checkpoint.safetensors_files import persistent
from infinity.errors import ConfigError
from infinity.model.tiled_parameter import is_paged, values_in_ram
from infinity.optim.paged_optimizer import PagedOptimizer


class PagedTensor(Tensor):
    """Represents a tensor in pages: has its shape and dtype, on the CPU, and no bytes."""

    parameter: Any
    """The paged or tiled parameter that this tensor represents, or whose state has it as an entry."""
    optimizer: Any
    """The PagedOptimizer that keeps the state; None if only parameters are saved or loaded."""
    entry: str
    """The name of the entry in the parameter's state; "" for the parameter itself."""

    @staticmethod
    def __new__(cls, parameter: Any, optimizer: PagedOptimizer | None, entry: str = "") -> PagedTensor:
        made: PagedTensor = Tensor._make_wrapper_subclass(
            cls,
            () if entry == "step" else parameter.shape,
            dtype=torch.float32 if entry else parameter.dtype,
            device=torch.device("cpu"),
        )
        made.parameter, made.optimizer, made.entry = parameter, optimizer, entry
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


class _ParamGroup(dict[str, Any]):
    """The options of a param group with the names of its parameters. Setting an option sets it in the
    optimizer's group, too.
    """

    def __init__(self, group: dict[str, Any], names: list[str]) -> None:
        super().__init__(group, params=names)
        self._group = group

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if name != "params":
            self._group[name] = value


def get_state_dict(
    model: nn.Module, optimizer: PagedOptimizer | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the result of torch.distributed.checkpoint.state_dict.get_state_dict, with a PagedTensor for
    each tensor in pages.

    model: an offloaded model. optimizer: `runtime.optimizer`, or None for an empty second dictionary. Buffers
    are the model's own tensors. Raises ConfigError with several ranks, and for modules with extra states.
    """
    extra = [path for path, _ in modules_with_extra_state(model)]
    if extra or several_ranks(None):
        raise ConfigError(
            f"The module {extra[0]} has an extra state, which is not saved one tensor at a time."
            if extra
            else "A run of several ranks was to be saved or loaded by tensors of one rank.",
            "Use runtime.save(path) and runtime.load(path), or torch's own get_state_dict.",
        )
    tensors: dict[str, Any] = {}
    names: dict[int, str] = {}
    for each in persistent(model).values():
        here = not is_paged(each.tensor)
        tensors |= {name: each.tensor if here else PagedTensor(each.tensor, optimizer) for name in each.names}
        names[id(each.tensor)] = each.names[0]
    if optimizer is None:
        return tensors, {}
    rule, states, groups = optimizer._rule, {}, []
    for group in optimizer.param_groups:
        groups.append(_ParamGroup(group, [names[id(each)] for each in group["params"]]))
        for each in group["params"]:
            if each.requires_grad:
                entries = ["step"] * rule.counts_steps + [*rule.moments]
                entries += ["master"] * (each.dtype != torch.float32)
                states[names[id(each)]] = {name: PagedTensor(each, optimizer, name) for name in entries}
    return tensors, {"state": states, "param_groups": groups}


class SavePlanner(DefaultSavePlanner):
    """Copies a tensor from its pages when it is written."""

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Leave out optimizer states that do not exist yet."""
        super().set_up_planner(state_dict, *args, **kwargs)
        self._copies: dict[int, dict[str, Tensor]] = {}
        """id() of a parameter -> copies of those entries of its state that are still to be written."""
        for name, value in list(self.state_dict.items()):
            if (
                isinstance(value, PagedTensor)
                and value.entry
                and value.parameter not in value.optimizer.state
            ):
                del self.state_dict[name]

    def lookup_object(self, index: Any) -> Any:
        """Return the object to write; for a PagedTensor a copy of the tensor."""
        found = super().lookup_object(index)
        if not isinstance(found, PagedTensor):
            return found
        gc.collect(1)  # torch.save of torch 2.6 leaves what it has written in a circle
        parameter = found.parameter
        if not found.entry:
            return values_in_ram(parameter)
        copies = self._copies.pop(id(parameter), None) or found.optimizer.state.copies(parameter)
        copy = copies.pop(found.entry)
        if copies:
            self._copies[id(parameter)] = copies
        return copy


class LoadPlanner(DefaultLoadPlanner):
    """Writes a parameter and its state to their pages once all their tensors have been read."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Leave out optimizer states that the checkpoint lacks, and sort the other entries by parameter."""
        super().set_up_planner(state_dict, metadata, *args, **kwargs)
        kept = {
            name: each
            for name, each in self.state_dict.items()
            if not getattr(each, "entry", "") or name in metadata.state_dict_metadata
        }
        self.state_dict = dict(sorted(kept.items(), key=lambda each: id(getattr(each[1], "parameter", None))))
        self._read: dict[int, dict[str, Tensor]] = {}
        """id() of a parameter -> the tensors read for it, by the name of the entry."""

    def create_local_plan(self) -> Any:
        """Plan the load, and count the tensors to read for each parameter and its state."""
        plan = super().create_local_plan()
        tensors = (self.state_dict[each.dest_index.fqn] for each in plan.items)
        self._left = Counter(id(each.parameter) for each in tensors if isinstance(each, PagedTensor))
        return plan

    def lookup_tensor(self, index: Any) -> Tensor:
        """Return the tensor to read into; for a PagedTensor a new one in RAM."""
        found: Tensor = super().lookup_tensor(index)
        if not isinstance(found, PagedTensor):
            return found
        read = self._read.setdefault(id(found.parameter), {})
        if found.entry not in read:
            read[found.entry] = torch.empty(found.shape, dtype=found.dtype)
        return read[found.entry]

    @torch.no_grad()
    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        paged = self.state_dict[read_item.dest_index.fqn]
        if not isinstance(paged, PagedTensor):
            return
        parameter = paged.parameter
        self._left[id(parameter)] -= 1
        if not self._left[id(parameter)]:
            read = self._read.pop(id(parameter))
            if "" in read:
                parameter.copy_(read.pop(""))  # before its master, which goes with these values only
            if read:
                paged.optimizer.state[parameter] = read
