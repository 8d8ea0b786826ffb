"""Filling: writes the initial values of a model's parameters to the homes of their pages."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from infinity.activations.heap import HeapGuard
from infinity.checkpoint.safetensors_files import Weights, load, open_weights
from infinity.layout.names import transformers_model
from infinity.layout.shards import PageShard
from infinity.layout.strides import part_in_memory_order
from infinity.model.materialize import Fill, materialize
from infinity.pages.home import Home
from infinity.pages.optimizer_page import States
from infinity.pages.store import Store
from infinity.planning.plan import Plan

Take = Callable[[torch.Tensor, int, int], torch.Tensor]
"""Function (parameter, first, count) that returns other values for elements [first, first + count) of a
parameter, flat in the order of memory, in RAM.
"""


def weights_for(model: nn.Module, path: str | os.PathLike[str]) -> Weights:
    """Open the weights at `path` for a model, as open_weights does.

    For a transformers model what save_pretrained writes is converted to the names and shapes that the model
    has. Of a converted tensor up to twice the bytes are in RAM. Raises ConfigError if it cannot be converted.
    """
    weights, theirs = open_weights(path), transformers_model(model)
    if theirs is None:
        return weights
    from infinity.checkpoint.conversion import ConvertedWeights

    return ConvertedWeights(theirs, weights)


class Filling:
    """Fills the parameter pages of one runtime, and of the optimizer pages what they lack of the masters."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        store: Store,
        *,
        homes: Sequence[Home],
        shards: Sequence[PageShard],
        states: States | None,
        parameters: Sequence[Sequence[nn.Parameter]],
    ) -> None:
        """homes, shards: by index of the unit, where the parameter page rests, and which bytes of the page
        are there. states: the optimizer pages; None for inference. parameters: those of each unit, in its
        order.
        """
        self._model = model
        self._plan = plan
        self._store = store
        self._homes = homes
        self._shards = shards
        self._states = states
        self._parameters = parameters
        self._places = {
            id(parameter): (unit, index)
            for unit, inside in enumerate(parameters)
            for index, parameter in enumerate(inside)
        }

    def fill(self, weights: str | os.PathLike[str] | None, heap: HeapGuard, take: Take | None = None) -> None:
        """Write the values of all parameters home, as far as this rank keeps them.

        weights: the file or directory with the values. None: take the values that the parameters have, or
        run the initialisers of parameters on the meta device. heap: the heap guard, which returns freed
        memory of the heap to the kernel. It is told how many bytes each parameter's values took. take: gives
        the values of parameters that are not on the meta device; None: they are their own.
        """

        def put(parameter: nn.Parameter, values: torch.Tensor) -> None:
            unit, index = self._places[id(parameter)]
            layout = self._plan.layout.units[unit].parameters[index]
            own = take is None or values is not parameter
            for first, count in self._kept(unit, index):
                if own:
                    part = part_in_memory_order(values.detach(), layout.stride, first, count)
                    self._put(unit, index, first, part.cpu())
                elif take is not None:
                    self._put(unit, index, first, take(parameter, first, count))
            heap.allocated(values.nbytes)

        if weights is not None:
            load(self._model, weights_for(self._model, weights), put, self._plan.device)
            return
        self._initialise(put)

    def _initialise(self, put: Fill) -> None:
        if any(each.is_meta for each in (*self._model.parameters(), *self._model.buffers())):
            materialize(self._model, self._plan.device, put)
        for parameters in self._parameters:
            for parameter in parameters:
                if not parameter.is_meta:
                    put(parameter, parameter)

    def _kept(self, unit: int, index: int) -> Iterator[tuple[int, int]]:
        """Yield (first element, number of elements) of the ranges of a parameter that its home has here."""
        layout = self._plan.layout.units[unit]
        start, size = layout.start(index), layout.parameters[index].dtype.itemsize
        for each in self._shards[unit].pieces(start, layout.parameters[index].numel * size):
            yield (each.page_start - start) // size, each.nbytes // size

    def _put(self, unit: int, index: int, first: int, values: torch.Tensor) -> None:
        """Write values of a parameter's elements from `first` on to the home of its page.

        values: flat, in RAM, in any floating dtype. The home must have these elements.
        """
        layout = self._plan.layout.units[unit]
        dtype = layout.parameters[index].dtype
        states = self._states
        encoded = values.to(dtype) if states is None else states.encode(unit, index, values, first)
        start = layout.start(index) + first * dtype.itemsize
        (held,) = self._shards[unit].pieces(start, encoded.nbytes)
        self._store.patch(self._homes[unit], held.home_start, encoded)
