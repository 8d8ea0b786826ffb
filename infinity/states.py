"""Optimizer pages: the arrays that an update keeps for each chunk of a unit, and what is known of them.

A chunk's arrays lie one after another (`StateFormat`), so one update is one sequential read and write.
Moments are not written before they have content: the first update of a chunk makes them in RAM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from infinity.errors import ConfigError
from infinity.layout import ParameterLayout, Piece, UnitLayout
from infinity.masters import join, split
from infinity.memory_order import in_memory_order
from infinity.plan import Plan
from infinity.rules import Rule, StateFormat
from infinity.store import Home, Store


class StatePage:
    """The optimizer states of one unit."""

    def __init__(self, index: int, layout: UnitLayout, home: Home, plan: Plan) -> None:
        self.index = index
        self.layout = layout
        self.home = home
        self.formats: list[StateFormat] = [
            plan.state_format(index, number) for number in range(len(layout.chunks))
        ]
        self.begun = [False] * len(layout.chunks)
        """Of each chunk: whether its moments are written."""
        self.steps = [0] * len(layout.parameters)
        """Updates that each parameter has had."""
        self.has_moments: set[int] = set()
        """Parameters whose moments have content."""
        self.edited: set[int] = set()
        """Parameters whose master is their value as it is now, whatever the page says."""
        self._offsets = [plan.state_offset(index, each) for each in range(len(layout.chunks))]

    def offset(self, number: int) -> int:
        """Of a chunk in the page, in bytes."""
        return self._offsets[number]

    def master_bytes(self, number: int) -> int:
        """The bytes of a chunk that are written from the start: its remainder or master array."""
        form = self.formats[number]
        moments = [
            offset
            for array, offset in zip(form.arrays, form.offsets, strict=True)
            if array.name not in ("remainder", "master")
        ]
        return moments[0] if moments else form.nbytes

    def arrays(self, number: int, data: torch.Tensor) -> dict[str, torch.Tensor]:
        """A chunk's arrays by name, each (count,), in uint8 `data` that starts with them."""
        form = self.formats[number]
        return {
            array.name: data[offset : offset + form.count * array.dtype.itemsize].view(array.dtype)
            for array, offset in zip(form.arrays, form.offsets, strict=True)
        }

    def place(self, number: int, name: str, piece: Piece) -> tuple[int, int]:
        """(offset in the page, bytes) of a piece of one array."""
        form = self.formats[number]
        index = [array.name for array in form.arrays].index(name)
        size = form.arrays[index].dtype.itemsize
        return self._offsets[number] + form.offsets[index] + piece.offset * size, piece.count * size


class States:
    """All optimizer pages: reads and writes of single parameters, for state_dict and for loading weights."""

    def __init__(self, pages: dict[int, StatePage], store: Store, rule: Rule) -> None:
        self.pages = pages
        self.rule = rule
        self._store = store

    def edited(self, unit: int, parameter: int) -> None:
        """The parameter was given values by hand: they are its master from now on."""
        page = self.pages.get(unit)
        if page is not None and page.layout.parameters[parameter].trainable:
            page.edited.add(parameter)

    def encode(self, unit: int, parameter: int, values: torch.Tensor) -> torch.Tensor:
        """Store the rest of a master, and return the parameter as its page has it.

        values: flat (numel,), in memory order, of any floating dtype.
        """
        page = self.pages.get(unit)
        dtype = page.layout.parameters[parameter].dtype if page is not None else values.dtype
        if page is None or not page.layout.parameters[parameter].trainable or dtype == torch.float32:
            return values.to(dtype)
        page.edited.discard(parameter)
        master = values.to(torch.float32)
        if dtype == torch.bfloat16:
            encoded, rest = split(master)
            self._write(page, parameter, "remainder", rest)
            return encoded
        self._write(page, parameter, "master", master)
        return master.to(dtype)

    def master(self, unit: int, parameter: int, values: torch.Tensor) -> torch.Tensor:
        """The float32 master of a parameter whose page has `values` (flat, in memory order)."""
        page = self.pages[unit]
        if values.dtype == torch.float32 or parameter in page.edited:
            return values.to(torch.float32)
        if values.dtype == torch.bfloat16:
            return join(values, self._read(page, parameter, "remainder"))
        return self._read(page, parameter, "master")

    def restore(self, unit: int, parameter: int, values: torch.Tensor, master: torch.Tensor) -> None:
        """Take a master of any strides over, where it rounds to the `values` (flat) that the page has."""
        layout = self.pages[unit].layout.parameters[parameter]
        flat = _flat(master, layout)
        rounded = split(flat)[0] if layout.dtype == torch.bfloat16 else flat.to(layout.dtype)
        if torch.equal(rounded, values):
            self.encode(unit, parameter, flat)

    def read(self, unit: int, parameter: int) -> dict[str, torch.Tensor]:
        """Copies of the moments, in the parameter's shape and strides, and "step"; as torch has them, which
        is nothing before an update, but for rules whose states are there from the start."""
        page = self.pages[unit]
        begun = parameter in page.has_moments
        if not (page.steps[parameter] or begun or self.rule.from_the_start):
            return {}
        layout = page.layout.parameters[parameter]
        found: dict[str, torch.Tensor] = {}
        if self.rule.counts_steps:
            found["step"] = torch.tensor(float(page.steps[parameter]), dtype=torch.float32, device="cpu")
        for name in self.rule.moments:
            if begun:
                found[name] = self._read(page, parameter, name).as_strided(layout.shape, layout.stride)
            elif self.rule.from_the_start:
                found[name] = torch.empty_strided(
                    layout.shape, layout.stride, dtype=torch.float32, device="cpu"
                ).fill_(self.rule.initial(name))
        return found

    def write(self, unit: int, parameter: int, state: Mapping[str, Any]) -> None:
        """Replace the moments and the count of steps. Raises ConfigError for a frozen parameter."""
        page = self.pages[unit]
        layout = page.layout.parameters[parameter]
        if state and not layout.trainable:
            raise ConfigError(
                f"There is an optimizer state for {layout.names[0]}, which was frozen when it was offloaded.",
                "Offload the model with that parameter trainable, or leave its state out.",
            )
        given = [name for name in self.rule.moments if isinstance(state.get(name), torch.Tensor)]
        for number, _ in page.layout.pieces(parameter):
            if given and not page.begun[number]:
                self._begin(page, number)
        for name in given:
            self._write(page, parameter, name, _flat(state[name], layout))
        page.steps[parameter] = int(state["step"]) if "step" in state else int(bool(given))
        if given:
            page.has_moments.add(parameter)
        else:
            page.has_moments.discard(parameter)

    def fill(self, page: StatePage, number: int, data: torch.Tensor) -> None:
        """Give a chunk's moments in RAM the content that they have before any update."""
        for name, array in page.arrays(number, data).items():
            if name in self.rule.moments:
                array.fill_(self.rule.initial(name))

    def _begin(self, page: StatePage, number: int) -> None:
        for name in self.rule.moments:
            piece = Piece(0, 0, 0, page.layout.chunks[number].count)
            offset, nbytes = page.place(number, name, piece)
            values = torch.full((nbytes // 4,), self.rule.initial(name), dtype=torch.float32, device="cpu")
            self._store.patch(page.home, offset, values)
        page.begun[number] = True

    def _read(self, page: StatePage, parameter: int, name: str) -> torch.Tensor:
        dtype = torch.int16 if name == "remainder" else torch.float32
        parts = [
            self._store.fetch(page.home, *page.place(number, name, piece)).view(dtype)
            for number, piece in page.layout.pieces(parameter)
        ]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype, device="cpu")

    def _write(self, page: StatePage, parameter: int, name: str, values: torch.Tensor) -> None:
        for number, piece in page.layout.pieces(parameter):
            offset, _ = page.place(number, name, piece)
            self._store.patch(page.home, offset, values[piece.start : piece.start + piece.count].contiguous())


def _flat(values: torch.Tensor, layout: ParameterLayout) -> torch.Tensor:
    """A state of any strides, device and floating dtype as the page has it: float32 on the CPU, (numel,)."""
    return in_memory_order(values.detach().to("cpu", torch.float32), layout.stride)
