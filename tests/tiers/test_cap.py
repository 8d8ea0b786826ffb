"""Tests of the limit on torch's CUDA allocator: how many bytes it allows, and the advice beyond the limit.

The limit is the sum of the device budgets of all runtimes, plus the bytes that were in use before. Torch is
given the limit as a fraction of the device's memory.
"""

from __future__ import annotations

import gc
import importlib
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from homes import needs_cuda, room_on
from small_runtime import two_layers
from torch import nn

import infinity
from infinity.build import _kept_by_others, _set_aside, bytes_set_aside
from infinity.planning import homes, planner, twin_flow
from infinity.planning.headroom import NO_HEADROOM
from infinity.tiers import Tier, device
from infinity.tiers.device import MemoryShare, advice, capped, fraction_of, left_of

api, build = importlib.import_module("infinity.api"), importlib.import_module("infinity.build")
GIB, MIB = 1 << 30, 1 << 20
DEVICE = torch.device("cuda", 7)


class FakeAllocator:
    """A fake of torch's allocator on a GPU of 16 GiB. It records its limits and out-of-memory observers."""

    TOTAL = 16 * GIB - 12345

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.limits: list[int] = []
        self.observers: list[Callable[..., None]] = []
        properties = SimpleNamespace(total_memory=self.TOTAL)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        patch.setattr(torch.cuda, "set_per_process_memory_fraction", self._set)
        patch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", self.observers.append, raising=False)

    def _set(self, fraction: float, device: torch.device) -> None:
        assert device == DEVICE
        assert 0 <= fraction <= 1
        self.limits.append(int(fraction * self.TOTAL))  # torch cuts the fraction off in the same way


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Any:
    device._watch.cache_clear()
    yield FakeAllocator(monkeypatch)
    device._watch.cache_clear()


@pytest.mark.parametrize("total", [FakeAllocator.TOTAL, 150_000_000_001, 85_899_345_920, (1 << 33) + 7])
def test_the_limit_is_not_a_byte_less_than_the_budgets(total: int) -> None:
    for budget in range(2 * MIB, total // 2, total // 977):
        limit = int(fraction_of(total, 3 * MIB, budget) * total)
        assert 0 <= limit - budget - 3 * MIB <= 512
    assert fraction_of(total, total, total) == 1.0


def test_runtimes_of_one_device_add_up(allocator: FakeAllocator) -> None:
    first, second = MemoryShare(2 * GIB, GIB), MemoryShare(3 * GIB, GIB)
    # Most of what the second runtime finds allocated belongs to the first.
    with capped(DEVICE, first, others=MIB), capped(DEVICE, second, others=GIB):
        pass
    assert allocator.limits == [2 * GIB + MIB, 5 * GIB + MIB, 2 * GIB + MIB, FakeAllocator.TOTAL]


def test_the_limit_goes_with_its_runtime_whatever_happens(allocator: FakeAllocator) -> None:
    with pytest.raises(KeyError), capped(DEVICE, MemoryShare(GIB, 0), others=0):
        raise KeyError
    assert allocator.limits[-1] == FakeAllocator.TOTAL


def test_out_of_memory_is_told_with_its_cure(allocator: FakeAllocator) -> None:
    for _ in range(2):
        with capped(DEVICE, MemoryShare(2 * GIB, GIB), others=0):
            (tell,) = allocator.observers  # attached once, since there is no way to detach it
            with pytest.warns(UserWarning, match="example_inputs") as caught:
                tell(DEVICE.index, 300 * MIB, 2 * GIB, 14 * GIB)
            (message,) = [str(each.message) for each in caught]
            assert "300 MiB" in message and "2 GiB" in message and "1 GiB to activations" in message
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # the observer raises nothing
                tell(DEVICE.index, 300 * MIB, 2 * GIB, 14 * GIB)
                tell(DEVICE.index + 1, 300 * MIB, 2 * GIB, 14 * GIB)
    with warnings.catch_warnings(record=True) as caught_after:
        warnings.simplefilter("always")
        tell(DEVICE.index, MIB, GIB, GIB)
    assert caught_after == []


def test_advice_names_what_is_left() -> None:
    assert "which leaves 512 MiB" in advice(MIB, MemoryShare(2 * GIB, GIB + 512 * MIB))


def test_a_device_without_a_budget_gives_all_but_a_margin() -> None:
    free = 139 * GIB
    found = left_of(free, 0)
    assert found % 4096 == 0 and 0.98 * free < found + 512 * MIB < free
    assert left_of(free - GIB, GIB) == found, "what torch holds and nothing lies in is free"
    assert left_of(100 * MIB, 0) == 0


class CpuAsCuda:
    """A device that claims to be a GPU and equals the CPU, so that tensors in RAM count as tensors on it."""

    type = "cuda"

    def __eq__(self, other: object) -> bool:
        return other == torch.device("cpu")

    def __hash__(self) -> int:
        return 0


def test_what_others_have_is_neither_parameters_nor_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It includes the free bytes of partly used segments, because the limit counts whole segments."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model.register_parameter("tied", model[0].weight)
    own = sum(each.nbytes for each in [*model.parameters(), *model.buffers()])
    statistics: dict[str, int] = {}
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: own + 1000)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: statistics)
    assert _kept_by_others(model, torch.device("cpu")) == 0
    assert _kept_by_others(model, torch.device("cuda", 0)) == own + 1000, "it is in RAM"
    assert _kept_by_others(model, CpuAsCuda()) == 1000  # type: ignore[arg-type]
    statistics["inactive_split_bytes.all.current"] = 20 * MIB
    assert _kept_by_others(model, CpuAsCuda()) == 20 * MIB + 1000  # type: ignore[arg-type]


class FullGpu:
    """A GPU of 16 GiB as torch tells of it: `allocated` bytes of a model, and no segment but the model's."""

    def __init__(self, patch: pytest.MonkeyPatch, allocated: int) -> None:
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (16 * GIB - allocated, 16 * GIB))
        patch.setattr(torch.cuda, "memory_reserved", lambda device: allocated)
        patch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)
        patch.setattr(torch.cuda, "memory_stats", lambda device: {})
        patch.setattr(twin_flow, "has_kernels", lambda device: False)
        patch.setattr(planner.Headroom, "of", lambda device: NO_HEADROOM)
        patch.setattr(api, "usable_device", lambda device: DEVICE)
        patch.setattr(api, "bytes_on", lambda model, device: allocated)


def test_a_model_on_the_device_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default budget has the bytes that the model itself takes there, because offload frees them."""
    FullGpu(monkeypatch, 6 * GIB)
    monkeypatch.setattr(homes, "_LARGEST_LANDING", 0)  # so that the arena does not depend on what RAM is free
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters())
    found = infinity.plan(model, optimizer, device="cuda")
    assert found.budgets[Tier.DEVICE] == left_of(16 * GIB, 0)
    assert bytes_set_aside(found, 6 * GIB) == 0, "there is room for the pages beside it"
    monkeypatch.setattr(build, "available_bytes", lambda device: found.device_tier_bytes - MIB)
    assert bytes_set_aside(found, 6 * GIB) == MIB
    assert bytes_set_aside(found, 0) == bytes_set_aside(found, MIB - 1) == 0
    monkeypatch.setattr(planner, "available_ram", lambda: found.arena_bytes + MIB - 1)
    scarce = infinity.plan(model, optimizer, device="cuda")
    assert scarce.budgets[Tier.DEVICE] == left_of(16 * GIB, 0) - 6 * GIB, "RAM has no room meanwhile"


def test_what_is_set_aside_comes_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_layers()
    first = next(model.parameters())
    before = [each.clone() for each in model.parameters()]
    places = [each.data_ptr() for each in model.parameters()]
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    give_back = _set_aside(model, CpuAsCuda(), first.nbytes)  # type: ignore[arg-type]
    now = [each.data_ptr() for each in model.parameters()]
    assert now[0] != places[0] and now[1:] == places[1:], "no more than is needed"
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self.clone())
    give_back()
    assert first.data_ptr() != now[0]
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


@needs_cuda
def test_a_model_on_the_device_is_not_others_with_cuda() -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = two_layers().cuda()
    assert abs(_kept_by_others(model, torch.device("cuda", torch.cuda.current_device())) - before) <= 4 * 512


@needs_cuda
def test_a_model_that_needs_more_than_the_budget_hears_why_with_cuda() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters())
    budget = infinity.Budget(device=room_on("cuda"), host="64MiB")
    free = torch.cuda.get_device_properties(0).total_memory
    with infinity.offload(model, optimizer, budget=budget, device="cuda") as runtime:
        limit = runtime.plan.budgets[infinity.tiers.Tier.DEVICE]
        with pytest.raises(torch.OutOfMemoryError), pytest.warns(UserWarning, match="device budget"):
            torch.empty(2 * limit, dtype=torch.uint8, device="cuda")
        assert model(torch.ones(1, 64, device="cuda")).isfinite().all()
    assert torch.empty(min(2 * limit, free // 4), dtype=torch.uint8, device="cuda").is_cuda


@needs_cuda
def test_a_model_on_the_device_that_leaves_no_room_for_its_pages_with_cuda() -> None:
    """The pages take more than half of the device, and the model in fp32 two thirds of it."""
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    width = int((free * 2 / 3 / 4) ** 0.5)
    model = nn.Linear(width, width, bias=False, device="cuda")
    row = model.weight[7].detach().cpu()
    with infinity.offload(model, None, precision=infinity.Precision(compute="fp32")) as runtime:
        assert runtime.plan.budgets[Tier.DEVICE] > free - 4 * GIB
        with runtime.full_parameters(model):
            assert torch.equal(model.weight[7].detach().cpu(), row)
