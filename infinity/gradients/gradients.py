"""Gradients in pages: each gradient of a backward is taken from autograd, accumulated and measured.

A gradient page consists of chunks, in its unit's layout. A chunk whose home is in host RAM is accumulated in
place. From a device with its own memory the first gradient of a step is copied straight there, if it has the
page's dtype (infinity/pages/gradient_copies.py). Any other chunk is staged: it is held in temporary memory
while its parameters' gradients arrive. The caller provides that memory (infinity/optim/scheduler.py).

The sums of squares are computed in the pass that stores the gradients, or by a device's kernel before it
copies them. They are fp64 sums over blocks of
cpu_adam.BLOCK elements, counted from each parameter's first element. The norm is the root of their exact sum,
which is rounded once (infinity/gradients/exact_sum.py). So the norm depends on no order, and not on units,
chunks or threads.
"""

from __future__ import annotations

import functools
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from infinity import cpu_adam
from infinity.errors import ConfigError, InfinityError
from infinity.gradients.device import DeviceUnits
from infinity.gradients.exact_sum import ExactSum
from infinity.gradients.loss_scale import LossScale
from infinity.layout.chunks import OwnedRange, Piece
from infinity.pages.gradient_copies import GradientCopies, GradientCopy
from infinity.pages.gradient_page import FreshGradient, GradientChunk, GradientPage, StayingPiece
from infinity.pages.store import Store
from infinity.telemetry.stats import Edge
from infinity.tiers.link import Transfer, User

_CONTENT = operator.attrgetter("content")
_NO_SUMS = np.zeros(0)
_MOST_READ = 1 << 22
"""The most elements of a gradient that are brought from another rank at once."""


@dataclass(frozen=True, slots=True)
class CompleteGradients:
    """Gradients of a unit that have become complete together. They may be on their way from a device."""

    unit: int
    parameters: Sequence[int]
    """Indices of the parameters."""
    last: bool
    """Whether the unit has all gradients of the step with them."""
    copy: GradientCopy | None
    """The copy that brings the last of them, and what the host must know of other units' gradients."""
    job: int
    """Number of the job that brings the last of them, as `GradientCopies.send` returned it."""
    measured: int
    """If `last`, number of gradients that the device had measured before; else 0."""


class Gradients:
    """All gradient pages, and the factors that turn stored gradients into the optimizer's gradients."""

    def __init__(
        self,
        pages: dict[int, GradientPage],
        store: Store,
        threads: cpu_adam.ThreadPool,
        scale: LossScale,
        *,
        on_device: DeviceUnits | None = None,
        copies: GradientCopies | None = None,
    ) -> None:
        """pages: unit -> its gradient page. store: moves pages between tiers. threads: the pool that adds and
        measures gradients. scale: the loss scale. on_device: the units that the device updates; None if there
        are no such units.

        copies: the gradients on their way from a device with its own memory; None if the device has no
        memory of its own.
        """
        self.pages = pages
        self._copies = copies
        self._store = store
        self._threads = threads
        self._ranks = store.plan.share.ranks
        """Number of ranks whose gradients are added up. The optimizer sees their average."""
        self._loss_scale = scale
        self._stored_at = 1.0
        """The loss scale of the backwards that made the stored gradients. They are larger by this factor."""
        self.factors: dict[tuple[int, int], float] = {}
        """(unit, index of a parameter) -> factor by which user code has scaled the parameter's gradient in
        this step, as clipping does. Gradients that were not scaled are absent.
        """
        self.factor = 1.0
        """The factor that all gradients of the step have in common, which `agree_on_factor` finds."""
        self._failure: InfinityError | None = None
        """The latest error by which gradients of this step were lost: one may be missing, or may be added or
        written home in part only.
        """
        self._sums: dict[tuple[int, int] | None, ExactSum] = {}
        """What `squares` has returned since a gradient was last added or forgotten, by its argument."""
        self.staged = StagedChunks(pages, store, self.lose, copies=copies)
        self._on_device = on_device
        self.stays: Callable[[int, int], bool] | None = None
        """Function (unit, index of a chunk) that says whether the first gradients of a step for the chunk
        wait in device memory for an update there; None: none do.
        """
        self._staying: dict[tuple[int, int], None] = {}
        """(unit, index of a chunk) of every chunk with gradients that have waited there in this step, an
        ordered set: those that came first, first.
        """
        self._wholes: weakref.WeakSet[FreshGradient] = weakref.WeakSet()
        """The gradients of which pieces stay in device memory."""
        self._places = {} if copies is None else self._places_of_squares()
        """(unit, index of a parameter) -> the sums of its blocks in `Store.squares`, float64 (blocks,), for
        units that the device does not update.
        """

    @property
    def unscale(self) -> float:
        """Factor by which stored gradients are multiplied to get the gradients that the optimizer sees. It
        includes `factor`.
        """
        return self.factor / (self._stored_at * self._ranks)

    def unscale_of(self, unit: int, parameter: int) -> float:
        """Factor by which the stored gradient of one parameter is multiplied to get the parameter's gradient
        as user code sees it.
        """
        return self.factors.get((unit, parameter), 1.0) / (self._stored_at * self._ranks)

    def scale(self, unit: int, parameter: int, factor: float) -> None:
        """Multiply the gradient of a parameter by `factor`, in addition to earlier factors."""
        self.factors[unit, parameter] = self.factors.get((unit, parameter), 1.0) * factor

    def agree_on_factor(self, call: str, keys: Iterable[tuple[int, int]]) -> None:
        """Find the factor that all gradients have in common, and keep it as `factor`.

        call: the user's call, for the error. keys: the parameters, (unit, index), whose gradients count. A
        gradient of zeros may have any factor. If a factor is not finite, `unscale` is NaN. Raises ConfigError
        if gradients have different factors.
        """
        self.factor = 1.0
        if not self.factors:
            return
        factors = {key: self.factors.get(key, 1.0) for key in keys}
        if not all(map(math.isfinite, factors.values())):
            self.factor = math.nan
            return
        stored = {key: each for key, each in factors.items() if key[1] in self.pages[key[0]].content}
        names = {each: self._name(*key) for key, each in stored.items()}
        if len(names) > 1:
            (one, first), (other, second) = list(names.items())[:2]
            raise ConfigError(
                f"{call} was called, and the gradients have different factors: that of {first} was "
                f"multiplied by {one:g}, that of {second} by {other:g}.",
                "Multiply all gradients by one factor, set the gradient of each parameter (p.grad = tensor), "
                "or multiply what backward adds, in a hook (p.register_hook).",
            )
        self.factor = next(iter(names), 1.0)

    def having(self) -> list[tuple[int, int]]:
        """All parameters, (unit, index), that have a gradient, stored or of zeros."""
        return [(unit, index) for unit, page in self.pages.items() for index in page.having]

    def _name(self, unit: int, parameter: int) -> str:
        return self.pages[unit].layout.parameters[parameter].names[0]

    @property
    def any(self) -> bool:
        """Whether any parameter has a gradient, stored or of zeros."""
        return any(page.content or page.zeros for page in reversed(self.pages.values()))

    @property
    def any_stored(self) -> bool:
        """Whether the gradient of any parameter is stored."""
        # A backward begins with the last pages, so the first comparison usually decides.
        return any(map(_CONTENT, reversed(self.pages.values())))

    def _places_of_squares(self) -> dict[tuple[int, int], torch.Tensor]:
        squares, found = self._store.squares, dict[tuple[int, int], torch.Tensor]()
        if squares is None or not self._store.plan.share.whole_gradients:
            return found
        start = 0 if self._on_device is None else self._on_device.blocks
        for unit, page in self.pages.items():
            if not self.on_device(unit):
                for index, layout in enumerate(page.layout.parameters):
                    if layout.trainable:
                        start, first = start + -(-layout.numel // cpu_adam.BLOCK), start
                        found[unit, index] = squares[first:start]
        assert start <= len(squares)
        return found

    def await_limit(self) -> None:
        """Wait, without the runtime's lock, until the gradients that are on their way from the device take no
        more of its memory than the plan gives them.
        """
        if self._copies is not None:
            self._copies.await_limit()

    @contextmanager
    def adding(self, unit: int, parameter: int, dtype: torch.dtype) -> Iterator[GradientPage]:
        """Context in which the caller adds a new gradient of a parameter. Yields the unit's gradient page.

        parameter: the parameter's index in the unit. dtype: the new gradient's dtype. Raises ConfigError
        after the unit's eager update, or if the loss scale changed since the first gradient of this step;
        the gradients that were added before stay valid. Where the user declared one backward per step, also
        raises ConfigError for a second gradient of the parameter, or for a dtype other than the parameter's.
        In these two cases, and after an exception inside the context, the gradients of this step are lost:
        `check` raises an error until `clear` is called.
        """
        page = self.check_addition(unit, parameter)
        self._sums.clear()
        try:
            if parameter in page.as_they_come:
                page.check_single(parameter, dtype)
            yield page
        except Exception as error:
            self.lose(error)
            raise
        page.content.add(parameter)
        page.arrivals[parameter] += 1

    def pieces(self, page: GradientPage, parameter: int) -> list[tuple[int, Piece]]:
        """List the pieces of a parameter as (index of the chunk in the page, piece), in the order of adding.

        Pieces in chunks that are staged already come first: staging another chunk might push such a chunk out
        before its piece is added.
        """
        found = page.layout.pieces(parameter)
        if page.home.in_place:
            return list(found)
        return sorted(found, key=lambda each: page.chunks[each[0]].staged is None)

    def add_in_place(self, page: GradientPage, parameter: int, fresh: torch.Tensor) -> None:
        """Add a whole new gradient, (numel,) in memory order, to the parameter's stored gradient, which is at
        home in host RAM.

        The chunks of a parameter usually lie there without gaps, so that one pass adds them all. From a
        device with its own memory, the gradient comes later: straight to its place if it is the first.
        """
        again = parameter in page.content
        if self._copies is not None and not again and fresh.dtype == page.stored_dtype(parameter):
            self._copy_home(self._copies, page, parameter, fresh)
            return
        self.watch(page, parameter, fresh)
        for start, target, places in page.runs(parameter):
            for chunk_index, _ in places:
                page.send_home(chunk_index)
            part = fresh[start : start + target.numel()]
            if self._copies is None:
                sums = self._accumulate(part, target, again=again)
            else:
                number, sums = self._send(self._copies, part, target, again=again)
                page.latest_job = number
                for chunk_index, _ in places:
                    page.chunks[chunk_index].sent = number
            self._set_sums(page, parameter, places, sums)

    def _copy_home(
        self, copies: GradientCopies, page: GradientPage, parameter: int, fresh: torch.Tensor
    ) -> None:
        """Begin to copy a new gradient of a parameter from the device straight to its place in host RAM."""
        runs = page.runs(parameter)
        for _, _, places in runs:
            for chunk_index, _ in places:
                if page.chunks[chunk_index].sent:  # a gradient that was dropped may still be added
                    copies.wait(page.chunks[chunk_index].sent)
        squares = self._places[page.index, parameter] if copies.measures() else None
        leaving = [(start, target) for start, target, _ in runs]
        if self.stays is not None and squares is not None:
            leaving = self._let_stay(page, parameter, fresh)
        stop = None if self._watcher is None else self._watcher.next_stop()
        copy = copies.copy(fresh, leaving, squares, stop)
        page.latest_copy = copy
        for start, target, places in runs:
            for chunk_index, _ in places:
                page.chunks[chunk_index].copy = copy
            sums = None
            if squares is not None:
                first = start // cpu_adam.BLOCK
                sums = squares.numpy()[first : first + -(-target.numel() // cpu_adam.BLOCK)]
            self._set_sums(page, parameter, places, sums)

    def _let_stay(
        self, page: GradientPage, parameter: int, fresh: torch.Tensor
    ) -> list[tuple[int, torch.Tensor]]:
        """Note the pieces of a new gradient that stay in device memory. Returns the places of all others, as
        for `GradientCopies.copy`.
        """
        assert self.stays is not None
        whole, leaving = FreshGradient(fresh.nbytes), list[tuple[int, torch.Tensor]]()
        for start, target, places in page.runs(parameter):
            ends = [*(begin for _, begin in places[1:]), start + target.numel()]
            first: int | None = None
            for (chunk_index, begin), end in zip(places, ends, strict=True):
                if not self.stays(page.index, chunk_index):
                    first = begin if first is None else first
                    continue
                if first is not None:
                    leaving.append((first, target[first - start : begin - start]))
                    first = None
                piece = StayingPiece(fresh[begin:end], target[begin - start : end - start], whole)
                page.chunks[chunk_index].staying[parameter, begin] = piece
                self._staying[page.index, chunk_index] = None
            if first is not None:
                leaving.append((first, target[first - start :]))
        self._wholes.add(whole)
        return leaving

    @property
    def staying_bytes(self) -> int:
        """Bytes of device memory that gradients take because pieces of them stay there."""
        return sum([each.nbytes for each in self._wholes])

    def send_oldest_home(self) -> bool:
        """Begin to copy to host RAM the gradients of the chunk whose gradients stay in device memory for the
        longest time. Returns False if none stay.
        """
        while self._staying:
            unit, chunk_index = next(iter(self._staying))
            del self._staying[unit, chunk_index]
            if self.pages[unit].chunks[chunk_index].staying:
                self.pages[unit].send_home(chunk_index)
                return True
        return False

    @staticmethod
    def _set_sums(
        page: GradientPage,
        parameter: int,
        places: Sequence[tuple[int, int]],
        sums: npt.NDArray[np.float64] | None,
    ) -> None:
        """Note the sums of squares of a range of `GradientPage.runs`. places: its pieces. sums: None: the
        sums have not been computed yet.
        """
        first, *others = places
        page.chunks[first[0]].blocks[parameter, first[1]] = sums
        for chunk_index, begin in others:  # the first piece has the sums of the whole range
            page.chunks[chunk_index].blocks[parameter, begin] = _NO_SUMS

    @contextmanager
    def adding_piece(self, unit: int, piece: Piece, *, last: bool) -> Iterator[GradientPage]:
        """Context in which the caller adds one rank's gradient of a piece. Yields the unit's gradient page.

        last: whether the piece then has the gradients of all ranks for a micro-batch. After an exception
        inside the context, the gradients of this step are lost; see `adding`.
        """
        page = self.pages[unit]
        self._sums.clear()
        try:
            yield page
        except Exception as error:
            self.lose(error)
            raise
        page.content.add(piece.parameter)
        if last:
            page.arrived_piece(piece)

    def watch(self, page: GradientPage, parameter: int, fresh: torch.Tensor) -> None:
        """Have a new gradient, (numel,) where the model computes, stop the device's updates in the backward
        if it is not finite. Called for gradients that no other call measures on the device.
        """
        if self._watcher is not None:
            self._watcher.watch(fresh.to(page.stored_dtype(parameter)))

    def add_piece(
        self,
        page: GradientPage,
        chunk_index: int,
        piece: Piece,
        fresh: torch.Tensor,
        *,
        again: bool | None = None,
        last: bool = True,
    ) -> None:
        """Add one piece of a new gradient to the stored gradient in a chunk that is in RAM.

        chunk_index, piece: a pair from `pieces`. fresh: the new gradient's elements, (piece.count,). If they
        are on a device with its own memory, a worker thread adds them later.
        again: whether `fresh` is added to a stored gradient of the piece, or replaces it; `fresh` must then
        be in RAM. None: it is added if the parameter has a stored gradient. last: whether the piece gets no
        more gradients in the running backward.
        """
        chunk = page.chunks[chunk_index]
        data = page.memory(chunk_index)
        assert data is not None
        if chunk.staged is None:
            page.home.settle(
                page.offset(chunk_index), page.offset(chunk_index) + page.nbytes(chunk_index), True
            )
        target = page.typed(chunk_index, data)[piece.offset : piece.offset + piece.count]
        copies = self._copies
        if again is None:
            again = piece.parameter in page.content
        else:
            copies = None
        if copies is None:
            blocks = self._accumulate(fresh, target, again=again)
        else:
            chunk.sent, blocks = self._send(copies, fresh, target, again=again)
            page.latest_job = chunk.sent
        chunk.blocks[piece.parameter, piece.start] = blocks
        if chunk.staged is not None and last:
            chunk.waiting.discard(piece.parameter)
            if not chunk.waiting:
                self.staged.complete(page, chunk_index)

    @property
    def apart(self) -> bool:
        """Whether new gradients are in memory that the CPU cannot use, and have to be brought to RAM."""
        return self._copies is not None

    def bring(self, fresh: torch.Tensor, into: torch.Tensor, then: Callable[[], object]) -> int:
        """Begin to bring a new gradient to RAM; use it if `apart`.

        fresh: (n,) on the device. into: (n,) in RAM, of the same dtype. then: function that is called in
        another thread, and must not wait, once `arrived` holds for the returned number. Raises the errors of
        `GradientCopies.send`; an error of the copy itself is one of `check`.
        """
        assert self._copies is not None
        return self._copies.send(fresh, None, into=into, then=then)

    def keep_there(self, fresh: torch.Tensor, into: torch.Tensor, then: Callable[[], object]) -> int:
        """As `bring`, for a gradient that waits in device memory, at `into`: when `arrived` holds, copies and
        other processes may read it there.
        """
        assert self._copies is not None
        self._store.link.uses(User.COMPUTE, into, writes=True, label="gradient that waits there")
        into.copy_(fresh)
        return self._copies.send(into[:0], functools.partial(self._offered, into), then=then)

    def _offered(self, there: torch.Tensor, start: int, nothing: torch.Tensor) -> None:
        self._store.link.uses(User.HOST, there, writes=False, label="gradient that is offered")

    def arrived(self, number: int) -> bool:
        """Whether the gradient for which `bring` returned `number` is in RAM, or an error has lost it. Never
        blocks.
        """
        return self._copies is None or self._copies.arrived(number)

    @property
    def lost_on_the_way(self) -> bool:
        """Whether an error has lost a gradient on its way to RAM, so that later ones are not brought."""
        return self._copies is not None and self._copies.failure is not None

    def await_arrivals(self) -> None:
        """Wait until `arrived` holds for all gradients. Any thread may wait, with or without the runtime's
        lock.
        """
        if self._copies is not None:
            self._copies.wait()

    def add_on_device(self, unit: int, parameter: int, flat: torch.Tensor) -> None:
        """Add a new gradient of a parameter to the parameter's gradient on the device.

        flat: the new gradient, (numel,) in memory order.
        """
        assert self._on_device is not None
        self._on_device.add(unit, parameter, flat)

    def add_piece_on_device(
        self,
        page: GradientPage,
        chunk_index: int,
        piece: Piece,
        fresh: torch.Tensor,
        *,
        again: bool,
        there: bool = False,
    ) -> list[Transfer]:
        """Add a rank's gradient of a piece to its sum on the device; see `DeviceUnits.add_piece`."""
        assert self._on_device is not None
        return self._on_device.add_piece(page, chunk_index, piece, fresh, again=again, there=there)

    def squares(self, only: tuple[int, int] | None = None) -> ExactSum:
        """Wait until all gradients have been added, and return the exact sum of the sums of squares of all
        blocks of the stored gradients, without the factor `unscale`. The sum is kept until a gradient is
        added or forgotten.

        only: (unit, index) of the one parameter that counts; None: all do. Raises the errors of `check`.
        """
        self.await_arrivals()
        self.check()
        if only not in self._sums:
            if self._on_device is not None:
                self._on_device.copy_to_host()
            keys = self.having() if only is None else [only]
            found = ExactSum()
            found.add(
                *(
                    each
                    for unit, index in keys
                    if index in self.pages[unit].content
                    for each in self.pages[unit].squares(index)
                )
            )
            self._sums[only] = found
        return self._sums[only]

    def norm(self) -> float:
        """Wait until all gradients have been added, and return their 2-norm as the optimizer would see it:
        the root of the sum of `squares`, rounded to float64 once, times `unscale`.

        Raises the errors of `check`.
        """
        return self.norm_of(self.squares(), self.unscale)

    @staticmethod
    def norm_of(squares: ExactSum, unscale: float) -> float:
        """Return the 2-norm of gradients. squares: their sum of squares, as `squares` measures it. unscale:
        the factor by which stored gradients are multiplied.
        """
        return math.sqrt(squares.value()) * abs(unscale)

    def finite(self) -> bool:
        """Wait until all gradients have been added, and return whether all their elements are finite.

        Raises the errors of `check`.
        """
        return math.isfinite(self.norm())

    def clip(self, max_norm: float, norm: float) -> None:
        """Scale all gradients so that their norm becomes at most `max_norm`.

        norm: the present norm of all gradients. A norm that is not finite changes nothing.
        """
        if math.isfinite(norm):
            for key in self.having():
                self.scale(*key, min(1.0, max_norm / (norm + 1e-6)))

    def check(self) -> None:
        """Raise the error that made the gradients of this step invalid, if there is one."""
        for failure in self._failures():
            if failure is not None:
                raise failure.again()

    @property
    def lost(self) -> bool:
        """Whether `check` raises an error."""
        return any(failure is not None for failure in self._failures())

    def _failures(self) -> tuple[InfinityError | None, ...]:
        on_the_way = None if self._copies is None else self._copies.failure
        return on_the_way, self._failure, *(page.home.failure for page in self.pages.values())

    def read(
        self,
        unit: int,
        parameter: int,
        sum_of: Callable[[GradientPage, int, OwnedRange], torch.Tensor | None] | None = None,
    ) -> torch.Tensor | None:
        """Return a copy of a parameter's gradient as the optimizer would see it, in the accumulation dtype.

        sum_of: function (page, parameter, range of elements) that returns the gradient of the range, flat, or
        None if there is none; None: `elements`, for gradients that this rank has alone. Returns None if the
        parameter has no gradient. Raises the errors of `check`, and ConfigError if an eager update has used
        the gradient.
        """
        self.check()
        page = self.pages.get(unit)
        if page is None:
            return None
        layout = page.layout.parameters[parameter]
        if parameter not in page.content and (sum_of is None or not layout.trainable or not layout.numel):
            return self.zeros(unit, parameter)
        if page.consumed:
            raise ConfigError(
                f"The gradient of {page.layout.parameters[parameter].names[0]} is not kept: an eager update "
                "used the gradient during the backward.",
                'Look at it in a hook of the parameter (p.register_hook), or offload with update="lazy".',
            )
        dtype = self._store.plan.precision.accumulate_dtype(layout.dtype)
        ranges = page.layout.owned(parameter, _MOST_READ) if layout.trainable else ()
        found = [
            self.elements(page, parameter, each.start, each.numel)
            if sum_of is None
            else sum_of(page, parameter, each)
            for each in ranges
        ]
        parts = [each.to(dtype) for each in found if each is not None]
        if found and not parts:
            return self.zeros(unit, parameter)
        flat = torch.cat(parts) if parts else torch.zeros(0, dtype=dtype, device="cpu")
        unscale = self.unscale_of(unit, parameter)
        if unscale != 1.0:
            flat.mul_(unscale)
        return flat.as_strided(layout.shape, layout.stride)

    def zeros(self, unit: int, parameter: int) -> torch.Tensor | None:
        """Return zeros in the form of `read` if a parameter has a gradient of zeros, such as
        `zero_grad(set_to_none=False)` leaves; else None.
        """
        page = self.pages[unit]
        if parameter not in page.zeros:
            return None
        layout = page.layout.parameters[parameter]
        dtype = self._store.plan.precision.accumulate_dtype(layout.dtype)
        return torch.zeros(layout.numel, dtype=dtype, device="cpu").as_strided(layout.shape, layout.stride)

    def on_device(self, unit: int) -> bool:
        """Whether the gradients of a unit stay on the device, which then updates the unit."""
        return self._on_device is not None and unit in self._on_device

    @property
    def on_device_in_backward(self) -> bool:
        """Whether the device updates its units in the backward, with gradients that have no page."""
        return self._watcher is not None

    @property
    def _watcher(self) -> DeviceUnits | None:
        """The units that the device updates, if it does so in the backward.

        See [Note: updates in the backward] in infinity/gradients/device.py.
        """
        return self._on_device if self._on_device is not None and self._on_device.in_backward else None

    def completed(self, unit: int, parameters: Sequence[int], *, last: bool) -> CompleteGradients:
        """Describe gradients of a unit that have just become complete. last: as in CompleteGradients."""
        page, measured = self.pages[unit], 0
        copy, job = page.latest_copy, page.latest_job
        if last and self._watcher is not None:
            measured = self._watcher.measured
            copy = self._watcher.copy_stop(self._copies)
        return CompleteGradients(unit, parameters, last, copy, job, measured)

    def come(self, gradients: CompleteGradients, *, wait: bool = False) -> bool:
        """Whether gradients that became complete have come from the device. wait: wait until they have."""
        if self._copies is None:
            return True
        if wait:
            if gradients.copy is not None:
                gradients.copy.wait()
            self._copies.wait(gradients.job)
            return True
        return (gradients.copy is None or gradients.copy.done()) and self._copies.arrived(gradients.job)

    def stopped_before(self, gradients: CompleteGradients) -> bool:
        """Whether a gradient that the device measures was not finite and came before the last of these."""
        return self._watcher is not None and self._watcher.stopped_by(gradients.measured)

    def consume(self, unit: int) -> None:
        """Mark a unit's gradients as used by an eager update.

        The unit's gradients in staging and in device memory, which the update has taken, are dropped without
        being written home. After this, adding or reading a gradient of the unit raises ConfigError until
        `clear`.
        """
        page = self.pages[unit]
        page.consumed = True
        if self._on_device is not None:
            self._on_device.consume(unit)
        for chunk_index in range(len(page.chunks)):
            page.chunks[chunk_index].staying.clear()
            if page.chunks[chunk_index].staged is not None:
                self.staged.drop(page, chunk_index)

    def clear(self) -> None:
        """Forget all stored gradients and all failures."""
        if self._copies is not None:
            self._copies.renew()
        for page in self.pages.values():
            page.content.clear()
            page.arrivals.clear()
            page.piece_arrivals.clear()
            page.consumed = False
            page.chunks = [GradientChunk() for _ in page.layout.chunks]
            page.latest_copy = None
            page.home.renew()
        if self._on_device is not None:
            self._on_device.clear()
        self._staying.clear()
        self.staged.clear()
        self.forgive()

    def forgive(self) -> None:
        """Forget an error by which gradients were lost, and the factors by which user code has scaled
        gradients in this step.
        """
        self._failure = None
        self._sums.clear()
        self.factors.clear()
        self.factor = 1.0

    def close(self) -> None:
        """Wait for the gradients that are on their way, forget all, and drop all views of memory."""
        if self._copies is not None:
            self._copies.close()
        self.clear()
        self.stays = None
        self._places.clear()
        for page in self.pages.values():
            page.forget_runs()

    def lose(self, error: Exception) -> None:
        """Note an error by which the gradients of this step are lost. `check` raises it until `clear`.

        A ConfigError takes the place of an error that is not an InfinityError.
        """
        if not isinstance(error, InfinityError):
            error = ConfigError(
                "A backward was interrupted while a gradient was added.",
                "Call runtime.optimizer.zero_grad() and repeat the step.",
            )
        self._failure = error.again()

    def break_off(self) -> None:
        """Note that micro-batches ended early, so that the gradients of this step are lost.

        `check` raises ConfigError from now until `clear`.
        """
        self.lose(
            ConfigError(
                "The micro-batches of a step were broken off in their backwards.",
                "Call runtime.optimizer.zero_grad() and repeat the step.",
            )
        )

    def begin(self) -> None:
        """Note that a gradient of this rank or of another one arrives. If it is the first of the step, the
        present loss scale becomes the one at which all gradients of the step are stored.
        """
        if not self.any_stored:
            self._stored_at = self._loss_scale.value

    def has(self, unit: int, parameter: int) -> bool:
        """Whether a parameter has a gradient, stored or of zeros."""
        return unit in self.pages and parameter in self.pages[unit].having

    def drop(self, unit: int, parameter: int) -> None:
        """Forget the stored gradient of one parameter."""
        if unit in self.pages:
            page = self.pages[unit]
            self._sums.clear()
            if parameter in page.content and self._on_device is not None and self._on_device.measured:
                self._drop_measured(self._on_device, page, parameter)
            page.content.discard(parameter)
            for chunk_index, piece in page.pieces(parameter):  # these are what ranks ask each other for
                page.forget_piece(chunk_index, piece)

    def _drop_measured(self, units: DeviceUnits, page: GradientPage, parameter: int) -> None:
        """Let updates on the device run again if the gradient of a parameter, now dropped, stopped them."""
        if self.lost:
            return  # `check` raises until `clear`
        if page.index in units:
            stopped = units.kept(page.index, parameter) is not None
        else:
            stopped = not page.finite(parameter)
        if stopped:
            finite = all(
                each.finite(index)
                for unit, each in self.pages.items()
                if unit not in units
                for index in each.content
                if (unit, index) != (page.index, parameter)
            )
            units.drop(page.index, parameter, finite=finite)

    def check_addition(self, unit: int, parameter: int) -> GradientPage:
        """Check that a gradient of a parameter may come now, and return the unit's gradient page.

        Raises the errors that `adding` raises before its context begins.
        """
        page = self.pages[unit]
        if page.consumed and page.pieces(parameter):
            raise ConfigError(
                f"One more gradient of {page.layout.parameters[parameter].names[0]} came after its eager "
                f"update, which ran after gradient number {page.arrivals[parameter]} of the step.",
                "Declare with accumulation= the number of backwards in a step, and call zero_grad() after "
                'step(). Offload with update="lazy" if the number is not known.',
            )
        if not self.any_stored:
            self._stored_at = self._loss_scale.value
        elif self._stored_at != self._loss_scale.value:
            raise ConfigError(
                "A backward came after a step whose gradients are still kept, at a different loss scale.",
                "Call runtime.optimizer.zero_grad() after step().",
            )
        return page

    def check_unscaled(self) -> None:
        """Raise ConfigError if the stored gradients were scaled in this step. A new gradient is not scaled,
        so it could not be added to them.
        """
        if self.factors:
            raise ConfigError(
                "A backward came between clip_grad_norm_ and zero_grad().",
                "Clip or multiply gradients once, after the last backward of a step, and call zero_grad() "
                "after step().",
            )

    def stored_form(self, unit: int, parameter: int, gradient: torch.Tensor) -> torch.Tensor:
        """Convert a gradient that user code sets to the form of a gradient that a backward brings.

        It is multiplied by the loss scale. It has the parameter's dtype if gradients of the parameter are
        stored in that dtype, else the dtype in which gradients are accumulated.
        """
        page, layout = self.pages[unit], self.pages[unit].layout.parameters[parameter]
        gradient = gradient.to(self._store.plan.precision.accumulate_dtype(layout.dtype))
        if self._loss_scale.value != 1.0:
            gradient = gradient * self._loss_scale.value
        if parameter in page.as_they_come:
            gradient = gradient.to(layout.dtype)
        return gradient

    def _send(
        self, copies: GradientCopies, fresh: torch.Tensor, target: torch.Tensor, *, again: bool
    ) -> tuple[int, npt.NDArray[np.float64]]:
        """Have the worker bring a new gradient from the device, and call `_accumulate` for each block.

        target: the stored gradient. again: as in `_accumulate`. Returns the number of the worker's job, and
        the array that gets the sums of squares.
        """
        blocks = np.zeros(-(-target.numel() // cpu_adam.BLOCK))

        def use(start: int, landed: torch.Tensor) -> None:
            sums = self._accumulate(landed, target[start : start + landed.numel()], again=again)
            first = start // cpu_adam.BLOCK
            blocks[first : first + len(sums)] = sums

        return copies.send(fresh, use), blocks

    def _accumulate(
        self, fresh: torch.Tensor, target: torch.Tensor, *, again: bool
    ) -> npt.NDArray[np.float64]:
        """Add `fresh` to `target` (again=True), or copy `fresh` to `target` (again=False).

        Returns the sums of squares of the new `target`, one for each cpu_adam.BLOCK elements.
        """
        self._store.link.uses(User.HOST, target, writes=True, label="accumulated gradient")
        whole = [cpu_adam.Segment(0, target.numel())]
        if target.dtype == torch.float32:
            work = cpu_adam.Gradient(
                grad=fresh, accumulated=target, add=again, store=True, squares=True, segments=whole
            )
        elif target.dtype == fresh.dtype and not again:
            work = cpu_adam.Gradient(grad=fresh, copy=target, squares=True, segments=whole)
        else:
            if again:
                target.add_(fresh)
            else:
                target.copy_(fresh)
            work = cpu_adam.Gradient(grad=target, squares=True, segments=whole)
        # A waiting trainer thread helps; the worker must not, as torch's threads are the trainer's.
        return self._threads.submit(work, awaited=self._copies is None).result().blocks[0]

    def elements(self, page: GradientPage, parameter: int, first: int, count: int) -> torch.Tensor | None:
        """Return a copy in RAM of elements [first, first + count) of a parameter's stored gradient, all of
        which lie in this page: (count,). None if none is stored.
        """
        found = []
        if self._on_device is not None:
            self._on_device.order()
            kept = self._on_device.kept(page.index, parameter)
            if kept is not None:
                return self._store.copied_to_host(kept[first : first + count]).clone()
        for chunk_index, piece in page.pieces(parameter):
            part = piece.within(first, count)
            if part is not None and page.has_piece(chunk_index, piece):
                found.append(self._part(page, chunk_index, part))
        if not found:
            return None
        return found[0] if len(found) == 1 else torch.cat(found)

    def _part(self, page: GradientPage, chunk_index: int, piece: Piece) -> torch.Tensor:
        """Return a copy in RAM of the stored gradient of a part of a piece: (piece.count,)."""
        here = page.in_ram(chunk_index)
        if here is not None:
            return page.typed(chunk_index, here)[piece.offset : piece.offset + piece.count].clone()
        size = page.dtype(chunk_index).itemsize
        data = self._store.fetch(
            page.home, page.offset(chunk_index) + piece.offset * size, piece.count * size
        )
        return data.view(page.dtype(chunk_index))


class StagedChunks:
    """The chunks of all gradient pages that are in staging, buffers in host RAM, and when they go home.

    A chunk whose home is not in RAM is staged while its parameters' gradients arrive. It is written home when
    chunks that come later need its room. The last chunks of a backward stay in staging, because they are
    updated first. If another micro-batch follows, a chunk that was written home is read back, so that new
    gradients can be added. Called under the runtime's lock.
    """

    def __init__(
        self,
        pages: Mapping[int, GradientPage],
        store: Store,
        lose: Callable[[Exception], None],
        *,
        copies: GradientCopies | None,
    ) -> None:
        """pages, store, copies: as in Gradients. lose: `Gradients.lose`."""
        self.more_to_come = False
        """Whether another micro-batch will bring gradients of the same parameters next. If so, a chunk that
        has all gradients of one micro-batch stays staged until its room is needed.
        """
        self._pages = pages
        self._store = store
        self._lose = lose
        self._copies = copies
        self._chunks: dict[tuple[int, int], None] = {}
        """(unit, chunk) of every staged chunk. The chunk that has been staged for the longest time comes
        first.

        An ordered set: the dictionary's values are None.
        """
        self._whole: dict[tuple[int, int], int] = {}
        """(unit, chunk) of every staged chunk that waits for no gradient -> the chunk's bytes. The chunk
        that has waited for no gradient for the longest time comes first.
        """
        self._whole_bytes = 0
        self._most_kept = store.plan.staging_bytes // 2
        """The most bytes of chunks that wait for no gradient but stay staged. The other half of staging is
        for chunks whose gradients are still to come.
        """

    def missing(self, page: GradientPage, chunk_index: int) -> int:
        """Bytes of staging that `add` needs for a chunk before gradients can be added to the chunk.

        0 if the chunk is staged already, or if its page's home is in host RAM, where gradients are added in
        place.
        """
        if page.chunks[chunk_index].staged is not None or page.home.in_place:
            return 0
        return page.nbytes(chunk_index)

    def add(self, page: GradientPage, chunk_index: int, memory: torch.Tensor) -> None:
        """Stage a chunk in `memory`, for the gradients that will arrive.

        If the chunk was written home in this step, it is read back first, and the call waits for the read.
        memory: the uint8 tensor in staging, of `missing` bytes. Raises StorageError if the read fails.
        """
        chunk = page.chunks[chunk_index]
        if chunk.stored:
            with self._store.meter.stalling(Edge.NVME_TO_HOST):
                self._store.read(page.home, page.offset(chunk_index), memory).wait()
        chunk.staged = memory
        chunk.waiting = {piece.parameter for piece in page.layout.chunks[chunk_index].pieces}
        self._chunks[page.index, chunk_index] = None

    def complete(self, page: GradientPage, chunk_index: int) -> None:
        """Note that a staged chunk has all its gradients of this backward.

        With `more_to_come`, the chunk now waits for the gradients of the next micro-batch. Otherwise it waits
        for no further gradient. If chunks that wait for none take more than half of staging, those that have
        waited for none the longest are written home, without waiting for the writes. Raises StorageError as
        `write_back_oldest` does.
        """
        if self.more_to_come:
            pieces = page.layout.chunks[chunk_index].pieces
            page.chunks[chunk_index].waiting.update([each.parameter for each in pieces])
            return
        if (page.index, chunk_index) in self._whole:
            return
        nbytes = page.nbytes(chunk_index)
        self._whole[page.index, chunk_index] = nbytes
        self._whole_bytes += nbytes
        for unit, oldest in [*self._whole]:
            if self._whole_bytes <= self._most_kept:
                return
            if self._pages[unit].arrived(oldest):  # else a later call writes it, so that no caller waits
                self._write_back(self._pages[unit], oldest)

    def finish(self) -> None:
        """Note the end of a backward: no staged chunk waits for a gradient any more.

        Otherwise a chunk would go on waiting for the gradient of a parameter that the backward did not use.
        Does nothing if `more_to_come`. Chunks may be written home, and StorageError may be raised, as in
        `complete`.
        """
        if self.more_to_come:
            return
        for unit, chunk_index in [*self._chunks]:
            chunk = self._pages[unit].chunks[chunk_index]
            if chunk.staged is not None and (unit, chunk_index) not in self._whole:
                chunk.waiting.clear()
                self.complete(self._pages[unit], chunk_index)

    def write_back_oldest(self, kept: tuple[int, int] | None) -> bool:
        """Begin to write home the chunk that has been staged for the longest time, and unstage it.

        Returns False if there is no chunk to write. kept: (unit, chunk) of a chunk that must stay staged,
        or None. Raises StorageError if the write cannot be requested; the step's gradients are then lost.
        """
        for unit, chunk_index in self._chunks:
            if (unit, chunk_index) != kept:
                self._write_back(self._pages[unit], chunk_index)
                return True
        return False

    def write_back_now(self, unit: int, chunk_index: int, chunk: GradientChunk) -> None:
        """Write a chunk's gradient to the page's home, unless it lies there, and wait until it is written.

        chunk: staged, and taken by an update. Afterwards it is no longer staged, and the update can read the
        gradient from the home. If the write fails, StorageError is raised and nothing has changed.
        """
        page = self._pages[unit]
        assert chunk.staged is not None
        if not chunk.at_home:
            self._store.write_now(page.home, page.offset(chunk_index), chunk.staged, spare=True)
        if page.chunks[chunk_index] is chunk:
            self.drop(page, chunk_index)
            page.chunks[chunk_index].stored = True
        chunk.staged = None

    def drop(self, page: GradientPage, chunk_index: int) -> None:
        """Remove a chunk from staging without writing it home. An update that has taken it keeps it."""
        page.chunks[chunk_index] = replace(page.chunks[chunk_index], staged=None)
        del self._chunks[page.index, chunk_index]
        self._whole_bytes -= self._whole.pop((page.index, chunk_index), 0)

    def clear(self) -> None:
        """Forget all staged chunks, without writing them home."""
        self._chunks.clear()
        self._whole.clear()
        self._whole_bytes = 0

    def _write_back(self, page: GradientPage, chunk_index: int) -> None:
        chunk = page.chunks[chunk_index]
        if self._copies is not None:
            self._copies.wait(chunk.sent)  # `Gradients.check` raises its failure
        staged = chunk.staged
        assert staged is not None
        self.drop(page, chunk_index)
        try:
            self._store.write(page.home, page.offset(chunk_index), staged)
        except Exception as error:
            self._lose(error)
            raise
        page.chunks[chunk_index].stored = chunk.at_home = True
