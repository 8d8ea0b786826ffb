"""Updates on the device that computes, by torch's operations, and sums of squares: for pages that rest there.

An update is `cpu_adam.Update`, with arrays of any one device, and the arithmetic is that of
csrc/cpu_adam/rules.inl in its order of operations, in float32, with constants that are computed in float64
and rounded once. A product and a sum that the kernels fuse are two operations here, or fused where torch does
so: last bits may differ. Random bits, and how values are rounded to their formats, are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from infinity.cpu_adam import BLOCK, SGD, Adagrad, Adam, AdamW, Hyper, Update
from infinity.device_moments import Moment, Window, make_noise
from infinity.workspace import Workspace, high_halves, integers, low_halves, quiet

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class _Operands:
    """A window of an update, float32 (count,) each. Moments and parameter are changed in place."""

    gradient: torch.Tensor
    """As the rule sees it; it may be the page's own, and is only read."""
    parameter: torch.Tensor
    first: torch.Tensor | None
    second: torch.Tensor | None
    room: torch.Tensor
    """For a gradient that the rule changes."""
    spare: torch.Tensor


def update(work: Update, space: Workspace) -> None:
    """Queue an optimizer step over a page whose arrays are all on the workspace's device.

    Gradients that are not finite are updated with, as by the CPU's kernels, and not reported.
    `work.accumulated` is None. Nothing is allocated, and nothing waits for the device.
    """
    assert work.accumulated is None
    moments = _moments(work)
    space.order()
    with torch.no_grad():
        for segment in work.segments:
            hyper = work.hypers[segment.hyper]
            for done in range(0, segment.count, space.elements):
                count = min(space.elements, segment.count - done)
                window = Window(segment.start + done, count, segment.index + done, segment.seed)
                _update(work, hyper, moments, window, space)


def sum_squares(values: torch.Tensor, sums: torch.Tensor, space: Workspace) -> None:
    """Queue the sum of squares of every started block of BLOCK values, as float64, into `sums`.

    Finite if and only if the block's values are: the square of any is far from float64's largest.
    """
    for start in range(0, values.numel(), space.elements):
        part = values[start : start + space.elements]
        squares = space.doubles[: part.numel()].copy_(part)
        squares.mul_(squares)
        first, whole = start // BLOCK, part.numel() // BLOCK
        if whole:
            rows = squares[: whole * BLOCK].view(whole, BLOCK)
            torch.sum(rows, 1, out=sums[first : first + whole])
        if whole * BLOCK < part.numel():
            torch.sum(squares[whole * BLOCK :], 0, out=sums[first + whole])


def _moments(work: Update) -> list[Moment]:
    """Those that there are, the first one first."""
    given = ((work.first_moment, work.first_scale, True), (work.second_moment, work.second_scale, False))
    return [
        Moment(stored, scale if isinstance(scale, torch.Tensor) else None, first)
        for stored, scale, first in given
        if isinstance(stored, torch.Tensor)
    ]


def _update(work: Update, hyper: Hyper, moments: list[Moment], window: Window, space: Workspace) -> None:
    moments = [moment for moment in moments if _has(hyper, first=moment.first)]
    loaded = {moment.first: moment.load(window, space) for moment in moments}
    operands = _Operands(
        gradient=_gradient(work, hyper, window, space),
        parameter=_parameter(work, window, space),
        first=loaded.get(True),
        second=loaded.get(False),
        room=space.gradient[: window.count],
        spare=space.one[: window.count],
    )
    _rule_of(hyper)(hyper, operands)
    _store_parameter(work, operands.parameter, window, space)
    if any(moment.stored.dtype != torch.float32 for moment in moments):
        make_noise(window, space)
        for moment in moments:
            moment.store(window, space)


def _gradient(work: Update, hyper: Hyper, window: Window, space: Workspace) -> torch.Tensor:
    stored = window.of(_tensor(work.grad))
    scale = -work.scale if hyper.maximize else work.scale
    if stored.dtype == torch.float32 and scale == 1.0:
        return stored
    gradient = space.gradient[: window.count]
    if stored.dtype == torch.float32:
        return torch.mul(stored, scale, out=gradient)
    gradient.copy_(stored)
    return gradient if scale == 1.0 else gradient.mul_(scale)


def _parameter(work: Update, window: Window, space: Workspace) -> torch.Tensor:
    """The masters: those of the page, or put together in the workspace."""
    stored = window.of(_tensor(work.parameter))
    if work.remainder is None:
        return stored
    master, low = space.parameter[: window.count], integers(space.one)[: window.count]
    low.copy_(window.of(_tensor(work.remainder)))
    integers(master).copy_(stored.view(torch.int16)).bitwise_left_shift_(16).add_(low)
    return master


def _store_parameter(work: Update, master: torch.Tensor, window: Window, space: Workspace) -> None:
    """Split the masters, or copy them out, as `work` has it."""
    if work.remainder is not None:
        quiet(master)
        _store_half_up(master, window.of(_tensor(work.parameter)), space)
        window.of(_tensor(work.remainder)).copy_(low_halves(master))
    elif work.copy is not None:
        copy = window.of(_tensor(work.copy))
        if copy.dtype == torch.bfloat16:
            quiet(master)
            _store_half_up(master, copy, space)
        else:
            copy.copy_(master)


def _store_half_up(values: torch.Tensor, into: torch.Tensor, space: Workspace) -> None:
    """bfloat16 as the exact split has it, (bits + 0x8000) >> 16; see infinity.masters."""
    rounded = torch.add(integers(values), 0x8000, out=integers(space.one)[: values.numel()])
    into.view(torch.int16).copy_(high_halves(rounded))


def _has(hyper: Hyper, *, first: bool) -> bool:
    """Whether the rule has a first moment, or a second."""
    if isinstance(hyper, SGD):
        return first and hyper.momentum != 0
    return not first or isinstance(hyper, Adam)


def _rule_of(hyper: Hyper) -> Callable[[Hyper, _Operands], None]:
    found: dict[type, Callable[..., None]] = {AdamW: _adam, Adam: _adam, SGD: _sgd, Adagrad: _adagrad}
    return found[type(hyper)]


def _adam(h: Adam, on: _Operands) -> None:
    p, g, m, v, spare = on.parameter, on.gradient, on.first, on.second, on.spare
    assert m is not None and v is not None
    decoupled = isinstance(h, AdamW)
    if not decoupled:
        g = torch.add(g, p, alpha=h.weight_decay, out=on.room)
    _average(h.betas[0], g, m, spare)
    _average_of_squares(h.betas[1], g, v, spare)
    root_scale = 1.0 / math.sqrt(1.0 - h.betas[1] ** h.step)
    step_size = h.lr / (1.0 - h.betas[0] ** h.step)
    torch.sqrt(v, out=spare).mul_(root_scale).add_(h.eps)
    torch.div(m, spare, out=spare)
    if decoupled:  # the whole change is formed first: one rounding at the size of p
        spare.mul_(step_size).add_(p, alpha=h.lr * h.weight_decay)
        p.sub_(spare)
    else:
        p.add_(spare, alpha=-step_size)


def _average(beta: float, g: torch.Tensor, m: torch.Tensor, spare: torch.Tensor) -> None:
    """m = beta m + (1 - beta) g; the difference has the smaller of the two weights."""
    torch.sub(g, m, out=spare)
    if 1.0 - beta >= 0.5:
        torch.add(g, spare, alpha=-beta, out=m)
    else:
        m.add_(spare, alpha=1.0 - beta)


def _average_of_squares(beta: float, g: torch.Tensor, v: torch.Tensor, spare: torch.Tensor) -> None:
    """v = beta v + (1 - beta) g g."""
    weight = 1.0 - beta
    if weight < 0.5:  # v - w v keeps bits of w that beta as a float32 would lose; an infinite v stays so
        v.add_(torch.clamp(v, max=_LARGEST, out=spare), alpha=-weight)
    else:
        v.mul_(beta)
    v.addcmul_(torch.mul(g, weight, out=spare), g)


def _sgd(h: SGD, on: _Operands) -> None:
    p, m = on.parameter, on.first
    g = torch.add(on.gradient, p, alpha=h.weight_decay, out=on.room)
    if h.momentum:
        assert m is not None
        if h.first_step:
            m.copy_(g)
        else:
            m.mul_(h.momentum).add_(g, alpha=1.0 - h.dampening)
        g = torch.add(g, m, alpha=h.momentum, out=on.room) if h.nesterov else m
    p.add_(g, alpha=-h.lr)


def _adagrad(h: Adagrad, on: _Operands) -> None:
    p, v, spare = on.parameter, on.second, on.spare
    assert v is not None
    g = torch.add(on.gradient, p, alpha=h.weight_decay, out=on.room)
    v.addcmul_(g, g)
    torch.sqrt(v, out=spare).add_(h.eps)
    p.add_(torch.div(g, spare, out=spare), alpha=-h.lr / (1.0 + (h.step - 1) * h.lr_decay))


def _tensor(array: object) -> torch.Tensor:
    assert isinstance(array, torch.Tensor)
    return array
