"""Commit bugs: mistakes that are put into the code of commits, each of which a crash must show.

A bug is a function that patches the code for the time of a recording, and delays transfers where the mistake
would otherwise show only if a race is lost.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from committed_runs import Job
from recorded_commits import Record, killed, streamed, whole

from infinity.aio import Faults
from infinity.checkpoint import commit_files, directory, run_state
from infinity.checkpoint.codec import encode
from infinity.checkpoint.committer import Committer
from infinity.checkpoint.initial_pages import InitialPages
from infinity.checkpoint.record import Recorder
from infinity.checkpoint.run_state import generators
from infinity.pages.durable_io import DurableIO
from infinity.pages.ledger import Commit, Held, Ledger
from infinity.pages.parts import Part
from infinity.system.disk_files import DiskFiles
from infinity.tiers import NvmeTier
from infinity.tiers.link import ARRIVED

Patch = pytest.MonkeyPatch
Bug = Callable[[Patch, Faults], None]
_A_STEP = 0.1
"""Seconds in which the thread that trains comes as far in the next step as it can."""


def slabs_not_synced(patch: Patch, faults: Faults) -> None:
    patch.setattr(NvmeTier, "sync", lambda self: ARRIVED)


def slabs_synced_before_the_writes_ended(patch: Patch, faults: Faults) -> None:
    flush, sync, begun = Committer._flush, NvmeTier.sync, []

    def early(self: Committer) -> None:
        flush(self)
        begun.append(sync(self._durable.nvme))

    patch.setattr(Committer, "_flush", early)
    patch.setattr(NvmeTier, "sync", lambda self: begun.pop())
    faults.delay("write", 1, 0.01, times=None)


def not_synced(suffix: str) -> Bug:
    def bug(patch: Patch, faults: Faults) -> None:
        sync = DiskFiles.sync

        def careless(self: DiskFiles, descriptor: int, path: Any) -> None:
            if not os.fspath(path).endswith(suffix):
                sync(self, descriptor, path)

        patch.setattr(DiskFiles, "sync", careless)

    return bug


def manifest_renamed_before_it_was_synced(patch: Patch, faults: Faults) -> None:
    rename, sync = DiskFiles.rename, DiskFiles.sync
    not_synced(".tmp")(patch, faults)

    def first(self: DiskFiles, path: Any, target: Any) -> None:
        rename(self, path, target)
        descriptor = os.open(target, os.O_RDWR)
        sync(self, descriptor, target)
        os.close(descriptor)

    patch.setattr(DiskFiles, "rename", first)


def directory_not_synced(patch: Patch, faults: Faults) -> None:
    patch.setattr(DiskFiles, "sync_directory", lambda self, path: None)


def directory_synced_before_the_rename(patch: Patch, faults: Faults) -> None:
    rename, sync = DiskFiles.rename, DiskFiles.sync_directory

    def late(self: DiskFiles, path: Any, target: Any) -> None:
        sync(self, os.path.dirname(path))
        rename(self, path, target)

    directory_not_synced(patch, faults)
    patch.setattr(DiskFiles, "rename", late)


def names_of_slabs_not_synced(patch: Patch, faults: Faults) -> None:
    sync = DiskFiles.sync_directory

    def careless(self: DiskFiles, path: Any) -> None:
        if "pages" not in os.path.basename(path):
            sync(self, path)

    patch.setattr(DiskFiles, "sync_directory", careless)


def slabs_named_after_the_manifest(patch: Patch, faults: Faults) -> None:
    commit, write = NvmeTier.commit, commit_files.write

    def late(*arguments: Any, tier: NvmeTier) -> None:
        write(*arguments)
        commit(tier)

    patch.setattr(commit_files, "write", late)


def slot_free(*held: str) -> Bug:
    """A part's slots count as free unless one of the attributes `held` of the part names them."""

    def free_slot(self: Part) -> int | None:
        taken = [getattr(self, each) for each in held]
        slots = (self.newest, 1 - self.newest)
        return next((slot for slot in slots if slot not in taken and slot < len(self.slots)), None)

    return lambda patch, faults: patch.setattr(Part, "free_slot", free_slot)


def slots_freed_before_the_manifest(patch: Patch, faults: Faults) -> None:
    """Writes that wait for the commit's end go on when its slots are free. The manifest waits for them."""
    finish, write, join = Recorder.finish, DurableIO.write, Commit.join
    freed: list[Any] = []
    written: list[bool] = []
    waiting = threading.Event()

    def released(self: Ledger) -> None:
        while self.pending is not None and self.pending not in freed:
            time.sleep(0.001)

    def count(self: DurableIO, *arguments: Any, **options: Any) -> Any:
        written.append(True)
        return write(self, *arguments, **options)

    def joining(self: Commit) -> None:
        waiting.set()
        join(self)
        waiting.clear()

    def early(self: Recorder, draft: Any, pending: Any) -> Any:
        for part, (slot, _, _) in pending.held.items():
            part.durable, part.pending = slot, None
        freed.append(pending)
        enough = len(written) + 6
        while len(written) < enough and not waiting.is_set() and not pending.done:
            time.sleep(0.001)
        return finish(self, draft, pending)

    patch.setattr(DurableIO, "write", count)
    patch.setattr(Ledger, "wait", released)
    patch.setattr(Commit, "join", joining)
    patch.setattr(Recorder, "finish", early)


def old_commit_removed_before_the_new_one(patch: Patch, faults: Faults) -> None:
    write = commit_files.write

    def careless(saved: Any, where: Any, files: DiskFiles, **tier: Any) -> None:
        for each in commit_files.generations(where):
            commit_files.remove(where, each, files)
        write(saved, where, files, **tier)

    patch.setattr(commit_files, "write", careless)


def checksums_of_an_older_write(patch: Patch, faults: Faults) -> None:
    finish, known = Recorder.finish, {}

    def stale(self: Recorder, draft: Any, pending: Any) -> Any:
        now = dict(pending.held)
        for part, (slot, checksums, begun) in now.items():
            pending.held[part] = Held(slot, known.get(part, checksums), begun)
        known.update({part: checksums.copy() for part, (_, checksums, _) in now.items()})
        return finish(self, draft, pending)

    patch.setattr(Recorder, "finish", stale)


def buffers_of(recorder: Recorder) -> list[tuple[str, torch.Tensor]]:
    model = recorder._model()
    assert model is not None
    return list(model.named_buffers())


def read_late(field: str) -> Bug:
    """A field of the manifest is read when the commit lands, and not by save()."""

    def bug(patch: Patch, faults: Faults) -> None:
        finish = Recorder.finish

        def late(self: Recorder, draft: Any, pending: Any) -> Any:
            time.sleep(_A_STEP)
            tensors = draft.tensors
            now: dict[str, Callable[[], Any]] = {
                "parameters": lambda: tuple(self._parameters()),
                "param_groups": lambda: tuple(run_state._groups(self.param_groups, tensors)),
                "rng": lambda: {name: encode(each, tensors) for name, each in generators().items()},
                "buffers": lambda: {n: encode(each, tensors) for n, each in buffers_of(self)},
            }
            manifest, value = draft.manifest, {field: now[field]()}
            if field == "parameters":
                manifest = replace(manifest, **value)
            else:
                manifest = replace(manifest, run=replace(manifest.run, **value))
            changed = replace(draft, manifest=manifest)
            return finish(self, changed, pending)

        patch.setattr(Recorder, "finish", late)

    return bug


def flush_not_awaited(patch: Patch, faults: Faults) -> None:
    patch.setattr(Ledger, "settle", lambda self, parts: None)
    faults.delay("write", 1, 0.03, times=None)


def device_pages_not_awaited(patch: Patch, faults: Faults) -> None:
    """The commit does not wait for the writes by which `save` copies pages from the device."""
    copy = DurableIO.copy_out_piece
    faults.delay("write", 1, 0.03, times=None)

    def careless(self: DurableIO, *arguments: Any) -> Any:
        copy(self, *arguments)
        return ARRIVED

    patch.setattr(DurableIO, "copy_out_piece", careless)


def rest_of_a_part_not_copied(patch: Patch, faults: Faults) -> None:
    def careless(self: DurableIO, part: Part) -> None:
        part.newest = self._free_slot(part)
        part.checksums = part.checksums.copy()

    patch.setattr(DurableIO, "_make_writable", careless)


def wait_does_not_wait(patch: Patch, faults: Faults) -> None:
    patch.setattr(Commit, "wait", lambda self: self._complete(self))


def resumed_name_not_synced(patch: Patch, faults: Faults) -> None:
    read, sync, skip = directory.ContinuedCommit, DiskFiles.sync_directory, []

    def reading(*arguments: Any) -> Any:
        skip.append(True)
        return read(*arguments)

    def careless(self: DiskFiles, path: Any) -> None:
        if not skip:
            sync(self, path)
        skip.clear()

    patch.setattr(directory, "ContinuedCommit", reading)
    patch.setattr(DiskFiles, "sync_directory", careless)


def old_slabs_removed_before_the_first_commit(patch: Patch, faults: Faults) -> None:
    resume = InitialPages.resume

    def careless(self: Any, checkpoint: Any, *arguments: Any, **options: Any) -> None:
        resume(self, checkpoint, *arguments, **options)
        checkpoint.superseded()

    patch.setattr(InitialPages, "resume", careless)


NVME, RAM = whole(Job()), whole(Job(home="ram"))
EAGER = whole(Job(update="eager"))
STREAMED = streamed(Job(home="ram"), Job())

BUGS: dict[str, tuple[Bug, Record]] = {
    "slabs not synced": (slabs_not_synced, NVME),
    "slabs not synced, with homes in ram": (slabs_not_synced, RAM),
    "slabs synced before the writes ended": (slabs_synced_before_the_writes_ended, NVME),
    "manifest not synced": (not_synced(".tmp"), NVME),
    "data file not synced": (not_synced(".safetensors"), NVME),
    "names of slabs not synced": (names_of_slabs_not_synced, NVME),
    "manifest renamed before it was synced": (manifest_renamed_before_it_was_synced, NVME),
    "directory not synced": (directory_not_synced, NVME),
    "directory synced before the rename": (directory_synced_before_the_rename, NVME),
    "names of new slabs not synced": (names_of_slabs_not_synced, STREAMED),
    "slabs named after the manifest": (slabs_named_after_the_manifest, NVME),
    "the durable slot is free": (slot_free("pending"), NVME),
    "the pending slot is free": (slot_free("durable"), NVME),
    "the durable slot is free, with homes in ram": (slot_free("pending"), RAM),
    "slots freed before the manifest": (slots_freed_before_the_manifest, EAGER),
    "old commit removed before the new one": (old_commit_removed_before_the_new_one, NVME),
    "checksums of an older write": (checksums_of_an_older_write, NVME),
    "steps read late": (read_late("parameters"), NVME),
    "param groups read late": (read_late("param_groups"), NVME),
    "generators read late": (read_late("rng"), NVME),
    "buffers read late": (read_late("buffers"), NVME),
    "flush not awaited": (flush_not_awaited, RAM),
    "device pages not awaited": (device_pages_not_awaited, whole(Job(home="device", update="eager"))),
    "rest of a part not copied": (rest_of_a_part_not_copied, NVME),
    "wait does not wait": (wait_does_not_wait, NVME),
    "name of a resumed commit not synced": (resumed_name_not_synced, killed(Job())),
    "old slabs removed before the first commit": (old_slabs_removed_before_the_first_commit, STREAMED),
}
"""What is wrong -> (the bug, the run in which it shows)."""
