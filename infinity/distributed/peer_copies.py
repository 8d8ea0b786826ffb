"""Peer copies: bring bytes of pages from the device memory of a rank of this node to this rank's.

[Note: copies between devices]
What is at home in a rank's device memory is shared with its mates by CUDA IPC, and they copy it as they copy
from its RAM: [Note: copies that the owner does not see] in infinity/distributed/windows.py holds here, too.
No stream waits for another process, so that a failure leaves no stream waiting. There are four orders:

- The owner opens its entry when its host knows that the work which wrote the bytes is done (`Order.OFFER`).
- The owner closes its entry before it queues work that writes there. It does not wait for copies.
- A mate queues its copy after it has seen the entry open.
- The mate looks at the entry again when its host knows that the copy is done (`Order.HOST_WAITS` or
  `HOST_ASKS`). Only then the bytes count, so the model computes with nothing that has changed meanwhile.

A copy that does not count is made again when the owner has told that the page is at home. If there it does
not count either, or if the owner has other bytes at home by then, the bytes come by a message.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch

from infinity.distributed.message import What
from infinity.distributed.windows import Stamp, Windows
from infinity.distributed.wire import Wire
from infinity.errors import InfinityError
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.remote import Leg
from infinity.tiers.link import Transfer


class PeerCopy:
    """A transfer of bytes in the device memory of another rank. Its methods are called under the runtime's
    lock, which a wait for the owner gives up.
    """

    def __init__(
        self,
        wire: Wire,
        windows: Windows,
        page: ParameterPage,
        stamp: Stamp,
        leg: Leg,
        *,
        copy: Callable[[torch.Tensor, torch.Tensor], Transfer],
        ask: Callable[[], Transfer],
    ) -> None:
        """leg: the bytes of the page, which go to this rank's device memory. copy: begins a copy on the
        device, given (into, source). ask: asks the owner to tell when the bytes are at home.
        """
        self.here = False
        """Whether the bytes have come. If not when the transfer has ended, they have to come otherwise."""
        self._wire = wire
        self._windows = windows
        self._page = page
        self._stamp = stamp
        self._leg = leg
        self._begin = copy
        self._request = ask
        self._answer: Transfer | None = None
        """What the owner was asked; None if it was not."""
        self._copy: Transfer | None = None
        self._changes = self._began = 0
        self._next: Transfer | None = None
        """The answer or the copy that is waited for; None if the transfer has ended."""
        self._look()

    def done(self) -> bool:
        """Go on as far as possible without waiting. Returns whether the transfer has ended. Raises the errors
        of `wait`.
        """
        while self._next is not None and self._next.done():
            self._go_on()
        return self._next is None

    def wait(self) -> object:
        """Wait until the transfer has ended. Raises RankFailure if the owner is gone, and DeviceError."""
        while self._next is not None:
            self._next.wait()
            self._go_on()
        return None

    timing = None
    """Peer copies are counted when they are complete, as what other ranks send is."""

    def abandon(self) -> None:
        """End the transfer when no copy is under way."""
        self._next = None
        if self._copy is not None:
            with suppress(InfinityError):
                self._copy.wait()

    def _go_on(self) -> None:
        ended = self._next
        if ended is None:  # abandoned, while this thread waited for the owner
            return
        ended.wait()  # raises its error
        if ended is self._answer:
            self._look()
            return
        self._copy = None
        owner, _, into = self._leg
        self.here = self._windows.unchanged(owner, self._page.index, self._changes, into)
        if self.here:
            label = What.PARAMETERS.label
            self._wire.copied(owner, label, self._page.index, into.nbytes, self._began)
        self._next = None if self.here else self._ask()

    def _look(self) -> None:
        """Begin to copy the bytes if the owner allows it now, else ask."""
        owner, start, into = self._leg
        self._began = time.perf_counter_ns()
        found = None
        if self._wire.failure is None:  # a dead rank's memory may still be there
            found = self._windows.peer_bytes(owner, self._page, self._stamp, start, into.nbytes)
        if found is None:
            self._next = self._ask()
        else:
            self._changes, source = found
            self._next = self._copy = self._begin(into, source)

    def _ask(self) -> Transfer | None:
        """Ask the owner, if it was not asked."""
        if self._answer is not None:
            return None
        self._answer = self._request()
        return self._answer
