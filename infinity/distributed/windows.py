"""Windows: the ranks of a node read parameters and gradients straight from each other's memory.

What other nodes own of a page is brought to a node once: each rank of the node is the **relay** of some of
these owners (`Share.relay`), and keeps their parts in its RAM (`NodeCache` in
infinity/distributed/remote_parts.py), where its mates copy them as they copy its own.

Each rank's host arena is shared memory, which the other ranks of its node, its **mates**, map for reading: a
window. So is the memory of its device, by CUDA IPC (infinity/distributed/peer_copies.py). Its board
(csrc/tiers/board.hpp) says which parameter pages they may copy from there now. They ask by a message for
pages that never are at home there, and for one that is being updated if they need it before it is offered.

[Note: copies that the owner does not see]
A mate copies bytes only if their owner's entry on the board has the stamp of what the mate wants (`Stamp`),
before the copy and after it. What it copies is what the owner's page service would send now:

- The owner opens an entry only under its runtime's lock, while the home has all that the stamp says: no
  update of the page is pending, and no user code may edit the home in place.
- Whatever changes a home closes the entry first (`Home.withdraw`): an update, a write of edits or of loaded
  values, and permission for user code to change a permanent page. It does not wait for copies.
- So a copy that the change overtakes is found by its second look at the entry. The mate then sends a request,
  which the owner answers as if there were no windows: with a copy that it has kept, or after an agreement, or
  with an error.

Of a home, only the parts that its rank owns are copied: what is written there of others' parts closes no
entry. An entry of relayed parts is opened when all of them have come, and closed before the memory is used
again. A mate that finds it closed asks the relay, and then the owners of what it does not find.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch

from infinity import _tiers
from infinity.distributed.mailbox import Mailbox, Told, described, window
from infinity.errors import ConfigError, DeviceError
from infinity.layout.shards import HomeRange
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.remote import Leg
from infinity.pages.store import Store
from infinity.tiers.driver import Event, SharedMemory, current, driver_of
from infinity.tiers.link import DeviceLink, User
from infinity.tiers.pool import adopt, tensor_over

_log = logging.getLogger("infinity")

VARIABLE = "INFINITY_WINDOWS"
_ENTRIES = 1 << 14
"""Entries of a board, 64 bytes each, which take RAM when they are used: one for each unit's home, and behind
them one for each unit's relayed parts. Pages beyond get none.
"""

Stamp = tuple[int, int, int]
"""(step, number of loaded copies, edit version): which bytes of a page an entry has, or a mate wants."""
ToldDevice = tuple[str, int, int, list[tuple[int, int]]]
"""Device memory that a rank shares, as it tells others: (handle in hexadecimal digits, bytes from the start
of the allocation, bytes, and (unit, bytes from the start) of each parameter page that is at home there). The
handle is empty if the memory cannot be shared.
"""


def open_windows(rank: int, near: Sequence[int]) -> Windows | None:
    """Make the `Windows` of a rank. near: all ranks of its node. Returns None if the environment variable
    INFINITY_WINDOWS is "0", or if the kernel grants no shared memory. Raises ConfigError for another value
    than "0" or "1".
    """
    text = os.environ.get(VARIABLE, "1")
    if text not in ("0", "1"):
        raise ConfigError(f"{VARIABLE} is {text!r}.", "Give 0 to have ranks of a node send messages, or 1.")
    try:
        return Windows(rank, near) if text == "1" else None
    except OSError:  # some sandboxes have no memfd_create
        return None


class Windows:
    """This rank's board and mailbox, and the windows to its mates' memory. Any thread may call `copy`; all
    else is called under the runtime's lock.
    """

    def __init__(self, rank: int, near: Sequence[int]) -> None:
        """Arguments and errors: as for `Mailbox`."""
        self.mailbox = Mailbox(rank, near)
        self._rank = rank
        nbytes = _ENTRIES * _tiers.BOARD_ENTRY_BYTES
        self._memory = _tiers.map_host(nbytes, huge_pages=False, shared=True)
        self._board = _tiers.Board(self._memory)
        self._boards: dict[int, _tiers.Board] = {}
        self._arenas: dict[int, _tiers.Window] = {}
        self._offsets: dict[int, int] = {}
        """Unit whose page is at home in shared memory -> bytes from the start of this memory to the home."""
        self._start = self._units = 0
        """Address of this rank's shared memory, and number of units."""
        self._link = DeviceLink()
        self._written: dict[int, list[Event]] = {}
        """Unit whose page is at home in shared device memory -> events after the work that has written it.
        The first `offer` after a change notes them.
        """
        self._homes: dict[int, dict[int, int]] = {}
        """Mate -> unit whose page is at home in its device memory -> bytes from the start of this memory."""
        self._devices: dict[int, tuple[SharedMemory, torch.Tensor]] = {}
        """Mate -> its device memory, uint8; absent if this rank cannot read it."""
        self._added_from_there: Mapping[int, Collection[int]] = {}
        """Mate whose device reads the memory of this rank's -> units whose gradients the mate adds there."""

    def tell(self) -> list[Told]:
        """What this rank tells the others, so that they can read its board and its mailbox."""
        return [described(self._memory), *self.mailbox.tell()]

    def open(self, tellers: Mapping[int, Sequence[Told]]) -> list[int]:
        """Open the boards and mailboxes of other ranks. tellers: rank -> what it told. Returns the ranks for
        which this worked. The kernel lets only processes of the same user read each other's memory.
        """
        for rank, (board, *_) in tellers.items():
            with suppress(OSError, IndexError):  # the latter: of memory of another size
                self._boards[rank] = _tiers.Board(window(board))
        return self.mailbox.open({rank: tellers[rank][1:] for rank in self._boards})

    def meet(self, mates: Sequence[int]) -> None:
        """Note the ranks which read what this rank has told, and of which this rank reads it."""
        self._memory.close_descriptor()
        self.mailbox.meet(mates)
        self._boards = {self._rank: self._board} | {each: self._boards[each] for each in mates}

    def tell_memory(self, store: Store, pages: Sequence[ParameterPage]) -> tuple[Told, ToldDevice | None]:
        """What this rank tells its mates, so that they can read its RAM and the memory of its device.

        pages: all parameter pages, of which those at home there can be offered from now on. The second part
        is None if no page is at home on a device with memory of its own.
        """
        self._link, arena, told = store.link, store.host.region, None
        self._start, self._units = arena.address, len(pages)
        for page, start in _within(arena, pages):
            self._let_offer(page, start)
        driver, there = driver_of(store.device.device), [*_within(store.device.region, pages)]
        if driver is not None and there and not store.device.shares_host:
            region, homes = store.device.region, [(page.index, start) for page, start in there]
            told = ("", 0, 0, homes)
            with _noted(), current(store.device.device):
                handle, offset = driver.share(region.address)
                for page, start in there:
                    self._let_offer(page, start)
                told = (handle.hex(), offset, region.nbytes, homes)
        return described(arena), told

    def _let_offer(self, page: ParameterPage, start: int) -> None:
        self._offsets[page.index] = start
        page.home.withdraw = functools.partial(self._withdraw, page.index, page.shard.own)

    def read_memory(
        self, told: Mapping[int, tuple[Told, ToldDevice | None]], device: torch.device
    ) -> list[int]:
        """Map the memory of mates. told: rank -> what it told. device: that of this rank. Returns the ranks
        whose RAM could be mapped; a mate with other memory that cannot be mapped is asked.
        """
        driver = driver_of(device)
        for rank in self._boards:
            arena, theirs = told[rank]
            with suppress(OSError):
                self._arenas[rank] = window(arena)
            if theirs is None or self._boards[rank] is self._board:
                continue
            handle, offset, nbytes, homes = theirs
            self._homes[rank] = dict(homes)
            if driver is not None and handle:
                with _noted(), current(device):
                    memory = driver.open_shared(bytes.fromhex(handle))
                    region = adopt(memory.address + offset, nbytes, device, memory)
                    self._devices[rank] = memory, tensor_over(region)
        return [*self._arenas]

    def note_readers(self, readers: Mapping[int, Sequence[Collection[int]]]) -> None:
        """Read the RAM of those ranks alone that read this rank's. readers: rank -> (ranks whose RAM it
        reads, those whose device memory it reads, units whose gradients it adds on its device).
        """
        me = self._rank
        self._arenas = {rank: each for rank, each in self._arenas.items() if me in readers[rank][0]}
        self._added_from_there = {
            rank: units for rank, (_, devices, units) in readers.items() if me in devices
        }

    def reads(self, rank: int, unit: int | None = None) -> bool:
        """Whether this rank copies what `rank` offers in its RAM by itself. It also reads what it relays
        itself. unit: that of a page which `rank` owns; None: other bytes.
        """
        return rank in self._arenas and unit not in self._homes.get(rank, ())

    def has_offered(self, owner: int, unit: int) -> bool:
        """Whether a mate has ever let others copy its part of a page: it does so again after each update."""
        return unit < _ENTRIES and not self._boards[owner].unchanged(unit, 0)

    @property
    def devices(self) -> list[int]:
        """The mates whose device memory this rank's device reads."""
        return [*self._devices]

    def adds_from_there(self, owner: int, unit: int) -> bool:
        """Whether `owner` adds gradients of a unit on its device, which reads the memory of this rank's."""
        return unit in self._added_from_there.get(owner, ())

    @property
    def unreached(self) -> int:
        """Number of mates with pages at home in device memory that this rank cannot read."""
        return len(self._homes.keys() - self._devices.keys())

    def reaches(self, owner: int, unit: int) -> bool:
        """Whether this rank's device copies parts of a unit's page from the device memory of `owner`."""
        return owner in self._devices and unit in self._homes[owner]

    def offers(self, page: ParameterPage, stamp: Stamp) -> bool:
        """Whether mates may copy this rank's part of a page, with the bytes of `stamp`, now."""
        return page.index in self._offsets and self._board.changes(page.index, stamp) > 0

    def offer(self, page: ParameterPage, stamp: Stamp) -> bool:
        """Let mates copy this rank's part of a page, if it is in shared memory. Returns whether they may.

        The home has the bytes of `stamp`; see [Note: copies that the owner does not see]. On a device they
        are there when the events of `written` have happened.
        """
        offset, home = self._offsets.get(page.index), page.home
        if offset is None or home.failure is not None or (page.permanent and page.holds):
            return False
        if not home.in_place:
            if page.index not in self._written:
                edited = self._link.record() if page.permanent else None
                self._written[page.index] = [each for each in (home.written, edited) if each is not None]
            if not all([self._link.happened(each) for each in self._written[page.index]]):
                return False
            own = [home.view(each.home_start, each.nbytes) for each in page.shard.own]
            self._link.uses(User.HOST, *own, writes=False, label="offered")
        self._board.open(page.index, stamp, offset)
        return True

    def written(self, page: ParameterPage) -> Sequence[Event]:
        """The events for which `offer` waits before mates may copy a page from device memory."""
        return self._written.get(page.index, ())

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
        share, entry = page.shard.share, page.index
        if holder != owner:
            entry += self._units
        board, arena = self._boards.get(holder), self._arenas.get(holder)
        if board is None or arena is None or entry >= _ENTRIES:  # the first two: after `close`
            return False
        if not board.changes(entry, stamp):  # first, for transfers try again and again
            return False
        place = _place(page, owner, start, whole=holder == owner and share.whole_parameters)
        if holder != owner:
            place += (owner // share.on_node - (owner > holder)) * sum(each.nbytes for each in page.shard.own)
        return board.copy(entry, stamp, arena, place, into.data_ptr(), into.nbytes)

    def peer_bytes(
        self, owner: int, page: ParameterPage, stamp: Stamp, start: int, nbytes: int
    ) -> tuple[int, torch.Tensor] | None:
        """Return (number of changes of the owner's entry, bytes of a page in the device memory of the mate
        `owner`), if the entry is open with this stamp; else None.

        start: bytes from the start of the page. A copy of the bytes counts if the entry is `unchanged`
        afterwards.
        """
        if owner not in self._devices:  # after `leave_devices`
            return None
        changes = self._boards[owner].changes(page.index, stamp)
        whole = page.shard.share.whole_parameters
        at = self._homes[owner][page.index] + _place(page, owner, start, whole=whole)
        return (changes, self._devices[owner][1][at : at + nbytes]) if changes else None

    def unchanged(self, owner: int, unit: int, changes: int, into: torch.Tensor) -> bool:
        """Whether an entry of a mate has not changed since `peer_bytes` returned this number. into: where the
        bytes have been copied to.
        """
        self._link.uses(User.HOST, into, writes=False, label="copied from a rank")
        return owner in self._boards and self._boards[owner].unchanged(unit, changes)

    def view(
        self, owner: int, start: int, numel: int, dtype: torch.dtype, *, there: bool = False
    ) -> torch.Tensor:
        """Return a view of elements in a mate's RAM, (numel,), which must not be written to. there: in its
        device memory instead. start: bytes from the start of the memory. Raises ConfigError if they are not
        all in it.
        """
        memory = self._devices[owner][1] if there else tensor_over(self._arenas[owner])
        nbytes = numel * dtype.itemsize
        if not 0 <= start <= memory.nbytes - nbytes:
            raise ConfigError(f"Rank {owner} names bytes outside of its memory.", "Report this bug.")
        return memory[start : start + nbytes].view(dtype)

    def forget(self, owner: int, memory: torch.Tensor) -> None:
        """Have a view of a mate's RAM no longer count as this rank's resident memory, once it is read."""
        window = self._arenas[owner]
        window.forget(memory.data_ptr() - window.address, memory.nbytes)

    def leave_devices(self) -> None:
        """Unmap the device memory of mates, who may free it when all ranks have said that they leave."""
        with suppress(DeviceError):  # of a device that has failed, and brings nothing any more
            if self._devices:
                self._link.drain()
        self._close_devices()

    def close(self) -> None:
        """Unmap the windows, when no thread copies any more."""
        self._close_devices()
        self._arenas.clear()
        self._boards.clear()

    def _close_devices(self) -> None:
        while self._devices:
            with suppress(DeviceError):
                self._devices.popitem()[1][0].close()

    def _withdraw(self, unit: int, own: Sequence[HomeRange], start: int, end: int) -> None:
        """Close an entry if bytes [start, end) of the home, which are about to change, are the rank's own."""
        if any(each.home_start < end and start < each.home_start + each.nbytes for each in own):
            self._written.pop(unit, None)
            self._board.close(unit)


@contextmanager
def _noted() -> Iterator[None]:
    """Log a DeviceError, for which parameters go by messages, and go on."""
    try:
        yield
    except DeviceError as error:
        _log.warning(
            "Parameters that rest on devices go by messages between some ranks of this node: %s", error
        )


def _within(region: _tiers.Region, pages: Sequence[ParameterPage]) -> Iterator[tuple[ParameterPage, int]]:
    """Yield each page that is at home in a region, and the bytes from the region's start to the home."""
    for page in pages[:_ENTRIES]:
        start = -1 if page.home.memory is None else page.home.memory.data_ptr() - region.address
        if 0 <= start < region.nbytes:
            yield page, start


def _place(page: ParameterPage, owner: int, start: int, *, whole: bool) -> int:
    """Return where byte `start` of a page is among the bytes that its owner has: all of the page, if `whole`,
    or else what it owns.
    """
    if whole:
        return start
    span = next(each for each in page.shard.others[owner] if start < each.start + each.nbytes)
    return span.at + start - span.start
