"""Errors: the exceptions that this package raises on purpose. Each has a sentence for its cause and one for
the cure.
"""

from __future__ import annotations

import contextlib
import copy
import errno as errno_codes
import functools
import os
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


class InfinityError(Exception):
    """Base class of this package's errors. `str()` gives the attributes `cause` and `cure` as one text."""

    def __init__(self, cause: str, cure: str) -> None:
        super().__init__(cause, cure)
        self.cause = cause
        self.cure = cure

    def __str__(self) -> str:
        return f"{self.cause} {self.cure}"

    def again(self) -> Self:
        """A copy of the error without its traceback, to be stored or to be raised a second time. A stored
        traceback would keep alive its frames, and the pages and staging buffers that their variables hold.
        """
        return copy.copy(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors are pickled between processes (torchrun); the default pickling would lose the keywords.
        return functools.partial(type(self), **self._keywords()), (self.cause, self.cure)

    def _keywords(self) -> dict[str, Any]:
        return {}


class ConfigError(InfinityError, ValueError):
    """An argument, option or environment variable has a value that cannot be used."""


class UnsupportedOptimizer(InfinityError, TypeError):
    """An optimizer, or one of its options, has an update that this package does not implement."""


class NonFiniteGradient(InfinityError, ArithmeticError):
    """A gradient of a step is inf or NaN in bf16 or fp32 compute, where there is no loss scale to lower."""


class BudgetError(InfinityError):
    """A tier's budget is too small; the cure names the smallest sufficient budget in bytes.

    `needed` is the smallest sufficient budget in bytes, or None if unknown. `tier` is the tier whose budget
    is too small ("device", "host" or "nvme"), or None if no single tier is to blame. `with_nvme` is a budget
    of this tier, in bytes, that is enough once an nvme budget is added: 0 if the present budget is enough
    then, None if an nvme budget does not help. `smaller_batch` is whether the present budget would be enough
    if activations took no memory.
    """

    def __init__(
        self,
        cause: str,
        cure: str,
        *,
        needed: int | None = None,
        tier: str | None = None,
        with_nvme: int | None = None,
        smaller_batch: bool = False,
    ) -> None:
        super().__init__(cause, cure)
        self.needed = needed
        self.tier = tier
        self.with_nvme = with_nvme
        self.smaller_batch = smaller_batch

    def _keywords(self) -> dict[str, Any]:
        return {
            "needed": self.needed,
            "tier": self.tier,
            "with_nvme": self.with_nvme,
            "smaller_batch": self.smaller_batch,
        }


class KernelError(InfinityError, RuntimeError):
    """The kernels for a device could not be compiled. `log` is the compiler's output."""

    def __init__(self, cause: str, cure: str, *, log: str = "") -> None:
        super().__init__(cause, cure)
        self.log = log

    def _keywords(self) -> dict[str, Any]:
        return {"log": self.log}


class StorageError(InfinityError, OSError):
    """A storage operation failed, and is not retried. `path` and `offset` (in bytes, or None) say where,
    `errno` (or None) why.
    """

    def __init__(
        self, cause: str, cure: str, *, path: str, offset: int | None = None, errno: int | None = None
    ) -> None:
        super().__init__(cause, cure)
        self.path = path
        self.offset = offset
        self.errno = errno
        self.filename = path
        self.strerror = cause if errno is None else os.strerror(errno)

    def _keywords(self) -> dict[str, Any]:
        return {"path": self.path, "offset": self.offset, "errno": self.errno}


class DeviceError(InfinityError, RuntimeError):
    """A call of the device's driver failed. `call` is its name, `code` and `name` are the number and the name
    of its result in cuda.h.
    """

    def __init__(self, cause: str, cure: str, *, call: str, code: int, name: str) -> None:
        super().__init__(cause, cure)
        self.call = call
        self.code = code
        self.name = name

    def _keywords(self) -> dict[str, Any]:
        return {"call": self.call, "code": self.code, "name": self.name}


class StorageFull(StorageError):
    """The file system has no room left (ENOSPC or EDQUOT)."""


class CorruptState(InfinityError, ValueError):
    """A file does not have the bytes that were written to it: a checksum or a format is wrong.

    If a runtime has read wrong bytes from one of its own slabs, `path` is the slab and `offset` the place of
    the bytes in it. If the file belongs to a checkpoint, both are None, and `cause` names the file.
    """

    def __init__(self, cause: str, cure: str, *, path: str | None = None, offset: int | None = None) -> None:
        super().__init__(cause, cure)
        self.path = path
        self.offset = offset

    def _keywords(self) -> dict[str, Any]:
        return {"path": self.path, "offset": self.offset}


class IncompatibleCheckpoint(InfinityError, ValueError):
    """A checkpoint is whole, but cannot be loaded into this model, with these options, or by this version."""


class RankDivergence(InfinityError, RuntimeError):
    """The ranks of a run make different calls, or one of them does not arrive."""


class RankFailure(InfinityError, RuntimeError):
    """Another rank of the run has failed, was killed, hangs or has left. `rank` is its number, or None if
    unknown.
    """

    def __init__(self, cause: str, cure: str, *, rank: int | None) -> None:
        super().__init__(cause, cure)
        self.rank = rank

    def _keywords(self) -> dict[str, Any]:
        return {"rank": self.rank}


_FULL = "Free space on that file system, lower the nvme budget, or add another path."
_CURES = {
    errno_codes.ENOSPC: _FULL,
    errno_codes.EDQUOT: _FULL,
    errno_codes.EIO: "The device reported a failure: look at the kernel log (dmesg) and the drive's SMART "
    "data, and use another path.",
    errno_codes.EACCES: "Give a path that this user may write, or change its permissions.",
    errno_codes.EPERM: "Give a path that this user may write, or change its permissions.",
    errno_codes.EROFS: "The file system is mounted read-only: remount it or give another path.",
    errno_codes.ENOENT: "Create the directory first, or give one that exists.",
    errno_codes.ENOTDIR: "Give a directory, not a file.",
    errno_codes.EISDIR: "Give a file, not a directory.",
    errno_codes.EMFILE: "Raise the limit of open files (ulimit -n).",
    errno_codes.ENOMEM: "Raise the limit of locked memory (ulimit -l) or lower the host budget.",
    errno_codes.ECANCELED: "The I/O engine was closed while this request was queued: wait for requests "
    "before closing it.",
}


def storage_error(
    operation: str, path: str, offset: int | None, errno: int, *, cure: str | Mapping[int, str] | None = None
) -> StorageError:
    """The StorageError for a failed operation. It is a StorageFull for ENOSPC and EDQUOT.

    operation: a verb for the message ("read", "preallocate"). offset: in the file, in bytes, or None. cure:
    None for the usual cure of `errno`, a text to use instead, or a mapping from errnos to such texts. An
    errno that is not in the mapping has the usual cure.
    """
    where = f"{path} at byte {offset}" if offset is not None else path
    name = errno_codes.errorcode.get(errno, str(errno))
    cause = f"Could not {operation} {where}: {os.strerror(errno)} ({name})."
    if not isinstance(cure, str):
        cure = {**_CURES, **(cure or {})}.get(
            errno, "See the errno's manual page; another path or INFINITY_AIO=threads may avoid it."
        )
    kind = StorageFull if errno in (errno_codes.ENOSPC, errno_codes.EDQUOT) else StorageError
    return kind(cause, cure, path=path, offset=offset, errno=errno)


def other_bytes(path: str, offset: int, what: str | None) -> CorruptState:
    """Make the error for 4096 bytes of a file that do not read as this process has written or read them
    before.

    path: the file. offset: position of the 4096 bytes in the file. what: words that say what the bytes hold,
    or None.
    """
    return CorruptState(
        f"{path} has other bytes at byte {offset} than were written there"
        f"{'' if what is None else f', where it holds {what}'}.",
        "The drive has lost or changed them, or another program has: look at its SMART data and the kernel "
        "log, and start again; with commits on, resume= goes on from the last commit.",
        path=path,
        offset=offset,
    )


@contextlib.contextmanager
def storage_errors(
    operation: str,
    path: str | os.PathLike[str],
    *,
    offset: int | None = None,
    cure: str | Mapping[int, str] | None = None,
) -> Iterator[None]:
    """A context that raises the error of `storage_error` in place of an OSError. A StorageError passes
    unchanged. operation, path, offset, cure: see `storage_error`.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        # safetensors raises FileNotFoundError without an errno.
        unnumbered = errno_codes.ENOENT if isinstance(error, FileNotFoundError) else errno_codes.EIO
        raise storage_error(
            operation, os.fspath(path), offset, error.errno or unnumbered, cure=cure
        ) from error


_DEVICE_CURES = {
    "CUDA_ERROR_OUT_OF_MEMORY": "Lower the device budget, or end other processes on the device.",
    "CUDA_ERROR_NO_DEVICE": 'Give device="cpu", or look with nvidia-smi why the driver finds no device.',
    "CUDA_ERROR_INVALID_DEVICE": "Give the number of a device that nvidia-smi lists.",
    "CUDA_ERROR_NOT_SUPPORTED": "Update the NVIDIA driver: this needs CUDA 11 or later.",
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": "Register each range of host memory once.",
}


def device_error(call: str, code: int, name: str, text: str) -> DeviceError:
    """The DeviceError for a failed call of the device's driver. code, name: the number and the name of its
    result in cuda.h. text: the driver's description of the result.
    """
    cause = f"The device's driver refused {call}: {text} ({name}, {code})."
    cure = _DEVICE_CURES.get(
        name, "Look at the kernel log (dmesg) and nvidia-smi for what the device reports, and start anew."
    )
    return DeviceError(cause, cure, call=call, code=code, name=name)


def named_ranks(ranks: Collection[int]) -> str:
    """Words for ranks, such as "rank 1" or "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def rank_failure(rank: int, what: str) -> RankFailure:
    """The RankFailure of a rank. what: the end of a sentence that begins "Rank 3", without a full stop."""
    cure = (
        "Look at that rank's own error, then start all ranks again: with commits on, resume= goes on from "
        "the last commit."
    )
    return RankFailure(f"Rank {rank} {what}.", cure, rank=rank)
