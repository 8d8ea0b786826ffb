"""Fake model: a copy of a model with tensors that have no data. The copy shares nothing with the model that
the copy's forward or backward could change.
"""

from __future__ import annotations

import contextvars
import functools
import io
import logging
import pickle
import sys
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor

from infinity.config import Precision
from infinity.layout.names import plain_name

_MOST_OBJECTS = 5_000_000
_MOST_ARRAY_BYTES = 256 << 20
"""Limits of a copy: objects, and bytes of numpy arrays. A hook may lead to a whole data set."""

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, list, dict, tuple, set})
_CONSTANT = (
    type,
    property,
    range,
    types.ModuleType,
    types.CodeType,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    torch.fx.Graph,
    logging.Logger,
    contextvars.ContextVar,
    *(type(each) for each in (None, ..., NotImplemented, True, 1, 1.0, 1j, "", b"")),
)
"""Types whose objects the copy shares with the model, because a step does not change them."""


class CannotCopy(Exception):
    """An object of the model cannot be copied. `str()` says where the object is and what it is."""


class Copier(pickle.Pickler):
    """Copies objects as pickle does, but also functions with what closures and default arguments hold, weak
    references, and modules as they are, not as their own methods for pickling make them. Makes one copy.
    """

    def __init__(self, fake: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """fake: makes the copy of a tensor."""
        self._stream = io.BytesIO()
        super().__init__(self._stream, protocol=5)
        self._fake = fake
        self._parts: list[Any] = []
        """Objects that are no bytes in the stream, which has their indices."""
        self._objects = self._array_bytes = 0
        self._loader: _Loader | None = None  # keeps what only weak references of the copy refer to
        self.classes: set[type] = set()
        """The classes of all objects that were copied."""
        self.globals: dict[int, dict[str, Any]] = {}
        """The global variables of all functions that were found, by id() of the dict."""

    def copy(self, original: Any) -> Any:
        """The copy of an object. Raises CannotCopy, or the errors of the object's own methods."""
        self.dump(original)
        self._stream.seek(0)
        self._loader = _Loader(self._stream, self._parts)
        return self._loader.load()

    def persistent_id(self, it: Any) -> int | None:
        """Called for each object: the index of what the copy shares; None: a copy is made."""
        kind = type(it)
        self._objects += 1
        if self._objects > _MOST_OBJECTS:
            raise CannotCopy(f"more than {_MOST_OBJECTS} objects belong to the model or to its hooks")
        if kind in _PLAIN:
            return None
        if kind is types.FunctionType:
            self.globals[id(it.__globals__)] = it.__globals__
        if kind is _Shared or _is_shared(it):
            self._parts.append(it.content if kind is _Shared else it)
            return len(self._parts) - 1
        return None

    def reducer_override(self, it: Any) -> Any:
        """Called for each object that is copied, but no plain container: how its copy is made."""
        if isinstance(it, torch.Tensor):
            plain = type(it) in (torch.Tensor, nn.Parameter)  # attributes of subclasses are their own matter
            return _same, (_Shared(self._fake(it)),), vars(it) if plain else None, None, None, _set_attributes
        if isinstance(it, nn.Module):
            return self._module(it)
        if isinstance(it, threading.Thread):
            raise CannotCopy("a thread")
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(it, numpy.ndarray):
            self._array_bytes += it.nbytes
            if self._array_bytes > _MOST_ARRAY_BYTES:
                raise CannotCopy(f"more than {_MOST_ARRAY_BYTES >> 20} MiB of numpy arrays")
        special = _SPECIAL.get(type(it))
        if special is not None:
            return special(it)
        self.classes.add(type(it))
        return NotImplemented

    def _module(self, module: nn.Module) -> Any:
        if isinstance(module, torch.jit.ScriptModule):
            raise CannotCopy(f"{type(module).__name__} is a module of TorchScript")
        if "dynamo_ctx" in vars(module):  # what torch.compile made of a module
            return _same, (module._orig_mod,)
        self.classes.add(type(module))
        # Hooks that a step does not call, and arguments of torch.compile, which Lightning notes.
        unused = ("_state_dict_", "_load_state_dict_", "_compile_kwargs")
        state = {
            name: OrderedDict() if name.startswith(unused) else value for name, value in vars(module).items()
        }
        return _new, (type(module),), state, None, None, _set_attributes


class _Loader(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, parts: list[Any]) -> None:
        super().__init__(stream)
        self._parts = parts

    def persistent_load(self, index: int) -> Any:
        return self._parts[index]


class _Shared:
    """Stands for `content`, which the copy has as it is."""

    def __init__(self, content: Any) -> None:
        self.content = content


def _same(it: Any) -> Any:
    return it


def _new(kind: type) -> Any:
    return object.__new__(kind)


def _set_attributes(made: Any, attributes: dict[str, Any]) -> None:
    made.__dict__.update(attributes)


def _function(original: types.FunctionType, closure: Any) -> types.FunctionType:
    code, variables, name = original.__code__, original.__globals__, original.__name__
    made = types.FunctionType(code, variables, name, closure=closure)
    made.__qualname__, made.__module__ = original.__qualname__, original.__module__
    return made


def _set_defaults(made: types.FunctionType, held: tuple[Any, Any, dict[str, Any]]) -> None:
    made.__defaults__, made.__kwdefaults__ = held[:2]
    made.__dict__.update(held[2])


def _of_function(it: types.FunctionType) -> Any:
    compiled = getattr(it, "_torchdynamo_orig_callable", None)
    if compiled is not None:
        return _same, (compiled,)
    held = it.__defaults__, it.__kwdefaults__, it.__dict__
    return _function, (_Shared(it), it.__closure__), held, None, None, _set_defaults


def _set_cell(made: types.CellType, held: tuple[Any]) -> None:
    made.cell_contents = held[0]


def _of_cell(it: types.CellType) -> Any:
    held = _contents(it)
    return types.CellType, (), held or None, None, None, _set_cell


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # the cell is empty
        return ()


def _cached(parameters: dict[str, Any], inner: Any) -> Any:
    return functools.lru_cache(**parameters)(inner)


_FUNCTION_CACHE = type(functools.lru_cache(lambda: None))
_SPECIAL: dict[type, Callable[[Any], Any]] = {
    types.FunctionType: _of_function,
    types.CellType: _of_cell,
    types.MethodType: lambda it: (types.MethodType, (it.__func__, it.__self__)),
    _FUNCTION_CACHE: lambda it: (_cached, (it.cache_parameters(), it.__wrapped__)),
    torch.Generator: lambda it: (_same, (_Shared(it.clone_state()),)),
    type(threading.Lock()): lambda _: (threading.Lock, ()),
    type(threading.RLock()): lambda _: (threading.RLock, ()),
    weakref.ref: lambda it: (weakref.ref, (it(),)),
    weakref.WeakMethod: lambda it: (weakref.WeakMethod, (it(),)),
    weakref.WeakSet: lambda it: (weakref.WeakSet, (list(it),)),
    weakref.WeakKeyDictionary: lambda it: (weakref.WeakKeyDictionary, (dict(it),)),
    weakref.WeakValueDictionary: lambda it: (weakref.WeakValueDictionary, (dict(it),)),
}
"""Type -> function that says how an object is copied, as `__reduce__` does, for types whose own methods share
what they hold, or refuse.
"""


def _is_shared(it: Any) -> bool:
    kind = type(it)
    if isinstance(it, _CONSTANT) or kind is object:
        return True
    if kind is types.FunctionType:
        return not hasattr(it, "_torchdynamo_orig_callable") and _is_constant(it, set())
    if kind is types.BuiltinFunctionType:
        return isinstance(it.__self__, _CONSTANT)
    if kind is _FUNCTION_CACHE:
        return _is_shared(it.__wrapped__)
    return kind in (weakref.ref, weakref.WeakMethod) and it() is None


def _is_constant(function: types.FunctionType, seen: set[int]) -> bool:
    """Whether a function holds nothing that can change. seen: functions that are being looked at."""
    seen.add(id(function))
    cells = [_contents(cell) for cell in function.__closure__ or ()]
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    held += [*function.__dict__.values(), *(each for contents in cells for each in contents)]
    return all(cells) and all(
        (id(each) in seen or _is_constant(each, seen))
        if type(each) is types.FunctionType
        else _is_shared(each)
        for each in held
    )


def fake_model(
    model: nn.Module, mode: fake_tensor.FakeTensorMode, precision: Precision, device: torch.device
) -> tuple[nn.Module, Copier]:
    """Make a copy of a model under `mode`, which must be on, and return (copy, the Copier that made it).

    Parameters and buffers of the copy are on `device`, and parameters have the dtypes of their pages. Other
    tensors keep their devices, except those on the meta device. Hooks of modules are copied, and hooks of
    tensors are left out. A hook on each trainable parameter drops its gradient as soon as the gradient is
    complete, because a real step then moves it to the gradient page. Raises CannotCopy, and the errors that
    the methods of the model's objects raise.
    """

    def fake(tensor: torch.Tensor, dtype: torch.dtype, where: torch.device) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return mode.from_tensor(tensor.detach())
        made: Any = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=where)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
            if made.requires_grad:
                made.register_post_accumulate_grad_hook(_drop_gradient)
        else:
            made.requires_grad_(tensor.requires_grad and tensor.is_leaf)
        return made  # type: ignore[no-any-return]

    def held(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in known:
            return known[id(tensor)]
        return fake(tensor, tensor.dtype, device if tensor.is_meta else tensor.device)

    known = {id(each): fake(each, each.dtype, device) for _, each in model.named_buffers()}
    for name, each in model.named_parameters():
        known[id(each)] = fake(each, precision.dtype_of(plain_name(name), each.dtype), device)
    copier = Copier(held)
    try:
        return copier.copy(model), copier
    except Exception as error:
        where = _first_to_fail(model, held)
        raise CannotCopy(f"{where} cannot be copied: {error}") from error


def _first_to_fail(model: nn.Module, fake: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """The first attribute of a module that cannot be copied."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            try:
                if name != "_modules":
                    Copier(fake).copy(value)
            except Exception:
                return f"{path}.{name}" if path else f"{name} of {type(module).__name__}"
    return type(model).__name__


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None
