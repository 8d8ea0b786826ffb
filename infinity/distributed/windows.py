"""Windows: the ranks of a node read parameters and gradients straight from each other's RAM.

What other nodes own of a page is brought to a node once: each rank of the node is the **relay** of some of
these owners (`Share.relay`), and keeps their parts in its RAM (`NodeCache` in
infinity/distributed/remote_parts.py), where its mates copy them as they copy its own.

Each rank's host arena is shared memory, which the other ranks of its node, its **mates**, map for reading: a
window. Its board (csrc/tiers/board.hpp) says which parameter pages they may copy from there now. If a page is
not there, they ask for it by a message.

[Note: copies that the owner does not see]
A mate copies bytes only if their owner's entry on the board has the stamp of what the mate wants (`Stamp`),
before the copy and after it. What it copies is what the owner's page service would send now:

- The owner opens an entry only under its runtime's lock, while the home has all that the stamp says: no
  update of the page is pending, and no user code may edit the home in place.
- Whatever changes a home in RAM closes the entry first (`Home.withdraw`): an update, a write of edits or of
  loaded values, and permission for user code to change a permanent page. It does not wait for copies.
- So a copy that the change overtakes is found by its second look at the entry. The mate then sends a request,
  which the owner answers as if there were no windows: with a copy that it has kept, or after an agreement, or
  with an error.

Of a home, only the parts that its rank owns are copied: what is written there of others' parts closes no
entry. An entry of relayed parts is opened when all of them have come, and closed before the memory is used
again. A mate that finds it closed asks the relay, and then the owners of what it does not find.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import torch

from infinity import _tiers
from infinity.errors import ConfigError
from infinity.layout.shards import HomeRange
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.remote import Leg
from infinity.tiers import HostArena
from infinity.tiers.pool import tensor_over

VARIABLE = "INFINITY_WINDOWS"
_ENTRIES = 1 << 14
"""Entries of a board, 64 bytes each, which take RAM when they are used: one for each unit's home, and behind
them one for each unit's relayed parts. Pages beyond get none.
"""

Stamp = tuple[int, int, int]
"""(step, number of loaded copies, edit version): which bytes of a page an entry has, or a mate wants."""
Told = list[int]
"""(process, descriptor, inode, bytes) of shared memory, as ranks tell it each other."""


def open_windows() -> Windows | None:
    """Make a rank's `Windows`. Returns None if the environment variable INFINITY_WINDOWS is "0", or if the
    kernel grants no shared memory. Raises ConfigError for another value than "0" or "1".
    """
    text = os.environ.get(VARIABLE, "1")
    if text not in ("0", "1"):
        raise ConfigError(f"{VARIABLE} is {text!r}.", "Give 0 to have ranks of a node send messages, or 1.")
    try:
        return Windows() if text == "1" else None
    except OSError:  # some sandboxes have no memfd_create
        return None


class Windows:
    """This rank's board, and the windows to its mates' RAM. Any thread may call `copy`; all else is called
    under the runtime's lock.
    """

    def __init__(self) -> None:
        nbytes = _ENTRIES * _tiers.BOARD_ENTRY_BYTES
        self._memory = _tiers.map_host(nbytes, huge_pages=False, shared=True)
        self._board = _tiers.Board(self._memory)
        self._boards: dict[int, _tiers.Board] = {}
        self._arenas: dict[int, _tiers.Window] = {}
        self._offsets: dict[int, int] = {}
        """Unit whose page is at home in shared memory -> bytes from the start of this memory to the home."""
        self._start = self._units = 0
        """Address of this rank's shared memory, and number of units."""

    def tell_board(self) -> Told:
        """What this rank tells the others, so that they can read its board."""
        return _told(self._memory)

    def read_boards(self, told: Mapping[int, Told]) -> list[int]:
        """Map the boards of other ranks. told: rank -> what it told. Returns the ranks for which this worked.

        The kernel lets only processes of the same user read each other's memory.
        """
        for rank, each in told.items():
            with suppress(OSError):
                self._boards[rank] = _tiers.Board(_opened(each))
        return [*self._boards]

    def meet(self, rank: int, mates: Sequence[int]) -> None:
        """Note the ranks that read this rank's board, and whose boards this rank reads; rank: itself."""
        self._memory.close_descriptor()
        self._boards = {rank: self._board} | {each: self._boards[each] for each in mates}

    def tell_arena(self, arena: HostArena, pages: Sequence[ParameterPage]) -> Told:
        """What this rank tells its mates, so that they can read its RAM. pages: all parameter pages, of which
        those at home in `arena` can be offered from now on.
        """
        region = arena.region
        self._start, self._units = region.address, len(pages)
        for page in pages[:_ENTRIES]:
            memory = page.home.memory
            start = -1 if memory is None else memory.data_ptr() - region.address
            if page.home.in_place and 0 <= start < region.nbytes:
                self._offsets[page.index] = start
                page.home.withdraw = functools.partial(_withdraw, self._board, page.index, page.shard.own)
        return _told(region)

    def read_arenas(self, told: Mapping[int, Told]) -> list[int]:
        """Map the RAM of mates. told: rank -> what it told. Returns the ranks for which this worked."""
        for rank in self._boards:
            with suppress(OSError):
                self._arenas[rank] = _opened(told[rank])
        return [*self._arenas]

    def keep_arenas(self, readers: Collection[int]) -> None:
        """Read the RAM of those ranks alone that read this rank's."""
        self._arenas = {rank: each for rank, each in self._arenas.items() if rank in readers}

    def reads(self, rank: int) -> bool:
        """Whether this rank copies what `rank` offers by itself. It also reads what it relays itself."""
        return rank in self._arenas

    def offers(self, page: ParameterPage, stamp: Stamp) -> bool:
        """Whether mates may copy this rank's part of a page, with the bytes of `stamp`, now."""
        return page.index in self._offsets and self._board.is_open(page.index, stamp)

    def offer(self, page: ParameterPage, stamp: Stamp) -> bool:
        """Let mates copy this rank's part of a page, if it is in shared memory. Returns whether it is.

        The home has the bytes of `stamp`; see [Note: copies that the owner does not see].
        """
        offset = self._offsets.get(page.index)
        if offset is None or page.home.failure is not None or (page.permanent and page.holds):
            return False
        self._board.open(page.index, stamp, offset)
        return True

    def offer_relayed(self, page: ParameterPage, stamp: Stamp, memory: torch.Tensor) -> None:
        """Let mates copy parts of a page that this rank relays, which lie in `memory` one after the other."""
        if self._units + page.index < _ENTRIES:
            self._board.open(self._units + page.index, stamp, memory.data_ptr() - self._start)

    def withdraw_relayed(self, unit: int) -> None:
        """Close the entry of parts that this rank relays: their memory is about to be used again."""
        if self._units + unit < _ENTRIES:
            self._board.close(self._units + unit)

    def copy(self, holder: int, page: ParameterPage, stamp: Stamp, leg: Leg) -> bool:
        """Copy bytes of a page from the RAM of the rank `holder`: their owner or its relay. Returns False if
        that rank has to be asked for them: the memory for them has undefined bytes then.
        """
        owner, start, into = leg
        share, entry, place = page.shard.share, page.index, start
        if holder != owner or not share.whole_parameters:
            span = next(each for each in page.shard.others[owner] if start < each.start + each.nbytes)
            place = span.at + start - span.start
        if holder != owner:
            entry += self._units
            place += (owner // share.on_node - (owner > holder)) * sum(each.nbytes for each in page.shard.own)
        board, arena = self._boards.get(holder), self._arenas.get(holder)
        if board is None or arena is None or entry >= _ENTRIES:  # the first two: after `close`
            return False
        return board.copy(entry, stamp, arena, place, into.data_ptr(), into.nbytes)

    def view(self, owner: int, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a view of elements in a mate's RAM, (numel,), which must not be written to. start: bytes
        from the start of the arena. Raises ConfigError if they are not all in there.
        """
        memory, nbytes = tensor_over(self._arenas[owner]), numel * dtype.itemsize
        if not 0 <= start <= memory.nbytes - nbytes:
            raise ConfigError(f"Rank {owner} names bytes outside of its RAM.", "Report this bug.")
        return memory[start : start + nbytes].view(dtype)

    def forget(self, owner: int, memory: torch.Tensor) -> None:
        """Have a view of a mate's RAM no longer count as this rank's resident memory, once it is read."""
        window = self._arenas[owner]
        window.forget(memory.data_ptr() - window.address, memory.nbytes)

    def close(self) -> None:
        """Unmap the windows, when no thread copies any more."""
        self._arenas.clear()
        self._boards.clear()


def _withdraw(board: _tiers.Board, entry: int, own: Sequence[HomeRange], start: int, end: int) -> None:
    """Close an entry if bytes [start, end) of the home, which are about to change, are this rank's own."""
    if any(each.home_start < end and start < each.home_start + each.nbytes for each in own):
        board.close(entry)


def _told(memory: _tiers.Region) -> Told:
    inode = os.fstat(memory.descriptor).st_ino
    return [os.getpid(), memory.descriptor, inode, memory.nbytes]


def _opened(told: Told) -> _tiers.Window:
    """Map another process's shared memory. Raises OSError if this process may not."""
    process, number, inode, nbytes = told
    descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_ino != inode:
            raise FileNotFoundError(f"process {process} is another one")
        return _tiers.map_window(descriptor, nbytes)
    finally:
        os.close(descriptor)
