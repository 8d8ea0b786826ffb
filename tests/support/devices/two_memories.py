"""A check that no torch operation mixes host memory with the memory of an emulated device.

The memory of an emulated device is RAM, so torch takes operands from there and from the host together. With a
CUDA device it raises an error.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import infinity
from infinity.tiers import Tier, arena, device
from infinity.tiers.copy_streams import CopyStreams
from infinity.tiers.tier import MemoryTier

PACKAGE = Path(infinity.__file__).parent

_BY_INDEX = ("aten::index", "aten::_unsafe_index")
"""Prefixes of operations whose indices may be in host memory while all else is on a device."""


class TwoMemories:
    """Knows which tensors are in the memory of an emulated device, and which in host memory.

    The memory of the tiers is known. The result of an operation is where its operands are. What is copied
    over the link is on its way's ends. Any other tensor, such as an input of the model, is where the first
    operation finds it that uses it with a tensor whose memory is known. `Tensor.cpu()` copies to the host.
    Tensors without dimensions are left out, because CUDA takes them from the host.
    """

    def __init__(self) -> None:
        self.mixed: set[str] = set()
        """The operations that mixed the two, each with the line of the package that called it."""
        self.seen = {Tier.DEVICE: 0, Tier.HOST: 0}
        """How many operations were in device memory, and how many in host memory."""
        self._regions: dict[int, tuple[int, int, Tier]] = {}
        self._storages: dict[int, Tier] = {}

    @contextlib.contextmanager
    def checked(self) -> Iterator[TwoMemories]:
        """Within the `with` statement, check the operations of this thread, and of threads that begin.

        Asserts at the end that none has mixed the two memories, and that some were in each. Enter it inside
        of `EmulatedDevice.in_use`.
        """
        run, close = threading.Thread.run, MemoryTier.close

        def closed(tier: MemoryTier) -> None:
            if not tier.closed:
                self._regions.pop(tier.region.address, None)  # other tensors may come to lie there
            close(tier)

        def copied_to_host(tensor: torch.Tensor) -> torch.Tensor:
            if self.tier_of(tensor) is not Tier.DEVICE:
                return tensor
            with torch._C._DisableTorchDispatch():
                found = tensor.clone()
            self.put(found, Tier.HOST)
            return found

        def checking(thread: threading.Thread) -> None:
            with _Mode(self):
                run(thread)

        with (
            mock.patch.object(arena, "map_ram", self._mapping(arena.map_ram)),
            mock.patch.object(device, "map_ram", self._mapping(device.map_ram)),
            mock.patch.object(MemoryTier, "close", closed),
            mock.patch.object(CopyStreams, "_copy", self._copying(CopyStreams._copy)),
            mock.patch.object(threading.Thread, "run", checking),
            mock.patch.object(torch.Tensor, "cpu", copied_to_host),
            _Mode(self),
        ):
            yield self
        assert not self.mixed, sorted(self.mixed)
        assert all(self.seen.values()), "one of the two memories is not in use"

    def tier_of(self, tensor: torch.Tensor) -> Tier | None:
        """The memory in which a tensor lies: Tier.DEVICE, Tier.HOST, or None if that is not known."""
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is None and storage.nbytes():
            address = storage.data_ptr()
            for start, end, tier in list(self._regions.values()):
                if start <= address < end:
                    return tier
        return known

    def put(self, tensor: torch.Tensor, tier: Tier) -> None:
        """Note where a tensor lies, unless that is known."""
        if self.tier_of(tensor) is None:
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = tier
            weakref.finalize(storage, self._storages.pop, storage._cdata, None)

    def ran(self, function: Any, arguments: Any, results: Any) -> None:
        """Note an operation of torch that has run."""
        operands = [each for each in tree_leaves(arguments) if isinstance(each, torch.Tensor) and each.ndim]
        tiers = {tier for each in operands if (tier := self.tier_of(each)) is not None}
        if len(tiers) > 1 and function._schema.name.startswith(_BY_INDEX):
            tiers = {Tier.DEVICE}  # where the values are
        if len(tiers) > 1:
            self.mixed.add(f"{function} {_line_of_the_package()}")
        for tier in tiers if len(tiers) == 1 else ():
            self.seen[tier] += 1
            for each in (*operands, *tree_leaves(results)):
                if isinstance(each, torch.Tensor) and not each.is_meta:
                    self.put(each, tier)

    def _mapping(self, map_ram: Any) -> Any:
        def mapped(tier: Tier, *arguments: Any, **options: Any) -> Any:
            region = map_ram(tier, *arguments, **options)
            self._regions[region.address] = (region.address, region.address + region.nbytes, tier)
            return region

        return mapped

    def _copying(self, copy: Any) -> Any:
        def copied(link: CopyStreams, stream: Any, pairs: Any, piece: int) -> Any:
            down = stream is link.streams["down"]
            for into, source in pairs:
                self.put(into, Tier.HOST if down else Tier.DEVICE)
                if down:
                    self.put(source, Tier.DEVICE)
            return copy(link, stream, pairs, piece)

        return copied


class _Mode(TorchDispatchMode):
    def __init__(self, memories: TwoMemories) -> None:
        super().__init__()
        self._memories = memories

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self._memories.ran(func, (args, kwargs), results)
        return results


def _line_of_the_package() -> str:
    """FILE:LINE of the innermost caller in the package, or in the test if there is none in the package."""
    frame = sys._getframe(2)
    outside = ""
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE):
            return f"{file.relative_to(PACKAGE)}:{frame.f_lineno}"
        if not outside and "torch" not in file.parts and file.name != Path(__file__).name:
            outside = f"{file.name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return outside
