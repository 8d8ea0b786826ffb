"""Continued commit: the commit from which a run goes on, read from all of its parts.

The rank that reads a part is its holder, and sends it to the ranks on other nodes that need it; see
[Note: parts that have moved] in infinity/checkpoint/agreed_commit.py.

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

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from infinity.checkpoint import commit_files
from infinity.checkpoint.agreed_commit import Agree, commit_directories, find_parts, name_of
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.commit_source import CommitSource, Read, ReadablePart, open_slabs, reader_of
from infinity.checkpoint.restore import has_all_kept
from infinity.config import Budget
from infinity.layout.shards import ALONE
from infinity.planning.plan import Plan
from infinity.system.closing import Closing
from infinity.system.disk_files import DiskFiles
from infinity.tiers import NvmeTier, aligned_ram, remove_slab
from infinity.tiers.path_lock import PathLock

if TYPE_CHECKING:  # a run of one rank does not import the package
    from infinity.distributed.communicator import Communicator
    from infinity.distributed.exchange import Exchange

_FILES = (commit_files.manifest_path, commit_files.data_path)
_VOLUME = len(_FILES)
_KINDS = _VOLUME + 1
"""What a part consists of: its two files and its volume. In an exchange, kind k of part p has the number
p * _KINDS + k.
"""
_WINDOW = 16 << 20
"""The most bytes of a file that are asked for at once."""


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
        return [path(self._directory, generation).stat().st_size for path in _FILES]

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
        path = _FILES[kind](self._directory, self.saved.manifest.generation)
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

    def __init__(
        self, communicator: Communicator | None, given: Path, files: DiskFiles, lock: PathLock
    ) -> None:
        """All ranks call this. communicator: None with one rank. given: the directory that the user gives.
        lock: of this rank's own directory in it. Raises the errors of `find_parts`, and StorageError (EBUSY)
        for a part that is in use.
        """
        share, node = (ALONE, 0) if communicator is None else (communicator.share, communicator.place.node)
        self._communicator = communicator
        self._agree = agreement_of(communicator)
        self._rank, self._ranks = share.rank, range(share.ranks)
        parts = find_parts(commit_directories(given), given, files, self._rank, self._agree, node=node)
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
            heard = self._agree("offload()", sizes=sizes)
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
        self.recut = not all(said["enough"] for said in self._agree("offload()", enough=enough).values())

    def restore(
        self,
        budget: Budget,
        locks: Mapping[Path, PathLock],
        restore: Callable[[CommitSource], None],
        *,
        adopted: bool,
    ) -> list[tuple[int, Any]]:
        """Restore what this rank keeps, and serve others as a holder. All ranks call this.

        locks: of directories of slabs that this rank holds. restore: called with the source, unless this rank
        has adopted its part. Returns messages about other things that have come meanwhile.
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
        exchange = self._exchange("a commit", {**takes, self._rank: mine})
        if mine:
            restore(CommitSource([self._readable(part, exchange) for part in mine]))
        return exchange.end()

    def _followed(self) -> SavedCommit:
        """The part that this rank continues, from its holder if that is another rank."""
        follows = {rank: rank % len(self._holders) for rank in self._ranks}
        mine = follows[self._rank]
        exchange = self._exchange("a commit's files", {rank: [part] for rank, part in follows.items()})
        saved = self._local[mine].saved if mine in self._local else self._fetch(mine, exchange)
        exchange.end()
        return saved

    def _readable(self, part: int, exchange: Exchange | NoExchange) -> ReadablePart:
        """A part that is read here, while ranks that wait are served, or one that its holder sends."""
        if part in self._local:
            local = self._local[part]

            def reading(memory: torch.Tensor, offset: int) -> None:
                exchange.serve_waiting()
                local.read(memory, offset)

            return ReadablePart(local.saved, reading)
        holder, number = self._holders[part], part * _KINDS + _VOLUME
        saved = self.saved if part == self.saved.manifest.rank else self._fetch(part, exchange)
        return ReadablePart(
            saved, lambda memory, offset: exchange.take(number, offset, memory, server=holder)
        )

    def _fetch(self, part: int, exchange: Exchange | NoExchange) -> SavedCommit:
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

    def _exchange(self, label: str, takes: Mapping[int, Collection[int]]) -> Exchange | NoExchange:
        """An exchange of bytes of parts. takes: for each rank, the parts that it reads."""
        if self._communicator is None:
            return NoExchange()
        from infinity.distributed.exchange import Exchange

        def give(number: int, first: int, count: int) -> torch.Tensor:
            return self._local[number // _KINDS].bytes_of(number % _KINDS, first, count)

        servers = {self._holders[part] for part in takes[self._rank]} - {self._rank}
        clients = {
            rank
            for rank, parts in takes.items()
            if rank != self._rank and any(self._holders[part] == self._rank for part in parts)
        }
        return Exchange(self._communicator, label, give, servers=servers, clients=clients)

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


class NoExchange:
    """The exchange of one rank, which has nobody to take from."""

    def serve_waiting(self) -> None:
        """Do nothing."""

    def take(self, number: int, first: int, into: torch.Tensor, *, server: int = 0) -> None:
        raise AssertionError("one rank reads all parts itself")

    def end(self) -> list[tuple[int, Any]]:
        return []


def agreement_of(communicator: Communicator | None) -> Agree:
    """How all ranks agree; one rank hears what it says itself."""
    return (lambda call, **facts: {0: facts}) if communicator is None else communicator.agree
