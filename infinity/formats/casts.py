"""Casts: converts arguments of the model's forward to the compute dtype, as `Precision.inputs` says, and
operands of operations that demand equal dtypes to one dtype.

A model whose parameters became bf16 still gets fp32 inputs, makes fp32 tables and has fp32 buffers. Where
such a tensor meets a bf16 one in an operation that promotes dtypes (`+`, `torch.cat`), torch computes in the
wider dtype, and nothing is cast here. Where torch would raise an error (`F.linear`), the tensor is cast for
this one operation, under autograd, so its gradient has the tensor's own dtype. Regions of torch.autocast are
left alone.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import inspect
import itertools
import warnings
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from infinity.config import Precision
from infinity.errors import ConfigError
from infinity.losses.linear_cross_entropy import linear_cross_entropy

_CHECKED_CALLS = 3
"""The first calls whose inputs are compared before and after the cast. Each comparison waits for a GPU."""


class InputCast:
    """Casts the arguments of a model's forward that `Precision.inputs` names; "keep" casts nothing."""

    def __init__(self, model: nn.Module, precision: Precision, *, warn: bool = True) -> None:
        """warn: whether to warn if a cast changes values. Raises ConfigError if a pattern of
        `precision.inputs` matches no argument of the model's forward.
        """
        self._inputs = precision.inputs
        self.dtype = precision.compute_dtype
        self._checks = _CHECKED_CALLS if warn else 0
        self._warned: set[str] = set()
        if self._inputs == "keep":
            return
        parameters = inspect.signature(model.forward).parameters.values()
        self._positional = [
            each.name
            for each in parameters
            if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]
        rest = [each.name for each in parameters if each.kind is each.VAR_POSITIONAL]
        self._rest = rest[0] if rest else ""
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            return  # an argument can have any name
        names = [each.name for each in parameters]
        for pattern in self._inputs if isinstance(self._inputs, tuple) else ():
            if not fnmatch.filter(names, pattern):
                raise ConfigError(
                    f"The pattern {pattern!r} of inputs= matches no argument of {type(model).__name__}.",
                    f"Name arguments of its forward: {', '.join(names)}.",
                )

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of one call of forward after the casts. Containers with tensors that are cast
        are copied. In the first calls, warns once for each argument whose values the cast changes.
        """
        if self._inputs == "keep":
            return args, kwargs
        self._checks -= 1
        names = itertools.chain(self._positional, itertools.repeat(self._rest))
        return (
            tuple(self._argument(name, value) for name, value in zip(names, args, strict=False)),
            {name: self._argument(name, value) for name, value in kwargs.items()},
        )

    def mixed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a floating-point tensor among the arguments has another dtype than the compute dtype."""
        found = False

        def look(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal found
            found = found or (tensor.is_floating_point() and tensor.dtype != self.dtype)
            return tensor

        map_tensors(look, (args, kwargs))
        return found

    def _argument(self, name: str, value: Any) -> Any:
        if self._inputs != "cast" and not any(fnmatch.fnmatchcase(name, each) for each in self._inputs):
            return value

        changed = False

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal changed
            if not tensor.is_floating_point() or tensor.dtype == self.dtype:
                return tensor
            changed = True
            result = tensor.to(self.dtype)
            if self._checks >= 0 and name not in self._warned:
                self._compare(name, tensor, result)
            return result

        result = map_tensors(cast, value)
        return result if changed else value

    def _compare(self, name: str, before: torch.Tensor, after: torch.Tensor) -> None:
        if before.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(before):
            return
        with torch.no_grad():
            changed = (after.to(before.dtype) != before) & ~before.isnan()
            if not changed.any():
                return
            old, new = before[changed][0].item(), after[changed][0].item()
        self._warned.add(name)
        warnings.warn(
            f"The input {name!r} is not the same after its cast from {before.dtype} to {after.dtype}: "
            f"{old:.9g} becomes {new:.9g}. Timesteps, coordinates and targets should not be cast: give "
            'Precision(inputs="keep"), or as inputs= the names of the arguments that are to be cast.',
            stacklevel=2,
        )


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """Return a copy of `values` in which every tensor is replaced by function(tensor).

    Tensors are found in the containers that torch.utils._pytree knows, in objects of classes derived from
    them or from collections.UserDict, and in the fields of dataclasses.
    """

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if isinstance(leaf, (dict, UserDict)):
            copied = copy.copy(leaf)
            for key, value in leaf.items():
                copied[key] = map_tensors(function, value)
            return copied
        if isinstance(leaf, list):
            listed = copy.copy(leaf)
            listed[:] = [map_tensors(function, value) for value in leaf]
            return listed
        if isinstance(leaf, tuple) and hasattr(leaf, "_make"):
            return leaf._make(map_tensors(function, value) for value in leaf)
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        record = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            if hasattr(leaf, field.name):
                object.__setattr__(record, field.name, map_tensors(function, getattr(leaf, field.name)))
        return record

    return tree_map(replaced, values)


_CONVOLUTIONS = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc"
_PRODUCTS = (
    "bilinear matmul mm bmm mv dot vdot vecdot inner addmm addmv addbmm baddbmm einsum tensordot "
    "chain_matmul multi_dot cross solve __matmul__ __rmatmul__"
)
_LAYERS = (
    "prelu embedding_bag grid_sample lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell "
    "rnn_relu_cell multi_head_attention_forward scaled_dot_product_attention"
)
_INDEXED = "index_add index_copy index_put index_reduce masked_scatter put scatter scatter_add scatter_reduce"


def _functions(names: str) -> frozenset[Any]:
    """Return the functions of torch with these names; names that the installed torch lacks are ignored."""
    places = (torch, torch.Tensor, F, torch.linalg, torch.sparse)
    found = ((place, name) for name in names.split() for place in places if hasattr(place, name))
    return frozenset(getattr(place, name) for place, name in found)


_WEIGHT_SECOND = _functions(f"linear {_CONVOLUTIONS}")
"""Functions (input, weight, bias) that need no cast if input and weight have one dtype."""

_ALL = _WEIGHT_SECOND | _functions(f"{_PRODUCTS} {_LAYERS} {_INDEXED} lerp") | {linear_cross_entropy}
"""Functions that raise an error unless all their floating-point operands have one dtype."""

_FIRST = _functions("layer_norm group_norm batch_norm instance_norm linear_cross_entropy")
"""Functions that raise an error if their first operand has a wider dtype than the others, or if parameters
are narrower than running statistics. They accept a first operand that is narrower than all others.
"""

_IN_PLACE = _functions(" ".join(f"{name}_" for name in _INDEXED.split()) + " __setitem__")
"""Functions that write into their first operand, and raise an error if values have another dtype."""

EQUAL_DTYPES = _ALL | _FIRST | _IN_PLACE
"""The functions whose operands `cast_operands` may cast."""


def cast_operands(
    function: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    parameters: type,
    other: torch.dtype | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a function in `EQUAL_DTYPES`, with floating-point tensors cast to one dtype:
    the dtype of the parameters among them or, for a function that writes in place, of the first operand.

    parameters: the class of the model's parameters. other: the dtype to cast to if no operand is a parameter
    and some operand has this dtype. If `other` is None, nothing is cast without a parameter.

    Parameters keep their dtype, except those of a norm whose running statistics have a wider dtype: they are
    cast to that. Nothing is cast if the parameters have several dtypes, in a region of torch.autocast, or
    with an argument `out`.
    """
    with torch._C.DisableTorchFunctionSubclass():
        casts = _casts(function, args, kwargs, parameters, other)
    if not casts:
        return args, kwargs

    def cast(value: Any) -> Any:  # with torch functions on, which bring the page of a parameter
        if isinstance(value, torch.Tensor):
            return value.to(casts[id(value)]) if id(value) in casts else value
        if isinstance(value, list):
            return [cast(each) for each in value]
        return tuple(map(cast, value)) if isinstance(value, tuple) else value

    return cast(tuple(args)), {name: cast(value) for name, value in kwargs.items()}


def _casts(
    function: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    parameters: type,
    other: torch.dtype | None,
) -> dict[int, torch.dtype]:
    """Return id(operand) -> dtype for the operands to cast. The arguments are those of `cast_operands`."""
    operands = (*args, *kwargs.values())
    first, second = operands[:2] if len(operands) > 1 else (None, None)
    if function in _WEIGHT_SECOND and getattr(first, "dtype", None) == getattr(second, "dtype", None):
        return {}  # decided first, because most calls end here
    found = [each for each in _tensors(operands) if each.is_floating_point()]
    dtypes = {each.dtype for each in found}
    if len(dtypes) < 2 or kwargs.get("out") is not None:
        return {}
    of_parameters = {each.dtype for each in found if isinstance(each, parameters)}
    if function in _IN_PLACE:
        of_parameters = {found[0].dtype}
    elif not of_parameters and other in dtypes:
        of_parameters = {other}
    if len(of_parameters) != 1 or torch.is_autocast_enabled(found[0].device.type):
        return {}
    if function in _FIRST:
        return _casts_of_norm(found, parameters)
    (dtype,) = of_parameters
    return {id(each): dtype for each in found if each.dtype != dtype and not isinstance(each, parameters)}


def _casts_of_norm(found: list[torch.Tensor], parameters: type) -> dict[int, torch.dtype]:
    """Return id(operand) -> dtype for the casts of a function in `_FIRST`: the first operand is cast if it is
    wider than all others, and parameters are cast if they are narrower than running statistics.
    """
    dtype = max((each.dtype for each in found[1:]), key=lambda each: each.itemsize)
    casts = {id(each): dtype for each in found[1:] if each.dtype != dtype and isinstance(each, parameters)}
    if found[0].dtype != dtype and found[0].dtype.itemsize >= dtype.itemsize:
        casts[id(found[0])] = dtype
    return casts


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class CastOperands(TorchFunctionMode):
    """A mode in which `cast_operands` casts the floating-point operands of each function in `EQUAL_DTYPES` to
    one dtype. This includes calls without a parameter, such as attention with an fp32 mask.
    """

    def __init__(self, parameters: type, dtype: torch.dtype | None) -> None:
        """parameters: the class of the model's parameters. dtype: the argument `other` of `cast_operands`."""
        super().__init__()
        self._parameters = parameters
        self._dtype = dtype
        self._ended = False
        """Whether `__exit__` was called while this mode handled an operation, so was not on torch's stack."""

    @staticmethod
    def active() -> list[CastOperands]:
        """The modes on torch's stack that have not ended, outermost first."""
        stack = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
        return [each for each in stack if isinstance(each, CastOperands) and not each._ended]

    def again(self) -> CastOperands:
        """Return another mode that casts as this one does."""
        return CastOperands(self._parameters, self._dtype)

    def __exit__(self, *_: object) -> None:
        """Remove this mode from torch's stack, even if other modes are above it.

        If Ctrl-C ends a forward inside an operation that this mode handles, the mode is not on the stack now,
        and torch puts it back later. It does nothing then, and `remove_ended` removes it.
        """
        self._ended = not _taken(lambda mode: mode is self)

    @staticmethod
    def remove_ended() -> None:
        """Remove modes that have ended from torch's stack."""
        while torch._C._len_torch_function_stack() and _taken(
            lambda mode: isinstance(mode, CastOperands) and mode._ended
        ):
            pass

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in EQUAL_DTYPES and not self._ended:
            args, kwargs = cast_operands(func, args, kwargs, self._parameters, self._dtype)
        return func(*args, **kwargs)


def _taken(wanted: Callable[[Any], bool]) -> bool:
    """Remove the topmost mode for which `wanted` is true from torch's stack, and return whether a mode was
    removed.
    """
    above = []
    found = False
    while not found and torch._C._len_torch_function_stack():
        mode = torch._C._pop_torch_function_stack()
        found = wanted(mode)
        if not found:
            above.append(mode)
    for mode in reversed(above):
        torch._C._push_on_torch_function_stack(mode)
    return found


def cast_sequences(module: nn.RNNBase, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a recurrent module's forward in the dtype of its weights. nn.LSTM and its like
    compare dtypes, and raise an error, before they call an operation.
    """
    weights = [each for each in module._flat_weights if each is not None]
    dtypes = {each.dtype for each in weights}
    if len(dtypes) != 1 or torch.is_autocast_enabled(weights[0].device.type):
        return args, kwargs
    (dtype,) = dtypes

    def cast(value: Any) -> Any:
        if isinstance(value, (torch.Tensor, PackedSequence)):
            data = value.data if isinstance(value, PackedSequence) else value
            return value.to(dtype) if data.is_floating_point() and data.dtype != dtype else value
        return tuple(map(cast, value)) if type(value) is tuple else value

    return cast(args), {name: cast(value) for name, value in kwargs.items()}


def hook_sequences(model: nn.Module, hook: Callable[..., Any]) -> list[RemovableHandle]:
    """Add the forward pre-hook `hook` to the recurrent modules of a model. Returns its handles."""
    return [
        module.register_forward_pre_hook(hook, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, nn.RNNBase)
    ]


def hook_recomputation(
    model: nn.Module, begin: Callable[..., Any], end: Callable[..., Any]
) -> list[RemovableHandle]:
    """Have each submodule of `model` call `begin` before and `end` after its forward, and return the hooks'
    handles. The hooks run also when torch.utils.checkpoint calls submodules again in backward, where modes of
    the model's forward are not active.
    """
    handles = []
    for module in model.modules():
        if module is not model:
            handles.append(module.register_forward_pre_hook(begin, prepend=True))
            handles.append(module.register_forward_hook(end, always_call=True))
    return handles
