"""Tiled parameter: the Parameter of a tiled module whose model is offloaded. Its values are in its tiles.

The Parameter stays the user's object, with its name, shape and place in the optimizer. Each tile is a paged
parameter of its own ([Note: tiles] in infinity/layout/tiles.py). Tiled modules and linear_cross_entropy use
the tiles. Any other operation gets a copy of the whole values, and gradients flow from the copy to the tiles.
If the operation changes the copy in place, the changed values are written to the tiles. Views of a copy
refuse writes, which the tiles would not see.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from infinity.config import format_size
from infinity.errors import BudgetError, ConfigError
from infinity.formats.casts import EQUAL_DTYPES, cast_operands
from infinity.gradients.tile_sums import Away, add_up, contribution, sums_of
from infinity.losses.linear_cross_entropy import linear_cross_entropy, of_tiles
from infinity.model.paged_gradient import PagedGradient
from infinity.model.paged_parameter import (
    AVERAGE_UPDATED,
    AVERAGING,
    METADATA,
    PagedParameter,
    is_rounded,
    refuse_parametrization,
    replace_gradient,
)
from infinity.pages.parameter_page import replace_data

if TYPE_CHECKING:
    from infinity.model.pager import Pager
    from infinity.training_step import TrainingStep

_TENSOR: Any = torch.Tensor


class TiledGradients:
    """The gradients of tiled parameters, with those methods of TrainingStep that a PagedGradient calls.

    The key of a tiled parameter, (unit, index of a parameter in it), is that of its first tile.
    """

    def __init__(self, step: TrainingStep, parameter: TiledParameter) -> None:
        self._step = step
        self._tiles = {each._place.key: each for each in parameter.tiles}

    def has_gradient(self, unit: int, parameter: int) -> bool:
        return any(self._step.has_gradient(*key) for key in self._tiles)

    def gradient_age(self, unit: int, parameter: int) -> int:
        return sum(self._step.gradient_age(*key) for key in self._tiles)

    def read_gradient(self, unit: int, parameter: int) -> torch.Tensor | None:
        found = [(self._step.read_gradient(*key), tile) for key, tile in self._tiles.items()]
        dtype = next((each.dtype for each, _ in found if each is not None), None)
        if dtype is None:
            return None
        zeros = (torch.zeros(tile.shape, dtype=dtype, device="cpu") for _, tile in found)
        return torch.cat(
            [zero if each is None else each for (each, _), zero in zip(found, zeros, strict=True)]
        )

    def gradient_norm(self, unit: int, parameter: int) -> float:
        return self._step.norm_of_gradients(list(self._tiles))

    def scale_gradient(self, unit: int, parameter: int, factor: float) -> None:
        for key in self._tiles:
            self._step.scale_gradient(*key, factor)

    def drop_gradient(self, unit: int, parameter: int, *, zeros: bool) -> None:
        for key in self._tiles:
            self._step.drop_gradient(*key, zeros=zeros)

    def set_gradient(self, unit: int, parameter: int, value: torch.Tensor) -> None:
        for (key, tile), part in zip(self._tiles.items(), split(value, self._tiles.values()), strict=True):
            assert part.shape == tile.shape
            self._step.set_gradient(*key, part)


class TiledParameter(nn.Parameter):
    """A Parameter whose values are in tiles. Only `adopt_tiled` makes objects of this class."""

    takes_paged = True
    """Whether `__torch_function__` handles operations that take paged parameters, too."""
    tiles: tuple[PagedParameter, ...]
    """In row order."""
    _gradients: TiledGradients | None = None

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        return nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is None and args and isinstance(args[0], cls):
            special = _METHODS.get(func)
        if special is not None:
            return special(*args, **kwargs)
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _on_copies(func, args, kwargs)

    def set_(self, *arguments: Any, **options: Any) -> NoReturn:
        _refuse(self, "another storage")

    @property
    def name_in_model(self) -> str:
        name = self.tiles[0]._place.page.layout.parameters[self.tiles[0]._place.index].tile_of
        assert name is not None
        return name

    @property
    def pager(self) -> Pager:
        return self.tiles[0]._place.pager

    def read_gradient(self) -> torch.Tensor | None:
        """Copy the gradient to RAM, as `TrainingStep.gradient` does."""
        stored = self._stored()
        return None if stored is None else stored.read_gradient(*self.tiles[0]._place.key)

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient as a PagedGradient, a tensor without bytes; None if there is no gradient. Setting it
        is as for a PagedParameter.
        """
        stored = self._stored()
        key = self.tiles[0]._place.key
        if stored is not None and stored.has_gradient(*key):
            return PagedGradient(self, self.name_in_model, stored, key)
        return None

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        place = self.tiles[0]._place
        name, stored = self.name_in_model, self._stored()
        replace_gradient(self, value, slots=self.tiles, place=place, name=name, stored=stored)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _stored(self) -> TiledGradients | None:
        step = self.pager.gradients
        if step is None:
            return None
        if self._gradients is None:
            self._gradients = TiledGradients(step, self)
        return self._gradients

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy the parameter as a plain Parameter with a copy of the values, as a PagedParameter does."""
        if id(self) not in memo:
            parts = [tile.__deepcopy__({}) for tile in self.tiles]
            memo[id(self)] = nn.Parameter(torch.cat([each.detach() for each in parts]), self.requires_grad)
        copy: nn.Parameter = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the parameter as a plain Parameter with a copy of the values and the user's attributes."""
        plain: Any = nn.Parameter(whole(self), self.requires_grad)
        vars(plain).update((name, value) for name, value in vars(self).items() if name not in _OWN)
        return plain.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        try:
            return str(super().__repr__())  # type: ignore[no-untyped-call]
        except BudgetError:
            return f"Parameter {self.name_in_model} of {len(self.tiles)} tiles, {[*self.shape]}, {self.dtype}"

    def write(self, values: torch.Tensor) -> None:
        """Replace the parameter's values by `values`, of its shape and any dtype, as an edit of user code."""
        with torch.no_grad():
            for tile, part in zip(self.tiles, split(values, self.tiles), strict=True):
                tile.copy_(part)
        torch.autograd.graph.increment_version(self)


_OWN = ("tiles", "_gradients")


def adopt_tiled(
    parameter: nn.Parameter, tiles: Sequence[nn.Parameter], placeholder: torch.Tensor, away: Away | None
) -> None:
    """Convert a Parameter to a TiledParameter, in place, once its tiles are paged parameters.

    placeholder: the `data` that it has from now on. away: where the gradients of tiles of tied weights wait;
    None: where the model computes.
    """
    replace_data(parameter, placeholder)
    parameter.__class__ = TiledParameter
    parameter.tiles = tuple(tiles)  # type: ignore[attr-defined]
    place = next(paged([parameter]))._place
    layout = place.page.layout.parameters[place.index]
    if away is not None and layout.trainable and len(layout.names) > 1:
        add_up(away, tiles, len(layout.names))


def release_tiled(parameter: TiledParameter, values: torch.Tensor) -> None:
    """Convert a TiledParameter to a plain Parameter, in place, after its tiles were released. values: a
    tensor of the parameter's shape, whose memory becomes the parameter's.
    """
    for name in _OWN:
        vars(parameter).pop(name, None)
    parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    replace_data(parameter, values)


def is_paged(parameter: object) -> bool:
    """Whether the values of a parameter are in pages: its own, or those of its tiles."""
    return isinstance(parameter, (PagedParameter, TiledParameter))


def paged(parameters: Iterable[Any]) -> Iterator[PagedParameter]:
    """Yield the paged parameters among `parameters`, and the tiles of tiled ones in their place."""
    for each in parameters:
        if isinstance(each, TiledParameter):
            yield from each.tiles
        elif isinstance(each, PagedParameter):
            yield each


def split(values: torch.Tensor, tiles: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Cut a tensor of a tiled parameter's shape into views of the rows of each tile."""
    parts: tuple[torch.Tensor, ...] = values.split([len(each) for each in tiles])
    return parts


def split_state(
    state: Mapping[str, torch.Tensor], tiles: Sequence[torch.Tensor]
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the optimizer state of each tile: entries of the parameter's shape are cut, others repeated."""
    first = 0
    for tile in tiles:
        rows = slice(first, first + len(tile))
        yield {name: value[rows] if value.ndim else value for name, value in state.items()}
        first = rows.stop


def by_tile(
    parameter: torch.Tensor, state: Mapping[str, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, Mapping[str, torch.Tensor]]]:
    """Yield each tile of a parameter with its optimizer state; a parameter that is not tiled with `state`."""
    if isinstance(parameter, TiledParameter):
        yield from zip(parameter.tiles, split_state(state, parameter.tiles), strict=True)
    else:
        yield parameter, state


def join_states(states: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Join the states of a parameter's tiles to that of the parameter. Tiles are always updated together."""
    return {
        name: torch.cat([each[name] for each in states]) if value.ndim else value
        for name, value in states[0].items()
    }


def whole(parameter: TiledParameter, device: torch.device | str | None = None) -> torch.Tensor:
    """Return a copy of a tiled parameter's values, without a graph; in `Runtime.masters`, of its masters.

    device: where the copy is made; None: in RAM within state_dict, and else on the parameter's device. Raises
    BudgetError if this is not within state_dict, and the copy is larger than the budget of the memory where
    the model computes.
    """
    pager, place = parameter.pager, parameter.tiles[0]._place
    where = torch.device("cpu" if pager.copying else parameter.device) if device is None else device
    dtype = torch.float32 if pager.reads_masters(place) else parameter.dtype
    if device is None and not pager.copying:
        _check_room(parameter, parameter.numel() * dtype.itemsize)
    with torch.inference_mode(False), torch.no_grad():
        values = torch.empty(parameter.shape, dtype=dtype, device=where)
        for tile, part in zip(parameter.tiles, split(values, parameter.tiles), strict=True):
            part.copy_(tile)
    return values


def values_in_ram(parameter: PagedParameter | TiledParameter) -> torch.Tensor:
    """Return a copy of a parameter's values in RAM. It may exceed the budget of the memory of the model."""
    if isinstance(parameter, TiledParameter):
        return whole(parameter, "cpu")
    return parameter._place.pager.copy(parameter._place, "cpu")


def _check_room(parameter: TiledParameter, nbytes: int) -> None:
    plan = parameter.pager.prefetch_engine.store.plan
    budget = plan.budgets[plan.computes_in]
    if nbytes > budget:
        raise BudgetError(
            f"All {format_size(nbytes)} of {parameter.name_in_model}, which is tiled, were asked for "
            f"together, and the {plan.computes_in.value} budget is {format_size(budget)}.",
            "Use the parameter in tiled modules alone (infinity.tiled), read it by runtime.export() or "
            f"model.state_dict(), or give a {plan.computes_in.value} budget of {format_size(2 * nbytes)}.",
            needed=2 * nbytes,
            tier=plan.computes_in.value,
        )


class _Whole(torch.autograd.Function):
    """Makes a copy of the whole values from the tiles, and cuts its gradient into theirs."""

    @staticmethod
    def forward(ctx: Any, parameter: TiledParameter, *tiles: torch.Tensor) -> torch.Tensor:
        ctx.rows, ctx.sums = [len(each) for each in tiles], [sums_of(each) for each in tiles]
        return whole(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        parts = zip(ctx.sums, gradient.split(ctx.rows), strict=True)
        return None, *[contribution(*each) for each in parts]


def _in_graph(parameter: TiledParameter) -> bool:
    return torch.is_grad_enabled() and parameter.requires_grad and not parameter.pager.copying


def _on_copies(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an operation on copies of tiled parameters, and write back the copies that it changes."""
    copies: dict[int, tuple[TiledParameter, torch.Tensor, int, Any]] = {}

    def copied(parameter: TiledParameter) -> torch.Tensor:
        if id(parameter) not in copies:
            _check_average(function, parameter, args)
            make = functools.partial(_Whole.apply, parameter, *parameter.tiles)
            made: torch.Tensor = make() if _in_graph(parameter) else whole(parameter)
            copies[id(parameter)] = parameter, made, made._version, made.grad_fn
        return copies[id(parameter)][1]

    first = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, TiledParameter))
    if function in EQUAL_DTYPES and not first.pager.reads_masters(first.tiles[0]._place):
        args, kwargs = cast_operands(function, args, kwargs, TiledParameter)
    args, kwargs = tree_map_only(TiledParameter, copied, (args, kwargs))
    result = function(*args, **kwargs)
    for parameter, copy, version, node in copies.values():
        if copy._version != version:
            if copy.grad_fn is not node:  # else the edit was under no_grad, as those of nn.init are
                raise RuntimeError(
                    f"a leaf Variable that requires grad is being used in an in-place operation: "
                    f"{parameter.name_in_model}."
                )
            if parameter.pager.reads_masters(parameter.tiles[0]._place):
                raise _no_edit(parameter.name_in_model)
            parameter.write(copy)
    memory = {}
    for parameter, copy, *_ in copies.values():
        if result is copy:
            return parameter
        if not parameter.pager.copying:
            memory[copy.untyped_storage().data_ptr()] = parameter.name_in_model
    return _with_fixed(result, memory)


def _check_average(function: Callable[..., Any], parameter: TiledParameter, args: Any) -> None:
    """Raise ConfigError if rounded values would be averaged; see `_check_average` of paged parameters."""
    place, pager = parameter.tiles[0]._place, parameter.pager
    exact = pager.reads_masters(place) or pager.inside or torch.is_grad_enabled()
    if function in AVERAGING and is_rounded(place) and pager.trains and not exact:
        raise ConfigError(
            f"An average was given the rounded values of {parameter.name_in_model}.",
            "Update it within `with runtime.masters():`, where parameters are read as fp32 masters.",
        )


class FixedCopy(torch.Tensor):
    """A copy of a tiled parameter's values, or a view of one, that refuses to be changed in place."""

    _of: str
    """The parameter's name in the model."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA or func in _OF_AUTOGRAD:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        _refuse_writes(func, args, kwargs)
        found: list[tuple[torch.Tensor, int]] = []
        names: list[str] = []

        def plain(fixed: FixedCopy) -> torch.Tensor:
            with torch._C.DisableTorchFunctionSubclass():
                made = fixed.as_subclass(torch.Tensor)
            found.append((made, made._version))
            names.append(fixed._of)
            return made

        args, kwargs = tree_map_only(cls, plain, (args, kwargs))
        if func in _MEMORY or func is _TENSOR.data.__set__:
            raise _no_edit(names[0])
        result = func(*args, **kwargs)
        if any(each._version != version for each, version in found):
            raise _no_edit(names[0])
        if hasattr(result, "setflags"):
            result.setflags(write=False)  # a numpy array, whose edits would be lost
        memory = {each.untyped_storage().data_ptr() for each, _ in found}
        return _with_fixed(result, dict.fromkeys(memory, names[0]))


def _with_fixed(result: Any, memory: Mapping[int, str]) -> Any:
    """Return the result of an operation with a FixedCopy in place of each plain tensor that lies in a copy.

    memory: address of a copy -> name of its parameter.
    """

    def fixed(tensor: torch.Tensor) -> torch.Tensor:
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta
        name = memory.get(tensor.untyped_storage().data_ptr()) if plain else None
        return tensor if name is None else _fixed(tensor, name)

    found = isinstance(result, (torch.Tensor, list, tuple))
    return tree_map_only(torch.Tensor, fixed, result) if found else result


def _fixed(tensor: torch.Tensor, name: str) -> FixedCopy:
    with torch._C.DisableTorchFunctionSubclass():
        made = tensor.as_subclass(FixedCopy)
    made._of = name
    return made


def _refuse_writes(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Raise ConfigError if an operation is about to write to a FixedCopy: by its name, or as its `out`."""
    name = getattr(function, "__name__", "")
    in_place = name.startswith(("__i", "__setitem")) or (name.endswith("_") and name[-2:] != "__")
    changed = [kwargs.get("out"), next(iter((*args, *kwargs.values())), None) if in_place else None]
    for each in changed:
        for one in each if isinstance(each, (list, tuple)) else (each,):
            if isinstance(one, FixedCopy):
                raise _no_edit(one._of)


def _no_edit(name: str) -> ConfigError:
    return ConfigError(
        f"A copy or a view of {name}, which is tiled, was to be changed, and its tiles would not see that.",
        "Change the parameter itself under torch.no_grad(): p.copy_(values), p.mul_(2), p[0] = values. For a "
        "copy of your own take p.detach().clone().",
    )


def _refuse(parameter: TiledParameter, what: str) -> NoReturn:
    raise ConfigError(
        f"{parameter.name_in_model} was asked for {what}, and it is tiled: it has no memory of its own.",
        "Use a copy (p.detach()), or leave out infinity.tiled for this module.",
    )


def _refusal(what: str) -> Callable[..., NoReturn]:
    def refuse(parameter: TiledParameter, *_: Any, **__: Any) -> NoReturn:
        _refuse(parameter, what)

    return refuse


def _read(parameter: TiledParameter, *_: Any) -> torch.Tensor:
    """Carry out `p.data` and `p.detach()`: a copy, which refuses to be changed outside of state_dict."""
    caller = sys._getframe(2)
    while caller.f_code.co_name == "__torch_function__" and caller.f_back is not None:
        caller = caller.f_back  # of a TorchFunctionMode, such as `with torch.device(...)`
    if caller.f_code is nn.Parameter.__new__.__code__:
        refuse_parametrization(parameter.name_in_model)
    if caller.f_code is AVERAGE_UPDATED:
        average = caller.f_locals.get("p_averaged")
        dtype = average.dtype if isinstance(average, torch.Tensor) else torch.float32
        parts = [parameter.pager.master(tile._place, dtype) for tile in parameter.tiles]
        return torch.cat(parts)
    values = whole(parameter)
    return values if parameter.pager.copying else _fixed(values, parameter.name_in_model)


def _set_data(parameter: TiledParameter, value: torch.Tensor) -> None:
    if value is parameter:
        return  # Module.to does this if there is nothing to convert
    if isinstance(value, TiledParameter):
        value = whole(value)
    here = parameter.shape, parameter.dtype, parameter.device
    if (value.shape, value.dtype, value.device) != here:
        raise ConfigError(
            f"The parameter {parameter.name_in_model} {[*here]} cannot become {list(value.shape)}, "
            f"{value.dtype}, {value.device} while its model is offloaded.",
            "Convert the model before infinity.offload, whose precision= and device= set dtype and device.",
        )
    parameter.write(value)


def _copy(parameter: TiledParameter, source: Any, *args: Any, **kwargs: Any) -> Any:
    """Carry out `parameter.copy_(source)` tile by tile."""
    if _in_graph(parameter):
        return _on_copies(torch.Tensor.copy_, (parameter, source, *args), kwargs)
    if isinstance(source, TiledParameter):
        source = whole(source)
    if parameter.pager.reads_masters(parameter.tiles[0]._place):
        raise _no_edit(parameter.name_in_model)
    parameter.write(source.expand(parameter.shape))
    return parameter


def _loss(
    hidden: torch.Tensor, weight: Any, target: torch.Tensor, bias: Any = None, **options: Any
) -> torch.Tensor:
    """Carry out `linear_cross_entropy` tile by tile."""
    if not isinstance(weight, TiledParameter):
        found: torch.Tensor = _on_copies(linear_cross_entropy, (hidden, weight, target, bias), options)
        return found
    pager, dtype = weight.pager, weight.dtype
    if pager.reads_masters(weight.tiles[0]._place):
        dtype = torch.float32
    else:
        (hidden, _, _, bias), options = cast_operands(
            linear_cross_entropy, (hidden, weight, target, bias), options, TiledParameter
        )
    shown = torch.empty((), dtype=dtype, device="meta").expand(weight.shape)
    with pager.saving():
        return of_tiles(hidden, shown, target, bias, tiles=weight.tiles, **options)


def _set_requires_grad(parameter: TiledParameter, value: bool = True) -> TiledParameter:
    with torch._C.DisableTorchFunctionSubclass():
        parameter.requires_grad = value
    for tile in parameter.tiles:
        tile.requires_grad_(value)
    return parameter


def _can_be_replaced(parameter: torch.Tensor, other: torch.Tensor) -> bool:
    """As for paged parameters: `_set_data` decides what can be put into a tiled parameter."""
    return True


def _inputs(inputs: Any) -> tuple[list[Any], list[int]]:
    """Replace tiled parameters among the inputs of a backward by their tiles. Returns the list, and for each
    given input the number of its items there; 0 for an input that is not tiled.
    """
    alone = isinstance(inputs, (torch.Tensor, torch.autograd.graph.GradientEdge))
    found: list[Any] = []
    counts = []
    for each in [inputs] if alone else inputs:
        tiled = isinstance(each, TiledParameter)
        found += each.tiles if tiled else [each]
        counts.append(len(each.tiles) if tiled else 0)
    return found, counts


def _autograd_grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    found, counts = _inputs(inputs)
    gradients = iter(torch.autograd.grad(outputs, found, *args, **kwargs))
    joined = []
    for count in counts:
        parts = [next(gradients) for _ in range(count or 1)]
        known = [each for each in parts if each is not None]
        joined.append(torch.cat(known) if count and len(known) == count else parts[0])
    return tuple(joined)


def _autograd_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    if kwargs.get("inputs") is not None:
        kwargs["inputs"] = _inputs(kwargs["inputs"])[0]
    torch.autograd.backward(tensors, *args, **kwargs)


_MEMORY: frozenset[Any] = frozenset(
    [torch.Tensor.data_ptr, torch.Tensor.storage, torch.Tensor.untyped_storage, torch.Tensor.__dlpack__]
)
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_OF_AUTOGRAD: frozenset[Any] = frozenset(
    [
        *(_TENSOR.requires_grad.__set__, torch.Tensor.requires_grad_, torch.Tensor.backward),
        *(_TENSOR.grad.__get__, _TENSOR.grad.__set__, _TENSOR.grad.__delete__),
        *(torch.autograd.grad, torch.autograd.backward),
    ]
)
"""Functions that concern a FixedCopy's place in a graph and its own gradient."""
_METHODS: dict[Any, Callable[..., Any]] = {
    _TENSOR.data.__get__: _read,
    _TENSOR.data.__set__: _set_data,
    torch.Tensor.detach: _read,
    torch.Tensor.copy_: _copy,
    _TENSOR.requires_grad.__set__: _set_requires_grad,
    torch.Tensor.requires_grad_: _set_requires_grad,
    **{each: _refusal("its memory") for each in _MEMORY},
    torch.Tensor.resize_: _refusal("another size"),
    torch.Tensor.resize_as_: _refusal("another size"),
    **{getattr(torch.Tensor, name): _refusal("a hook on its gradient") for name in _HOOKS},
}
"""Methods of a tiled parameter that are carried out otherwise than on a copy."""
_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch._has_compatible_shallow_copy_type: _can_be_replaced,
    torch.autograd.grad: _autograd_grad,
    torch.autograd.backward: _autograd_backward,
    linear_cross_entropy: _loss,
}
