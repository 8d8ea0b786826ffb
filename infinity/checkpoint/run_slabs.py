"""Run slabs: the slabs of a run that has made no commit yet, and those that its first commit replaces.

[Note: slabs of no commit]
A crash can leave slabs that say they are committed and belong to no commit: after their headers were written
and before the first manifest has its name, or after a run with new slabs has made its first commit and before
the old slabs are gone. Nobody may remove committed slabs whose commit they do not know. So until its first
commit a run with new slabs has a file `slabs` in the directory, which lists them and the old ones. Of those
that a crash leaves listed, the next run removes what the commits there do not need.

The old ones are those of all commits in the directory. A rank whose part has come from another node may find
older commits here, of the time when it ran here. They stay whole, too, until a commit replaces all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from infinity.checkpoint import commit_files
from infinity.checkpoint.slab_list import SlabList
from infinity.errors import InfinityError
from infinity.system.disk_files import DiskFiles
from infinity.tiers import NvmeTier, remove_slab
from infinity.tiers.path_lock import PathLock


class RunSlabs:
    """The slabs of one run, as far as they belong to no commit of it, and what it has listed of them."""

    def __init__(self, directory: Path, rank: int, run: str | None, files: DiskFiles) -> None:
        """directory: of the rank's commits, locked. run: the run's name in the list (`SlabList.read`)."""
        self._directory = directory
        self._rank = rank
        self._run = run
        self._files = files
        self._list = SlabList(directory, files)
        self._new: list[Path] = []
        """The slabs that no commit of this run needs yet."""
        self._replaced: frozenset[str] = frozenset()
        """UUIDs of those that the first commit replaces, but for those of the commit that is continued."""
        self._locks: Mapping[Path, PathLock] = {}
        """The directories where slabs are removed, and their locks."""

    def note(
        self,
        tier: NvmeTier,
        locks: Mapping[Path, PathLock],
        continued: frozenset[str] | None,
        *,
        damaged: bool = False,
    ) -> None:
        """List the slabs of this run durably, and remove those that a crash left to no commit.

        tier: the run's, before its first commit. locks: of directories from which slabs are removed.
        continued: the slabs of the commit that the run continues and replaces; None if it replaces none.
        damaged: whether there are newer commits that cannot be read, and may need any slab. Raises
        StorageError.
        """
        self._locks = locks
        kept: frozenset[str] = frozenset()
        if continued is not None:
            self._replaced = commit_files.named_slabs(self._directory, self._files) - continued
            kept = continued | self._replaced
        for uuid in sorted(self._list.read().slabs - kept) if not damaged else ():
            self._remove(uuid)
        new = {slab.uuid for slab in tier.record.slabs} - kept
        self._new = [slab.path for slab in tier.slabs if slab.uuid in new]
        if new or self._replaced:
            self._list.write(new | kept, self._run)
        else:
            self._list.remove()

    def superseded(self) -> None:
        """Remove what the first commit has replaced. The slabs of the commit that was continued are gone. No
        slab is without a commit from then on. Raises StorageError.
        """
        for uuid in sorted(self._replaced):
            self._remove(uuid)
        self._list.remove()
        self._new.clear()

    def close(self) -> None:
        """Remove the list if no commit was made and the run's own slabs are gone."""
        new, self._new = self._new, []
        if new and not any(os.path.lexists(path) for path in new):
            with suppress(InfinityError):
                self._list.remove()

    def _remove(self, uuid: str) -> None:
        for path, lock in self._locks.items():
            remove_slab(path, uuid, self._rank, self._files, lock=lock)
