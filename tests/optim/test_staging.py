"""Tests of staging, the host RAM that updates acquire: no bit of the training changes if a parameter
page in which an update could work is freed while the update asks for staging.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from homes import budget_for
from parity import copied, differences
from torch import nn

import infinity
from infinity.optim.chunk_update import ChunkUpdate
from infinity.optim.scheduler import UpdateScheduler
from infinity.pages.parameter_page import ParameterPage, Presence
from infinity.planning import homes
from infinity.planning.placement import WorkingRoom

PAGES = 4
"""The number of parameter pages for which there is room at a time. An evicted page takes room until its last
view is gone.
"""


def trained(directory: Path) -> dict[str, torch.Tensor]:
    """Train a model for four steps with all pages at home on NVMe, and return its parameters by name.

    At most PAGES parameter pages are in RAM at a time.
    """
    directory.mkdir()
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    precision = infinity.Precision(compute="bf16")
    smallest = budget_for("unified-nvme", model, optimizer, directory, precision)
    page, update = 12 << 10, 76 << 10
    host = (smallest.host_bytes or 0) + PAGES * page + update
    budget = infinity.Budget(host=host, nvme=smallest.nvme)
    with infinity.offload(model, optimizer, budget=budget, precision=precision, device="cpu") as runtime:
        assert runtime.plan.resident_bytes == PAGES * page
        for _ in range(4):
            model(torch.ones(4, 64)).square().sum().backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
        return copied(model.state_dict())


def test_a_page_whose_last_view_goes_while_room_is_sought_is_not_counted_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update does not use its unit's evicted page if that page is freed while the update asks for staging.

    An evicted page lives on while a view of it exists, and an update may work in it in that time. The test
    keeps such a view and drops it just before staging is taken for the unit's update. The trained
    parameters must have the bits of a run without this, and at least one evicted page must have been freed
    in this way.
    """
    monkeypatch.setattr(homes, "WORKING_ROOMS", (WorkingRoom(PAGES, updates=2, transit_buffers=1),))
    plain = trained(tmp_path / "plain")
    seen: dict[int, Any] = {}
    asking: list[ChunkUpdate] = []
    dropped: list[int] = []
    leave, acquire = ParameterPage.leave, UpdateScheduler._try_acquire
    take = UpdateScheduler._try_take

    def leave_seen(page: ParameterPage) -> None:
        seen.clear()
        seen[page.index] = page.residency
        leave(page)

    def acquire_watched(scheduler: UpdateScheduler, update: ChunkUpdate) -> bool:
        asking[:] = [update]
        try:
            return acquire(scheduler, update)
        finally:
            asking.clear()

    def take_late(scheduler: UpdateScheduler, nbytes: int) -> torch.Tensor | None:
        if asking and seen.pop(asking[0].unit, None) is not None:
            dropped.append(asking[0].unit if asking[0].page.presence is Presence.AWAY else -1)
        return take(scheduler, nbytes)

    monkeypatch.setattr(ParameterPage, "leave", leave_seen)
    monkeypatch.setattr(UpdateScheduler, "_try_acquire", acquire_watched)
    monkeypatch.setattr(UpdateScheduler, "_try_take", take_late)
    assert differences(plain, trained(tmp_path / "seen")) == []
    assert {*dropped} - {-1}
