"""State copies: what `runtime.optimizer.state[p]` returns. Edits of these copies are written to pages.

An edit in place, of a tensor or of a view of it, reads the state anew, and replaces the edited entry. If that
entry has changed since it was copied, ConfigError is raised: torch would have changed the newer values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from infinity.errors import ConfigError

Read = Callable[[], Mapping[str, Tensor]]
Write = Callable[[Mapping[str, Any]], None]

_TENSOR: Any = Tensor
_GET_DATA = _TENSOR.data.__get__
_SET_DATA = _TENSOR.data.__set__
_IN_PLACE = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")


class StateCopies(dict[str, Tensor]):
    """Copies of the entries of a parameter's state. Assigning an entry replaces it in the pages, too."""

    def __init__(self, read: Read, write: Write) -> None:
        """read: returns copies of the entries that the parameter's state has at the time of the call. write:
        replaces the whole state by the given entries.
        """
        self._read, self._write = read, write
        with torch.inference_mode(False):  # whose tensors have no version
            super().__init__({name: StateCopy(self, name, values) for name, values in read().items()})

    def __setitem__(self, name: str, value: Any) -> None:
        self._write({**self._read(), name: plain(value)})
        with torch.inference_mode(False):
            super().__setitem__(name, StateCopy(self, name, self._read()[name]))

    def replace(self, name: str, before: Tensor, after: Tensor) -> None:
        """Write an entry that was edited in place to the pages.

        before: the entry's values before the edit. after: the edited values. Afterwards it has the values
        that the pages hold, which may be rounded (`Precision.states`). Raises ConfigError if the pages no
        longer hold the values of `before`.
        """
        now = self._read()
        if name not in now or not _same_bits(now[name], before):
            raise ConfigError(
                f"The copy of {name!r} from optimizer.state[p] that was edited is older than the state.",
                "Read optimizer.state[p] again after each step, and edit that.",
            )
        self._write({**now, name: after})
        after.copy_(self._read()[name])

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(
            "Entries of optimizer.state[p] cannot be taken out one by one: the state is in pages.",
            "Use del optimizer.state[p], or assign a whole state, optimizer.state[p] = {...}.",
        )

    __delitem__ = pop = popitem = clear = setdefault = __ior__ = _refuse

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A class that torch.load(weights_only=True) allows.
        return OrderedDict, (), None, None, iter(plain(dict(self)).items())

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {name: plain(values).clone() for name, values in self.items()}
        return found


class StateCopy(Tensor):
    """A copy of an entry of a state, or a view of such a copy."""

    _copies: StateCopies
    _entry: str
    _whole: Tensor
    """The plain tensor of which this object is a view."""

    @staticmethod
    def __new__(cls, copies: StateCopies, entry: str, whole: Tensor, view: Tensor | None = None) -> StateCopy:
        made: StateCopy = (whole if view is None else view).as_subclass(cls)
        made._copies, made._entry, made._whole = copies, entry, whole
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found = (each for each in tree_leaves((args, kwargs)) if isinstance(each, StateCopy))
        copies = list({id(each._whole): each for each in found}.values())
        edits = _edits(func, kwargs)
        before = [each._whole.clone() if edits else each._whole for each in copies]
        versions = [each._whole._version for each in copies]
        with torch._C.DisableTorchFunctionSubclass():
            result: Any = _OF_DATA.get(func, func)(*args, **kwargs)
        if isinstance(result, numpy.ndarray):
            result.flags.writeable &= result.flags.owndata  # writes to the copy's memory could not be seen
            return result
        for each, old, version in zip(copies, before, versions, strict=True):
            if each._whole._version != version or (edits and not _same_bits(each._whole, old)):
                each._copies.replace(each._entry, old, each._whole)
        return tree_map_only(Tensor, lambda each: _linked(each, copies), result)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(
            "The memory of a copy from optimizer.state[p] can be neither replaced nor shared: edits of the "
            "other memory would not go to pages.",
            "Read clone(), and write copy_(values), of the copy itself.",
        )

    set_ = resize_ = as_subclass = __dlpack__ = _refuse

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy: Tensor = plain(self).clone()
        return copy


def plain(value: Any) -> Any:
    """Return a value with plain tensors, which write nothing to pages, in the place of StateCopy objects."""
    if isinstance(value, StateCopies):
        value = dict(value)
    return tree_map_only(StateCopy, lambda each: Tensor.as_subclass(each, Tensor), value)


_OF_DATA: dict[Any, Any] = {_GET_DATA: Tensor.detach, _SET_DATA: Tensor.copy_}
"""What to call in the place of the getter and the setter of `data`, which do not count the copy's version."""


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two float32 tensors have the same bits, those of NaN included."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def _edits(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of torch may change one of its arguments."""
    if not {"out", "inplace"}.isdisjoint(kwargs) or func == _SET_DATA:
        return True
    name: str = getattr(func, "__name__", "").partition(".")[0]
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _linked(result: Tensor, copies: Sequence[StateCopy]) -> Tensor:
    """Return a view of one of `copies` as a StateCopy, too, and any other tensor as it is."""
    if isinstance(result, StateCopy):
        return result
    for each in copies:
        if result.untyped_storage()._cdata == each._whole.untyped_storage()._cdata:
            return StateCopy(each._copies, each._entry, each._whole, result)
    return result
