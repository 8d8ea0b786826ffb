"""Paged gradient: the value of `p.grad` of a paged parameter that has a gradient, a tensor without bytes.

A paged gradient has the parameter's shape, strides, dtype and device, and supports what training loops do:

- its 2-norm is computed from the sums of squares of the gradient page, in float32 or a wider dtype;
- a factor by which it is multiplied is stored, and used by the update (`Gradients.agree_on_factor`);
- zero_() replaces the gradient by zeros;
- any other read gets a copy in the gradient's dtype and on its device;
- any other write raises ConfigError, and so does a write to a view such as p.grad[0], which views a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.model.tiled_parameter import TiledGradients
    from infinity.training_step import TrainingStep

_aten: Any = torch.ops.aten


class PagedGradient(torch.Tensor):
    """A tensor without data of its own that stands for a parameter's gradient, whose bytes are in a page, or
    for a view of a copy of this gradient.
    """

    _name: str
    """The parameter's name, for errors."""
    _stored: TrainingStep | TiledGradients
    _key: tuple[int, int]
    """(index of the unit, index of the parameter in it)."""
    _age: int
    _view: torch.Tensor | None = None
    """The view of a copy of the gradient that this object represents; None if it represents the gradient."""

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, name: str, stored: TrainingStep | TiledGradients, key: tuple[int, int]
    ) -> PagedGradient:
        """like: a tensor with the gradient's shape, strides, dtype and device. name: the parameter's name.
        key: (index of the unit, index of the parameter in it).
        """
        with torch._C.DisableTorchFunctionSubclass():
            gradient: PagedGradient = torch.Tensor._make_wrapper_subclass(
                cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
            )
        gradient._name, gradient._stored, gradient._key = name, stored, key
        gradient._age = stored.gradient_age(*key)
        return gradient

    def is_of(self, stored: TrainingStep | TiledGradients | None, key: tuple[int, int]) -> bool:
        """Whether this object is the present gradient of parameter `key` in the step `stored`.

        A view of a gradient does not count, nor does an object made before the gradient was last forgotten or
        replaced. key: (index of the unit, index of the parameter in it).
        """
        same = self._stored is stored and self._key == key and self._view is None
        return same and self._stored.gradient_age(*key) == self._age

    def copied(self) -> torch.Tensor:
        """Return a tensor with the values of this object, to be read only: a new copy of the gradient, or, if
        this object is a view such as p.grad[0], that view of an earlier copy.

        Raises ConfigError if the gradient has been forgotten or replaced.
        """
        if self._view is not None:
            return self._view
        found = self._present().read_gradient(*self._key)
        if found is None:
            raise self._gone()
        return found.to(self.device, self.dtype)

    def norm_now(self) -> float:
        return self._present().gradient_norm(*self._key)

    def scale(self, factor: float) -> PagedGradient:
        self._present().scale_gradient(*self._key, factor)
        return self

    def clear(self) -> PagedGradient:
        """Replace the gradient by one of zeros, and return it."""
        self._present().drop_gradient(*self._key, zeros=True)
        self._age = self._stored.gradient_age(*self._key)
        return self

    def alias(self) -> PagedGradient:
        self._present()
        return PagedGradient(self, self._name, self._stored, self._key)

    def _for_view(self, view: torch.Tensor) -> PagedGradient:
        found = PagedGradient(view, self._name, self._stored, self._key)
        found._view = view
        return found

    def _present(self) -> TrainingStep | TiledGradients:
        if not self.is_of(self._stored, self._key) or not self._stored.has_gradient(*self._key):
            raise self._gone()
        return self._stored

    def _gone(self) -> ConfigError:
        return ConfigError(
            f"A former gradient of {self._name} was used, which is forgotten.",
            "Use p.grad before zero_grad() and before it is set, or keep a copy: p.grad.clone().",
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if any(each is not cls for each in types):
            return NotImplemented  # a paged parameter brings its page first
        if args and isinstance(args[0], cls):
            if (
                func == _ANY.data.__set__
                and isinstance(args[1], cls)
                and args[1].is_of(args[0]._stored, args[0]._key)
            ):
                return None  # Module.to and Module.cpu do this if there is nothing to convert
            if func in _OF_MEMORY:
                _refuse(args[0], "data =" if func == _ANY.data.__set__ else func.__name__)
            if func in _OF_COPIES:
                result = func(args[0].copied(), *args[1:], **(kwargs or {}))
                if hasattr(result, "setflags"):
                    result.setflags(write=False)  # a numpy array, whose edits would be lost
                return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None and not (isinstance(args[0], cls) and args[0]._view is not None):
            result = special(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func in _OF_METADATA:
            kwargs["device"] = kwargs.get("device") or args[0].device
            like = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype, device="meta")
            return func(like, *args[1:], **kwargs)
        schema = func._schema
        given = {each.name: value for each, value in zip(schema.arguments, args, strict=False)} | kwargs
        for each in schema.arguments:
            if each.alias_info is not None and each.alias_info.is_write:
                for leaf in tree_leaves(given.get(each.name)):
                    if isinstance(leaf, cls):
                        _refuse(leaf, schema.name.removeprefix("aten::"))
        source = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        args, kwargs = tree_map_only(cls, cls.copied, (args, kwargs))
        result = func(*args, **kwargs)
        if any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns):
            return tree_map_only(torch.Tensor, source._for_view, result)
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PagedGradient({self._name}, {list(self.shape)}, {self.dtype})"


def _refuse(gradient: PagedGradient, what: str) -> NoReturn:
    raise ConfigError(
        f"{what} was called on the gradient of {gradient._name}, whose memory is in a page.",
        "Set another gradient (p.grad = tensor), clip with runtime.clip_grad_norm_(), or multiply all "
        "gradients by one number; runtime.grad(p) is a copy.",
    )


def _norm(
    gradient: PagedGradient, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Compute linalg.vector_norm of order 2 over all dimensions; NotImplemented for other arguments."""
    every = not dim or sorted(each % gradient.ndim for each in dim) == list(range(gradient.ndim))
    if order != 2 or not every or keepdim:
        return NotImplemented
    dtype = dtype or torch.promote_types(gradient.dtype, torch.float32)
    return torch.tensor(gradient.norm_now(), dtype=dtype, device=gradient.device)


def _norms(gradients: Sequence[Any], order: Any = 2, dtype: Any = None) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(each, order, dtype=dtype) for each in gradients]


def _multiply(gradient: Any, by: Any) -> Any:
    number = _number(gradient, by)
    return NotImplemented if number is None else gradient.scale(number)


def _divide(gradient: Any, by: Any) -> Any:
    number = _number(gradient, by)
    if number is None:
        return NotImplemented
    return gradient.scale(1.0 / number if number else math.copysign(math.inf, number))


def _number(gradient: Any, by: Any) -> float | None:
    """Return `by` as a number by which `gradient` can be multiplied or divided.

    Returns None if `gradient` is not a paged gradient, if `by` is a paged gradient, or if `by` is a tensor
    that has several elements or more dimensions than `gradient`.
    """
    if not isinstance(gradient, PagedGradient) or isinstance(by, PagedGradient):
        return None
    if isinstance(by, torch.Tensor) and (by.numel() != 1 or by.ndim > gradient.ndim):
        return None
    return float(by)


def _multiply_all(gradients: Sequence[Any], by: Any) -> None:
    for gradient, factor in zip(gradients, _each(gradients, by), strict=True):
        gradient.mul_(factor)


def _divide_all(gradients: Sequence[Any], by: Any) -> None:
    for gradient, factor in zip(gradients, _each(gradients, by), strict=True):
        gradient.div_(factor)


def _each(gradients: Sequence[Any], by: Any) -> Sequence[Any]:
    return by if isinstance(by, (list, tuple)) else [by] * len(gradients)


def _zero_all(gradients: Sequence[Any]) -> None:
    for gradient in gradients:
        gradient.zero_()


def _unscale_all(gradients: Sequence[Any], found: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply gradients by `factor`, for torch.amp.GradScaler. `found` becomes 1 if one is not finite."""
    number = float(factor)
    for gradient in gradients:
        if not isinstance(gradient, PagedGradient):
            _aten._amp_foreach_non_finite_check_and_unscale_([gradient], found, factor)
            continue
        if not math.isfinite(gradient.norm_now()):
            found.fill_(1.0)
        gradient.scale(number)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: PagedGradient.alias,
    _aten.alias.default: PagedGradient.alias,
    _aten.detach_.default: lambda gradient: gradient,
    _aten.zero_.default: PagedGradient.clear,
    _aten._foreach_zero_.default: _zero_all,
    _aten.linalg_vector_norm.default: _norm,
    _aten._foreach_norm.Scalar: _norms,
    _aten.mul_.Tensor: _multiply,
    _aten.mul_.Scalar: _multiply,
    _aten.div_.Tensor: _divide,
    _aten.div_.Scalar: _divide,
    _aten._foreach_mul_.Scalar: _multiply_all,
    _aten._foreach_mul_.ScalarList: _multiply_all,
    _aten._foreach_mul_.Tensor: _multiply_all,
    _aten._foreach_div_.Scalar: _divide_all,
    _aten._foreach_div_.ScalarList: _divide_all,
    _aten._foreach_div_.Tensor: _divide_all,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale_all,
}
"""Operations that need no copy of the gradient."""
_OF_METADATA = frozenset(
    each.default
    for each in (
        *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like),
        *(_aten.randn_like, _aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full),
        _aten.new_empty_strided,
    )
)
_ANY: Any = torch.Tensor
_OF_COPIES: frozenset[Any] = frozenset(
    [_ANY.numpy, _ANY.tolist, _ANY.__array__, _ANY.__deepcopy__, _ANY.__reduce_ex__]
)
"""Methods that read the memory of a tensor: they are called on a copy of the gradient."""
_OF_MEMORY: frozenset[Any] = frozenset(
    [_ANY.data.__set__, _ANY.data_ptr, _ANY.apply_, _ANY.map_, _ANY.share_memory_, _ANY.__dlpack__]
)
"""Methods that give out or change the memory of a tensor: they raise ConfigError."""
