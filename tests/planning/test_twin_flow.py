"""Tests of units that the device updates: which units the plan chooses, which bytes a step copies between
host and device, what a step launches on the device, and that it allocates next to nothing there.

Training with such units is tested in test_twin_flow_training.py, the arithmetic in test_device_update.py.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_arrays import Allocations
from device_arrays import opened as updates_of
from device_units import adamw, kernels, opened, part_of, step
from hard_budgets import check_budgets, offload, smallest
from homes import ROOMY
from other_optimizers import Lion
from parity import tensors_copied
from planned_models import MiB, check, planned, stack
from small_runtime import TIED, loss_of

import infinity
from infinity.config import Budget
from infinity.cpu_adam import BLOCK, Segment, Update
from infinity.device_update import kernels as device_kernels
from infinity.device_update.kernels import Kernels, UpdateKind
from infinity.device_update.table import DeviceChunk
from infinity.formats.optimizer_rules import Rule
from infinity.planning import twin_flow
from infinity.planning.placement import Kind
from infinity.planning.planner import Available, make_plan
from infinity.planning.predict import PhaseBytes
from infinity.telemetry.stats import Edge
from infinity.tiers import Tier

__all__ = ["kernels"]


# ---- The plan ----


def test_what_rests_on_the_device_is_updated_there(kernels: None) -> None:
    model = stack([64] * 4, frozen=[1])
    made = planned(model, device="64MiB", host="64MiB")
    trained = {unit for unit, home in enumerate(made.homes) if home[Kind.GRADIENT] is not None}
    assert len(trained) == 3 and made.updated_on_device == trained
    assert "updates: 100% on the device" in str(made)
    assert made.traffic.update == made.traffic.accumulation == made.traffic.backward == PhaseBytes()
    assert made.device_bytes == made.home_bytes[Tier.DEVICE] + made.workspace_bytes
    assert 0 < made.workspace_bytes < 32 * made.layout.chunk_elements
    check(made, Budget(device="64MiB", host="64MiB"))


def test_a_gpu_is_told_to_update_and_its_room_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(device_kernels, "can_compile", lambda: True)
    assert twin_flow.has_kernels(device)
    model = stack([64] * 4)
    rule = Rule.of(torch.optim.AdamW(model.parameters()))
    free = Available(device=64 * MiB, host=64 * MiB)
    arguments: dict[str, Any] = {"precision": infinity.Precision(), "device": device, "available": free}
    made = make_plan(model, rule, budget=Budget(host="64MiB"), **arguments)
    assert made.updated_on_device == set(range(len(made.homes)))
    assert made.device_bytes + made.reserved <= made.budgets[Tier.DEVICE]


def test_only_what_the_cpu_updates_moves(kernels: None, tmp_path: Path) -> None:
    model = TIED.make()
    budget = part_of(model, tmp_path, infinity.Precision())
    made = infinity.plan(model, adamw(model), budget=budget, device="cpu")
    without = replace(made, updates_there=False)
    there = made.updated_on_device
    states = sum(made.page_bytes(unit, Kind.OPTIMIZER) for unit in there)
    gradients = sum(made.page_bytes(unit, Kind.GRADIENT) for unit in there)
    assert made.traffic.forward == without.traffic.forward
    assert without.traffic.backward.to_device - made.traffic.backward.to_device == gradients
    assert without.traffic.accumulation.to_host - made.traffic.accumulation.to_host == gradients
    assert without.traffic.update.to_host - made.traffic.update.to_host > states + gradients
    assert without.traffic.update.host - made.traffic.update.host > 2 * states + gradients
    assert without.traffic.disk_read == made.traffic.disk_read


def test_without_kernels_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned(stack([64] * 4), device="64MiB", host="64MiB")
    assert not made.updated_on_device and made.workspace_bytes == 0
    assert "updates:" not in str(made)
    for compiler in (True, False):
        monkeypatch.setattr(device_kernels, "can_compile", lambda found=compiler: found)
        assert not twin_flow.has_kernels(torch.device("cpu"))
        assert twin_flow.has_kernels(torch.device("cuda")) == compiler


def test_memory_that_is_the_hosts_is_updated_by_the_cpu(kernels: None) -> None:
    assert not planned(stack([64] * 4), host="64MiB").updated_on_device
    assert not planned(stack([64] * 4), optimizer=None, device="64MiB", host="64MiB").updated_on_device


def test_any_budget_is_kept_and_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack([64, 130] * 6)
    shares = set()
    for device in range(72 << 10, 6 * MiB, 200 << 10):
        budget: dict[str, Any] = {"device": device, "host": 300 << 10, "nvme": {"/nowhere": 64 * MiB}}
        monkeypatch.setattr(twin_flow, "has_kernels", lambda device: False)
        plain = planned(model, **budget)
        monkeypatch.setattr(twin_flow, "has_kernels", lambda device: True)
        made = planned(model, **budget)
        check(made, Budget(**budget))
        assert made.smallest == plain.smallest
        for unit in range(len(made.homes)):
            there = all(home in (Tier.DEVICE, None) for home in made.homes[unit].values())
            assert (unit in made.updated_on_device) == (there and made.updates_there)
        if not made.updated_on_device:
            assert made == plain
        shares.add(len(made.updated_on_device))
    assert {0, len(made.homes)} < shares


def test_whole_units_take_the_place_of_halves() -> None:
    near, far, disk = Tier.DEVICE, Tier.HOST, Tier.NVME

    def homes(*units: tuple[Tier | None, ...]) -> Any:
        return tuple(dict(zip(Kind, unit, strict=True)) for unit in units)

    sizes = {Kind.PARAMETER: [5] * 5, Kind.GRADIENT: [4, 4, 4, 0, 4], Kind.OPTIMIZER: [6, 6, 6, 0, 6]}
    frozen = (near, None, None)
    given = homes((near, near, far), (near, near, far), (near, near, far), frozen, (near, near, disk))
    found = twin_flow.gathered(given, sizes, host_free=2)
    # Of the 16 bytes, a unit takes 10 and one of the gradients that rested there takes 4. 2 stay empty.
    assert found == homes((near, near, near), (near, near, far), (near, far, far), frozen, (near, far, disk))
    assert twin_flow.gathered(given, sizes, host_free=1) == given
    assert twin_flow.updated_there(found) == {0} and not twin_flow.updated_there(given)
    # Room in host RAM goes to the gradients of units that the CPU updates.
    assert twin_flow.gathered(given, sizes, host_free=6) == homes(
        (near, near, near), (near, far, far), (near, far, far), frozen, (near, far, disk)
    )
    assert twin_flow.gathered(given, sizes, host_free=16, whole_units=False) == homes(
        *[(near, far, far)] * 3, frozen, (near, far, disk)
    )
    away = homes((far, near, far), (near, far, far))
    assert twin_flow.gathered(away, sizes, host_free=0) == away
    plain_sgd = homes((near, near, None), (near, far, None))
    assert twin_flow.gathered(plain_sgd, {**sizes, Kind.OPTIMIZER: [0] * 5}, 0) == plain_sgd


def test_the_devices_room_goes_to_whole_units(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack([64] * 12)
    whole = planned(model, device="64MiB", host="64MiB")
    parameters = sum(whole.page_bytes(unit, Kind.PARAMETER) for unit in range(12))
    others = sum(whole.home_bytes.values()) - parameters
    monkeypatch.setattr(twin_flow, "has_kernels", lambda device: True)
    for accumulation in (1, None):
        budget: dict[str, Any] = {"device": parameters + others // 2 + 40_000, "host": "64MiB"}
        made = planned(model, accumulation=accumulation, **budget)
        check(made, Budget(**budget))
        assert 5 <= len(made.updated_on_device) < 12
        halves = [unit for unit in range(12) if Tier.DEVICE in list(made.homes[unit].values())[1:]]
        assert len(halves) <= len(made.updated_on_device) + 1
        with monkeypatch.context() as patch:
            patch.setattr(twin_flow, "gathered", lambda homes, *_, **__: homes)
            assert len(planned(model, accumulation=accumulation, **budget).updated_on_device) < 5


def test_a_workspace_that_costs_more_than_it_spares_is_not_made() -> None:
    here = {Tier.DEVICE: 1000, Tier.HOST: 500, Tier.NVME: 100}
    assert twin_flow.pays(400, here, {**here, Tier.DEVICE: 700})
    assert not twin_flow.pays(300, here, {**here, Tier.DEVICE: 700})
    assert not twin_flow.pays(400, here, {**here, Tier.DEVICE: 990, Tier.NVME: 130})
    assert twin_flow.pays(400, here, {**here, Tier.DEVICE: 990, Tier.NVME: 120})


@pytest.mark.parametrize("place", ["apart", "apart-nvme"])
def test_the_smallest_budgets_still_do(place: str, kernels: None, tmp_path: Path) -> None:
    sizes = smallest(TIED.make(), place, tmp_path)
    model = TIED.make()
    with offload(model, sizes, tmp_path) as runtime:
        assert not runtime.plan.updated_on_device
        step(model, runtime, 0)
        check_budgets(runtime, sizes, tmp_path)


@pytest.mark.parametrize("part", [False, True])
def test_the_workspace_is_inside_the_device_budget(part: bool, kernels: None, tmp_path: Path) -> None:
    with opened(tmp_path, part=part) as (model, runtime):
        for number in range(3):
            step(model, runtime, number)
        store, plan = runtime._components.store, runtime.plan
        assert store.pools["workspace"].nbytes == plan.workspace_bytes
        assert store.device.budget == plan.device_bytes <= plan.budgets[Tier.DEVICE]
        assert sum(pool.nbytes for pool in store.device.pools.values()) <= store.device.budget
    assert all(pool.counters.leased == 0 for pool in store.pools.values())


# ---- What moves, and what is allocated ----


def moved(runtime: Any) -> tuple[int, int]:
    edges = runtime.stats.last_step.edges
    return edges[Edge.HOST_TO_DEVICE].bytes, edges[Edge.DEVICE_TO_HOST].bytes


@pytest.mark.parametrize("accumulation", [1, 4])
def test_nothing_crosses_the_link_but_sums_of_squares(
    accumulation: int, kernels: None, tmp_path: Path
) -> None:
    """A step with clipping copies nothing to the device, and to the host only 8 bytes for each block of BLOCK
    elements of each gradient: the block's sum of squares.

    This holds for one backward per step and for four.
    """
    with opened(tmp_path, accumulation=accumulation) as (model, runtime):
        blocks = sum(-(-each.numel() // BLOCK) for each in model.parameters())
        for number in range(3):
            for micro in range(accumulation):
                loss_of(model, number + micro).backward()
            runtime.clip_grad_norm_(1.0)
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            if number:  # the first step also has the traffic that filled the pages
                assert moved(runtime) == (0, 8 * blocks)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_step_is_a_launch_a_unit_one_for_all_squares_and_one_copy(
    accumulation: int, kernels: None, tmp_path: Path
) -> None:
    with opened(tmp_path, accumulation=accumulation) as (model, runtime):
        store, parts = runtime._components.store, runtime._components
        units = sum(any(each.trainable for each in page.layout.parameters) for page in parts.pages)
        launched = []
        launch = store.kernels.launch

        def noted(name: str, *arguments: Any) -> None:
            launched.append(name)
            launch(name, *arguments)

        store.kernels.launch = noted
        store.link = recorded = Recorded(store.link)
        for number in range(3):
            for micro in range(accumulation):
                loss_of(model, number + micro).backward()
            assert launched == []  # nothing is measured before a norm is asked for
            runtime.clip_grad_norm_(1.0)
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            assert launched == ["infinity_squares"] + ["infinity_update"] * units
            assert recorded.calls.count("to_host") == number + 1
            launched.clear()
        store.link = recorded._link


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "SGD", "Adagrad", "Lion"])
@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_no_kernel_is_compiled_in_a_step(
    compute: str, optimizer: str, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of update that a step launches was compiled when the runtime was opened."""
    required: list[set[UpdateKind]] = []
    launched: list[set[UpdateKind]] = []
    require, launch = Kernels.require, Kernels.launch

    def noted_require(self: Kernels, kinds: Any) -> None:
        required.append(set(kinds))
        require(self, required[-1])

    def noted_launch(self: Kernels, name: str, warps: int, arguments: bytes, kinds: Any = ()) -> None:
        launched.append(set(kinds))
        launch(self, name, warps, arguments, frozenset(kinds))

    monkeypatch.setattr(Kernels, "require", noted_require)
    monkeypatch.setattr(Kernels, "launch", noted_launch)
    for number, states in enumerate(("fp32", "bf16", "int8")):
        model = TIED.make()
        made = getattr(torch.optim, optimizer, Lion)(model.parameters(), lr=1e-3)
        precision = infinity.Precision(compute=compute, states=states)
        budget = Budget(device=ROOMY, host=ROOMY)
        with infinity.offload(model, made, budget=budget, precision=precision, device="cpu") as runtime:
            for betas in ((0.9, 0.999), (0.3, 0.4)):
                for group in runtime.optimizer.param_groups:
                    if "betas" in group:
                        group["betas"] = betas
                step(model, runtime, 0)
        assert len(required) == 2 * (number + 1), "by the trial and by the runtime"
        assert any(launched) and all(kinds <= required[-1] == required[-2] for kinds in launched)
        launched.clear()


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
def test_a_step_takes_nothing_from_the_allocator(states: str, kernels: None, tmp_path: Path) -> None:
    with opened(tmp_path, states=states) as (model, runtime):
        for number in range(3):
            loss_of(model, number).backward()
            parts = runtime._components
            fresh = [torch.ones_like(each).detach().clone() for each in parts.pages[0].parameters]
            with Allocations() as made:
                if number:
                    for index, each in enumerate(fresh):
                        parts.scheduler.accumulate(0, index, each)
                runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            assert max((nbytes for _, nbytes in made.found), default=0) <= 512, made.found


class Recorded:
    """A wrapper of `link`, the object that copies between host and device. It appends the name of each
    called method to `calls`, and passes the call on to the link.
    """

    def __init__(self, link: Any) -> None:
        self._link = link
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return getattr(self._link, name)(*args, **kwargs)

        return call


def test_copies_up_follow_the_kernels_that_write_there(kernels: None, tmp_path: Path) -> None:
    with opened(tmp_path) as (model, runtime):
        step(model, runtime, 0)
        state = tensors_copied(runtime.optimizer.state_dict())
        store = runtime._components.store
        store.link = recorded = Recorded(store.link)
        runtime.optimizer.load_state_dict(state)
        places = [at for at, call in enumerate(recorded.calls) if call == "to_device"]
        assert places and all(recorded.calls[at - 1] == "follow_compute" for at in places)
        store.link = recorded._link


class Stream:
    """A fake of a CUDA stream. `waits_for` lists the streams that `wait_stream` was given, in order."""

    def __init__(self) -> None:
        self.waits_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits_for.append(other)


def test_the_workspace_is_used_by_one_stream_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Update(grad=torch.ones(1), parameter=torch.ones(1), segments=[Segment(0, 1)], hypers=[])
    updates, _memory = updates_of([DeviceChunk(work, "p")], "cpu")
    one, other = Stream(), Stream()
    now = [one]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[-1])
    updates.order()
    updates.kernels = copy(updates.kernels)
    updates.kernels.device = torch.device("cuda", 0)
    for stream in (one, one, other, one):
        now.append(stream)
        updates.order()
    assert one.waits_for == [other] and other.waits_for == [one]


def test_homes_that_the_cpu_updates_wait_for_no_kernel(kernels: None, tmp_path: Path) -> None:
    with opened(tmp_path, part=True) as (_, runtime):
        parts, plan = runtime._components, runtime.plan
        for unit, page in parts.states.pages.items():
            assert page.home.computed == (unit in plan.updated_on_device)
            assert parts.pages[unit].home.computed == page.home.computed


def test_unused_device_memory_is_told_where_pages_could_use_it(kernels: None) -> None:
    model = stack([64] * 12)
    near = planned(model, device="64MiB", host="64MiB")
    far = planned(model, device=near.device_bytes // 2, host="64MiB")
    budget = far.budgets[Tier.DEVICE]
    assert any(Tier.HOST in home.values() for home in far.homes)
    assert far.idle(budget // 2) == budget - budget // 2
    assert far.idle(budget - budget // 16) == 0
    assert near.idle(0) == 0
