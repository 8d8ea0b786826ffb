"""Random programs on what autograd saves: operations, views, edits, and backwards of all kinds, with errors.

A program runs in plain PyTorch and with residual pages. Both must see the same values, and errors of the same
kind at the same instructions.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from infinity.activations.autograd_hooks import drop_left_tasks

SIDE = 32
SMALLEST = 1024
"""Bytes from which a storage shall become a page: a quarter of a whole register's."""

Saving = Callable[[], AbstractContextManager[None]]
"""Function that returns a context in which an operation saves tensors."""


class Failure(Exception):
    """An error of a program."""


class Saves(torch.autograd.Function):
    """x * sin(x). Saves its input, its output and a tensor that nobody else has; and the input twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        sine = x.sin()
        y = x * sine
        ctx.save_for_backward(x, y, sine, x)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        x, y, sine, again = ctx.saved_tensors
        return gradient * (sine + again * x.cos()) + 0 * y


def _same_shape(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = min(a.shape[0], b.shape[0]), min(a.shape[1], b.shape[1])
    return a[:rows, :columns], b[:rows, :columns]


def _product(a: Tensor, b: Tensor) -> Tensor:
    inner = min(a.shape[1], b.shape[0])
    return torch.tanh(a[:, :inner] @ b[:inner])


def _raise(a: Tensor, b: Tensor) -> Tensor:
    raise Failure


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sine": lambda a, b: a.sin(),
    "sigmoid": lambda a, b: a.sigmoid(),
    "softmax": lambda a, b: a.softmax(-1),
    "cube": lambda a, b: a * a * a.tanh(),
    "product": _product,
    "times": lambda a, b: torch.mul(*_same_shape(a, b)),
    "choice": lambda a, b: torch.where(*(_same_shape(a, b)[0] > 0, *_same_shape(a, b))),
    "function": lambda a, b: Saves.apply(a),
    "checkpoint": lambda a, b: checkpoint(lambda x: x.sin().sigmoid() * x, a, use_reentrant=False),
    "transposed": lambda a, b: a.t(),
    "rows": lambda a, b: a[len(a) // 8 :],
    "every other": lambda a, b: a[:, ::2] if a.shape[1] > 2 else a[:],
    "expanded": lambda a, b: a[:1].expand(SIDE, -1),
    "reshaped": lambda a, b: a.reshape(a.shape[1], a.shape[0]),
    "detached": lambda a, b: a.detach(),
    "edited": lambda a, b: a.mul_(0.5),
    "edited without grad": lambda a, b: _edited(a),
    "edited rows": lambda a, b: a[:2].zero_(),
    "an edited alias": lambda a, b: a.detach().add_(0.25),
    "failing": _raise,
}
"""Name -> function of two registers, whose matrix goes to a new register."""


@torch.no_grad()
def _edited(a: Tensor) -> Tensor:
    return a.sub_(0.5)


def _backward(session: Session, a: int, b: int, retain: bool) -> None:
    session.at(a).sum().backward(retain_graph=retain)


def _backward_of_two(session: Session, a: int, b: int, retain: bool) -> None:
    (session.at(a).sum() + session.at(b).cos().sum()).backward(retain_graph=retain)


def _grad(session: Session, a: int, b: int, retain: bool) -> Any:
    wanted = session.at(b)
    return torch.autograd.grad(session.at(a).sum(), wanted, retain_graph=retain, allow_unused=True)


def _grad_of_grad(session: Session, a: int, b: int, retain: bool) -> Any:
    leaf = session.leaves[b % len(session.leaves)]
    (first,) = torch.autograd.grad(session.at(a).sum(), leaf, create_graph=True)
    first.square().sum().backward(retain_graph=retain)
    return first.detach()


def _look(session: Session, a: int, b: int, retain: bool) -> Any:
    node, found = session.at(a).grad_fn, []
    for name in sorted(dir(node)):
        if name.startswith("_saved_"):
            saved = getattr(node, name)
            found.append(saved.detach().clone() if isinstance(saved, Tensor) else None)
    return found


def _drop(session: Session, a: int, b: int, retain: bool) -> None:
    if len(session.registers) > 1:
        del session.registers[a % len(session.registers)]


def _fail_in_backward(session: Session, a: int, b: int, retain: bool) -> None:
    def fail(gradient: Any) -> None:
        raise Failure

    tensor = session.at(a)
    if tensor.grad_fn is None:
        tensor.register_hook(fail)
    else:  # a hook on a view whose base was edited ends the process in PyTorch 2.13 (tensor.register_hook)
        tensor.grad_fn.register_prehook(fail)


ACTIONS: dict[str, Callable[[Session, int, int, bool], Any]] = {
    "backward": _backward,
    "backward of two": _backward_of_two,
    "grad": _grad,
    "grad of grad": _grad_of_grad,
    "look": _look,
    "drop": _drop,
    "fail in backward": _fail_in_backward,
}
"""Name -> function (session, register, register, whether graphs are retained) of its results."""

Program = list[tuple[str, int, int, bool]]
"""Instructions (name of an operation or an action, register, register, whether graphs are retained)."""

_SAVE = ("sine", "sigmoid", "softmax", "cube", "product", "times", "function")
_numbers = st.integers(0, 30)


def _instruction(*names: str) -> st.SearchStrategy[Any]:
    return st.tuples(st.sampled_from(names), _numbers, _numbers, st.booleans())


_operation = st.one_of(_instruction(*_SAVE), _instruction(*OPERATIONS))
programs = st.tuples(
    st.lists(_operation, min_size=6, max_size=14),
    st.lists(st.one_of(_instruction(*ACTIONS), _operation), min_size=1, max_size=8),
).map(lambda parts: [*parts[0], *parts[1], ("backward", -1, 0, False)])


class Session:
    """Registers, and what a program has seen."""

    def __init__(self, saving: Saving) -> None:
        generator = torch.Generator().manual_seed(3)
        self.leaves = [torch.randn(SIDE, SIDE, generator=generator, requires_grad=True) for _ in range(2)]
        self.registers = [each * 1 for each in self.leaves] + [self.leaves[0]]
        self._saving = saving

    def at(self, number: int) -> Tensor:
        return self.registers[number % len(self.registers)]

    def run(self, program: Program) -> list[Any]:
        """Run a program. Returns the results of its actions and the kinds of its errors, and in the end all
        registers and gradients.
        """
        seen = [self._step(*each) for each in program]
        seen += [each.detach().clone() for each in self.registers]
        return seen + [each.grad for each in self.leaves]

    def _step(self, name: str, a: int, b: int, retain: bool) -> Any:
        try:
            if name in ACTIONS:
                return ACTIONS[name](self, a, b, retain)
            with self._saving():
                self.registers.append(OPERATIONS[name](self.at(a), self.at(b)))
        except (Failure, RuntimeError) as error:
            return _kind(error)
        return None


def _kind(error: Exception) -> tuple[str, str]:
    """The type of an error, and the first words of its text."""
    return type(error).__name__, str(error)[:60]


def seen_by(program: Program, saving: Saving) -> list[Any]:
    found = Session(saving).run(program)
    drop_left_tasks()
    gc.collect()
    return found
