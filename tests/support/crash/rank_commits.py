"""Rank commits: whether the files that a crash left to several ranks hold the commit that they must."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from commit_states import FILES, missing_elements, wrong_arrays, wrong_scalars
from committed_runs import Shot
from ranked_commits import Job, Node, expected

from infinity.checkpoint import commit_files, continued_commit
from infinity.checkpoint.commit_files import SavedCommit
from infinity.errors import ConfigError, CorruptState, IncompatibleCheckpoint, InfinityError

Places = Mapping[str, Path]
"""Recorded directory -> where its files are."""


class FoundOnNode(NamedTuple):
    """A rank commit that was found on a node."""

    node: int
    """The node where it lies."""
    saved: SavedCommit


class Meeting:
    """Lets functions of all ranks agree, each of which runs in a thread of its own."""

    def __init__(self, ranks: int) -> None:
        self._facts: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks)

    def attend(self, rank: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function with an `agree` of this rank. If it raises, no other rank waits for this one."""

        def agree(_: str, **facts: Any) -> dict[int, Any]:
            self._facts[rank] = facts
            self._barrier.wait()
            heard = dict(enumerate(self._facts))
            self._barrier.wait()
            return heard

        try:
            return function(*arguments, agree=agree, **options)
        except BaseException:
            self._barrier.abort()
            raise


def newest_rank_commits(places: Sequence[Places], nodes: Sequence[int]) -> list[FoundOnNode]:
    """The rank commits of the commit that a restart continues, by rank.

    places: node -> those of its directories. nodes: rank -> the node where it is started. Raises the errors
    of `find_commit`.
    """
    meeting, calls = Meeting(len(nodes)), []
    with ThreadPoolExecutor(len(nodes)) as threads:
        for rank, node in enumerate(nodes):
            here = rank_directories(places[node])
            names = {f"rank-{each}": path for each, path in here.items()}
            arguments = (names, next(iter(here.values())), FILES, rank)
            calls.append(
                threads.submit(meeting.attend, rank, continued_commit.find_commit, *arguments, node=node)
            )
    # A rank that was left alone has a BrokenBarrierError, and the one that left it has the reason.
    calls.sort(key=lambda call: isinstance(call.exception(), threading.BrokenBarrierError))
    found = [call.result() for call in calls]
    return [
        FoundOnNode(nodes[holder], found[holder].read[rank][1])
        for rank, holder in enumerate(found[0].holders)
    ]


def rank_directories(places: Places) -> dict[int, Path]:
    """The directories of rank commits on a node, by rank."""
    named = ((Path(recorded).name, there) for recorded, there in places.items())
    return {int(name.removeprefix("rank-")): there for name, there in named if name.startswith("rank-")}


def reached(marks: Sequence[Sequence[str]]) -> tuple[int, dict[int, int]]:
    """The last generation of which any rank has known that it counts, and the step of each that was begun.

    marks: those of each node.
    """
    durable, steps = 0, {}
    for mark in (each for of_node in marks for each in of_node):
        word, *rest = mark.split()
        if word == "begun":
            steps[int(rest[0])] = int(rest[1])
        elif word == "durable":
            durable = max(durable, int(rest[0]))
    return durable, steps


class RanksLoader:
    """Looks at crash states of all nodes (a `crash_cuts.Check`), and counts what it found."""

    def __init__(
        self,
        job: Job,
        nodes: Sequence[int],
        *,
        root: Path | None = None,
        keeps: Path | None = None,
        every: int = 1,
    ) -> None:
        """nodes: rank -> the node where it is started again. root: the directory of the recorded run. keeps:
        a directory into which every so many-th state that has a commit is copied, as a run that can be
        resumed; None: none is.
        """
        self._job = job
        self._nodes = nodes
        self._root = root
        self._keeps = keeps
        self._every = every
        self._scalars: set[tuple[int, bytes, bytes]] = set()
        self.found: set[tuple[int, int, int]] = set()
        """(generation that counted, that was loaded, that was begun) of all states."""
        self.looked = self.apart = 0
        """The number of states, and of those in which the newest rank commits belong to several commits."""
        self.kept: list[tuple[Path, int]] = []
        """The runs that were copied: directory, and the step of the commit."""

    def __call__(self, places: Sequence[Places], marks: Sequence[Sequence[str]]) -> str | None:
        durable, steps = reached(marks)
        begun = max(steps, default=0)
        self.looked += 1
        directories = [each for of_node in places for each in rank_directories(of_node).values()]
        newest = {max(commit_files.generations(each), default=0) for each in directories}
        self.apart += len(newest) > 1
        try:
            found = self._newest(places, durable)
            generation = found[0].saved.manifest.generation if found else 0
            self.found.add((durable, generation, begun))
            manifests = [each.saved.manifest for each in found]
            if len({each.name for each in manifests}) > 1:
                return f"The rank commits are of the commits {[each.generation for each in manifests]}."
            if not durable <= generation <= begun:
                return f"Commit {generation} is loaded; {durable} counted, and {begun} was begun."
            wrong = self._wrong(found, places, steps[generation]) if found else None
            if found and wrong is None and self._keeps is not None and self.looked % self._every == 0:
                self.kept.append((self._copied(places), steps[generation]))
            return wrong
        except InfinityError as error:
            return f"{type(error).__name__}: {error}"

    def _newest(self, places: Sequence[Places], durable: int) -> list[FoundOnNode]:
        """The rank commits that a restart continues; none if it finds none, and no commit counted."""
        try:
            return newest_rank_commits(places, self._nodes)
        except (ConfigError, CorruptState, IncompatibleCheckpoint):
            if durable:
                raise
            return []

    def _wrong(self, found: Sequence[FoundOnNode], places: Sequence[Places], step: int) -> str | None:
        """What differs from the undisturbed run's state after a step."""
        wrong = missing_elements([each.saved for each in found])
        for rank, (node, saved) in enumerate(found):
            shot = expected(self._job, rank, step)
            directory = rank_directories(places[node])[rank]
            wrong += [f"rank {rank}: {each}" for each in self._wrong_scalars(saved, directory, shot)]
            wrong += [f"rank {rank}: {each}" for each in wrong_arrays(saved, [*places[node].values()], shot)]
        return f"A commit after step {step} has other values: {wrong[:3]}" if wrong else None

    def _wrong_scalars(self, saved: SavedCommit, directory: Path, shot: Shot) -> list[str]:
        """What differs in the manifest; nothing for one whose files were compared before."""
        generation = saved.manifest.generation
        paths = [each(directory, generation) for each in (commit_files.manifest_path, commit_files.data_path)]
        key = (generation, *(each.read_bytes() for each in paths))
        if key in self._scalars:
            return []
        wrong = wrong_scalars(saved, shot)
        if not wrong:
            self._scalars.add(key)
        return wrong

    def _copied(self, places: Sequence[Places]) -> Path:
        """Copy a state to where the run had its files, below a new directory, which is returned."""
        assert self._keeps is not None
        target = self._keeps / str(len(self.kept))
        for recorded, there in (pair for of_node in places for pair in of_node.items()):
            shutil.copytree(there, target / Path(recorded).relative_to(self._root))
        return target

    def wrong_at_the_end(self, root: Path, step: int) -> str | None:
        """What is wrong with a run below `root` that has ended with a commit after a step."""
        places = [
            {str(each): each for each in Node(root, node).directories} for node in range(len(self._nodes))
        ]
        return self._wrong(newest_rank_commits(places, self._nodes), places, step)
