"""Checkpoint directory: where the commits of a run go, and the commit that the run continues."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from infinity.checkpoint import commit_files
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.continued_commit import ContinuedCommit, commit_directories, directory_of, write_run
from infinity.checkpoint.restore import is_cut_alike
from infinity.config import Budget
from infinity.errors import ConfigError, InfinityError
from infinity.planning.plan import Plan
from infinity.ranks import SingleRank
from infinity.system.closing import Closing
from infinity.system.directory import check_directory, make_directory, path_text, unmake
from infinity.system.disk_files import DiskFiles
from infinity.tiers import NvmeTier, remove_slab
from infinity.tiers.path_lock import PathLock
from infinity.tiers.slab import lock_directory, slab_paths
from infinity.tiers.striping import VolumeRecord


class Checkpoint(Closing):
    """The directory of a run's commits, locked for this process, and the commit that the run continues."""

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        resume: str | os.PathLike[str] | None,
        files: DiskFiles,
        ranks: SingleRank,
    ) -> None:
        """Lock the directories, and open the commit to continue, if there is one.

        directory: where new commits go, made if it does not exist; None to write them to `resume`. resume:
        the directory of the commit to continue; None for a new run. files: reaches the disk. ranks: connects
        with the other ranks, which all make a Checkpoint, too.

        Raises ConfigError if a new run is to go where commits lie, if there is no commit to continue, or for
        a value that cannot be a path. Raises StorageError for a directory that cannot be used, or that
        another process uses (EBUSY), and CorruptState or IncompatibleCheckpoint for a commit that cannot be
        loaded. After an error, the directories that were made here are removed.
        """
        given = directory if directory is not None else resume
        assert given is not None
        self._share = share = ranks.share
        target = directory_of(given, share)
        self.files = files
        self.continued: ContinuedCommit | None = None
        """The commit that the run continues; None for a new run."""
        made: list[str] = []
        with ExitStack() as cleanup:
            cleanup.callback(unmake, made)
            there = None if resume is None else directory_of(resume, share)
            # After a rank has moved to this node, its rank commit is not here, and its directory is made.
            inside = resume is not None and there is not None and Path(there) != Path(path_text(resume))
            if resume is not None and (not inside or os.path.lexists(resume)):
                check_directory(resume)
            makes = resume is None or directory is not None or inside
            self.directory: Path = make_directory(target, made) if makes else check_directory(target)
            self._run = ranks.name_of_run() if resume is None else None
            self._removed_from: Mapping[Path, PathLock] = {}
            """The locks of the directories in which slabs that no commit needs any more are removed."""
            self._own: frozenset[str] = frozenset()
            """UUIDs of the slabs of this run."""
            self.locks: dict[Path, PathLock] = {}
            """The locks of directories that this object holds, which tiers use, too."""
            self._lock(self.directory, cleanup)
            if resume is not None and there is not None:
                source = make_directory(there, made) if inside else check_directory(there)
                if source not in self.locks:
                    self._lock(source, cleanup)
                lock = self.locks[source]
                self.continued = ContinuedCommit(ranks, check_directory(resume), files, lock)
                cleanup.callback(self.continued.close)
                # A process that was killed may not have synced the name of this commit. The run is going to
                # write to places of the commit before, to which a power cut must not lead back.
                files.sync_directory(source)
            self.continues = resume is not None and source == self.directory
            """Whether new commits replace the one that the run continues."""
            if not self.continues:
                _check_unused(check_directory(given), self.directory)
            continued = 0 if self.saved is None or not self.continues else self.saved.manifest.generation
            self.generation = max([continued, *commit_files.generations(self.directory)])
            """Number of the newest commit in `directory`, or of the continued one if that is greater; 0 for
            none.
            """
            made.clear()
            self._cleanup = cleanup.pop_all()

    @property
    def saved(self) -> SavedCommit | None:
        """The rank commit that this rank continues; None for a new run."""
        return None if self.continued is None else self.continued.saved

    @property
    def streamed_from(self) -> NvmeTier | None:
        """The slabs of this rank's own rank commit, from which the run was restored.

        None after a commit of this run has replaced them, and if the run has adopted the slabs or continues
        no commit.
        """
        own = None if self.continued is None else self.continued.own
        return None if own is None else own.tier

    def adopted(self, plan: Plan, budget: Budget) -> VolumeRecord | None:
        """Return the slabs that a run with this plan adopts from the continued commit; None: it makes new
        ones.
        """
        commit, saved = self.continued, self.saved
        if commit is None or saved is None or not (self.continues and commit.adoptable):
            return None
        volume = saved.manifest.volume
        paths = [self.directory] if plan.slab_directory is not None else [*map(Path, budget.nvme_bytes)]
        there = all(slab_paths(paths, self._share.rank, slab.uuid) for slab in volume.slabs)
        return volume if there and is_cut_alike(saved, plan) else None

    def begin(self, tier: NvmeTier) -> None:
        """Remove files that a crash left and no commit needs, and write the run's name, if it has one.

        tier: the run's tier, before the first commit; it has locked the directories of slabs. Raises
        StorageError.
        """
        self._own = frozenset(slab.uuid for slab in tier.slabs)
        self._removed_from = {**self.locks, **tier.locks}
        self._remove(commit_files.unfinished_slabs(self.directory, self.files))
        commit_files.remove_leftovers(self.directory, self.files)
        write_run(self.directory, self._run, self.files)

    def superseded(self) -> None:
        """Remove the slabs of all earlier commits in the directory; this run's first commit replaces them.

        Called after the first commit, and before the manifests of earlier commits are removed. These are not
        always the commits that the run continues: if a rank continues a rank commit of another node, its
        directory may have older commits, from an earlier run on this node. Raises StorageError.
        """
        commit = self.continued
        if commit is not None:
            if commit.own is not None:
                commit.own.close_slabs(forget=self.continues)
            if self.continues:
                commit.superseded()
        self._remove(commit_files.named_slabs(self.directory, self.files) - self._own)
        commit_files.remove_leftovers(self.directory, self.files)
        write_run(self.directory, None, self.files)

    def close(self) -> None:
        """Release the locks. Slabs from which the run was restored stay. A second call does nothing.

        Called after the tiers were closed.
        """
        with suppress(InfinityError):
            if self._run is not None and not commit_files.generations(self.directory):
                write_run(self.directory, None, self.files)
        self._cleanup.close()

    def _lock(self, directory: Path, cleanup: ExitStack) -> None:
        lock = lock_directory(directory, self._share.rank, self.files)
        self.locks[directory] = cleanup.enter_context(lock)

    def _remove(self, slabs: frozenset[str]) -> None:
        for slab in sorted(slabs):
            for lock in self._removed_from.values():
                remove_slab(lock, slab, self.files)


def _check_unused(given: Path, directory: Path) -> None:
    """Raise ConfigError if another run has commits in `given`, or in this rank's directory."""
    used = {*commit_directories(given).values(), directory}
    used = {each for each in used if commit_files.generations(each)}
    if used:
        first = min(used)
        raise ConfigError(
            f"{first} has commits of another run, the last is commit-{commit_files.generations(first)[-1]}.",
            f'Continue it with resume="{given}", move the directory, or delete it.',
        )
