"""Array source: what a checkpoint holds of each parameter, and how its arrays are read.

Elements of a parameter are counted in memory order: the order of their addresses in the tensor of the model
that was saved. So an array does not depend on the pages and chunks in which it lay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from infinity.formats.optimizer_rules import StateArray, state_arrays
from infinity.layout.chunks import ModelLayout
from infinity.pages.optimizer_page import States

VALUES = "values"
"""The name of the array that holds a parameter's elements in the dtype of its page. The names of the other
arrays are those of `StateArray`.
"""


@dataclass(frozen=True)
class SavedOptimizer:
    """The optimizer of a saved run: what decides which state arrays there are, and what they mean."""

    name: str
    """The name of the optimizer's class in torch.optim."""
    states: str
    """The format of the moments: "fp32", "bf16" or "int8"."""
    moments: tuple[str, ...]
    """The keys of the moments in torch's state, in the order in which a page holds the moments."""
    averaged: int | None
    """Number of steps of which running averages of masters have the values, or 0 if they have none yet. None
    if the run keeps no averages.
    """

    @staticmethod
    def of(states: States) -> SavedOptimizer:
        """The optimizer of a running model. states: the model's optimizer states."""
        rule = states.rule
        averaged = None if rule.average is None else states.averaged
        return SavedOptimizer(rule.name, rule.states, rule.moments, averaged)


@dataclass(frozen=True)
class SavedParameter:
    """One parameter of a saved run, without its arrays."""

    names: tuple[str, ...]
    """All names under which the parameter was registered. The first name is the canonical name."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Strides in elements of the tensor that was saved; they say what memory order is."""
    dtype: torch.dtype
    """The dtype of the parameter's elements in its page."""
    trainable: bool
    step: int
    """Number of updates that the parameter had."""
    has_moments: bool
    edited: bool
    """Whether user code had edited the parameter since its last update. If so, its values are its fp32
    master, and the bits of the master in its state arrays are out of date.
    """

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def state_arrays(self, optimizer: SavedOptimizer | None) -> tuple[StateArray, ...]:
        """The state arrays that the checkpoint holds of the parameter. optimizer: that of the saved run."""
        if optimizer is None or not self.trainable:
            return ()
        moments = optimizer.moments if self.has_moments else ()
        return state_arrays(self.dtype, moments, optimizer.states, average=bool(optimizer.averaged))


class ArraySource(Protocol):
    """A checkpoint from which parameters and their states are restored."""

    @property
    def optimizer(self) -> SavedOptimizer | None:
        """The optimizer of the saved run; None if the run had none."""
        ...

    def parameters(self) -> Mapping[str, SavedParameter]:
        """All parameters by their canonical names."""
        ...

    def read(self, name: str, array: str, first: int, count: int) -> torch.Tensor:
        """Read the entries of an array that belong to the parameter's elements [first, first + count).

        name: the parameter's canonical name. array: VALUES, or the name of one of its state arrays. first: a
        multiple of 4096. count: at least 1; 4096 divides it, or the range ends with the parameter. Values of
        a frozen parameter may begin and end anywhere. Returns a flat CPU tensor of the dtype in which the
        array is stored. Raises StorageError if the bytes cannot be read, and CorruptState if they are not
        those that were saved.
        """
        ...


def saved_parameters(layout: ModelLayout, states: States | None) -> dict[str, SavedParameter]:
    """Describe all parameters of a running model, by canonical name, as a checkpoint made now would.

    layout: the model's layout. states: the optimizer states; None for inference.
    """
    found = {}
    for unit, unit_layout in enumerate(layout.units):
        page = None if states is None else states.pages[unit]
        for index, each in enumerate(unit_layout.parameters):
            found[each.names[0]] = SavedParameter(
                names=each.names,
                shape=tuple(each.shape),
                stride=each.stride,
                dtype=each.dtype,
                trainable=each.trainable,
                step=0 if page is None else page.steps[index],
                has_moments=page is not None and index in page.has_moments,
                edited=page is not None and index in page.edited,
            )
    return found
