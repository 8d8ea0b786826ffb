"""Commit states: whether the files that a crash left hold the commit that they must, whole and as it was."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from committed_runs import MORE, Job, Shot, after, listed, opened, shot, take_step, undisturbed
from parity import differences

from infinity.aio import StripeMap
from infinity.checkpoint import commit_files
from infinity.checkpoint.codec import decode
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.commit_source import CommitSource, RankCommit
from infinity.checkpoint.manifest import VALUES
from infinity.errors import CorruptState, InfinityError
from infinity.formats.encodings import split
from infinity.layout.strides import in_memory_order
from infinity.system.disk_files import DiskFiles
from infinity.tiers.slab import find_slab

FILES = DiskFiles()


class SlabFiles:
    """The slabs of a commit as a CommitSource reads them, without an I/O engine, to open fast."""

    def __init__(self, saved: SavedCommit, directories: Sequence[Path]) -> None:
        """Raises as the adoption of slabs does."""
        record = saved.manifest.volume
        self._map = StripeMap([each.weight for each in record.slabs], record.stripe_bytes)
        self._descriptors: list[int] = []
        for each in record.slabs:
            path = find_slab(directories, saved.manifest.rank, each.uuid)
            if path.stat().st_size < each.nbytes:
                raise CorruptState(f"{path} is too short.", "None.")
            self._descriptors.append(os.open(path, os.O_RDONLY))

    def read(self, into: torch.Tensor, offset: int) -> None:
        """Read bytes of the volume, as `infinity.checkpoint.commit_source.Read` says."""
        done = 0
        for slab, start, nbytes in self._map.extents(offset, into.nbytes):
            moved = os.preadv(self._descriptors[slab], [into.numpy()[done : done + nbytes]], start)
            assert moved == nbytes
            done += nbytes

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


def reached(marks: Sequence[str]) -> tuple[int, dict[int, int]]:
    """The last generation that is known to be durable, and the step of each that was begun, from marks."""
    durable, steps = 0, {}
    for mark in marks:
        what, generation, step = mark.split()
        if what == "begun":
            steps[int(generation)] = int(step)
        else:
            durable = int(generation)
    return durable, steps


class Loader:
    """Looks at crash states (a `Check`), and counts what it found."""

    def __init__(
        self, directories: Sequence[Path], job: Job, *, trains_every: int = 0, ordered_names: bool = True
    ) -> None:
        """directories: those of the run: of commits, then of slabs. trains_every: from every how many-th
        state that has a commit the run is also continued, by `continued`; 0: from none. ordered_names: as
        the `Disk` has it. Otherwise the first commit may lose one of its two names.
        """
        self._ordered = ordered_names
        self._directories = [str(each) for each in directories]
        self._job = job
        self._every = trains_every
        self._shots = undisturbed(job.compute)
        self._scalars: set[tuple[int, bytes, bytes]] = set()
        self.found: set[tuple[int, int, int]] = set()
        """(generation that was durable, that was loaded, that was begun) of all states."""
        self.looked = self.trained = 0

    def __call__(self, places: Mapping[str, Path], marks: list[str]) -> str | None:
        directories = [places[each] for each in self._directories]
        durable, steps = reached(marks)
        begun = max(steps, default=0)
        self.looked += 1
        try:
            saved = self._newest(directories[0], durable)
            generation = 0 if saved is None else saved.manifest.generation
            self.found.add((durable, generation, begun))
            if not durable <= generation <= begun:
                return f"Commit {generation} is loaded; {durable} was durable, and {begun} was begun."
            if saved is None:
                return None
            wrong = self._wrong(saved, directories, steps[generation])
            if wrong is None and self._every and self.looked % self._every == 0:
                self.trained += 1
                wrong = continued(self._job, directories, steps[generation])
            return wrong
        except InfinityError as error:
            return f"{type(error).__name__}: {error}"

    def _newest(self, directory: Path, durable: int) -> SavedCommit | None:
        try:
            return commit_files.newest(directory, FILES)
        except CorruptState:
            if durable or self._ordered:
                raise
            return None

    def _wrong(self, saved: SavedCommit, directories: Sequence[Path], step: int) -> str | None:
        shot = self._shots[step]
        generation = saved.manifest.generation
        key = (
            generation,
            *(
                path(directories[0], generation).read_bytes()
                for path in (commit_files.manifest_path, commit_files.data_path)
            ),
        )
        if key not in self._scalars:
            wrong = wrong_scalars(saved, shot)
            if wrong:
                return f"Commit {generation} has other scalars: {wrong}"
            self._scalars.add(key)
        wrong = missing_elements([saved]) + wrong_arrays(saved, directories, shot)
        return f"Commit {generation} has other values: {wrong}" if wrong else None


def wrong_scalars(saved: SavedCommit, shot: Shot) -> list[str]:
    """Where the manifest's scalars differ from those of the undisturbed run."""
    manifest = saved.manifest

    def decoded(nodes: Mapping[str, Any]) -> dict[str, Any]:
        return {name: decode(each, saved.tensors, name) for name, each in nodes.items()}

    groups = [
        {**decode(each.options, saved.tensors), "params": list(each.params)}
        for each in manifest.run.param_groups
    ]
    steps = {each.names[0]: each.step for each in manifest.parameters if each.step}
    return [
        *differences(groups, shot.groups, "groups"),
        *differences(decoded(manifest.run.buffers), shot.buffers, "buffers"),
        *differences(listed(decoded(manifest.run.rng)), shot.generators, "generators"),
        *differences(decode(manifest.run.state, saved.tensors), shot.state, "state"),
        *differences(steps, {name: int(each["step"]) for name, each in shot.states.items()}, "steps"),
    ]


def missing_elements(rank_commits: Sequence[SavedCommit]) -> list[str]:
    """Which parameters have elements that none of the rank commits of a commit has."""
    missing = []
    for entries in zip(*(saved.manifest.parameters for saved in rank_commits), strict=True):
        end = 0
        for each in sorted((each.first, each.count) for entry in entries for each in entry.ranges):
            end = max(end, sum(each)) if each[0] <= end else end
        if end != entries[0].numel:
            missing.append(f"{entries[0].names[0]} lacks elements from {end} on")
    return missing


def wrong_arrays(saved: SavedCommit, directories: Sequence[Path], shot: Shot) -> list[str]:
    """Where the arrays of parameters, as far as the commit has them, differ from the undisturbed run's.

    directories: where the slabs lie. Raises CorruptState for arrays whose checksums differ.
    """
    files = SlabFiles(saved, directories)
    try:
        return _wrong_arrays(saved, CommitSource([RankCommit(saved, files.read)]), shot)
    finally:
        files.close()


def _wrong_arrays(saved: SavedCommit, source: CommitSource, shot: Shot) -> list[str]:
    wrong = []
    parameters = source.parameters()
    for entry in saved.manifest.parameters:
        name = entry.names[0]
        parameter = parameters[name]
        values = in_memory_order(shot.parameters[name], parameter.stride)
        wanted = {VALUES: values}
        state = shot.states.get(name, {})
        for array in parameter.state_arrays(source.rule):
            if array.name in state:
                wanted[array.name] = in_memory_order(state[array.name], parameter.stride)
            elif array.name == "remainder" and "master" in state and not parameter.edited:
                wanted[array.name] = split(in_memory_order(state["master"], parameter.stride))[1]
            else:
                for each in entry.ranges:
                    source.read(name, array.name, each.first, each.count)
        for array_name, tensor in wanted.items():
            for each in entry.ranges:
                found = source.read(name, array_name, each.first, each.count)
                if not np.array_equal(_bits(found), _bits(tensor[each.first : each.first + each.count])):
                    wrong.append(f"{name}.{array_name} from element {each.first} on")
        if parameter.moments != (name in shot.states):
            wrong.append(f"{name} {'has' if parameter.moments else 'lacks'} moments")
    return wrong


def _bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.contiguous().view(torch.uint8).numpy()


def continued(job: Job, directories: Sequence[Path], step: int, *, more: bool = False) -> str | None:
    """Resume a run whose newest commit is that of a step, and train MORE steps.

    more: whether the commit's state may hold more than `user_state` says.

    Returns what differs from the undisturbed run. Raises the errors of `infinity.offload`.
    """
    shots = undisturbed(job.compute)
    with opened(job, directories, resume=True) as (model, runtime):
        found = runtime.load()
        wanted = shots[step].state
        if wanted != ({name: found[name] for name in wanted} if more else found):
            return f"The state after step {step} was not loaded."
        after(model, runtime, step)
        for number in range(step + 1, step + 1 + MORE):
            loss = take_step(model, runtime, number)
            if loss != shots[number].loss:
                return f"Step {number} after a commit at step {step} has the loss {loss}."
            if number < step + MORE:
                after(model, runtime, number)
        last = shot(model, runtime, number, loss)
        wrong = differences(vars(last), vars(shots[number]), "run")
    return f"After a commit at step {step} step {number} differs: {wrong[:3]}" if wrong else None
