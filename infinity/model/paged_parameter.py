"""Paged parameter: a Parameter whose page is fetched before any operation on it, but not for its metadata.

A Parameter is converted in place (`adopt`), because optimizers, tied weights and nn.LSTM's list of flat
weights hold its identity. An operation reaches `__torch_function__` with its arguments, also those inside of
lists. The pages of all paged ones are fetched together; then the operation runs as if they were plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.pages.parameter_page import ParameterPage


class Pager(Protocol):
    """The part of the runtime that a paged parameter calls."""

    def run(self, function: Callable[..., Any], places: Sequence[Place], args: Any, kwargs: Any) -> Any:
        """Run an operation with the pages of `places` present."""

    def copy(self, place: Place) -> torch.Tensor:
        """A copy of the parameter's values, in its own memory."""

    def lend_data(self, place: Place) -> torch.Tensor:
        """A view with a version counter of its own (`p.data`), whose edits are seen nevertheless."""

    def replace_data(self, place: Place, value: torch.Tensor) -> None:
        """Copy other values into the parameter (`p.data = value`)."""

    def unscale(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient divided by the loss scale."""

    def has_gradient(self, place: Place) -> bool:
        """Whether the parameter has a gradient in its page."""

    def drop_gradient(self, place: Place) -> None:
        """Forget the parameter's gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """The place of a parameter: its pager, its page, and its index there."""

    pager: Pager
    page: ParameterPage
    index: int
    """Index of the parameter in its unit."""

    @property
    def name(self) -> str:
        return self.page.layout.parameters[self.index].names[0]


_TENSOR: Any = torch.Tensor
"""torch.Tensor, untyped: for its descriptors, which its type stubs do not have."""


_ATTRIBUTES = (
    "shape dtype device layout requires_grad grad_fn is_leaf _version ndim is_cuda is_cpu is_meta is_sparse "
    "is_quantized is_nested is_mkldnn is_mps is_xpu is_sparse_csr itemsize nbytes output_nr retains_grad "
    "name _backward_hooks _post_accumulate_grad_hooks _base"
)
_METHODS = (
    "size dim ndimension numel nelement stride is_contiguous element_size is_floating_point is_complex "
    "is_signed get_device storage_offset has_names is_shared is_pinned is_same_size __len__ __hash__ "
    "register_hook register_post_accumulate_grad_hook retain_grad _is_view is_inference sym_size dim_order "
    "new_empty new_zeros new_ones new_full new_empty_strided new_tensor"
)
_FUNCTIONS = (
    "is_floating_point is_complex numel empty_like zeros_like ones_like full_like rand_like randn_like "
    "is_same_size is_tensor is_inference is_signed"
)
_METADATA: frozenset[Any] = frozenset(
    [getattr(_TENSOR, name).__get__ for name in _ATTRIBUTES.split() if hasattr(torch.Tensor, name)]
    + [getattr(torch.Tensor, name) for name in _METHODS.split() if hasattr(torch.Tensor, name)]
    + [getattr(torch, name) for name in _FUNCTIONS.split() if hasattr(torch, name)]
    + [_TENSOR._backward_hooks.__set__]
)
"""Functions for which a placeholder gives the same result as the parameter."""

_GET_DATA = _TENSOR.data.__get__
_SET_DATA = _TENSOR.data.__set__
_SET_REQUIRES_GRAD = _TENSOR.requires_grad.__set__
_REQUIRES_GRAD = torch.Tensor.requires_grad_


class PagedParameter(nn.Parameter):
    """A Parameter whose bytes are in a page. Only `adopt` makes one."""

    _place: Place

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        special = _SPECIAL.get(func)
        if special is not None:
            return special(*args, **kwargs)
        places: dict[int, Place] = {}
        _collect(args, places)
        _collect(kwargs.values(), places)
        taken = list(places.values())
        pager = taken[0].pager
        if len(taken) > 1 and any(place.pager is not pager for place in taken):
            return _run_in_all(func, taken, args, kwargs)
        return pager.run(func, taken, args, kwargs)

    def set_(self, *_: Any, **__: Any) -> NoReturn:
        """Raises ConfigError. Not in `_SPECIAL`, because torch does not call __torch_function__ for it."""
        _no_other_storage(self)

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient: None before a backward; after one it is in a page, and this raises ConfigError."""
        place = self._place
        if place.pager.has_gradient(place):
            raise ConfigError(
                f"The gradient of {place.name} is in a page, not in .grad.",
                "Read a copy with runtime.grad(p); clip with runtime.clip_grad_norm_(); reset with "
                "runtime.optimizer.zero_grad().",
            )
        return raw_gradient(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        place = self._place
        if value is not None:
            raise ConfigError(
                f"The gradient of {place.name} cannot be set: gradients are in pages.",
                "Scale the loss, or change what backward adds in a hook of the parameter (p.register_hook).",
            )
        place.pager.drop_gradient(place)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain Parameter with a copy of the values."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self._place.pager.copy(self._place), self.requires_grad)
        copy: nn.Parameter = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain Parameter with a copy of the values."""
        plain: Any = nn.Parameter(self._place.pager.copy(self._place), self.requires_grad)
        return plain.__reduce_ex__(protocol)


def adopt(parameter: nn.Parameter, place: Place) -> None:
    """Convert a Parameter to a PagedParameter, in place."""
    parameter.__class__ = PagedParameter
    parameter._place = place  # type: ignore[attr-defined]


def raw_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that autograd itself keeps in `.grad`."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: torch.Tensor | None = _TENSOR.grad.__get__(parameter)
        return gradient


def take_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """`raw_gradient`, taken away from autograd."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: torch.Tensor | None = _TENSOR.grad.__get__(parameter)
        _TENSOR.grad.__set__(parameter, None)
        return gradient


def _collect(values: Iterable[Any], places: dict[int, Place]) -> None:
    for value in values:
        if isinstance(value, PagedParameter):
            places[id(value)] = value._place
        elif isinstance(value, (list, tuple)):
            _collect(value, places)
        elif isinstance(value, dict):
            _collect(value.values(), places)


def _run_in_all(function: Callable[..., Any], places: Sequence[Place], args: Any, kwargs: Any) -> Any:
    """Run an operation on parameters of several runtimes, with their `run` calls nested."""
    pager = min((place.pager for place in places), key=id)  # always in the same order, as each takes a lock
    others = [place for place in places if place.pager is not pager]

    def inside(*args: Any, **kwargs: Any) -> Any:
        return _run_in_all(function, others, args, kwargs) if others else function(*args, **kwargs)

    return pager.run(inside, [place for place in places if place.pager is pager], args, kwargs)


def _get_data(parameter: PagedParameter, *_: Any) -> torch.Tensor:
    return parameter._place.pager.lend_data(parameter._place)


def _set_data(parameter: PagedParameter, value: torch.Tensor) -> None:
    if value is parameter:
        return  # Module.to does this if there is nothing to convert
    if isinstance(value, PagedParameter):
        value = value._place.pager.copy(value._place)
    same = (
        value.shape == parameter.shape and value.dtype == parameter.dtype and value.device == parameter.device
    )
    if not same:
        raise _no_conversion(parameter, value)
    parameter._place.pager.replace_data(parameter._place, value)


def _can_be_replaced(parameter: torch.Tensor, other: torch.Tensor) -> bool:
    """The check of Module.to and its like before they put another tensor in the parameter's place.

    Raises ConfigError if they would.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if not torch._has_compatible_shallow_copy_type(parameter, other):
            paged = parameter if isinstance(parameter, PagedParameter) else other
            assert isinstance(paged, PagedParameter)
            raise _no_conversion(paged, other)
    return True


def _no_conversion(parameter: PagedParameter, value: torch.Tensor) -> ConfigError:
    return ConfigError(
        f"The parameter {parameter._place.name} ({list(parameter.shape)}, {parameter.dtype}, "
        f"{parameter.device}) cannot become {list(value.shape)}, {value.dtype}, {value.device} while "
        "its model is offloaded.",
        "Convert the model before infinity.offload; precision= says what it computes in, device= where.",
    )


def _set_requires_grad(parameter: PagedParameter, value: bool = True) -> PagedParameter:
    place = parameter._place
    if value and not place.page.layout.parameters[place.index].trainable:
        raise ConfigError(
            f"The parameter {place.name} was frozen when its model was offloaded, so it has no pages for a "
            "gradient and optimizer states.",
            "Offload it with requires_grad=True and freeze it afterwards.",
        )
    with torch._C.DisableTorchFunctionSubclass():
        parameter.requires_grad = value
    return parameter


def _autograd_grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """torch.autograd.grad, see _roots."""
    found = torch.autograd.grad(_roots(outputs), _edges(inputs), *args, **kwargs)
    return tuple(
        each._place.pager.unscale(gradient)
        if isinstance(each, PagedParameter) and gradient is not None
        else gradient
        for each, gradient in zip(_listed(inputs), found, strict=True)
    )


def _autograd_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    """torch.autograd.backward, see _roots."""
    if kwargs.get("inputs") is not None:
        kwargs["inputs"] = _edges(kwargs["inputs"])
    torch.autograd.backward(_roots(tensors), *args, **kwargs)


def _backward(parameter: PagedParameter, *args: Any, **kwargs: Any) -> None:
    """Tensor.backward, see _roots."""
    _roots(parameter)[0].backward(*args, **kwargs)


def _roots(outputs: Any) -> list[Any]:
    """`outputs` to start a backward from, with plain views in place of paged parameters.

    A backward needs none of their pages. It must not run as one operation, because hooks and recomputation,
    which it calls in other threads, have to fetch pages.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return [each.view_as(each) if isinstance(each, PagedParameter) else each for each in _listed(outputs)]


def _edges(inputs: Any) -> list[Any]:
    """`inputs` of a backward with edges in place of paged parameters."""
    with torch._C.DisableTorchFunctionSubclass():
        return [
            torch.autograd.graph.get_gradient_edge(each) if isinstance(each, PagedParameter) else each
            for each in _listed(inputs)
        ]


def _listed(values: Any) -> list[Any]:
    # A GradientEdge is a tuple.
    alone = isinstance(values, (torch.Tensor, torch.autograd.graph.GradientEdge))
    return [values] if alone else list(values)


def _no_other_storage(parameter: torch.Tensor, *_: Any, **__: Any) -> NoReturn:
    name = (
        f"The parameter {parameter._place.name}" if isinstance(parameter, PagedParameter) else "A parameter"
    )
    raise ConfigError(
        f"{name} cannot be given another storage or size: its memory is a page's.",
        "Assign values (p.copy_(values) under torch.no_grad(), p.data = values).",
    )


def _keep_weights_apart(*_: Any, **__: Any) -> None:
    """Leave weights where they are; nn.LSTM would move its weights into one storage to save cuDNN a copy."""


_SPECIAL: dict[Any, Callable[..., Any]] = {
    _GET_DATA: _get_data,
    _SET_DATA: _set_data,
    _SET_REQUIRES_GRAD: _set_requires_grad,
    _REQUIRES_GRAD: _set_requires_grad,
    torch.Tensor.resize_: _no_other_storage,
    torch.Tensor.resize_as_: _no_other_storage,
    torch._cudnn_rnn_flatten_weight: _keep_weights_apart,
    torch.autograd.grad: _autograd_grad,
    torch.autograd.backward: _autograd_backward,
    torch.Tensor.backward: _backward,
    torch._has_compatible_shallow_copy_type: _can_be_replaced,
}
