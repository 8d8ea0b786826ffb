"""Tests that commits write the bytes that a plan says, and no others.

Pages at home on NVMe are written by updates, with commits and without. All other pages are written by each
commit, as `Plan.commit_bytes` and `Plan.first_commit_bytes` say. Beside pages, a commit writes its two files
and nothing else. Bytes are counted where they are requested (stats), where they end (the I/O engines) and, of
files, by what their operations are given. Those of gradients are subtracted: a gradient that stays in RAM
until its update does not go to the disk, and how many do depends on the speed of the disk.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import watchdog
from homes import ROOMY, budget_for, check_homes, room_on
from parity import seeded_loss
from small_runtime import settle
from torch import nn
from zoo import Entry, entry

import infinity
from infinity.planning.placement import Kind
from infinity.system.disk_files import DiskFiles
from infinity.telemetry.stats import Edge
from infinity.tiers import Tier

__all__ = ["watchdog"]

STEPS = 4
MOST_OF_STATES = 0.002
"""The most bytes of a commit's files, as a share of the bytes of the optimizer states."""


@pytest.fixture
def files_written(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The bytes that are written to files other than slabs' pages, by the suffix of the file's name."""
    found: Counter[str] = Counter()
    write = DiskFiles.write

    def counting(files: DiskFiles, descriptor: int, path: str, offset: int, data: bytes) -> None:
        found[Path(path).suffix] += len(data)
        write(files, descriptor, path, offset, data)

    monkeypatch.setattr(DiskFiles, "write", counting)
    return found


class Counted:
    """Counts what a runtime writes to slabs, except gradients."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._store = runtime._components.store
        self._gradients = 0
        homes = {id(page.home) for page in runtime._components.gradients.pages.values()}
        begin = self._store._begin_write

        def counting(home: Any, offset: int, source: torch.Tensor, *more: Any, **options: Any) -> Any:
            if id(home) in homes and home.nvme_lease is not None:
                self._gradients += source.nbytes
            return begin(home, offset, source, *more, **options)

        self._store._begin_write = counting

    def now(self) -> tuple[int, int]:
        """The bytes so far: as requested, and as the engines have ended them."""
        tier = self._store.nvme
        engines = 0 if tier is None else sum(each.write_bytes for each in tier.stats)
        requested = self._runtime.stats.edges[Edge.HOST_TO_NVME].bytes
        return requested - self._gradients, engines - self._gradients


def budget_of(home: str, model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> Any:
    """A budget for `home` (see homes.py) that is enough with commits, too. settings: of infinity.plan."""
    found = budget_for(home, model, optimizer, **settings)
    apart = None if found.device_bytes is None else room_on("cpu")
    roomy = infinity.Budget(device=apart, host=ROOMY, nvme={str(settings["directory"]): ROOMY})
    least = [
        infinity.plan(
            model,
            optimizer,
            budget=roomy,
            precision=settings["precision"],
            device="cpu",
            checkpoint=checkpoint,
        ).smallest[Tier.HOST]
        for checkpoint in (None, settings["directory"])
    ]
    return infinity.Budget(
        device=found.device_bytes, host=found.host_bytes + least[1] - least[0], nvme=found.nvme
    )


def run(
    of: Entry, directory: Path, *, home: str, states: str, commits: bool, before_steps: bool = False
) -> tuple[Any, list[tuple[int, int]], list[float]]:
    """Train STEPS steps, with a commit after each if `commits` is set, and one before the first if
    `before_steps` is set.

    Returns the plan, the bytes written to slabs from commit to commit (without commits: in the whole run) as
    pairs as of `Counted.now`, and the losses.
    """
    model = of.make()
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-2)
    precision = infinity.Precision(compute="bf16", states=states, keep=of.keep)
    swap = directory / "swap"
    swap.mkdir()
    budget = budget_of(home, model, optimizer, directory=swap, precision=precision)
    checkpoint = directory / "commits" if commits else None
    losses, marks = [], []
    with infinity.offload(
        model, optimizer, budget=budget, precision=precision, device="cpu", checkpoint=checkpoint
    ) as runtime:
        check_homes(home, runtime.plan)
        counted = Counted(runtime)
        marks.append(counted.now())
        if before_steps:
            runtime.save().wait()
            marks.append(counted.now())
        for step in range(STEPS):
            loss = seeded_loss(of, model, of.batch(step, 0), step, 0)
            loss.backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            losses.append(loss.item())
            if commits:
                runtime.save(state={"step": step}).wait()
                marks.append(counted.now())
        settle(runtime)
        if not commits:
            marks.append(counted.now())
        assert counted.now() == marks[-1], "a commit has ended all updates of its step"
        plan = runtime.plan
    deltas = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(marks)]
    return plan, deltas, losses


@pytest.mark.sweep
@pytest.mark.parametrize("states", ["fp32", "int8"])
@pytest.mark.parametrize("home", ["nvme", "unified-nvme"])
@pytest.mark.parametrize("name", ["tied", "frozen"])
def test_pages_on_nvme_are_written_as_without_commits(
    name: str, home: str, states: str, tmp_path: Path
) -> None:
    for each in ("on", "off"):
        (tmp_path / each).mkdir()
    of = entry(name)
    plan, with_commits, losses = run(of, tmp_path / "on", home=home, states=states, commits=True)
    _, without, expected = run(of, tmp_path / "off", home=home, states=states, commits=False)
    assert plan.commit_bytes == plan.first_commit_bytes == 0
    ((requested, ended),) = without
    assert requested == ended > 0
    assert [sum(each) for each in zip(*with_commits, strict=True)] == [requested, ended]
    assert losses == expected


@pytest.mark.sweep
@pytest.mark.parametrize("before_steps", [False, True])
@pytest.mark.parametrize("states", ["fp32", "int8"])
@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("tied", "unified"),
        ("tied", "host"),
        ("tied", "mirrored"),
        ("tied", "device"),
        ("frozen", "unified"),
        ("frozen", "host"),
        ("frozen", "device"),
    ],
)
def test_other_pages_are_written_as_the_plan_says(
    name: str, home: str, states: str, before_steps: bool, tmp_path: Path
) -> None:
    plan, written, _ = run(
        entry(name), tmp_path, home=home, states=states, commits=True, before_steps=before_steps
    )
    first, later = plan.first_commit_bytes, plan.commit_bytes
    assert later > sum(plan.page_sizes[Kind.OPTIMIZER]) and (first > later) is (name == "frozen")
    assert written == [(first, first)] + [(later, later)] * (len(written) - 1)
    assert len(written) == STEPS + before_steps


@pytest.mark.sweep(most=2)
@pytest.mark.parametrize("states", ["fp32", "int8"])
@pytest.mark.parametrize("name", ["tied", "frozen"])
def test_pages_in_several_tiers(name: str, states: str, tmp_path: Path) -> None:
    """Each run writes what its updates write, and commits add what the plan says."""
    for each in ("on", "off"):
        (tmp_path / each).mkdir()
    of = entry(name)
    plan, with_commits, losses = run(of, tmp_path / "on", home="mixed", states=states, commits=True)
    other, without, expected = run(of, tmp_path / "off", home="mixed", states=states, commits=False)
    assert plan.homes == other.homes, "else the runs cannot be compared"
    assert 0 < plan.commit_bytes < sum(plan.home_bytes.values())
    added = plan.first_commit_bytes + (STEPS - 1) * plan.commit_bytes
    assert [sum(each) for each in zip(*with_commits, strict=True)] == [each + added for each in without[0]]
    assert losses == expected


def test_a_commit_writes_two_small_files_beside_pages(files_written: Counter[str], tmp_path: Path) -> None:
    """Its manifest and its data file."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    (tmp_path / "swap").mkdir()
    budget = infinity.Budget(host="48MiB", nvme={tmp_path / "swap": "256MiB"})
    directory = tmp_path / "commits"
    with infinity.offload(
        model,
        optimizer,
        budget=budget,
        precision=infinity.Precision(compute="bf16"),
        device="cpu",
        checkpoint=directory,
    ) as runtime:
        states = sum(runtime.plan.page_sizes[Kind.OPTIMIZER])
        for generation in range(1, 4):
            model(torch.ones(1, 1024, dtype=torch.bfloat16)).sum().backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            before = dict(files_written)
            runtime.save().wait()
            sizes = {each.suffix: each.stat().st_size for each in directory.glob("commit-*")}
            assert set(sizes) == {"", ".safetensors"} and (directory / f"commit-{generation}").exists()
            added = {kind: count - before.get(kind, 0) for kind, count in files_written.items()}
            added = {kind: count for kind, count in added.items() if count}
            # The manifest gets its name by a rename.
            assert added == {".tmp": sizes[""], ".safetensors": sizes[".safetensors"]}
            assert sum(sizes.values()) <= MOST_OF_STATES * states


def test_stats_have_a_share_of_the_bytes_of_commits_in_every_step(tmp_path: Path) -> None:
    """A commit after every third step is in the average, and does not change it by where the run stands."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    with infinity.offload(
        model, optimizer, budget=infinity.Budget(host="48MiB"), device="cpu", checkpoint=tmp_path / "commits"
    ) as runtime:
        for step in range(1, 32):
            model(torch.ones(1, 64)).sum().backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            found.append(runtime.stats.written_per_step)
            if step % 3 == 0:
                runtime.save().wait()
        plan, last = runtime.plan, runtime.stats.last_step
        assert last is not None and plan.traffic.disk_write == 0
        assert last.written_per_step == plan.commit_bytes  # the step after the last commit
        # Each commit is written in the step after it: of 30 steps, all but the first, 10.
        assert found[-1] == plan.commit_bytes / 3 == replace(plan, commit_interval=3).bytes_per_step
        assert all(each > 0 for each in found[3:])
