"""Departures: parts at home in device memory that the pending commit still has to bring to disk.

`Ledger.begin` lists these parts, and nothing is copied then. From then on the thread that trains copies each
part down to host RAM, and writes it from there to the place that no commit holds. It does so a few parts at a
time and without waiting (`advance`), or waits for all of them (`complete`). Bytes of such a part change only
after `settle` has waited for the part's copy. The commit does not land before all parts are being written.

The RAM is staging, of which at least the bytes of one chunk update are always there, so that every trained
part fits. A part for which there is no room, although no other part is on its way, gets ordinary RAM of its
own.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from infinity.errors import InfinityError
from infinity.pages.durable_io import DurableIO
from infinity.pages.twins import Part
from infinity.tiers import Pool, aligned_ram
from infinity.tiers.link import ARRIVED, DeviceLink, Transfer, User

_AT_ONCE = 2
"""Number of parts that may be on their way together even if they take more than a _SHARE of staging."""

_SHARE = 4
"""Three and more parts that are on their way take at most 1 / _SHARE of staging."""


@dataclass(slots=True, eq=False)
class _Departure:
    """A part on its way to disk through `memory`, which stays as it is until the write has ended."""

    part: Part
    memory: torch.Tensor
    copy: Transfer
    write: Transfer | None = None
    """The write to disk; None before it has begun, ARRIVED if the commit does not need it any more."""


class Departures:
    """The departures of one runtime. Called under the runtime's lock."""

    def __init__(
        self,
        durable: DurableIO,
        staging: Pool,
        link: DeviceLink,
        copy_down: Callable[[torch.Tensor, torch.Tensor], Transfer],
    ) -> None:
        """durable: writes the parts, and its ledger lists them. staging: host RAM for the copies. link: to
        the device. copy_down: begins a copy into its first argument, in host RAM, from device memory.
        """
        self._durable = durable
        self._ledger = durable.ledger
        self._staging = staging
        self._link = link
        self._copy_down = copy_down
        self._under_way: deque[_Departure] = deque()

    def advance(self, *, begin: bool) -> None:
        """Write the parts whose copies have ended, and begin further copies, all without waiting.

        begin: whether to begin copies, which take staging.
        """
        for each in self._under_way:
            if each.write is None and each.copy.done():
                self._write(each)
        while self._under_way and (write := self._under_way[0].write) is not None and write.done():
            self._under_way.popleft()
        begun = {each.part for each in self._under_way}
        for part in self._ledger.departing() if begin else ():
            if part not in begun:
                memory = self._room(part.nbytes)
                if memory is None:
                    return
                self._begin(part, memory)

    def settle(self, parts: Iterable[Part]) -> None:
        """Wait until the bytes of these parts may change: until their copies have ended."""
        departing = set(self._ledger.departing())
        for part in parts if departing else ():
            if part in departing:
                found = next((each for each in self._under_way if each.part is part), None)
                if found is None:
                    found = self._begin(part, self._take(part.nbytes))
                if found.write is None:
                    self._write(found)

    def complete(self) -> None:
        """Bring all parts to disk, and wait until they have left host RAM. Errors of writes are the
        commit's.
        """
        self.settle(self._ledger.departing())
        while self.finish_oldest():
            pass

    def finish_oldest(self) -> bool:
        """Wait until the part that is longest on its way has left host RAM. Returns whether there was one."""
        if not self._under_way:
            return False
        oldest = self._under_way[0]
        if oldest.write is None:
            self._write(oldest)
        with contextlib.suppress(InfinityError):
            if oldest.write is not None:
                oldest.write.wait()
        self._under_way.popleft()
        return True

    def forget(self) -> None:
        """Drop the parts that are on their way. The caller closes the tiers, which waits for transfers."""
        self._under_way.clear()

    # --- inside -----------------------------------------------------------------------------------------

    def _begin(self, part: Part, memory: torch.Tensor) -> _Departure:
        copy = self._copy_down(memory, part.home.view(part.start, part.nbytes))
        begun = _Departure(part, memory, copy)
        self._under_way.append(begun)
        return begun

    def _write(self, departure: _Departure) -> None:
        """Wait for a part's copy, and begin the part's write, unless the commit has ended meanwhile.

        An error of the device is the reason why the commit fails.
        """
        try:
            departure.copy.wait()
            if departure.part in self._ledger.departing():
                self._link.uses(User.HOST, departure.memory, writes=False, label="departure")
                departure.write = self._durable.copy_out(departure.part, departure.memory)
                self._ledger.written(departure.part, departure.write)
        except InfinityError as error:
            self._ledger.abandon(error.again())
        departure.write = departure.write or ARRIVED

    def _room(self, nbytes: int) -> torch.Tensor | None:
        """Host RAM for a part if there is some now, uint8 (nbytes,), else None."""
        held = sum(each.memory.nbytes for each in self._under_way)
        if len(self._under_way) >= _AT_ONCE and held + nbytes > self._staging.nbytes // _SHARE:
            return None
        if nbytes > self._staging.nbytes and not self._under_way:
            return aligned_ram(nbytes)
        if self._staging.largest_free < nbytes:
            return None
        with self._staging.lease(nbytes) as lease:
            return lease.residency()

    def _take(self, nbytes: int) -> torch.Tensor:
        """Host RAM for a part, uint8 (nbytes,), as soon as there is some."""
        while (memory := self._room(nbytes)) is None:
            if not self.finish_oldest():
                return aligned_ram(nbytes)  # staging is held by others, who may wait for the caller
        return memory
