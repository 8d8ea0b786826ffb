"""Moved parts: parts of a commit that ranks read for each other, on their node or over the network.

A rank's part may lie on another node: see [Note: parts that have moved] in
infinity/checkpoint/agreed_commit.py. The rank that reads a part is its holder.

[Note: a commit that is cut otherwise]
Other budgets, another stage or other strides can have each rank keep other elements than its part has. The
parts of all ranks together are the whole run, as ranges of elements of each parameter. So each rank then
reads what it keeps now from all parts: from its own one where that has it, else from those on its node, else
from the holders of the others, who also tell which ranges they have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from infinity.checkpoint import commit_files
from infinity.checkpoint.agreed_commit import find_parts
from infinity.checkpoint.array_source import VALUES, SavedOptimizer
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.commit_source import CommitSource, open_slabs, saved_parameter
from infinity.checkpoint.part_ranges import PartRanges, from_table, table_of
from infinity.checkpoint.parts_source import PartsSource, Read, ReadablePart
from infinity.checkpoint.rank_directories import rank_directories
from infinity.checkpoint.resume import has_all_kept
from infinity.config import Budget
from infinity.formats.optimizer_rules import StateArray
from infinity.planning.plan import Plan
from infinity.system.closing import Closing
from infinity.system.disk_files import DiskFiles
from infinity.tiers import NvmeTier, remove_slab
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
        """Remove the part, and older commits of the rank here: it has committed on its own node. Raises
        StorageError.
        """
        slabs = commit_files.named_slabs(self._directory, self._files)
        locks = {self._directory: self._lock}
        if self._tier is not None:
            slabs -= {slab.uuid for slab in self._tier.record.slabs}
            locks = self._tier.locks
            self._tier.forget()
        for uuid in sorted(slabs):
            for path, lock in locks.items():
                remove_slab(path, uuid, lock.rank, self._files, lock=lock)
        for generation in commit_files.generations(self._directory):
            commit_files.remove(self._directory, generation, self._files)
        self.close()

    def close(self) -> None:
        """Close the slabs and release the lock. A second call does nothing."""
        tier, self._tier = self._tier, None
        if tier is not None:
            tier.close()
        self._lock.close()


class MovedParts:
    """What this rank takes from holders, and gives as a holder."""

    def __init__(
        self, communicator: Communicator, holders: Sequence[int], lent: Mapping[int, LentPart]
    ) -> None:
        """holders: for each rank, the rank that reads its part. lent: the parts that this rank reads for
        others, by their rank.
        """
        self.lent = lent
        self.recut = False
        """Whether ranks read each other's parts, because a rank's own part lacks what the rank keeps now."""
        self._communicator = communicator
        self._rank = communicator.share.rank
        self._holders = holders
        self._rows: Mapping[int, int] = {}
        """Rank -> number of ranges in its part, once `divide` was called."""

    @property
    def away(self) -> bool:
        """Whether this rank's own part is on another node."""
        return self._holders[self._rank] != self._rank

    def files(self) -> tuple[bytes, bytes] | None:
        """The bytes of this rank's manifest and of its data file; None unless the part is away. All ranks
        call this.
        """
        content = {rank: (part.file(0), part.file(1)) for rank, part in self.lent.items()}
        sizes = {str(rank): [each.nbytes for each in both] for rank, both in content.items()}
        heard = self._communicator.agree("offload()", sizes=sizes)

        def part(number: int, first: int, count: int) -> torch.Tensor:
            number, rank = self._split(number)
            return content[rank][number][first : first + count]

        exchange = self._exchange("a commit's files", part)
        found = None
        if self.away:
            holder = self._holders[self._rank]
            wanted = heard[holder]["sizes"][str(self._rank)]
            manifest, data = (
                _file(exchange, holder, self._number(number, self._rank), wanted[number])
                for number in range(2)
            )
            found = manifest, data
        exchange.end()
        return found

    def divide(self, saved: SavedCommit, plan: Plan) -> None:
        """Find out whether all ranks have in their own parts what they keep by their plans. All ranks call
        this. saved: this rank's part.
        """
        here = {rank: part.saved for rank, part in self.lent.items()}
        if not self.away:
            here[self._rank] = saved
        rows = {str(rank): len(table_of(each.manifest)) for rank, each in here.items()}
        heard = self._communicator.agree("offload()", rows=rows, enough=has_all_kept(saved, plan))
        self._rows = {int(rank): count for said in heard.values() for rank, count in said["rows"].items()}
        self.recut = not all(said["enough"] for said in heard.values())

    def values(
        self,
        saved: SavedCommit,
        budget: Budget,
        open_own: Callable[[], CommitSource],
        restore: Callable[[PartsSource], None],
    ) -> list[tuple[int, Any]]:
        """Restore what this rank keeps from all parts, if its own part is away or ranks read each other's
        parts, and serve others as a holder. All ranks call this.

        saved: this rank's part. open_own: opens its slabs, if it is here. restore: called with the source.
        Returns messages about other things that have come meanwhile.
        """
        sources = {rank: part.source(budget) for rank, part in self.lent.items()}
        if self.recut and not self.away:
            sources[self._rank] = open_own()
        arrays = _arrays(saved)
        tables = {
            rank: table_of((saved if rank == self._rank else self.lent[rank].saved).manifest)
            for rank in (sources if self.recut else ())
        }

        def part(number: int, first: int, count: int) -> torch.Tensor:
            number, rank = self._split(number)
            if number == len(arrays):
                return tables[rank].view(-1)[first : first + count]
            return sources[rank].read(*arrays[number], first, count).contiguous()

        exchange = self._exchange("a commit", part, all_parts=self.recut)
        if self.recut or self.away:
            restore(self._source(saved, sources, exchange))
        return exchange.end()

    def _source(
        self, saved: SavedCommit, sources: Mapping[int, CommitSource], exchange: Exchange
    ) -> PartsSource:
        """What reads this rank's own part, or all parts: its own one first, then those on its node."""
        numbers = {each: number for number, each in enumerate(_arrays(saved))}
        found = []
        ranks = range(len(self._holders))
        for rank in sorted(ranks, key=lambda each: (each != self._rank, each not in sources)):
            if rank in sources:
                manifest = saved.manifest if rank == self._rank else self.lent[rank].saved.manifest
                read = _serving(exchange, sources[rank].read)
                found.append(ReadablePart(PartRanges.of(manifest), read))
            elif rank == self._rank:
                read = self._remote(rank, saved, numbers, exchange)
                found.append(ReadablePart(PartRanges.of(saved.manifest), read))
            elif self.recut and self._rows[rank]:
                table = torch.empty((self._rows[rank], 3), dtype=torch.int64, device="cpu")
                exchange.take(self._number(len(numbers), rank), 0, table.view(-1), server=self._holders[rank])
                read = self._remote(rank, saved, numbers, exchange)
                found.append(ReadablePart(from_table(table, saved.manifest), read))
        return PartsSource(saved.manifest, found)

    def _remote(
        self,
        rank: int,
        saved: SavedCommit,
        numbers: Mapping[tuple[str, str], int],
        exchange: Exchange,
    ) -> Read:
        """What reads the part of a rank from its holder."""
        entries = {each.names[0]: saved_parameter(each) for each in saved.manifest.parameters}
        rule = saved.manifest.rule
        optimizer = SavedOptimizer(rule.name, rule.states, rule.moments, rule.averaged)

        def read(name: str, array: str, first: int, count: int) -> torch.Tensor:
            saved = entries[name]
            arrays = [StateArray(VALUES, saved.dtype), *saved.state_arrays(optimizer)]
            form = next(each for each in arrays if each.name == array)
            _, length = form.entries(first, count)
            into = torch.empty(length, dtype=form.dtype, device="cpu")
            number = self._number(numbers[name, array], rank)
            exchange.take(number, first, into, count, server=self._holders[rank])
            return into

        return read

    def _exchange(
        self, label: str, part: Callable[[int, int, int], torch.Tensor], *, all_parts: bool = False
    ) -> Exchange:
        """An exchange in which ranks take their own parts from holders, or anything from any holder."""
        from infinity.distributed.exchange import Exchange

        ranks = range(len(self._holders))
        if all_parts:
            servers = set(self._holders) - {self._rank}
            clients = set(ranks) - {self._rank} if self._rank in self._holders else set()
        else:
            servers = {self._holders[self._rank]} - {self._rank}
            clients = {each for each in ranks if self._holders[each] == self._rank != each}
        return Exchange(self._communicator, label, part, servers=servers, clients=clients)

    def _number(self, number: int, rank: int) -> int:
        """The number in an exchange of tensor `number` of a rank's part."""
        return number * len(self._holders) + rank

    def _split(self, number: int) -> tuple[int, int]:
        return divmod(number, len(self._holders))

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
    """(parameter, array) of all arrays of a commit, in an order that all ranks share."""
    rule = saved.manifest.rule
    optimizer = SavedOptimizer(rule.name, rule.states, rule.moments, rule.averaged)
    return [
        (each.names[0], array)
        for each in saved.manifest.parameters
        for array in (VALUES, *(form.name for form in saved_parameter(each).state_arrays(optimizer)))
    ]


def _serving(exchange: Exchange, read: Read) -> Read:
    """What reads on this node, and serves the ranks that wait meanwhile."""

    def reading(name: str, array: str, first: int, count: int) -> torch.Tensor:
        exchange.serve_waiting()
        return read(name, array, first, count)

    return reading


def _file(exchange: Exchange, server: int, number: int, nbytes: int) -> bytes:
    return b"".join(_pieces(exchange, server, number, nbytes))


def _pieces(exchange: Exchange, server: int, number: int, nbytes: int) -> Iterator[bytes]:
    for first in range(0, nbytes, _WINDOW):
        into = torch.empty(min(_WINDOW, nbytes - first), dtype=torch.uint8, device="cpu")
        exchange.take(number, first, into, server=server)
        yield into.numpy().tobytes()
