"""Tests of live runtimes whose disk loses or changes bytes: the first read finds it, and nothing uses it.

The damaged bytes lie anywhere in the slabs. A test notes what the runtime does first there: a read must raise
CorruptState, and a write makes the damage good. All losses are those of a run on a disk that does not lie.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aio_backends import each_backend
from damaged_disk import Disk, read_at, write_at
from faulty import watchdog
from homes import budget_for
from parity import differences
from runs_on_disk import Run, everything
from torch import nn
from zoo import entry as zoo_entry

import infinity
from infinity.aio import Faults
from infinity.errors import ConfigError, CorruptState
from infinity.system.disk_files import injected

__all__ = ["watchdog"]

KINDS = ("flip", "zero", "punch", "stale", "torn")
HOMES = ("nvme", "unified-nvme", "mixed")


class Hostile:
    """A run, and one on a disk that does not lie, which says what the losses are."""

    def __init__(self, run: Run, count: int) -> None:
        """count: number of steps."""
        self.run = run
        root = run.root / "expected"
        root.mkdir(parents=True)
        expected = Run(root, of=run.of, home=run.home, states=run.states, commits=False)
        with expected.opened() as (model, runtime):
            self.losses = expected.train(model, runtime, range(count))
            self.end = everything(model, runtime)
        self.found: Counter[str] = Counter()

    def train(self, patch: pytest.MonkeyPatch) -> Counter[str]:
        """Train all steps, and damage the disk before most; returns how often the runtime noticed it, wrote
        there first, or did neither.
        """
        with self.run.opened() as (model, runtime):
            disk = Disk(runtime._components.store.nvme, random.Random(len(self.losses)), patch)
            for number in range(len(self.losses)):
                if number % 5 == 0:
                    disk.remember()
                    self._step(model, runtime, number)
                else:
                    self._damaged_step(model, runtime, number, disk)
            assert differences(everything(model, runtime), self.end) == []
        return self.found

    def _step(self, model: nn.Module, runtime: Any, number: int) -> None:
        assert self.run.train(model, runtime, range(number, number + 1)) == [self.losses[number]]

    def _damaged_step(self, model: nn.Module, runtime: Any, number: int, disk: Disk) -> None:
        place, before = disk.damage(KINDS[(number + number // 5) % 5])
        damaged = read_at(place)

        def repair(error: CorruptState) -> None:
            assert (error.path, error.offset) == place and disk.first[place] == "read"
            assert place.path in error.cause and str(place.offset) in error.cause
            assert " of " in error.cause, "names what lies there"
            disk.settle()
            if read_at(place) == damaged:
                write_at(place, before)
            runtime.optimizer.zero_grad()

        noticed = repeated(lambda: self._step(model, runtime, number), repair)
        noticed += repeated(lambda: everything(model, runtime), repair)
        assert noticed or disk.first.get(place) != "read", "damaged bytes were used"
        self.found["noticed" if noticed else disk.first.get(place, "neither")] += 1


def repeated(action: Callable[[], object], repair: Callable[[CorruptState], None]) -> int:
    """Do something again while it raises CorruptState, after a call of `repair`; returns how often it did."""
    for count in range(5):
        try:
            action()
            return count
        except CorruptState as error:
            repair(error)
    raise AssertionError("the damage was repaired, and is found again")


CASES = [("nvme", False), ("unified-nvme", True), ("mixed", False)]
"""Homes of pages, and whether commits are on."""


@pytest.mark.sweep(most=2)
@pytest.mark.parametrize("home, commits", CASES)
def test_damage_is_found_and_never_used(
    home: str, commits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, home=home, commits=commits)
    found = Hostile(run, 15).train(monkeypatch)
    assert found.total() == 12 and found["noticed"] >= 6, found


@pytest.mark.slow
@each_backend
@pytest.mark.parametrize("commits", [False, True], ids=["no commits", "commits"])
@pytest.mark.parametrize("home", HOMES)
def test_a_thousand_damages(
    backend: str, home: str, commits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINITY_AIO", backend)
    run = Run(tmp_path, home=home, commits=commits)
    found = Hostile(run, 75).train(monkeypatch)
    assert found.total() == 60 and found["noticed"] >= 30, found


@pytest.mark.sweep(most=2)
@pytest.mark.parametrize("nbytes", [0, 2048], ids=["dropped", "torn"])
@pytest.mark.parametrize("home, commits", CASES[:2])
def test_writes_that_the_disk_loses(home: str, commits: bool, nbytes: int, tmp_path: Path) -> None:
    """A write that never reached the disk, or reached it in part, is found by the next read of its bytes; a
    new process goes on from the last commit.
    """
    run = Run(tmp_path, home=home, commits=commits)
    losses, faults = Hostile(run, 6).losses, Faults()
    with pytest.raises(CorruptState) as caught, run.opened(faults=faults) as (model, runtime):
        assert run.train(model, runtime, range(2)) == losses[:2]
        if commits:
            runtime.save(state=2).wait()
        assert run.train(model, runtime, range(2, 3)) == losses[2:3]
        faults.tear(3, nbytes)
        for step in range(3, 6):
            assert run.train(model, runtime, range(step, step + 1)) == losses[step : step + 1]
    assert faults.fired == 1 and caught.value.path is not None
    if commits:
        with run.opened(resume=True) as (model, runtime):
            assert runtime.load() == 2
            assert run.train(model, runtime, range(2, 6)) == losses[2:]


def test_damage_passes_where_nothing_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With verify=False no checksums are kept: what the tests above find is there to be found."""
    run = Run(tmp_path, commits=False)
    model = run.of.make()
    budget = run.budget(model, torch.optim.AdamW(model.parameters()))
    hostile = Hostile(run, 6)
    with run.opened(budget=dataclasses.replace(budget, verify=False)) as (model, runtime):
        tier = runtime._components.store.nvme
        disk = Disk(tier, random.Random(1), monkeypatch)
        hostile._step(model, runtime, 0)
        place = next(place for place, first in disk.first.items() if first == "read")
        disk.settle()
        write_at(place, bytes(4096))
        run.train(model, runtime, range(1, 3))
        assert differences(everything(model, runtime), hostile.end) != []
        assert [each.verified_bytes for each in tier.stats] == [0]


@pytest.mark.parametrize("commits", [False, True])
def test_every_read_is_verified(commits: bool, tmp_path: Path) -> None:
    """No read or write covers 4096 bytes in part, in any phase of a run. Only what was never written, moments
    before the first update, is read unverified.
    """
    run = Run(tmp_path, of=zoo_entry("transformer"), commits=commits)
    with run.opened() as (model, runtime):
        run.train(model, runtime, range(1))
        everything(model, runtime)
        tier = runtime._components.store.nvme
        begun = [each.read_bytes - each.verified_bytes for each in tier.stats]
        run.train(model, runtime, range(1, 3))
        runtime.save(tmp_path / "copy")
        runtime.load(tmp_path / "copy")
        if commits:
            runtime.save().wait()
        everything(model, runtime)
        assert [each.read_bytes - each.verified_bytes for each in tier.stats] == begun
        assert all(
            each.verified_bytes > unverified for each, unverified in zip(tier.stats, begun, strict=True)
        )


def test_verify_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match="verify is 'no'"):
        infinity.Budget(verify="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("update", ["sync", "lazy"])
def test_an_edit_waits_for_writes_from_the_memory_that_it_changes(update: str, tmp_path: Path) -> None:
    """A write behind an update reads the page that the model computes with."""
    of = zoo_entry("tied")
    model = of.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    precision = infinity.Precision(compute="fp32")
    budget = budget_for("unified-nvme", model, optimizer, tmp_path, precision)
    faults = Faults()
    with injected(faults):
        runtime = infinity.offload(
            model, optimizer, budget=budget, precision=precision, device="cpu", update=update
        )
    with runtime:
        for number in range(2):
            of.loss(model, of.batch(number, 0)).backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            faults.delay("write", 1, 0.05, times=None)
            for module in (model.blocks[0].mlp[0], model.blocks[1].norm_mlp):
                with runtime.full_parameters(module), torch.no_grad():
                    module.bias.mul_(0.5)
            faults.clear()
        assert all(bool(each.isfinite().all()) for each in model.state_dict().values())


@pytest.mark.sweep
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("update", ["sync", "lazy"])
def test_an_edit_through_a_view_follows_writes_behind_updates(
    update: str, compute: str, tmp_path: Path
) -> None:
    """The view is older than the update, and the edit comes before anything else notices it."""
    of = zoo_entry("tied")
    model = of.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    precision = infinity.Precision(compute=compute)
    smallest = budget_for("unified-nvme", model, optimizer, tmp_path, precision)
    budget = dataclasses.replace(smallest, host=smallest.host + (60 << 10))  # views keep pages in RAM
    faults = Faults()
    with injected(faults):
        runtime = infinity.offload(
            model, optimizer, budget=budget, precision=precision, device="cpu", update=update
        )
    with runtime:
        for number in range(2):
            view = model.blocks[0].mlp[0].bias.detach()
            of.loss(model, of.batch(number, 0)).backward()
            faults.delay("write", 1, 0.05, times=None)
            runtime.optimizer.step()
            view.add_(0.5)
            faults.clear()
            runtime.optimizer.zero_grad()
            right = view.clone()
            del view
            for turn in range(2):
                of.loss(model, of.batch(turn, 0))
            assert torch.equal(model.blocks[0].mlp[0].bias, right)


class Edited(nn.Module):
    """Layers, one of which may be changed in the forward by way of a view that the forward makes of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))
        self.view_of: Callable[[nn.Parameter], torch.Tensor] | None = None
        self.edits = True
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == 1 and self.view_of is not None:
                self.kept = self.view_of(layer.weight)
                if self.edits:
                    self.edit()
        return x

    def edit(self) -> None:
        assert self.kept is not None
        with torch.no_grad():
            self.kept.mul_(0.5)
        self.kept = None


def stepped(model: Edited, optimizer: Any) -> None:
    model(torch.ones(3, 40)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


VIEWS = {"detached": lambda weight: weight.detach(), "with a graph": lambda weight: weight[:20]}


@pytest.mark.parametrize("view", VIEWS)
def test_an_edit_in_a_forward_follows_writes_behind_updates(view: str, tmp_path: Path) -> None:
    """The edit comes through a view made in the forward, without an operation on the parameter."""
    plain, model = Edited(), Edited()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = infinity.Precision(compute="fp32")
    smallest = budget_for("unified-nvme", model, optimizer, tmp_path, precision)
    budget = dataclasses.replace(smallest, host=smallest.host + (8 << 10))  # for the page with the view
    faults = Faults()
    with injected(faults):
        runtime = infinity.offload(
            model, optimizer, budget=budget, precision=precision, device="cpu", update="lazy"
        )
    trained = (plain, torch.optim.SGD(plain.parameters(), lr=0.1)), (model, runtime.optimizer)
    with runtime:
        for _ in range(2):
            for each, its in trained:
                stepped(each, its)
                faults.delay("write", 1, 0.05, times=None)
                each.view_of = VIEWS[view]
                each(torch.ones(3, 40))
                each.view_of = None
                faults.clear()
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("view, kept", [("detached", False), ("detached", True), ("with a graph", False)])
def test_a_commit_has_no_edit_of_a_view_that_a_forward_made(view: str, kept: bool, tmp_path: Path) -> None:
    """kept: the view is older than `save`, and is edited after it."""
    model, again = Edited(), Edited()
    faults = Faults()
    options: dict[str, Any] = {
        "budget": infinity.Budget(host="64MiB", nvme={str(tmp_path): "64MiB"}),
        "precision": infinity.Precision(compute="fp32"),
        "device": "cpu",
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with injected(faults):
        runtime = infinity.offload(model, optimizer, checkpoint=tmp_path / "commits", **options)
    with runtime:
        stepped(model, runtime.optimizer)
        model.edits = not kept
        model.view_of = VIEWS[view] if kept else None
        stepped(model, runtime.optimizer)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        faults.delay("write", 1, 0.05, times=None)
        commit = runtime.save()
        if kept:
            model.edit()
        else:
            model.view_of = VIEWS[view]
            model(torch.ones(3, 40))
        model.view_of = None
        commit.wait()
        assert not torch.equal(model.state_dict()["layers.1.weight"], saved["layers.1.weight"])
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    with infinity.offload(again, optimizer, resume=tmp_path / "commits", **options):
        assert differences(dict(again.state_dict()), saved) == []
