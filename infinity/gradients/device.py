"""Units that the device updates: their gradients are accumulated, measured and used on the device, where they
rest.

[Note: updates in the backward] Where updates are eager and each parameter gets one gradient a step, a unit is
updated as soon as it has all its gradients, from the tensors in which autograd made them, and needs no
gradient page. The device measures each gradient when it comes. A gradient that is not finite must stop the
updates queued after it, but the host, which queues them, does not wait to know. So the kernel that measures
writes the gradient's number to a word in device memory (`DeviceTable.stop`), and the updates do nothing from
then on. `step()` reads the sums of squares and, if they are not finite, the word.

The device measures the gradients of the other units, too, and these write the same word. When such a unit has
all its gradients, the word is copied to the host. The unit is updated if no gradient up to its last one has
written the word. So the same units are updated wherever they are: those whose last gradient came before the
first that is not finite.

With several ranks these are the sums of this rank's own shards. Gradients of all ranks come to them from RAM
or from devices, through upload buffers, in the order in which they are added.

Gradients are measured only on request. Then the device computes the sum of squares of each block of
cpu_adam.BLOCK elements of each gradient, with the CPU's bits. One copy brings all sums, one float64 per
block, to the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set

import numpy as np
import torch

from infinity.cpu_adam import BLOCK
from infinity.device_update.table import DeviceChunk, Stop, fresh_squares_launch, work_of
from infinity.device_update.update import DeviceUpdates, ParameterUpdate
from infinity.layout.chunks import Piece
from infinity.pages.gradient_copies import GradientCopies, GradientCopy
from infinity.pages.gradient_page import GradientPage
from infinity.pages.optimizer_page import States
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.store import Store
from infinity.planning.plan import UPLOAD_BUFFERS
from infinity.tiers.driver import Event
from infinity.tiers.link import Transfer, User

_NOT_MEASURED = np.zeros(0)


class DeviceUnits:
    """The units (groups of parameters) that the plan lets the device update, with their gradients.

    Every method is called under the runtime's lock.
    """

    def __init__(
        self,
        pages: Sequence[ParameterPage],
        gradients: Mapping[int, GradientPage],
        states: States,
        store: Store,
    ) -> None:
        """Prepare the updates of all units that the plan lets the device update; there must be at least one.

        pages: the parameter pages of all units. gradients: unit -> its gradient page. states: the optimizer
        pages. store: moves pages between tiers, and holds the plan.
        """
        self._pages = pages
        self._gradients = {unit: gradients[unit] for unit in sorted(store.plan.updated_on_device)}
        self._states = states
        self._store = store
        self._changed = True
        """Whether gradients may have changed since their sums of squares were last computed."""
        self.in_backward = store.plan.updates_in_backward
        """Whether units are updated in the backward; see [Note: updates in the backward]."""
        self._fresh: dict[tuple[int, int], torch.Tensor] = {}
        """(unit, index of a parameter) -> the gradient, (numel,) on the device. It waits for the update. If
        `step()` decides that, other code may read the gradient until `clear`. Empty unless `in_backward`, as
        are the next two attributes.
        """
        self.measured = 0
        """Number of gradients that were measured since gradients were cleared, those of all units."""
        self._queued: dict[int, int] = {}
        """Unit whose update is queued -> `measured` at that time."""
        assert store.workspace is not None and store.kernels is not None
        chunks = [
            self._chunk(unit, chunk_index)
            for unit in self._gradients
            for chunk_index in states.pages[unit].kept
        ]
        self._updates = DeviceUpdates(chunks, store.workspace, store.kernels)
        uploads = store.workspace[store.workspace.nbytes - UPLOAD_BUFFERS * store.plan.upload_bytes :]
        self._uploads = [*uploads.split(store.plan.upload_bytes)] if uploads.nbytes else []
        """The upload buffers, each uint8 (upload_bytes,); none with one rank."""
        self._last_uses: list[Event | None] = [None] * len(self._uploads)
        """For each upload buffer, an event after the kernel that has last read it."""
        self._next_upload = itertools.cycle(range(len(self._uploads)))

    @property
    def blocks(self) -> int:
        """Number of sums of squares that `copy_to_host` copies."""
        return self._updates.table.blocks

    def __contains__(self, unit: int) -> bool:
        return unit in self._gradients

    def add(self, unit: int, parameter: int, fresh: torch.Tensor) -> None:
        """Queue, on the device, the addition of a new gradient to a parameter's stored gradient. The first
        gradient since gradients were cleared replaces the stored one.

        fresh: the new gradient, (numel,) in memory order, on the device.
        """
        page = self._gradients[unit]
        self._changed = True
        self._updates.order()
        if self.in_backward:
            self._keep(page, parameter, fresh)
            return
        with torch.no_grad():
            for start, target, places in page.runs(parameter):
                part = fresh[start : start + target.numel()]
                self._store.link.uses(User.COMPUTE, target, writes=True, label="gradient")
                if parameter in page.content:
                    target.add_(part)
                else:
                    target.copy_(part)
                for chunk_index, begin in places:
                    page.chunks[chunk_index].blocks[parameter, begin] = _NOT_MEASURED

    def _keep(self, page: GradientPage, parameter: int, fresh: torch.Tensor) -> None:
        """Keep and measure a new gradient of a parameter, or the sum if there is one already."""
        with torch.no_grad():
            fresh = fresh.detach().to(page.stored_dtype(parameter))
            if parameter in page.content:  # other code may use autograd's tensor, too
                fresh = self._fresh[page.index, parameter] + fresh
        self._fresh[page.index, parameter] = fresh
        self._measure(page, parameter, fresh)

    def _measure(self, page: GradientPage, parameter: int, fresh: torch.Tensor) -> None:
        assert self._store.workspace is not None
        table = self._updates.table
        self._launch(fresh, table.squares(self._store.workspace)[table.place((page.index, parameter))])
        for chunk_index, piece in page.pieces(parameter):
            page.chunks[chunk_index].blocks[parameter, piece.start] = _NOT_MEASURED

    def _launch(self, fresh: torch.Tensor, sums: torch.Tensor) -> None:
        link, stop = self._store.link, self.next_stop()
        link.uses(User.COMPUTE, fresh, writes=True, label="fresh gradient")
        launch = fresh_squares_launch(fresh, sums, stop)
        self._updates.kernels.launch("infinity_fresh_squares", len(sums), launch.tobytes())
        link.uses(User.COMPUTE, sums, stop.word, writes=True, label="sums of squares")

    @property
    def _stop(self) -> torch.Tensor:
        assert self._store.workspace is not None
        return self._updates.table.stop(self._store.workspace)

    @property
    def _stop_here(self) -> torch.Tensor:
        """Where the host reads `_stop`; see `copy_stop`."""
        squares = self._store.squares
        return self._stop if squares is None else squares[-1:].view(torch.int32)[:1]

    def next_stop(self) -> Stop:
        """Number one more gradient, which the caller's kernel measures next on torch's current stream."""
        self._updates.order()
        self.measured += 1
        return Stop(self._stop, self.measured)

    def watch(self, fresh: torch.Tensor) -> None:
        """Have a gradient of a unit that the CPU updates, (n,) on the device, stop later updates there if it
        is not finite.
        """
        if fresh.numel():
            sums = torch.empty(-(-fresh.numel() // BLOCK), dtype=torch.float64, device=fresh.device)
            self._launch(fresh, sums)

    def copy_stop(self, copies: GradientCopies | None) -> GradientCopy | None:
        """Begin to copy the word that stops updates to the host, for `stopped_by`. None: the host reads the
        word itself. copies: None if the host can use the device's memory.
        """
        if copies is None:
            return None
        self._updates.order()
        self._store.link.uses(User.COMPUTE, self._stop, writes=False, label="stop")
        now = self._stop.clone()  # a kernel may write the word next
        return copies.copy(now, [(0, self._stop_here)], None)

    def stopped_by(self, measured: int) -> bool:
        """Whether one of the first `measured` gradients was not finite. Called after the end of a copy by
        `copy_stop` that began after they were measured. A later copy may be under way and leads to the same
        answer, because the first number that is written to the word stays.
        """
        return 0 < int(self._stop_here) <= measured

    def kept(self, unit: int, parameter: int) -> torch.Tensor | None:
        """The gradient of a parameter, (numel,) on the device, that has no page."""
        return self._fresh.get((unit, parameter))

    def stopped(self) -> Set[int]:
        """Return the units whose updates were queued in the backward and left out by the device, because a
        gradient that came before was not finite. Waits for the device.
        """
        if not self._queued:
            return frozenset()
        self._updates.order()
        first = int(self._store.copied_to_host(self._stop))
        return {unit for unit, measured in self._queued.items() if first and measured >= first}

    def clear(self) -> None:
        """Forget the gradients that wait for an update in the backward, and let updates run again."""
        if self.measured:
            self._updates.order()
            self._store.link.uses(User.COMPUTE, self._stop, writes=True, label="stop")
            self._stop.zero_()
            self._changed = True
        self.measured = 0
        self._fresh.clear()
        self._queued.clear()

    def consume(self, unit: int) -> None:
        """Drop the gradients of a unit, which an update that is queued in the backward uses."""
        for parameter in self._gradients[unit].content if unit in self else ():
            self._fresh.pop((unit, parameter), None)

    def drop(self, unit: int, parameter: int, *, finite: bool) -> None:
        """Forget the gradient of one parameter, before any update is queued in the backward. finite: whether
        all other gradients of units that the CPU updates are finite.
        """
        self._fresh.pop((unit, parameter), None)
        self._fresh, left = {}, self._fresh
        self.clear()
        self._fresh = left
        for key, each in left.items():  # the stop may have been that gradient's
            self._measure(self._gradients[key[0]], key[1], each)
        if not finite:
            self.measured += 1
            self._stop.fill_(self.measured)

    def add_piece(
        self,
        page: GradientPage,
        chunk_index: int,
        piece: Piece,
        fresh: torch.Tensor,
        *,
        again: bool,
        there: bool,
    ) -> list[Transfer]:
        """Queue the addition of a rank's gradient of a piece to the sum on the device.

        fresh: (piece.count,) in RAM, or `there`: in device memory of the rank, whose host knows that it has
        been written. again: whether it is added to the sum, or replaces it. Returns the copies to an upload
        buffer, which read `fresh` until they are done.
        """
        link, copies = self._store.link, []
        self._changed = True
        self._updates.order()
        sums = page.typed(chunk_index, page.home.view(page.offset(chunk_index), page.nbytes(chunk_index)))[
            piece.offset : piece.offset + piece.count
        ]
        most = self._uploads[0].nbytes // fresh.dtype.itemsize
        with torch.no_grad():
            for start in range(0, piece.count, most):
                part, target = fresh[start : start + most], sums[start : start + most]
                number = next(self._next_upload)
                upload, free = self._uploads[number][: part.nbytes], self._last_uses[number]
                copy_up = self._store.copy_from_device if there else self._store.copy_up
                copy = copy_up(upload, part.view(torch.uint8), after=free)
                copies.append(copy)
                link.fence(copy)
                link.uses(User.COMPUTE, upload, writes=False, label="gradient of a rank")
                link.uses(User.COMPUTE, target, writes=True, label="gradient")
                (target.add_ if again else target.copy_)(upload.view(part.dtype))
                self._last_uses[number] = link.record()
        page.chunks[chunk_index].blocks[piece.parameter, piece.start] = _NOT_MEASURED
        return copies

    def order(self) -> None:
        """Have work that is queued next on torch's current stream come after all changes of gradients."""
        self._updates.order()

    def copy_to_host(self) -> None:
        """Compute the sum of squares of each block of each gradient on the device, copy the sums to the host,
        and wait for them.

        The gradient pages hold the sums afterwards, and `GradientPage.squares` returns them. The copy comes
        after all work that is queued on the device. Does nothing if no gradient has changed since the last
        call.
        """
        if not self._changed or not self._updates.table.blocks:
            return
        assert self._store.workspace is not None
        if not self.in_backward:
            self._updates.measure()
        there = self._updates.table.squares(self._store.workspace)
        # Also where the CPU can use the device's memory, as the next sums take the place of these.
        kept = self._store.squares
        here = torch.empty_like(there) if kept is None else kept[: len(there)]
        self._store.link.uses(User.COMPUTE, there, writes=True, label="sums of squares")
        self._store.copy_down(here, there).wait()
        self._store.link.uses(User.HOST, here, writes=False, label="sums of squares")
        self._changed = False
        squares = here.numpy()
        for unit, page in self._gradients.items():
            for parameter in page.content:
                pieces = self._states.pages[unit].pieces(parameter)
                start = self._updates.table.place((unit, parameter)).start if pieces else 0
                for chunk_index, piece in pieces:
                    start, first = start + -(-piece.count // BLOCK), start
                    page.chunks[chunk_index].blocks[parameter, piece.start] = squares[first:start]

    def update(self, unit: int, updates: Mapping[int, ParameterUpdate], scale: float) -> None:
        """Queue the update of some parameters of a unit on the device, and return without waiting for it.

        Work that the device's stream gets later sees the new parameters. updates: index of a parameter in the
        unit -> its update. scale: factor by which stored gradients are multiplied to get the gradients that
        the optimizer sees.
        """
        own = self._states.pages[unit].pieces
        updates = {each: update for each, update in updates.items() if own(each)}
        if not updates:
            return
        for parameter in updates:
            self._prepare(unit, parameter)
            if parameter not in self._gradients[unit].content:
                self._write_zeros(unit, parameter)
        self._note_uses(unit)
        self._updates.update(
            {
                (unit, parameter): update._replace(gradient=self._fresh.get((unit, parameter)))
                for parameter, update in updates.items()
            },
            scale,
        )
        if self.in_backward:
            self._queued[unit] = self.measured
            for parameter in updates:
                self._updates.give_back(self._fresh[unit, parameter])
                if parameter not in self._gradients[unit].content:
                    del self._fresh[unit, parameter]
        written = self._store.link.record()
        self._pages[unit].home.written = self._states.pages[unit].home.written = written

    def _write_zeros(self, unit: int, parameter: int) -> None:
        """Fill a parameter's ranges of the gradient page with zeros, for the update to read. The gradient of
        the parameter is zero, and was not stored so far.
        """
        self._updates.order()
        page = self._gradients[unit]
        if self.in_backward:
            numel, dtype = page.layout.parameters[parameter].numel, page.stored_dtype(parameter)
            zeros = torch.zeros(numel, dtype=dtype, device=self._store.plan.device)
            self._store.link.uses(User.COMPUTE, zeros, writes=True, label="gradient")
            self._fresh[unit, parameter] = zeros
            return
        for _, target, _ in page.runs(parameter):
            self._store.link.uses(User.COMPUTE, target, writes=True, label="gradient")
            target.zero_()

    def _note_uses(self, unit: int) -> None:
        """Tell the memory checker, which tests use, what memory an update of the unit reads and writes."""
        homes = (self._pages[unit].home, self._states.pages[unit].home)
        written = [home.memory for home in homes if home.memory is not None]
        gradient = self._gradients[unit].home.memory
        gradients = [each for key, each in self._fresh.items() if key[0] == unit]
        if not self.in_backward:
            assert gradient is not None
            gradients.append(gradient)
        self._store.link.uses(User.COMPUTE, *gradients, writes=False, label="update")
        self._store.link.uses(User.COMPUTE, *written, writes=True, label="update")

    def _prepare(self, unit: int, parameter: int) -> None:
        """Prepare the optimizer states of a parameter for an update.

        Fills the states of chunks that have never been updated with their initial values. If the user has
        edited the parameter, sets its fp32 master to the parameter's values.
        """
        state = self._states.pages[unit]
        for chunk_index, piece in state.pieces(parameter):
            if not state.begun[chunk_index]:
                self._states.fill(state, chunk_index, self._content(unit, chunk_index))
                state.begun[chunk_index] = True
            if parameter in state.edited:
                arrays = state.arrays(chunk_index, self._content(unit, chunk_index))
                place = slice(piece.offset, piece.offset + piece.count)
                if "remainder" in arrays:
                    arrays["remainder"][place] = 0
                elif "master" in arrays:
                    arrays["master"][place] = self._parameters(unit, chunk_index)[place]

    def _chunk(self, unit: int, chunk_index: int) -> DeviceChunk:
        """Describe a chunk for DeviceUpdates: views of its gradients, parameters and optimizer states, and
        the keys (unit, index of the parameter) of the parameters that lie in the chunk.
        """
        page = self._gradients[unit]
        arrays = self._states.pages[unit].arrays(chunk_index, self._content(unit, chunk_index))
        parameters, chunk = self._parameters(unit, chunk_index), page.layout.chunks[chunk_index]
        if self.in_backward:  # each update says where its gradients are
            gradients = torch.empty(0, dtype=page.dtype(chunk_index), device=parameters.device)
        else:
            home = page.home.view(page.offset(chunk_index), page.nbytes(chunk_index))
            gradients = page.typed(chunk_index, home)
        work = work_of(chunk, gradients, parameters, arrays, self._states.rule.moments_of(arrays))
        return DeviceChunk(work, [(unit, each.parameter) for each in chunk.pieces])

    def _content(self, unit: int, chunk_index: int) -> torch.Tensor:
        """A view of a chunk's optimizer states in the unit's optimizer page, as uint8."""
        state = self._states.pages[unit]
        return state.home.view(state.offset(chunk_index), state.formats[chunk_index].nbytes)

    def _parameters(self, unit: int, chunk_index: int) -> torch.Tensor:
        """A view of a chunk's parameters in the unit's parameter page: (count,), in their dtype."""
        page = self._pages[unit]
        chunk = page.layout.chunks[chunk_index]
        dtype = page.layout.regions[chunk.region].dtype
        return page.home.view(page.shard.home_start(chunk_index), chunk.count * dtype.itemsize).view(dtype)
