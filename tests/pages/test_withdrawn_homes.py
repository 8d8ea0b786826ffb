"""Tests that nothing changes a parameter's home in memory before `Home.withdraw` was called for its bytes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice
from torch import nn

import infinity
from infinity.planning import twin_flow
from infinity.tiers import Tier

BUDGETS = {
    "unified": infinity.Budget(host="64MiB"),
    "host": infinity.Budget(device="1MiB", host="64MiB"),
    "device": infinity.Budget(device="64MiB", host="64MiB"),
}


class Watch:
    """Compares the homes of all parameter pages with the ranges for which `withdraw` was called."""

    def __init__(self, runtime: Any) -> None:
        self.homes = [page.home for page in runtime._components.pages if page.home.memory.nbytes]
        self.before = [home.memory.clone() for home in self.homes]
        self.announced = [torch.zeros(home.nbytes, dtype=torch.bool) for home in self.homes]
        for number, home in enumerate(self.homes):
            home.withdraw = functools.partial(self._announce, number)

    def _announce(self, number: int, start: int, end: int) -> None:
        self._compare(number)
        self.announced[number][start:end] = True

    def _compare(self, number: int) -> int:
        """Assert that no byte of a home has changed unannounced. Returns how many have changed."""
        changed = self.homes[number].memory != self.before[number]
        assert not (changed & ~self.announced[number]).any()
        return int(changed.sum())

    def check(self) -> None:
        """Assert that bytes have changed since the last call, all of them announced before."""
        assert sum([self._compare(number) for number in range(len(self.homes))])
        for home, before, announced in zip(self.homes, self.before, self.announced, strict=True):
            before.copy_(home.memory)
            announced.fill_(False)


@pytest.mark.parametrize("name", BUDGETS)
def test_every_change_of_a_home_is_announced(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with infinity.offload(model, optimizer, budget=BUDGETS[name], device="cpu") as runtime:
        runtime.save(tmp_path / "copy").wait()
        watch = Watch(runtime)
        assert all(home.tier in (Tier.HOST, Tier.DEVICE) for home in watch.homes)

        def step() -> None:
            model(torch.ones(2, 64)).sum().backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            model(torch.ones(2, 64))  # completes the update

        step()
        watch.check()
        with runtime.full_parameters(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        watch.check()
        with torch.no_grad():
            model[0].weight.add_(1)
            model[1].bias.data = torch.ones(64, dtype=torch.bfloat16)
        runtime.export(tmp_path / "export")
        watch.check()
        runtime.load(tmp_path / "copy")
        watch.check()


def test_updates_on_the_device_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin_flow, "has_kernels", lambda _: True)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with (
        EmulatedDevice(1).in_use(),
        infinity.offload(model, optimizer, budget=BUDGETS["device"], device="cpu") as runtime,
    ):
        assert runtime.plan.updated_on_device
        watch = Watch(runtime)
        for _ in range(2):
            model(torch.ones(2, 64)).sum().backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            model(torch.ones(2, 64))
            watch.check()
