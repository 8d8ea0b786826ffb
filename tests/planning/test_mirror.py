"""Tests of mirrors, which are copies in RAM of parameters that stay on the device: how many bytes cross the
link, and that training has the bits of training in RAM.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import parity
import pytest
import torch
from emulated_device import COMPUTE, LIBRARY, EmulatedDevice
from homes import ROOMY
from planned_models import check, planned, stack
from random_programs import BLOCKS, Blocks, Place, adamw, budget_of

import infinity
from infinity.cpu_adam import BLOCK
from infinity.formats.optimizer_rules import Rule
from infinity.planning.placement import Kind
from infinity.planning.planner import Available, make_plan
from infinity.planning.twin_flow import mirrored
from infinity.telemetry.stats import Edge
from infinity.tiers import Tier
from infinity.tiers.driver import Driver, emulated

NEAR, FAR, DISK = Tier.DEVICE, Tier.HOST, Tier.NVME
INPUTS = torch.linspace(-1, 1, 32).view(4, 8)
UPDATES = ("lazy", "eager", "sync")
FP32 = infinity.Precision(compute="fp32")


# --- the plan -------------------------------------------------------------------------------------------


def test_room_goes_to_units_without_pages_on_disk_first() -> None:
    homes: Any = [
        dict(zip(Kind, each, strict=True))
        for each in (
            (NEAR, FAR, DISK),
            (NEAR, FAR, FAR),
            (NEAR, None, None),
            (FAR, FAR, FAR),
            (NEAR, FAR, FAR),
        )
    ]
    sizes = {Kind.PARAMETER: [5, 5, 5, 5, 5], Kind.GRADIENT: [5, 5, 0, 5, 5], Kind.OPTIMIZER: [9, 9, 0, 9, 9]}
    for free, there, units in (
        (4, (), ()),
        (5, (), (1,)),
        (14, (), (1, 4)),
        (99, (), (0, 1, 4)),
        (99, (4,), (0, 1)),
    ):
        found, chosen = mirrored(homes, sizes[Kind.PARAMETER], free, updated_on_device=there)
        assert chosen == set(units)
        for unit, home in enumerate(found):
            assert home == {**homes[unit], **({Kind.PARAMETER: FAR} if unit in units else {})}


def test_mirrors_are_counted_in_both_tiers_and_within_them() -> None:
    model = stack([64] * 12)
    ample = planned(model, device="64MiB", host="64MiB")
    parameters = sum(unit.nbytes for unit in ample.layout.units)
    whole = planned(model, device=parameters, host="64MiB")
    without = planned(model, device=parameters, host=whole.host_bytes - parameters)
    seen = set()
    for more in range(0, parameters + 4096, 4096):
        budget: dict[str, Any] = {"device": parameters, "host": without.host_bytes + more}
        made = planned(model, **budget)
        check(made, infinity.Budget(**budget))
        near, far = made.rows()
        assert near["params"] == made.device_bytes == parameters
        assert far["params"] == made.mirror_bytes
        assert near["free"] >= 0 and far["free"] >= 0
        assert made.traffic.update.to_device == parameters
        assert made.traffic.update.to_host == parameters - made.mirror_bytes
        seen.add(len(made.mirrored))
    assert {0, len(made.homes)} <= seen and len(seen) > 2


def test_chunks_are_long_where_calls_are_waited_for_and_ram_has_room() -> None:
    model = torch.nn.Linear(2048, 5000, bias=False, device="meta", dtype=torch.bfloat16)
    rule = Rule.of(torch.optim.AdamW(model.parameters()))

    def chunk(host: str) -> int:
        made = make_plan(
            model,
            rule,
            budget=infinity.Budget(device="64MiB", host=host),
            precision=infinity.Precision(),
            device=torch.device("cpu"),
            available=Available(device=0, host=0),
        )
        staged = 2 * made.chunk_update_bytes
        assert made.layout.chunk_elements <= 1 << 20 or 64 * staged <= made.budgets[Tier.HOST]
        return made.layout.chunk_elements

    driver = Driver.load(str(LIBRARY))
    assert chunk("16GiB") == 1 << 20
    with emulated(driver, driver.foreign(COMPUTE)):
        assert chunk("16GiB") == 1 << 22
        assert chunk("1GiB") == 1 << 20


# --- what travels ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(device: EmulatedDevice, model: Any, update: str, **options: Any) -> Iterator[Any]:
    with (
        device.in_use(),
        infinity.offload(
            model,
            adamw(model),
            budget=budget_of(Place("mirrored")),
            precision=FP32,
            device="cpu",
            update=update,
            accumulation=1 if update == "eager" else None,
            **options,
        ) as runtime,
    ):
        assert len(runtime.plan.mirrored) == len(runtime.plan.layout.units)
        assert runtime.plan.resident_bytes == 0
        yield runtime


def trained_region_bytes(plan: Any) -> int:
    return sum(
        -(-region.elements * region.dtype.itemsize // 4096) * 4096
        for unit in plan.layout.units
        for region in unit.regions
        if region.trainable
    )


@pytest.mark.parametrize("update", UPDATES)
def test_gradients_come_down_and_regions_go_up_and_nothing_else(update: str) -> None:
    model = Blocks()
    gradients = sum(each.numel() * each.element_size() for each in model.parameters())
    with opened(EmulatedDevice(7), model, update) as runtime:
        assert max(chunk.count for unit in runtime.plan.layout.units for chunk in unit.chunks) <= BLOCK
        regions = trained_region_bytes(runtime.plan)

        def moved() -> list[int]:
            return [runtime.stats.edges[edge].bytes for edge in (Edge.DEVICE_TO_HOST, Edge.HOST_TO_DEVICE)]

        for backwards in (1, 1, 1 if update == "eager" else 2):
            before = moved()
            for _ in range(backwards):
                model(INPUTS, tuple(range(BLOCKS))).backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            with torch.no_grad():
                model(INPUTS, tuple(range(BLOCKS)))  # waits until the lazy updates have ended
            after = moved()
            assert [now - then for now, then in zip(after, before, strict=True)] == [
                backwards * gradients,
                regions,
            ]
        assert (
            runtime.stats.edges[Edge.NVME_TO_HOST].bytes == runtime.stats.edges[Edge.HOST_TO_NVME].bytes == 0
        )


# --- what code outside does -----------------------------------------------------------------------------


def edited(model: Any, runtime: Any) -> dict[str, torch.Tensor]:
    """Train three steps with every kind of edit between them, and return the final parameters."""
    weights = [block[0].weight for block in model.blocks]
    optimizer = runtime.optimizer
    for step in range(3):
        model(INPUTS, tuple(range(BLOCKS))).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            weights[0].mul_(0.5)
            with runtime.full_parameters(model.blocks[1]):
                weights[1].add_(1.0)
            weights[2].data[0] = float(step)
            if step == 1:
                model.load_state_dict(
                    {name: each * 2 for name, each in parity.copied(model.state_dict()).items()}
                )
    return parity.copied(model.state_dict())


@functools.cache
def edited_in_ram() -> dict[str, torch.Tensor]:
    """Return the parameters that `edited` gives where all pages are in RAM and the CPU is the device."""
    model = Blocks()
    with infinity.offload(
        model, adamw(model), budget=infinity.Budget(host=ROOMY), precision=FP32, device="cpu"
    ) as runtime:
        return edited(model, runtime)


@pytest.mark.parametrize("update", UPDATES)
def test_edits_reach_the_parameters_in_ram(update: str) -> None:
    expected = edited_in_ram()
    model = Blocks()
    with opened(EmulatedDevice(8), model, update) as runtime:
        found = edited(model, runtime)
        runtime._components.edits.sync_edits()
        for page in runtime._components.pages:
            runtime._components.scheduler.complete(page.index)
            assert page.permanent and page.residency is not None
            with torch._C.DisableTorchFunctionSubclass():
                for index in range(len(page.parameters)):
                    here = page.flat(index, page.home.memory)
                    assert torch.equal(here, page.flat(index, page.residency))
    assert parity.differences(list(found.values()), list(expected.values())) == []


def test_without_room_nothing_is_mirrored_and_all_is_trained() -> None:
    model = Blocks()
    budget = budget_of(Place("mirrored"))
    plan = infinity.plan(model, adamw(model), budget=budget, precision=FP32, device="cpu")
    tight = infinity.Budget(device=budget.device_bytes, host=plan.host_bytes - plan.mirror_bytes)
    with infinity.offload(model, adamw(model), budget=tight, precision=FP32, device="cpu") as runtime:
        assert plan.mirrored and not runtime.plan.mirrored
        found = edited(model, runtime)
    expected = edited_in_ram()
    assert parity.differences(list(found.values()), list(expected.values())) == []
