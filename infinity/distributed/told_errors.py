"""Told errors: what other ranks are told of an error, and the errors that they raise for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinity.errors import (
    ConfigError,
    CorruptState,
    IncompatibleCheckpoint,
    InfinityError,
    RankDivergence,
    StorageError,
    StorageFull,
)

_KINDS: dict[str, type[InfinityError]] = {
    each.__name__: each for each in (ConfigError, CorruptState, IncompatibleCheckpoint, RankDivergence)
}
"""The classes of whose errors other ranks need no more than the cause and the cure."""


def told(failure: BaseException, again: str = "") -> dict[str, Any]:
    """What other ranks are told of an error, as JSON can hold it.

    again: the call that all ranks are to make again after an error of another kind than ours, such as
    KeyboardInterrupt; needed if there can be one.
    """
    if not isinstance(failure, InfinityError):
        assert again
        text = f"{type(failure).__name__}: {failure}".rstrip(": .")
        return {"kind": "", "cause": f"{text}.", "cure": f"Call {again} again on all ranks."}
    said: dict[str, Any] = {"kind": type(failure).__name__, "cause": failure.cause, "cure": failure.cure}
    if isinstance(failure, StorageError):
        said |= {"path": failure.path, "errno": failure.errno}
    return said


def error_of(what: str, said: Mapping[str, Any]) -> InfinityError:
    """The error of this rank for that of another one, of the same class where that makes sense here, too.

    what: the start of its text. said: what `told` has returned on the other rank.
    """
    cause, cure, kind = f"{what}: {said['cause']}", said["cure"], said["kind"]
    if kind in ("StorageError", "StorageFull"):
        storage = StorageFull if kind == "StorageFull" else StorageError
        return storage(cause, cure, path=said["path"], errno=said["errno"])
    return _KINDS.get(kind, ConfigError)(cause, cure)
