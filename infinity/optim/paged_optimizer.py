"""Paged optimizer: the torch.optim.Optimizer behind `runtime.optimizer`, with the user's param groups and
states in pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from infinity.errors import ConfigError
from infinity.formats.optimizer_rules import Rule

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_RETIRED = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")


class OptimizerCore(Protocol):
    """The part of the runtime that updates parameters and keeps their states. Parameters compare by identity.

    The state of a parameter is a mapping. As in torch, it has "step" (a float32 scalar; not for SGD) and the
    rule's moments (float32, in the parameter's shape and strides). It has "master" too (float32, likewise) if
    the parameter itself is not float32. An SGD buffer without content is left out.
    """

    def step(self) -> None:
        """Updates all parameters that have gradients. Raises typed errors."""

    def zero_grad(self) -> None:
        """Forgets all gradients."""

    def has_state(self, parameter: Tensor) -> bool:
        """Whether `read_state` would return anything; reads nothing."""
        ...

    def read_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Copies on the CPU; {} for a parameter that was never updated."""
        ...

    def write_state(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        """Replaces the state; {} makes the next update the first.

        The moments may have any strides, device and floating dtype. Elements of a master are used only where
        they round to the parameter's present value: loading an optimizer's state never changes a parameter.
        """

    def check_capacity(self, nbytes: int) -> None:
        """Raises BudgetError if copies of that size cannot fit in RAM."""


class PagedState(MutableMapping[Tensor, dict[str, Tensor]]):
    """`PagedOptimizer.state`: parameter -> copies of its state, read at every access.

    Editing a copy changes nothing; assigning it does: `optimizer.state[p] = edited`. The mapping contains the
    parameters that have a state; as in torch, the optimizer's other parameters read as {}.
    """

    def __init__(self, rule: Rule, backend: OptimizerCore, parameters: Sequence[Tensor]) -> None:
        self._rule = rule
        self._backend = backend
        # By identity: hashing or comparing a tensor is an operation on it.
        self._parameters = {id(each): each for each in parameters}

    def __getitem__(self, parameter: Tensor) -> dict[str, Tensor]:
        known = self._known(parameter)
        self._backend.check_capacity(self._nbytes(known))
        return self._backend.read_state(known)

    def __setitem__(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        known = self._known(parameter)
        self._backend.write_state(known, checked_state(self._rule, known, state))

    def __delitem__(self, parameter: Tensor) -> None:
        self._backend.write_state(self._known(parameter), {})

    def __contains__(self, parameter: object) -> bool:
        known = self._parameters.get(id(parameter))
        return known is not None and self._backend.has_state(known)

    def __iter__(self) -> Iterator[Tensor]:
        return (each for each in self._parameters.values() if self._backend.has_state(each))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def nbytes(self) -> int:
        """Bytes of a copy of all states."""
        return sum(self._nbytes(each) for each in self)

    def _nbytes(self, parameter: Tensor) -> int:
        if not self._backend.has_state(parameter):
            return 0
        arrays = len(self._rule.moments) + (parameter.dtype != torch.float32)
        return arrays * parameter.numel() * torch.float32.itemsize

    def _known(self, parameter: Tensor) -> Tensor:
        known = self._parameters.get(id(parameter))
        if known is None:
            raise KeyError("This tensor is not a parameter of the optimizer.")
        return known


class PagedOptimizer(torch.optim.Optimizer):
    """Takes an optimizer's place: shares its `param_groups`, `defaults` and hooks, and pages its states.

    Schedulers may hold either of the two. `state_dict()` has the form of the replaced optimizer's, with
    moments in fp32. Parameters that are not fp32 also have an fp32 "master", which torch carries unused.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rule: Rule, backend: OptimizerCore) -> None:
        """`rule` is Rule.of(optimizer). Nothing is moved: see `adopt` and `retire`."""
        self._replaced: Any = optimizer
        self._rule = rule
        self._backend = backend
        self._paged = PagedState(rule, backend, _parameters(optimizer))
        # Not super().__init__, which would build groups of its own; torch uses __setstate__ like this when it
        # unpickles an optimizer.
        self.__setstate__(
            {
                "defaults": optimizer.defaults,
                "state": self._paged,
                "param_groups": optimizer.param_groups,
                **{name: getattr(optimizer, name) for name in _HOOKS},
            }
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient; returns the result of `closure`, if there is one.

        A group whose options cannot be used raises (ConfigError, UnsupportedOptimizer) before anything is
        updated, and so does a gradient that is not finite (NonFiniteGradient).
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                "optimizer.step() was called while a CUDA graph is captured, but updates of pages are not "
                "kernels of one stream.",
                "Capture forward and backward only, and call step() outside.",
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._rule.check(self.param_groups)
        self._backend.step()
        # A scheduler made for the replaced optimizer checks this.
        self._replaced._opt_called = True
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients. `set_to_none` changes nothing: parameters without a gradient are skipped
        by step() either way."""
        self._backend.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Copies of all states and groups, as torch.optim has them. BudgetError if RAM cannot hold them."""
        self._backend.check_capacity(self._paged.nbytes)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state dict of this or of a torch optimizer of the same type and groups.

        Raises ConfigError (a ValueError, as torch's) if it does not fit, and then nothing has changed.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        groups = self._loaded_groups(state_dict["param_groups"])
        states = self._loaded_states(state_dict)
        for group, loaded in zip(self.param_groups, groups, strict=True):
            # In place: schedulers, the backend and the replaced optimizer hold these very dicts.
            group.clear()
            group.update(loaded)
        for parameter in _parameters(self):
            state = states.get(id(parameter), {})
            if state or parameter in self._paged:
                self._backend.write_state(parameter, state)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ConfigError: the pages were laid out for the present groups."""
        raise ConfigError(
            "A parameter group cannot be added once the optimizer's states are in pages.",
            "Close the runtime, build the optimizer with all its groups, and offload again.",
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            "runtime.optimizer cannot be copied or pickled: its states are pages of this process.",
            "Copy its state_dict(), or use runtime.save().",
        )

    def _loaded_groups(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The groups to install: the saved options with this optimizer's parameters."""
        if len(saved) != len(self.param_groups):
            raise ConfigError(
                f"The state dict has {len(saved)} parameter groups, the optimizer {len(self.param_groups)}.",
                "Load a state dict of an optimizer with the same groups.",
            )
        loaded = []
        for index, (group, new) in enumerate(zip(self.param_groups, saved, strict=True)):
            if len(group["params"]) != len(new["params"]):
                raise ConfigError(
                    f"Parameter group {index} of the state dict has {len(new['params'])} parameters, the "
                    f"optimizer's {len(group['params'])}.",
                    "Load a state dict of an optimizer with the same groups.",
                )
            # Options that a state dict of an older torch lacks are kept. Other entries that it lacks (a
            # scheduler's initial_lr) are dropped, as in torch.
            kept = {key: group[key] for key in (*self.defaults, "param_names") if key in group}
            options = {key: value for key, value in new.items() if key != "params"}
            loaded.append(self._rule.loaded({**kept, **deepcopy(options), "params": group["params"]}))
        self._rule.check(loaded)
        return loaded

    def _loaded_states(self, state_dict: Mapping[str, Any]) -> dict[int, dict[str, Tensor]]:
        """id(parameter) -> its state, for the parameters that have one."""
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        owners = dict(zip(saved, _parameters(self), strict=True))
        states = {}
        for key, state in state_dict["state"].items():
            if key not in owners:
                raise ConfigError(
                    f"The state dict has a state for {key!r}, which is in none of its groups.",
                    "Load a state dict that an optimizer's state_dict() returned.",
                )
            states[id(owners[key])] = checked_state(self._rule, owners[key], state, f"parameter {key!r}")
        return states


def adopt(
    optimizer: torch.optim.Optimizer,
    write: Callable[[Tensor, Mapping[str, Tensor]], None],
    dtype_of: Callable[[Tensor], torch.dtype],
) -> None:
    """Passes each state that `optimizer` has gathered to `write`, in the form of `OptimizerCore.write_state`.

    dtype_of: parameter -> its dtype in its page, also before it is there.
    """
    rule = Rule.of(optimizer)
    known = {id(each) for each in _parameters(optimizer)}
    for parameter, state in optimizer.state.items():
        if id(parameter) not in known:
            continue
        checked = checked_state(rule, parameter, state, dtype=dtype_of(parameter))
        if checked:
            write(parameter, checked)


def retire(optimizer: torch.optim.Optimizer) -> None:
    """Frees the states of an optimizer whose place was taken, and makes its methods raise ConfigError.

    Its `param_groups` stay alive, and schedulers made for it, before or after, go on working.
    """
    for name in _RETIRED:
        setattr(optimizer, name, _refusal(name))
    optimizer.state.clear()


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"{name}() was called on the optimizer that was given to offload, which no longer has states.",
            f"Call runtime.optimizer.{name}().",
        )

    # Without this attribute a scheduler would warn that step() was overridden, or wrap this function.
    refuse.__dict__["_wrapped_by_lr_sched"] = True
    return refuse


def checked_state(
    rule: Rule,
    parameter: Tensor,
    state: Mapping[str, Any],
    what: str = "a parameter",
    *,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """The entries of a state in torch's form that `OptimizerCore.write_state` takes; no copy is made.

    dtype: the parameter's dtype in its page, if the parameter is not there yet.

    Entries that the rule does not know are left out. Raises ConfigError, naming `what`, if one is missing
    or of another shape.
    """
    if not isinstance(state, Mapping):
        raise _misfit(what, f"is a {type(state).__name__}")
    result = {}
    if rule.counts_steps and state:
        result["step"] = _step_count(state.get("step"), what)
        if result["step"] == 0 and not parameter.requires_grad:
            # torch's Adagrad gives frozen parameters a state too; it has no page, and is never used.
            return {}
    for name in (*rule.moments, "master"):
        value = state.get(name)
        if name == "master" and (dtype or parameter.dtype) == torch.float32:
            continue
        if value is None:
            if rule.counts_steps and state and name != "master":
                raise _misfit(what, f"has no {name!r}")
            continue
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_sparse:
            raise _misfit(what, f"has a {name!r} that is not a dense tensor of floats")
        if value.shape != parameter.shape:
            raise _misfit(what, f"has a {name!r} of shape {tuple(value.shape)}, not {tuple(parameter.shape)}")
        result[name] = value
    return result


def _step_count(value: Any, what: str) -> Tensor:
    try:
        step = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise _misfit(what, f"has the step {value!r}") from None
    if not (step >= 0 and step.is_integer()):
        raise _misfit(what, f"has the step {step}")
    return torch.tensor(step, dtype=torch.float32, device="cpu")


def _misfit(what: str, how: str) -> ConfigError:
    return ConfigError(
        f"The optimizer state of {what} {how}.",
        "Load states of an optimizer of the same type over the same model.",
    )


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]
