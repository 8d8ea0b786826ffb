"""Continued commit: the newest commit whose rank commits are all whole, from which all ranks of a run go on.

Each rank commits to `rank-<rank>` in the directory that the user gives, and a single rank to that directory.
So ranks on one node may be given the same directory, and ranks on several nodes a directory that is another
disk on each node.

[Note: rank commits that have moved]
A rank commit lies on the node where its rank ran. A restart may put ranks on other nodes, and there may be
more ranks, or fewer. So the ranks of a node look at all rank commits there. One whose rank does not run on
the node now is read by another rank of the node, its holder, which sends it over the network.

[Note: a run without a commit]
A death in the first commit can leave some ranks with a rank commit and others with none. As no commit has
counted, the run can begin anew. But the same is found if disks were exchanged or lost after a commit has
counted. So all ranks give a new run one name, which each writes into the file `run` before the first step,
and removes when a commit has counted. A rank that has the file and no rank commit has never made one in that
run, and without it no commit counts: so rank commits of other ranks with the same run name are no commit. A
run that continues a commit has no name.

[Note: a commit that is cut otherwise]
With other budgets, another stage or another number of ranks, a rank may keep other elements than its rank
commit has. All rank commits together have the whole run, as ranges of elements of each parameter. So each
rank then reads what it keeps now from all of them: first from its own, then from those on its node, and then
from the holders of the others, whose files it reads first.

[Note: another number of ranks]
Rank r of a run continues the run state of rank commit r: generators, buffers, the user's state. If the commit
has n rank commits, a rank r >= n continues that of rank commit r % n. But random numbers of two ranks are not
to be the same, so such a rank leaves its generators as the program has set them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from infinity.checkpoint import commit_files
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.commit_source import CommitSource, RankCommit, Read, open_slabs, reader_of
from infinity.checkpoint.manifest import CommitName, named_commits
from infinity.checkpoint.restore import has_all_kept
from infinity.checkpoint.typed_json import CURE
from infinity.config import Budget
from infinity.errors import ConfigError, CorruptState, IncompatibleCheckpoint, InfinityError, storage_errors
from infinity.layout.shards import Share
from infinity.planning.plan import Plan
from infinity.ranks import SingleExchange, SingleRank
from infinity.system.closing import Closing
from infinity.system.directory import path_text
from infinity.system.disk_files import DiskFiles
from infinity.tiers import NvmeTier, aligned_ram, remove_slab
from infinity.tiers.path_lock import PathLock

Agree = Callable[..., dict[int, dict[str, Any]]]
"""`SingleRank.agree`: function (call, **facts) that returns the facts of all ranks, by rank."""

_RANK = re.compile(r"rank-(0|[1-9][0-9]{0,8})")
_RUN = "run"
_FILES = (commit_files.manifest_path, commit_files.data_path)
_VOLUME = len(_FILES)
_KINDS = _VOLUME + 1
"""Number of things to read of a rank commit: its two files, and its volume. In an exchange, thing k of rank
commit r has the number r * _KINDS + k.
"""


# --- directories of commits -------------------------------------------------------------------------------


def directory_of(directory: str | os.PathLike[str], share: Share) -> str:
    """Return the directory where a rank's commits go.

    directory: the one that the user gives. Raises ConfigError for a value that cannot be a path.
    """
    return str(Path(path_text(directory)) / name_of(share.rank, share.ranks))


def name_of(rank: int, ranks: int) -> str:
    """Return the name, as in `commit_directories`, of the directory where one of `ranks` ranks commits."""
    return f"rank-{rank}" if ranks > 1 else "."


def rank_of(directory: Path) -> int:
    """Return the rank whose commits go to a directory of this name; 0 if the name is not that of a rank."""
    match = _RANK.fullmatch(directory.name)
    return int(match[1]) if match else 0


def rank_directories(directory: str | os.PathLike[str]) -> dict[int, Path]:
    """List the directories of ranks in a directory: rank -> path. Raises StorageError."""
    with storage_errors("list", directory):
        found = ((_RANK.fullmatch(name), name) for name in os.listdir(directory))
        return {int(match[1]): Path(directory) / name for match, name in found if match}


def commit_directories(directory: str | os.PathLike[str]) -> dict[str, Path]:
    """List the directories of commits in a directory: name -> path. The names are those of ranks'
    directories, and "." for `directory` itself if a single rank has committed to it. Raises StorageError.
    """
    if not os.path.isdir(directory):
        return {}
    found = {path.name: path for path in rank_directories(directory).values()}
    return found | ({".": Path(directory)} if commit_files.generations(directory) else {})


def no_commit(directory: str | os.PathLike[str]) -> ConfigError:
    """Make the error for a directory without commits."""
    return ConfigError(
        f"There is no commit in {os.fspath(directory)}.",
        "Leave resume= out to begin anew, or give another directory.",
    )


# --- the name of a run without a commit -------------------------------------------------------------------


def write_run(directory: Path, run: str | None, files: DiskFiles) -> None:
    """Write the name of a run to a file, durably; None: remove the file. Raises StorageError."""
    path = directory / _RUN
    files.remove(path)
    if run is not None:
        files.create(path, run.encode())
        files.sync_directory(directory)


def _read_run(directory: Path, files: DiskFiles) -> str | None:
    """Read the name that `write_run` has written; None if there is none."""
    path = directory / _RUN
    if path.is_symlink() or not path.is_file():
        return None
    found = files.read(path, limit=64).decode("ascii", errors="replace")
    return found if re.fullmatch("[0-9a-f]{32}", found) else None


# --- what all ranks have ----------------------------------------------------------------------------------


class _Found(NamedTuple):
    """What one directory of commits contains. The directory may be on any node."""

    name: str
    """The directory's name, as in `commit_directories`."""
    committed: bool
    """Whether there are manifests, whole or not."""
    run: str | None
    """The name in the file `run`, of a run without a commit; None if there is no such file."""
    faults: tuple[str, ...]
    """A sentence for each commit that is not whole: what is wrong with it."""


_Commit = tuple[CommitName, int]
"""A commit, and the number of its rank commits."""


@dataclass
class _Survey:
    """The rank commits that all ranks have found."""

    found: list[_Found] = field(default_factory=list)
    readers: dict[_Commit, dict[int, list[int]]] = field(default_factory=dict)
    """Commit -> rank that made a rank commit of it -> the ranks that read that rank commit now."""
    directories: list[Path] = field(default_factory=list)
    """The directories that this rank reads."""
    mine: dict[tuple[_Commit, int], tuple[Path, SavedCommit]] = field(default_factory=dict)
    """(commit, rank that made it) -> directory and content of each whole rank commit that this rank reads."""

    @property
    def complete(self) -> list[_Commit]:
        """The commits whose rank commits were all found."""
        return [each for each, found in self.readers.items() if len(found) == each[1]]


def _survey(
    directories: Mapping[str, Path], files: DiskFiles, rank: int, agree: Agree, *, node: int
) -> _Survey:
    """Collect all nodes' commits. All ranks call this. directories: `commit_directories` on this `node`."""
    survey = _Survey()
    heard = agree("offload()", node=node, holds=sorted(directories))
    said = []
    for name, directory in sorted(directories.items()):
        here = [
            each for each, they in sorted(heard.items()) if they["node"] == node and name in they["holds"]
        ]
        if rank != next((each for each in here if name_of(each, len(heard)) == name), here[0]):
            continue
        survey.directories.append(directory)
        whole, faults = _read_all(directory, name, files)
        for saved in whole:
            manifest = saved.manifest
            skipped = tuple(fault for number, fault in faults.items() if number > manifest.generation)
            commit = manifest.name, manifest.world_size
            survey.mine[commit, manifest.rank] = directory, replace(saved, skipped=skipped)
        made = [[*each.manifest.name, each.manifest.world_size, each.manifest.rank] for each in whole]
        said.append([name, bool(whole or faults), _read_run(directory, files), [*faults.values()], made])
    for reader, they in agree("offload()", found=said).items():
        for name, committed, run, of_commits, made in they["found"]:
            survey.found.append(_Found(name, committed, run, tuple(of_commits)))
            for generation, created, size, maker in made:
                readers = survey.readers.setdefault((CommitName(generation, created), size), {})
                readers.setdefault(maker, []).append(reader)
    return survey


def _read_all(directory: Path, name: str, files: DiskFiles) -> tuple[list[SavedCommit], dict[int, str]]:
    """Read the rank commits of a directory. Returns those that are whole, newest first, and the faults of the
    others as generation -> sentence.

    name: the result of `name_of` for this rank. Raises IncompatibleCheckpoint for a whole commit of another
    name.
    """
    found, faults = [], {}
    for generation in reversed(commit_files.generations(directory)):
        try:
            saved = commit_files.read(directory, generation, files)
        except CorruptState as error:
            faults[generation] = error.cause
            continue
        if name_of(saved.manifest.rank, saved.manifest.world_size) != name:
            raise IncompatibleCheckpoint(
                f"Commit {generation} in {directory} is the rank commit of rank {saved.manifest.rank}.",
                "Give each rank the directory that it had.",
            )
        found.append(saved)
    return found, faults


@dataclass(frozen=True)
class FoundCommit:
    """The commit that all ranks continue, and which rank reads each of its rank commits."""

    name: CommitName
    holders: tuple[int, ...]
    """Rank that made a rank commit -> rank that reads it now: the same one if it runs where the rank commit
    is.
    """
    read: Mapping[int, tuple[Path, SavedCommit]]
    """Rank that made it -> directory and content of each rank commit that this rank reads."""


def find_commit(
    directories: Mapping[str, Path], given: Path, files: DiskFiles, rank: int, agree: Agree, *, node: int
) -> FoundCommit:
    """Find the newest commit whose rank commits are all whole. Any number of ranks may have made it. All
    ranks call this.

    directories: `commit_directories` on this rank's node. node: the number of that node. given: the directory
    that the user gives, for errors. Raises ConfigError if there is no commit, IncompatibleCheckpoint if a
    rank commit is missing, and CorruptState if no commit is whole.
    """
    survey = _survey(directories, files, rank, agree, node=node)
    if not survey.complete:
        raise _no_common(given, survey)
    commit = max(survey.complete)
    found = survey.readers[commit]
    holders = tuple(maker if maker in found[maker] else min(found[maker]) for maker in range(commit[1]))
    read = {maker: survey.mine[commit, maker] for maker, holder in enumerate(holders) if holder == rank}
    return FoundCommit(commit[0], holders, read)


def _no_common(given: Path, survey: _Survey) -> InfinityError:
    """Make the error for a directory without a commit of which all rank commits are whole."""
    faults = [fault for each in survey.found for fault in each.faults]
    if not survey.readers and not faults:
        return no_commit(given)
    if {each.name for each in survey.found} == {"."}:
        return CorruptState(f"No commit in {given} is whole: {' '.join(faults)}", CURE)
    size = max((size for _, size in survey.readers), default=1)
    made = [{name for (name, _), found in survey.readers.items() if maker in found} for maker in range(size)]
    told = "; ".join(f"of rank {maker} {named_commits(names)}" for maker, names in enumerate(made))
    cause = " ".join([f"There is no commit in {given} whose rank commits are all whole: {told}.", *faults])
    if all(made):
        return CorruptState(cause, "Give back what the ranks had in one run.")
    return IncompatibleCheckpoint(
        cause, "Start a rank on each node that has rank commits, or give back the disk that had them."
    )


def commits_to_continue(ranks: SingleRank, given: str | os.PathLike[str], files: DiskFiles) -> bool:
    """Whether a directory has commits, on any node of these ranks. All ranks call this.

    given: the directory that the user gives. If a run died in its first commit, only some ranks have rank
    commits of it: they are removed, and the result is False; see [Note: a run without a commit]. Raises
    IncompatibleCheckpoint if no commit is complete and a rank has no rank commit, unless it is certain that
    the run died so. Raises StorageError (EBUSY) for a directory in use.
    """
    share, node = ranks.share, ranks.place.node
    survey = _survey(commit_directories(given), files, share.rank, ranks.agree, node=node)
    having = {each.name for each in survey.found if each.committed}
    if survey.complete or not having:
        return bool(having)
    size = max((size for _, size in survey.readers), default=share.ranks)
    lacking = {name_of(maker, size) for maker in range(size)} - having
    if not lacking:
        return True  # offload says what is wrong with them
    if not _never_counted(survey.found, lacking):
        raise IncompatibleCheckpoint(
            f"There are commits of some ranks in {os.fspath(given)}, and none of "
            f"{', '.join(sorted(lacking))}.",
            "Start ranks on all nodes where commits are, or give back the disks that had them.",
        )
    _take_back_all(survey.directories, files)
    ranks.agree("offload()")  # no rank begins anew before all rank commits are gone
    return False


def _never_counted(found: Collection[_Found], lacking: Collection[str]) -> bool:
    """Whether no commit of the found rank commits can have counted: they are all of one run without a commit,
    and that run has also used a directory of `lacking`, in which there is no rank commit.

    lacking: names of the directories without a rank commit.
    """
    runs = {each.run for each in found if each.committed}
    without = {each.run for each in found if each.name in lacking}
    return len(runs) == 1 and None not in runs and runs <= without


def _take_back_all(directories: Iterable[Path], files: DiskFiles) -> None:
    """Take all rank commits in directories back. The next run there removes their slabs."""
    for directory in directories:
        with PathLock(directory, rank=rank_of(directory), files=files):
            for generation in commit_files.generations(directory):
                commit_files.take_back(directory, generation, files, leave=True)


# --- its rank commits -------------------------------------------------------------------------------------


class LocalCommit(Closing):
    """A rank commit on this rank's node, which this rank reads. Its directory is locked while it is open."""

    def __init__(self, directory: Path, saved: SavedCommit, files: DiskFiles, lock: PathLock | None) -> None:
        """directory: where the rank commit lies. lock: the lock of the directory, if it is this rank's own;
        None: this call locks it. Raises StorageError (EBUSY) if the directory is in use.
        """
        self.saved = saved
        self.tier: NvmeTier | None = None
        """The rank commit's slabs, while they are open."""
        self._read: Read | None = None
        self._directory = directory
        self._files = files
        self.own = lock is not None
        """Whether the rank commit is in this rank's own directory."""
        self._lock = PathLock(directory, rank=saved.manifest.rank, files=files) if lock is None else lock

    def open(self, budget: Budget, shared: Mapping[Path, PathLock]) -> None:
        """Open the slabs of the rank commit. Looks for them in the directories of `budget` and of `shared`,
        and in the rank commit's directory.

        shared: directory -> its lock, for directories that this rank holds. Raises IncompatibleCheckpoint if
        a slab is missing.
        """
        locks = {**shared, self._directory: self._lock}
        directories = dict.fromkeys([*(Path(each) for each in budget.nvme_bytes), *locks])
        self.tier = open_slabs(self.saved, directories, self._files, locks)
        self._read = reader_of(self.tier)

    def sizes(self) -> list[int]:
        """Return the bytes of each of the two files."""
        generation = self.saved.manifest.generation
        return [path(self._directory, generation).stat().st_size for path in _FILES]

    def read(self, memory: torch.Tensor, offset: int) -> None:
        """Fill `memory` with bytes of the rank commit's volume from byte `offset` on, as `commit_source.Read`
        says.
        """
        assert self._read is not None
        self._read(memory, offset)

    def bytes_of(self, kind: int, first: int, count: int) -> torch.Tensor:
        """Read `count` bytes from byte `first` on, and return them as uint8.

        kind: 0 for the manifest, 1 for the data file, 2 for the volume (the pages in the slabs).
        """
        if kind == _VOLUME:
            memory = aligned_ram(count)
            self.read(memory, first)
            return memory
        path = _FILES[kind](self._directory, self.saved.manifest.generation)
        return torch.frombuffer(
            bytearray(self._files.read(path, limit=count, offset=first)), dtype=torch.uint8
        )

    def remove(self) -> None:
        """Remove all rank commits in the directory. Called when all ranks have committed in their own
        directories. Raises StorageError.
        """
        slabs = commit_files.named_slabs(self._directory, self._files)
        locks = {self._directory: self._lock}
        if self.tier is not None:
            slabs -= {slab.uuid for slab in self.tier.record.slabs}
            locks = self.tier.locks
            self.tier.forget()
        for uuid in sorted(slabs):
            for lock in locks.values():
                remove_slab(lock, uuid, self._files)
        for generation in commit_files.generations(self._directory):
            commit_files.remove(self._directory, generation, self._files)
        self.close()
        if self.saved.manifest.world_size > 1:
            with suppress(OSError):  # it has other files
                self._directory.rmdir()

    def close_slabs(self, *, forget: bool = False) -> None:
        """Close the slabs, if they are open. forget: whether to remove them."""
        tier, self.tier, self._read = self.tier, None, None
        if tier is not None:
            if forget:
                tier.forget()
            tier.close()

    def close(self) -> None:
        """Close the slabs, and release the lock unless it was given. A second call does nothing."""
        self.close_slabs()
        if not self.own:
            self._lock.close()


class ContinuedCommit(Closing):
    """The commit that a run continues: the rank commit that this rank continues, and those that it reads."""

    def __init__(self, ranks: SingleRank, given: Path, files: DiskFiles, lock: PathLock) -> None:
        """All ranks call this. given: the directory that the user gives. lock: the lock of this rank's
        directory in it. Raises the errors of `find_commit`, and StorageError (EBUSY) for a directory that is
        in use.
        """
        share = ranks.share
        self._connection = ranks
        self._rank, self._ranks = share.rank, range(share.ranks)
        found = find_commit(
            commit_directories(given), given, files, self._rank, ranks.agree, node=ranks.place.node
        )
        self._holders = found.holders
        self._path = commit_files.manifest_path(given, found.name.generation)
        mine = name_of(share.rank, share.ranks)
        with ExitStack() as cleanup:
            self._local = {
                maker: cleanup.enter_context(
                    LocalCommit(
                        directory, saved, files, lock if name_of(maker, len(found.holders)) == mine else None
                    )
                )
                for maker, (directory, saved) in found.read.items()
            }
            sizes = {str(maker): each.sizes() for maker, each in self._local.items()}
            heard = self._connection.agree("offload()", sizes=sizes)
            self._sizes = {int(rank): each for said in heard.values() for rank, each in said["sizes"].items()}
            self.own = next((each for each in self._local.values() if each.own), None)
            """This rank's own rank commit, if it is on this node."""
            self.recut = len(self._holders) != share.ranks
            """Whether ranks read from all rank commits, because a rank's own one lacks elements that it keeps
            now.
            """
            self.saved = self._followed()
            """The rank commit that this rank continues; see [Note: another number of ranks]."""
            cleanup.pop_all()

    @property
    def repeats(self) -> bool:
        """Whether a lower rank continues the same rank commit; see [Note: another number of ranks]."""
        return self._rank >= len(self._holders)

    @property
    def adoptable(self) -> bool:
        """Whether this rank's own rank commit is here and, once `divide` was called, each rank's has all that
        the rank keeps.
        """
        return self.own is not None and not self.recut

    def divide(self, plan: Plan) -> None:
        """Set `recut`: whether a rank keeps elements under its plan that its own rank commit lacks. All ranks
        call this.
        """
        enough = len(self._holders) == len(self._ranks) and has_all_kept(self.saved, plan)
        self.recut = not all(
            said["enough"] for said in self._connection.agree("offload()", enough=enough).values()
        )

    def restore(
        self,
        budget: Budget,
        locks: Mapping[Path, PathLock],
        restore: Callable[[CommitSource], None],
        *,
        adopted: bool,
    ) -> None:
        """Restore what this rank keeps, and send other ranks the bytes of the rank commits whose holder this
        rank is. All ranks call this.

        locks: the locks that this rank has on directories of slabs. restore: called with the source of the
        arrays. adopted: whether this rank has adopted its slabs; if so, `restore` is not called.
        """
        size = len(self._holders)
        takes = {rank: range(size) if self.recut else [rank] for rank in self._ranks}
        mine = (
            []
            if adopted
            else sorted(takes[self._rank], key=lambda maker: (maker != self._rank, maker not in self._local))
        )
        for maker, local in self._local.items():
            if maker in mine or any(maker in takes[rank] for rank in self._ranks if rank != self._rank):
                local.open(budget, locks if maker == self._rank else {})
        exchange = self._connection.exchange("a commit", self._give)
        if mine:
            restore(CommitSource([self._readable(maker, exchange) for maker in mine]))
        exchange.end()

    def _followed(self) -> SavedCommit:
        """Read the rank commit that this rank continues, here or from the rank that holds it."""
        follows = {rank: rank % len(self._holders) for rank in self._ranks}
        mine = follows[self._rank]
        exchange = self._connection.exchange("a commit's files", self._give)
        saved = self._local[mine].saved if mine in self._local else self._fetch(mine, exchange)
        exchange.end()
        return saved

    def _readable(self, maker: int, exchange: SingleExchange) -> RankCommit:
        """Find rank `maker`'s rank commit: on this node, or at its holder."""
        if maker in self._local:
            return RankCommit(self._local[maker].saved, self._local[maker].read)
        holder, number = self._holders[maker], maker * _KINDS + _VOLUME
        saved = self.saved if maker == self.saved.manifest.rank else self._fetch(maker, exchange)
        return RankCommit(saved, lambda memory, offset: exchange.take(number, offset, memory, server=holder))

    def _fetch(self, maker: int, exchange: SingleExchange) -> SavedCommit:
        """Read the files of rank `maker`'s rank commit from its holder."""
        files = []
        for kind, nbytes in enumerate(self._sizes[maker]):
            content = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            exchange.take(maker * _KINDS + kind, 0, content, server=self._holders[maker])
            files.append(content.numpy().tobytes())
        manifest, data = files
        return commit_files.from_bytes(manifest, data, self._path)

    def _give(self, number: int, first: int, count: int) -> torch.Tensor:
        """Read bytes that another rank takes in an exchange."""
        return self._local[number // _KINDS].bytes_of(number % _KINDS, first, count)

    def superseded(self) -> None:
        """Remove rank commits that this rank has read for other ranks. Called when all ranks have committed
        on their own nodes. Raises StorageError.
        """
        for each in self._local.values():
            if not each.own:
                each.remove()

    def close(self) -> None:
        """Close all rank commits. A second call does nothing."""
        for each in self._local.values():
            each.close()
