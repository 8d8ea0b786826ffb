"""Continued commit: the newest commit of which every part is whole, from which all ranks of a run go on.

Each rank commits to `rank-<rank>` in the directory that the user gives, and a single rank to that directory.
So ranks on one node may be given the same directory, and ranks on several nodes a directory that is another
disk on each node.

[Note: parts that have moved]
A rank's part lies on the node where the rank ran. A restart may put ranks on other nodes, and there may be
more ranks, or fewer. So each rank looks at all parts on its node. A part that is not of a rank which runs
there is read by another rank of the node, its holder, and sent over the network.

[Note: a run without a commit]
A death in the first commit can leave some ranks with a part and others with none. As no commit has counted,
the run can begin anew. But ranks whose disks were exchanged or lost look alike, and theirs may have counted.
So all ranks give a new run one name, which each writes into the file `run` before the first step. The file
goes when a commit has counted. A rank that has the file and no part has never made a part in that run, and
without its part no commit counts: so parts of other ranks with the same name are no commit. A run that
continues a commit has no name.

[Note: a commit that is cut otherwise]
Other budgets, another stage or another number of ranks can have each rank keep other elements than its part
has. All parts together are the whole run, as ranges of elements of each parameter. So each rank then reads
what it keeps now from all parts: from its own one where that has it, else from those on its node, else from
the holders of the others, whose files it reads first.

[Note: another number of ranks]
Rank r of a run continues what part r of the commit says of the run: generators, buffers, the user's state. Of
a commit of n parts a rank r >= n continues those of part r % n. But random numbers of two ranks are not to be
the same, so that rank leaves its generators as the program has set them.
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
from infinity.checkpoint.commit_source import CommitSource, Read, ReadablePart, open_slabs, reader_of
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
_PART_FILES = (commit_files.manifest_path, commit_files.data_path)
_VOLUME = len(_PART_FILES)
_KINDS = _VOLUME + 1
"""What a part consists of: its two files and its volume. In an exchange, kind k of part p has the number
p * _KINDS + k.
"""
_WINDOW = 16 << 20
"""The most bytes of a file that are asked for at once."""


# --- directories of commits -------------------------------------------------------------------------------


def directory_of(directory: str | os.PathLike[str], share: Share) -> str:
    """The directory where a rank's commits go.

    directory: the one that the user gives. Raises ConfigError for a value that cannot be a path.
    """
    return str(Path(path_text(directory)) / name_of(share.rank, share.ranks))


def name_of(rank: int, ranks: int) -> str:
    """The name, as in `commit_directories`, of the directory where one of so many ranks commits."""
    return f"rank-{rank}" if ranks > 1 else "."


def rank_of(directory: Path) -> int:
    """The rank whose commits go to a directory, by its name; 0 for a directory of no rank."""
    match = _RANK.fullmatch(directory.name)
    return int(match[1]) if match else 0


def rank_directories(directory: str | os.PathLike[str]) -> dict[int, Path]:
    """The directories of ranks in a directory: rank -> path. Raises StorageError."""
    with storage_errors("list", directory):
        found = ((_RANK.fullmatch(name), name) for name in os.listdir(directory))
        return {int(match[1]): Path(directory) / name for match, name in found if match}


def commit_directories(directory: str | os.PathLike[str]) -> dict[str, Path]:
    """The directories of commits in a directory, by the name of each there: those of ranks, and "." for the
    directory itself if one rank has committed to it. None if it does not exist. Raises StorageError.
    """
    if not os.path.isdir(directory):
        return {}
    found = {path.name: path for path in rank_directories(directory).values()}
    return found | ({".": Path(directory)} if commit_files.generations(directory) else {})


def no_commit(directory: str | os.PathLike[str]) -> ConfigError:
    """The error for a directory without commits."""
    return ConfigError(
        f"There is no commit in {os.fspath(directory)}.",
        "Leave resume= out to begin anew, or give another directory.",
    )


# --- the name of a run without a commit -------------------------------------------------------------------


def write_run(directory: Path, run: str | None, files: DiskFiles) -> None:
    """Write the name of a run durably; None: remove the file. Raises StorageError."""
    path = directory / _RUN
    files.remove(path)
    if run is not None:
        files.create(path, run.encode())
        files.sync_directory(directory)


def _read_run(directory: Path, files: DiskFiles) -> str | None:
    """The name that `write_run` has written; None if there is none."""
    path = directory / _RUN
    if path.is_symlink() or not path.is_file():
        return None
    found = files.read(path, limit=64).decode("ascii", errors="replace")
    return found if re.fullmatch("[0-9a-f]{32}", found) else None


# --- what all ranks have ----------------------------------------------------------------------------------


class _Found(NamedTuple):
    """What a directory of commits has, on any node."""

    name: str
    """As in `commit_directories`."""
    committed: bool
    """Whether there are manifests, whole or not."""
    run: str | None
    """The name of the run that has made no commit there yet."""
    faults: tuple[str, ...]
    """What is wrong with commits that are not whole."""


_Commit = tuple[CommitName, int]
"""A commit, and the number of its parts."""


@dataclass
class _Survey:
    """What all ranks have of commits."""

    found: list[_Found] = field(default_factory=list)
    readers: dict[_Commit, dict[int, list[int]]] = field(default_factory=dict)
    """Commit -> part -> the ranks that read it."""
    directories: list[Path] = field(default_factory=list)
    """Those that this rank reads."""
    mine: dict[tuple[_Commit, int], tuple[Path, SavedCommit]] = field(default_factory=dict)
    """Each whole part that this rank reads, with its directory."""

    @property
    def complete(self) -> list[_Commit]:
        """The commits of which every part was found."""
        return [each for each, parts in self.readers.items() if len(parts) == each[1]]


def _survey(
    directories: Mapping[str, Path], files: DiskFiles, rank: int, agree: Agree, *, node: int
) -> _Survey:
    """Look at all commits of a directory, on all nodes. directories: `commit_directories` on this `node`."""
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
        parts = [[*each.manifest.name, each.manifest.world_size, each.manifest.rank] for each in whole]
        said.append([name, bool(whole or faults), _read_run(directory, files), [*faults.values()], parts])
    for reader, they in agree("offload()", found=said).items():
        for name, committed, run, of_commits, parts in they["found"]:
            survey.found.append(_Found(name, committed, run, tuple(of_commits)))
            for generation, created, size, part in parts:
                of_parts = survey.readers.setdefault((CommitName(generation, created), size), {})
                of_parts.setdefault(part, []).append(reader)
    return survey


def _read_all(directory: Path, name: str, files: DiskFiles) -> tuple[list[SavedCommit], dict[int, str]]:
    """The whole commits of a directory, newest first, and what is wrong with others, by number."""
    found, faults = [], {}
    for generation in reversed(commit_files.generations(directory)):
        try:
            saved = commit_files.read(directory, generation, files)
        except CorruptState as error:
            faults[generation] = error.cause
            continue
        if name_of(saved.manifest.rank, saved.manifest.world_size) != name:
            raise IncompatibleCheckpoint(
                f"Commit {generation} in {directory} is the part of rank {saved.manifest.rank}.",
                "Give each rank the directory that it had.",
            )
        found.append(saved)
    return found, faults


@dataclass(frozen=True)
class Parts:
    """Where the parts of the commit lie that all ranks continue."""

    name: CommitName
    holders: tuple[int, ...]
    """For each part, the rank that reads it: the rank with the part's number, if the part is on its node."""
    read: Mapping[int, tuple[Path, SavedCommit]]
    """The parts that this rank reads, each with its directory, by their numbers."""


def find_parts(
    directories: Mapping[str, Path], given: Path, files: DiskFiles, rank: int, agree: Agree, *, node: int
) -> Parts:
    """Find the newest commit of which all parts are whole, whatever their number. All ranks call this.

    directories: `commit_directories` on this rank's node, which is `node`. given: the directory that the
    user gives, for errors. Raises ConfigError if there is no commit, IncompatibleCheckpoint if no rank finds
    a part, and CorruptState if no commit is whole.
    """
    survey = _survey(directories, files, rank, agree, node=node)
    if not survey.complete:
        raise _no_common(given, survey)
    commit = max(survey.complete)
    found = survey.readers[commit]
    holders = tuple(part if part in found[part] else min(found[part]) for part in range(commit[1]))
    read = {part: survey.mine[commit, part] for part, holder in enumerate(holders) if holder == rank}
    return Parts(commit[0], holders, read)


def _no_common(given: Path, survey: _Survey) -> InfinityError:
    """The error if there is no commit of which all parts are whole."""
    faults = [fault for each in survey.found for fault in each.faults]
    if not survey.readers and not faults:
        return no_commit(given)
    if {each.name for each in survey.found} == {"."}:
        return CorruptState(f"No commit in {given} is whole: {' '.join(faults)}", CURE)
    size = max((size for _, size in survey.readers), default=1)
    of_parts = [
        {name for (name, _), found in survey.readers.items() if part in found} for part in range(size)
    ]
    told = "; ".join(f"of rank {part} {named_commits(names)}" for part, names in enumerate(of_parts))
    cause = " ".join([f"There is no commit in {given} of which all parts are whole: {told}.", *faults])
    if all(of_parts):
        return CorruptState(cause, "Give back what the ranks had in one run.")
    return IncompatibleCheckpoint(
        cause, "Start a rank on each node that has parts of ranks, or give back the disk that had them."
    )


def commits_to_continue(ranks: SingleRank, given: str | os.PathLike[str], files: DiskFiles) -> bool:
    """Whether a directory has commits, on any node of these ranks. All ranks call this.

    given: the directory that the user gives. Parts of a run of which no commit has counted are removed; see
    [Note: a run without a commit]. Raises IncompatibleCheckpoint if some parts of all commits are missing,
    and it is not certain that no commit has counted, and StorageError (EBUSY) for parts that are in use.
    """
    share, node = ranks.share, ranks.place.node
    survey = _survey(commit_directories(given), files, share.rank, ranks.agree, node=node)
    having = {each.name for each in survey.found if each.committed}
    if survey.complete or not having:
        return bool(having)
    size = max((size for _, size in survey.readers), default=share.ranks)
    lacking = {name_of(part, size) for part in range(size)} - having
    if not lacking:
        return True  # offload says what is wrong with them
    if not _never_counted(survey.found, lacking):
        raise IncompatibleCheckpoint(
            f"There are commits of some ranks in {os.fspath(given)}, and none of "
            f"{', '.join(sorted(lacking))}.",
            "Start ranks on all nodes where commits are, or give back the disks that had them.",
        )
    _remove_parts(survey.directories, files)
    ranks.agree("offload()")  # no rank begins anew before all parts are gone
    return False


def _never_counted(found: Collection[_Found], lacking: Collection[str]) -> bool:
    """Whether all parts are of one run of which a rank has made none."""
    runs = {each.run for each in found if each.committed}
    without = {each.run for each in found if each.name in lacking}
    return len(runs) == 1 and None not in runs and runs <= without


def _remove_parts(directories: Iterable[Path], files: DiskFiles) -> None:
    """Take the parts of commits in directories back. The next run there removes their slabs."""
    for directory in directories:
        with PathLock(directory, rank=rank_of(directory), files=files):
            for generation in commit_files.generations(directory):
                commit_files.take_back(directory, generation, files, leave=True)


# --- its parts --------------------------------------------------------------------------------------------


class LocalPart(Closing):
    """A part of a commit on this rank's node, which this rank reads. Its directory is locked while it is
    open.
    """

    def __init__(self, directory: Path, saved: SavedCommit, files: DiskFiles, lock: PathLock | None) -> None:
        """directory: of its commits. lock: of the directory, for this run's own; None: it is locked here.
        Raises StorageError (EBUSY) if the part is in use.
        """
        self.saved = saved
        self.tier: NvmeTier | None = None
        """The part's slabs, while they are open."""
        self._read: Read | None = None
        self._directory = directory
        self._files = files
        self.own = lock is not None
        """Whether the part is in this rank's own directory."""
        self._lock = PathLock(directory, rank=saved.manifest.rank, files=files) if lock is None else lock

    def open(self, budget: Budget, shared: Mapping[Path, PathLock]) -> None:
        """Open the slabs, which are looked for in the directories of `budget`, of `shared`, and in that of
        the part. shared: locks that this rank holds under the part's number. Raises IncompatibleCheckpoint if
        a slab is missing.
        """
        locks = {**shared, self._directory: self._lock}
        directories = dict.fromkeys([*(Path(each) for each in budget.nvme_bytes), *locks])
        self.tier = open_slabs(self.saved, directories, self._files, locks)
        self._read = reader_of(self.tier)

    def sizes(self) -> list[int]:
        """Bytes of the part's files."""
        generation = self.saved.manifest.generation
        return [path(self._directory, generation).stat().st_size for path in _PART_FILES]

    def read(self, memory: torch.Tensor, offset: int) -> None:
        """Read the volume, as `commit_source.Read` says."""
        assert self._read is not None
        self._read(memory, offset)

    def bytes_of(self, kind: int, first: int, count: int) -> torch.Tensor:
        """Bytes of one of the part's files, or of its volume, uint8."""
        if kind == _VOLUME:
            memory = aligned_ram(count)
            self.read(memory, first)
            return memory
        path = _PART_FILES[kind](self._directory, self.saved.manifest.generation)
        return torch.frombuffer(
            bytearray(self._files.read(path, limit=count, offset=first)), dtype=torch.uint8
        )

    def remove(self) -> None:
        """Remove the part, and older commits in its directory: all ranks have committed in their own. Raises
        StorageError.
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
        """Close the slabs, if they are open. forget: whether they are removed."""
        tier, self.tier, self._read = self.tier, None, None
        if tier is not None:
            if forget:
                tier.forget()
            tier.close()

    def close(self) -> None:
        """Close the slabs, and release the lock if it is the part's own. A second call does nothing."""
        self.close_slabs()
        if not self.own:
            self._lock.close()


class ContinuedCommit(Closing):
    """The newest commit of which all parts are whole: the part that this rank continues, and what it reads
    of the others.
    """

    def __init__(self, ranks: SingleRank, given: Path, files: DiskFiles, lock: PathLock) -> None:
        """All ranks call this. given: the directory that the user gives. lock: of this rank's directory
        in it. Raises the errors of `find_parts`, and StorageError (EBUSY) for a part that is in use.
        """
        share = ranks.share
        self._connection = ranks
        self._rank, self._ranks = share.rank, range(share.ranks)
        parts = find_parts(
            commit_directories(given), given, files, self._rank, ranks.agree, node=ranks.place.node
        )
        self._holders = parts.holders
        self._path = commit_files.manifest_path(given, parts.name.generation)
        mine = name_of(share.rank, share.ranks)
        with ExitStack() as cleanup:
            self._local = {
                part: cleanup.enter_context(
                    LocalPart(
                        directory, saved, files, lock if name_of(part, len(parts.holders)) == mine else None
                    )
                )
                for part, (directory, saved) in parts.read.items()
            }
            sizes = {str(part): each.sizes() for part, each in self._local.items()}
            heard = self._connection.agree("offload()", sizes=sizes)
            self._sizes = {int(part): each for said in heard.values() for part, each in said["sizes"].items()}
            self.own = next((each for each in self._local.values() if each.own), None)
            """This rank's own part, if it is on this node."""
            self.recut = len(self._holders) != share.ranks
            """Whether ranks read each other's parts, because a rank's own part lacks what it keeps now."""
            self.saved = self._followed()
            """The part that this rank continues; see [Note: another number of ranks]."""
            cleanup.pop_all()

    @property
    def repeats(self) -> bool:
        """Whether another rank continues the same part; see [Note: another number of ranks]."""
        return self._rank >= len(self._holders)

    @property
    def adoptable(self) -> bool:
        """Whether this rank finds all that it keeps in its own part."""
        return self.own is not None and not self.recut

    def divide(self, plan: Plan) -> None:
        """Find out whether all ranks have in their own parts what they keep by their plans. All ranks call
        this.
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
        """Restore what this rank keeps, and serve others as a holder. All ranks call this.

        locks: of directories of slabs that this rank holds. restore: called with the source, unless this rank
        has adopted its part.
        """
        size = len(self._holders)
        takes = {rank: range(size) if self.recut else [rank] for rank in self._ranks}
        mine = (
            []
            if adopted
            else sorted(takes[self._rank], key=lambda part: (part != self._rank, part not in self._local))
        )
        for part, local in self._local.items():
            if part in mine or any(part in takes[rank] for rank in self._ranks if rank != self._rank):
                local.open(budget, locks if part == self._rank else {})
        exchange = self._connection.exchange("a commit", self._give)
        if mine:
            restore(CommitSource([self._readable(part, exchange) for part in mine]))
        exchange.end()

    def _followed(self) -> SavedCommit:
        """The part that this rank continues, from its holder if that is another rank."""
        follows = {rank: rank % len(self._holders) for rank in self._ranks}
        mine = follows[self._rank]
        exchange = self._connection.exchange("a commit's files", self._give)
        saved = self._local[mine].saved if mine in self._local else self._fetch(mine, exchange)
        exchange.end()
        return saved

    def _readable(self, part: int, exchange: SingleExchange) -> ReadablePart:
        """A part that is read here, or one that its holder sends."""
        if part in self._local:
            return ReadablePart(self._local[part].saved, self._local[part].read)
        holder, number = self._holders[part], part * _KINDS + _VOLUME
        saved = self.saved if part == self.saved.manifest.rank else self._fetch(part, exchange)
        return ReadablePart(
            saved, lambda memory, offset: exchange.take(number, offset, memory, server=holder)
        )

    def _fetch(self, part: int, exchange: SingleExchange) -> SavedCommit:
        """Read the files of a part from its holder."""
        files = []
        for kind, nbytes in enumerate(self._sizes[part]):
            content = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            for first in range(0, nbytes, _WINDOW):
                window = content[first : first + _WINDOW]
                exchange.take(part * _KINDS + kind, first, window, server=self._holders[part])
            files.append(content.numpy().tobytes())
        manifest, data = files
        return commit_files.from_bytes(manifest, data, self._path)

    def _give(self, number: int, first: int, count: int) -> torch.Tensor:
        """What this rank gives in an exchange of bytes of parts."""
        return self._local[number // _KINDS].bytes_of(number % _KINDS, first, count)

    def superseded(self) -> None:
        """Remove the parts that this rank has read for others: all ranks have committed on their own nodes.
        Raises StorageError.
        """
        for part in self._local.values():
            if not part.own:
                part.remove()

    def close(self) -> None:
        """Close all parts. A second call does nothing."""
        for part in self._local.values():
            part.close()
