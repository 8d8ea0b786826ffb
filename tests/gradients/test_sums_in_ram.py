"""Sums in RAM: copies down and up keep their order with the kernels that use the same memory.

The streams of an emulated device are held, so that what waits for them is late, and what does not is early.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from kernel_machine import OLD, SIZE, Machine, is_all
from torch.utils._python_dispatch import TorchDispatchMode

from infinity.gradients.sums_in_ram import SumsInRam
from infinity.pages.store import Store
from infinity.tiers import PAGE_ALIGNMENT
from infinity.tiers.arena import HostArena

BEFORE = 5
"""What earlier kernels write to memory that torch's allocator gives out again."""
GRADIENT, LATER = 7, 9


class _UsedBefore(TorchDispatchMode):
    """Memory that `torch.empty` returns was used by a kernel that compute has not run yet."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.empty.memory_format:
            self._machine.kernel_writes(result, BEFORE)
        return result


class Rig:
    """Sums in RAM with room for two gradients, and a link whose streams can be held."""

    def __init__(self, seed: int, arena: HostArena) -> None:
        self.machine = Machine(seed)
        self.link = self.machine.link()
        store = SimpleNamespace(host=arena, link=self.link, copy_down=self.link.to_host)
        store.copy_up = lambda into, source, after: self.link.to_device(into, source, 0, after=after)
        self.sums = SumsInRam(cast(Store, store), arena.region.nbytes, threading.RLock())
        self.memory: list[torch.UntypedStorage] = []
        """All device memory. An allocator keeps what is freed, too, as queued kernels may use it."""

    def gradient(self, value: int = GRADIENT) -> torch.Tensor:
        """A gradient that a queued kernel computes."""
        made = torch.full((SIZE,), OLD, dtype=torch.int32)
        self.memory.append(made.untyped_storage())
        self.machine.kernel_writes(made, value)
        return made

    def put(self, gradient: torch.Tensor) -> torch.Tensor:
        found = self.sums.put(gradient)
        assert found is not None
        return found

    def get(self, there: torch.Tensor) -> torch.Tensor:
        like = torch.empty(SIZE, dtype=torch.int32)
        with _UsedBefore(self.machine):
            found = self.sums.get(there, like)
        self.memory.append(found.untyped_storage())
        return found

    def hold(self, name: str) -> None:
        self.machine.device.hold(self.link.streams[name])

    def finish(self) -> None:
        """Let all streams go on, and wait for them. Asserts that all accesses to memory were in order."""
        for stream in self.link.streams.values():
            self.machine.device.let_go(stream)
        self.machine.run()
        self.link.drain()
        assert self.machine.device.violations == []


@pytest.fixture(params=range(3))
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with HostArena(2 * PAGE_ALIGNMENT) as arena:
        made = Rig(request.param, arena)
        yield made
        made.machine.device.reset(0)  # ends all work before the memory is freed


def test_a_gradient_is_let_go_once_compute_waits_for_its_copy(rig: Rig) -> None:
    rig.hold("down")
    first = rig.gradient()
    storage = first.untyped_storage()
    there = rig.put(first)
    del first
    assert torch._C._storage_Use_Count(storage._cdata) > 1
    rig.put(rig.gradient())
    assert torch._C._storage_Use_Count(storage._cdata) == 1
    again = torch.empty(0, dtype=torch.int32).set_(storage)  # as the allocator gives the memory out again
    rig.machine.kernel_writes(again, LATER)
    rig.finish()
    assert is_all(there.view(torch.int32), GRADIENT)


def test_a_gradient_comes_back_after_it_has_left(rig: Rig) -> None:
    there = rig.put(rig.gradient())
    rig.hold("down")
    seen = rig.machine.kernel_reads(rig.get(there))
    rig.finish()
    assert is_all(seen, GRADIENT)


def test_a_gradient_comes_back_to_memory_that_no_kernel_uses_any_more(rig: Rig) -> None:
    there = rig.put(rig.gradient())
    rig.machine.run()
    rig.machine.never_ends()
    found = rig.get(there)
    copied = rig.link.streams["up (urgent)"].record()
    assert not any(copied.done() for _ in range(500))
    seen = rig.machine.kernel_reads(found)
    rig.finish()
    assert is_all(seen, GRADIENT)


def test_ram_is_used_again_after_its_gradient_has_come_back(rig: Rig) -> None:
    there = rig.put(rig.gradient())
    rig.put(rig.gradient())
    rig.hold("up (urgent)")
    found = rig.get(there)
    del there
    there = rig.put(rig.gradient(LATER))
    seen = rig.machine.kernel_reads(found)
    rig.finish()
    assert is_all(seen, GRADIENT)
    assert is_all(there.view(torch.int32), LATER)


def test_without_room_a_gradient_stays(rig: Rig) -> None:
    kept = [rig.put(rig.gradient()) for _ in range(2)]
    assert rig.sums.put(rig.gradient()) is None
    kept.pop()
    assert rig.sums.put(rig.gradient()) is not None
