"""Exchange: ranks take ranges of each other's tensors while their runtimes are made.

All ranks start with the parameters, buffers and optimizer states of rank 0, whatever their own are. Rank 0
gives them from its model and optimizer. Each other rank asks for the ranges that it keeps, and gets no more.
Ranks also take rank commits from each other in this way.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from infinity.distributed.message import MessageKind, What
from infinity.distributed.transfers import Delivery
from infinity.formats.encodings import rounds_to
from infinity.layout.strides import part_in_memory_order
from infinity.pages.optimizer_page import States
from infinity.ranks import Give, Given, Present, SingleExchange, Take

if TYPE_CHECKING:
    from infinity.distributed.communicator import Communicator

_MOST_BYTES = 16 << 20
"""The most bytes in one request."""
_STATES = 4 << 20
"""The most elements of states in RAM at once: whole blocks of int8 codes, so that each range is encoded as in
the whole parameter.
"""
_MASTER = "master"
_Tensor = tuple[torch.Tensor, Sequence[int]]
"""A tensor, and the strides, in elements, that define the order of its elements in memory."""


class Exchange(SingleExchange):
    """Lets ranks take ranges of each other's tensors, in any order. All ranks make it, and end it.

    Tensors are named by numbers. The service thread gives ranges of this rank's tensors.
    """

    def __init__(self, communicator: Communicator, label: str, give: Give) -> None:
        """label: what the tensors are, such as "initial values", for counters and errors. give: returns what
        this rank has.
        """
        self._communicator = communicator
        self._label = label
        self._number = communicator.service_thread.open_exchange(label, give)

    def take(self, number: int, first: int, into: torch.Tensor, *, server: int = 0) -> None:
        """Fill `into` with elements of a tensor of another rank; see SingleExchange.take.

        Raises RankFailure if the server is lost, and RankDivergence if it gives another number of bytes.
        """
        step = _MOST_BYTES // into.itemsize
        for start in range(0, into.numel(), step):
            self.ask(number, first + start, into[start : start + step], server=server).wait()

    def ask(self, number: int, first: int, into: torch.Tensor, *, server: int = 0) -> Delivery:
        """Begin to take a range in one request, and return the transfer. Arguments: as for `take`."""
        wire = self._communicator.wire
        delivery = wire.expect(server, [into.view(torch.uint8)], label=self._label)
        wanted = [self._number, number, first, into.numel()]
        wire.post(server, MessageKind.REQUEST, delivery.number, What.INITIAL, *wanted)
        return delivery

    def end(self) -> None:
        """Wait until all ranks end the exchange. Raises RankFailure, and RankDivergence if a rank neither
        asks for more nor ends it within the time-out.
        """
        self._communicator.barrier.agree(
            f"the end of the exchange of {self._label}", patient=self._communicator.service_thread.has_given
        )
        self._communicator.service_thread.close_exchange()


@contextmanager
def initial_values(communicator: Communicator, model: nn.Module) -> Iterator[Take | None]:
    """Context of SingleRank.initial_values. model: equal on all ranks except for its values."""
    tensors = [*model.parameters(), *model.buffers()]
    numbers = {id(each): number for number, each in enumerate(tensors)}
    give = functools.partial(_part, [(each, _dense(each)) for each in tensors], None)
    exchange = Exchange(communicator, "initial values", give)

    def take(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
        flat = torch.empty(count, dtype=tensor.dtype, device="cpu")
        exchange.take(numbers[id(tensor)], first, flat)
        return flat

    state = torch.get_rng_state()
    serves = communicator.share.rank == 0
    heard = communicator.gather("offload()", state.tolist() if serves else None)
    torch.set_rng_state(torch.tensor(heard[0], dtype=torch.uint8))
    try:
        yield None if serves else take
    finally:
        if not serves:
            torch.set_rng_state(state)
    with torch.no_grad():
        for buffer in model.buffers() if not serves else ():
            if not buffer.is_meta:
                there = take(buffer, 0, buffer.numel()).as_strided(buffer.shape, _dense(buffer))
                _apart(buffer, buffer.stride()).copy_(_apart(there, buffer.stride()))
    exchange.end()


def _apart(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Return a view without repeated elements: each dimension of stride 0, as an expanded tensor has, is
    narrowed to its first element. stride: the strides of the tensor in memory.
    """
    for dimension, (size, step) in enumerate(zip(tensor.shape, stride, strict=True)):
        if step == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _dense(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's strides if its elements fill one range of memory, else contiguous strides."""
    return torch.empty_like(tensor, device="meta").stride()


class InitialStates:
    """Gives the optimizer pages of all ranks the states of rank 0's optimizer.

    Rank 0 tells which parameters have states. States of other ranks' optimizers are ignored.
    """

    def __init__(
        self, communicator: Communicator, states: States, given: Sequence[Given], present: Present
    ) -> None:
        """states, given, present: as for SingleRank.write_states."""
        self._communicator = communicator
        self._states = states
        self._present = present
        self._serves = communicator.share.rank == 0
        self._given = given if self._serves else ()
        self._tensors: list[_Tensor] = []
        """Number in the exchange -> rank 0's tensor; empty on other ranks."""
        give = functools.partial(_part, self._tensors, torch.float32)
        self._exchange = Exchange(communicator, "initial states", give)

    def write(self) -> None:
        """Write this rank's optimizer pages, as SingleRank.write_states says. All ranks call this."""
        for unit, parameter, state in self._given:
            self._states.write(unit, parameter, state)
        told = self._communicator.agree("offload()", states=self._describe())[0]["states"]
        masters = []
        for unit, parameter, step, numbers in told:
            if _MASTER in numbers:
                masters.append((unit, parameter, numbers.pop(_MASTER)))
            if not self._serves:
                self._states.begin(unit, parameter, [*numbers], step)
                for name, number in numbers.items():
                    for first, values in self._parts(unit, parameter, number):
                        self._states.write_moment(unit, parameter, name, values, first)
        unfit = [at for at, each in enumerate(masters) if not self._fits_here(*each)]
        # Each rank checks the elements that it keeps. A master that does not fit on one rank is used on none,
        # so all are taken a second time, when that is known: no rank has room for those of all parameters.
        service_thread = self._communicator.service_thread
        heard = self._communicator.gather("offload()", unfit, service_thread.has_given)
        unused = set().union(*heard.values())
        for at, (unit, parameter, number) in enumerate(masters):
            if at not in unused:
                for first, master in self._parts(unit, parameter, number):
                    self._states.encode(unit, parameter, master, first)
        self._exchange.end()

    def _describe(self) -> list[tuple[int, int, int | None, dict[str, int]]]:
        """Return what rank 0 has: unit, parameter, its number of updates or None, and for each moment and the
        master the tensor's number in the exchange.
        """
        found = []
        for unit, parameter, state in self._given:
            stride = self._states.pages[unit].layout.parameters[parameter].stride
            numbers = {}
            for name in (*self._states.rule.moments, _MASTER):
                if name in state:
                    numbers[name] = len(self._tensors)
                    self._tensors.append((state[name], stride))
            found.append((unit, parameter, int(state["step"]) if "step" in state else None, numbers))
        return found

    def _fits_here(self, unit: int, parameter: int, number: int) -> bool:
        """Whether a parameter's master rounds to the present values of all elements that this rank keeps."""
        return all(
            rounds_to(master, self._present(unit, parameter, first, master.numel()))
            for first, master in self._parts(unit, parameter, number)
        )

    def _parts(self, unit: int, parameter: int, number: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, fp32 values) of all ranges of a moment or master that this rank keeps."""
        for _, whole in self._states.pages[unit].pieces(parameter):
            for piece in whole.parts(_STATES):
                if self._serves:
                    yield piece.start, _part(self._tensors, torch.float32, number, piece.start, piece.count)
                    continue
                values = torch.empty(piece.count, dtype=torch.float32, device="cpu")
                self._exchange.take(number, piece.start, values)
                yield piece.start, values


def _part(
    tensors: Sequence[_Tensor], dtype: torch.dtype | None, number: int, first: int, count: int
) -> torch.Tensor:
    """Return elements [first, first + count) of tensor `number`, in memory order, in RAM. dtype: None: the
    tensor's own.
    """
    tensor, stride = tensors[number]
    part = part_in_memory_order(tensor.detach(), stride, first, count)
    return part.to("cpu", dtype or tensor.dtype).contiguous()
