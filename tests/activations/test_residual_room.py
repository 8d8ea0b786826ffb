"""The room of residual pages: copies keep their order with the kernels that use the same device memory."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from kernel_machine import OLD, PAGE, SEEN, Machine, is_all

from infinity.activations.residual_room import ResidualRoom

LATER = 9


@pytest.fixture(params=range(3))
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    made = Machine(request.param)
    yield made
    made.device.reset(0)  # ends all work before the memory is freed


def room_of(machine: Machine) -> tuple[ResidualRoom, Any]:
    """A room that copies, and its link."""
    link = machine.link()
    store: Any = SimpleNamespace(link=link, copy_down=link.to_host)
    store.plan = SimpleNamespace(device=torch.device("cpu"))
    store.device = SimpleNamespace(shares_host=False)
    store.copy_up = lambda into, source, after=None: link.to_device(into, source, 0, after=after)
    return ResidualRoom(store, cast(Any, None), None, cast(Any, None)), link


def test_compute_uses_memory_again_after_it_was_copied(machine: Machine) -> None:
    room, link = room_of(machine)
    ram, saved = machine.memory(SEEN), machine.memory(OLD)
    machine.kernel_writes(saved, PAGE)
    machine.device.hold(link.streams["down"])
    room.let_go(room.down(ram, saved))
    machine.kernel_writes(saved, LATER)
    machine.device.let_go(link.streams["down"])
    machine.run()
    link.drain()
    assert is_all(ram, PAGE)
    assert machine.device.violations == []


def test_a_page_comes_back_to_memory_that_no_kernel_uses_any_more(machine: Machine) -> None:
    room, link = room_of(machine)
    brought = machine.memory(SEEN)
    machine.never_ends()
    machine.kernel_writes(brought, LATER)  # of a tensor that was there before
    room.let_go(room.up(brought, machine.memory(PAGE)))
    copied = link.streams["up (urgent)"].record()
    assert not any(copied.done() for _ in range(500))
    seen = machine.kernel_reads(brought)
    machine.run()
    assert is_all(seen, PAGE)
    assert machine.device.violations == []
