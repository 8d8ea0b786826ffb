"""Fake model: a copy of a model with tensors that have no data. The copy shares nothing with the model that
the copy's forward or backward could change.
"""

from __future__ import annotations

import contextvars
import copyreg
import functools
import logging
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
from torch.overrides import TorchFunctionMode

from infinity.config import Precision
from infinity.layout.names import plain_name

_MOST_OBJECTS = 5_000_000
_MOST_ARRAY_BYTES = 256 << 20
"""Limits of a copy: objects, and bytes of numpy arrays. A hook may lead to a whole data set."""

_CONSTANT = (
    type(None),
    type(...),
    type(NotImplemented),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
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
)
"""Types whose objects the copy shares with the model, because a step does not change them."""


class CannotCopy(Exception):
    """An object of the model cannot be copied. `str()` says where the object is and what it is."""


class Copier:
    """Copies objects as copy.deepcopy does, but also what closures, default arguments, bound methods and weak
    references lead to. Copies of tensors are made by the function `fake`, all others by this class.

    An object that was copied before is not copied again, so what is shared within a model is shared in its
    copy: tied parameters, modules used twice, references from a child to its parent.
    """

    def __init__(self, fake: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._fake = fake
        self._memo: dict[int, Any] = {}
        self._alive: list[Any] = []  # originals, so that none of their ids is used again
        self._array_bytes = 0
        self.classes: set[type] = set()
        """The classes of all objects that were copied."""
        self.globals: dict[int, dict[str, Any]] = {}
        """The global variables of all functions that were found, by id() of the dict."""

    def put(self, original: Any, made: Any) -> Any:
        """Make `made` the copy of `original`, and return it."""
        self._memo[id(original)] = made
        self._alive.append(original)
        return made

    def copy(self, original: Any) -> Any:
        """The copy of an object. Raises CannotCopy, or the errors of the object's own methods."""
        if isinstance(original, _CONSTANT) or type(original) is object:
            return original
        if id(original) in self._memo:
            return self._memo[id(original)]
        if len(self._alive) > _MOST_OBJECTS:
            raise CannotCopy(f"more than {_MOST_OBJECTS} objects belong to the model or to its hooks")
        made = self._copied(original)
        return self._memo[id(original)] if id(original) in self._memo else self.put(original, made)

    def _copied(self, it: Any) -> Any:
        if isinstance(it, torch.Tensor):
            return self._fake(it)
        if isinstance(it, nn.Module):
            return self._module(it)
        special = _SPECIAL.get(type(it))
        return self._instance(it) if special is None else special(self, it)

    def _dict(self, it: dict[Any, Any]) -> dict[Any, Any]:
        made: dict[Any, Any] = self.put(it, {})
        made.update((self.copy(key), self.copy(value)) for key, value in list(it.items()))
        return made

    def _list(self, it: list[Any]) -> list[Any]:
        made: list[Any] = self.put(it, [])
        made.extend(self.copy(each) for each in list(it))
        return made

    def _tuple(self, it: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(self.copy(each) for each in it)

    def _method(self, it: types.MethodType) -> types.MethodType:
        return types.MethodType(self.copy(it.__func__), self.copy(it.__self__))

    def _builtin_method(self, it: types.BuiltinMethodType) -> Any:
        owner = it.__self__
        return it if isinstance(owner, _CONSTANT) else getattr(self.copy(owner), it.__name__)

    def _function_cache(self, it: Any) -> Any:
        inner = self.copy(it.__wrapped__)
        return it if inner is it.__wrapped__ else functools.lru_cache(**it.cache_parameters())(inner)

    def _module(self, module: nn.Module) -> nn.Module:
        if isinstance(module, torch.jit.ScriptModule):
            raise CannotCopy(f"{type(module).__name__} is a module of TorchScript")
        if "dynamo_ctx" in vars(module):  # what torch.compile made of a module
            plain: nn.Module = self.copy(module._orig_mod)
            return plain
        self.classes.add(type(module))
        made: nn.Module = self.put(module, object.__new__(type(module)))
        for name, value in list(vars(module).items()):
            # Hooks that a step does not call, and arguments of torch.compile, which Lightning notes.
            unused = name.startswith(("_state_dict_", "_load_state_dict_")) or name == "_compile_kwargs"
            try:
                made.__dict__[name] = OrderedDict() if unused else self.copy(value)
            except _Located:
                raise
            except Exception as error:
                raise _Located(module, name, error) from error
        return made

    def _function(self, function: types.FunctionType) -> Any:
        self.globals[id(function.__globals__)] = function.__globals__
        compiled = getattr(function, "_torchdynamo_orig_callable", None)
        if compiled is not None:
            return self.copy(compiled)
        if _is_constant(function, set()):
            return function
        cells = tuple(self.copy(cell) for cell in function.__closure__ or ()) or None
        made = types.FunctionType(function.__code__, function.__globals__, function.__name__, closure=cells)
        self.put(function, made)
        made.__defaults__ = self.copy(function.__defaults__)
        made.__kwdefaults__ = self.copy(function.__kwdefaults__)
        made.__dict__.update(self.copy(function.__dict__))
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        return made

    def _cell(self, cell: types.CellType) -> types.CellType:
        made: types.CellType = self.put(cell, types.CellType())
        try:
            contents = cell.cell_contents
        except ValueError:  # the cell is empty
            return made
        made.cell_contents = self.copy(contents)
        return made

    def _weak_reference(self, it: weakref.ref[Any]) -> weakref.ref[Any]:
        referent = it()
        return it if referent is None else type(it)(self.copy(referent))

    def _weak_proxy(self, it: Any) -> Any:
        return weakref.proxy(self.copy(it.__repr__.__self__))

    def _weak_set(self, it: weakref.WeakSet[Any]) -> weakref.WeakSet[Any]:
        made: weakref.WeakSet[Any] = self.put(it, weakref.WeakSet())
        made.update([self.copy(each) for each in it])
        return made

    def _weak_dictionary(self, it: Any) -> Any:
        made = self.put(it, type(it)())
        made.update({self.copy(key): self.copy(value) for key, value in list(it.items())})
        return made

    def _instance(self, it: Any) -> Any:
        kind = type(it)
        if isinstance(it, threading.Thread):
            raise CannotCopy("a thread")
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(it, numpy.ndarray):
            self._array_bytes += it.nbytes
            if self._array_bytes > _MOST_ARRAY_BYTES:
                raise CannotCopy(f"more than {_MOST_ARRAY_BYTES >> 20} MiB of numpy arrays")
        self.classes.add(kind)
        if hasattr(kind, "__deepcopy__"):
            with _TensorsIn(self):
                return it.__deepcopy__(self._memo)
        reduce = copyreg.dispatch_table.get(kind)
        parts: Any = reduce(it) if reduce else it.__reduce_ex__(4)
        return it if isinstance(parts, str) else self._rebuilt(it, (*parts, None, None, None, None)[:6])

    def _rebuilt(self, it: Any, parts: tuple[Any, ...]) -> Any:
        """The copy of an object. parts: the six values of the object's `__reduce_ex__`."""
        build, args, state, items, pairs, set_state = parts
        self._alive.append((args, state))
        made = self.put(it, build(*(self.copy(each) for each in args)))
        if state is not None:
            state = self.copy(state)
            if set_state is not None:
                set_state(made, state)
            elif hasattr(made, "__setstate__"):
                made.__setstate__(state)
            else:
                attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
                made.__dict__.update(attributes or {})
                for name, value in (slots or {}).items():
                    setattr(made, name, value)
        for each in items or ():
            made.append(self.copy(each))
        for key, value in pairs or ():
            made[self.copy(key)] = self.copy(value)
        return made


_SPECIAL: dict[type, Callable[[Copier, Any], Any]] = {
    dict: Copier._dict,
    list: Copier._list,
    tuple: Copier._tuple,
    types.FunctionType: Copier._function,
    types.CellType: Copier._cell,
    types.MethodType: Copier._method,
    types.BuiltinMethodType: Copier._builtin_method,
    types.MethodWrapperType: Copier._builtin_method,
    type(functools.lru_cache(lambda: None)): Copier._function_cache,
    torch.Generator: lambda _, it: it.clone_state(),
    type(threading.Lock()): lambda *_: threading.Lock(),
    type(threading.RLock()): lambda *_: threading.RLock(),
    weakref.ref: Copier._weak_reference,
    weakref.WeakMethod: Copier._weak_reference,
    weakref.ProxyType: Copier._weak_proxy,
    weakref.CallableProxyType: Copier._weak_proxy,
    weakref.WeakSet: Copier._weak_set,
    weakref.WeakKeyDictionary: Copier._weak_dictionary,
    weakref.WeakValueDictionary: Copier._weak_dictionary,
}
"""Type -> function (copier, object) that returns a copy, for types whose own methods for copying share what
they hold, or refuse.
"""


class _Located(CannotCopy):
    """A CannotCopy that names a module and an attribute, with the error that was raised there."""

    def __init__(self, module: nn.Module, name: str, error: Exception) -> None:
        super().__init__(f"{name} of {type(module).__name__} cannot be copied: {error}")
        self.module, self.name, self.error = module, name, error


class _TensorsIn(TorchFunctionMode):
    """A mode in which copy.deepcopy of a tensor is the copy of a `Copier`. Objects with a method
    `__deepcopy__` call copy.deepcopy for what they hold.
    """

    def __init__(self, copier: Copier) -> None:
        super().__init__()
        self._copier = copier

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return self._copier.copy(args[0])
        return func(*args, **(kwargs or {}))


def _is_constant(function: types.FunctionType, seen: set[int]) -> bool:
    """Whether a function holds nothing that can change. seen: functions that are being looked at."""
    seen.add(id(function))
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    held += function.__dict__.values()
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # the cell is empty
            return False
    return all(
        isinstance(each, _CONSTANT)
        or type(each) is object
        or (type(each) is types.BuiltinFunctionType and isinstance(each.__self__, _CONSTANT))
        or (type(each) is types.FunctionType and (id(each) in seen or _is_constant(each, seen)))
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
        if type(tensor) in (torch.Tensor, nn.Parameter):  # attributes of subclasses are their own matter
            copier.put(tensor, made)
            made.__dict__.update(copier.copy(vars(tensor)))
        copier.put(tensor, made)
        return made  # type: ignore[no-any-return]

    def held(tensor: torch.Tensor) -> torch.Tensor:
        return fake(tensor, tensor.dtype, device if tensor.is_meta else tensor.device)

    copier = Copier(held)
    for name, parameter in model.named_parameters():
        fake(parameter, precision.dtype_of(plain_name(name), parameter.dtype), device)
    for _, buffer in model.named_buffers():
        fake(buffer, buffer.dtype, device)
    try:
        return copier.copy(model), copier
    except _Located as error:
        path = next((name for name, module in model.named_modules() if module is error.module), "")
        if not path:
            raise
        raise CannotCopy(f"{path}.{error.name} cannot be copied: {error.error}") from error


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None
