"""Units that the device updates: which they are, what they train, and what no longer crosses the link.

The CPU stands in for a GPU, with a device tier of its own, through the one function that says what has
kernels; test_device_update.py has the arithmetic.
"""

from __future__ import annotations

import contextlib
import errno
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zoo
from hard_budgets import check_budgets, offload, smallest
from homes import ROOMY, needs_cuda
from parity import Recipe, copied, differences, tensors_copied
from small_runtime import TIED, loss_of
from test_device_update import Allocations, workspace
from test_plan import MiB, check, planned, stack
from torch import nn

import infinity
from infinity import device_update, twin_flow
from infinity.accumulate import Accumulator
from infinity.aio import Faults
from infinity.config import Budget
from infinity.cpu_adam import BLOCK
from infinity.errors import NonFiniteGradient, StorageError
from infinity.placement import Kind
from infinity.planning import Available, make_plan
from infinity.predict import Phase
from infinity.rules import Rule
from infinity.store import injected
from infinity.telemetry import Edge
from infinity.tiers import Tier

DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
MODEL = zoo.entry("transformer")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU with a budget of its own updates what rests there, though models are so small that a workspace
    takes much of their room."""
    monkeypatch.setattr(twin_flow, "has_kernels", lambda device: True)
    monkeypatch.setattr(twin_flow, "_DISK_AGAINST_LINK", 0)


@pytest.fixture
def updated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements of every chunk that the device was given to update."""
    seen: list[int] = []
    update = device_update.update

    def counted(work: Any, space: Any) -> None:
        seen.append(sum(each.count for each in work.segments))
        update(work, space)

    monkeypatch.setattr(device_update, "update", counted)
    return seen


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def part_of(model: nn.Module, directory: Path, precision: Any) -> Budget:
    """A budget under which the device updates some units, and other pages are on the disk."""
    nvme = {str(directory): ROOMY}
    arguments: dict[str, Any] = {"precision": precision, "device": "cpu"}
    whole = infinity.plan(model, adamw(model), budget=Budget(device=ROOMY, host=ROOMY), **arguments)
    for share in range(80, 50, -5):
        budget = Budget(device=whole.device_bytes * share // 100, host=150 << 10, nvme=nvme)
        plan = infinity.plan(model, adamw(model), budget=budget, **arguments)
        if len(plan.updated_on_device) >= 4 and plan.nvme_bytes > 64 << 10:
            return budget
    raise AssertionError("no budget divides the model")


@contextlib.contextmanager
def opened(
    directory: Path,
    *,
    part: bool = False,
    compute: str = "bf16",
    states: str = "fp32",
    update: str = "lazy",
    accumulation: int | None = None,
    faults: Faults | None = None,
) -> Iterator[tuple[nn.Module, Any]]:
    """(model, runtime), all on the device or a part of it."""
    directory.mkdir(exist_ok=True)
    model = TIED.make()
    precision = infinity.Precision(compute=compute, states=states)
    options: dict[str, Any] = {"update": update, "accumulation": accumulation}
    budget = part_of(model, directory, precision) if part else Budget(device=ROOMY, host=ROOMY)
    with (
        injected(faults or Faults()),
        infinity.offload(
            model, adamw(model), budget=budget, precision=precision, device="cpu", **options
        ) as runtime,
    ):
        assert bool(runtime.plan.updated_on_device) == twin_flow.has_kernels(torch.device("cpu"))
        yield model, runtime


# ---- The plan ----


def test_what_rests_on_the_device_is_updated_there(kernels: None) -> None:
    model = stack([64] * 4, frozen=[1])
    made = planned(model, device="64MiB", host="64MiB")
    trained = {unit for unit, home in enumerate(made.homes) if home[Kind.GRADIENT] is not None}
    assert len(trained) == 3 and made.updated_on_device == trained
    assert "updates: 100% on the device" in str(made)
    assert made.traffic.update == made.traffic.accumulation == made.traffic.backward == Phase()
    assert made.device_bytes == made.home_bytes[Tier.DEVICE] + made.workspace_bytes
    assert 0 < made.workspace_bytes < 32 * made.layout.chunk_elements
    check(made, Budget(device="64MiB", host="64MiB"))


def test_a_gpu_is_told_to_update_and_its_room_is_kept() -> None:
    device = torch.device("cuda", 0)
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
    without = replace(made, window_elements=0)
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
    assert not twin_flow.has_kernels(torch.device("cpu")) and twin_flow.has_kernels(torch.device("cuda"))


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
            assert (unit in made.updated_on_device) == (there and made.window_elements > 0)
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
    # 16 bytes: a unit of 10, and one of the gradients that were there; 2 stay empty.
    assert found == homes((near, near, near), (near, near, far), (near, far, far), frozen, (near, far, disk))
    assert twin_flow.gathered(given, sizes, host_free=1) == given
    assert twin_flow.updated_there(found) == {0} and not twin_flow.updated_there(given)
    away = homes((far, near, far), (near, far, far))
    assert twin_flow.gathered(away, sizes, host_free=100) == away
    plain_sgd = homes((near, near, None), (near, far, None))
    assert twin_flow.gathered(plain_sgd, {**sizes, Kind.OPTIMIZER: [0] * 5}, 0) == plain_sgd


def test_the_devices_room_goes_to_whole_units(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack([64] * 12)
    whole = planned(model, device="64MiB", host="64MiB")
    parameters = sum(whole.page_bytes(unit, Kind.PARAMETER) for unit in range(12))
    others = sum(whole.home_bytes.values()) - parameters
    monkeypatch.setattr(twin_flow, "has_kernels", lambda device: True)
    for accumulation in (1, None):
        budget: dict[str, Any] = {"device": parameters + others // 2 + 400_000, "host": "64MiB"}
        made = planned(model, accumulation=accumulation, **budget)
        check(made, Budget(**budget))
        assert 5 <= len(made.updated_on_device) < 12
        halves = [unit for unit in range(12) if Tier.DEVICE in list(made.homes[unit].values())[1:]]
        assert len(halves) <= len(made.updated_on_device) + 1
        with monkeypatch.context() as patch:
            patch.setattr(twin_flow, "gathered", lambda homes, sizes, host_free: homes)
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
        store, plan = runtime._parts.store, runtime.plan
        assert store.pools["workspace"].nbytes == plan.workspace_bytes
        assert store.device.budget == plan.device_bytes <= plan.budgets[Tier.DEVICE]
        assert sum(pool.nbytes for pool in store.device.pools.values()) <= store.device.budget
    assert all(pool.counters.leased == 0 for pool in store.pools.values())


# ---- Training ----


def step(model: nn.Module, runtime: Any, number: int, clip: float | None = None) -> float:
    loss = loss_of(model, number)
    loss.backward()
    if clip is not None:
        runtime.clip_grad_norm_(clip)
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()
    return loss.item()


RECIPES = [
    Recipe(),
    Recipe(clip=0.5, groups=2, decay_rate=True),
    Recipe(accumulate=4, optimizer="adam", clip=0.5),
    Recipe(optimizer="sgd", groups=2),
    Recipe(optimizer="plain_sgd", accumulate=4),
    Recipe(optimizer="adagrad", clip=0.5),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("name", ["transformer", "channels_last"])
@pytest.mark.usefixtures("kernels")
def test_it_trains_as_plain_pytorch_does(
    name: str, recipe: Recipe, device: str, updated: list[int], tmp_path: Path
) -> None:
    """Gradients with the same bits, losses within 1e-5 or twice what is between torch's own versions."""
    entry = zoo.entry(name)
    recipe = Recipe(**{**vars(recipe), "device": device})
    run = parity.paged(entry, recipe, "device", tmp_path, watch=True)
    assert sum(updated) > 0
    truth = parity.reference(entry, recipe)
    assert (
        differences(
            run.gradients[0], {n: None if g is None else g.cpu() for n, g in truth.gradients[0].items()}
        )
        == []
    )
    assert run.norms == pytest.approx(truth.norms, rel=1e-5)
    parity.check_losses(entry, recipe, run, truth)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
def test_losses_are_those_of_the_cpus_updates(
    states: str, compute: str, updated: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Within 2e-3: a last bit now and then rounds a parameter or a moment the other way."""

    def train(kernels: bool) -> list[float]:
        monkeypatch.setattr(twin_flow, "has_kernels", lambda device: kernels)
        with opened(tmp_path / str(kernels), compute=compute, states=states) as (model, runtime):
            return [step(model, runtime, number % 2, clip=0.5) for number in range(8)]

    one = train(True)
    assert one == pytest.approx(train(False), rel=2e-3)
    assert one[-1] < one[0] - 0.3
    assert updated


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("update", ["sync", "eager"])
@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_same_bits_whenever_updates_run(
    part: bool, update: str, accumulation: int, updated: list[int], tmp_path: Path
) -> None:
    def train(update: str) -> Any:
        directory = tmp_path / update
        with opened(directory, part=part, update=update, accumulation=accumulation) as (model, runtime):
            losses = []
            for number in range(3):
                for micro in range(accumulation):
                    loss = loss_of(model, 10 * number + micro)
                    loss.backward()
                    losses.append(loss.item())
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
            state = tensors_copied(runtime.optimizer.state_dict())
            return losses, copied(model.state_dict()), state

    lazy, other = train("lazy"), train(update)
    assert updated
    if part and update == "eager":  # whose plan spreads pages otherwise: other units are the device's
        assert lazy[0] == pytest.approx(other[0], rel=1e-3)
    else:
        assert differences(lazy, other) == []


def stop_everywhere(accumulator: Accumulator, blocks: Any) -> dict[nn.Module, frozenset[int]]:
    """Modules at which micro-batches stop, though pages that rest on the device never leave."""
    modules = dict(accumulator.model.named_modules())
    units = accumulator.plan.layout.module_units
    return {modules[path]: frozenset(found) for path, found in units.items()}


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.filterwarnings("error")
def test_micro_batches_together_have_the_bits_of_the_plain_loop(
    part: bool, kernels: None, updated: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Accumulator, "_stops", stop_everywhere)

    def train(together: bool) -> Any:
        with opened(tmp_path / str(together), part=part) as (model, runtime):
            monkeypatch.setattr(Accumulator, "_pays", lambda self: together)
            for number in range(3):
                runtime.accumulate(range(4 * number, 4 * number + 4), lambda each: loss_of(model, each))
                runtime.clip_grad_norm_(0.5)
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
            return copied(model.state_dict()), tensors_copied(runtime.optimizer.state_dict())

    assert differences(train(True), train(False)) == []
    assert updated


# ---- What people do between steps ----


@pytest.mark.parametrize("states", ["fp32", "int8"])
@pytest.mark.parametrize("part", [False, True])
def test_a_state_dict_goes_on_with_the_same_bits(
    part: bool, states: str, kernels: None, tmp_path: Path
) -> None:
    def run(directory: Path, start: Any) -> Any:
        with opened(directory, part=part, states=states) as (model, runtime):
            if start is None:
                for number in range(2):
                    step(model, runtime, number)
            else:
                model.load_state_dict(start[0])
                runtime.optimizer.load_state_dict(start[1])
            middle = copied(model.state_dict()), tensors_copied(runtime.optimizer.state_dict())
            for number in range(2, 4):
                step(model, runtime, number)
            return middle, (copied(model.state_dict()), tensors_copied(runtime.optimizer.state_dict()))

    middle, end = run(tmp_path / "a", None)
    loaded, again = run(tmp_path / "b", middle)
    assert differences(middle, loaded) == []
    assert differences(end, again) == []


def edit(model: nn.Module, runtime: Any) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)


def edit_of_data(model: nn.Module, runtime: Any) -> None:
    next(model.parameters()).data.add_(0.125)


def whole(model: nn.Module, runtime: Any) -> None:
    with runtime.full_parameters(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)


def reload(model: nn.Module, runtime: Any) -> None:
    model.load_state_dict({name: 0.9 * each for name, each in model.state_dict().items()})


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("act", [edit, edit_of_data, whole, reload], ids=lambda each: each.__name__)
def test_edits_become_the_masters(
    act: Callable[..., None], compute: str, part: bool, kernels: None, tmp_path: Path
) -> None:
    """A step with a learning rate of 0 leaves masters as it finds them."""
    with opened(tmp_path, part=part, compute=compute) as (model, runtime):
        for number in range(2):
            step(model, runtime, number)
        before = copied(model.state_dict())
        act(model, runtime)
        edited = copied(model.state_dict())
        changed = {name for name in edited if not torch.equal(edited[name], before[name])}
        assert changed
        for group in runtime.optimizer.param_groups:
            group["lr"] = 0.0
        step(model, runtime, 2)
        assert differences(edited, copied(model.state_dict())) == []
        if compute != "fp32":
            for name, parameter in model.named_parameters():
                master = runtime.optimizer.state[parameter]["master"]
                assert (name in changed) <= torch.equal(master, edited[name].float())


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("accumulate", ["fp32", "compute"])
def test_gradients_have_the_bits_of_the_cpus(
    accumulate: str, part: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those that stay are added up as those that are taken to the host; norms differ by the order of sums."""
    model = TIED.make()
    precision = infinity.Precision(accumulate=accumulate)
    budget = Budget(device=ROOMY, host=ROOMY)
    monkeypatch.setattr(twin_flow, "_DISK_AGAINST_LINK", 0)
    monkeypatch.setattr(twin_flow, "has_kernels", lambda device: True)
    if part:
        budget = part_of(model, tmp_path, precision)

    def gradients() -> tuple[dict[str, torch.Tensor | None], float]:
        model = TIED.make()
        arguments: dict[str, Any] = {"budget": budget, "precision": precision, "device": "cpu"}
        with infinity.offload(model, adamw(model), **arguments) as runtime:
            assert bool(runtime.plan.updated_on_device) == twin_flow.has_kernels(torch.device("cpu"))
            for micro in range(3):
                loss_of(model, micro).backward()
            found = {name: runtime.grad(each) for name, each in model.named_parameters()}
            return found, float(runtime._parts.gradients.norm())

    there, norm = gradients()
    monkeypatch.setattr(twin_flow, "has_kernels", lambda device: False)
    here, expected = gradients()
    assert differences(there, here) == []
    assert norm == pytest.approx(expected, rel=1e-14)


def test_a_gradient_can_be_read_and_clipped(kernels: None, tmp_path: Path) -> None:
    with opened(tmp_path, compute="fp32") as (model, runtime):
        loss_of(model).backward()
        gradients = {name: runtime.grad(each) for name, each in model.named_parameters()}
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in gradients.values()))
        assert float(runtime.clip_grad_norm_(0.5)) == pytest.approx(norm, rel=1e-6)
        for name, each in model.named_parameters():
            assert torch.allclose(runtime.grad(each), gradients[name] * (0.5 / (norm + 1e-6)), rtol=1e-6)


def test_a_gradient_that_is_not_finite_ends_the_step_before_it_begins(kernels: None, tmp_path: Path) -> None:
    with opened(tmp_path) as (model, runtime):
        step(model, runtime, 0)
        before = copied(model.state_dict())
        (loss_of(model, 1) * math.inf).backward()
        with pytest.raises(NonFiniteGradient):
            runtime.optimizer.step()
        assert differences(before, copied(model.state_dict())) == []
        runtime.optimizer.zero_grad()
        step(model, runtime, 1)
        assert differences(before, copied(model.state_dict())) != []


def test_a_step_that_overflows_in_fp16_is_skipped(kernels: None, tmp_path: Path) -> None:
    with opened(tmp_path, compute="fp16") as (model, runtime):
        before = copied(model.state_dict())
        (loss_of(model) * 1e6).backward()
        runtime.optimizer.step()
        assert runtime.stats.skipped_steps == 1
        assert differences(before, copied(model.state_dict())) == []
        runtime.optimizer.zero_grad()
        while runtime.stats.skipped_steps == runtime.stats.steps:
            step(model, runtime, 1)
        assert differences(before, copied(model.state_dict())) != []


def test_a_fault_elsewhere_repeats_and_loses_nothing(
    kernels: None, updated: list[int], tmp_path: Path
) -> None:
    def train(failing: bool) -> Any:
        faults = Faults()
        with opened(tmp_path / str(failing), part=True, faults=faults) as (model, runtime):
            step(model, runtime, 0)
            loss_of(model, 1).backward()
            runtime.optimizer.step()
            if failing:
                faults.fail("read", 1, errno.EIO, times=None)
                with pytest.raises(StorageError):
                    loss_of(model, 2)
                    runtime.optimizer.state_dict()
                faults.clear()
            runtime.optimizer.zero_grad()
            step(model, runtime, 2)
            return copied(model.state_dict()), tensors_copied(runtime.optimizer.state_dict())

    assert differences(train(True), train(False)) == []
    assert len(updated) % 2 == 0


# ---- What moves, and what is allocated ----


def moved(runtime: Any) -> tuple[int, int]:
    edges = runtime.stats.last_step.edges
    return edges[Edge.HOST_TO_DEVICE].bytes, edges[Edge.DEVICE_TO_HOST].bytes


@pytest.mark.parametrize("accumulation", [1, 4])
def test_nothing_crosses_the_link_but_sums_of_squares(
    accumulation: int, kernels: None, tmp_path: Path
) -> None:
    """8 bytes for each block of gradients, once a step however many backwards it has."""
    with opened(tmp_path, accumulation=accumulation) as (model, runtime):
        blocks = sum(-(-each.numel() // BLOCK) for each in model.parameters())
        for number in range(3):
            for micro in range(accumulation):
                loss_of(model, number + micro).backward()
            runtime.clip_grad_norm_(1.0)
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            if number:  # the first step has what filled the pages
                assert moved(runtime) == (0, 8 * blocks)


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
def test_a_step_takes_nothing_from_the_allocator(states: str, kernels: None, tmp_path: Path) -> None:
    with opened(tmp_path, states=states) as (model, runtime):
        for number in range(3):
            loss_of(model, number).backward()
            parts = runtime._parts
            fresh = [torch.ones_like(each).detach().clone() for each in parts.pages[0].parameters]
            with Allocations() as made:
                if number:
                    for index, each in enumerate(fresh):
                        parts.gradients.add(0, index, each)
                runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            assert max((nbytes for _, nbytes in made.found), default=0) <= 512, made.found


class Recorded:
    """A link that notes what was asked of it."""

    def __init__(self, link: Any) -> None:
        self._link = link
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append(name)
            return getattr(self._link, name)(*args)

        return call


def test_copies_up_follow_the_kernels_that_write_there(kernels: None, tmp_path: Path) -> None:
    with opened(tmp_path) as (model, runtime):
        step(model, runtime, 0)
        state = tensors_copied(runtime.optimizer.state_dict())
        store = runtime._parts.store
        store.link = recorded = Recorded(store.link)
        runtime.optimizer.load_state_dict(state)
        places = [at for at, call in enumerate(recorded.calls) if call == "to_device"]
        assert places and all(recorded.calls[at - 1] == "follow_compute" for at in places)
        store.link = recorded._link


class Stream:
    """A CUDA stream that notes whom it waits for."""

    def __init__(self) -> None:
        self.waits_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits_for.append(other)


def test_the_workspace_is_used_by_one_stream_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    space = workspace("cpu")
    one, other = Stream(), Stream()
    now = [one]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[-1])
    space.order()
    space.device = torch.device("cuda", 0)
    for stream in (one, one, other, one):
        now.append(stream)
        space.order()
    assert one.waits_for == [other] and other.waits_for == [one]


def test_homes_that_the_cpu_updates_wait_for_no_kernel(kernels: None, tmp_path: Path) -> None:
    with opened(tmp_path, part=True) as (_, runtime):
        parts, plan = runtime._parts, runtime.plan
        for unit, page in parts.states.pages.items():
            assert page.home.computed == (unit in plan.updated_on_device)
            assert parts.pages[unit].home.computed == page.home.computed
