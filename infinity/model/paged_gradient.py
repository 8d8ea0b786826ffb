"""Paged gradient: the value of `p.grad` of a paged parameter that has a gradient, a tensor without bytes.

It has the parameter's shape, strides, dtype and device. `nn.Module.zero_grad` can use it; code that reads or
changes its values gets a ConfigError that names the runtime's own calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch

from infinity.errors import ConfigError

_ANY: Any = torch.Tensor
_ATTRIBUTES = (
    "shape dtype device layout requires_grad grad_fn is_leaf ndim is_cuda is_cpu is_meta is_sparse is_mkldnn "
    "is_quantized is_nested itemsize nbytes"
)
_METHODS = (
    "size dim ndimension numel nelement stride is_contiguous element_size is_floating_point is_complex "
    "__len__ __hash__"
)
_METADATA = frozenset(
    [getattr(_ANY, name).__get__ for name in _ATTRIBUTES.split()]
    + [getattr(torch.Tensor, name) for name in _METHODS.split()]
)
"""Functions that read no values of a gradient."""
_WITHOUT_EFFECT = frozenset([torch.Tensor.detach_, torch.Tensor.requires_grad_])
"""Functions that change nothing in a gradient, which no graph has made."""


class PagedGradient(torch.Tensor):
    """A parameter's gradient, as `p.grad` returns it. Its bytes are in a page."""

    _name: str
    _zero: Callable[[], None]

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, name: str, zero: Callable[[], None]) -> PagedGradient:
        """parameter: whose gradient it is. name: of the parameter, for errors. zero: function that replaces
        the gradient by one of zeros.
        """
        gradient: PagedGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        gradient._name, gradient._zero = name, zero
        return gradient

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, cls):
            if func in _METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            if func is torch.Tensor.zero_:
                first._zero()
                return first
            if func in _WITHOUT_EFFECT:
                return first
        _refuse(args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        _refuse(args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PagedGradient({self._name}, {list(self.shape)}, {self.dtype})"


def _refuse(args: Any, kwargs: Any) -> NoReturn:
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    name = next((each._name for each in leaves if isinstance(each, PagedGradient)), "a parameter")
    raise ConfigError(
        f"The gradient of {name} is in a page, not in .grad.",
        "Read a copy with runtime.grad(p); clip with runtime.clip_grad_norm_(); reset with "
        "runtime.optimizer.zero_grad().",
    )
