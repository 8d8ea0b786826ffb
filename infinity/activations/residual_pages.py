"""Residual pages: the tensors that autograd saves, as bytes that may leave the memory that computes.

[Note: residual pages] A residual page is one storage that autograd saved, at one version, or the part of it
that a small view spans. Its key is the storage object and the version, never an address: a later tensor at
the same address is another page. Bytes are copied as they lie, with all strides, so a saved tensor comes back
as it was. Every saved tensor has a reference of its own (`ResidualReference`), and the page lives as long as
any of its references: with `retain_graph`, and by `grad_fn._saved_*`, it may be asked for again. A reference
shares the version counter of its tensor but not the bytes, so an edit after saving is found as in plain
PyTorch.

[Note: what leaves] Pages are numbered in the order in which they are saved. The backward uses them in
reverse, so the earliest leave: the shortest prefix with which the others, beside the newest, fit
`kept_bytes`. They go to RAM. Of the pages there the shortest prefix goes on to disk with which a window of
bytes is free. So the order of saving and bytes decide what leaves, and time never does. A step without data
finds the same bytes.

[Note: coming back] A use of a page in a backward brings it back, and then those that are used next, as far
as a window has room. The next use is the reversed order of saving; of micro-batches that run together, the
first goes through each part of the model first, in the backward, too (`in_turn`). Where compute and host are
the same RAM, a page is used where it lies in RAM.

[Note: let go] A copy from the device reads memory of torch's allocator. That memory is let go when compute
was told to wait for the copy. This happens once newer copies fill the window, so compute hardly ever waits.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from infinity.errors import BudgetError, InfinityError
from infinity.tiers.link import ARRIVED, Transfer

SMALLEST = 64 << 10
"""Bytes of the smallest storage that becomes a page. Smaller ones stay: a page costs some 30 us of Python."""

_ALIGNED = 256
"""A page begins at a multiple of these bytes in its storage, because kernels may look at alignment."""

_SPAN = 2
"""A page is a view's span only, and not the whole storage, if the storage has this many times its bytes."""

_Result = TypeVar("_Result")


class Room(Protocol):
    """The memory to which residual pages leave, and the copies there and back."""

    device: torch.device
    """Where the model computes. Tensors elsewhere do not become pages."""
    in_place: bool
    """Whether compute uses pages where they lie in RAM."""
    waits: bool
    """Whether a copy goes on after its call, so that its memory must be kept for a while."""
    has_disk: bool

    def free(self) -> int:
        """Bytes of RAM that are not lent."""

    def lease(self, nbytes: int) -> torch.Tensor | None:
        """Lend RAM, uint8 (nbytes,), until its last reference is gone; None if there is none in one piece."""

    def down(self, into: torch.Tensor, source: torch.Tensor) -> Transfer:
        """Begin to copy a tensor's bytes to leased RAM, after the work that compute has queued."""

    def let_go(self, transfer: Transfer) -> None:
        """Have compute wait for a copy of `down` or `up`, so that it may use or free its memory, which the
        copy keeps no longer.
        """

    def empty(self, nbytes: int) -> torch.Tensor:
        """New memory where the model computes, uint8 (nbytes,)."""

    def up(self, into: torch.Tensor, source: torch.Tensor) -> Transfer:
        """Begin to copy leased RAM to memory of `empty`."""

    def write(self, source: torch.Tensor) -> tuple[Any, Transfer]:
        """Begin to write leased RAM to disk. Returns its place there, which is lent until its last reference
        is gone, and the request. Raises BudgetError if the disk's budget has no room.
        """

    def read(self, place: Any, into: torch.Tensor) -> Transfer:
        """Begin to read the bytes at a place into leased RAM."""

    def free_left(self) -> None:
        """Free the pages that failed steps of this thread have left and that nobody can use."""

    def shortage(self, nbytes: int) -> BudgetError:
        """The error for a page of `nbytes` bytes that finds no room."""


class ResidualPage:
    """The bytes of one saved storage at one version, or of a part of it, in one or several places."""

    __slots__ = (
        "__weakref__",
        "begin",
        "brought",
        "coming",
        "nbytes",
        "number",
        "place",
        "ram",
        "rising",
        "saved",
        "unused",
        "written",
    )

    def __init__(self, number: int, saved: torch.Tensor, begin: int) -> None:
        """saved: the bytes that autograd saved, uint8. begin: their first byte in the storage."""
        self.number = number
        """Place in the order of saving."""
        self.nbytes = saved.nbytes
        self.begin = begin
        self.saved: torch.Tensor | None = saved
        """The saved bytes, until the page has left."""
        self.ram: torch.Tensor | None = None
        self.coming: Transfer | None = None
        """What fills `ram`; None once the host knows that it is full."""
        self.place: object = None
        """The place on disk; None unless the page was written."""
        self.written: Transfer | None = None
        self.brought: torch.Tensor | None = None
        """The bytes where the model computes, after the page has left, until all references were used."""
        self.rising: Transfer | None = None
        """The copy that fills `brought`; None if it has not begun, ARRIVED once compute waits for it."""
        self.unused = 0
        """Number of references that were not unpacked yet."""

    def has(self, begin: int, end: int) -> bool:
        """Whether the page has the bytes of its storage from `begin` to `end`."""
        return self.begin <= begin and end <= self.begin + self.nbytes


@dataclass(eq=False, slots=True)
class ResidualReference:
    """Represents a saved tensor whose bytes are in a residual page."""

    page: ResidualPage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Elements of `dtype` from the start of the page to the tensor's first element."""
    conjugate: bool
    negative: bool
    counter: torch.Tensor
    """A tensor without bytes that shares the saved tensor's version counter."""
    version: int
    """The counter's value when the tensor was saved."""
    unused: bool = True


class _Storage(weakref.ref[torch.UntypedStorage]):
    """A reference to a storage that does not keep it alive, and the storage's key in `_known`."""

    __slots__ = ("key",)
    key: int


class _Living(weakref.ref[ResidualPage]):
    """A reference to a page that does not keep it alive, and what is known of the page when it is gone."""

    __slots__ = ("nbytes", "number", "turn")
    number: int
    nbytes: int
    turn: tuple[int, int, int]
    """The backward uses pages in the reversed order of this value."""


@dataclass
class ResidualCounts:
    """Sums of bytes of residual pages."""

    saved: int = 0
    down: int = 0
    """Bytes that left the memory that computes; on the CPU, bytes that were copied within RAM."""
    up: int = 0
    """Bytes that were copied back to it."""
    written: int = 0
    read: int = 0


@dataclass(eq=False, slots=True)
class _Known:
    """A storage at one version, and its pages."""

    storage: _Storage
    counter: torch.Tensor
    """As `ResidualReference.counter`. Tensors of one storage may have several counters, as `.data` has."""
    version: int
    pages: list[_Living]

    def is_now(self, storage: torch.UntypedStorage, version: int) -> bool:
        """Whether this is `storage`, which no counter says was edited, for a tensor at `version`."""
        return self.storage() is storage and version == self.version == self.counter._version


class _Aside(threading.local):
    """The storages of which one thread makes no pages."""

    def __init__(self) -> None:
        self.storages: dict[int, weakref.ref[Any]] = {}
        """id() of a storage -> the storage."""


class ResidualPages:
    """Makes pages of saved tensors, and moves them; see [Note: residual pages]. Thread-safe, by its lock."""

    def __init__(
        self, room: Room, *, kept_bytes: int, window: int, lock: AbstractContextManager[Any]
    ) -> None:
        """kept_bytes: bytes of pages that stay in the memory that computes. window: the most bytes that are
        on their way in one direction, beside one page. lock: reentrant.
        """
        self.counts = ResidualCounts()
        self._aside = _Aside()
        self._room = room
        self._kept_bytes = kept_bytes
        self._window = window
        self._lock = lock
        self._turn: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._next = 0
        self._gone: deque[_Living] = deque()
        """Pages whose last reference is gone and that `_sweep` has not seen. Any thread may append."""
        self._forgotten: deque[_Storage] = deque()
        """Storages of `_known` that are gone, likewise."""
        self._known: dict[int, _Known] = {}
        """id() of a storage -> what is known of it since it was saved last."""
        self._kept: dict[int, _Living] = {}
        """The pages that have not left, by number, the earliest first."""
        self._kept_now = 0
        self._in_ram: dict[int, _Living] = {}
        """The pages that have left and are not on disk, by number, the earliest first."""
        self._both: dict[int, _Living] = {}
        """The pages in RAM that are on disk, or being written, too; the earliest first."""
        self._going: deque[tuple[_Living, Transfer]] = deque()
        """Copies down whose sources are not let go, the oldest first."""
        self._going_now = 0
        self._away: list[_Living] = []
        """The pages to bring back ahead, the next one last."""
        self._on_disk: list[_Living] = []
        """The pages to read ahead, the next one last."""
        self._brought: dict[int, _Living] = {}
        """The pages that were brought back, and not used yet."""
        self._read: dict[int, _Living] = {}
        """The pages that were read, and not used yet."""
        self._under_way: deque[tuple[Transfer, object]] = deque()
        """Transfers that may not have ended, with what they use, the oldest first."""

    @contextlib.contextmanager
    def in_turn(self, turn: Callable[[], tuple[int, int]]) -> Iterator[None]:
        """A context in which micro-batches run together. turn: returns, for what this thread saves now,
        (number of the part of the model, number of the micro-batch with a negative sign).
        """
        before, self._turn = self._turn, turn
        try:
            yield
        finally:
            self._turn = before

    def set_aside(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make no pages of the storages of `tensors`, such as inputs and buffers, which others keep, of what
        this thread saves until it calls this again. Micro-batches that run together have a thread each.
        """
        storages = [each.untyped_storage() for each in tensors]
        self._aside.storages = {id(each): weakref.ref(each) for each in storages if each.nbytes() >= SMALLEST}

    # --- saving ----------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> ResidualReference | None:
        """Return a reference to the page of a saved tensor; None if the tensor does not become a page.

        tensor: plain and dense, with a storage. Raises BudgetError if what has to leave finds no room, and
        StorageError if a write has failed. Only the forward in which this happens is lost.
        """
        if tensor.is_nested or tensor.is_quantized or tensor.device != self._room.device:
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALLEST or not tensor.numel():
            return None
        aside = self._aside.storages.get(id(storage))
        if aside is not None and aside() is storage:
            return None
        with self._lock, torch.no_grad():
            self._sweep()
            counter = tensor.detach()
            counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            page = self._page_of(tensor, storage, counter)
            reference = ResidualReference(
                page=page,
                dtype=tensor.dtype,
                shape=tensor.shape,
                stride=tensor.stride(),
                offset=int(tensor.storage_offset()) - page.begin // tensor.itemsize,
                conjugate=tensor.is_conj(),
                negative=tensor.is_neg(),
                counter=counter,
                version=tensor._version,
            )
            page.unused += 1
            self._with_room(lambda: self._thin_out(page))
        return reference

    def _page_of(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, counter: torch.Tensor
    ) -> ResidualPage:
        """Find the page of a tensor's storage at its version, or make it. counter: the tensor's."""
        key, version = id(storage), tensor._version
        known = self._known.get(key)
        if known is None or not known.is_now(storage, version):
            watched = _Storage(storage, self._forgotten.append)
            watched.key = key
            known = self._known[key] = _Known(watched, counter, version, [])
        begin, end = _span(tensor)
        for each in known.pages:
            page = each()
            if page is not None and page.has(begin, end) and (begin - page.begin) % tensor.itemsize == 0:
                return page
        nbytes = storage.nbytes()
        if _SPAN * (end - begin) >= nbytes:
            begin, end = 0, nbytes // tensor.itemsize * tensor.itemsize
        begin -= begin % _ALIGNED
        page = ResidualPage(self._next, _bytes(tensor, begin, end), begin)
        self._next += 1
        living = self._living(page)
        known.pages = [*(each for each in known.pages if each() is not None), living]
        self._kept[page.number] = living
        self._kept_now += page.nbytes
        self.counts.saved += page.nbytes
        return page

    def _living(self, page: ResidualPage) -> _Living:
        living = _Living(page, self._gone.append)
        living.number, living.nbytes = page.number, page.nbytes
        living.turn = (*self._turn(), page.number)
        return living

    def _thin_out(self, newest: ResidualPage) -> None:
        """Have the earliest pages leave; see [Note: what leaves]."""
        beside = newest.nbytes if newest.number in self._kept else 0
        while self._kept_now - beside > self._kept_bytes:
            page = next(iter(self._kept.values()))()
            if page is newest:  # it was saved again, and is the earliest
                break
            if page is None:
                self._sweep()
            else:
                self._send_down(page)

    def _send_down(self, page: ResidualPage) -> None:
        assert page.saved is not None
        page.ram = self._take(page.nbytes)
        transfer = self._room.down(page.ram, page.saved)
        living = self._kept.pop(page.number)
        self._kept_now -= page.nbytes
        self._in_ram[page.number] = living
        self.counts.down += page.nbytes
        if self._room.waits:
            page.coming = transfer
            self._follow(transfer, page.ram)  # which others may get when the page is gone
            bisect.insort(self._away, living, key=_turn)
            self._going.append((living, transfer))
            self._going_now += page.nbytes
            while self._going_now > self._window:
                self._let_go()
        else:
            page.saved = None
        self._write_ahead()

    def _let_go(self) -> None:
        """Let the oldest tensor go that a copy down reads; see [Note: let go]."""
        living, transfer = self._going.popleft()
        self._going_now -= living.nbytes
        self._room.let_go(transfer)
        page = living()
        if page is not None:
            page.saved = None

    # --- RAM and disk ----------------------------------------------------------------------------------

    def _with_room(self, function: Callable[[], _Result]) -> _Result:
        """Call a function and return its result. If it finds no room, it is called once more, after what
        failed steps have left is freed.
        """
        try:
            return function()
        except BudgetError:
            self._room.free_left()
            self._sweep()
        return function()

    def _take(self, nbytes: int) -> torch.Tensor:
        """Lend RAM. The earliest pages in RAM make room for it. Raises BudgetError, StorageError."""
        while (memory := self._room.lease(nbytes)) is None:
            if self._under_way:
                self._under_way.popleft()[0].wait()
            elif self._both:
                self._give_up_ram()
            elif not self._write_earliest():
                raise self._room.shortage(nbytes)
        return memory

    def _give_up_ram(self) -> None:
        """Take the RAM of the earliest page that is on disk, too."""
        number, living = next(iter(self._both.items()))
        page = living()
        if page is None:
            self._sweep()
            return
        if page.written is not None:
            page.written.wait()  # if the write has failed, the page stays in RAM
        page.ram = page.written = page.coming = None
        del self._both[number]
        bisect.insort(self._on_disk, living, key=_turn)

    def _write_ahead(self) -> None:
        """Begin to write the earliest pages in RAM, until a window of bytes is free there or will be."""
        if not self._room.has_disk:
            return
        free = self._room.free() + sum([each.nbytes for each in self._both.values()])
        while free < self._window and self._in_ram:
            free += next(iter(self._in_ram.values())).nbytes
            if not self._write_earliest():
                break

    def _write_earliest(self) -> bool:
        """Begin to write the earliest page in RAM that is not on disk. Returns whether there is one."""
        while self._room.has_disk and self._in_ram:
            number, living = next(iter(self._in_ram.items()))
            page = living()
            if page is None:
                self._sweep()
                continue
            assert page.ram is not None
            self._settle(page)
            page.place, page.written = self._room.write(page.ram)
            self._follow(page.written, (page.ram, page.place))
            self.counts.written += page.nbytes
            self._both[number] = self._in_ram.pop(number)
            return True
        return False

    def _settle(self, page: ResidualPage) -> None:
        """Wait until the page's RAM is filled."""
        if page.coming is not None:
            page.coming.wait()
            page.coming = None

    # --- use -------------------------------------------------------------------------------------------

    def unpack(self, reference: ResidualReference) -> torch.Tensor:
        """Return a saved tensor. Raises StorageError if its bytes cannot be read, and BudgetError if they
        find no room. Whether the tensor was edited since it was saved is for the caller to check.
        """
        page = reference.page
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self._sweep()
            memory = self._with_room(lambda: self._bring(page))
            page.unused -= reference.unused
            reference.unused = False
            if not page.unused:
                page.brought = page.rising = None  # autograd keeps it for as long as it is used
            if torch._C._current_graph_task_id() != -1:
                self._read_ahead()
                self._bring_ahead()
            whole = memory[: memory.nbytes // reference.dtype.itemsize * reference.dtype.itemsize]
            view = whole.view(reference.dtype)
            start = int(view.storage_offset()) + reference.offset
            view = view.as_strided(reference.shape, reference.stride, start)
            view = view.conj() if reference.conjugate else view
            return torch._neg_view(view) if reference.negative else view

    def _bring(self, page: ResidualPage) -> torch.Tensor:
        """Return the bytes of a page where the model can use them now."""
        self._brought.pop(page.number, None)
        self._read.pop(page.number, None)
        if page.saved is not None:
            return page.saved
        if self._room.in_place:
            return self._filled(page)
        if page.brought is None:
            page.brought = self._room.empty(page.nbytes)
        if page.rising is None:
            self._raise(page)
            assert page.rising is not None
        if page.rising is not ARRIVED:
            self._room.let_go(page.rising)
            page.rising = ARRIVED
        return page.brought

    def _filled(self, page: ResidualPage) -> torch.Tensor:
        """The RAM of a page, with its bytes there."""
        if page.ram is None:
            self._begin_read(page, self._take(page.nbytes))
        self._settle(page)
        assert page.ram is not None
        return page.ram

    def _raise(self, page: ResidualPage) -> None:
        """Begin to fill `brought`."""
        assert page.brought is not None
        ram = self._filled(page)
        page.rising = self._room.up(page.brought, ram)
        self._follow(page.rising, ram)
        self.counts.up += page.nbytes

    def _begin_read(self, page: ResidualPage, ram: torch.Tensor) -> None:
        page.coming = self._room.read(page.place, ram)
        page.ram = ram
        self._follow(page.coming, (ram, page.place))
        self.counts.read += page.nbytes
        self._both[page.number] = self._living(page)

    def _read_ahead(self) -> None:
        """Begin to read the next pages, as far as the window and RAM have room."""
        ahead = sum([each.nbytes for each in self._read.values()])
        while self._on_disk:
            living = self._on_disk[-1]
            page = living()
            if page is not None and page.ram is None:
                if ahead + page.nbytes > self._window or (ram := self._room.lease(page.nbytes)) is None:
                    break
                ahead += page.nbytes
                self._begin_read(page, ram)
                self._read[page.number] = living
            self._on_disk.pop()

    def _bring_ahead(self) -> None:
        """Begin to bring the next pages back, as far as the window has room."""
        ahead = 0
        for each in self._brought.values():
            page = each()
            if page is not None:
                ahead += page.nbytes
                self._raise_if_there(page)
        while self._away:
            living = self._away[-1]
            page = living()
            if page is not None and page.saved is None and page.brought is None and page.unused:
                if ahead + page.nbytes > self._window:
                    break
                ahead += page.nbytes
                page.brought = self._room.empty(page.nbytes)
                self._brought[page.number] = living
                self._raise_if_there(page)
            self._away.pop()

    def _raise_if_there(self, page: ResidualPage) -> None:
        if page.rising is None and page.ram is not None and (page.coming is None or page.coming.done()):
            self._raise(page)

    def _follow(self, transfer: Transfer, used: object) -> None:
        """Keep alive what a transfer uses until it is known to have ended."""
        if transfer is not ARRIVED:
            self._under_way.append((transfer, used))

    def rest(self) -> None:
        """Wait for all transfers under way, whose memory is then free. Errors wait for the next use."""
        with self._lock:
            while self._under_way:
                with contextlib.suppress(InfinityError):
                    self._under_way.popleft()[0].wait()
            self._sweep()

    def _sweep(self) -> None:
        """Forget pages and storages that are gone, and transfers that have ended."""
        while self._gone:
            living = self._gone.popleft()
            if self._kept.pop(living.number, None) is not None:
                self._kept_now -= living.nbytes
            for each in (self._in_ram, self._both, self._brought, self._read):
                each.pop(living.number, None)
        for ahead in (self._away, self._on_disk):
            while ahead and ahead[-1]() is None:
                ahead.pop()
        while self._going and self._going[0][0]() is None:
            self._let_go()
        while self._forgotten:
            storage = self._forgotten.popleft()
            if storage.key in self._known and self._known[storage.key].storage is storage:
                del self._known[storage.key]
        while self._under_way and self._under_way[0][0].done():
            self._under_way.popleft()


def _turn(living: _Living) -> tuple[int, int, int]:
    return living.turn


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """(first byte, end) in its storage of the bytes that a tensor with elements spans."""
    first = int(tensor.storage_offset())
    last = first + sum(
        [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    )
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def _bytes(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """The bytes of a tensor's storage from `begin` to `end`, uint8, with a version counter of their own."""
    plain = tensor.data
    plain = plain.conj() if plain.is_conj() else plain
    plain = torch._neg_view(plain) if plain.is_neg() else plain
    size = tensor.itemsize
    return plain.as_strided(((end - begin) // size,), (1,), begin // size).view(torch.uint8)
