"""Tests that the bytes in use in every pool and the bytes moved between tiers are those that formulas give.

The model has L equal blocks, each of them a unit. In the formulas P is the bytes of a parameter page, T of
the page's trained part, G of a gradient page, and S of an optimizer page. Staging is the host RAM in which
chunks are updated, and where gradients may wait for their update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import HOMES, budget_for, check_homes
from small_runtime import settle
from staged_gradients import StagedGradients
from torch import nn

import infinity
from infinity.pages.parameter_page import Presence
from infinity.planning.placement import Kind
from infinity.telemetry.stats import Edge
from infinity.tiers import Tier

L = 6
WIDTH = 96
"""Features of a block. With so many a block is larger than two of the smallest chunks."""

FP32 = infinity.Precision(compute="fp32")


def blocks(*, bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(L)))


def forward(model: nn.Module) -> torch.Tensor:
    """Run a forward and return its loss.

    The input requires a gradient, so that the backward of every block needs the block's weight.
    """
    return model(torch.ones(3, WIDTH, requires_grad=True)).square().mean()


def step(model: nn.Module, runtime: Any) -> None:
    forward(model).backward()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()


@contextlib.contextmanager
def opened(home: str, directory: Path, model: nn.Module, update: str = "auto") -> Iterator[Any]:
    optimizer = torch.optim.AdamW(model.parameters())
    budget = budget_for(home, model, optimizer, directory, FP32)
    with infinity.offload(
        model, optimizer, budget=budget, precision=FP32, device="cpu", update=update
    ) as runtime:
        check_homes(home, runtime.plan)
        assert len(runtime.plan.layout.units) == L
        yield runtime


def away(runtime: Any) -> list[int]:
    """Return the bytes of each parameter page that rests outside of the tier where the model computes."""
    plan = runtime.plan
    computes_in = Tier.HOST if plan.unified else Tier.DEVICE
    homes = [homes[Kind.PARAMETER] for homes in plan.homes]
    return [plan.page_bytes(u, Kind.PARAMETER) for u, home in enumerate(homes) if home is not computes_in]


def check_resting(runtime: Any) -> None:
    """Assert how many bytes are in use in each pool and tier while nothing is under way.

    Homes take the bytes that the plan says, staging has only gradients that wait there for their update, and
    the pool of resident pages has only the pages that are present.
    """
    plan, store = runtime.plan, runtime._components.store
    assert store.pools["homes"].counters.leased == plan.home_bytes[Tier.HOST]
    assert store.pools["device homes"].counters.leased == plan.home_bytes[Tier.DEVICE]
    gradients = runtime._components.gradients.pages.values()
    staged = sum(
        state.staged.nbytes for page in gradients for state in page.chunks if state.staged is not None
    )
    assert staged <= plan.staging_bytes // 2
    assert store.pools["staging"].counters.leased == staged
    assert store.pools["transit"].counters.leased == plan.transit_buffer_bytes  # the bounce buffer
    nvme = store.nvme
    assert (nvme.budget - nvme.free_bytes if nvme else 0) == plan.home_bytes[Tier.NVME] == plan.nvme_bytes
    present = [
        page.nbytes
        for page in runtime._components.pages
        if page.presence is Presence.PRESENT and not page.permanent
    ]
    assert store.pools["resident"].counters.leased == sum(present) <= plan.resident_bytes
    assert store.host.region.resident_bytes() <= store.host.budget == plan.host_bytes
    if not plan.unified:
        assert store.device.region.resident_bytes() <= store.device.budget == plan.device_bytes


@pytest.mark.parametrize("home", HOMES)
def test_peaks_of_every_phase(home: str, tmp_path: Path) -> None:
    model = blocks()
    with opened(home, tmp_path, model) as runtime:
        plan, store = runtime.plan, runtime._components.store
        resident, staging = store.pools["resident"], store.pools["staging"]
        assert resident.nbytes == plan.resident_bytes
        assert staging.nbytes == plan.staging_bytes
        check_resting(runtime)
        assert resident.counters.leased == resident.counters.peak == 0
        pages = away(runtime)
        most = min(sum(pages), plan.resident_bytes)
        assert most >= max(pages, default=0)

        loss = forward(model)
        settle(runtime)
        check_resting(runtime)
        assert resident.counters.peak == most

        loss.backward()
        settle(runtime)
        check_resting(runtime)
        assert resident.counters.peak == most

        runtime.optimizer.step()
        settle(runtime)
        check_resting(runtime)
        runtime.optimizer.zero_grad()
        check_resting(runtime)

        for _ in range(2):
            step(model, runtime)
            settle(runtime)
            check_resting(runtime)
        assert resident.counters.peak == most
        assert runtime.stats.peaks["staging"] == staging.counters.peak <= plan.staging_bytes
        assert staging.counters.peak or not plan.nvme_bytes


def bytes_of_a_step(runtime: Any, model: nn.Module, number: int) -> dict[Edge, int]:
    """Train `number` steps, and return the bytes that the last of them moved over each edge.

    An edge is a way from one tier to another, in one direction. Reads ahead for the next step are included.
    """
    for _ in range(number - 1):
        step(model, runtime)
        settle(runtime)
    before = runtime.stats.edges
    step(model, runtime)
    settle(runtime)
    after = runtime.stats.edges
    return {edge: after[edge].bytes - before[edge].bytes for edge in Edge}


@pytest.mark.parametrize("bias", [False, True], ids=["", "a chunk of two parameters"])
@pytest.mark.parametrize("home", ["nvme", "unified-nvme"])
def test_bytes_moved_where_everything_is_on_disk(
    home: str, bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third step moves exactly these bytes. There is room for one resident page and one chunk update at
    a time, and all updates run inside step().

    nvme -> host   2 (L - 1) P   parameters; forward and backward each find one page resident already
                 + L T           parameters for updates; on unified memory (L - 1) T, because the page that
                                 is resident is updated in place
                 + L G + L S     gradients and states, except gradients that updates still find in staging
    host -> nvme   L T + L G + L S; even the last gradients are written, as later updates need all of staging
    host -> device 2 (L - 1) P for forward and backward, and T for the result of the update of the page that
                   is resident; nothing on unified memory
    device -> host nothing, because the CPU, which stands for the device, makes gradients in RAM
    """
    staged = StagedGradients(monkeypatch)
    model = blocks(bias=bias)
    with opened(home, tmp_path, model, "sync") as runtime:
        plan = runtime.plan
        p, g, s = (plan.page_bytes(0, kind) for kind in Kind)
        t = p  # one region, all of it trained
        assert plan.resident_bytes == p
        assert plan.staging_bytes == plan.chunk_update_bytes
        in_place = 1 if plan.unified else 0
        for _ in range(2):
            bytes_of_a_step(runtime, model, 1)
        staged.runtime = runtime
        moved = bytes_of_a_step(runtime, model, 1)
        found = staged.count()
        assert found <= plan.staging_bytes // 2
        assert moved == {
            Edge.NVME_TO_HOST: 2 * (L - 1) * p + (L - in_place) * t + L * g - found + L * s,
            Edge.HOST_TO_NVME: L * (t + g + s),
            Edge.HOST_TO_DEVICE: 0 if plan.unified else 2 * (L - 1) * p + t,
            Edge.DEVICE_TO_HOST: 0,  # autograd makes gradients in RAM here
        }
        assert moved[Edge.NVME_TO_HOST] <= plan.traffic.disk_read
        assert moved[Edge.HOST_TO_NVME] == plan.traffic.disk_write


def test_an_update_under_the_next_forward_shares_its_read_of_the_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On unified memory with all pages on disk, lazy updates use the parameters that the next forward reads.

    Over four steps, parameter pages are read for forward and backward, and for the updates of the last
    step, which no forward follows. At most five more pages are read. Gradients that are in staging at
    step() are neither written nor read, because zero_grad() comes before the updates that use them.
    """
    model, steps, staged = blocks(), 4, StagedGradients(monkeypatch)
    with opened("unified-nvme", tmp_path, model) as runtime:
        p, g, s = (runtime.plan.page_bytes(0, kind) for kind in Kind)
        bytes_of_a_step(runtime, model, 2)
        staged.runtime = runtime
        before = runtime.stats.edges
        for _ in range(steps):
            step(model, runtime)
        settle(runtime)
        after = runtime.stats.edges
        found = staged.count()
    read, written = (after[e].bytes - before[e].bytes for e in (Edge.NVME_TO_HOST, Edge.HOST_TO_NVME))
    assert 0 < found <= steps * runtime.plan.staging_bytes // 2
    assert written == steps * L * (p + g + s) - found
    shared = steps * (2 * (L - 1) * p + L * g + L * s) - found
    assert shared <= read <= shared + L * p + (steps + 1) * p


def test_the_first_step_reads_no_moments(tmp_path: Path) -> None:
    model = blocks()
    with opened("nvme", tmp_path, model, "sync") as runtime:
        p, g, _ = (runtime.plan.page_bytes(0, kind) for kind in Kind)
        # Nothing is resident yet, so that the first forward reads every page.
        assert bytes_of_a_step(runtime, model, 1)[Edge.NVME_TO_HOST] == (2 * L - 1) * p + L * p + L * g


@pytest.mark.parametrize("home", ["unified", "host", "device"])
def test_bytes_moved_where_memory_is_home(home: str, tmp_path: Path) -> None:
    """Where no page rests on the disk, the third step moves bytes only between RAM and the device.

    home: where all pages rest. With "unified" (the device has no memory of its own) nothing moves, because
    everything is used in place. With "host", and room for one resident page, 2 (L - 1) P + T bytes go up to
    the device, as when pages rest on the disk. With "device", T + G + S bytes of each block go down to RAM
    and up again, because the CPU adds the gradients and computes the updates.
    """
    model = blocks()
    with opened(home, tmp_path, model) as runtime:
        p, g, s = (runtime.plan.page_bytes(0, kind) for kind in Kind)
        t = p
        up = {"unified": 0, "host": 2 * (L - 1) * p + t, "device": L * (t + g + s)}
        assert bytes_of_a_step(runtime, model, 3) == {
            Edge.NVME_TO_HOST: 0,
            Edge.HOST_TO_NVME: 0,
            Edge.HOST_TO_DEVICE: up[home],
            Edge.DEVICE_TO_HOST: L * (t + g + s) if home == "device" else 0,
        }
