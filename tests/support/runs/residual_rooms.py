"""A room for residual pages whose disk is RAM and may fail, and whose copies end as late as they may; hooks
over it, and what residual pages have left.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from infinity.activations.autograd_hooks import drop_left_tasks
from infinity.activations.heap import HeapGuard
from infinity.activations.residual_pages import ResidualPages
from infinity.activations.residual_room import FakeRoom
from infinity.activations.saved_tensors import SavedBytes, SavedTensors, saving
from infinity.errors import StorageError
from infinity.tiers.link import ARRIVED, Transfer


class LateTransfer:
    """A transfer that is made when somebody waits for it."""

    timing = None

    def __init__(self, make: Callable[[], object]) -> None:
        self._make: Callable[[], object] | None = make
        self._error: StorageError | None = None

    def done(self) -> bool:
        return self._make is None

    def wait(self) -> object:
        make, self._make = self._make, None
        if make is not None:
            try:
                make()
            except StorageError as error:
                self._error = error.with_traceback(None)  # it would keep frames, and their graphs, alive
        if self._error is not None:
            raise self._error.again()
        return None


class _Bytes:
    """Bytes on the disk of the tests."""

    data: torch.Tensor | None = None
    lent: object = None


class RoomOfTests(FakeRoom):
    def __init__(self, ram_bytes: int, disk_bytes: int, *, in_place: bool, waits: bool) -> None:
        super().__init__(
            ram_bytes,
            disk_bytes,
            device=torch.device("cpu"),
            in_place=in_place,
            waits=waits,
            empty=_filled,
            in_ram=_filled,
        )
        self.disk_calls = 0
        self._failing: int | None = None

    def fail_in(self, number: int | None) -> None:
        """Have the disk's request number `number` from now on fail; None: none."""
        self._failing = None if number is None else self.disk_calls + number

    @property
    def lent_ram(self) -> int:
        return self._ram.used

    @property
    def lent_disk(self) -> int:
        return self._disk.used

    def down(self, into: torch.Tensor, source: torch.Tensor) -> Transfer:
        return self._copy(into, source)

    def up(self, into: torch.Tensor, source: torch.Tensor) -> Transfer:
        return self._copy(into, source)

    def _copy(self, into: torch.Tensor, source: torch.Tensor) -> Transfer:
        assert into.nbytes == source.nbytes
        if self.waits:
            return LateTransfer(lambda: into.copy_(source))
        into.copy_(source)
        return ARRIVED

    def let_go(self, transfer: Transfer) -> None:
        transfer.wait()

    def write(self, source: torch.Tensor) -> tuple[object, Transfer]:
        lent, _ = super().write(source)
        place = _Bytes()
        place.lent = lent

        def write() -> None:
            place.data = source.clone()

        return place, self._request("write", write)

    def read(self, place: object, into: torch.Tensor) -> Transfer:
        assert isinstance(place, _Bytes)
        return self._request("read", lambda: into.copy_(_there(place)))

    def _request(self, what: str, make: Callable[[], object]) -> Transfer:
        number, self.disk_calls = self.disk_calls, self.disk_calls + 1
        fails = number == self._failing

        def request() -> None:
            if fails:
                raise StorageError(
                    f"The disk of the tests failed to {what}.", "Ask it to work.", path="disk", errno=5
                )
            make()

        return LateTransfer(request)


def _there(place: _Bytes) -> torch.Tensor:
    assert place.data is not None, "the bytes are read before they are written"
    return place.data


def _filled(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), 0xFF, dtype=torch.uint8)


ROOMS = {
    "in place": {"in_place": True, "waits": False},
    "copies": {"in_place": False, "waits": False},
    "copies that wait": {"in_place": False, "waits": True},
}


class Saver:
    """The hooks of a runtime without parameter pages, over residual pages in a room of the tests."""

    def __init__(
        self, kind: str = "in place", *, kept: int = 0, ram: int = 64 << 20, disk: int = 0, window: int = 0
    ) -> None:
        """kind: a key of ROOMS. The other arguments are in bytes."""
        self.room = RoomOfTests(ram, disk, **ROOMS[kind])
        self.pages = ResidualPages(self.room, kept_bytes=kept, window=window, lock=threading.RLock())
        self._tally = SavedBytes(HeapGuard(None))
        self.unpack = SavedTensors(_find, _fetch, self._tally, None, self.pages).unpack

    def saving(self) -> AbstractContextManager[None]:
        return saving(_find, _fetch, self._tally, self.pages)

    def check_nothing_left(self) -> None:
        drop_left_tasks()
        gc.collect()
        self.pages.rest()
        assert (self.room.lent_ram, self.room.lent_disk) == (0, 0)
        assert left(self.pages) == {}


def _find(tensor: torch.Tensor) -> None:
    return None


def _fetch(reference: Any) -> torch.Tensor:
    raise AssertionError("there are no parameter pages")


def left(pages: ResidualPages) -> dict[str, Any]:
    """What residual pages have left of pages and storages that are gone: name -> what is not empty."""
    found = {name: each for name, each in vars(pages).items() if each and name not in _LASTING}
    known = {key: each for key, each in pages._known.items() if each.storage() is None}
    return found | ({"_known": known} if known else {})


_LASTING = ("counts", "_turn", "_aside", "_room", "_kept_bytes", "_window", "_lock", "_next", "_known")
