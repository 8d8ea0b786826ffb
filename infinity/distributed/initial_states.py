"""Initial states: optimizer states that ranks take from rank 0 while their runtimes are made.

An optimizer may have states before `offload`, such as those of an earlier run. As with the values of
parameters, rank 0's are the ones that count. Rank 0 tells which parameters have states, and the other ranks
ask for the ranges that they keep. What their own optimizers have is not looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from infinity.distributed.communicator import Communicator
from infinity.distributed.exchange import Exchange
from infinity.distributed.message import Message
from infinity.formats.encodings import rounds_to
from infinity.layout.strides import in_memory_order
from infinity.pages.optimizer_page import States

_WINDOW = 4 << 20
"""The most elements that are asked for at once: whole blocks of int8 codes, so that each range is encoded as
the whole parameter would be.
"""
_MASTER = "master"

Given = tuple[int, int, Mapping[str, torch.Tensor]]
"""Unit, index of a parameter in the unit, and the parameter's state, as in OptimizerCore.write_state."""
Present = Callable[[int, int, int, int], torch.Tensor]
"""Function (unit, parameter, first, count) that returns elements [first, first + count) of a parameter's
present values: (count,) in the order of memory, in the parameter's dtype. This rank's home has them.
"""


class _Told(NamedTuple):
    """What rank 0 tells of a parameter's state."""

    unit: int
    parameter: int
    step: int | None
    """Number of updates; None if the state does not say."""
    names: Sequence[str]
    """The names of the moments, and behind them "master" if there is a master."""
    first_number: int
    """The number of the tensor of the first name in the exchange; the others follow."""


class InitialStates:
    """The optimizer states of rank 0 before `offload`, as all ranks get them."""

    def __init__(self, communicator: Communicator, states: States, present: Present) -> None:
        """states: the optimizer pages of this rank, which have the masters of the initial values already."""
        self._communicator = communicator
        self._states = states
        self._present = present
        self._given: Sequence[Given] = ()
        self._tensors: list[tuple[torch.Tensor, Sequence[int]]] = []
        """Number -> what rank 0 serves, and the strides of its parameter; empty on other ranks."""
        self._exchange = Exchange(communicator, "initial states", functools.partial(_part, self._tensors))

    @property
    def serves(self) -> bool:
        """Whether this rank's states are the ones that all ranks get."""
        return self._communicator.ranks.rank == 0

    def write(self, given: Sequence[Given]) -> list[tuple[int, Message]]:
        """Write rank 0's states to the optimizer pages, as far as this rank keeps them. All ranks call this.

        given: the states of rank 0, of parameters that are in pages; not used on other ranks. A master is
        used only if all of its elements round to the parameter's present values, as with one rank. Returns
        messages about other things that have come meanwhile. Raises ConfigError on rank 0 for the state of a
        frozen parameter, and RankFailure.
        """
        self._given = given if self.serves else ()
        for unit, parameter, state in self._given:
            self._states.write(unit, parameter, state)
        told = self._tell()
        if not self.serves:
            for each in told:
                self._take_moments(each)
        with_master = [each for each in told if _MASTER in each.names]
        unfit = [at for at, each in enumerate(with_master) if not self._fits_here(each)]
        early = self._exchange.end()
        if not with_master:
            return early
        # Each rank checks the elements that it keeps. A master that does not fit on one rank is used on none,
        # so all are taken a second time, when that is known: no rank has room for those of all parameters.
        heard = self._communicator.agree("offload()", unfit_masters=unfit)
        unused = {at for each in heard.values() for at in each["unfit_masters"]}
        for at, each in enumerate(with_master):
            if at not in unused:
                for first, master in self._parts(each, _MASTER):
                    self._states.encode(each.unit, each.parameter, master, first)
        return early + self._exchange.end()

    def _tell(self) -> list[_Told]:
        """What all ranks know of rank 0's states, parameter by parameter."""
        mine = []
        for unit, parameter, state in self._given:
            names = [name for name in (*self._states.rule.moments, _MASTER) if name in state]
            stride = self._states.pages[unit].layout.parameters[parameter].stride
            self._tensors += [(state[name].detach(), stride) for name in names]
            mine.append((unit, parameter, int(state["step"]) if "step" in state else None, names))
        heard = self._communicator.agree("offload()", states=mine if self.serves else None)
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
        """Yield (first element, values) of all ranges of a moment or master that this rank keeps.

        values: float32 (count,) in RAM, in the order of memory; at most _WINDOW elements.
        """
        number = told.first_number + told.names.index(name)
        for _, whole in self._states.pages[told.unit].pieces(told.parameter):
            for piece in whole.parts(_WINDOW):
                if self.serves:
                    yield piece.start, _part(self._tensors, number, piece.start, piece.count)
                    continue
                values = torch.empty(piece.count, dtype=torch.float32, device="cpu")
                self._exchange.take(number, piece.start, values)
                yield piece.start, values


def _part(
    tensors: Sequence[tuple[torch.Tensor, Sequence[int]]], number: int, first: int, count: int
) -> torch.Tensor:
    """Elements [first, first + count) of a tensor in the order of its parameter's strides, as float32."""
    tensor, stride = tensors[number]
    return in_memory_order(tensor, stride)[first : first + count].to("cpu", torch.float32)
