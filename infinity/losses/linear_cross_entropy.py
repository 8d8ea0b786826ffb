"""Linear cross entropy: the loss of a linear layer's outputs, computed a panel of logits at a time."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch._compile import _disable_dynamo
from torch.overrides import handle_torch_function, has_torch_function_unary, has_torch_function_variadic

from infinity.errors import ConfigError
from infinity.layout.tiles import row_ranges
from infinity.losses.pieces import each_size

_COLUMNS = 2048
"""The most entries of the vocabulary in a panel."""
_PANEL = 16 << 20
"""The most logits in a panel: 64 MiB in fp32."""
_CONVERTED = 1 << 19
"""The most elements of a matrix that are converted to the dtype of sums at a time: 2 MiB in fp32."""
_REDUCTIONS = ("none", "mean", "sum")


@_disable_dynamo  # a graph of torch.compile breaks here: this calls other code of the package
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the cross entropy of the logits `hidden @ weight.T + bias`, without holding all logits.

    The result is that of F.cross_entropy(F.linear(hidden, weight, bias).float(), target), within rounding.
    Forward and backward each compute all logits, in panels that follow from the weight's shape alone: 2048
    entries of the vocabulary, or fewer where a tile of it ends, by as many tokens as make 64 MiB in fp32.
    Logits have the dtype of the operands, as those of F.linear; exponentials, and sums over panels, are fp32
    (fp64 for fp64 operands). Losses of tokens are summed once, in the order of the tokens. Autograd saves
    `hidden`, `weight`, `bias`, `target` and 8 bytes a token. Backward takes a gradient of each operand, 4
    bytes for each element of `hidden`, and a few panels. A tiled weight (infinity.tiled) is used tile by
    tile, with the same bits, and so is its gradient.

    hidden: (..., width). weight: (vocabulary, width), of an offloaded model or any other; tied to an
    embedding or not. bias: (vocabulary,). The three have one floating dtype, and are on one device. In a
    region of torch.autocast its dtype is computed with; elsewhere operands are cast to the dtype of an
    offloaded parameter among them. target: int64 (...), indices in [0, vocabulary), or `ignore_index` for
    tokens without a loss. reduction: "none" for the loss of each token, (...); "sum"; or "mean" over the
    tokens that have one, NaN if there is none. label_smoothing: from 0 to 1, as in F.cross_entropy.

    Returns nats in fp32, or in fp64 for fp64 operands. Raises ConfigError for other shapes, dtypes and
    options, in transforms of torch.func, in forward-mode differentiation and in a backward with
    create_graph=True. Raises IndexError, as torch does, for a target out of range.

    The idea of recomputed logits is from Wijmans et al. 2024 (arXiv 2411.09009).
    """
    tensors = (hidden, weight, target, bias)
    if has_torch_function_variadic(*tensors):
        return handle_torch_function(
            linear_cross_entropy,
            tensors,
            hidden,
            weight,
            target,
            bias,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    tiles = getattr(weight, "tiles", (weight,))  # in a dry run, a tiled weight is a plain one with tiles
    return of_tiles(
        hidden,
        weight,
        target,
        bias,
        tiles=tiles,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def of_tiles(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tiles: Sequence[torch.Tensor],
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return `linear_cross_entropy` of a weight in tiles, which are used one after the other.

    weight: has the shape and the dtype of the whole weight; its values are not read. tiles: its rows, as
    `row_ranges` cuts them, or the whole weight alone.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        _refuse("in a transform of torch.func")
    if reduction not in _REDUCTIONS:
        raise ConfigError(f"The reduction is {reduction!r}.", f"Give one of {', '.join(_REDUCTIONS)}.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ConfigError(f"label_smoothing is {label_smoothing}.", "Give a number from 0 to 1.")
    if bias is not None and len(tiles) > 1:
        bias = bias.clone()  # views would keep the page of the bias beside that of each tile
    _check(hidden, weight, target, bias)
    flat = target.reshape(-1)
    options = _Options(_dtype(hidden, weight, bias), weight.shape, ignore_index, label_smoothing)
    losses = _token_losses(options, hidden.reshape(-1, hidden.shape[-1]), tiles, bias, flat)
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (flat != ignore_index).sum()


@dataclass(frozen=True, slots=True)
class _Options:
    dtype: torch.dtype
    """The dtype in which products are computed."""
    shape: torch.Size
    """(vocabulary, width)."""
    ignore_index: int
    smoothing: float

    @property
    def vocabulary(self) -> int:
        return self.shape[0]

    @property
    def wide(self) -> torch.dtype:
        """The dtype of exponentials and of sums over panels."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def rows(self) -> int:
        """The most tokens in a panel."""
        return _PANEL // min(self.vocabulary, _COLUMNS)


def _token_losses(
    options: _Options,
    hidden: torch.Tensor,
    tiles: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    target: torch.Tensor,
) -> torch.Tensor:
    """Return the loss of each token, (tokens,), of hidden (tokens, width).

    With z the logits of a token, m their maximum and s the sum of exp(z - m), its loss is
    log s + (m - z[target]), and the gradient of z is exp(z - m) / s, less 1 at the target. m and log s are
    kept apart, because their sum would be rounded to the digits of m, which may be large. Each panel has a
    maximum and a sum of its own; they are put together at the end. The outer loop is over the vocabulary, so
    that each row of the weight is read once, and its gradient is complete after one turn.

    Panels end where tiles do, also where the weight is not in tiles, so that both have the same bits. Each
    tile has a node of its own in the graph, whose gradient leaves before the next tile comes. A token, a
    tensor without elements, goes from the hidden states through all of them: backward begins with the losses,
    takes tiles in row order and ends with the hidden states. The token's gradient carries the sums of its
    backward: of one graph, several backwards may run, at one time and in part.
    """
    panels: list[slice] = []
    for rows in row_ranges(options.shape):
        starts = range(rows.start, rows.stop, _COLUMNS)
        panels += [slice(start, min(start + _COLUMNS, rows.stop)) for start in starts]
    ends = list(itertools.accumulate(map(len, tiles)))
    of_tile = [
        [(number, each) for number, each in enumerate(panels) if end - len(tile) <= each.start < end]
        for tile, end in zip(tiles, ends, strict=True)
    ]
    biases: Sequence[torch.Tensor | None] = [bias] * len(tiles)
    if bias is not None:
        biases = bias.split([len(each) for each in tiles])
    turn = _Turn(options, hidden, target, panels)
    token: torch.Tensor = _Hidden.apply(hidden)  # type: ignore[no-untyped-call]
    for tile, mine, part in reversed(list(zip(tiles, of_tile, biases, strict=True))):
        call = functools.partial(_Tile.apply, turn, mine, token, part)
        token = _with_page(tile, call)
    losses: torch.Tensor = _Losses.apply(turn, token, hidden.detach(), target)  # type: ignore[no-untyped-call]
    return losses


def _with_page(tile: torch.Tensor, call: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Call `call(tile)`, in which a tile of an offloaded model is a plain tensor."""
    if has_torch_function_unary(tile):
        found: torch.Tensor = handle_torch_function(_with_page, (tile,), tile, call)
        return found
    return call(tile)


class _Turn:
    """What the nodes of one loss have in common."""

    def __init__(
        self, options: _Options, hidden: torch.Tensor, target: torch.Tensor, panels: Sequence[slice]
    ) -> None:
        self.options, self.panels, self.for_hidden = options, panels, hidden.requires_grad
        # This raises torch's error for a target out of range. The tensor of zeros has one element in memory.
        zeros = torch.zeros((), dtype=options.wide, device=hidden.device)
        zeros = zeros.expand(len(hidden), options.vocabulary)
        F.nll_loss(zeros, target, ignore_index=options.ignore_index, reduction="none")
        self.forward: _Forward | None = _Forward(options, hidden.detach(), target, len(panels))
        """What the forward has measured, until it ends."""


class _Forward:
    """The maximum of each panel's logits, the sum of exp(z - maximum), and the logit of the target."""

    def __init__(self, options: _Options, hidden: torch.Tensor, target: torch.Tensor, panels: int) -> None:
        self.options, self.hidden, self.target = options, hidden, target
        shape, wide = (3, panels, len(hidden)), options.wide
        self.maxima, self.sums, self.shifts = hidden.new_empty(shape, dtype=wide).unbind()
        """(panels, tokens); in `shifts` the sum of z - maximum, if there is smoothing."""
        self.found = hidden.new_zeros(len(hidden), dtype=wide)

    def add(self, panel: int, columns: slice, matrix: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Measure a panel. matrix, bias: its rows of the weight and of the bias."""
        options = self.options
        for rows in each_size(_ranges(len(self.hidden), options.rows), _length, self.hidden):
            logits = _logits(self.hidden[rows], matrix, bias, options)
            place, inside = _place(self.target[rows], columns)
            self.found[rows] += torch.where(inside, logits.gather(1, place[:, None])[:, 0], 0)
            # A finite maximum, for a panel in which all logits are -inf.
            maximum = logits.amax(1).clamp_min_(torch.finfo(options.wide).min)
            logits.sub_(maximum[:, None])
            self.maxima[panel, rows] = maximum
            if options.smoothing:
                self.shifts[panel, rows] = logits.sum(1)
            self.sums[panel, rows] = logits.exp_().sum(1)
            del logits  # before the next are made

    def losses(self, panels: Sequence[slice]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the losses, and for the backward the maximum of each token's logits and its sum s."""
        smoothing, vocabulary = self.options.smoothing, self.options.vocabulary
        maximum = self.maxima.amax(0)
        # In fp64, so that each loss is rounded once. There are few numbers: one for each token and panel.
        below = self.maxima.double() - maximum
        total = (self.sums * below.exp()).sum(0)
        log_sum = total.log()
        losses: torch.Tensor = (log_sum + (maximum.double() - self.found)) * (1 - smoothing)
        if smoothing:
            sizes = [each.stop - each.start for each in panels]
            below.mul_(torch.tensor(sizes, dtype=below.dtype, device=below.device)[:, None])
            losses -= ((self.shifts + below).sum(0) - vocabulary * log_sum) * (smoothing / vocabulary)
        losses = losses.masked_fill_(self.target == self.options.ignore_index, 0)
        return losses.to(self.options.wide), maximum, total.to(self.options.wide)


class _Backward:
    """The gradient of the hidden states, as far as it is added up, and what the backward of a panel needs."""

    def __init__(
        self,
        options: _Options,
        saved: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        *,
        panels: int,
    ) -> None:
        """saved: what `_Losses` has saved. gradient: of the losses, (tokens,)."""
        self.options = options
        self.hidden, self.target, self.maximum, self.total = saved
        self.scale = gradient.masked_fill(self.target == options.ignore_index, 0)
        self.of_hidden = _Sums(self.hidden.new_empty(self.hidden.shape), options, alone=panels == 1)

    def add(
        self,
        columns: slice,
        matrix: torch.Tensor,
        bias: torch.Tensor | None,
        of_matrix: torch.Tensor | None,
        of_bias: torch.Tensor | None,
        *,
        for_hidden: bool,
    ) -> None:
        """Go back through a panel. of_matrix, of_bias: gradients to write; None: they are not wanted."""
        options, vocabulary = self.options, self.options.vocabulary
        sums = None
        if of_matrix is not None:
            sums = _Sums(of_matrix, options, alone=0 < len(self.hidden) <= options.rows)
        of_part = matrix.new_zeros(len(matrix), dtype=options.wide)
        for rows in each_size(_ranges(len(self.hidden), options.rows), _length, self.hidden):
            part, scale = self.hidden[rows], self.scale[rows]
            logits = _logits(part, matrix, bias, options)
            logits.sub_(self.maximum[rows, None]).exp_().mul_((scale / self.total[rows])[:, None])
            if options.smoothing:
                logits.sub_((scale * (options.smoothing / vocabulary))[:, None])
            place, inside = _place(self.target[rows], columns)
            wanted = torch.where(inside, scale * (options.smoothing - 1), 0)
            logits.index_put_((torch.arange(len(part), device=part.device), place), wanted, accumulate=True)
            if for_hidden:
                self.of_hidden.add(rows, logits, matrix)
            if sums is not None:
                sums.add(slice(None), logits.t(), part)
            if of_bias is not None:
                of_part += logits.sum(0)
            del logits
        if sums is not None:
            sums.finish()
        if of_bias is not None:
            of_bias.copy_(of_part)


class _Node(torch.autograd.Function):
    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        _refuse("in forward-mode differentiation")


class _Hidden(_Node):
    """Hands the sum of the gradients to the hidden states."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: Any) -> Any:
        return token.sums.of_hidden.finish()


class _Tile(_Node):
    """The part of a loss that a tile of the weight has."""

    @staticmethod
    def forward(
        ctx: Any,
        turn: _Turn,
        panels: Sequence[tuple[int, slice]],
        token: torch.Tensor,
        *weights: torch.Tensor | None,
    ) -> torch.Tensor:
        """panels: the tile's, each with its number. weights: the bias of the tile's rows, and the tile."""
        assert turn.forward is not None
        ctx.turn, ctx.panels = turn, panels
        # A tied tile's: [Note: gradients of tied tiles] in infinity/gradients/tile_sums.py.
        ctx.sum_of_uses = getattr(weights[-1], "sum_of_uses", None)
        for number, columns in each_size(panels, _columns, turn.forward.hidden):
            bias, matrix = _rows(panels, columns, *weights)
            assert matrix is not None
            turn.forward.add(number, columns, matrix, bias)
        ctx.save_for_backward(*weights)
        return token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: Any) -> Any:
        bias, tile = ctx.saved_tensors
        sums: _Backward = token.sums
        for_token, for_bias, for_tile = ctx.needs_input_grad[2:]
        of_tile = tile.new_empty(tile.shape) if for_tile else None
        of_bias = bias.new_empty(bias.shape) if for_bias else None
        for _number, columns in each_size(ctx.panels, _columns, sums.hidden):
            parts = _rows(ctx.panels, columns, tile, bias, of_tile, of_bias)
            sums.add(columns, *parts, for_hidden=ctx.turn.for_hidden)
        if of_tile is not None and ctx.sum_of_uses is not None:
            of_tile = ctx.sum_of_uses.add(of_tile)
        return None, None, token if for_token else None, of_bias, of_tile


class _Losses(_Node):
    """Makes the losses of the sums over all panels."""

    @staticmethod
    def forward(
        ctx: Any, turn: _Turn, token: torch.Tensor, hidden: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        assert turn.forward is not None
        losses, maximum, total = turn.forward.losses(turn.panels)
        turn.forward, ctx.turn = None, turn
        ctx.save_for_backward(hidden, target, maximum, total)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            _refuse("in a backward with create_graph=True")
        turn: _Turn = ctx.turn
        sums = _Backward(turn.options, ctx.saved_tensors, gradients[0], panels=len(turn.panels))
        token: Any = sums.hidden.new_empty(0)  # of the token's dtype: autograd hands on this very tensor
        token.sums = sums
        return None, token, None, None


def _rows(panels: Sequence[tuple[int, slice]], columns: slice, *parts: torch.Tensor | None) -> list[Any]:
    """The rows of a panel in each of `parts`, which begin with the first of `panels`."""
    first = panels[0][1].start
    return [None if each is None else each[columns.start - first : columns.stop - first] for each in parts]


class _Sums:
    """Sums of products of matrices, as the rows of a gradient.

    Where rows get several products, these and their sums are fp32: rounding each to bf16 would add as much
    error as the rounding of the gradient. Where they get one, the product is rounded, as in plain torch.
    """

    def __init__(self, gradient: torch.Tensor, options: _Options, *, alone: bool) -> None:
        """gradient: new memory, to which sums are written. alone: whether each row gets just one product."""
        self._gradient = gradient
        self._options = options
        self._alone = alone
        dtype = options.dtype if alone else options.wide
        self._total = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
        if not alone:
            self._total.zero_()

    def add(self, rows: slice, factor: torch.Tensor, operand: torch.Tensor) -> None:
        """Add `factor`, of the sums' dtype, times `operand`, of its own, to the rows `rows` of the total."""
        total, dtype = self._total[rows], self._options.dtype
        if self._alone:
            torch.mm(factor.to(dtype), operand.to(dtype), out=total)
        elif total.is_cuda and dtype != total.dtype and _HAS_WIDE_PRODUCTS:
            # Products of low precision with sums and results in fp32. A CPU has none in torch.
            torch.addmm(total, factor.to(dtype), operand.to(dtype), out_dtype=total.dtype, out=total)
        else:
            for sums, part in in_blocks(total, operand):
                sums.addmm_(factor, part.to(total.dtype))

    def finish(self) -> torch.Tensor:
        """Return the gradient."""
        return self._gradient if self._total is self._gradient else self._gradient.copy_(self._total)


def in_blocks(total: torch.Tensor, matrix: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield blocks of columns of `total` and of `matrix`, whose part is converted to the total's dtype before
    a product with it is added. If both have one dtype, it is one block. Blocks are whole vectors wide: on a
    CPU, products of other widths took up to 1.25 times the time, and a narrow last one had other bits.
    """
    size = matrix.shape[1]
    if matrix.dtype != total.dtype:
        size = max(1, _CONVERTED // max(1, len(matrix)))
        size = size // 64 * 64 or size
    return zip(total.split(size, 1), matrix.split(size, 1), strict=True)


_HAS_WIDE_PRODUCTS = hasattr(torch.ops.aten.addmm, "dtype_out")


def _ranges(number: int, size: int) -> Iterator[slice]:
    for start in range(0, number, size):
        yield slice(start, min(start + size, number))


def _length(piece: slice) -> int:
    return int(piece.stop - piece.start)


def _columns(panel: tuple[int, slice]) -> int:
    return _length(panel[1])


def _logits(
    hidden: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, options: _Options
) -> torch.Tensor:
    """Return the logits of a panel, (rows, columns), in the dtype of sums. `out` keeps autocast away, within
    which a backward might run.
    """
    hidden, matrix = hidden.to(options.dtype), matrix.to(options.dtype)
    logits = hidden.new_empty(len(hidden), len(matrix))
    if bias is None:
        torch.mm(hidden, matrix.t(), out=logits)
    else:
        torch.addmm(bias.to(options.dtype), hidden, matrix.t(), out=logits)
    return logits.to(options.wide)


def _place(target: torch.Tensor, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (column of each target in a panel, whether the panel has it); some column, if it has not."""
    inside = (target >= columns.start) & (target < columns.stop)
    return torch.where(inside, target - columns.start, 0), inside


def _dtype(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.dtype:
    """Return the dtype to compute in. Raises ConfigError if the operands have several outside of autocast."""
    dtypes = {each.dtype for each in (hidden, weight, bias) if each is not None}
    device = hidden.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtypes = {each if each == torch.float64 else torch.get_autocast_dtype(device) for each in dtypes}
    if len(dtypes) > 1:
        raise ConfigError(
            f"hidden, weight and bias have the dtypes {', '.join(sorted(map(str, dtypes)))}.",
            "Convert them to one dtype.",
        )
    (dtype,) = dtypes
    if not dtype.is_floating_point:
        raise ConfigError(f"hidden and weight are {dtype}.", "Give tensors of floats.")
    return dtype


def _check(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None
) -> None:
    shapes = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, target {list(target.shape)}"
    if target.dtype != torch.int64:
        raise ConfigError(
            f"The target is {target.dtype}.", "Give indices as int64; for probabilities use F.cross_entropy."
        )
    if (
        hidden.dim() == 0
        or weight.dim() != 2
        or len(weight) == 0
        or hidden.shape[-1] != weight.shape[1]
        or target.shape != hidden.shape[:-1]
    ):
        raise ConfigError(
            f"These shapes do not fit together: {shapes}.",
            "Give hidden (..., width), weight (vocabulary, width) and target (...).",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ConfigError(
            f"The bias has the shape {list(bias.shape)}, with {shapes}.",
            "Give one number for each row of weight.",
        )


def _refuse(where: str) -> NoReturn:
    raise ConfigError(
        f"infinity.linear_cross_entropy was called {where}, for which it has no formula.",
        "Use F.cross_entropy(F.linear(hidden, weight, bias).float(), target), which holds all logits.",
    )
