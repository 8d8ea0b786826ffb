"""Parameter page: where the bytes of one unit's parameters are, and the transitions that move them.

[Note: pages without stale views]
A page that is PRESENT has a residency: a Storage of its own over leased bytes. Each Parameter's `data` is a
view of the residency. When the page leaves, its Parameters get placeholders as `data`, and the lease
returns to its pool unless some code still holds a view of the Storage. In that case the Storage lives on as
a ghost. As long as the ghost lives, it counts as the page's memory: its bytes stay leased, updates write to
it too, and the next arrival uses the ghost again instead of reading the page. So a view never shows the
bytes of another page, and never shows values that its parameter does not have.

[Note: edits]
User code may write to a present page (`p.mul_()` under no_grad, or a view). Such an edit moves the version
counter that torch keeps for each Parameter. `edits` lists the parameters whose version counter has moved
since the page was last known to equal its home. Some views have version counters of their own or outlive
the page's stay in memory: see [Note: loans] in infinity/pages/edits.py.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.layout.chunks import UnitLayout
from infinity.layout.shards import PageShard
from infinity.pages.home import Home
from infinity.tiers.link import Transfer


class Presence(enum.Enum):
    """The presence of a parameter page in device memory, where the model computes with the page."""

    AWAY = "away"
    """The page is at home only. In addition to its home, it takes device memory only if user code still holds
    views of its bytes there.
    """
    ARRIVING = "arriving"
    """Device memory for the page is leased, and the bytes are on their way."""
    PRESENT = "present"
    """The page is in device memory: its Parameters are views of its bytes there, the residency."""


class ParameterPage:
    """A unit's parameter page. All transitions of its `presence` happen under the runtime's lock."""

    def __init__(
        self,
        index: int,
        layout: UnitLayout,
        home: Home,
        *,
        shard: PageShard,
        parameters: Sequence[nn.Parameter],
        placeholders: Sequence[torch.Tensor],
        addresses: dict[int, ParameterPage],
        permanent: bool = False,
    ) -> None:
        """index: the unit's index in the model's layout. layout: where each parameter lies in the page. home:
        the place where the page rests. shard: which bytes of the page the home has. parameters: the unit's
        Parameters, in the order of `layout.parameters`. placeholders: for each of them, the `data` that it
        has while the page is not PRESENT.

        addresses: address of a present page's bytes in device memory -> the page. All pages share this
        mapping, and `land` adds to it.

        permanent: whether the page stays PRESENT from its first arrival on. This is so if the page's home
        is in the memory where the model computes, or if that memory has a copy of the home all the time
        (`Store.mirror`).
        """
        self.index = index
        self.layout = layout
        self.home = home
        self.shard = shard
        self.parameters = tuple(parameters)
        self.given = tuple(each.dtype for each in parameters)
        """The dtypes that the Parameters had in the user's model."""
        self.permanent = permanent
        self.presence = Presence.AWAY
        self.residency: torch.Tensor | None = None
        """The page's bytes in device memory, uint8 (layout.nbytes,), while PRESENT; else None."""
        self.incoming: tuple[torch.Tensor, Transfer] | None = None
        """While the page is ARRIVING in memory that the CPU can use: (the memory that is being filled,
        uint8 (nbytes,), the transfer that fills it). Else None.
        """
        self.filled_at = 0
        """Number of steps that all ranks had taken when the bytes in device memory were last complete."""
        self.holds = 0
        """Number of calls of `PrefetchEngine.hold` that keep the page PRESENT now."""
        self.versions = [parameter_version(each) for each in self.parameters]
        """Each Parameter's version counter at the time when the page was last known to have the same values
        as its home.
        """
        self._first_version = 0
        """The sum of the version counters when the page was converted."""
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
        for parameter, placeholder in zip(self.parameters, self._placeholders, strict=True):
            replace_data(parameter, placeholder)
        self.acknowledge()
        self._first_version = sum(self.versions)

    @property
    def version(self) -> int:
        """Number of operations that have changed the Parameters in place since `convert`; updates count."""
        return sum([parameter_version(each) for each in self.parameters]) - self._first_version

    @property
    def home_version(self) -> int:
        """The `version` at the time when the page was last known to have the same values as its home."""
        return sum(self.versions) - self._first_version

    def end(self) -> None:
        """Drop the memory of the page for good, at the end of the runtime."""
        if self.residency is not None:
            self.leave()

    def arrive(self) -> None:
        """Begin an arrival: AWAY -> ARRIVING. The caller brings the bytes and sets `incoming`."""
        assert self.presence is Presence.AWAY
        self.presence = Presence.ARRIVING

    def turn_back(self) -> None:
        """End an arrival whose transfer failed or was given up: ARRIVING -> AWAY."""
        self.incoming = None
        self.presence = Presence.AWAY

    def land(self, residency: torch.Tensor) -> None:
        """End an arrival: ARRIVING -> PRESENT. Make the Parameters views of `residency`.

        residency: the page's bytes in the memory where the model computes, uint8 (nbytes,).
        """
        assert self.presence is Presence.ARRIVING
        self.incoming = None
        self.residency = residency
        self._addresses[residency.data_ptr()] = self
        with torch.inference_mode(False):  # inference tensors can never be saved for a backward
            views = [self.view(index, residency) for index in range(len(self.parameters))]
        self._show(views)
        self.presence = Presence.PRESENT
        self._ghost = None

    def leave(self) -> None:
        """Leave device memory: PRESENT -> AWAY.

        Views that user code holds keep the bytes alive; see [Note: pages without stale views].
        """
        assert self.residency is not None
        self._ghost = StorageWeakRef(self.residency.untyped_storage())
        self._show(self._placeholders)
        self.presence, self.residency = Presence.AWAY, None

    def living(self) -> torch.Tensor | None:
        """Return the page's bytes in device memory, uint8 (nbytes,), or None if it has none there.

        While the page is PRESENT, this is its residency. After the page has left, this is a tensor over the
        former residency's Storage, as long as views that user code holds keep the Storage alive.
        """
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
        """Return parameter `index` as a view of `memory`, with its shape, strides and dtype.

        memory: the whole page's bytes, uint8 (nbytes,).
        """
        parameter = self.layout.parameters[index]
        return self.flat(index, memory).as_strided(parameter.shape, parameter.stride)

    def flat(self, index: int, memory: torch.Tensor) -> torch.Tensor:
        """Return parameter `index` as a flat view of `memory`, (numel,), with its elements in memory order.

        memory: the whole page's bytes, uint8 (nbytes,).
        """
        parameter = self.layout.parameters[index]
        start = self._starts[index]
        return memory[start : start + parameter.numel * parameter.dtype.itemsize].view(parameter.dtype)

    def start(self, index: int) -> int:
        """Bytes from the page's start to parameter `index`."""
        return self._starts[index]

    def parameter_at(self, byte: int) -> int:
        """Return the index of the parameter to which a byte of the page belongs.

        byte: the byte's offset from the page's start.
        """
        return self._in_order[bisect_right(self._in_order, (byte, len(self._starts))) - 1][1]

    def edits(self) -> list[int]:
        """Return the indices of the parameters that user code has edited since the last `acknowledge`.

        Their version counters differ from those in `versions`.
        """
        pairs = zip(self.parameters, self.versions, strict=True)
        return [i for i, (parameter, version) in enumerate(pairs) if parameter_version(parameter) != version]

    def acknowledge(self) -> None:
        """Record in `versions` that the home has the Parameters' present values, so that `edits` is empty.

        To be called only when the home does have these values, for example after they were written there.
        """
        self.versions = [parameter_version(each) for each in self.parameters]

    def _show(self, contents: Sequence[torch.Tensor]) -> None:
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            for parameter, content in zip(self.parameters, contents, strict=True):
                parameter.data = content


def replace_data(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Have a Parameter refer to the memory of `values`, a tensor of its shape, also on another device."""
    with torch.inference_mode(False):
        if torch._has_compatible_shallow_copy_type(parameter, values):
            parameter.data = values
        else:
            # One of the two is on the meta device or on a GPU. torch.utils.swap_tensors would swap attributes
            # as well, and it refuses tensors with weak references, such as nn.LSTM's weights.
            torch._C._swap_tensor_impl(parameter, nn.Parameter(values, parameter.requires_grad))


def parameter_version(parameter: torch.Tensor) -> int:
    """Read a parameter's version counter, without bringing the parameter's page into device memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter._version
