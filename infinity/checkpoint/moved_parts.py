"""Moved parts: parts of a commit that ranks read for each other, on their node or over the network.

A rank's part may lie on another node: see [Note: parts that have moved] in
infinity/checkpoint/agreed_commit.py. The rank that reads a part is its holder.

[Note: a commit that is cut otherwise]
Other budgets, another stage, other strides or another number of ranks can have each rank keep other elements
than its part has. All parts together are the whole run, as ranges of elements of each parameter. So each rank
then reads what it keeps now from all parts: from its own one where that has it, else from those on its node,
else from the holders of the others, who also tell which ranges they have.

[Note: another number of ranks]
Rank r of a run continues what part r of the commit says of the run: generators, buffers, the user's state. Of
a commit of n parts a rank r >= n continues those of part r % n. But random numbers of two ranks are not to be
the same, so that rank leaves its generators as the program has set them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from infinity.checkpoint import commit_files
from infinity.checkpoint.agreed_commit import Agree, find_parts
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.commit_source import CommitSource, open_slabs, reader_of
from infinity.checkpoint.part_ranges import PartRanges, from_table, table_of
from infinity.checkpoint.parts_source import PartsSource, Read, ReadablePart
from infinity.checkpoint.rank_directories import commit_directories, name_of
from infinity.checkpoint.resume import has_all_kept
from infinity.config import Budget
from infinity.layout.shards import ALONE
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
    """A part of a commit on this rank's node, outside the rank's directory. Locked while it is open."""

    def __init__(self, part: int, directory: Path, saved: SavedCommit, files: DiskFiles) -> None:
        """part: its number. directory: of its commits. Raises StorageError (EBUSY) if it is in use."""
        self.saved = saved
        self._directory = directory
        self._files = files
        self._lock = PathLock(directory, rank=part, files=files)
        self._tier: NvmeTier | None = None

    def source(self, budget: Budget, shared: Mapping[Path, PathLock]) -> CommitSource:
        """Open the part's slabs, which are looked for in the directories of `budget` and in that of the part.
        shared: locks of directories that this rank holds under the part's number. Raises
        IncompatibleCheckpoint if a slab is missing.
        """
        directories = dict.fromkeys([*(Path(each) for each in budget.nvme_bytes), self._directory])
        locks = {**shared, self._directory: self._lock}
        self._tier = open_slabs(self.saved, directories, self._files, locks)
        return CommitSource(self.saved, reader_of(self._tier))

    def superseded(self) -> None:
        """Remove the part, and older commits in its directory: all ranks have committed in their own. Raises
        StorageError.
        """
        slabs = commit_files.named_slabs(self._directory, self._files)
        locks = {self._directory: self._lock}
        if self._tier is not None:
            slabs -= {slab.uuid for slab in self._tier.record.slabs}
            locks = self._tier.locks
            self._tier.forget()
        for uuid in sorted(slabs):
            for lock in locks.values():
                remove_slab(lock, uuid, self._files)
        for generation in commit_files.generations(self._directory):
            commit_files.remove(self._directory, generation, self._files)
        self.close()
        if self.saved.manifest.world_size > 1:
            with suppress(OSError):  # it has other files
                self._directory.rmdir()

    def close(self) -> None:
        """Close the slabs and release the lock. A second call does nothing."""
        tier, self._tier = self._tier, None
        if tier is not None:
            tier.close()
        self._lock.close()


class MovedParts:
    """What this rank takes from holders, and gives as a holder."""

    def __init__(
        self,
        communicator: Communicator | None,
        holders: Sequence[int],
        lent: Mapping[int, LentPart],
        read: Mapping[int, tuple[Path, SavedCommit]],
    ) -> None:
        """holders: for each part, the rank that reads it. lent: the parts that this rank reads outside of its
        own directory. read: all parts that it reads, with their directories.
        """
        self.lent = lent
        self.recut = False
        """Whether ranks read each other's parts, because a rank's own part lacks what the rank keeps now."""
        self.away = not read.keys() - lent.keys()
        """Whether this rank's own part is on another node, or there is none."""
        self._communicator = communicator
        self._agree: Agree = agreement_of(communicator)
        self._share = ALONE if communicator is None else communicator.share
        self._rank = self._share.rank
        self._holders = holders
        self._read = read
        self._rows: Mapping[int, int] = {}
        """Number of a part -> number of ranges in it, once `divide` was called."""

    @property
    def repeats(self) -> bool:
        """Whether another rank continues the same part; see [Note: another number of ranks]."""
        return self._rank >= len(self._holders)

    def saved(self, files: DiskFiles, path: Path) -> SavedCommit:
        """The part that this rank continues: its own, or one of a commit of fewer ranks. All ranks call this.

        Of a part that another rank reads, the files are sent. path: that of the manifest, for errors.
        """
        follows = [rank % len(self._holders) for rank in range(self._share.ranks)]
        clients = {rank for rank, part in enumerate(follows) if self._holders[part] == self._rank != rank}
        content = {part: _files_of(*self._read[part], files) for part in {follows[each] for each in clients}}
        sizes = {str(part): [each.nbytes for each in both] for part, both in content.items()}
        heard = self._agree("offload()", sizes=sizes)

        def part(number: int, first: int, count: int) -> torch.Tensor:
            number, which = self._split(number)
            return content[which][number][first : first + count]

        mine = follows[self._rank]
        holder = self._holders[mine]
        exchange = self._exchange("a commit's files", part, {holder} - {self._rank}, clients)
        if mine in self._read:
            saved = self._read[mine][1]
        else:
            lengths = heard[holder]["sizes"][str(mine)]
            manifest, data = (
                _file(exchange, holder, self._number(number, mine), lengths[number]) for number in range(2)
            )
            saved = commit_files.from_bytes(manifest, data, path)
        exchange.end()
        return saved

    def divide(self, saved: SavedCommit, plan: Plan) -> None:
        """Find out whether all ranks have in their own parts what they keep by their plans. All ranks call
        this. saved: the part that this rank continues.
        """
        rows = {str(part): len(table_of(each.manifest)) for part, (_, each) in self._read.items()}
        enough = len(self._holders) == self._share.ranks and has_all_kept(saved, plan)
        heard = self._agree("offload()", rows=rows, enough=enough)
        self._rows = {int(part): count for said in heard.values() for part, count in said["rows"].items()}
        self.recut = not all(said["enough"] for said in heard.values())

    def values(
        self,
        saved: SavedCommit,
        budget: Budget,
        locks: Mapping[Path, PathLock],
        open_own: Callable[[], CommitSource],
        restore: Callable[[PartsSource], None],
    ) -> list[tuple[int, Any]]:
        """Restore what this rank keeps from all parts, if its own part is away or ranks read each other's
        parts, and serve others as a holder. All ranks call this.

        saved: the part that this rank continues. locks: of directories of slabs that this rank holds.
        open_own: opens the slabs of the own part, if it is here. restore: called with the source. Returns
        messages about other things that have come meanwhile.
        """
        sources = {
            part: each.source(budget, locks if part == self._rank else {}) for part, each in self.lent.items()
        }
        if self.recut and not self.away:
            sources[self._rank] = open_own()
        arrays = _arrays(saved)
        tables = {part: table_of(self._read[part][1].manifest) for part in (sources if self.recut else ())}

        def part(number: int, first: int, count: int) -> torch.Tensor:
            number, which = self._split(number)
            if number == len(arrays):
                return tables[which].view(-1)[first : first + count]
            return sources[which].read(*arrays[number], first, count).contiguous()

        ranks = range(self._share.ranks)
        if self.recut:
            servers = set(self._holders) - {self._rank}
            clients = set(ranks) - {self._rank} if self._rank in self._holders else set()
        else:
            servers = {self._holders[self._rank]} - {self._rank}
            clients = {each for each in ranks if self._holders[each] == self._rank != each}
        exchange = self._exchange("a commit", part, servers, clients)
        if self.recut or self.away:
            restore(self._source(saved, sources, exchange))
        return exchange.end()

    def _source(
        self, saved: SavedCommit, sources: Mapping[int, CommitSource], exchange: Exchange | NoExchange
    ) -> PartsSource:
        """What reads this rank's own part, or all parts: its own one first, then those on its node."""
        numbers = {each: number for number, each in enumerate(_arrays(saved))}
        found = []
        parts = range(len(self._holders))
        for part in sorted(parts, key=lambda each: (each != self._rank, each not in sources)):
            if part in sources:
                read = _serving(exchange, sources[part].read)
                found.append(ReadablePart(PartRanges.of(self._read[part][1].manifest), read))
            elif not self.recut:
                if part == self._rank:
                    read = self._remote(part, saved, numbers, exchange)
                    found.append(ReadablePart(PartRanges.of(saved.manifest), read))
            elif self._rows[part]:
                table = torch.empty((self._rows[part], 3), dtype=torch.int64, device="cpu")
                exchange.take(self._number(len(numbers), part), 0, table.view(-1), server=self._holders[part])
                read = self._remote(part, saved, numbers, exchange)
                found.append(ReadablePart(from_table(table, saved.manifest), read))
        return PartsSource(saved.manifest, found)

    def _remote(
        self,
        part: int,
        saved: SavedCommit,
        numbers: Mapping[tuple[str, str], int],
        exchange: Exchange | NoExchange,
    ) -> Read:
        """What reads a part from its holder."""
        entries = {each.names[0]: each for each in saved.manifest.parameters}
        rule = saved.manifest.rule

        def read(name: str, array: str, first: int, count: int) -> torch.Tensor:
            form = entries[name].arrays(rule)[array]
            _, length = form.entries(first, count)
            into = torch.empty(length, dtype=form.dtype, device="cpu")
            number = self._number(numbers[name, array], part)
            exchange.take(number, first, into, count, server=self._holders[part])
            return into

        return read

    def _exchange(
        self,
        label: str,
        part: Callable[[int, int, int], torch.Tensor],
        servers: Collection[int],
        clients: Collection[int],
    ) -> Exchange | NoExchange:
        """An exchange in which this rank takes from holders, and gives to `clients`."""
        if self._communicator is None:
            return NoExchange()
        from infinity.distributed.exchange import Exchange

        return Exchange(self._communicator, label, part, servers=servers, clients=clients)

    def _number(self, number: int, part: int) -> int:
        """The number in an exchange of tensor `number` of a part."""
        return number * len(self._holders) + part

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
    communicator: Communicator | None, given: Path, files: DiskFiles
) -> tuple[SavedCommit, MovedParts]:
    """The part that this rank continues of the newest commit of which all parts are whole, and what ranks
    send each other of it. All ranks call this.

    communicator: None with one rank. given: the directory that the user gives. Raises the errors of
    `find_parts`, and StorageError (EBUSY) for a part that is in use.
    """
    share, node = (ALONE, 0) if communicator is None else (communicator.share, communicator.place.node)
    agree = agreement_of(communicator)
    parts = find_parts(commit_directories(given), given, files, share, agree, node=node)
    mine = name_of(share.rank, share.ranks)
    size = len(parts.holders)
    with ExitStack() as cleanup:
        lent = {
            part: cleanup.enter_context(LentPart(part, directory, saved, files))
            for part, (directory, saved) in parts.read.items()
            if name_of(part, size) != mine
        }
        moved = MovedParts(communicator, parts.holders, lent, parts.read)
        saved = moved.saved(files, commit_files.manifest_path(given, parts.name.generation))
        cleanup.pop_all()
    return saved, moved


def agreement_of(communicator: Communicator | None) -> Agree:
    """How all ranks agree; one rank hears what it says itself."""
    return (lambda call, **facts: {0: facts}) if communicator is None else communicator.agree


class NoExchange:
    """The exchange of one rank, which has nobody to take from."""

    def serve_waiting(self) -> None:
        """Do nothing."""

    def take(self, number: int, first: int, into: torch.Tensor, count: int = 0, *, server: int = 0) -> None:
        raise AssertionError("one rank reads all parts itself")

    def end(self) -> list[tuple[int, Any]]:
        return []


def _arrays(saved: SavedCommit) -> list[tuple[str, str]]:
    """(parameter, array) of all arrays of a commit, in an order that all ranks share."""
    manifest = saved.manifest
    return [(each.names[0], array) for each in manifest.parameters for array in each.arrays(manifest.rule)]


def _serving(exchange: Exchange | NoExchange, read: Read) -> Read:
    """What reads on this node, and serves the ranks that wait meanwhile."""

    def reading(name: str, array: str, first: int, count: int) -> torch.Tensor:
        exchange.serve_waiting()
        return read(name, array, first, count)

    return reading


def _files_of(directory: Path, saved: SavedCommit, files: DiskFiles) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes, uint8, of a part's manifest and of its data file."""
    manifest, data = (
        torch.frombuffer(bytearray(files.read(path, limit=path.stat().st_size)), dtype=torch.uint8)
        for path in (each(directory, saved.manifest.generation) for each in _FILES)
    )
    return manifest, data


def _file(exchange: Exchange | NoExchange, server: int, number: int, nbytes: int) -> bytes:
    return b"".join(_pieces(exchange, server, number, nbytes))


def _pieces(exchange: Exchange | NoExchange, server: int, number: int, nbytes: int) -> Iterator[bytes]:
    for first in range(0, nbytes, _WINDOW):
        into = torch.empty(min(_WINDOW, nbytes - first), dtype=torch.uint8, device="cpu")
        exchange.take(number, first, into, server=server)
        yield into.numpy().tobytes()
