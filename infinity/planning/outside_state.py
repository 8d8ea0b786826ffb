"""Outside state: what a model's code can change outside of the model, saved and restored: generators, global
variables and class attributes, and the containers and objects that these hold, up to a depth.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

_DEPTH = 4
_MOST_NESTED = 1000
"""Containers that are saved within each other, and the most elements that are saved with their container."""

_MOST_ARRAY_BYTES = 64 << 20
"""The most bytes of a numpy array that is saved."""

_FOREIGN = frozenset({"torch", "numpy", "infinity", *sys.stdlib_module_names})
"""Packages whose code does not belong to a model."""

_DICTS = (dict, OrderedDict, defaultdict, Counter)
_FUNCTION_CACHE = type(functools.lru_cache(lambda: None))


@contextmanager
def same_generators() -> Iterator[None]:
    """Restore the global generators of torch (CPU and CUDA), numpy and `random` at the end."""
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
def same_globals(
    classes: Iterable[type],
    namespaces: Iterable[dict[str, Any]],
    is_fake: Callable[[torch.Tensor], bool],
) -> Iterator[None]:
    """Restore, at the end, the attributes of classes, the global variables of their modules and those in
    `namespaces`, and all to which they lead, but nothing of torch, numpy, Python itself, and installed
    packages that are only imported. A functools.lru_cache anywhere is cleared if it holds a fake tensor.
    """
    kept = _Kept()
    kinds = {kind for each in classes for kind in each.__mro__ if _is_users(kind.__module__)}
    modules = {kind.__module__ for kind in kinds}
    spaces = [vars(sys.modules[name]) for name in modules if name in sys.modules]
    spaces += [each for each in namespaces if _is_users(each.get("__name__"))]
    for each in (*kinds, *spaces):
        kept.keep(each, _DEPTH)
    try:
        yield
    finally:
        kept.restore()
        frozen = kept.caches  # of gc.freeze(), which hides objects
        for each in {*(it for it in gc.get_objects() if type(it) is _FUNCTION_CACHE), *frozen}:
            if each.cache_info().currsize and _leads_to(each, is_fake):
                each.cache_clear()


def _is_users(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] not in _FOREIGN


class _Kept:
    """The contents of containers, to be put back by `restore`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self._seen: set[int] = set()
        self.caches: list[Any] = []

    def restore(self) -> None:
        with ExitStack() as stack:
            for each in self._undo:
                stack.callback(each)

    def attributes(self, kind: type, depth: int) -> None:
        """Save the attributes of a class."""
        before = dict(vars(kind))

        def undo() -> None:
            for name in list(vars(kind)):
                if name not in before:
                    type.__delattr__(kind, name)
            for name, value in before.items():
                if vars(kind).get(name) is not value:
                    type.__setattr__(kind, name, value)

        self._undo.append(undo)
        self._inside(before.values(), depth)

    def keep(self, it: Any, depth: int) -> None:
        """Save what `it` holds, to a depth of containers within each other."""
        if depth == 0 or id(it) in self._seen or isinstance(it, torch.Tensor):
            return
        numpy = sys.modules.get("numpy")
        if isinstance(it, (staticmethod, classmethod, types.MethodType)):
            it = it.__func__
        if isinstance(it, type):
            if _is_users(it.__module__):
                self._seen.add(id(it))
                self.attributes(it, depth)
        elif isinstance(it, types.ModuleType):
            if _is_users(it.__name__) and "site-packages" not in (getattr(it, "__file__", None) or ""):
                self.keep(vars(it), depth)
        elif isinstance(it, types.FunctionType):
            self._seen.add(id(it))
            for cell in it.__closure__ or ():
                self._cell(cell, depth)
            self._inside([*(it.__defaults__ or ()), *(it.__kwdefaults__ or {}).values()], depth)
        elif type(it) is _FUNCTION_CACHE:
            self.caches.append(it)
        elif type(it) in _DICTS:
            self._note(it, functools.partial(_restore_dict, it, dict(it)))
            self._inside(it.values(), depth)
        elif type(it) in (list, deque):
            self._note(it, functools.partial(_restore_list, it, list(it)))
            self._inside(it, depth)
        elif type(it) is set:
            self._note(it, functools.partial(_restore_set, it, set(it)))
        elif isinstance(it, torch.Generator):
            self._note(it, functools.partial(it.set_state, it.get_state()))
        elif isinstance(it, random.Random):
            self._note(it, functools.partial(it.setstate, it.getstate()))
        elif numpy is not None and isinstance(it, numpy.ndarray) and it.nbytes <= _MOST_ARRAY_BYTES:
            self._note(it, functools.partial(_restore_array, it, it.copy()))
        elif numpy is not None and isinstance(it, numpy.random.RandomState):
            self._note(it, functools.partial(it.set_state, it.get_state()))
        elif numpy is not None and isinstance(it, numpy.random.Generator):
            bits = it.bit_generator
            self._note(it, functools.partial(setattr, bits, "state", bits.state))
        elif _is_users(type(it).__module__) and isinstance(getattr(it, "__dict__", None), dict):
            self._note(it, lambda: None)
            self.keep(it.__dict__, depth)

    def _cell(self, cell: types.CellType, depth: int) -> None:
        try:
            contents = cell.cell_contents
        except ValueError:  # the cell is empty
            return
        self._undo.append(functools.partial(setattr, cell, "cell_contents", contents))
        self.keep(contents, depth - 1)

    def _note(self, it: Any, undo: Callable[[], object]) -> None:
        self._seen.add(id(it))
        self._undo.append(undo)

    def _inside(self, values: Any, depth: int) -> None:
        if len(values) <= _MOST_NESTED or depth == _DEPTH:
            for each in list(values):
                self.keep(each, depth - 1)


def _restore_dict(it: dict[Any, Any], before: dict[Any, Any]) -> None:
    for key in [key for key in it if key not in before]:
        if not isinstance(it[key], types.ModuleType):  # a package has its imported modules as attributes
            del it[key]
    for key, value in before.items():
        if key not in it or it[key] is not value:
            it[key] = value


def _restore_list(it: Any, before: list[Any]) -> None:
    if len(it) != len(before) or any(a is not b for a, b in zip(it, before, strict=True)):
        it.clear()
        it.extend(before)


def _restore_set(it: set[Any], before: set[Any]) -> None:
    if it != before:
        it.clear()
        it.update(before)


def _restore_array(it: Any, before: Any) -> None:
    if it.tobytes() != before.tobytes():
        it[...] = before


def _leads_to(it: object, wanted: Callable[[torch.Tensor], bool]) -> bool:
    level: list[Any] = [it]
    for _ in range(4):
        level = [
            each
            for each in gc.get_referents(*level)
            if not isinstance(each, (type, types.ModuleType, types.FunctionType, torch.nn.Module))
        ]
        if any(isinstance(each, torch.Tensor) and wanted(each) for each in level):
            return True
    return False
