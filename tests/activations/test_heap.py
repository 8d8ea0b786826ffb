"""Tests of the heap guard, which calls malloc_trim when the process's resident memory exceeds a limit.

The call gives free memory inside the C library's heap back to the kernel.
"""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import infinity
from infinity import build
from infinity.activations import heap
from infinity.activations.heap import HeapGuard
from infinity.system import machine
from infinity.tiers import Tier

MIB = 1 << 20


@pytest.fixture
def trims(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace malloc_trim, and return a list to which each call appends the resident memory in bytes."""
    found: list[int] = []

    class Library:
        @staticmethod
        def malloc_trim(pad: int) -> int:
            found.append(machine.resident_bytes())
            return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    return found


def at(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(machine, "resident_bytes", lambda: nbytes)


def test_only_memory_above_the_limit_is_trimmed(trims: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    guard = HeapGuard(100 * MIB)
    at(monkeypatch, 100 * MIB)
    guard.check()
    assert trims == []
    at(monkeypatch, 101 * MIB)
    guard.check()
    assert trims == [101 * MIB]


def test_memory_of_others_is_not_tried_again_and_again(
    trims: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = HeapGuard(100 * MIB)
    at(monkeypatch, 200 * MIB)  # memory stays as large
    for _ in range(5):
        guard.check()
    assert len(trims) == 1
    at(monkeypatch, 200 * MIB + heap._SLACK + 1)
    guard.check()
    assert len(trims) == 2
    at(monkeypatch, 99 * MIB)  # the memory went away: from now on the limit counts again
    guard.check()
    at(monkeypatch, 101 * MIB)
    guard.check()
    assert len(trims) == 3


def test_looks_are_as_far_apart_as_allocations_are_large(
    trims: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = HeapGuard(100 * MIB)
    at(monkeypatch, 101 * MIB)
    guard.allocated(heap._BETWEEN_LOOKS - 1)
    assert trims == []
    guard.allocated(1)
    assert len(trims) == 1


def test_memory_is_looked_at_where_a_forward_ends_and_in_forward_and_backward() -> None:
    calls: list[object] = []

    class Guard:
        allocated = staticmethod(calls.append)

        @staticmethod
        def check() -> None:
            calls.append("look")

    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with infinity.offload(model, optimizer, device="cpu") as runtime:
        saved_bytes = runtime._components.pager.saved_bytes
        saved_bytes._heap, saved_bytes.guards = Guard(), True  # type: ignore[assignment]
        with torch.no_grad():
            model(torch.randn(8, 16))
        assert calls == 3 * ["look"], "before each layer and at the end"
        calls.clear()
        loss = model(torch.randn(8, 16)).sum()
        saved = calls.copy()
        assert saved[-1] == "look" and len(saved) > 2
        loss.backward()
        assert sorted(calls[len(saved) :]) == sorted(saved[:-1])


def test_memory_is_looked_at_where_a_block_runs_again() -> None:
    found: dict[str, int] = {}
    for policy in ("keep", "recompute"):
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(3)]
        model = nn.Sequential(*blocks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with infinity.offload(model, optimizer, device="cpu", activations=policy) as runtime:
            loss, calls = model(torch.randn(8, 16)).sum(), list[int]()
            saved_bytes = runtime._components.pager.saved_bytes
            saved_bytes._heap = SimpleNamespace(allocated=calls.append)  # type: ignore[assignment]
            saved_bytes.guards = True
            loss.backward()
            found[policy] = sum(calls)
    assert found["recompute"] >= found["keep"] > 0


def test_without_a_limit_nothing_happens(trims: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, 1 << 50)
    guard = HeapGuard(None)
    guard.check()
    guard.allocated(1 << 40)
    assert trims == []


def test_without_malloc_trim_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    at(monkeypatch, 1 << 50)
    HeapGuard(1).check()


def test_real_holes_are_given_back() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        pytest.skip("the C library has no malloc_trim")
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.free.argtypes = [ctypes.c_void_p]
    size, count = 100 << 10, 1000  # below any mmap threshold
    blocks = [library.malloc(size) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    before = machine.process_memory().resident
    for block in blocks[:-1]:
        library.free(block)
    HeapGuard(0).check()
    after = machine.process_memory().resident
    library.free(blocks[-1])
    assert before - after > size * count // 2


@pytest.mark.parametrize(
    "host, margin", [("40MiB", 10 * MIB), ("160MiB", 12 * MIB), ("224MiB", 14 * MIB), ("4GiB", 16 * MIB)]
)
def test_a_budget_is_kept_but_for_a_margin(
    host: str, margin: int, trims: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Linear(8, 8), torch.zeros(2, 8)
    made = infinity.plan(model, None, budget=infinity.Budget(host=host), example_inputs=(x,), device="cpu")
    monkeypatch.setattr(machine, "process_memory", lambda: machine.ProcessMemory(resident=MIB, peak=MIB))
    guard = build._guard(made)
    limit = MIB + made.budgets[Tier.HOST] - margin
    for resident, count in ((limit, 0), (limit + 1, 1)):
        at(monkeypatch, resident)
        guard.check()
        assert len(trims) == count


def test_a_plan_that_knows_no_activations_has_no_limit(
    trims: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages fill its budget, so memory in use exceeds the budget, which no trim can keep."""
    made = infinity.plan(nn.Linear(8, 8), None, budget=infinity.Budget(host="64MiB"), device="cpu")
    guard = build._guard(made)
    at(monkeypatch, 1 << 40)
    guard.check()
    assert trims == []
