"""Parameter page: where the bytes of one unit's parameters are, and the transitions that change it.

[Note: pages without stale views]
A page that is PRESENT has a residency: a Storage of its own over leased bytes, of which each Parameter's
`data` is a view. When it leaves, the Parameters get placeholders and the lease returns, unless some code
still holds a view. Then the Storage lives on as a ghost, and is the page as long as it lives: its bytes stay
taken, updates write to it too, and the next arrival uses it again instead of reading. So a view never shows
another page's bytes, nor values that its parameter does not have.

[Note: edits]
User code may write to a present page (`p.mul_()` under no_grad, a view). Such an edit moves the version
counter that torch keeps per Parameter: `edits` lists the parameters whose version is not the one that the
page's home corresponds to. Some views count versions of their own or outlive a page's stay: see loans in
infinity/pages/edits.py.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.layout.chunks import UnitLayout
from infinity.pages.home import Home
from infinity.tiers.link import Transfer


class Presence(enum.Enum):
    """The place of a parameter page, besides its home."""

    AWAY = "away"
    """At home only: it takes no device memory."""
    ARRIVING = "arriving"
    """Its device memory is taken, and the bytes are under way."""
    PRESENT = "present"
    """In device memory: Parameters are views of the residency."""


class ParameterPage:
    """A unit's parameter page. All transitions happen under the runtime's lock."""

    def __init__(
        self,
        index: int,
        layout: UnitLayout,
        home: Home,
        *,
        parameters: Sequence[nn.Parameter],
        placeholders: Sequence[torch.Tensor],
        addresses: dict[int, ParameterPage],
        permanent: bool = False,
    ) -> None:
        """addresses: address of a residency -> its page; shared by all pages, and filled by `land`.

        permanent: the page never leaves once it has landed, because its home or a mirror of it is where the
        model computes.
        """
        self.index = index
        self.layout = layout
        self.home = home
        self.parameters = tuple(parameters)
        self.permanent = permanent
        self.presence = Presence.AWAY
        self.residency: torch.Tensor | None = None
        """uint8 (layout.nbytes,) while PRESENT."""
        self.incoming: tuple[torch.Tensor, Transfer] | None = None
        """(the residency to be, the transfer that fills it), while ARRIVING in memory that the CPU uses."""
        self.holds = 0
        """Number of callers that need the page to stay PRESENT."""
        self.versions = [parameter_version(each) for each in self.parameters]
        """Version of each Parameter when its page was last known to equal its home."""
        self._placeholders = tuple(placeholders)
        self._ghost: StorageWeakRef | None = None
        self._addresses = addresses
        self._starts = [layout.start(index) for index in range(len(layout.parameters))]
        self._in_order = sorted(
            (start, index) for index, start in enumerate(self._starts) if layout.parameters[index].numel
        )

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def convert(self) -> None:
        """Replace the Parameters' own memory by placeholders. Called once, before the first arrival."""
        with torch.inference_mode(False):
            for parameter, placeholder in zip(self.parameters, self._placeholders, strict=True):
                if torch._has_compatible_shallow_copy_type(parameter, placeholder):
                    parameter.data = placeholder
                else:
                    # The parameter is on the meta device. torch.utils.swap_tensors would swap attributes as
                    # well, and it refuses tensors with weak references, such as nn.LSTM's weights.
                    torch._C._swap_tensor_impl(parameter, nn.Parameter(placeholder, parameter.requires_grad))
        self.acknowledge()

    def end(self) -> None:
        """Drop all memory, for good."""
        if self.presence is Presence.PRESENT:
            self.leave()
        self.residency = None

    def arrive(self) -> None:
        """AWAY -> ARRIVING. The caller that brings the bytes sets `incoming`."""
        assert self.presence is Presence.AWAY
        self.presence = Presence.ARRIVING

    def turn_back(self) -> None:
        """ARRIVING -> AWAY: the transfer failed or was given up."""
        assert self.presence is Presence.ARRIVING
        self.incoming = None
        self.presence = Presence.AWAY

    def land(self, residency: torch.Tensor) -> None:
        """ARRIVING -> PRESENT. residency: uint8 (nbytes,) with the page's bytes."""
        assert self.presence is Presence.ARRIVING
        self.incoming = None
        self.residency = residency
        self._addresses[residency.data_ptr()] = self
        self._ghost = None
        self.presence = Presence.PRESENT
        with torch.inference_mode(False):  # inference tensors can never be saved for a backward
            views = [self.view(index, residency) for index in range(len(self.parameters))]
        self._show(views)

    def leave(self) -> None:
        """PRESENT -> AWAY. A view keeps the bytes alive; see [Note: pages without stale views]."""
        assert self.presence is Presence.PRESENT and self.residency is not None
        self._show(self._placeholders)
        self._ghost = StorageWeakRef(self.residency.untyped_storage())
        self.residency = None
        self.presence = Presence.AWAY

    def living(self) -> torch.Tensor | None:
        """The bytes that the parameters' views see: the residency, or one that left and that views keep
        alive."""
        if self.residency is not None or self._ghost is None:
            return self.residency
        storage = torch.UntypedStorage._new_with_weak_ptr(self._ghost.cdata)
        if storage is None:
            self._ghost = None
            return None
        with torch.inference_mode(False):
            ghost: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return ghost

    def view(self, index: int, memory: torch.Tensor) -> torch.Tensor:
        """Parameter `index` in page bytes, with its shape, strides and dtype."""
        parameter = self.layout.parameters[index]
        return self.flat(index, memory).as_strided(parameter.shape, parameter.stride)

    def flat(self, index: int, memory: torch.Tensor) -> torch.Tensor:
        """Parameter `index` in page bytes: (numel,) in memory order."""
        parameter = self.layout.parameters[index]
        start = self._starts[index]
        return memory[start : start + parameter.numel * parameter.dtype.itemsize].view(parameter.dtype)

    def start(self, index: int) -> int:
        """Bytes from the page's start to parameter `index`."""
        return self._starts[index]

    def parameter_at(self, byte: int) -> int:
        """The parameter that this byte of the page belongs to."""
        return self._in_order[bisect_right(self._in_order, (byte, len(self._starts))) - 1][1]

    def edits(self) -> list[int]:
        """Parameters whose version is not the one that the home corresponds to."""
        pairs = zip(self.parameters, self.versions, strict=True)
        return [i for i, (parameter, version) in enumerate(pairs) if parameter_version(parameter) != version]

    def acknowledge(self) -> None:
        """Note that the home corresponds to the Parameters' present values."""
        self.versions = [parameter_version(each) for each in self.parameters]

    def _show(self, contents: Sequence[torch.Tensor]) -> None:
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            for parameter, content in zip(self.parameters, contents, strict=True):
                parameter.data = content


def parameter_version(parameter: torch.Tensor) -> int:
    """The parameter's version counter, read without a page fault."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter._version
