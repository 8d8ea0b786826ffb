"""Budgets that put a model's pages where a test wants them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import infinity
from infinity.planning import homes
from infinity.tiers import Tier
from infinity.tiers.tier import usable_device

ROOMY = 64 << 20
"""A budget in bytes for one tier. It is more than any model in the tests needs in that tier."""


def room_on(device: str | torch.device, roomy: int = ROOMY) -> int:
    """Return a device budget, in bytes, that leaves `roomy` bytes to the model.

    The result is `roomy` for the CPU. For CUDA it is `roomy` plus the bytes that torch itself takes there.
    """
    at = usable_device(device)
    if at.type == "cpu":
        return roomy
    # Not at the top: benchmarks/bits.py also trains, on the CPU, with packages of other commits.
    from infinity.planning.headroom import Headroom

    return roomy + Headroom.of(at).beside(roomy)


CUDA_HOMES = ("device", "host", "nvme", "mixed")
"""Those of HOMES that assume a device with memory of its own. Tests run these on CUDA, too."""

HOMES = ("device", "host", "nvme", "unified", "unified-nvme", "mixed")
"""Names of the places where a model's pages rest. "device", "host" and "nvme": in that tier ("host" lets
parameters be on the device). "mixed": on NVMe and in at least one other tier. "unified" and "unified-nvme":
in RAM or on NVMe, and the device shares the host's RAM. With the other names the device has a tier of its
own, for which RAM stands in on a CPU.
"""

both_homes = pytest.mark.parametrize("home", ["nvme", "unified"])
"""Parametrises `home` by "nvme" (all pages on NVMe, and a device tier apart from RAM) and "unified" (all
pages in RAM, where the CPU computes).
"""

NEEDS_CUDA = "needs a CUDA device"
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_CUDA)
"""Marks a test that needs a GPU. tests/conftest.py hides GPUs from all tests without the mark."""


def places(*homes: str, cuda: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrise `home` and `device`: each of `homes` with "cpu", and each of `cuda` with "cuda".

    The cases with "cuda" are skipped where there is no CUDA device.
    """
    found: list[Any] = [pytest.param(home, "cpu", id=home) for home in homes]
    found += [pytest.param(home, "cuda", id=f"{home} with cuda", marks=needs_cuda) for home in cuda]
    return pytest.mark.parametrize("home, device", found)


each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])


def evict_all(engine: Any) -> None:
    """Evict every parameter page that may leave the memory where the model computes.

    engine: a runtime's PrefetchEngine. Pages that are in use stay.
    """
    engine._evict_others(set())


def budget_for(
    home: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    directory: Path,
    precision: Any,
    *,
    device: str | torch.device = "cpu",
    accumulation: int | None = None,
    checkpoint: Path | None = None,
    average: float | None = None,
    roomy: int = ROOMY,
    update: str = "auto",
) -> Any:
    """Return an infinity.Budget under which every page of the model rests at `home`.

    A tier where no page shall rest gets the smallest budget that will do. home: one of HOMES, or "mirrored".
    "mixed" has room for half of the parameter pages on the device and half of the other pages in RAM, and
    the disk takes the rest. "mirrored" is the layout of ZeRO-Offload: parameters on the device and in RAM,
    gradients and states in RAM. accumulation: the number of backwards a step that will be declared to
    `offload`, or None. checkpoint, average: what `offload` will be given as the directory of commits and as
    the decay of running averages, or None. roomy: the budget in bytes of a tier with room for all. update: as
    for `offload`; speculative updates need more room.
    """
    nvme = {str(directory): roomy}
    if home == "unified":
        return infinity.Budget(host=roomy)
    apart = None if home == "unified-nvme" else room_on(device, roomy)
    ample = infinity.Budget(device=apart, host=roomy, nvme=nvme)
    planned = functools.partial(
        infinity.plan,
        model,
        optimizer,
        precision=precision,
        device=device,
        accumulation=accumulation,
        checkpoint=checkpoint,
        **({} if average is None else {"average": average}),  # other commits' packages lack the argument
        **({"update": update} if update == "speculative" else {}),
    )
    smallest = planned(budget=ample).smallest
    host = smallest[Tier.HOST]
    if home == "unified-nvme":
        return infinity.Budget(host=host, nvme=nvme)
    near = smallest[Tier.DEVICE]
    if home == "device":
        return infinity.Budget(device=apart, host=host)
    if home in ("host", "mirrored"):
        pages = [unit.nbytes for unit in planned(budget=ample).layout.units]
        # Where all parameter pages rest on the device, no further room for a resident page is needed.
        more = sum(pages) - max(pages) if home == "mirrored" else 0
        return infinity.Budget(device=near + more, host=roomy)
    tight = infinity.Budget(device=near, host=host, nvme=nvme)
    if home == "nvme":
        return tight
    assert home == "mixed", home
    plan = planned(budget=tight)
    parameters = sum(unit.nbytes for unit in plan.layout.units)
    others = sum(plan.home_bytes.values()) - parameters
    return infinity.Budget(device=near + parameters // 2, host=host + others // 2, nvme=nvme)


@contextlib.contextmanager
def short_visits() -> Iterator[None]:
    """Within the `with` statement, plans let chunks of a small model visit the device, where its kernels can
    update them: short chunks, and any share of the device for them.
    """
    with (
        mock.patch.object(homes, "_VISITING_SHARE", 1),
        mock.patch.object(homes, "_CHUNKS", (4096,)),
        mock.patch.object(homes, "_LONG_CHUNK", 4096),
    ):
        yield


def visiting_budget(model: nn.Module, optimizer: torch.optim.Optimizer, **facts: Any) -> infinity.Budget:
    """The budget of a device with room for all parameters and visiting chunks, and for no other page. Call it
    within `short_visits`. facts: what `offload` will be given, too, such as update="lazy".
    """
    plan = infinity.plan(model, optimizer, budget=infinity.Budget(device=ROOMY, host=ROOMY), **facts)
    units, lazy = plan.layout.units, facts["update"] == "lazy"
    near = sum(unit.nbytes for unit in units) + (0 if lazy else 2 * max(plan.gradient_bytes))
    near += homes.VISITORS * max(
        plan.state_format(unit, index).nbytes
        + lazy * chunk.count * plan.gradient_dtype(layout.regions[chunk.region].dtype).itemsize
        for unit, layout in enumerate(units)
        for index, chunk in enumerate(layout.chunks)
    )
    for more in range(0, near // 4, 4096):  # other bytes on the device follow from the budget
        budget = infinity.Budget(device=near + more, host=ROOMY)
        plan = infinity.plan(model, optimizer, budget=budget, **facts)
        if len(plan.visiting_units) == len(units):
            return budget
    raise AssertionError("no budget lets all units visit")


def check_homes(home: str, plan: Any) -> None:
    """Assert that the plan's pages rest where `budget_for(home, ...)` wants them."""
    tiers = {tier for unit in plan.homes for tier in unit.values() if tier is not None}
    if home == "mixed":
        assert Tier.NVME in tiers
        assert len(tiers) > 1
        return
    if home == "mirrored":
        assert plan.mirrored
        assert tiers == {Tier.HOST}
        return
    if home == "host":
        # The room for the largest page to be resident may hold all other parameter pages, too.
        assert Tier.HOST in tiers
        assert {tier for unit in plan.homes for kind, tier in unit.items() if kind.name != "PARAMETER"} <= {
            Tier.HOST,
            None,
        }
        return
    wanted = {
        "device": Tier.DEVICE,
        "nvme": Tier.NVME,
        "unified": Tier.HOST,
        "unified-nvme": Tier.NVME,
    }
    assert tiers == {wanted[home]}
