"""Resume matrix: what a resumed run may differ in from the run before, and what of it must be the same.

A case is a training and two settings, of a run and of the run that continues it. The training is done
without a break, and with one: the run saves and ends, and new objects continue it.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from parity import OPTIMIZERS
from resume_homes import HOMES, budget_of, check_homes
from resume_models import NAMES, UNINITIALISED, Counting, model_entry, scrambled
from run_copies import raw
from torch import nn

import infinity
from infinity import api
from infinity.checkpoint import commit_files
from infinity.checkpoint.restore import division_of
from infinity.config import Precision
from infinity.layout.chunks import Division
from infinity.layout.units import survey
from infinity.planning import homes
from infinity.system.disk_files import DiskFiles
from infinity.tiers import nvme
from infinity.tiers.slab import slab_name

DISKS = ("here", "one", "two")
"""Directories of the nvme budget. "here": that of the commits. "one", "two": so many others."""

CUTS = ("kept", "chunks", "units")
"""How the second run cuts pages. "kept": as planned, and that is as before where it fits the budget.
"chunks": in shorter chunks. "units": in other units."""

ACCUMULATIONS = ("1", "2", "2 undeclared")

FACTORS: dict[str, Sequence[Any]] = {
    "model": NAMES,
    "meta": ("never", "resumed", "both"),
    "before": HOMES,
    "after": HOMES,
    "disks_before": DISKS,
    "disks_after": DISKS,
    "cut": CUTS,
    "states": ("fp32", "bf16", "int8"),
    "compute": ("fp32", "bf16", "fp16"),
    "rule": tuple(OPTIMIZERS),
    "update": ("lazy", "eager", "sync"),
    "accumulation": ACCUMULATIONS,
    "engine_before": ("io_uring", "libaio", "threads"),
    "engine_after": ("io_uring", "libaio", "threads"),
    "groups": (1, 3),
    "commits": (1, 2),
    "through": ("commit", "copy"),
}
"""The fields of Case and their values."""

FIRST, SECOND, END = 3, 5, 8
"""Numbers of steps: at the first commit, at the second one, and at the end."""


@dataclass(frozen=True)
class Case:
    """A training, and the settings of the run and of the one that continues it."""

    model: str
    meta: str
    """Whether the model is built on the meta device: "never", when "resumed", or "both" times."""
    before: str
    after: str
    """A value of HOMES, for the run and for the one that continues it."""
    disks_before: str
    disks_after: str
    cut: str
    states: str
    compute: str
    rule: str
    update: str
    accumulation: str
    engine_before: str
    engine_after: str
    groups: int
    """Number of param groups. One of three is empty."""
    commits: int
    """Number of times that the run is resumed. The second time it has the settings of the first run."""
    through: str = "commit"
    """What a run goes on from: a "commit" of its directory, or a "copy", by `save(path)` and `load(path)`."""


def fits(case: dict[str, Any]) -> bool:
    """Whether a case makes sense. `case` may have some of the factors only."""

    def is_(name: str, *values: Any) -> bool:
        return case.get(name) in values

    # A run that loads a copy begins with values of its own.
    initialised = is_("meta", "both") or (is_("meta", "resumed") and is_("through", "copy"))
    if initialised and (is_("model", *UNINITIALISED) or is_("rule", "adagrad")):  # its states have values
        return False
    if is_("through", "copy") and is_("cut", "units"):
        return False
    if is_("update", "eager") and (is_("compute", "fp16") or is_("accumulation", "2 undeclared")):
        return False
    for side in ("before", "after"):
        if is_(side, "no disk") and is_(f"disks_{side}", "one", "two"):
            return False
        if is_(side, "gradients") and (
            # Gradients get room last with one micro-batch alone, and eager updates keep none.
            is_("accumulation", "2", "2 undeclared") or is_("update", "eager")
        ):
            return False
    return True


@dataclass(frozen=True)
class Setting:
    """What may differ between a run and the one that continues it."""

    home: str
    disks: str
    engine: str
    cut: str = "kept"
    meta: bool = False


def settings(case: Case) -> list[Setting]:
    """The settings of the run, and of each run that continues the one before it."""
    first = Setting(case.before, case.disks_before, case.engine_before, meta=case.meta == "both")
    second = Setting(case.after, case.disks_after, case.engine_after, case.cut, case.meta != "never")
    third = replace(first, meta=case.meta != "never")
    return [first, second, third][: 1 + case.commits]


@dataclass
class End:
    """What a run has done and what it has at its end. All of it must be the same."""

    losses: list[float]
    pages: dict[str, dict[str, Any]]
    """Of each parameter: its values, the arrays of its states as they are stored, its steps and marks."""
    buffers: dict[str, Any]
    extra_states: dict[str, Any]
    loss_scale: tuple[float, int]
    generators: dict[str, Any]
    groups: list[dict[str, Any]]
    adopted: list[bool] = field(default_factory=list)
    """For each resume, whether slabs were adopted, which is not compared."""


class Place:
    """The directories of a training: that of its commits, and those of the nvme budget."""

    def __init__(self, root: Path) -> None:
        self.commits = root / "commits"
        self.copy = root / "copy"
        self._others = [root / "disk0", root / "disk1"]
        for each in self._others:
            each.mkdir(parents=True)

    def begin_anew(self) -> None:
        """Have the next run commit to another directory."""
        self.commits = self.commits.with_name(f"{self.commits.name} more")
        self.copy = self.copy.with_name(f"{self.copy.name} more")

    def disks(self, which: str) -> list[Path]:
        return {"here": [self.commits], "one": self._others[:1], "two": self._others}[which]

    def slabs(self) -> list[Path]:
        return sorted(
            path for each in (self.commits, *self._others) for path in each.glob("infinity-rank*.slab")
        )

    def bring_slabs(self, which: str) -> None:
        """Move slabs to where a run looks for them: its disks, and the directory of its commits."""
        looked_at = [*self.disks(which), self.commits]
        for slab in self.slabs():
            if slab.parent not in looked_at:
                slab.rename(looked_at[0] / slab.name)


def _keep(case: Case, runtime: Any, place: Place, step: int) -> None:
    """Have the run kept as it is after so many steps."""
    path = (place.copy,) if case.through == "copy" else ()
    runtime.save(*path, state=user_state(step))


def undisturbed(case: Case, root: Path) -> End:
    """Do the training of a case in one run, which saves when the other one does."""
    place = Place(root)
    with _offloaded(case, settings(case)[0], place, resume=False) as (model, runtime):
        losses, done = [], 0
        for stop in (FIRST, SECOND)[: case.commits]:
            losses += _train(case, model, runtime, range(done, stop))
            _keep(case, runtime, place, stop)
            place.begin_anew()
            done = stop
        losses += _train(case, model, runtime, range(done, END))
        return _end(losses, model, runtime)


def resumed(case: Case, root: Path) -> End:
    """Do the training of a case in runs that continue one another. Checks what each `load` returns, whether
    slabs were adopted, and which slabs stay.
    """
    place = Place(root)
    first, *others = settings(case)
    stops = (FIRST, SECOND)[: case.commits]
    adopted: list[bool] = []
    with _offloaded(case, first, place, resume=False) as (model, runtime):
        losses = _train(case, model, runtime, range(stops[0]))
        _keep(case, runtime, place, stops[0])
    for stop, setting, end in zip(stops, others, (*stops[1:], END), strict=True):
        del model, runtime
        kept = (place.copy,) if case.through == "copy" else ()
        if kept:
            place.begin_anew()
        else:
            place.bring_slabs(setting.disks)
        with _offloaded(case, setting, place, resume=True) as (model, runtime):
            if not kept:
                adopted.append(_is_adopted(setting, place, runtime))
            assert runtime.load(*kept) == user_state(stop)
            losses += _train(case, model, runtime, range(stop, end))
            if end == END:
                found = replace(_end(losses, model, runtime), adopted=adopted)
            else:
                _keep(case, runtime, place, end)
        if not kept:
            _check_what_stays(place)
    return found


def user_state(step: int) -> dict[Any, Any]:
    """What is given to `save` after so many steps."""
    return {"step": step, 7: ("seven", float("inf"), b"bytes"), "nested": [{"list": [step, None]}]}


@contextlib.contextmanager
def _offloaded(case: Case, setting: Setting, place: Place, *, resume: bool) -> Iterator[tuple[Any, Any]]:
    """Build the case's model and optimizer, and offload them; yields the model and its runtime.

    The generators of random numbers, and all that a commit has, are other ones if the run is resumed.
    """
    entry = model_entry(case.model)
    seed = 99 if resume else 7
    for function in (torch.manual_seed, np.random.seed, random.seed):
        function(seed)
    with torch.device("meta" if setting.meta else "cpu"):
        model = entry.build()
    if resume and not setting.meta:
        scrambled(model)
    optimizer = _optimizer(model, case, rate=1.0 if resume else 2e-3)
    precision = Precision(compute=case.compute, states=case.states, keep=entry.keep)
    options: dict[str, Any] = {
        "precision": precision,
        "device": "cpu",
        "update": case.update,
        "accumulation": None if "undeclared" in case.accumulation else int(case.accumulation),
    }
    with contextlib.ExitStack() as inside:
        inside.enter_context(mock.patch.dict(os.environ, INFINITY_AIO=setting.engine))
        # Measuring disks to stripe pages over them takes long.
        speeds = mock.patch.object(nvme, "_speeds_of", lambda paths, *_: [2.0, 1.0][: len(paths)])
        inside.enter_context(speeds)
        prefer = None
        if case.through == "copy":
            if setting.cut == "chunks":
                inside.enter_context(mock.patch.object(homes, "_CHUNKS", (2 * 4096,)))
        elif resume:
            saved = commit_files.newest(place.commits, DiskFiles())
            assert saved is not None
            prefer = _division(division_of(saved), setting.cut, model, precision)
            inside.enter_context(mock.patch.object(api, "division_of", lambda _: prefer))
        planning = {
            "precision": precision,
            "update": case.update,
            "accumulation": options["accumulation"],
            "slab_directory": str(place.commits),
            "prefer": prefer,
        }
        budget = budget_of(setting.home, model, optimizer, place.disks(setting.disks), planning)
        continues = resume and case.through == "commit"
        options |= {"checkpoint": place.commits, "resume": place.commits if continues else None}
        runtime = inside.enter_context(infinity.offload(model, optimizer, budget=budget, **options))
        check_homes(setting.home, runtime.plan)
        yield model, runtime


def _optimizer(model: nn.Module, case: Case, *, rate: float) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if case.groups == 3:
        wide = [each for each in parameters if each.dim() > 1]
        groups = [
            {"params": wide, "weight_decay": 0.1},
            {"params": [], "lr": 5 * rate},
            {"params": [each for each in parameters if each.dim() <= 1], "lr": 3 * rate},
        ]
    return OPTIMIZERS[case.rule](groups, lr=rate)


def _division(before: Division, cut: str, model: nn.Module, precision: Precision) -> Division:
    """The division of the model that a resumed run prefers. before: that of the commit. cut: of CUTS."""
    if cut == "kept":
        return before
    if cut == "chunks":
        return replace(before, chunk_elements=3 * 4096 if before.chunk_elements == 2 * 4096 else 2 * 4096)
    surveyed = survey(model, precision)
    for nbytes in (1 << 30, 1 << 15, 1):
        units = tuple(
            (name, tuple(surveyed.parameters[index].names[0] for index in members))
            for name, members in surveyed.group(nbytes)
        )
        if units != before.units:
            return replace(before, units=units)
    raise AssertionError("The model has one division only.")


def _is_adopted(setting: Setting, place: Place, runtime: Any) -> bool:
    """Whether a resumed run has adopted slabs. Asserts that it has if pages are cut as before and the slabs
    lie on the run's disks, and not otherwise.
    """
    saved = runtime._components.checkpoint.saved
    alike = Division.of(runtime.plan.layout) == division_of(saved)
    uuids = {each.uuid for each in saved.manifest.volume.slabs}
    names = {slab_name(0, uuid) for uuid in uuids}
    there = {path.parent for path in place.slabs() if path.name in names}
    adopted = {each.uuid for each in runtime._components.store.nvme.record.slabs} == uuids
    assert there and adopted == (alike and there <= set(place.disks(setting.disks)))
    return adopted


def _check_what_stays(place: Place) -> None:
    """Assert that of all slabs those of the newest commit stay, and of all commits that one."""
    (generation,) = commit_files.generations(place.commits)
    saved = commit_files.read(place.commits, generation, DiskFiles())
    assert len(place.slabs()) == len(saved.manifest.volume.slabs)
    assert not list(place.commits.glob(".*.tmp"))


def _train(case: Case, model: nn.Module, runtime: Any, steps: range) -> list[float]:
    """Train steps with these numbers; returns the losses. All generators of random numbers have a say."""
    entry, optimizer, losses = model_entry(case.model), runtime.optimizer, []
    count = int(case.accumulation[0])
    for step in steps:
        for micro in range(count):
            inputs, targets = entry.batch(step, micro)
            if inputs.is_floating_point():
                inputs = inputs.to(Precision(compute=case.compute).compute_dtype)
            weight = 0.5 + random.random() + float(np.random.rand())
            loss = entry.loss(model, (inputs, targets)) * weight
            (loss / count).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    return losses


def _end(losses: list[float], model: nn.Module, runtime: Any) -> End:
    generators = {
        "torch": torch.get_rng_state(),
        "numpy": [*map(str, np.random.get_state())],
        "python": random.getstate(),
    }
    scale = runtime._components.scale
    names = {id(each): name for name, each in model.named_parameters()}
    return End(
        losses=losses,
        pages=raw(runtime, model),
        buffers={name: each.detach().clone() for name, each in model.named_buffers()},
        extra_states={
            name: module.get_extra_state()
            for name, module in model.named_modules()
            if isinstance(module, Counting)
        },
        loss_scale=(scale.value, scale.good_steps),
        generators=generators,
        groups=[
            {**group, "params": [names[id(each)] for each in group["params"]]}
            for group in runtime.optimizer.param_groups
        ],
    )
