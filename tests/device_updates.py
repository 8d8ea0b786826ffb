"""Updates by the device's kernels, whose launches and allocations are seen."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infinity.device_kernels import Kernels
from infinity.device_table import Chunk, size_of
from infinity.device_update import DeviceUpdates


class Counted(Kernels):
    """Kernels that keep the names of what was launched."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, ())
        self.launched: list[str] = []

    def launch(self, name: str, warps: int, arguments: bytes, kinds: Any = frozenset()) -> None:
        self.launched.append(name)
        assert len(arguments) <= 4096  # what every device takes by value
        super().launch(name, warps, arguments, kinds)


@functools.cache
def kernels(device: str) -> Counted:
    return Counted(torch.device(device))


def opened(chunks: Sequence[Chunk], device: str) -> tuple[DeviceUpdates, torch.Tensor]:
    """In memory filled with ones: nothing may rest on what it held."""
    nbytes = size_of(chunks).nbytes
    kernels(device).launched.clear()
    memory = torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device)
    return DeviceUpdates(chunks, memory, kernels(device)), memory


class Allocations(TorchDispatchMode):
    """Bytes of the tensors that operations inside made of new storages."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {
            each.untyped_storage().data_ptr()
            for each in tree_leaves((args, kwargs))
            if isinstance(each, torch.Tensor)
        }
        made = func(*args, **kwargs)
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given:
                self.found.append((str(func), each.nbytes))
        return made
