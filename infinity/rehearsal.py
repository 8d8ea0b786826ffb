"""What the runtime itself takes of the trainer's time: small models are trained with it and without it.

Operations that are timed alone know nothing of the hooks around them: a parameter that is looked up, tensors
that are packed and unpacked, a gradient that is taken over, an update that is queued. On the CPU all that
comes on top of them. Each costs about the same for a small tensor as for a large one, so small models tell.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from infinity.config import Budget, Precision
from infinity.estimate import estimate_step
from infinity.operators import isolated
from infinity.planning import Available, make_plan
from infinity.rules import Rule
from infinity.wiring import carry_out

_WIDTH = 256
"""Of layers: large enough that they drive the interpreter's code and objects out of the caches, as a model's
do. With 8 a use costs half as much."""
_FEW, _MANY = 4, 20
"""Layers, or operations that save a tensor."""

_ROUNDS = 15
_LEARNING = 3
"""Rounds in which the runtime learns the order; they do not count."""

_BUDGET = Budget(host=64 << 20)
"""Of a tiny model: all of it is in RAM."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Overhead:
    """Seconds of the trainer's thread beyond the model's own operations."""

    step: float = 0.0
    use: float = 0.0
    """Of one operation that takes a parameter, with its share of the backward and of the update."""
    saved: float = 0.0
    """Of one tensor that is saved for backward."""

    def seconds(self, uses: int, saved: int) -> float:
        """Of a step of one micro-batch with so many of them."""
        return self.step + self.use * uses + self.saved * saved

    @property
    def chunk(self) -> float:
        """Of an update that streams through staging, beyond the use: handing out its reads and writes takes
        about as much once more (0.46 ms beside uses of 0.42 to 0.53 ms; 30M parameters)."""
        return self.use


def overhead(*, train: bool) -> Overhead:
    """Of a step where the CPU computes, or of a forward without gradients.

    Takes 0.9 s; no state of the caller's changes.
    """
    with _undisturbed(), torch.set_grad_enabled(train), ExitStack() as opened:
        few, layers, saves = (
            opened.enter_context(_Rehearsal(*sizes, train=train))
            for sizes in ((_FEW, 0), (_MANY, 0), (_FEW, _MANY))
        )
        seconds = [(few.seconds(), layers.seconds(), saves.seconds()) for _ in range(_ROUNDS)][_LEARNING:]
    # What others at work add in one round they add to all three: differences of a round have less of it.
    more = saves.saved - few.saved
    saved = max(0.0, statistics.median(c - a for a, _, c in seconds) / more) if more else 0.0
    by_layers = statistics.median(b - a for a, b, _ in seconds) - saved * (layers.saved - few.saved)
    use = max(0.0, by_layers / (layers.uses - few.uses))
    step = statistics.median(a for a, _, _ in seconds) - use * few.uses - saved * few.saved
    return Overhead(step=max(0.0, step), use=use, saved=saved)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Inside, whatever region the caller is in, tensors are real and have gradients, and random numbers are
    not the caller's."""
    with isolated(_CPU), torch.inference_mode(False), _disable_current_modes():
        yield


class _Layers(nn.Module):
    """`uses` products with a parameter, then `saves` operations that only save their outcome."""

    def __init__(self, uses: int, saves: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(uses))
        self.saves = saves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        for _ in range(self.saves):
            x = torch.tanh(x)
        return x.sum()


class _Rehearsal:
    """A tiny model twice: as it is, and in pages."""

    def __init__(self, uses: int, saves: int, *, train: bool) -> None:
        precision = Precision(compute="bf16", accumulate="compute")
        with _CPU:
            self._plain, self._paged = _Layers(uses, saves).to(torch.bfloat16), _Layers(uses, saves)
            self._x = torch.ones(_WIDTH, _WIDTH, dtype=torch.bfloat16)
        estimate = estimate_step(self._paged, (self._x,), precision=precision, device=_CPU, train=train)
        assert estimate is not None
        self.uses, self.saved = estimate.uses, estimate.saved
        self._optimizer = torch.optim.AdamW(self._paged.parameters(), lr=0.0) if train else None
        self._plan = make_plan(
            self._paged,
            None if self._optimizer is None else Rule.of(self._optimizer, precision.states),
            budget=_BUDGET,
            precision=precision,
            device=_CPU,
            available=Available(device=0, host=0),
        )

    def __enter__(self) -> _Rehearsal:
        self._runtime = carry_out(self._plan, self._paged, self._optimizer, budget=_BUDGET)
        return self

    def __exit__(self, *_: object) -> None:
        self._runtime.close()

    def seconds(self) -> float:
        """That a step in pages takes longer than one without them and without an update."""
        start = time.perf_counter()
        self._step(self._plain)
        self._plain.zero_grad()
        between = time.perf_counter()
        self._step(self._paged)
        if self._optimizer is not None:
            self._runtime.optimizer.step()
            self._runtime.optimizer.zero_grad()
        return (time.perf_counter() - between) - (between - start)

    def _step(self, model: nn.Module) -> None:
        loss = model(self._x)
        if self._optimizer is not None:
            loss.backward()
