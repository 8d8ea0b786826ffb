"""Copies: saves the run of a runtime into a directory, and loads such a copy of a run into a runtime.

A copy is a commit of one rank in a directory of its own. It has one slab, in which the arrays of all
parameters lie one behind another in memory order. `CommitSource` reads it, `infinity checkpoint` lists and
verifies it, and resume= continues it. The runtime's own commits may be on or off.

[Note: copies of ranks]
Several ranks make one copy, which does not depend on their number. Rank 0 writes it, and fetches what other
ranks keep; rank 0's RunState is in the copy. To load a copy, each rank reads what it keeps. Saving and
loading consist of phases: no rank begins a phase before all ranks have ended the previous one, and if a rank
raises an error, all do. So no rank serves or reads values that are about to be replaced, and none goes on if
a copy is not whole.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from infinity.checkpoint import commit_files, tensor_files
from infinity.checkpoint import manifest as form
from infinity.checkpoint.atomic_directory import Writer, check_destination, check_room, published, storing
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.commit_source import CommitSource, RankCommit
from infinity.checkpoint.committer import Committer
from infinity.checkpoint.export import Source, model_entries
from infinity.checkpoint.record import manifest_of, now, parameter_entry
from infinity.checkpoint.restore import check_held, match, restore, show
from infinity.checkpoint.retiled_source import retiled
from infinity.checkpoint.run_state import RunState, capture, generators, group_names
from infinity.checkpoint.verification import find_slabs
from infinity.checksum import crc32c_blocks
from infinity.config import round_up
from infinity.errors import ConfigError, CorruptState, IncompatibleCheckpoint
from infinity.gradients.loss_scale import LossScale
from infinity.model.paged_parameter import Place
from infinity.optim.scheduler import UpdateScheduler
from infinity.pages.edits import EditTracker
from infinity.pages.health import Health
from infinity.pages.optimizer_page import States
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.store import Store
from infinity.prefetch.engine import PrefetchEngine
from infinity.ranks import SingleRank
from infinity.system.disk_files import DiskFiles
from infinity.tiers import PAGE_ALIGNMENT
from infinity.tiers.slab import slab_name
from infinity.tiers.striping import SlabRecord, VolumeRecord

_GENERATION = 1
"""Generation of a copy's commit. A run that continues in the copy's directory begins with generation 2."""


class Copies:
    """Saves and loads copies of one runtime's run. All methods are called under the runtime's lock."""

    def __init__(
        self,
        source: Source,
        *,
        pages: Sequence[ParameterPage],
        edits: EditTracker,
        prefetch_engine: PrefetchEngine,
        scheduler: UpdateScheduler | None,
        committer: Committer | None,
        scale: LossScale,
        health: Health,
        ranks: SingleRank,
    ) -> None:
        """source: the model with its pages. scheduler: None for inference. committer: None if commits are
        off. ranks: connects with the other ranks. The other arguments: components of the runtime.
        """
        self._ranks = ranks
        self._source = source
        self._pages = pages
        self._edits = edits
        self._prefetch_engine = prefetch_engine
        self._scheduler = scheduler
        self._committer = committer
        self._scale = scale
        self._health = health

    def save(self, path: str | os.PathLike[str], groups: Sequence[Mapping[str, Any]], state: object) -> None:
        """Write the run into the directory `path`, as `Runtime.save` says. groups: the optimizer's param
        groups, none for inference. state: the user's.
        """
        writes = self._ranks.share.rank == 0
        with self._ranks.phase("save(path)", first=True):
            run = None
            if writes:
                run = capture(self._source.model, groups, self._scale, state=state, rng=generators())
            self.complete()
        with self._ranks.phase("the writing of a copy"):
            if run is not None:
                write_copy(self._source, self._pages, path, run)

    def load(self, path: str | os.PathLike[str], groups: Sequence[dict[str, Any]]) -> Any:
        """Set the run to the one in the directory `path`, as `Runtime.load` says. Returns the user's state.

        groups: the optimizer's param groups, whose options are set in place; none for inference.
        """
        source, store = self._source, self._source.store
        layout, homes = store.plan.layout, [page.home for page in self._pages]
        with self._ranks.phase("load(path)", first=True) as same:
            saved, copy = open_copy(path, store.files)
            run, copy = saved.run, retiled(copy, layout)
            match(copy, layout, source.states)
            with_groups = copy.rule is not None and source.states is not None
            if with_groups:
                run.check_groups([group_names(group) for group in groups])
            run.check_buffers(source.model)
            user_state = run.user_state
            self.complete()
            held = check_held(copy, layout, homes, source.states, store)
            if self._committer is not None:
                self._committer.complete()
            same["copy"] = saved.manifest.volume.slabs[0].uuid
        with self._poisoning():
            with self._ranks.phase("the reading of a copy"):
                restored = restore(copy, layout, homes, source.states, store, besides=held)
                self._prefetch_engine.homes_replaced()
                show(self._pages, self._edits, store)
            with self._ranks.phase("the end of load(path)"):
                self._prefetch_engine.bring_exposed()
                if with_groups:
                    run.set_groups(groups)
                run.set_module_state(source.model, self._scale, store.plan.device)
                run.set_generators()
        restored.warn(stacklevel=3)
        return user_state

    def exchange_averages(self) -> None:
        """Exchange the masters of a running model with their running averages, as `Runtime.averaged` does.

        Raises StorageError; after an error in the exchange the runtime cannot be used.
        """
        states, store = self._source.states, self._source.store
        assert states is not None
        self.complete()
        if self._committer is not None:
            self._committer.complete()
        with self._poisoning():
            if states.keeps_averages:  # before the first step they are the masters
                store.link.drain()  # copies of pages on their way to a device still read homes in RAM
                for page in self._pages:
                    for index in sorted(states.pages[page.index].trainable):
                        _exchange(page, index, states, store)
            states.exchanged = not states.exchanged
            self._prefetch_engine.homes_replaced()
            show(self._pages, self._edits, store)

    def complete(self) -> None:
        """Complete all updates, reads ahead and writes, and write the user's edits home. Raises StorageError
        if one of them fails.
        """
        if self._scheduler is not None:
            self._scheduler.complete_all()
        self._prefetch_engine.land_all()
        self._edits.sync_edits()
        self._source.store.settle()

    @contextmanager
    def _poisoning(self) -> Iterator[None]:
        """Context that makes the runtime unusable after an error, because its pages are a mixture of two
        runs.
        """
        try:
            yield
        except Exception as error:
            self._health.lose(error)
            raise


def _exchange(page: ParameterPage, index: int, states: States, store: Store) -> None:
    """Exchange a parameter's master with its running average, bit by bit, at home."""
    layout = page.layout.parameters[index]
    if not layout.numel:
        return
    start, nbytes = page.start(index), layout.numel * layout.dtype.itemsize
    values = store.fetch(page.home, start, nbytes).view(layout.dtype)
    master = states.master(page.index, index, values).clone()
    average = states.average(page.index, index, values)
    store.patch(page.home, start, states.encode(page.index, index, average))
    states.write_average(page.index, index, master)


def write_copy(
    source: Source, pages: Sequence[ParameterPage], path: str | os.PathLike[str], run: RunState
) -> None:
    """Write a run into the directory `path`, which must be empty or not exist yet. Parents are made.

    The directory appears whole or not at all, and only this user may read it. source: the model, with the
    components of its runtime that hold its parameters and states. pages: its parameter pages; no update may
    be due or under way. run: the state outside of pages.

    RAM holds at most 2 x 2**20 elements of an array at a time, and `run`. Raises ConfigError, before anything
    is written, if the path cannot be used, or if a parameter was added, replaced, renamed or removed after
    the model was offloaded. Raises StorageFull or StorageError if a file cannot be written or a page cannot
    be read. After an error `path` is as it was before.
    """
    target = check_destination(path, "save to")
    names = {entry.name for entry in model_entries(source, as_masters=False)}
    arrays = _Arrays(source, pages)
    for page, index, _ in arrays.parameters:
        layout = page.layout.parameters[index]
        name = layout.tile_of or layout.names[0]
        if name not in names:
            raise ConfigError(
                f"The parameter {name} was renamed or removed after the model was offloaded.",
                "Change the model first, then offload it (close the runtime and offload again).",
            )
    slab = SlabRecord(uuid.uuid4().hex, max(PAGE_ALIGNMENT, round_up(arrays.nbytes, PAGE_ALIGNMENT)), 1)
    check_room(target, slab.nbytes)
    with storing("save to", target), published(target, private=True) as directory, Writer() as writer:

        def write(name: str, content: Iterable[bytes | memoryview]) -> None:
            with storing("write", target / name):
                writer.write(directory / name, content)

        write(slab_name(0, slab.uuid), arrays.content(slab.nbytes))
        manifest = manifest_of(
            source.store.plan,
            run,
            generation=_GENERATION,
            created=now(),
            volume=VolumeRecord(slab.nbytes, (slab,)),
            rule=arrays.rule,
            parameters=tuple(arrays.entries),
        )
        data, text = commit_files.contents(
            SavedCommit(manifest, np.concatenate(arrays.checksums), run.tensors)
        )
        write(commit_files.data_path("", _GENERATION).name, [data])
        write(commit_files.manifest_path("", _GENERATION).name, [text])


class _Arrays:
    """The arrays of all parameters in the order in which a copy has them."""

    def __init__(self, source: Source, pages: Sequence[ParameterPage]) -> None:
        self._source = source
        self.rule = None if source.states is None else form.OptimizerRule.of(source.states)
        states = {} if source.states is None else source.states.pages
        self.parameters = [
            (page, index, parameter_entry(layout, index, states.get(page.index)))
            for page in pages
            for index, layout in enumerate(page.layout.parameters)
        ]
        arrays = (
            (each, entry.numel) for *_, entry in self.parameters for each in entry.arrays(self.rule).values()
        )
        self.nbytes = sum(form.array_bytes(*each) for each in arrays)
        self.entries: list[form.ParameterEntry] = []
        """The parameters' entries for the manifest, each with one range; complete once `content` has ended.
        """
        self.checksums: list[npt.NDArray[np.uint32]] = [np.zeros(0, dtype=np.uint32)]
        """The CRC-32Cs of the blocks that `content` has yielded."""

    def content(self, nbytes: int) -> Iterator[memoryview]:
        """Yield the bytes of the slab, which has `nbytes` bytes."""
        at = count = 0
        for page, index, entry in self.parameters:
            arrays = {}
            for array in entry.arrays(self.rule).values() if entry.numel else ():
                arrays[array.name] = form.StoredArray(at, count)
                block = form.array_bytes(array, form.BLOCK)
                for part in self._tensors(page, index, array.name):
                    self._source.pager.lock.safe_point()
                    found = crc32c_blocks(part, np.array([(0, part.nbytes, block)], dtype=np.int64))
                    self.checksums.append(found)
                    at, count = at + part.nbytes, count + len(found)
                    yield part.numpy().data
            ranges = (form.Range(0, entry.numel, arrays),) if entry.numel else ()
            self.entries.append(replace(entry, ranges=ranges))
        yield memoryview(bytes(nbytes - at))

    def _tensors(self, page: ParameterPage, index: int, array: str) -> Iterable[torch.Tensor]:
        """Yield an array in memory order, as uint8 tensors. All but the last consist of whole blocks."""
        if array == form.VALUES:
            place = Place(self._source.pager, page, index)
            for part in self._source.parts(place, page.layout.parameters[index].dtype):
                yield part.view(torch.uint8)
            return
        states = self._source.states
        assert states is not None
        for each in page.layout.owned(index, tensor_files.WINDOW):
            yield states.entries(states.pages[page.index], index, array, each)


def open_copy(path: str | os.PathLike[str], files: DiskFiles) -> tuple[SavedCommit, CommitSource]:
    """Open the copy in the directory `path`, which any number of processes may read. No file stays open.

    Raises ConfigError if there is no copy at `path`, IncompatibleCheckpoint if another version of the format
    wrote it, or if it is the commit of one of several ranks or has several slabs, and CorruptState if a file
    is missing or not what it has to be. Raises StorageError if a file cannot be read.
    """
    directory = Path(path)
    saved = commit_files.newest(directory, files) if directory.is_dir() else None
    if saved is None:
        raise ConfigError(
            f"{directory} holds no copy of a run.", "Give a directory that runtime.save(path) made."
        )
    slabs = list(find_slabs(saved, [directory], files))
    if saved.manifest.world_size > 1 or len(slabs) > 1:
        raise IncompatibleCheckpoint(
            f"{directory} has a commit that is no copy of a run.",
            "Continue it by infinity.offload with resume=.",
        )
    slab = slabs[0]
    if slab.path is None or slab.fault is not None:
        raise _damaged(directory / slab_name(0, slab.uuid), slab.fault or "missing")
    where = Path(slab.path)

    def read(memory: torch.Tensor, offset: int) -> None:
        found = files.read(where, limit=memory.nbytes, offset=offset)
        if len(found) != memory.nbytes:
            raise _damaged(where, f"it ends before byte {offset + memory.nbytes}")
        memory.numpy().data[:] = found

    return saved, CommitSource([RankCommit(saved, read)])


def _damaged(path: Path, what: str) -> CorruptState:
    return CorruptState(f"{path} cannot be used: {what}.", "Copy the checkpoint again, or take another one.")
