"""Tiled modules: nn.Linear and nn.Embedding whose weights are used tile by tile, and may exceed a device.

The arithmetic of a tiled module follows from the shape of its weight alone (infinity/layout/tiles.py), with
or without a runtime. A tile of `rows` rows gives `rows` output features of a linear module. The gradient of
the input is the sum over tiles in fp32, in row order, rounded once. No operation takes a tile together with
another parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from infinity.activations.saved_tensors import check_version
from infinity.errors import ConfigError
from infinity.gradients.tile_sums import contribution, sums_of
from infinity.layout.tiles import TiledModule, row_ranges
from infinity.losses.linear_cross_entropy import in_blocks
from infinity.model.paged_parameter import PagedParameter
from infinity.model.tiled_parameter import TiledParameter
from infinity.pages.parameter_page import parameter_version

M = TypeVar("M", bound=nn.Module)


def tiled(module: M) -> M:
    """Have a module use its weight tile by tile, so that the weight may exceed device memory; return it.

    module: an nn.Linear or nn.Embedding, which is changed in place, before `offload`. Its class becomes a
    subclass of its own class. Parameters, their names and state_dict() stay as they are. A tile is a range of
    rows of the weight, a 64th of them, or more where a tile would have fewer than 2**20 elements. With
    `offload` each tile moves by itself. Outputs and gradients may differ from those of the plain module in
    the last bits; they are the same for all budgets, and without `offload`. Mark each module that uses a tied
    weight: other uses of it take a copy of the whole weight. Where the device has memory of its own, the
    gradient of a tied weight takes host RAM until all uses have contributed to it.

    Raises ConfigError for a module of another class, for max_norm and sparse gradients of an nn.Embedding,
    and for a module that has been offloaded. Muon, which updates whole matrices, takes no tiled weight.
    """
    if isinstance(module, TiledModule):
        return module
    kinds: dict[type, type] = {nn.Linear: TiledLinear, nn.Embedding: TiledEmbedding}
    if type(module) not in kinds:
        raise ConfigError(
            f"A {type(module).__name__} was given to infinity.tiled.",
            "Give it an nn.Linear or an nn.Embedding of the model, such as infinity.tiled(model.lm_head).",
        )
    if isinstance(module.weight, (PagedParameter, TiledParameter)):
        raise ConfigError(
            "A module was given to infinity.tiled after its model was offloaded.",
            "Call infinity.tiled before infinity.offload.",
        )
    if isinstance(module, nn.Embedding):
        for option in ("max_norm", "sparse"):
            if getattr(module, option):
                raise ConfigError(
                    f"An nn.Embedding with {option}={getattr(module, option)} was given to infinity.tiled.",
                    f"Make it without {option}.",
                )
    module.__class__ = kinds[type(module)]
    return module


class TiledLinear(TiledModule, nn.Linear):
    """An nn.Linear that computes its output features tile by tile."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs: (..., in_features). Returns (..., out_features)."""
        tiles = _tiles(self.weight)
        biases: Sequence[torch.Tensor | None] = [None] * len(tiles)
        if self.bias is not None:
            # A copy: views would keep the page of the bias beside that of each tile.
            biases = self.bias.clone().split([len(each) for each in tiles])
        flat = inputs.reshape(-1, inputs.shape[-1])
        if torch.is_grad_enabled():
            _refuse_transforms()
            outputs = _linear_graph(flat, tiles, biases)
        else:
            outputs = [functional.linear(flat, *each) for each in zip(tiles, biases, strict=True)]
        return torch.cat(outputs, dim=-1).view(*inputs.shape[:-1], len(self.weight))


class TiledEmbedding(TiledModule, nn.Embedding):
    """An nn.Embedding that looks up its rows tile by tile. It reads no tile without a wanted row."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs: indices of rows, of any shape. Returns (*inputs.shape, embedding_dim)."""
        _refuse_transforms()
        tiles = _tiles(self.weight)
        indices = inputs.reshape(-1)
        order, counts = self._sorted(indices, len(tiles[0]), len(tiles))
        first, found = 0, []
        for tile, part in zip(tiles, indices[order].split(counts), strict=True):
            padding = -1 if self.padding_idx is None else self.padding_idx - first
            padding = padding if 0 <= padding < len(tile) else -1
            found.append(_Rows.apply(part - first, tile, padding, self.scale_grad_by_freq))  # type: ignore[no-untyped-call]
            first += len(tile)
        placed: torch.Tensor = _Reordered.apply(torch.cat(found), order)  # type: ignore[no-untyped-call]
        return placed.view(*inputs.shape, self.embedding_dim)

    def _sorted(self, indices: torch.Tensor, rows: int, tiles: int) -> tuple[torch.Tensor, list[int]]:
        """Sort indices, (n,), by their tiles. rows: of each tile but the last. tiles: number of tiles.

        Returns the order, (n,), and the number of indices in each tile. Equal indices keep their order, so
        that their gradients are added in the order of the inputs. Raises IndexError as nn.Embedding does.
        """
        number = torch.div(indices, rows, rounding_mode="floor")
        order = torch.argsort(number, stable=True)
        if isinstance(indices, FakeTensor):  # has no values
            return order, [len(indices), *[0] * (tiles - 1)]
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < self.num_embeddings:
            raise IndexError("index out of range in self")
        return order, torch.bincount(number, minlength=tiles).tolist()


def _tiles(weight: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tiles of a weight in row order: paged parameters, or views of a weight that is not in tiles."""
    tiles: Sequence[torch.Tensor] | None = getattr(weight, "tiles", None)  # of a runtime, or of a dry run
    return tiles or weight.split([len(rows) for rows in row_ranges(weight.shape)])


def _refuse_transforms() -> None:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise ConfigError(
            "A tiled module was called in a transform of torch.func, for which tiles are not implemented.",
            "Leave out infinity.tiled for this module.",
        )


def _linear_graph(
    inputs: torch.Tensor, tiles: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Compute the outputs of all tiles, in row order, with a graph whose backward goes in row order, too.

    A token, a tensor without elements, goes from the inputs through the nodes of all tiles. So the backward
    of a tile comes after that of the tile whose token it made, and that of the inputs comes last. The token's
    gradient carries the sum for the inputs' gradient, in fp32, as `of_inputs`: of one graph, several
    backwards may run, at one time and in part.
    """
    token = _Inputs.apply(inputs)  # type: ignore[no-untyped-call]
    outputs: list[torch.Tensor] = []
    for tile, bias in reversed(list(zip(tiles, biases, strict=True))):
        output, token = _LinearTile.apply(token, inputs.detach(), tile, bias)  # type: ignore[no-untyped-call]
        outputs.insert(0, output)
    return outputs


def _refuse_second(ctx: Any) -> None:
    if torch.is_grad_enabled():
        raise ConfigError(
            "A backward with create_graph=True went through a module that is tiled.",
            "Leave out create_graph, or leave out infinity.tiled for this module.",
        )


class _Inputs(torch.autograd.Function):
    """Hands the sum of a linear module's gradients to its inputs."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: Any) -> Any:
        return token.of_inputs.to(token.dtype)


class _LinearTile(torch.autograd.Function):
    """The output features of one tile of a linear module's weight."""

    @staticmethod
    def forward(
        ctx: Any, token: torch.Tensor, inputs: torch.Tensor, *weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """token: see `_linear_graph`. inputs: (n, columns). weights: the tile, (rows, columns), and its bias,
        (rows,).
        """
        tile, bias = weights
        assert tile is not None
        ctx.save_for_backward(inputs)
        ctx.tile, ctx.sums = _Kept(tile), sums_of(tile)
        return functional.linear(inputs, tile, bias), token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, token: Any) -> Any:
        _refuse_second(ctx)
        (inputs,) = ctx.saved_tensors
        for_token, _, for_tile, for_bias = ctx.needs_input_grad
        if for_token:
            if not hasattr(token, "of_inputs"):  # this is the first tile
                token = inputs.new_empty(0)
                token.of_inputs = inputs.new_zeros(inputs.shape, dtype=torch.float32)
            tile, wide = ctx.tile.read(), gradient.to(torch.float32)
            for sums, part in in_blocks(token.of_inputs, tile):
                sums.addmm_(wide, part.to(gradient.dtype).to(torch.float32))
        return (
            token if for_token else None,
            None,
            contribution(ctx.sums, gradient.t().mm(inputs.to(gradient.dtype))) if for_tile else None,
            gradient.sum(0) if for_bias else None,
        )


class _Rows(torch.autograd.Function):
    """Rows of one tile of an embedding's weight. A tile of which no row is wanted is not read."""

    @staticmethod
    def forward(
        ctx: Any, indices: torch.Tensor, tile: torch.Tensor, padding: int, scale: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.rows, ctx.padding, ctx.scale = len(tile), padding, scale
        ctx.sums = sums_of(tile)
        if not len(indices):
            return torch.empty(0, tile.shape[1], dtype=tile.dtype, device=indices.device)
        return functional.embedding(indices, tile)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _refuse_second(ctx)
        (indices,) = ctx.saved_tensors
        found = torch.ops.aten.embedding_dense_backward(gradient, indices, ctx.rows, ctx.padding, ctx.scale)
        return None, contribution(ctx.sums, found), None, None


class _Reordered(torch.autograd.Function):
    """Puts rows that are sorted by tile into the order of the indices."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order)
        return torch.empty_like(rows).index_copy_(0, order, rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _refuse_second(ctx)
        (order,) = ctx.saved_tensors
        return gradient.index_select(0, order), None


class _Kept:
    """A tile that a backward reads, and its version at the forward. No saved tensor keeps a tile's page."""

    def __init__(self, tile: torch.Tensor) -> None:
        self._tile = tile if isinstance(tile, PagedParameter) else tile.detach()
        self._version = parameter_version(tile)

    def read(self) -> torch.Tensor:
        """The tile. Raises RuntimeError, as PyTorch does, if it was changed in place since."""
        name = self._tile._place.name if isinstance(self._tile, PagedParameter) else "a tiled weight"
        check_version(name, self._version, parameter_version(self._tile))
        return self._tile
