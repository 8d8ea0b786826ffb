"""Optimizer rules: torch's optimizers, their states as arrays of a page, their groups as hyper-parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from infinity.config import round_up
from infinity.cpu_adam import CODE_BLOCK, SGD, Adagrad, Adam, AdamW, Hyper
from infinity.errors import ConfigError, UnsupportedOptimizer
from infinity.formats.moments import DTYPES
from infinity.tiers import PAGE_ALIGNMENT

Group = Mapping[str, Any]
"""One of an optimizer's `param_groups`."""

_MASTERS = {
    torch.bfloat16: (("remainder", torch.int16),),
    torch.float16: (("master", torch.float32),),
    torch.float32: (),
}


@dataclass(frozen=True)
class StateArray:
    """A flat array that an optimizer page holds for each chunk."""

    name: str
    """"remainder" or "master" (the missing bits of the fp32 master, or all of it), torch's name of a moment,
    or such a name with ".scale" (the exponents of int8 codes)."""
    dtype: torch.dtype
    per: int = 1
    """Elements of the parameter to which one entry belongs."""

    def entries(self, start: int, count: int) -> tuple[int, int]:
        """The entries of elements [start, start + count): the first, and how many. `per` divides start."""
        return start // self.per, -(-count // self.per)


@dataclass(frozen=True)
class StateFormat:
    """The places of a chunk's arrays in an optimizer page."""

    arrays: tuple[StateArray, ...]
    count: int
    """Elements of the chunk."""
    offsets: tuple[int, ...] = field(init=False)
    """Bytes from the chunk's start to each array: multiples of 4096."""
    sizes: tuple[int, ...] = field(init=False)
    """Bytes of each array's entries."""
    nbytes: int = field(init=False)
    """Bytes of all arrays: a multiple of 4096, 0 without arrays."""

    def __post_init__(self) -> None:
        offsets, sizes, end = [], [], 0
        for array in self.arrays:
            _, entries = array.entries(0, self.count)
            offsets.append(end)
            sizes.append(entries * array.dtype.itemsize)
            end += round_up(sizes[-1], PAGE_ALIGNMENT)
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "sizes", tuple(sizes))
        object.__setattr__(self, "nbytes", end)

    def place(self, name: str, start: int, count: int) -> tuple[int, int]:
        """The place of elements [start, start + count) of an array: (offset from the chunk's start, size), in
        bytes."""
        for array, offset in zip(self.arrays, self.offsets, strict=True):
            if array.name == name:
                first, entries = array.entries(start, count)
                return offset + first * array.dtype.itemsize, entries * array.dtype.itemsize
        raise KeyError(name)


def scale_of(moment: str) -> str:
    """The name of the array that holds a moment's exponents."""
    return f"{moment}.scale"


def state_format(arrays: Sequence[StateArray], count: int) -> StateFormat:
    """The format of a chunk of `count` elements with these arrays."""
    return StateFormat(tuple(arrays), count)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The update rule of a torch optimizer. Use `Rule.of`; each family of optimizers has a subclass.

    A rule keeps only those of the groups' options that the format of states depends on. Learning rates and
    all other options are read from the live group at every update.
    """

    name: str
    """The optimizer's class name."""
    moments: tuple[str, ...]
    """torch's state keys of the moments, in the order of the page."""
    first_moment: str | None
    """The moment that `cpu_adam.Update.first_moment` takes."""
    second_moment: str | None
    """The moment that `cpu_adam.Update.second_moment` takes."""
    counts_steps: bool
    """Whether torch's state has a "step" entry."""
    from_the_start: bool
    """Whether torch makes the states of every parameter together with the optimizer."""
    states: str = "fp32"
    """The format of the moments, as `Precision.states` names it."""

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, states: str = "fp32") -> Rule:
        """The rule of `optimizer`. states: the format of moments, as `Precision.states` names it.

        Raises UnsupportedOptimizer unless its type is exactly one of torch.optim's AdamW, Adam, SGD and
        Adagrad with options that have an equal here, and ConfigError for a value out of range.
        """
        rules = {
            torch.optim.AdamW: _adam,
            torch.optim.Adam: _adam,
            torch.optim.SGD: _sgd,
            torch.optim.Adagrad: _adagrad,
        }
        make = rules.get(type(optimizer))
        if make is None:
            known = ", ".join(each.__name__ for each in rules)
            kind = type(optimizer)
            raise UnsupportedOptimizer(
                f"The optimizer is a {kind.__module__}.{kind.__qualname__}, whose update is not known here.",
                f"Use one of torch.optim's {known} itself, not a subclass.",
            )
        rule = dataclasses.replace(make(optimizer), states=states)
        rule.check(optimizer.param_groups)
        return rule

    def arrays(self, dtype: torch.dtype) -> tuple[StateArray, ...]:
        """The arrays of an optimizer page whose parameters are of `dtype` in their page."""
        if dtype not in _MASTERS:
            raise ConfigError(
                f"Parameters of {dtype} cannot be trained.",
                f"Use one of {', '.join(str(each) for each in _MASTERS)}, or freeze them.",
            )
        master = tuple(StateArray(*each) for each in _MASTERS[dtype])
        moments: list[StateArray] = []
        for name in self.moments:
            moments.append(StateArray(name, DTYPES[self.states]))
            if self.states == "int8":
                moments.append(StateArray(scale_of(name), torch.uint8, CODE_BLOCK))
        return master + tuple(moments)

    def moments_of(self, arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The moments among a chunk's arrays (by name), as arguments of `cpu_adam.Update`."""
        found = {}
        for which, moment in (("first", self.first_moment), ("second", self.second_moment)):
            if moment is not None:
                found[f"{which}_moment"] = arrays[moment]
                if scale_of(moment) in arrays:
                    found[f"{which}_scale"] = arrays[scale_of(moment)]
        return found

    def check(self, groups: Sequence[Group]) -> None:
        """Check the groups before anything is updated. Raises what `hyper` would for any of them."""
        for group in groups:
            self.hyper(group, 1, True)

    def hyper(self, group: Group, step: int, first: bool) -> Hyper:
        """The hyper-parameters of an update of parameters in `group`, as they are now.

        `step` is 1 for a parameter's first update; `first` says whether its momentum buffer has no content
        yet. Raises UnsupportedOptimizer for an option that has no equal here, and ConfigError for a value
        out of range or one that needs other states than `moments`.
        """
        raise NotImplementedError

    def written(self, group: Group) -> tuple[str, ...]:
        """The moments that an update of parameters in `group` writes."""
        return self.moments

    def loaded(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group that torch's optimizer of this type makes of a state dict's group when it loads it."""
        return group

    def initial(self, moment: str) -> float:
        """The value of every element of a moment before the first update."""
        return 0.0


class _AdamRule(Rule):
    def hyper(self, group: Group, step: int, first: bool) -> Hyper:
        _refuse(self.name, group, "amsgrad", "differentiable")
        # torch 2.6's AdamW has no such option: it always decouples.
        decoupled = group.get("decoupled_weight_decay", self.name == "AdamW")
        betas = group["betas"]
        kind = AdamW if decoupled else Adam
        return kind(
            lr=_number("lr", group["lr"]),
            betas=(_number("betas[0]", betas[0], below=1.0), _number("betas[1]", betas[1], below=1.0)),
            eps=_number("eps", group["eps"]),
            weight_decay=_number("weight_decay", group["weight_decay"]),
            step=step,
            maximize=bool(group.get("maximize", False)),
        )

    def loaded(self, group: dict[str, Any]) -> dict[str, Any]:
        # torch's AdamW stays one even with a state dict of Adam.
        return {**group, "decoupled_weight_decay": True} if self.name == "AdamW" else group


class _SgdRule(Rule):
    def hyper(self, group: Group, step: int, first: bool) -> Hyper:
        _refuse(self.name, group, "differentiable")
        momentum = _number("momentum", group["momentum"])
        dampening = _number("dampening", group["dampening"], least=-math.inf)
        nesterov = bool(group["nesterov"])
        if momentum and not self.moments:
            raise ConfigError(
                f"A group's momentum is now {momentum}, but no group had momentum when memory for the "
                "optimizer's states was laid out.",
                "Give the optimizer its momentum before it is offloaded.",
            )
        if nesterov and (momentum == 0 or dampening != 0):
            raise ConfigError(
                f"Nesterov momentum was asked for with momentum {momentum} and dampening {dampening}.",
                "Give a momentum above 0 and a dampening of 0, or nesterov=False.",
            )
        return SGD(
            lr=_number("lr", group["lr"]),
            momentum=momentum,
            dampening=dampening,
            weight_decay=_number("weight_decay", group["weight_decay"]),
            nesterov=nesterov,
            first_step=first,
            maximize=bool(group.get("maximize", False)),
        )

    def written(self, group: Group) -> tuple[str, ...]:
        return self.moments if _number("momentum", group["momentum"]) else ()


@dataclass(frozen=True, kw_only=True)
class _AdagradRule(Rule):
    accumulator: float
    """The value that torch's constructor fills sums with, even where a group names another one."""

    def hyper(self, group: Group, step: int, first: bool) -> Hyper:
        _refuse(self.name, group, "differentiable")
        return Adagrad(
            lr=_number("lr", group["lr"]),
            lr_decay=_number("lr_decay", group["lr_decay"]),
            eps=_number("eps", group["eps"]),
            weight_decay=_number("weight_decay", group["weight_decay"]),
            step=step,
            maximize=bool(group.get("maximize", False)),
        )

    def initial(self, moment: str) -> float:
        return self.accumulator


def _adam(optimizer: torch.optim.Optimizer) -> Rule:
    return _AdamRule(
        name=type(optimizer).__name__,
        moments=("exp_avg", "exp_avg_sq"),
        first_moment="exp_avg",
        second_moment="exp_avg_sq",
        counts_steps=True,
        from_the_start=False,
    )


def _sgd(optimizer: torch.optim.Optimizer) -> Rule:
    buffer = "momentum_buffer" if any(group["momentum"] for group in optimizer.param_groups) else None
    return _SgdRule(
        name="SGD",
        moments=() if buffer is None else (buffer,),
        first_moment=buffer,
        second_moment=None,
        counts_steps=False,
        from_the_start=False,
    )


def _adagrad(optimizer: torch.optim.Optimizer) -> Rule:
    return _AdagradRule(
        name="Adagrad",
        moments=("sum",),
        first_moment=None,
        second_moment="sum",
        counts_steps=True,
        from_the_start=True,
        accumulator=float(optimizer.defaults["initial_accumulator_value"]),
    )


def _refuse(optimizer: str, group: Group, *options: str) -> None:
    # foreach, fused and capturable choose how torch computes, not what: they need no check.
    for option in options:
        if group.get(option, False):
            raise UnsupportedOptimizer(
                f"{optimizer} with {option}=True has no equal here.", f"Use {option}=False."
            )


def _number(name: str, value: Any, *, least: float = 0.0, below: float = math.inf) -> float:
    """`value`, a number or a tensor of one element, as a float in [least, below), and finite."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            raise UnsupportedOptimizer(
                f"A group's {name} requires gradients, which an update does not give it.",
                f"Give a {name} that does not require gradients.",
            )
        value = value.item() if value.numel() == 1 else value
    if not isinstance(value, (int, float)):
        raise ConfigError(f"A group's {name} is {value!r}.", "Give a number.")
    if not (math.isfinite(value) and least <= value < below):
        limits = " and below 1" if below == 1.0 else ""
        at_least = "" if least == -math.inf else f" and at least {least:g}"
        raise ConfigError(f"A group's {name} is {value}.", f"Give a finite number{at_least}{limits}.")
    return float(value)
