"""Arrays for tests of updates on a device, and helpers that run the device's or the CPU's kernels on them."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from cpu_adam_cases import clones, split
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infinity.cpu_adam import BLOCK, Gradient, Segment, ThreadPool, Update
from infinity.device_update.kernels import Kernels
from infinity.device_update.table import DeviceChunk, WorkspaceSize
from infinity.device_update.update import DeviceUpdates, ParameterUpdate
from infinity.formats.encodings import FIRST_SPAN, SECOND_SPAN, encode

FORMS = ("fp32", "bf16", "int8")
MASTERS = ("fp32", "split", "fp16", "bf16 copy", "fp32 copy")
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
Arrays = dict[str, torch.Tensor]


class Counted(Kernels):
    """Kernels that append the name of every kernel that is launched to the list `launched`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, ())
        self.launched: list[str] = []

    def launch(self, name: str, warps: int, arguments: bytes, kinds: Any = frozenset()) -> None:
        self.launched.append(name)
        assert len(arguments) <= 4096  # bytes that every device takes by value
        super().launch(name, warps, arguments, kinds)


class Allocations(TorchDispatchMode):
    """A dispatch mode that lists in `found` the tensors with new storage that torch operations make.

    Each entry is (name of the operation, bytes of the tensor). Operations outside of its `with` do not count.
    """

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


@functools.cache
def kernels(device: str) -> Counted:
    return Counted(torch.device(device))


def workspace_bytes(chunks: Sequence[DeviceChunk]) -> int:
    """Return the bytes of workspace that updates of these chunks need in addition to the chunks' arrays.

    chunks: infinity.device_update.table.DeviceChunk.
    """
    segments = [each for chunk in chunks for each in chunk.work.segments]
    return WorkspaceSize(
        pieces=len(segments),
        blocks=sum(-(-each.count // BLOCK) for each in segments),
    ).nbytes


def opened(chunks: Sequence[DeviceChunk], device: str) -> tuple[DeviceUpdates, torch.Tensor]:
    """Make the DeviceUpdates of these chunks, and return (updates, their workspace).

    Each byte of the workspace is 0xFF at first, so that a result that depends on its content is noticed.
    """
    nbytes = workspace_bytes(chunks)
    kernels(device).launched.clear()
    memory = torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device)
    return DeviceUpdates(chunks, memory, kernels(device)), memory


def on_device(
    arrays: Arrays,
    device: str,
    *,
    segments: Sequence[Segment],
    hypers: Sequence[Any],
    scale: float = 1.0,
    parameters: Sequence[Hashable] = (),
) -> Arrays:
    """Copy the arrays to the device, update them there once, and return the results as copies on the CPU.

    segments, hypers, scale: as for cpu_adam.Update. parameters: for each segment, any value that identifies
    the parameter to which it belongs. By default each segment is a parameter of its own.
    """
    there = {name: each.to(device, copy=True) for name, each in arrays.items()}
    whose = parameters or range(len(segments))
    updates, _memory = opened([DeviceChunk(Update(**there, segments=segments, hypers=[]), whose)], device)
    changes = {
        each: ParameterUpdate(hypers[segment.hyper], segment.seed)
        for each, segment in zip(whose, segments, strict=True)
    }
    updates.update(changes, scale)
    return {name: each.cpu() for name, each in there.items()}


def on_cpu(arrays: Arrays, **work: Any) -> Arrays:
    """Copy the arrays, update the copies once by the CPU's kernels, and return the copies.

    work: the other arguments of cpu_adam.Update.
    """
    there = clones(arrays)
    with ThreadPool(threads=1) as pool:
        pool.run(Update(**there, **work))
    return there


def check(now: Arrays, expected: Arrays) -> None:
    """Assert that `now` has every array of `expected` under the same name, bit for bit."""
    for name, each in expected.items():
        one, other = now[name].view(torch.uint8), each.view(torch.uint8)
        assert torch.equal(one, other), f"{name}: {int((one != other).sum())} bytes differ"


def stored(plain: Arrays, form: str, master: str = "fp32") -> Arrays:
    """Convert the float32 states and the gradient in `plain` to the tensors that cpu_adam.Update takes.

    form: the format of the moments, one of FORMS. master: the format of the parameters, one of MASTERS.
    """
    found = {"grad": plain["grad"].clone(), "parameter": plain["parameter"].clone()}
    for name, span in (("first_moment", FIRST_SPAN), ("second_moment", SECOND_SPAN)):
        if form == "int8":
            found[name], found[name.replace("moment", "scale")] = encode(plain[name], span)
        else:
            found[name] = plain[name].to(torch.bfloat16 if form == "bf16" else torch.float32)
    if master == "split":
        found["parameter"], found["remainder"] = split(plain["parameter"])
    elif master != "fp32":
        dtypes = {"fp16": torch.float16, "bf16 copy": torch.bfloat16, "fp32 copy": torch.float32}
        found["copy"] = torch.zeros(plain["parameter"].numel(), dtype=dtypes[master])
    return found


def squares(pieces: Sequence[torch.Tensor]) -> list[float]:
    """Return the sum of squares of each block of BLOCK elements of a gradient, as the CPU computes it.

    pieces: the pieces of the gradient, one for each chunk in which the parameter lies, in memory order. All
    but the last have a multiple of BLOCK elements.
    """
    with ThreadPool(threads=1) as pool:
        works = [Gradient(grad=each, squares=True, segments=[Segment(0, each.numel())]) for each in pieces]
        return [sum_ for work in works for sum_ in pool.run(work).blocks[0].tolist()]
