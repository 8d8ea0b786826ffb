"""Division: the units and the chunk length into which a model is divided, told by names. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.cpu_adam import BLOCK
from infinity.layout.chunks import ModelLayout
from infinity.layout.units import Grouping, Survey


@dataclass(frozen=True)
class Division:
    """The way in which a model is divided into units and chunks.

    It needs no model, so that a checkpoint can keep it. Two runs that divide a model alike have the same
    durable places (infinity/planning/slab_layout.py).
    """

    units: tuple[tuple[str, tuple[str, ...]], ...]
    """The units: pairs (path of the module, canonical names of the parameters in the order of the page). The
    canonical name of a parameter is the first of its names in `named_parameters`.
    """
    chunk_elements: int
    """Elements of a chunk, which is a part of a unit that is updated as a whole."""

    @staticmethod
    def of(layout: ModelLayout) -> Division:
        """Return the division of a model that is laid out as `layout`."""
        units = ((unit.name, tuple(each.names[0] for each in unit.parameters)) for unit in layout.units)
        return Division(tuple(units), layout.chunk_elements)

    def grouping(self, surveyed: Survey) -> Grouping | None:
        """Return the grouping of a surveyed model's parameters into this division's units, or None if the
        division is not one of this model.

        It is one if it has each parameter's canonical name exactly once and no other names, no unit is empty,
        and `chunk_elements` is a positive multiple of BLOCK.
        """
        indices = {parameter.names[0]: index for index, parameter in enumerate(surveyed.parameters)}
        names = [name for _, members in self.units for name in members]
        if len(names) != len(indices) or set(names) != indices.keys():
            return None
        if not all(members for _, members in self.units):
            return None
        if self.chunk_elements <= 0 or self.chunk_elements % BLOCK:
            return None
        return tuple((path, tuple(indices[name] for name in members)) for path, members in self.units)
