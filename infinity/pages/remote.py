"""Remote pages: how a runtime gets bytes of pages that other ranks keep, without knowing of networks.

With several ranks, a rank keeps only its own bytes of some pages (infinity/layout/shards.py). Code that needs
other bytes asks a `RemotePages` for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from infinity.layout.chunks import OwnedRange
from infinity.pages.parameter_page import ParameterPage
from infinity.tiers.link import Transfer


class Leg(NamedTuple):
    """A range of a parameter page that another rank owns, and the memory for its bytes."""

    owner: int
    start: int
    """Bytes from the start of the page."""
    into: torch.Tensor
    """Contiguous uint8 memory that the CPU can use; its size is the number of bytes. For `bring`: of the
    device.
    """


class PeerTransfer(Transfer, Protocol):
    """Bytes on their way from another rank's device memory. Used under the runtime's lock; `done` makes the
    transfer go on, and raises its errors.
    """

    here: bool
    """Whether the bytes have come. If they have not when the transfer has ended, they must be fetched."""

    def abandon(self) -> None:
        """End the transfer when it writes nothing any more."""


class RemotePages:
    """Brings bytes of pages from the ranks that hold them. This class serves one rank, which holds all;
    infinity/distributed/remote_parts.py extends it for several. Called under the runtime's lock.

    A wait for another rank gives the runtime's lock up, so that this rank can serve others meanwhile.
    """

    step = 0
    """Number of steps that all ranks have agreed on and that this rank has decided."""

    def fetch(self, page: ParameterPage, legs: Sequence[Leg]) -> Transfer:
        """Begin to bring bytes of a parameter page from the ranks that own them; return the transfer.

        The bytes are those after step number `self.step`, with all edits of user code that this rank has
        made. The transfer raises RankFailure if an owner is gone, and RankDivergence if it cannot serve the
        bytes.
        """
        raise AssertionError("one rank has all pages")

    def bring(
        self, page: ParameterPage, leg: Leg, copy: Callable[[torch.Tensor, torch.Tensor], Transfer]
    ) -> PeerTransfer | None:
        """Begin to copy bytes of a parameter page from the device memory of the rank that owns them, with the
        outcome of `fetch`. Returns None if this rank cannot, and has to call `fetch`.

        copy: begins a copy on the device, (into, source).
        """
        return None

    def replaced(self) -> None:
        """Note that all ranks have loaded the values of another run into their homes."""

    def published(self, pages: Sequence[ParameterPage]) -> None:
        """Note that a step updates `pages`, which every rank has at home as a whole."""

    def keep(self, page: ParameterPage) -> None:
        """Prepare for an edit of a page's home by user code: copy the bytes that this rank owns.

        Ranks that have not fetched these bytes since the last step get them from the copy.
        """

    def state(self, unit: int, parameter: int, name: str, wanted: OwnedRange, nbytes: int) -> torch.Tensor:
        """Return a copy of the entries that another rank keeps of the array `name` of optimizer states, for a
        range of a parameter: uint8 (nbytes,) in RAM.
        """
        raise AssertionError("one rank has all pages")
