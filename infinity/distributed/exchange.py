"""Exchange: ranks take ranges of each other's tensors while their runtimes are made.

All ranks start with the parameters, buffers and optimizer states of rank 0, whatever their own are. Rank 0
gives them from its model and optimizer. Each other rank asks for the ranges that it keeps, and gets no more.
Ranks also take rank commits from each other in this way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from infinity.distributed.message import MessageKind, What
from infinity.distributed.transfers import Delivery
from infinity.formats.encodings import rounds_to
from infinity.layout.strides import in_memory_order
from infinity.pages.optimizer_page import States
from infinity.ranks import Give, Given, Present, SingleExchange

if TYPE_CHECKING:
    from infinity.distributed.communicator import Communicator

_VALUES = 16 << 20
"""The most bytes of values in one request."""
_STATES = 4 << 20
"""The most elements of states in one request: whole blocks of int8 codes, so that each range is encoded as in
the whole parameter.
"""
_MASTER = "master"


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

    def take(
        self, number: int, first: int, into: torch.Tensor, count: int | None = None, *, server: int = 0
    ) -> None:
        """Copy elements [first, first + count) of tensor `number` from the rank `server`.

        into: contiguous, in RAM, in the dtype that the server gives. count: by default the number of elements
        of `into`. Raises RankFailure if the server is lost, and RankDivergence if the server gives another
        number of bytes.
        """
        self.ask(number, first, into, count, server=server).wait()

    def ask(
        self, number: int, first: int, into: torch.Tensor, count: int | None = None, *, server: int = 0
    ) -> Delivery:
        """Begin to take a range, and return the transfer. Arguments: as for `take`."""
        wire = self._communicator.wire
        delivery = wire.expect(server, [into.view(torch.uint8)], label=self._label)
        wanted = [self._number, number, first, into.numel() if count is None else count]
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
def initial_values(
    communicator: Communicator, model: nn.Module
) -> Iterator[Callable[..., torch.Tensor] | None]:
    """Context of SingleRank.initial_values. model: equal on all ranks except for its values."""
    tensors = [*model.parameters(), *model.buffers()]
    numbers = {id(each): number for number, each in enumerate(tensors)}
    exchange = Exchange(communicator, "initial values", functools.partial(_values, tensors))

    def take(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
        flat = torch.empty(count, dtype=tensor.dtype, device="cpu")
        step = max(1, _VALUES // max(1, flat.itemsize))
        for start in range(0, count, step):
            exchange.take(numbers[id(tensor)], first + start, flat[start : start + step])
        return flat

    state = torch.get_rng_state()
    serves = communicator.share.rank == 0
    heard = communicator.agree("offload()", generator=bytes(state.tolist()).hex() if serves else None)
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(heard[0]["generator"])), dtype=torch.uint8))
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


def _values(tensors: Sequence[torch.Tensor], number: int, first: int, count: int) -> torch.Tensor:
    """Return elements [first, first + count) of a tensor, in memory order, in RAM."""
    tensor = tensors[number].detach()
    return in_memory_order(tensor, _dense(tensor))[first : first + count].cpu().contiguous()


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


class _Told(NamedTuple):
    """Rank 0's description of one parameter's optimizer state."""

    unit: int
    parameter: int
    step: int | None
    """Number of updates; None if the state does not say."""
    names: Sequence[str]
    """The names of the moments, then "master" if the state has a master."""
    first_number: int
    """The number in the exchange of the tensor that `names` names first; the others follow."""


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
        self._tensors: list[tuple[torch.Tensor, Sequence[int]]] = []
        """Number in the exchange -> (rank 0's tensor, strides of its parameter); empty on other ranks."""
        self._exchange = Exchange(communicator, "initial states", functools.partial(_part, self._tensors))

    def write(self) -> None:
        """Write this rank's optimizer pages, as SingleRank.write_states says. All ranks call this."""
        for unit, parameter, state in self._given:
            self._states.write(unit, parameter, state)
        told = self._tell()
        if not self._serves:
            for each in told:
                self._take_moments(each)
        with_master = [each for each in told if _MASTER in each.names]
        unfit = [at for at, each in enumerate(with_master) if not self._fits_here(each)]
        # Each rank checks the elements that it keeps. A master that does not fit on one rank is used on none,
        # so all are taken a second time, when that is known: no rank has room for those of all parameters.
        service_thread = self._communicator.service_thread
        heard = self._communicator.gather("offload()", {"unfit_masters": unfit}, service_thread.has_given)
        unused = {at for each in heard.values() for at in each["unfit_masters"]}
        for at, each in enumerate(with_master):
            if at not in unused:
                for first, master in self._parts(each, _MASTER):
                    self._states.encode(each.unit, each.parameter, master, first)
        self._exchange.end()

    def _tell(self) -> list[_Told]:
        """Tell all ranks which states rank 0 has, and return their descriptions, parameter by parameter."""
        mine = []
        for unit, parameter, state in self._given:
            names = [name for name in (*self._states.rule.moments, _MASTER) if name in state]
            stride = self._states.pages[unit].layout.parameters[parameter].stride
            self._tensors += [(state[name].detach(), stride) for name in names]
            mine.append((unit, parameter, int(state["step"]) if "step" in state else None, names))
        heard = self._communicator.agree("offload()", states=mine if self._serves else None)
        told, number = [], 0
        for unit, parameter, step, names in heard[0]["states"]:
            told.append(_Told(unit, parameter, step, names, number))
            number += len(names)
        return told

    def _take_moments(self, told: _Told) -> None:
        moments = [name for name in told.names if name != _MASTER]
        self._states.begin(told.unit, told.parameter, moments, told.step)
        for name in moments:
            for first, values in self._parts(told, name):
                self._states.write_moment(told.unit, told.parameter, name, values, first)

    def _fits_here(self, told: _Told) -> bool:
        """Whether a parameter's master rounds to the present values of all elements that this rank keeps."""
        return all(
            rounds_to(master, self._present(told.unit, told.parameter, first, master.numel()))
            for first, master in self._parts(told, _MASTER)
        )

    def _parts(self, told: _Told, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, fp32 values) of all ranges of a moment or master that this rank keeps."""
        number = told.first_number + told.names.index(name)
        for _, whole in self._states.pages[told.unit].pieces(told.parameter):
            for piece in whole.parts(_STATES):
                if self._serves:
                    yield piece.start, _part(self._tensors, number, piece.start, piece.count)
                    continue
                values = torch.empty(piece.count, dtype=torch.float32, device="cpu")
                self._exchange.take(number, piece.start, values)
                yield piece.start, values


def _part(
    tensors: Sequence[tuple[torch.Tensor, Sequence[int]]], number: int, first: int, count: int
) -> torch.Tensor:
    """Return elements [first, first + count) of tensor `number`, in memory order, as float32 on the CPU.

    tensors: pairs (tensor, strides). The strides, in elements, define the memory order.
    """
    tensor, stride = tensors[number]
    return in_memory_order(tensor, stride)[first : first + count].to("cpu", torch.float32)
