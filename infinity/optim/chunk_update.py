"""Chunk update: what the update threads compute for one chunk, once all of its bytes are in host RAM."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity import cpu_adam
from infinity.formats.optimizer_rules import AVERAGE
from infinity.optim.decision import Decision
from infinity.pages.gradient_page import GradientPage
from infinity.pages.optimizer_page import States
from infinity.pages.parameter_page import ParameterPage

Memory = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(a chunk's slice of the parameter page, its gradient, its optimizer states), each uint8 in host RAM."""


class ChunkUpdate:
    """Submits the updates of one chunk to the update threads.

    The first update is described to the threads in full. Later calls pass only what differs from the first.
    """

    def __init__(
        self,
        page: ParameterPage,
        states: States,
        gradients: GradientPage,
        chunk_index: int,
        threads: cpu_adam.ThreadPool,
    ) -> None:
        self.page = page
        self.state_page = states.pages[page.index]
        self.gradient_page = gradients
        self.chunk_index = chunk_index
        self.chunk = page.layout.chunks[chunk_index]
        self.dtype = page.layout.regions[self.chunk.region].dtype
        """Dtype of the chunk's parameters."""
        self.rests = all([home.in_place for home in (page.home, gradients.home, self.state_page.home)])
        """Whether the homes of the chunk's parameter, gradient and optimizer pages are all in host RAM."""
        self.numel = 0
        """Number of parameter elements that the update submitted last changes."""
        self._states = states
        self._threads = threads
        self._form: cpu_adam.UpdateForm | None = None
        """The dtypes, length and places of the first update's arrays, with which `submit` describes all
        later updates; None before the first update.
        """
        self._addresses: Sequence[int] | None = None
        """Addresses of the arrays that updates use (parameters, gradient and states), kept from the first
        update on if `rests`; None otherwise.
        """

    def submit(
        self, decision: Decision, memory: Memory, *, awaited: bool
    ) -> cpu_adam.Ticket[cpu_adam.UpdateResult]:
        """Submit an update of the chunk to the update threads.

        Returns a ticket at once. decision: the parameters to update, their hyper-parameters and the scale.
        memory: the bytes that the update reads and changes; they stay in use until the ticket is done.
        awaited: whether the caller will wait for the ticket next and take part in the computation then.
        """
        if self.chunk_index in decision.fresh:
            self._states.fill(self.state_page, self.chunk_index, memory[2])
        if decision.edited:
            self._follow_edits(decision, memory)
        if decision.zeros:
            self._write_zeros(decision, memory)
        chosen = decision.parameters
        segments = [
            (each.offset, each.count, chosen[each.parameter][0], each.start, chosen[each.parameter][1])
            for each in self.chunk.pieces
            if each.parameter in chosen
        ]
        averages = [
            (each.offset, each.count, cpu_adam.AVERAGED, each.start, 0)
            for each in self.chunk.pieces
            if each.parameter in decision.averaged
        ]
        self.numel = segments[0][1] if len(segments) == 1 else sum([each[1] for each in segments])
        if averages and not segments:  # without a gradient there is no form for later updates
            return self._threads.submit(self._work(decision, memory, averages), awaited=awaited)
        segments += averages
        if self._form is None:
            return self._submit_first(self._work(decision, memory, segments), memory, awaited)
        return self._threads.submit_again(
            self._form,
            self._form.addresses(memory) if self._addresses is None else self._addresses,
            segments,
            decision.native,
            scale=decision.scale,
            average_step=decision.average,
            owners=memory,
            awaited=awaited,
        )

    def _submit_first(
        self, work: cpu_adam.Update, memory: Memory, awaited: bool
    ) -> cpu_adam.Ticket[cpu_adam.UpdateResult]:
        ticket = self._threads.submit(work, awaited=awaited)
        try:
            self._form = cpu_adam.UpdateForm.of(work, memory)
            self._addresses = self._form.addresses(memory) if self.rests else None
        except BaseException:
            ticket.wait()  # no caller gets the ticket
            raise
        return ticket

    def forget_addresses(self) -> None:
        """Forget the addresses that were kept from the first update, because the arrays may move.

        All later updates take the addresses from the `memory` that `submit` is given.
        """
        self._addresses = None

    def _work(
        self, decision: Decision, memory: Memory, segments: Sequence[tuple[int, int, int, int, int]]
    ) -> cpu_adam.Update:
        """Return the full description of an update, with all its arrays. decision, memory: as in `submit`.

        segments: for each parameter in the chunk that the update changes, and behind them for each that is
        only averaged, the fields of a cpu_adam.Segment: (start, count, hyper, index, seed).
        """
        parameter, gradient, state = memory
        arrays = self.state_page.arrays(self.chunk_index, state)
        updates = not segments or segments[0][2] != cpu_adam.AVERAGED
        return cpu_adam.Update(
            grad=self.gradient_page.typed(self.chunk_index, gradient) if updates else None,
            segments=[cpu_adam.Segment(*each) for each in segments],
            hypers=decision.hypers,
            scale=decision.scale,
            average=arrays.get(AVERAGE),
            average_step=decision.average,
            **self._states.rule.moments_of(arrays),
            **self._masters(self._typed(parameter), arrays),
        )

    def reads_gradient(self, decision: Decision) -> bool:
        """Whether the update needs the chunk's stored gradient: not all that it uses of it are zeros."""
        chosen, zeros = decision.parameters, decision.zeros
        return not zeros or any(
            each.parameter in chosen and each.parameter not in zeros for each in self.chunk.pieces
        )

    def _write_zeros(self, decision: Decision, memory: Memory) -> None:
        """Write the gradients of zeros, which are not stored, into `memory`, where the update reads them."""
        gradient = self.gradient_page.typed(self.chunk_index, memory[1])
        for piece in self.chunk.pieces:
            if piece.parameter in decision.zeros:
                gradient[piece.offset : piece.offset + piece.count] = 0

    def _follow_edits(self, decision: Decision, memory: Memory) -> None:
        """Set the fp32 masters in `memory` of parameters that user code has edited to the edited values."""
        parameter, arrays = memory[0], self.state_page.arrays(self.chunk_index, memory[2])
        for piece in self.chunk.pieces:
            if piece.parameter in decision.edited:
                place = slice(piece.offset, piece.offset + piece.count)
                if "remainder" in arrays:
                    arrays["remainder"][place] = 0
                elif "master" in arrays:
                    arrays["master"][place] = self._typed(parameter)[place]

    def _typed(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter[: self.chunk.count * self.dtype.itemsize].view(self.dtype)

    def _masters(self, parameter: torch.Tensor, arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if "remainder" in arrays:
            return {"parameter": parameter, "remainder": arrays["remainder"]}
        if "master" in arrays:
            return {"parameter": arrays["master"], "copy": parameter}
        return {"parameter": parameter}
