"""Paged optimizer: the torch.optim.Optimizer behind `runtime.optimizer`, with the user's param groups and
with states in pages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from infinity.errors import ConfigError
from infinity.formats.optimizer_rules import Rule
from infinity.optim.state_copies import StateCopies, plain
from infinity.tiers.device import is_capturing

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
    """The part of the runtime that updates parameters and keeps their states (infinity/training_step.py).

    Parameters are compared by identity. The state of a parameter is a mapping. As in torch, it has "step" (a
    float32 scalar; not for SGD) and the optimizer's moments, such as "exp_avg" (float32, in the parameter's
    shape and strides). If the parameter is not float32, the state also has "master", the fp32 master of the
    parameter (float32, in the parameter's shape and strides). An SGD momentum buffer that no update has
    written yet is left out.
    """

    def step(self) -> bool: ...

    def zero_grad(self, *, set_to_none: bool) -> None: ...

    def has_state(self, parameter: Tensor) -> bool: ...

    def read_state(self, parameter: Tensor) -> dict[str, Tensor]: ...

    def write_state(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        """Replace the state of a parameter. With {} the parameter's next update counts as its first.

        The moments may have any strides, device and floating dtype. The entry "master" is used only if all of
        its elements round to the parameter's present values, so that loading an optimizer's state never
        changes a parameter.
        """

    def before_loading(self, states: Sequence[tuple[Tensor, Mapping[str, Tensor]]]) -> None:
        """Called before `write_state` replaces states, and before any other change.

        states: all parameters whose states will be replaced, and their new states. Raises RankDivergence if
        another rank is about to write other states.
        """

    def loaded(self) -> None: ...

    def check_capacity(self, nbytes: int) -> None: ...


class PagedState(MutableMapping[Tensor, dict[str, Tensor]]):
    """The mapping `PagedOptimizer.state`: parameter -> copies of the entries of its state. Every access makes
    new copies from the pages.

    An edit of a copy is written to the pages (infinity/optim/state_copies.py). The mapping contains the
    parameters that have a state. As in torch, the state of any other parameter of the optimizer reads as {}.
    """

    def __init__(self, rule: Rule, backend: OptimizerCore, parameters: Sequence[Tensor]) -> None:
        self._rule = rule
        self._backend = backend
        # By identity: hashing or comparing a tensor is an operation on it.
        self._parameters = {id(each): each for each in parameters}

    def __getitem__(self, parameter: Tensor) -> dict[str, Tensor]:
        known = self._known(parameter)
        self._backend.check_capacity(self._nbytes(known))
        return StateCopies(
            lambda: self._backend.read_state(known), lambda state: self.__setitem__(parameter, state)
        )

    def copies(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return copies of the entries of a state as plain tensors, whose edits go nowhere."""
        known = self._known(parameter)
        self._backend.check_capacity(self._nbytes(known))
        return self._backend.read_state(known)

    def __setitem__(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        known = self._known(parameter)
        self._replace(known, checked_state(self._rule, known, plain(state)))

    def __delitem__(self, parameter: Tensor) -> None:
        self._replace(self._known(parameter), {})

    def __contains__(self, parameter: object) -> bool:
        known = self._parameters.get(id(parameter))
        return known is not None and self._backend.has_state(known)

    def __iter__(self) -> Iterator[Tensor]:
        return (each for each in self._parameters.values() if self._backend.has_state(each))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that it takes to copy the states of all parameters at once, for example in
        `state_dict()`: each moment and each "master" entry in fp32.
        """
        return sum(self._nbytes(each) for each in self)

    def _replace(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        self._backend.before_loading([(parameter, state)])
        self._backend.write_state(parameter, state)
        self._backend.loaded()

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
    """An optimizer that takes the place of the user's optimizer. It has the same param groups, defaults and
    hooks.

    The states are kept in pages. A learning-rate scheduler may be made for this optimizer or for the user's.
    `state_dict()` has the form of the user's optimizer, with moments in fp32. The state of a parameter that
    is not fp32 also has an fp32 "master", an entry that torch's optimizers load and save without using it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rule: Rule, backend: OptimizerCore) -> None:
        """optimizer: the user's optimizer. rule: `Rule.of(optimizer, states)`, which says what entries a
        state has (infinity/formats/optimizer_rules.py). backend: the part of the runtime that keeps the
        states in pages.

        No state is moved here: `adopt` copies states into the pages, and `retire` frees the states of
        `optimizer`.
        """
        self._replaced: Any = optimizer
        self._rule = rule
        self._backend = backend
        self.step_was_skipped = False
        """Whether the last call of `step` has updated nothing, since gradients overflowed in fp16."""
        self._accelerated = False
        """Whether accelerate has prepared this optimizer."""
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

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The user's param groups, live: their options and lists of parameters may be changed between steps.

        Assigning a list replaces the contents of the present list object, because schedulers and the runtime
        hold references to that object.
        """
        groups: list[dict[str, Any]] | None = vars(self).get("param_groups")
        if groups is None:  # of a wrapper that takes attributes from this optimizer, as Lightning's
            raise AttributeError("param_groups")
        return groups

    @param_groups.setter
    def param_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        self.__dict__["param_groups"][:] = groups

    @property
    def _is_accelerate_prepared(self) -> bool:
        """True, so that accelerate's `prepare` leaves this optimizer as it is.

        Otherwise `prepare` would wrap the optimizer, and copy all states out and in again. Once accelerate
        has read this property, `step` and `zero_grad` do what the wrapper would do in
        `accelerator.accumulate`. Raises ConfigError if accelerate scales losses for fp16, because only the
        wrapper would unscale the gradients.
        """
        if _accelerate_state("AcceleratorState").get("_mixed_precision") == "fp16":
            raise ConfigError(
                "accelerate scales losses for fp16, and its optimizers divide gradients by the scale, which "
                "runtime.optimizer does not.",
                'Give Accelerator mixed_precision="no", and infinity.offload Precision(compute="fp16"), '
                "which scales losses by itself.",
            )
        self._accelerated = True
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        self._accelerated = value

    @property
    def optimizer(self) -> PagedOptimizer:
        """This optimizer itself, if accelerate has prepared it; else raises AttributeError.

        Accelerate expects its own wrapper here, and reads the wrapped optimizer from this attribute.
        """
        if not self._accelerated:
            raise AttributeError("A PagedOptimizer wraps no optimizer.")
        return self

    @property
    def _accumulating(self) -> bool:
        """Whether accelerate has said that this is not the last backward of a step."""
        return self._accelerated and not _accelerate_state("GradientState").get("sync_gradients", True)

    @property  # type: ignore[override]
    def state(self) -> PagedState:
        """The states in pages. Assigning another mapping raises ConfigError."""
        return self._paged

    @state.setter
    def state(self, value: Any) -> NoReturn:
        raise ConfigError(
            "The states of runtime.optimizer are in pages, and another mapping cannot take their place.",
            "Use optimizer.state.clear(), optimizer.state[p] = ... or optimizer.load_state_dict().",
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Returns the result of `closure`, if there is one.

        Raises ConfigError or UnsupportedOptimizer for a group with options that cannot be used, and
        NonFiniteGradient for a gradient that is not finite. This call has then updated nothing.
        """
        if is_capturing():
            raise ConfigError(
                "optimizer.step() was called while a CUDA graph is captured, but updates of pages are not "
                "kernels of one stream.",
                "Leave out the capture: an offloaded model cannot be in a CUDA graph.",
            )
        if self._accumulating:
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._rule.check(self.param_groups)
        self.step_was_skipped = not self._backend.step()
        # A scheduler made for the replaced optimizer checks this.
        self._replaced._opt_called = True
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients.

        set_to_none: if False, each parameter that had a gradient has one of zeros afterwards, as in torch, so
        that `step` updates it even if no backward brings another one. Such a gradient takes no memory.
        """
        if not self._accumulating:
            self._backend.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all states and param groups, in the form of torch's `Optimizer.state_dict()`.

        Raises BudgetError if RAM cannot hold the copies.
        """
        self._backend.check_capacity(self._paged.nbytes)
        saved = super().state_dict()
        return {**saved, "state": {number: plain(state) for number, state in saved["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of a PagedOptimizer or of a torch optimizer of the same type, with the same param
        groups.

        Raises ConfigError (a ValueError, as in torch) if the state dict does not fit this optimizer, and
        RankDivergence if another rank loads other states. Nothing has changed then.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        groups = self._loaded_groups(state_dict["param_groups"])
        states = self._loaded_states(state_dict)
        written = [(each, states.get(id(each), {})) for each in _parameters(self)]
        written = [(each, state) for each, state in written if state or each in self._paged]
        self._backend.before_loading(written)
        for group, loaded in zip(self.param_groups, groups, strict=True):
            # In place: schedulers, the backend and the replaced optimizer hold these very dicts.
            group.clear()
            group.update(loaded)
        for parameter, state in written:
            self._backend.write_state(parameter, state)
        self._backend.loaded()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ConfigError, because the pages were laid out for the present groups."""
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
        """Check the param groups of a state dict, and return new groups: the saved options with this
        optimizer's parameters.

        saved: the param groups of the state dict. Raises the errors of `Rule.check`, and ConfigError if there
        are more or fewer groups than this optimizer has, or more or fewer parameters in one of them.
        """
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
        """Check the states of a state dict, and return them: id(parameter of this optimizer) -> its state.

        Parameters without a state in the state dict are left out. Raises ConfigError if a state does not fit.
        """
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
    """Pass every state in `optimizer` to `write`, a function with the parameters of
    `OptimizerCore.write_state`.

    dtype_of: function from a parameter to the dtype that its values have, or will have, in the parameter
    page.
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
    """Free the states of an optimizer that a PagedOptimizer has replaced. From now on the replaced
    optimizer's methods raise ConfigError.

    The replaced optimizer's `param_groups` stay alive. Schedulers made for it, before or after this call, go
    on working.
    """
    for name in _RETIRED:
        setattr(optimizer, name, _refusal(name))
    optimizer.state.clear()


def _accelerate_state(name: str) -> dict[str, Any]:
    """Return the attributes that all objects of accelerate's class `name` share; {} if it is not in use."""
    found = getattr(sys.modules.get("accelerate.state"), name, None)
    return {} if found is None else found._shared_state


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
    """Check the state that a torch optimizer has for a parameter, and return the entries of it that
    `OptimizerCore.write_state` takes: "step", the moments of `rule`, and "master".

    state: as in torch's `Optimizer.state[parameter]`. what: the parameter's name in error messages. dtype:
    the parameter's dtype in its page; None: `parameter.dtype`. Moments and master are not copied. Raises
    ConfigError if an entry is missing, is not a dense tensor of floats, or has the wrong shape.
    """
    if not isinstance(state, Mapping):
        raise _misfit(what, f"is a {type(state).__name__}")
    result = {}
    if rule.counts_steps and state:
        result["step"] = _step_count(state.get("step"), what)
        if result["step"] == 0 and not parameter.requires_grad:
            # torch's Adagrad gives frozen parameters a state too. That state has no page, and is never used.
            return {}
    for name in (*rule.moments, "master"):
        value = state.get(name)
        if name == "master" and (dtype or parameter.dtype) == torch.float32:
            continue
        if value is None:
            if name != "master" and (rule.counts_steps or name not in state) and state.keys() - {"master"}:
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
