"""Exports of small models: runtimes to export from, reading an export back, and its expected content."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import budget_for
from safetensors.torch import load_file
from torch import nn

import infinity
from infinity.aio import Faults
from infinity.system.disk_files import injected


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The directory to export to, which does not exist yet. Makes `swap` beside it, for runtimes' pages."""
    (tmp_path / "swap").mkdir()
    return tmp_path / "out"


@contextlib.contextmanager
def paged(
    model: nn.Module,
    out: Path,
    *,
    home: str = "nvme",
    compute: str = "bf16",
    keep: tuple[str, ...] = (),
    optimizer: Callable[..., torch.optim.Optimizer] | None = torch.optim.SGD,
    device: str = "cpu",
    faults: Faults | None = None,
    **options: Any,
) -> Iterator[Any]:
    """Offload the model with its pages at `home`, and yield the runtime. Pages lie in `swap` beside `out`.

    home: one of HOMES in homes.py. compute, keep: fields of Precision. optimizer: the optimizer's
    class, or None for inference. faults: injects faults into the runtime's I/O. options: of `offload`.
    """
    made = None if optimizer is None else optimizer(model.parameters(), lr=0.05)
    precision = infinity.Precision(compute=compute, keep=keep)
    swap = out.parent / "swap"
    budget = budget_for(home, model, made, swap, precision, device=device)
    with (
        injected(faults or Faults()),
        infinity.offload(
            model, made, budget=budget, precision=precision, device=device, **options
        ) as runtime,
    ):
        yield runtime


def read(directory: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of an export, and return them by name. If it has an index file, that is used."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return load_file(directory / "model.safetensors")
    places = json.loads(index.read_text())["weight_map"]
    shards = {file: load_file(directory / file) for file in set(places.values())}
    assert sorted(name for shard in shards.values() for name in shard) == sorted(places)
    return {name: shards[file][name] for name, file in places.items()}


def seen(model: nn.Module, runtime: Any) -> dict[str, torch.Tensor]:
    """Return, by name, the contiguous tensors that an export of this model with dtype="compute" must hold.

    They are the values that the model computes with. A tied parameter has the first of its names.
    """
    found = {name: buffer.detach().clone() for name, buffer in persistent(model).items()}
    first = {id(each): name for name, each in model.named_parameters()}
    for module in model.modules():
        with runtime.full_parameters(Owner(module)), torch.no_grad():
            for each in module.parameters(recurse=False):
                found.setdefault(first[id(each)], each.detach().clone())
    return {name: each.contiguous().cpu() for name, each in found.items()}


class Owner(nn.Module):
    """A module that holds only the parameters which `module` owns itself, not those of its children.

    Passed to `full_parameters`, it brings few pages into memory. The pages of all children together would not
    fit the smallest budgets.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._parameters = module._parameters


def persistent(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each for name, each in model.named_buffers() if name in model.state_dict()}


def masters(model: nn.Module, runtime: Any) -> dict[str, torch.Tensor]:
    """Return the value of every parameter by name, read through the runtime's internals and not by an export.

    A trainable parameter is returned as its fp32 master. A frozen one is returned in float32 if it is of a
    floating dtype, and otherwise as it is.
    """
    states, found = runtime._components.states, {}
    for name, each in model.named_parameters():
        place = each._place
        layout = place.page.layout.parameters[place.index]
        values = runtime.training_step._values(place)
        if layout.trainable:
            values = states.master(place.page.index, place.index, values)
        elif values.is_floating_point():
            values = values.float()
        found[name] = values.as_strided(layout.shape, layout.stride).contiguous()
    return found
