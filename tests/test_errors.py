import copy
import errno
import pickle

import pytest

from infinity.errors import (
    BudgetError,
    ConfigError,
    CorruptState,
    DeviceError,
    IncompatibleCheckpoint,
    InfinityError,
    NonFiniteGradient,
    RankDivergence,
    StorageError,
    StorageFull,
    UnsupportedOptimizer,
    device_error,
    rank_failure,
    storage_error,
)

ERRORS = [
    InfinityError("It broke.", "Mend it."),
    ConfigError("It broke.", "Mend it."),
    UnsupportedOptimizer("It broke.", "Mend it."),
    CorruptState("It broke.", "Mend it."),
    IncompatibleCheckpoint("It broke.", "Mend it."),
    NonFiniteGradient("It broke.", "Mend it."),
    BudgetError("It broke.", "Mend it.", needed=4096, tier="host"),
    BudgetError("It broke.", "Mend it."),
    StorageError("It broke.", "Mend it.", path="/a", offset=0, errno=errno.EIO),
    storage_error("write", "/a", 8192, errno.ENOSPC),
    storage_error("open", "/a", None, errno.ENOENT),
    RankDivergence("It broke.", "Mend it."),
    rank_failure(3, "was killed"),
    device_error("cuMemcpyAsync", 700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_errors_survive_the_way_between_processes(error: InfinityError, again) -> None:
    twin = again(error)
    assert type(twin) is type(error)
    assert str(twin) == str(error) == f"{error.cause} {error.cure}"
    for name in ("needed", "rank", "call", "code", "name", "path", "offset", "errno", "strerror", "filename"):
        assert getattr(twin, name, None) == getattr(error, name, None)


def test_storage_errors_are_os_errors_with_their_fields() -> None:
    error = storage_error("write", "/a", 8192, errno.EIO)
    assert isinstance(error, OSError)
    assert (error.errno, error.strerror, error.filename) == (errno.EIO, "Input/output error", "/a")
    assert "write /a at byte 8192" in error.cause
    assert "EIO" in error.cause
    assert "SMART" in error.cure


def test_device_errors_say_which_call_and_what_cuda_calls_it() -> None:
    error = device_error("cuMemHostRegister_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
    assert isinstance(error, DeviceError)
    assert isinstance(error, RuntimeError)
    assert (error.call, error.code, error.name) == ("cuMemHostRegister_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY")
    assert "cuMemHostRegister_v2: out of memory (CUDA_ERROR_OUT_OF_MEMORY, 2)" in error.cause
    assert "budget" in error.cure


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_is_storage_full(number: int) -> None:
    assert isinstance(storage_error("write", "/a", 0, number), StorageFull)


def test_every_errno_has_a_cure() -> None:
    for number in (*errno.errorcode, 9999):
        error = storage_error("open", "/a", None, number)
        assert error.cure, number
        assert " at byte " not in error.cause


def test_rank_failures_name_the_rank() -> None:
    error = rank_failure(3, "was killed")
    assert (error.rank, error.cause) == (3, "Rank 3 was killed.")
    assert isinstance(error, RuntimeError)
