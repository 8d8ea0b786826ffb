"""Linear cross entropy: the loss of a linear layer's outputs, computed a panel of logits at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch._compile import _disable_dynamo
from torch.overrides import handle_torch_function, has_torch_function_variadic

from infinity.errors import ConfigError

_COLUMNS = 2048
"""The most entries of the vocabulary in a panel."""
_PANEL = 16 << 20
"""The most logits in a panel: 64 MiB in fp32."""
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
    Forward and backward each compute all logits, in panels that follow from the size of the vocabulary alone:
    2048 entries (or the whole vocabulary, if it is smaller) by as many tokens as make 64 MiB in fp32. Logits
    have the dtype of the operands, as those of F.linear; exponentials, and sums over panels, are fp32 (fp64
    for fp64 operands). Losses of tokens are summed once, in the order of the tokens. Autograd saves `hidden`,
    `weight`, `bias`, `target` and 8 bytes a token. Backward takes a gradient of each operand, 4 bytes for
    each element of `hidden`, and a few panels.

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
    if torch._C._functorch.peek_interpreter_stack() is not None:
        _refuse("in a transform of torch.func")
    if reduction not in _REDUCTIONS:
        raise ConfigError(f"The reduction is {reduction!r}.", f"Give one of {', '.join(_REDUCTIONS)}.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ConfigError(f"label_smoothing is {label_smoothing}.", "Give a number from 0 to 1.")
    _check(hidden, weight, target, bias)
    flat = target.reshape(-1)
    options = _Options(_dtype(hidden, weight, bias), ignore_index, label_smoothing)
    operands = hidden.reshape(-1, hidden.shape[-1]), weight, bias
    losses: torch.Tensor = _TokenLosses.apply(options, *operands, flat)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (flat != ignore_index).sum()


@dataclass(frozen=True, slots=True)
class _Options:
    dtype: torch.dtype
    """The dtype in which products are computed."""
    ignore_index: int
    smoothing: float

    @property
    def wide(self) -> torch.dtype:
        """The dtype of exponentials and of sums over panels."""
        return torch.promote_types(self.dtype, torch.float32)


class _TokenLosses(torch.autograd.Function):
    """The loss of each token, (tokens,), of hidden (tokens, width).

    With z the logits of a token, m their maximum and s the sum of exp(z - m), its loss is
    log s + (m - z[target]), and the gradient of z is exp(z - m) / s, less 1 at the target. m and log s are
    kept apart, because their sum would be rounded to the digits of m, which may be large. Each panel has a
    maximum and a sum of its own; they are put together at the end. The outer loop is over the vocabulary, so
    that each row of the weight is read once, and its gradient is complete after one turn.
    """

    @staticmethod
    def forward(ctx: Any, options: _Options, *tensors: Any) -> torch.Tensor:
        hidden, weight, bias, target = tensors
        tokens, vocabulary, wide = len(hidden), len(weight), options.wide
        # This raises torch's error for a target out of range. The tensor of zeros has one element in memory.
        zeros = torch.zeros((), dtype=wide, device=hidden.device).expand(tokens, vocabulary)
        F.nll_loss(zeros, target, ignore_index=options.ignore_index, reduction="none")
        panels = list(_ranges(vocabulary, _columns(vocabulary)))
        maxima, sums, shifts = hidden.new_empty((3, len(panels), tokens), dtype=wide).unbind()
        found = hidden.new_zeros(tokens, dtype=wide)
        for panel, columns in enumerate(panels):
            for rows in _ranges(tokens, _rows(vocabulary)):
                logits = _logits(hidden[rows], weight[columns], bias, columns, options)
                place, inside = _place(target[rows], columns)
                found[rows] += torch.where(inside, logits.gather(1, place[:, None])[:, 0], 0)
                # A finite maximum, for a panel in which all logits are -inf.
                maximum = logits.amax(1).clamp_min_(torch.finfo(wide).min)
                logits.sub_(maximum[:, None])
                maxima[panel, rows] = maximum
                if options.smoothing:
                    shifts[panel, rows] = logits.sum(1)
                sums[panel, rows] = logits.exp_().sum(1)
                del logits  # before the next are made
        maximum = maxima.amax(0)
        # In fp64, so that each loss is rounded once. There are few numbers: one for each token and panel.
        below = maxima.double() - maximum
        total = (sums * below.exp()).sum(0)
        log_sum = total.log()
        losses: torch.Tensor = (log_sum + (maximum.double() - found)) * (1 - options.smoothing)
        if options.smoothing:
            sizes = [each.stop - each.start for each in panels]
            below.mul_(torch.tensor(sizes, dtype=below.dtype, device=below.device)[:, None])
            losses -= ((shifts + below).sum(0) - vocabulary * log_sum) * (options.smoothing / vocabulary)
        ctx.options = options
        ctx.save_for_backward(hidden, weight, bias, target, maximum, total.to(wide))
        return losses.masked_fill_(target == options.ignore_index, 0).to(wide)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            _refuse("in a backward with create_graph=True")
        hidden, weight, bias, target, maximum, total = ctx.saved_tensors
        options, vocabulary = ctx.options, len(weight)
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[1:4]
        scale = gradients[0].masked_fill(target == options.ignore_index, 0)
        of_hidden = _Sums(hidden.new_zeros(hidden.shape), options, alone=vocabulary <= _columns(vocabulary))
        of_weight = weight.new_zeros(weight.shape) if for_weight else None
        of_bias = bias.new_empty(bias.shape) if for_bias else None
        for columns in _ranges(vocabulary, _columns(vocabulary)):
            matrix = weight[columns]
            of_matrix = None
            if of_weight is not None:
                of_matrix = _Sums(of_weight[columns], options, alone=len(hidden) <= _rows(vocabulary))
            of_part = matrix.new_zeros(len(matrix), dtype=options.wide)
            for rows in _ranges(len(hidden), _rows(vocabulary)):
                part = hidden[rows]
                logits = _logits(part, matrix, bias, columns, options)
                logits.sub_(maximum[rows, None]).exp_().mul_((scale[rows] / total[rows])[:, None])
                if options.smoothing:
                    logits.sub_((scale[rows] * (options.smoothing / vocabulary))[:, None])
                place, inside = _place(target[rows], columns)
                wanted = torch.where(inside, scale[rows] * (options.smoothing - 1), 0)
                logits.index_put_(
                    (torch.arange(len(part), device=part.device), place), wanted, accumulate=True
                )
                if for_hidden:
                    of_hidden.add(rows, logits, matrix)
                if of_matrix is not None:
                    of_matrix.add(slice(None), logits.t(), part)
                if for_bias:
                    of_part += logits.sum(0)
                del logits
            if of_matrix is not None:
                of_matrix.finish()
            if of_bias is not None:
                of_bias[columns] = of_part
        return None, of_hidden.finish() if for_hidden else None, of_weight, of_bias, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        _refuse("in forward-mode differentiation")


class _Sums:
    """Sums of products of matrices, as the rows of a gradient.

    Where rows get several products, these and their sums are fp32: rounding each to bf16 would add as much
    error as the rounding of the gradient. Where they get one, the product is rounded, as in plain torch.
    """

    def __init__(self, gradient: torch.Tensor, options: _Options, *, alone: bool) -> None:
        """gradient: zeros, to which the sums are written. alone: whether each row gets one product only."""
        self._gradient = gradient
        self._options = options
        self._alone = alone
        dtype = options.dtype if alone else options.wide
        self._total = gradient if gradient.dtype == dtype else torch.zeros_like(gradient, dtype=dtype)

    def add(self, rows: slice, factor: torch.Tensor, operand: torch.Tensor) -> None:
        """Add `factor`, of the sums' dtype, times `operand`, of its own, to the rows `rows` of the total."""
        total, dtype = self._total[rows], self._options.dtype
        if self._alone:
            torch.mm(factor.to(dtype), operand.to(dtype), out=total)
        elif total.is_cuda and dtype != total.dtype and _HAS_WIDE_PRODUCTS:
            # Products of low precision with sums and results in fp32. A CPU has none in torch.
            torch.addmm(total, factor.to(dtype), operand.to(dtype), out_dtype=total.dtype, out=total)
        else:
            total.addmm_(factor, operand.to(total.dtype))

    def finish(self) -> torch.Tensor:
        """Return the gradient."""
        return self._gradient if self._total is self._gradient else self._gradient.copy_(self._total)


_HAS_WIDE_PRODUCTS = hasattr(torch.ops.aten.addmm, "dtype_out")


def _columns(vocabulary: int) -> int:
    return min(vocabulary, _COLUMNS)


def _rows(vocabulary: int) -> int:
    return _PANEL // _columns(vocabulary)


def _ranges(number: int, size: int) -> Iterator[slice]:
    for start in range(0, number, size):
        yield slice(start, min(start + size, number))


def _logits(
    hidden: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, columns: slice, options: _Options
) -> torch.Tensor:
    """Return the logits of a panel, (rows, columns), in the dtype of sums. `out` keeps autocast away, within
    which a backward might run.
    """
    hidden, matrix = hidden.to(options.dtype), matrix.to(options.dtype)
    logits = hidden.new_empty(len(hidden), len(matrix))
    if bias is None:
        torch.mm(hidden, matrix.t(), out=logits)
    else:
        torch.addmm(bias[columns].to(options.dtype), hidden, matrix.t(), out=logits)
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
