"""Tiles: the ranges of rows into which the weight of a tiled module is cut (pure).

[Note: tiles]
infinity.tiled(module) marks a module whose weight may exceed device memory. The weight stays one Parameter of
the user's. In the layout it is a sequence of tiles, ranges of rows in row order, and each tile is a parameter
in a unit of its own, with the name `head.weight[0:64]`. So everything that is done to parameters, from pages
to commits, is done to tiles. The rows of a tile follow from the shape of the weight alone, because the
module's arithmetic goes tile by tile, so that another cut would change bits. Each tile but the last has a
multiple of BLOCK elements: blocks of sums and of 8-bit states are those of the whole weight.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from infinity.cpu_adam import BLOCK
from infinity.errors import ConfigError

FEWEST_ELEMENTS = 1 << 20
"""The fewest elements of a tile that is not the last: 4 MiB in fp32.

Matrices of few rows are slow: for 256 tokens and a weight of 4096 x 4096 on two cores, a backward took 1.4
of a plain one's time with this number, and 2.1 with a quarter of it.
"""
MOST_TILES = 64
"""The most tiles of a weight. A weight of 64 MiB has 16 tiles of 4 MiB, and one of 4 GiB has 64 of 64 MiB."""


_TILE = re.compile(r"(.+)\[(\d+):\d+\]")


class TiledModule(nn.Module):
    """A module that uses its weight, (rows, columns), tile by tile."""


def row_ranges(shape: Sequence[int]) -> list[range]:
    """The rows of each tile of a weight, in row order. shape: of the weight, (rows, columns)."""
    rows, columns = shape
    step = BLOCK // math.gcd(BLOCK, columns)
    wanted = max(FEWEST_ELEMENTS, -(-rows * columns // MOST_TILES))
    each = -(-wanted // max(1, columns * step)) * step
    return [range(first, min(first + each, rows)) for first in range(0, rows, each)]


def tile_name(name: str, rows: range) -> str:
    """The name of a tile. name: a name of the weight."""
    return f"{name}[{rows.start}:{rows.stop}]"


def whole_name(name: str) -> tuple[str, int]:
    """(the name of the weight, the first row) of a tile that is named `name`; (name, 0) of no tile."""
    found = _TILE.fullmatch(name)
    return (found[1], int(found[2])) if found else (name, 0)


def tiled_weights(model: nn.Module) -> dict[int, nn.Parameter]:
    """The weights of tiled modules in `model`, by id(). Raises ConfigError if one is not contiguous or is no
    parameter of its module any more.
    """
    found: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        if not isinstance(module, TiledModule):
            continue
        weight = module._parameters.get("weight")
        if weight is None:
            raise ConfigError(
                f"The weight of the tiled module {path} is not a parameter of it, but is computed.",
                "Do not parametrize tiled modules, or leave out infinity.tiled.",
            )
        if not weight.is_contiguous():
            raise ConfigError(
                f"The weight of the tiled module {path} has the strides {weight.stride()}.",
                "Make it contiguous: module.weight = nn.Parameter(module.weight.detach().contiguous()).",
            )
        hooks: Any = weight
        if hooks._backward_hooks or hooks._post_accumulate_grad_hooks:
            raise ConfigError(
                f"The weight of the tiled module {path} has a hook on its gradient, which comes by tiles.",
                "Remove the hook, or leave out infinity.tiled.",
            )
        found[id(weight)] = weight
    return found
