"""Job checks: the arrays and segments of a thread pool's job, checked and converted to native types."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity import _cpu_adam
from infinity.cpu_adam.work import Array, MemorySpan, Segment, Update
from infinity.errors import ConfigError

GRAD_DTYPES = {
    torch.float32: _cpu_adam.Dtype.F32,
    torch.bfloat16: _cpu_adam.Dtype.BF16,
    torch.float16: _cpu_adam.Dtype.F16,
}
MOMENT_FORMATS = {
    torch.float32: _cpu_adam.MomentFormat.F32,
    torch.bfloat16: _cpu_adam.MomentFormat.BF16,
    torch.uint8: _cpu_adam.MomentFormat.INT8,
}
COPY_FORMATS = {
    torch.float32: _cpu_adam.ParameterFormat.PLAIN_F32,
    torch.bfloat16: _cpu_adam.ParameterFormat.PLAIN_BF16,
    torch.float16: _cpu_adam.ParameterFormat.PLAIN_F16,
}


def parameter_format(work: Update) -> _cpu_adam.ParameterFormat:
    if work.remainder is not None:
        return _cpu_adam.ParameterFormat.SPLIT
    if work.copy is None:
        return _cpu_adam.ParameterFormat.PLAIN
    return COPY_FORMATS.get(work.copy.dtype, _cpu_adam.ParameterFormat.PLAIN)


def moment_dtype(work: Update) -> torch.dtype:
    """The dtype of the moments of `work`; float32 if there are none. Raises ConfigError if they differ or if
    moments cannot have the dtype.
    """
    dtypes = {each.dtype for each in (work.first_moment, work.second_moment) if each is not None}
    if len(dtypes) > 1 or not dtypes <= set(MOMENT_FORMATS):
        raise ConfigError(
            f"The moments have dtypes {', '.join(sorted(str(each) for each in dtypes))}.",
            f"Give both the same: {' or '.join(str(each) for each in MOMENT_FORMATS)}.",
        )
    return dtypes.pop() if dtypes else torch.float32


def segment_tuples(segments: Sequence[Segment]) -> list[tuple[int, int, int, int, int]]:
    for index, each in enumerate(segments):
        if min(each.start, each.count, each.hyper, each.index, each.seed) < 0 or each.seed >> 32:
            raise ConfigError(
                f"Segment {index} has a field that is negative, or a seed of more than 32 bits: {each}.",
                "Give start, count, hyper, index and seed, all at least 0, and the seed below 2**32.",
            )
    return [(each.start, each.count, each.hyper, each.index, each.seed) for each in segments]


class Page:
    """The arrays of a job of a thread pool. `elements` is their common length; `owners` own their memory."""

    def __init__(self) -> None:
        self.elements = 0
        self.owners: list[object] = []

    def add(self, name: str, array: Array | None, *dtypes: torch.dtype, per: int = 1) -> int:
        """Check an array and return its address; 0 if `array` is None.

        name: for error messages. dtypes: the dtypes that are allowed. per: number of elements of the other
        arrays that share one entry of this array. Raises ConfigError for a wrong device, layout, dtype or
        length.
        """
        if array is None:
            return 0
        if isinstance(array, torch.Tensor):
            _check_tensor(name, array)
            address, count = array.data_ptr(), array.numel()
        elif isinstance(array, MemorySpan):
            address, count = array.address, array.count
            if array.address < 0 or array.count < 0:
                raise ConfigError(
                    f"The span '{name}' has address {array.address} and count {array.count}.",
                    "Give an address in bytes and a count in elements, both at least 0.",
                )
        else:
            raise ConfigError(
                f"'{name}' is a {type(array).__name__}.",
                "Give a torch.Tensor or an infinity.cpu_adam.MemorySpan.",
            )
        if array.dtype not in dtypes:
            raise ConfigError(
                f"'{name}' has dtype {array.dtype}.",
                f"Give {' or '.join(str(each) for each in dtypes)}.",
            )
        if per == 1 and not self.owners:
            self.elements = count
        if count != -(-self.elements // per):
            raise ConfigError(
                f"'{name}' has {count} elements where the arrays before it have {self.elements}.",
                "Give flat arrays of one length."
                if per == 1
                else f"Give one entry for every {per} elements of the others.",
            )
        self.owners.append(array.owner if isinstance(array, MemorySpan) else array)
        return address


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_cpu:
        raise ConfigError(
            f"'{name}' is on {tensor.device}.", "Copy it to the CPU first; this pool updates host memory."
        )
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ConfigError(
            f"'{name}' is not contiguous (shape {tuple(tensor.shape)}).",
            "Give a flat contiguous view of the page.",
        )
