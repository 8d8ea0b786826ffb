"""Optimizer rules: the state arrays and the hyper-parameters of each optimizer.

Optimizers of other packages that have a rule are recognised by the names of their classes. No package is
imported: an optimizer that exists has imported its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from infinity.config import round_up
from infinity.cpu_adam import CODE_BLOCK, SGD, Adagrad, Adam, AdamW, Hyper, Lion
from infinity.errors import ConfigError, UnsupportedOptimizer
from infinity.formats.encodings import DTYPES
from infinity.formats.muon import Muon
from infinity.tiers import PAGE_ALIGNMENT

Group = Mapping[str, Any]
"""An entry of a torch optimizer's `param_groups`: the group's options by name."""

_MASTERS = {
    torch.bfloat16: (("remainder", torch.int16),),
    torch.float16: (("master", torch.float32),),
    torch.float32: (),
}

AVERAGE = "average"
"""The name of the state array that holds the running averages of fp32 masters, in fp32."""


@dataclass(frozen=True)
class StateArray:
    """The name and dtype of a flat array that an optimizer page holds for each chunk."""

    name: str
    """"master": the fp32 masters of fp16 parameters. "remainder": the low 16 bits of fp32 masters, which bf16
    parameters lack (infinity/formats/encodings.py). A moment's key in torch's state, such as "exp_avg":
    the moment; with ".scale" appended, the exponents of its int8 codes. AVERAGE: the running averages of
    masters.
    """
    dtype: torch.dtype
    per: int = 1
    """Number of parameter elements that share one entry of the array."""

    def entries(self, start: int, count: int) -> tuple[int, int]:
        """Return (index of the first entry, number of entries) for the chunk's elements [start, start +
        count). start: a multiple of `per`.
        """
        return start // self.per, -(-count // self.per)


@dataclass(frozen=True)
class StateFormat:
    """The layout of one chunk's state arrays in an optimizer page."""

    arrays: tuple[StateArray, ...]
    count: int
    offsets: tuple[int, ...] = field(init=False)
    """Bytes from the start of the chunk's states to each array of `arrays`; multiples of 4096."""
    sizes: tuple[int, ...] = field(init=False)
    """Bytes of each array of `arrays`, without padding."""
    nbytes: int = field(init=False)
    """Bytes of all arrays with padding: a multiple of 4096; 0 if there are no arrays."""

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
        """Return (bytes from the start of the chunk's states, length in bytes) of the entries of the array
        `name` for the chunk's elements [start, start + count). Raises KeyError if there is no such array.
        """
        for array, offset in zip(self.arrays, self.offsets, strict=True):
            if array.name == name:
                first, entries = array.entries(start, count)
                return offset + first * array.dtype.itemsize, entries * array.dtype.itemsize
        raise KeyError(name)


def scale_of(moment: str) -> str:
    """The name of the array with the exponents of the int8 codes of `moment`."""
    return f"{moment}.scale"


def state_arrays(
    dtype: torch.dtype, moments: Sequence[str], states: str, *, average: bool = False
) -> tuple[StateArray, ...]:
    """The state arrays of parameters whose dtype in their page is `dtype`, in the order of a page.

    moments: the keys of the moments in torch's state. states: the format of the moments, as in
    `Precision.states`. average: whether running averages of masters are kept. Raises ConfigError if
    parameters of this dtype cannot be trained.
    """
    if dtype not in _MASTERS:
        raise ConfigError(
            f"Parameters of {dtype} cannot be trained.",
            f"Use one of {', '.join(str(each) for each in _MASTERS)}, or freeze them.",
        )
    found = [StateArray(*each) for each in _MASTERS[dtype]]
    for name in moments:
        found.append(StateArray(name, DTYPES[states]))
        if states == "int8":
            found.append(StateArray(scale_of(name), torch.uint8, CODE_BLOCK))
    if average:
        found.append(StateArray(AVERAGE, torch.float32))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The update rule of an optimizer: its states, and the hyper-parameters of its updates.

    `Rule.of` makes a rule. It stores only the options that determine which states there are. Learning rates
    and all other options are read from the optimizer's `param_groups` at every update.
    """

    name: str
    """The name of the optimizer's class: that in torch.optim, or "Lion"."""
    moments: tuple[str, ...] = ()
    """The keys of the moments in torch's state, in the order of a page."""
    first_moment: str | None = None
    """The key of the moment that is passed as `cpu_adam.Update.first_moment`; None if there is none."""
    second_moment: str | None = None
    """The key of the moment that is passed as `cpu_adam.Update.second_moment`; None if there is none."""
    counts_steps: bool = False
    """Whether torch's state of a parameter has an entry "step", the number of updates."""
    from_the_start: bool = False
    """Whether torch creates all states in the optimizer's constructor, and not at a parameter's first update.
    """
    states: str = "fp32"
    """The format of the moments, as in `Precision.states`."""
    average: float | None = None
    """The decay of the running averages of masters; None if there are none."""
    matrix: int = 0
    """Number of elements of the largest parameter, for Muon, whose updates take whole matrices; 0 for rules
    that update elements one by one.
    """

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, states: str = "fp32", average: float | None = None) -> Rule:
        """The rule of `optimizer`. states: the format of the moments, as in `Precision.states`. average: the
        decay of running averages of masters, from 0 to 1; None for no averages.

        An 8-bit optimizer of bitsandbytes has moments in "int8". Raises UnsupportedOptimizer if the
        optimizer's type is not exactly AdamW, Adam, SGD, Adagrad or Muon of torch.optim or one of
        `OTHERS`, or if an option is not implemented here. Raises ConfigError if the value of
        an option is out of range, and the errors of `recognised`.
        """
        known = [each for each in ("AdamW", "Adam", "SGD", "Adagrad", "Muon") if hasattr(torch.optim, each)]
        kind = type(optimizer)
        if kind in [getattr(torch.optim, each) for each in known]:
            name = kind.__name__
        elif (found := recognised(optimizer, states)) is not None:
            name, states = found
        else:
            raise UnsupportedOptimizer(
                f"The optimizer is a {kind.__module__}.{kind.__qualname__}, which is not implemented here.",
                f"Use one of torch.optim's {', '.join(known)} itself, not a subclass, or one of "
                f"{', '.join(OTHERS)}.",
            )
        if average is not None and not (type(average) in (int, float) and 0 <= average <= 1):
            raise ConfigError(f"The decay of averages is {average!r}.", "Give average= a number from 0 to 1.")
        rule = dataclasses.replace(_RULES[name](optimizer, name), states=states, average=average)
        rule.check(optimizer.param_groups)
        return rule

    def arrays(self, dtype: torch.dtype) -> tuple[StateArray, ...]:
        """The arrays of an optimizer page, for parameters whose dtype in their parameter page is `dtype`.
        Raises ConfigError if parameters of this dtype cannot be trained.
        """
        return state_arrays(dtype, self.moments, self.states, average=self.average is not None)

    def moments_of(self, arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Select a chunk's moments, and the exponents of moments stored as int8 codes, from its state arrays.

        arrays: all state arrays of the chunk, by name. Returns name of a field of `cpu_adam.Update` -> array.
        """
        found = {}
        for which, moment in (("first", self.first_moment), ("second", self.second_moment)):
            if moment is not None:
                found[f"{which}_moment"] = arrays[moment]
                if scale_of(moment) in arrays:
                    found[f"{which}_scale"] = arrays[scale_of(moment)]
        return found

    def check(self, groups: Sequence[Group]) -> None:
        """Check the options of all groups before anything is updated. Raises the errors of `hyper`."""
        for group in groups:
            self.hyper(group, 1, True)

    def hyper(self, group: Group, step: int, first: bool) -> Hyper:
        """The hyper-parameters for an update of parameters in `group`, from the group's current options.

        step: the number of the update, 1 for a parameter's first update. first: whether the parameter's
        momentum buffer is empty. Raises UnsupportedOptimizer if an option is not implemented here, and
        ConfigError if a value is out of range, or needs a moment that is not in `moments`.
        """
        raise NotImplementedError

    def whole(self, group: Group) -> Muon:
        """Return the options for updates of whole matrices of `group`. A rule whose `matrix` is not 0 has
        this method in place of `hyper`. Raises the errors of `hyper`.
        """
        raise NotImplementedError

    def written(self, group: Group) -> tuple[str, ...]:
        """The names of the moments that an update of parameters in `group` writes."""
        return self.moments

    def loaded(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return the options of torch's optimizer after it has loaded `group` from a state dict."""
        return group

    def initial(self, moment: str) -> float:
        """The value of all elements of the moment `moment` before the first update."""
        return 0.0


class _AdamRule(Rule):
    def hyper(self, group: Group, step: int, first: bool) -> Hyper:
        _refuse(self.name, group, "amsgrad", "differentiable")
        # AdamW of torch 2.6 does not have this option: its weight decay is always decoupled.
        decoupled = group.get("decoupled_weight_decay", self.name == "AdamW")
        kind = AdamW if decoupled else Adam
        return kind(
            lr=_number("lr", group["lr"]),
            betas=_betas(group),
            eps=_number("eps", group["eps"]),
            weight_decay=_number("weight_decay", group["weight_decay"]),
            step=step,
            maximize=bool(group.get("maximize", False)),
        )

    def loaded(self, group: dict[str, Any]) -> dict[str, Any]:
        # torch's AdamW keeps its decoupled weight decay, even if it loads a state dict of Adam. In torch 2.6
        # AdamW is not a subclass of Adam and has no such option.
        optional = self.name == "AdamW" and issubclass(torch.optim.AdamW, torch.optim.Adam)
        return {**group, "decoupled_weight_decay": True} if optional else group


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
    """The initial value of all sums of squares: the argument of the optimizer's constructor. As in torch, a
    group's own value is ignored.
    """

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


class _LionRule(Rule):
    def hyper(self, group: Group, step: int, first: bool) -> Hyper:
        if group.get("cautious_factor", 1.0) != 1.0:
            raise UnsupportedOptimizer(
                f"Lion with cautious_factor={group['cautious_factor']!r} is not implemented here.",
                "Use cautious_factor=1.0.",
            )
        return Lion(
            lr=_number("lr", group["lr"]),
            betas=_betas(group),
            weight_decay=_number("weight_decay", group["weight_decay"]),
            maximize=bool(group.get("maximize", False)),
        )


class _MuonRule(Rule):
    def check(self, groups: Sequence[Group]) -> None:
        if self.states == "int8" or self.average is not None:
            what = "averages" if self.average is not None else "states of 8 bits"
            raise UnsupportedOptimizer(f"Muon with {what} is not implemented here.", f"Leave {what} out.")
        for group in groups:
            self.whole(group)
            for each in group["params"]:
                if each.ndim != 2 or each.numel() > self.matrix:
                    raise ConfigError(
                        f"A group of Muon has a parameter of shape {tuple(each.shape)}; there is room for "
                        f"matrices of at most {self.matrix} elements, as the groups had when offloaded.",
                        "Offload Muon with all its matrices, and update other parameters otherwise.",
                    )

    def whole(self, group: Group) -> Muon:
        coefficients, steps, adjust = group["ns_coefficients"], group["ns_steps"], group["adjust_lr_fn"]
        if len(coefficients) != 3:
            raise ConfigError(f"A group's ns_coefficients are {coefficients!r}.", "Give three numbers.")
        if not (isinstance(steps, int) and 0 <= steps < 100):
            raise ConfigError(f"A group's ns_steps is {steps!r}.", "Give an integer below 100.")
        if adjust not in (None, "original", "match_rms_adamw"):
            raise ConfigError(
                f"A group's adjust_lr_fn is {adjust!r}.", 'Give None, "original" or "match_rms_adamw".'
            )
        a, b, c = (_number("ns_coefficients", each, least=-math.inf) for each in coefficients)
        return Muon(
            lr=_number("lr", group["lr"]),
            weight_decay=_number("weight_decay", group["weight_decay"]),
            momentum=_number("momentum", group["momentum"]),
            nesterov=bool(group["nesterov"]),
            ns_coefficients=(a, b, c),
            eps=_number("eps", group["eps"]),
            ns_steps=steps,
            adjust_lr_fn=adjust,
        )


def _adam(optimizer: torch.optim.Optimizer, name: str) -> Rule:
    return _AdamRule(
        name=name,
        moments=("exp_avg", "exp_avg_sq"),
        first_moment="exp_avg",
        second_moment="exp_avg_sq",
        counts_steps=True,
    )


def _sgd(optimizer: torch.optim.Optimizer, name: str) -> Rule:
    buffer = "momentum_buffer" if any(group["momentum"] for group in optimizer.param_groups) else None
    return _SgdRule(name=name, moments=() if buffer is None else (buffer,), first_moment=buffer)


def _adagrad(optimizer: torch.optim.Optimizer, name: str) -> Rule:
    return _AdagradRule(
        name=name,
        moments=("sum",),
        second_moment="sum",
        counts_steps=True,
        from_the_start=True,
        accumulator=float(optimizer.defaults["initial_accumulator_value"]),
    )


def _lion(optimizer: torch.optim.Optimizer, name: str) -> Rule:
    return _LionRule(name=name, moments=("exp_avg",), first_moment="exp_avg")


def _muon(optimizer: torch.optim.Optimizer, name: str) -> Rule:
    return _MuonRule(
        name=name,
        moments=("momentum_buffer",),
        first_moment="momentum_buffer",
        matrix=max(each.numel() for group in optimizer.param_groups for each in group["params"]),
    )


_RULES = {
    "AdamW": _adam,
    "Adam": _adam,
    "SGD": _sgd,
    "Adagrad": _adagrad,
    "Lion": _lion,
    "Muon": _muon,
}


def _betas(group: Group) -> tuple[float, float]:
    first, second = group["betas"]
    return _number("betas[0]", first, below=1.0), _number("betas[1]", second, below=1.0)


def _refuse(optimizer: str, group: Group, *options: str) -> None:
    # The options foreach, fused and capturable do not change what torch computes, and need no check.
    for option in options:
        if group.get(option, False):
            raise UnsupportedOptimizer(
                f"{optimizer} with {option}=True is not implemented here.", f"Use {option}=False."
            )


def _number(name: str, value: Any, *, least: float = 0.0, below: float = math.inf) -> float:
    """Convert an option's value, a number or a tensor of one element, to a finite float in [least, below).

    name: for error messages. Raises ConfigError if the value is not a number in this range, and
    UnsupportedOptimizer if it is a tensor that requires gradients.
    """
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            raise UnsupportedOptimizer(
                f"A group's {name} requires gradients, which updates here do not compute.",
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


_BITSANDBYTES = {
    f"bitsandbytes.optim.{name.lower()}.{paged}{name}{bits}": name
    for name in ("AdamW", "Lion")
    for paged in ("", "Paged")
    for bits in ("", "8bit", "32bit")
}
_LION_PYTORCH = {f"lion_pytorch.{module}.Lion": "Lion" for module in ("lion_pytorch", "foreach")}

OTHERS = ("lion_pytorch's Lion", "bitsandbytes' AdamW and Lion (8 or 32 bits, paged or not)")
"""The optimizers of other packages that `recognised` knows, in words."""


def recognised(optimizer: torch.optim.Optimizer, states: str) -> tuple[str, str] | None:
    """Return (the name of the optimizer's rule, the format of its moments); None for an unknown class.

    The format is "int8" for an 8-bit optimizer of bitsandbytes, and otherwise `states`, which is as in
    `Precision.states`. Raises UnsupportedOptimizer for an option that has no equivalent here, and ConfigError
    if the optimizer of bitsandbytes has taken a step, or if it has 8 bits and `states` is "bf16".
    """
    path = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if path in _LION_PYTORCH:
        _refuse_option(path, "decoupled_weight_decay", getattr(optimizer, "decoupled_wd", False), False)
        return _LION_PYTORCH[path], states
    if path not in _BITSANDBYTES:
        return None
    # Options outside the groups. Some versions lack some of them.
    options: Any = getattr(optimizer, "args", None)
    for name, plain in (("percentile_clipping", 100), ("max_unorm", 0.0), ("skip_zeros", False)):
        _refuse_option(path, name, getattr(options, name, plain), plain)
    _check_overrides(optimizer, path)
    if optimizer.state:
        raise ConfigError(
            f"The {path} has taken a step, and its states are not torch's.",
            "Give infinity.offload the optimizer before its first step.",
        )
    eight = getattr(options, "optim_bits", 32) == 8
    if eight and states == "bf16":
        raise ConfigError(
            f'The {path} has states of 8 bits, but Precision(states="bf16") was given.',
            "Leave states= out, or use an optimizer with 32 bits.",
        )
    return _BITSANDBYTES[path], "int8" if eight else states


def _check_overrides(optimizer: Any, path: str) -> None:
    """Raise UnsupportedOptimizer if bitsandbytes' GlobalOptimManager has options of single parameters of the
    optimizer. Options about the number of bits are ignored, because all moments have one format here.
    """
    parameters = {id(each) for group in optimizer.param_groups for each in group["params"]}
    manager = getattr(optimizer, "mng", None)
    named = dict(getattr(manager, "pid2config", {}))
    for module, name, config in getattr(manager, "module_weight_config_triple", ()):
        named[id(getattr(module, name))] = config
    for key, config in named.items():
        if key in parameters and config.keys() - {"optim_bits", "min_8bit_size"}:
            raise UnsupportedOptimizer(
                f"The {path} has options of single parameters ({', '.join(sorted(config))}) in "
                "bitsandbytes' GlobalOptimManager, which are not implemented here.",
                "Put these parameters into a group with these options.",
            )


def _refuse_option(path: str, name: str, value: object, plain: object) -> None:
    if value != plain:
        raise UnsupportedOptimizer(
            f"{path} with {name}={value!r} is not implemented here.", f"Use {name}={plain!r}."
        )
