"""Home: where a page rests, and the requests under way over its bytes.

[Note: order of requests]
The I/O engine does not order requests in flight. So a home remembers the requests under way over its bytes: a
read waits for writes that overlap it, a write for reads and writes. A failed write leaves undefined bytes:
the home is lost from then on, and every later use raises the write's error. A write of a spare copy is the
exception: these bytes are still elsewhere, and may be written again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from infinity.errors import InfinityError
from infinity.tiers import NvmeLease, Tier
from infinity.tiers.link import Transfer


@dataclass(slots=True)
class InFlightRequest:
    """One request under way over bytes [start, end) of a home."""

    start: int
    end: int
    writes: bool
    transfer: Transfer
    lost: Callable[[InfinityError], None] | None = None
    """Function to call with the error if a write fails."""
    spare: bool = False
    """Whether the home survives a failure of this write, because its bytes are still elsewhere."""


@dataclass(slots=True, eq=False)
class Home:
    """A page at rest."""

    tier: Tier
    nbytes: int
    memory: torch.Tensor | None
    """uint8 (nbytes,) over the lease, in the tier's memory; None on NVMe."""
    in_place: bool
    """Whether code on the CPU may use `memory` directly: it is host RAM, or of a device that shares it."""
    nvme_lease: NvmeLease | None = None
    """The page's blocks on NVMe; None in memory."""
    computed: bool = False
    """Whether kernels write here; copies to the device then wait for all queued kernels."""
    failure: InfinityError | None = None
    in_flight: list[InFlightRequest] = field(default_factory=list)

    @staticmethod
    def of_nothing() -> Home:
        """The home of a page without bytes."""
        return Home(Tier.HOST, 0, torch.empty(0, dtype=torch.uint8, device="cpu"), True)

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes [offset, offset + nbytes) in memory."""
        assert self.memory is not None
        return self.memory[offset : offset + nbytes]

    def busy(self, start: int, end: int, writing: bool) -> bool:
        """Whether a request over these bytes would have to wait; see [Note: order of requests]."""
        return any(self._conflicts(start, end, writing))

    def settle(self, start: int, end: int, writing: bool) -> None:
        """Wait for the requests that one over these bytes must not overtake. Raises the home's failure."""
        for request in list(self._conflicts(start, end, writing)):
            self.finish(request)
        if self.failure is not None:
            raise self.failure.again()

    def finish(self, request: InFlightRequest) -> None:
        """Wait for a request and forget it; a failed write loses the home, if not `spare`. Raises its error,
        once."""
        if request not in self.in_flight:
            return
        try:
            request.transfer.wait()
        except InfinityError as error:
            if request.writes and not request.spare:
                self.failure = error.again()
                if request.lost is not None:
                    request.lost(error)
            raise
        finally:
            if request in self.in_flight and request.transfer.done():
                self.in_flight.remove(request)

    def renew(self) -> None:
        """Wait for writes under way, and forget failures: the bytes are not needed any more.

        Reads go on, because a pending update may still need the old bytes.
        """
        for request in [each for each in self.in_flight if each.writes]:
            with contextlib.suppress(InfinityError):
                self.finish(request)
        self.failure = None

    def _conflicts(self, start: int, end: int, writing: bool) -> Iterator[InFlightRequest]:
        self.in_flight = [each for each in self.in_flight if each.writes or not each.transfer.done()]
        return (
            each
            for each in self.in_flight
            if each.start < end and start < each.end and (writing or each.writes)
        )
