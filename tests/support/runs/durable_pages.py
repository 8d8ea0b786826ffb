"""Pages of small models with their parts and places on disk, as a runtime makes them, but without one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from infinity.config import Precision
from infinity.formats.optimizer_rules import Rule, StateFormat
from infinity.layout.chunks import ModelLayout, UnitLayout, build
from infinity.layout.shards import ALONE, PageShard
from infinity.layout.units import survey
from infinity.pages.home import Home
from infinity.pages.parts import PageParts, Part, parameter_parts, state_parts
from infinity.planning.slab_layout import SlabLayout, slab_layout
from infinity.tiers import Tier


@dataclass
class DurablePage:
    """A page with its home, which has the parts. `begun`: of the unit's chunks."""

    layout: UnitLayout
    home: Home
    parts: PageParts
    begun: list[bool]
    formats: list[StateFormat]


@dataclass
class DurablePages:
    """The pages of a model. `parameters` and `states` have one page a unit."""

    layout: ModelLayout
    images: SlabLayout
    parameters: list[DurablePage]
    states: list[DurablePage]

    @property
    def all(self) -> list[DurablePage]:
        return self.parameters + self.states

    @property
    def parts(self) -> list[Part]:
        return [part for page in self.all for part in page.parts]


def durable_pages(
    model: nn.Module,
    *,
    chunk: int,
    unit_bytes: int = 1 << 20,
    precision: Precision | None = None,
    optimizer: type[torch.optim.Optimizer] | None = torch.optim.AdamW,
) -> DurablePages:
    """Lay out a model's pages as with commits on. chunk: elements. optimizer: None for a rule without states.

    All homes are on NVMe, as far as `Home.tier` says; they have neither a lease nor memory.
    """
    precision = precision or Precision()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rule = Rule.of(optimizer(trained), precision.states) if optimizer and trained else None
    surveyed = survey(model, precision)
    layout = build(surveyed, surveyed.group(unit_bytes), chunk)
    formats = [
        [
            StateFormat(rule.arrays(unit.regions[each.region].dtype) if rule else (), each.count)
            for each in unit.chunks
        ]
        for unit in layout.units
    ]
    images = slab_layout(layout.units, ALONE, [sum(form.nbytes for form in unit) for unit in formats])
    parameters, states = [], []
    for index, (unit, forms) in enumerate(zip(layout.units, formats, strict=True)):
        begun = [False] * len(unit.chunks)
        home = Home(Tier.NVME, unit.nbytes, None, False)
        home.parts = parameter_parts(PageShard(unit, ALONE), images.parameters[index], home)
        parameters.append(DurablePage(unit, home, home.parts, begun, forms))
        home = Home(Tier.NVME, sum(form.nbytes for form in forms), None, False)
        home.parts = state_parts(
            unit, forms, images.states[index], home, begun=begun, kept=range(len(unit.chunks))
        )
        states.append(DurablePage(unit, home, home.parts, begun, forms))
    return DurablePages(layout, images, parameters, states)
