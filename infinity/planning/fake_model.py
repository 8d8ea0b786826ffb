"""Fake model: a copy of a model with tensors that have no data. The copy shares nothing with the model that
the copy's forward or backward could change. Whatever they can change outside of the model is saved and
restored: generators, global variables and class attributes, and the containers and objects that these hold,
up to a depth.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import io
import logging
import pickle
import random
import sys
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor

from infinity.config import Precision
from infinity.layout.names import plain_name
from infinity.layout.tiles import row_ranges, tiled_weights

_MOST_OBJECTS = 5_000_000
_MOST_ARRAY_BYTES = 256 << 20
"""Limits of a copy: number of objects, and bytes of numpy arrays. A hook may refer to a whole data set."""
_LONGEST_TEXT = 4096
"""Longer texts, in characters or bytes, are shared by the copy and the model, and not copied."""

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
    """Copies an object, and all that it refers to, as pickle does. Functions with their closures and default
    arguments, and weak references, are copied, too; modules are copied attribute by attribute, without their
    own methods for pickling. A Copier makes one copy.
    """

    def __init__(self, fake: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """fake: function that makes the copy of a tensor."""
        self._stream = io.BytesIO()
        super().__init__(self._stream, protocol=5)
        self._fake = fake
        self._parts: list[Any] = []
        """Objects that are not pickled: the stream has their indices in this list."""
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
        """Return an object's index in `_parts` if the copy shares the object, or None. Called by pickle for
        each object. Raises CannotCopy if there are too many objects.
        """
        kind = type(it)
        self._objects += 1
        if self._objects > _MOST_OBJECTS:
            raise CannotCopy(f"more than {_MOST_OBJECTS} objects belong to the model or to its hooks")
        if kind in _PLAIN and not (kind in (str, bytes) and len(it) > _LONGEST_TEXT):
            return None
        if kind is types.FunctionType:
            self.globals[id(it.__globals__)] = it.__globals__
        if kind is _Shared or _is_shared(it):
            self._parts.append(it.content if kind is _Shared else it)
            return len(self._parts) - 1
        return None

    def reducer_override(self, it: Any) -> Any:
        """Called by pickle for each object to copy except plain containers. Returns how to make the copy, as
        `__reduce__` does.
        """
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
    """Wrapper of an object that a Copier puts into its copy as it is."""

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
"""Type -> function that returns how to copy an object, as `__reduce__` does. The types' own methods would
share the objects' contents with the copy, or refuse to pickle.
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
    """Whether a function refers to nothing that can change. seen: ids of functions whose check has begun."""
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
    model: nn.Module,
    mode: fake_tensor.FakeTensorMode,
    precision: Precision,
    device: torch.device,
    add_up: Callable[[Sequence[torch.Tensor], int], None] | None = None,
) -> tuple[nn.Module, Copier]:
    """Make a copy of a model under `mode`, which must be on, and return (copy, the Copier that made it).

    Parameters and buffers of the copy are on `device`, and parameters have the dtypes of their pages. Other
    tensors keep their devices, except those on the meta device. Hooks of modules are copied, and hooks of
    tensors are left out. A hook on each trainable parameter drops its gradient as soon as the gradient is
    complete, because a real step then moves it to the gradient page. add_up: function (tiles, number of
    modules) that has the gradients of tied tiles added up; None: autograd does. Raises CannotCopy, and the
    errors that the methods of the model's objects raise.
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
    for key, whole in tiled_weights(model).items():
        parts = whole.split([len(rows) for rows in row_ranges(whole.shape)])
        dtype = known[key].dtype
        tiles = tuple(fake(nn.Parameter(part, whole.requires_grad), dtype, device) for part in parts)
        vars(known[key])["tiles"] = tiles
        uses = sum(each is whole for _, each in model.named_parameters(remove_duplicate=False))
        if add_up is not None and whole.requires_grad and uses > 1:
            add_up(tiles, uses)
    copier = Copier(held)
    try:
        return copier.copy(model), copier
    except Exception as error:
        where = _first_to_fail(model, held)
        raise CannotCopy(f"{where} cannot be copied: {error}") from error


def _first_to_fail(model: nn.Module, fake: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """The name of the first attribute of a module in `model` that cannot be copied."""
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


# --- outside of the model ---------------------------------------------------------------------------------


_DEPTH = 4
_MOST_NESTED = 1000
"""The depth to which nested containers are saved; and the most elements of an inner container for which the
contents of the elements are saved, too.
"""

_MOST_SAVED_BYTES = 64 << 20
"""The most bytes of a numpy array that is saved."""

_FOREIGN = frozenset({"torch", "numpy", "infinity", *sys.stdlib_module_names})
"""Packages whose code does not belong to a model."""

_DICTS = (dict, OrderedDict, defaultdict, Counter)


@contextmanager
def same_generators() -> Iterator[None]:
    """Context that restores the global generators of torch (CPU and CUDA), numpy and `random` at its end."""
    numpy = sys.modules.get("numpy")
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    drawn, theirs = random.getstate(), None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(drawn)
            if numpy is not None:
                numpy.random.set_state(theirs)


@contextmanager
def same_globals(copier: Copier) -> Iterator[None]:
    """Context that restores, at its end, what copied code can change outside of the model: attributes of
    classes, global variables, and the objects to which these refer.

    It restores nothing of torch, numpy, Python itself, or packages that are only imported. It clears every
    functools.lru_cache that holds a fake tensor.
    """
    kinds = {kind for each in copier.classes for kind in each.__mro__ if _is_users(kind.__module__)}
    modules = {kind.__module__ for kind in kinds}
    spaces = [vars(sys.modules[name]) for name in modules if name in sys.modules]
    spaces += [each for each in copier.globals.values() if _is_users(each.get("__name__"))]
    kept = _Kept()
    try:
        with kept:
            for each in (*kinds, *spaces):
                kept.keep(each, _DEPTH)
            yield
    finally:
        # Every cache refers to its type, and looking for that takes less time than a list of all objects.
        found = [each for each in gc.get_referrers(_FUNCTION_CACHE) if type(each) is _FUNCTION_CACHE]
        for each in {*found, *kept.caches}:  # gc.freeze() hides objects from gc
            if each.cache_info().currsize and _leads_to_fakes(each):
                each.cache_clear()


def _is_users(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] not in _FOREIGN


class _Kept(ExitStack):
    """Context that restores, at its end, the saved contents of containers, objects and generators."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[int] = set()
        self.caches: list[Any] = []

    def keep(self, it: Any, depth: int) -> None:
        """Save the contents of `it`, and of containers within it down to `depth` levels."""
        if depth == 0 or id(it) in self._seen or isinstance(it, torch.Tensor):
            return
        numpy = sys.modules.get("numpy")
        if isinstance(it, (staticmethod, classmethod, types.MethodType)):
            it = it.__func__
        if isinstance(it, type):
            if _is_users(it.__module__):
                self._note(it, _restore_class, it, dict(vars(it)))
                self._inside(vars(it).values(), depth)
        elif isinstance(it, types.ModuleType):
            if _is_users(it.__name__) and "site-packages" not in (getattr(it, "__file__", None) or ""):
                self.keep(vars(it), depth)
        elif isinstance(it, types.FunctionType):
            self._seen.add(id(it))
            for cell in it.__closure__ or ():
                for contents in _contents(cell):
                    self.callback(setattr, cell, "cell_contents", contents)
                    self.keep(contents, depth - 1)
            self._inside([*(it.__defaults__ or ()), *(it.__kwdefaults__ or {}).values()], depth)
        elif type(it) is _FUNCTION_CACHE:
            self.caches.append(it)
        elif type(it) in _DICTS:
            self._note(it, _restore_dict, it, dict(it))
            self._inside(it.values(), depth)
        elif type(it) in (list, deque, set):
            self._note(it, _restore_items, it, list(it))
            self._inside(it, depth)
        elif isinstance(it, random.Random):
            self._note(it, it.setstate, it.getstate())
        elif isinstance(it, torch.Generator) or (numpy and isinstance(it, numpy.random.RandomState)):
            self._note(it, it.set_state, it.get_state())
        elif numpy is not None and isinstance(it, numpy.random.Generator):
            self._note(it, setattr, it.bit_generator, "state", it.bit_generator.state)
        elif numpy is not None and isinstance(it, numpy.ndarray) and it.nbytes <= _MOST_SAVED_BYTES:
            self._note(it, _restore_array, it, it.copy())
        elif _is_users(type(it).__module__) and isinstance(getattr(it, "__dict__", None), dict):
            self._seen.add(id(it))
            self.keep(it.__dict__, depth)

    def _note(self, it: Any, undo: Callable[..., object], *args: Any) -> None:
        self._seen.add(id(it))
        self.callback(undo, *args)

    def _inside(self, values: Any, depth: int) -> None:
        if len(values) <= _MOST_NESTED or depth == _DEPTH:
            for each in list(values):
                self.keep(each, depth - 1)


def _restore_class(kind: type, before: dict[str, Any]) -> None:
    for name in list(vars(kind)):
        if name not in before:
            type.__delattr__(kind, name)
    for name, value in before.items():
        if vars(kind).get(name) is not value:
            type.__setattr__(kind, name, value)


def _restore_dict(it: dict[Any, Any], before: dict[Any, Any]) -> None:
    for key in [key for key in it if key not in before]:
        if not isinstance(it[key], types.ModuleType):  # a package has its imported modules as attributes
            del it[key]
    for key, value in before.items():
        if key not in it or it[key] is not value:
            it[key] = value


def _restore_items(it: Any, before: list[Any]) -> None:
    if [*map(id, it)] != [*map(id, before)]:
        it.clear()
        (it.update if type(it) is set else it.extend)(before)


def _restore_array(it: Any, before: Any) -> None:
    if it.tobytes() != before.tobytes():
        it[...] = before


def _leads_to_fakes(it: object) -> bool:
    level: list[Any] = [it]
    for _ in range(4):
        level = [
            each
            for each in gc.get_referents(*level)
            if not isinstance(each, (type, types.ModuleType, types.FunctionType, torch.nn.Module))
        ]
        if any(isinstance(each, fake_tensor.FakeTensor) for each in level):
            return True
    return False
