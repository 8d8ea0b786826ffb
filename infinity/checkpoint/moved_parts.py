"""Moved parts: parts of a commit whose ranks run on other nodes now, which ranks of the old nodes send.

See [Note: parts that have moved] in infinity/checkpoint/agreed_commit.py. A rank that reads parts for others
is their holder. Holders serve one after the other, in the order of their numbers, each all of its clients at
once. All ranks keep to this order, so none waits for one that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from infinity.checkpoint import commit_files
from infinity.checkpoint.agreed_commit import find_parts
from infinity.checkpoint.array_source import VALUES, SavedOptimizer, SavedParameter
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.commit_source import CommitSource, open_slabs, saved_parameter
from infinity.checkpoint.rank_directories import rank_directories
from infinity.config import Budget
from infinity.formats.optimizer_rules import StateArray
from infinity.system.closing import Closing
from infinity.system.disk_files import DiskFiles
from infinity.tiers import NvmeTier
from infinity.tiers.path_lock import PathLock

if TYPE_CHECKING:  # a run of one rank does not import the package
    from infinity.distributed.communicator import Communicator
    from infinity.distributed.exchange import Exchange

_FILES = (commit_files.manifest_path, commit_files.data_path)
_WINDOW = 16 << 20
"""The most bytes of a file that are asked for at once."""


class LentPart(Closing):
    """Another rank's part of a commit, which lies on this rank's node. Locked as long as it is open."""

    def __init__(self, rank: int, directory: Path, saved: SavedCommit, files: DiskFiles) -> None:
        """rank: whose part it is. directory: of its commits. Raises StorageError (EBUSY) if it is in use."""
        self.saved = saved
        self._directory = directory
        self._files = files
        self._lock = PathLock(directory, rank=rank, files=files)
        self._tier: NvmeTier | None = None

    def source(self, budget: Budget) -> CommitSource:
        """Open the part's slabs, which are looked for in the directories of `budget` and in that of the part.
        Raises IncompatibleCheckpoint if a slab is missing.
        """
        directories = dict.fromkeys([*(Path(each) for each in budget.nvme_bytes), self._directory])
        self._tier = open_slabs(self.saved, directories, self._files, {self._directory: self._lock})
        return CommitSource(self.saved, self._tier)

    def file(self, number: int) -> torch.Tensor:
        """The bytes of the manifest (number 0) or of its data file (1): uint8."""
        path = _FILES[number](self._directory, self.saved.manifest.generation)
        content = bytearray(self._files.read(path, limit=path.stat().st_size))
        return torch.frombuffer(content, dtype=torch.uint8)

    def superseded(self) -> None:
        """Remove the part: the rank has committed on its own node. Raises StorageError."""
        if self._tier is not None:
            self._tier.forget()
        for generation in commit_files.generations(self._directory):
            commit_files.remove(self._directory, generation, self._files)
        self.close()

    def close(self) -> None:
        """Close the slabs and release the lock. A second call does nothing."""
        tier, self._tier = self._tier, None
        if tier is not None:
            tier.close()
        self._lock.close()


class RemoteSource:
    """Reads arrays of this rank's part from its holder (an `ArraySource`)."""

    def __init__(self, saved: SavedCommit, exchange: Exchange) -> None:
        self._entries = {each.names[0]: saved_parameter(each) for each in saved.manifest.parameters}
        self._numbers = {each: number for number, each in enumerate(_arrays(saved))}
        rule = saved.manifest.rule
        self._optimizer = SavedOptimizer(rule.name, rule.states, rule.moments)
        self._exchange = exchange

    @property
    def optimizer(self) -> SavedOptimizer | None:
        return self._optimizer

    def parameters(self) -> Mapping[str, SavedParameter]:
        return self._entries

    def read(self, name: str, array: str, first: int, count: int) -> torch.Tensor:
        """Read entries of an array; `ArraySource.read` says which. Raises RankFailure, too."""
        saved = self._entries[name]
        arrays = [StateArray(VALUES, saved.dtype), *saved.state_arrays(self._optimizer)]
        form = next(each for each in arrays if each.name == array)
        _, entries = form.entries(first, count)
        into = torch.empty(entries, dtype=form.dtype, device="cpu")
        self._exchange.take(self._numbers[name, array], first, into, count)
        return into


class MovedParts:
    """What this rank takes from holders, and gives as a holder."""

    def __init__(
        self, communicator: Communicator, holders: Sequence[int], lent: Mapping[int, LentPart]
    ) -> None:
        """holders: for each rank, the rank that reads its part. lent: the parts that this rank reads for
        others, by their rank.
        """
        self.lent = lent
        self._communicator = communicator
        self._holders = holders

    @property
    def away(self) -> bool:
        """Whether this rank's own part is on another node."""
        return self._holders[self._communicator.share.rank] != self._communicator.share.rank

    def files(self) -> tuple[bytes, bytes] | None:
        """The bytes of this rank's manifest and of its data file; None unless the part is away. All ranks
        call this.
        """
        content = {rank: (part.file(0), part.file(1)) for rank, part in self.lent.items()}
        sizes = {str(rank): [each.nbytes for each in both] for rank, both in content.items()}
        heard = self._communicator.agree("offload()", sizes=sizes)
        rank, found = self._communicator.share.rank, None

        def take(exchange: Exchange) -> None:
            nonlocal found
            wanted = heard[self._holders[rank]]["sizes"][str(rank)]
            found = _file(exchange, 0, wanted[0]), _file(exchange, 1, wanted[1])

        def part(source: int, number: int, first: int, count: int) -> torch.Tensor:
            return content[source][number][first : first + count]

        self._exchange("a commit's files", part, take)
        return found

    def values(
        self, saved: SavedCommit, budget: Budget, restore: Callable[[RemoteSource], None]
    ) -> list[tuple[int, Any]]:
        """Have a part that is away restored from its holder, and serve others as a holder. All ranks call
        this. restore: called with the source if this rank's part, `saved`, is away. Returns messages about
        other things that have come meanwhile.
        """
        sources = {rank: part.source(budget) for rank, part in self.lent.items()}
        numbers = {rank: _arrays(part.saved) for rank, part in self.lent.items()}

        def part(source: int, number: int, first: int, count: int) -> torch.Tensor:
            return sources[source].read(*numbers[source][number], first, count).contiguous()

        return self._exchange("a commit", part, lambda exchange: restore(RemoteSource(saved, exchange)))

    def _exchange(
        self,
        label: str,
        part: Callable[[int, int, int, int], torch.Tensor],
        take: Callable[[Exchange], None],
    ) -> list[tuple[int, Any]]:
        """Go through all holders' exchanges in order, as server, as client, or as neither."""
        from infinity.distributed.exchange import Exchange

        early: list[tuple[int, Any]] = []
        rank = self._communicator.share.rank
        for holder in sorted(set(self._holders)):
            clients = [each for each, other in enumerate(self._holders) if other == holder != each]
            exchange = Exchange(self._communicator, label, server=holder, clients=clients)
            if rank == holder and clients:
                early += exchange.serve(part)
            elif rank in clients:
                take(exchange)
                exchange.leave()
        return early

    def superseded(self) -> None:
        """Remove the parts that were lent: their ranks have committed on their own nodes."""
        for part in self.lent.values():
            part.superseded()

    def close(self) -> None:
        """Close the parts that are lent."""
        for part in self.lent.values():
            part.close()


def commit_of_all(
    communicator: Communicator, given: Path, files: DiskFiles
) -> tuple[SavedCommit, MovedParts]:
    """This rank's part of the newest commit of which all parts are whole, and what ranks send each other of
    it. All ranks call this.

    given: the directory that the user gives. Raises the errors of `find_parts`, and StorageError (EBUSY) for
    a part that is in use.
    """
    share, directories = communicator.share, rank_directories(given)
    node = communicator.place.node
    parts = find_parts(directories, given, files, share, communicator.agree, node=node)
    with ExitStack() as cleanup:
        lent = {
            rank: cleanup.enter_context(LentPart(rank, directories[rank], saved, files))
            for rank, saved in parts.read.items()
            if rank != share.rank
        }
        moved = MovedParts(communicator, parts.holders, lent)
        sent = moved.files()
        if sent is None:
            saved = parts.read[share.rank]
        else:
            saved = commit_files.from_bytes(*sent, commit_files.manifest_path(given, parts.name.generation))
        cleanup.pop_all()
    return saved, moved


def _arrays(saved: SavedCommit) -> list[tuple[str, str]]:
    """(parameter, array) of all arrays of a part, in an order that holder and client share."""
    found: dict[tuple[str, str], None] = {}
    for each in saved.manifest.parameters:
        for within in each.ranges:
            found |= dict.fromkeys((each.names[0], array) for array in within.places)
    return list(found)


def _file(exchange: Exchange, number: int, nbytes: int) -> bytes:
    return b"".join(_pieces(exchange, number, nbytes))


def _pieces(exchange: Exchange, number: int, nbytes: int) -> Iterator[bytes]:
    for first in range(0, nbytes, _WINDOW):
        into = torch.empty(min(_WINDOW, nbytes - first), dtype=torch.uint8, device="cpu")
        exchange.take(number, first, into)
        yield into.numpy().tobytes()
