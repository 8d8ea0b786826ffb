"""Paged parameter: a Parameter whose page is fetched before any operation that needs its values.

Operations that need only metadata, such as the shape, fetch no page. `adopt` converts a Parameter in place,
because optimizers, tied weights and nn.LSTM's list of flat weights refer to the Parameter object itself.
torch calls `__torch_function__` with each operation on a paged parameter and its arguments. The pages of all
paged parameters among them, also in nested lists, tuples and dictionaries, are fetched together. Then the
operation runs as if these parameters were plain. If it demands equal dtypes, its other operands are cast to
the parameters' dtype (infinity/formats/casts.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from infinity.errors import ConfigError
from infinity.formats.casts import EQUAL_DTYPES, cast_operands
from infinity.model.paged_gradient import PagedGradient
from infinity.pages.parameter_page import ParameterPage, replace_data

if TYPE_CHECKING:
    from infinity.model.pager import Pager
    from infinity.model.tiled_parameter import TiledGradients
    from infinity.training_step import TrainingStep


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a parameter's values are: the page that holds them, and the pager that fetches this page."""

    pager: Pager
    page: ParameterPage
    index: int
    """Index of the parameter in the `UnitLayout.parameters` of the page's unit."""

    @property
    def name(self) -> str:
        return self.page.layout.parameters[self.index].names[0]

    @property
    def key(self) -> tuple[int, int]:
        """(index of the unit, index of the parameter in it)."""
        return self.page.index, self.index


_TENSOR: Any = torch.Tensor
"""torch.Tensor with the static type Any, for access to descriptors that torch's type stubs do not declare."""


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
METADATA: frozenset[Any] = frozenset(
    [getattr(_TENSOR, name).__get__ for name in _ATTRIBUTES.split() if hasattr(torch.Tensor, name)]
    + [getattr(torch.Tensor, name) for name in _METHODS.split() if hasattr(torch.Tensor, name)]
    + [getattr(torch, name) for name in _FUNCTIONS.split() if hasattr(torch, name)]
    + [_TENSOR._backward_hooks.__set__]
)
"""Functions that read no values of a parameter, so that their results are right without its page."""

_GET_DATA = _TENSOR.data.__get__
_SET_DATA = _TENSOR.data.__set__
_SET_REQUIRES_GRAD = _TENSOR.requires_grad.__set__
_REQUIRES_GRAD = torch.Tensor.requires_grad_


_OWN = ("_place", "_refusal")
"""The attributes that the runtime sets on a parameter; all others are the user's."""


class PagedParameter(nn.Parameter):
    """A Parameter whose values are in a page. Only `adopt` makes objects of this class: the constructor,
    which libraries call by `type(parameter)(values)`, makes a plain Parameter.
    """

    _place: Place
    _refusal: RemovableHandle | None = None
    """A hook that raises ConfigError for a gradient. Set if the parameter was frozen when it was offloaded,
    and requires gradients now.
    """

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        return nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Collection[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if len(types) > 1 and any(getattr(each, "takes_paged", False) for each in types):
            return NotImplemented  # a tiled parameter brings its values first
        if func in METADATA:
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
        if func in AVERAGING:
            _check_average(taken, args)
        if func in EQUAL_DTYPES and not pager.reads_masters(taken[0]):
            args, kwargs = cast_operands(func, args, kwargs, PagedParameter)
        if len(taken) > 1 and any(place.pager is not pager for place in taken):
            return _run_in_all(func, taken, args, kwargs)
        return pager.run(func, taken, args, kwargs)

    def set_(self, *arguments: Any, **options: Any) -> Any:
        """Raise ConfigError, because a paged parameter cannot be given another storage.

        `p.set_(p)` in a forward does nothing. PEFT makes this call when it registers parametrizations in the
        forward of experts with adapters. (torch does not call __torch_function__ for `set_`.)
        """
        if options or len(arguments) != 1 or arguments[0] is not self or not self._place.pager.inside:
            _no_other_storage(self)
        return self

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient as a PagedGradient, a tensor without bytes; None if there is no gradient. With several
        ranks it is the average over ranks, and reading its values is subject to the rules of `Runtime.grad`.

        Setting the property to None drops the gradient; with several ranks all must do so, after the same
        backward. A tensor of the parameter's shape, on any device and of any floating dtype, is copied to the
        page as the gradient. Raises ConfigError for other values, and the errors of
        `TrainingStep.set_gradient`.
        """
        place = self._place
        stored = place.pager.gradients
        if stored is not None and stored.has_gradient(*place.key):
            return PagedGradient(self, place.name, stored, place.key)
        return raw_gradient(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        place = self._place
        stored = place.pager.gradients
        replace_gradient(self, value, slots=[self], place=place, name=place.name, stored=stored)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy the parameter as a plain Parameter of its dtype with a copy of the values.

        Within `Runtime.masters`, or if an AveragedModel makes the copy, the copy of a bf16 or fp16 parameter
        is in fp32 instead, with the values of its master ([Note: averages of masters]).
        """
        if id(self) not in memo:
            place, pager = self._place, self._place.pager
            if pager.reads_masters(place) or (
                pager.trains and is_rounded(place) and _called_by(_AVERAGE_MADE, sys._getframe(1))
            ):
                values = pager.master(place, device=self.device)
            else:
                values = pager.copy(place)
            memo[id(self)] = nn.Parameter(values, self.requires_grad)
        copy: nn.Parameter = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the parameter as a plain Parameter with a copy of the values and the user's attributes."""
        plain: Any = nn.Parameter(self._place.pager.copy(self._place), self.requires_grad)
        vars(plain).update((name, value) for name, value in vars(self).items() if name not in _OWN)
        return plain.__reduce_ex__(protocol)


def adopt(parameter: nn.Parameter, place: Place) -> None:
    """Convert a Parameter to a PagedParameter, in place. place: where its values are."""
    parameter.__class__ = PagedParameter
    parameter._place = place  # type: ignore[attr-defined]


def release(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Convert a PagedParameter to a plain Parameter, in place, after its page was closed. values: a tensor of
    the parameter's shape, whose memory becomes the parameter's.
    """
    assert isinstance(parameter, PagedParameter)
    if parameter._refusal is not None:
        parameter._refusal.remove()
    take_gradient(parameter)
    for name in _OWN:
        vars(parameter).pop(name, None)
    parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    replace_data(parameter, values)


def raw_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient in the tensor's `.grad` slot, or None. Gradients in pages are ignored."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: torch.Tensor | None = _TENSOR.grad.__get__(parameter)
        return gradient


def take_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Empty the tensor's `.grad` slot, and return the gradient that was in it, or None."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: torch.Tensor | None = _TENSOR.grad.__get__(parameter)
        _TENSOR.grad.__set__(parameter, None)
        return gradient


def replace_gradient(
    parameter: torch.Tensor,
    value: torch.Tensor | None,
    *,
    slots: Iterable[torch.Tensor],
    place: Place,
    name: str,
    stored: TrainingStep | TiledGradients | None,
) -> None:
    """Replace a parameter's gradient by `value`, as an assignment to its `grad` does; None drops it.

    slots: the paged parameters whose own `.grad` is emptied: the parameter, or its tiles. place: that of the
    first of them. name: the parameter's. stored: has the gradient, by the key of `place`. Raises ConfigError
    if there is no page for a gradient, or if `value` is no dense tensor of floats of the parameter's shape.
    """
    if isinstance(value, PagedGradient):
        if value.is_of(stored, place.key):
            return  # as after p.grad *= 0.5
        value = value.copied()
    if value is not None and (stored is None or not place.page.layout.parameters[place.index].trainable):
        raise ConfigError(
            f"A gradient was set for {name}, which has no pages for gradients: it was frozen when its "
            "model was offloaded, or there is no optimizer.",
            "Offload it with requires_grad=True and with an optimizer.",
        )
    if value is not None and (
        not isinstance(value, torch.Tensor)
        or value.shape != parameter.shape
        or not value.is_floating_point()
        or value.layout is not torch.strided
    ):
        found = f"{list(value.shape)}, {value.dtype}" if isinstance(value, torch.Tensor) else type(value)
        raise ConfigError(
            f"The gradient of {name}, {list(parameter.shape)}, was set to {found}.",
            "Give a dense tensor of floats of the parameter's shape, or None.",
        )
    for slot in slots:
        take_gradient(slot)
    if stored is not None and value is None:
        stored.drop_gradient(*place.key, zeros=False)
    elif stored is not None and value is not None:
        stored.set_gradient(*place.key, value.detach().to(parameter.device).contiguous())


def is_rounded(place: Place) -> bool:
    """Whether the parameter is in bf16 or fp16, and thus rounded if it has an fp32 master."""
    return place.page.layout.parameters[place.index].dtype in (torch.bfloat16, torch.float16)


_AVERAGE_MADE = AveragedModel.__init__.__code__
AVERAGE_UPDATED = AveragedModel.update_parameters.__code__


def _called_by(code: CodeType, frame: FrameType | None) -> bool:
    """Whether the function with `code` is running. frame: the innermost stack frame to look at."""
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _detach(parameter: PagedParameter) -> torch.Tensor:
    """Carry out `parameter.detach()`.

    [Note: averages of masters] The parameters that a model computes with are rounded to bf16 or fp16. An
    average of them would lose all changes smaller than the rounding, and torch cannot average values of one
    dtype into those of another. So torch's AveragedModel, which copies a model with deepcopy and then reads
    each parameter by `detach()`, gets the fp32 masters: its copy is fp32, and `detach()` gives a copy of the
    master in RAM, in the dtype of the average that it is for. In fp32, too, the result is a copy:
    AveragedModel keeps what it reads of all parameters, and views would keep all their pages resident.
    """
    place, caller = parameter._place, sys._getframe(2)
    while caller.f_code.co_name == "__torch_function__" and caller.f_back is not None:
        caller = caller.f_back  # of a TorchFunctionMode, such as `with torch.device(...)`
    if caller.f_code is nn.Parameter.__new__.__code__:
        refuse_parametrization(place.name)
    if caller.f_code is AVERAGE_UPDATED:
        average = caller.f_locals.get("p_averaged")
        dtype = average.dtype if isinstance(average, torch.Tensor) else torch.float32
        own = place.page.layout.parameters[place.index].dtype
        if own == dtype != torch.float32:
            return place.pager.copy(place, "cpu")
        return place.pager.master(place, dtype)
    return place.pager.run(torch.Tensor.detach, [place], (parameter,), {})  # type: ignore[no-any-return]


def refuse_parametrization(name: str) -> NoReturn:
    """Raise ConfigError, because a Parameter was to be made over the memory of the parameter `name`."""
    raise ConfigError(
        f"A Parameter was to be made over the memory of the offloaded parameter {name}, as parametrizations "
        "of torch.nn.utils do.",
        "Change the model first, then offload it; or copy it: nn.Parameter(p.detach().clone()).",
    )


def _memory(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that fetches the page of a parameter and calls `function`, which returns the
    parameter's memory. Raises ConfigError if safetensors calls it: safetensors reads the bytes after it has
    collected all addresses, when pages may have been evicted.
    """

    def carried_out(parameter: PagedParameter) -> Any:
        place, caller = parameter._place, sys._getframe(2).f_globals.get("__name__")
        if caller == "safetensors.torch":
            raise ConfigError(
                f"safetensors was given the offloaded parameter {place.name}, whose memory changes.",
                "Call runtime.export(directory), or give it model.state_dict(), whose tensors are copies.",
            )
        return place.pager.run(function, [place], (parameter,), {})

    return carried_out


_MEMORY: list[Any] = [torch.Tensor.data_ptr, torch.Tensor.storage, torch.Tensor.untyped_storage]


AVERAGING = frozenset(
    getattr(place, name)
    for place in (torch, torch.Tensor)
    for name in ("lerp", "lerp_", "_foreach_lerp", "_foreach_lerp_")
    if hasattr(place, name)
)


def _check_average(places: Iterable[Place], args: Any) -> None:
    """Raise ConfigError if the bf16 or fp16 values of a parameter with an fp32 master would be averaged into
    fp32 values.

    Calls with grad enabled, inside the model's forward or within `runtime.masters()` are allowed. places: the
    places of the parameters among the arguments. args: the positional arguments of a function in
    `AVERAGING`.
    """
    if torch.is_grad_enabled():
        return
    with torch._C.DisableTorchFunctionSubclass():
        first = args[0] if args else None
        averages = first if isinstance(first, (list, tuple)) else (first,)
        wide = any(isinstance(each, torch.Tensor) and each.dtype == torch.float32 for each in averages)
    for place in places if wide else ():
        pager = place.pager
        if is_rounded(place) and pager.trains and not (pager.inside or pager.reads_masters(place)):
            raise ConfigError(
                f"An average in fp32 was given the rounded values of {place.name}.",
                "Update it within `with runtime.masters():`, where parameters are read as fp32 masters.",
            )


def _collect(values: Iterable[Any], places: dict[int, Place]) -> None:
    for value in values:
        if isinstance(value, PagedParameter):
            places[id(value)] = value._place
        elif isinstance(value, (list, tuple)):
            _collect(value, places)
        elif isinstance(value, dict):
            _collect(value.values(), places)


def _run_in_all(function: Callable[..., Any], places: Sequence[Place], args: Any, kwargs: Any) -> Any:
    """Run an operation on paged parameters of several runtimes, and return its result.

    Each runtime's `Pager.run` fetches its own pages. The calls are nested, so that all pages stay resident
    until the operation returns. places: the places of all parameters among the arguments.
    """
    pager = min((place.pager for place in places), key=id)  # a fixed order, because each `run` takes a lock
    others = [place for place in places if place.pager is not pager]

    def inside(*args: Any, **kwargs: Any) -> Any:
        return _run_in_all(function, others, args, kwargs) if others else function(*args, **kwargs)

    return pager.run(inside, [place for place in places if place.pager is pager], args, kwargs)


def _get_data(parameter: PagedParameter, *_: Any) -> torch.Tensor:
    return parameter._place.pager.exported_data(parameter._place)


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
    """Return True if torch can put the data of `other` into `parameter`; raise ConfigError if it cannot.

    At least one of the two is a paged parameter. Module.to and similar methods call this function through
    torch._has_compatible_shallow_copy_type. It never returns False, because these methods would then replace
    the paged parameter by a new Parameter.
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
        "Convert the model before infinity.offload, whose precision= and device= set dtype and device.",
    )


def _set_requires_grad(parameter: PagedParameter, value: bool = True) -> PagedParameter:
    place = parameter._place
    with torch._C.DisableTorchFunctionSubclass():
        parameter.requires_grad = value
        if value and parameter._refusal is None and not place.page.layout.parameters[place.index].trainable:
            tensor: Any = parameter  # torch declares no types for the method
            parameter._refusal = tensor.register_post_accumulate_grad_hook(_refuse_gradient)
    return parameter


def _refuse_gradient(parameter: torch.Tensor) -> NoReturn:
    """Raise ConfigError for the gradient of a parameter that was frozen when its model was offloaded.

    Setting requires_grad raises no error, because some libraries set it for all parameters for a moment.
    """
    take_gradient(parameter)
    assert isinstance(parameter, PagedParameter)
    raise ConfigError(
        f"A gradient came for {parameter._place.name}, which was frozen when its model was offloaded, so it "
        "has no pages for a gradient and optimizer states.",
        "Offload it with requires_grad=True and freeze it afterwards, or freeze it before the backward.",
    )


def _autograd_grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    return torch.autograd.grad(_roots(outputs), _edges(inputs), *args, **kwargs)


def _autograd_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    if kwargs.get("inputs") is not None:
        kwargs["inputs"] = _edges(kwargs["inputs"])
    torch.autograd.backward(_roots(tensors), *args, **kwargs)


def _backward(parameter: PagedParameter, *args: Any, **kwargs: Any) -> None:
    _roots(parameter)[0].backward(*args, **kwargs)


def _roots(outputs: Any) -> list[Any]:
    """Return `outputs`, from which a backward starts, as a list with a plain view for each paged parameter.

    Torch then does not call __torch_function__ for the backward. The backward does not need the pages of
    these parameters, and must not run through `Pager.run`, which holds the runtime's lock: hooks and
    recomputation that it calls in other threads have to fetch pages.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return [each.view_as(each) if isinstance(each, PagedParameter) else each for each in _listed(outputs)]


def _edges(inputs: Any) -> list[Any]:
    """Return the `inputs` of a backward as a list, with a GradientEdge in place of each paged parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        return [
            torch.autograd.graph.get_gradient_edge(each) if isinstance(each, PagedParameter) else each
            for each in _listed(inputs)
        ]


def _listed(values: Any) -> list[Any]:
    # A GradientEdge is a tuple, but stands for a single value.
    alone = isinstance(values, (torch.Tensor, torch.autograd.graph.GradientEdge))
    return [values] if alone else list(values)


def _no_other_storage(parameter: torch.Tensor, *_: Any, **__: Any) -> NoReturn:
    name = (
        f"The parameter {parameter._place.name}" if isinstance(parameter, PagedParameter) else "A parameter"
    )
    raise ConfigError(
        f"{name} cannot be given another storage or size: its memory is a page's.",
        "Assign values (p.copy_(values) under torch.no_grad(), p.data = values); register parametrizations "
        "before infinity.offload.",
    )


def _keep_weights_apart(*_: Any, **__: Any) -> None:
    """Do nothing, in place of torch._cudnn_rnn_flatten_weight. nn.LSTM calls that function to move its
    weights into one storage, which saves cuDNN a copy.
    """


_SPECIAL: dict[Any, Callable[..., Any]] = {
    _GET_DATA: _get_data,
    _SET_DATA: _set_data,
    _SET_REQUIRES_GRAD: _set_requires_grad,
    _REQUIRES_GRAD: _set_requires_grad,
    **{each: _memory(each) for each in _MEMORY},
    torch.Tensor.detach: _detach,
    torch.Tensor.resize_: _no_other_storage,
    torch.Tensor.resize_as_: _no_other_storage,
    torch._cudnn_rnn_flatten_weight: _keep_weights_apart,
    torch.autograd.grad: _autograd_grad,
    torch.autograd.backward: _autograd_backward,
    torch.Tensor.backward: _backward,
    torch._has_compatible_shallow_copy_type: _can_be_replaced,
}
