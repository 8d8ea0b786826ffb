"""Tile sums: the gradients of tiles that several modules use, kept away from the memory that computes.

[Note: gradients of tied tiles] Autograd adds up what the uses of a parameter contribute to its gradient, and
hands the sum over after the last one. So the gradients of all tiles of a head that is tied to an embedding
would lie on the device from the head's backward to the embedding's. Instead, each node that uses a tile gives
its contribution to the tile's `TileSum`. As long as others are expected the sum is away, in RAM, and comes
back to be added to. Autograd keeps a placeholder without memory, which a hook on the tile replaces with the
sum. Contributions are added in the order of the nodes and in the tile's dtype, as autograd adds them, so bits
are the same. The sum belongs to its placeholder: if a backward fails, both are freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Away(Protocol):
    """The memory away from the device in which sums are kept."""

    def put(self, gradient: torch.Tensor) -> Any:
        """Begin to copy a gradient there. Returns what `get` takes; None if there is no room."""

    def get(self, there: Any, like: torch.Tensor) -> torch.Tensor:
        """Copy a gradient back to new memory on the device. like: has its shape and dtype."""


@dataclass(eq=False)
class _Sum:
    """A tile's gradient in one backward. One of `here` and `there` is not None."""

    backward: int
    here: torch.Tensor | None
    there: Any = None
    """What `Away.put` returned."""
    contributions: int = 0


@dataclass(eq=False, slots=True)
class _Weight:
    """What the tiles of one weight share."""

    away: Away
    uses: int
    """The number of modules that use the weight. With as many contributions a sum stays, but only until there
    is one to another tile, as where a module is called twice.
    """
    newest: weakref.ref[_Sum] | None = None
    """The sum that was added to last."""


class TileSum:
    """Adds up the contributions to the gradient of one tile, for each backward under way."""

    def __init__(self, weight: _Weight) -> None:
        self._weight = weight
        self._placeholders = weakref.WeakValueDictionary[int, Any]()
        """Backward -> the placeholder of the tile's gradient. Backwards of several threads may run."""

    def add(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Add a contribution within a backward. Returns what autograd gets instead: a placeholder or None."""
        # Not on a token's gradient, as other sums: the modules that use a tile have one each.
        backward = torch._C._current_graph_task_id()
        placeholder: Any = self._placeholders.get(backward)
        if placeholder is not None:
            found: _Sum = placeholder.of_tile
            if found.there is None:
                assert found.here is not None
                found.here = found.here + gradient
            else:
                found.here = self._weight.away.get(found.there, placeholder).add_(gradient)
                found.there = None
            self._added(found)
            return None
        placeholder = gradient.new_zeros(()).expand(gradient.shape)
        placeholder.of_tile = _Sum(backward, gradient)
        self._added(placeholder.of_tile)
        self._placeholders[backward] = placeholder
        return placeholder  # type: ignore[no-any-return]

    def _added(self, found: _Sum) -> None:
        """Have sums leave that expect other contributions, after one to `found`."""
        weight = self._weight
        before = None if weight.newest is None else weight.newest()
        weight.newest = weakref.ref(found)
        found.contributions += 1
        leaving = [found] if found.contributions < weight.uses else []
        if before is not None and before is not found and before.backward == found.backward:
            leaving.append(before)
        for each in leaving:
            if each.here is not None:
                each.there = weight.away.put(each.here)
                each.here = each.here if each.there is None else None

    def hook(self, gradient: Any) -> torch.Tensor | None:
        """Replace a placeholder with its sum; for `Tensor.register_hook` of the tile."""
        found: _Sum | None = getattr(gradient, "of_tile", None)
        if found is None:
            return None
        del gradient.of_tile  # else the sum would have two owners, and autograd would copy it
        return found.here if found.there is None else self._weight.away.get(found.there, gradient)


def add_up(away: Away, tiles: Iterable[torch.Tensor], uses: int) -> None:
    """Have the contributions to the gradient of each tile of a weight added up by a `TileSum`.

    tiles: leaves. uses: the number of modules that use the weight.
    """
    weight = _Weight(away, uses)
    for tile in tiles:
        found = TileSum(weight)
        vars(tile)["sum_of_uses"] = found
        with torch._C.DisableTorchFunctionSubclass():
            trained = tile.requires_grad
            tile.requires_grad_(True)  # a frozen tensor takes no hook
            tile.register_hook(found.hook)
            tile.requires_grad_(trained)


def sums_of(tile: torch.Tensor | None) -> TileSum | None:
    """What adds up the gradients of a tile, or of a tensor that is no tile; None: autograd does."""
    return getattr(tile, "sum_of_uses", None)


def contribution(sums: TileSum | None, gradient: torch.Tensor) -> torch.Tensor | None:
    """What a node returns in a backward as the gradient of a tile with these sums; None: it has none."""
    return gradient if sums is None else sums.add(gradient)
