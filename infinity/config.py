"""Configuration: sizes, budgets and precision, as the user gives them, validated for all other modules."""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from infinity.errors import ConfigError

Size = int | str

_UNITS = {unit: 1 << 10 * power for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB", "PiB"))}
_FACTORS = {unit.lower(): factor for unit, factor in _UNITS.items()}
_MOST_DIGITS = 30
_COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NODE_CACHE_VARIABLE = "INFINITY_NODE_CACHE"
_STATE_FORMATS = ("fp32", "bf16", "int8")
_ACCUMULATION = ("fp32", "compute")
_INPUTS = ("keep", "cast")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(size: Size, *, what: str = "size") -> int:
    """Convert a size to bytes. size: an int, or a string such as "20GiB", "1.5 TiB" or "4096" (bytes).

    what: the name of the size in errors. Raises ConfigError for a size that cannot be read. Decimal units
    (GB) are refused, because some users mean binary units by them.
    """
    cure = f'Give an int in bytes or a string with a unit of {", ".join(_UNITS)}, such as "20GiB".'
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ConfigError(f"The {what} {size!r} is a {type(size).__name__}, not a size.", cure)
    if isinstance(size, int):
        if size < 0:
            raise ConfigError(f"The {what} {size} is negative.", cure)
        return size
    match = _SIZE.fullmatch(size)
    factor = _FACTORS.get((match[2] or "B").lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"The {what} {size!r} cannot be read.", cure)
    if len(match[1]) > _MOST_DIGITS:
        raise ConfigError(f"The {what} has {len(match[1])} digits, which are too many.", cure)
    return math.floor(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def round_up(number: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def format_size(nbytes: int) -> str:
    """`nbytes` as text for users, with about three digits and a binary unit, such as "1.5 GiB"."""
    for unit, factor in reversed(_UNITS.items()):
        if nbytes >= factor and unit != "B":
            value = nbytes / factor
            return f"{value:.0f} {unit}" if value >= 100 or value.is_integer() else f"{value:.3g} {unit}"
    return f"{nbytes} B"


def node_cache_limit() -> int | None:
    """The most bytes of RAM in which a rank keeps parameters of other nodes: the environment variable
    INFINITY_NODE_CACHE, such as "2GiB" or "0". None if it is not set: as many bytes as are useful. Raises
    ConfigError for text that is not a size.
    """
    text = os.environ.get(NODE_CACHE_VARIABLE, "")
    return parse_size(text, what=NODE_CACHE_VARIABLE) if text else None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The most bytes that each tier (device memory, host RAM, NVMe) may hold. No tier allocates more."""

    device: Size | None = None
    """Bytes of device memory. None means all free memory of a CUDA device, less a safety margin. On the CPU,
    None means that device and host are one tier in RAM.
    """

    host: Size | None = None
    """Bytes of host RAM, which is pinned for a CUDA device. None means the bytes that the cgroup and
    MemAvailable leave, less a safety margin.
    """

    nvme: Mapping[str | os.PathLike[str], Size] | None = None
    """Bytes for each directory, each of which should be on a disk of its own. None means no NVMe tier."""

    verify: bool = True
    """Whether every read from NVMe is compared with the checksums of the bytes written there. Bytes that the
    disk has lost or changed then raise CorruptState, and are not used. The checksums take RAM beside the
    budget: 4 bytes for each 4096 bytes on NVMe. With commits on, reads are always verified.
    """

    device_bytes: int | None = field(init=False, repr=False, default=None)

    host_bytes: int | None = field(init=False, repr=False, default=None)

    nvme_bytes: dict[str, int] = field(init=False, repr=False, default_factory=dict)
    """`nvme` with absolute directories and numbers of bytes; empty without an NVMe tier."""

    def __post_init__(self) -> None:
        if not isinstance(self.verify, bool):
            raise ConfigError(f"The value of verify is {self.verify!r}.", "Give True or False.")
        if self.device is not None:
            object.__setattr__(self, "device_bytes", _positive(self.device, "device budget"))
        if self.host is not None:
            object.__setattr__(self, "host_bytes", _positive(self.host, "host budget"))
        if self.nvme is None:
            return
        if not isinstance(self.nvme, Mapping) or not self.nvme:
            raise ConfigError(
                f"The nvme budget {self.nvme!r} names no directory.",
                'Give a mapping such as {"/mnt/nvme0": "400GiB"}, or None for no nvme tier.',
            )
        resolved = {}
        for path, size in self.nvme.items():
            if not isinstance(path, (str, os.PathLike)):
                raise ConfigError(f"The nvme budget names {path!r}.", "Give directories as strings or paths.")
            directory = os.path.realpath(os.fspath(path))
            if directory in resolved:
                raise ConfigError(
                    f"The nvme budget names {directory} twice.",
                    "Give each directory once, with all its bytes.",
                )
            resolved[directory] = _positive(size, f"nvme budget of {os.fspath(path)}")
        object.__setattr__(self, "nvme_bytes", resolved)

    def is_unified(self, device: torch.device) -> bool:
        """Whether the memory of `device` and host RAM are one tier."""
        return device.type == "cpu" and self.device_bytes is None


def _positive(size: Size, what: str) -> int:
    nbytes = parse_size(size, what=what)
    if nbytes == 0:
        raise ConfigError(f"The {what} is zero.", "Give at least one page, or leave it out.")
    return nbytes


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of parameters, gradients and optimizer states. Buffers keep their dtypes."""

    compute: str = "bf16"
    """The dtype of floating-point parameters in forward and backward: "bf16", "fp16" or "fp32"."""

    states: str = "fp32"
    """The format of the optimizer's moments. "fp32" is exact. "bf16" takes half the bytes, and rounds
    stochastically. "int8" takes a quarter of the bytes: companded codes, with an exponent for every 64
    elements (see infinity/formats/encodings.py). Master parameters have fp32 precision with all three, stored
    as float32, or as a bf16 parameter and 16 more bits.
    """

    keep: tuple[str, ...] = ()
    """Patterns (fnmatch, case-sensitive) for the names of parameters that stay fp32, such as "*.norm.*"."""

    accumulate: str = "fp32"
    """The dtype in which gradients are summed: "fp32", or "compute" for each parameter's own dtype. Gradients
    are stored in this dtype too, except where a step has only one backward; see `gradient_dtype`.
    """

    inputs: str | tuple[str, ...] = "keep"
    """What happens to floating-point arguments of the model's forward.

    "keep": nothing. A tensor of another dtype is cast where it meets a parameter in an operation that demands
    equal dtypes, such as a matrix product (see infinity/formats/casts.py). "cast": all arguments, also inside
    of containers, are cast to the dtype of `compute` when the model is called, as FSDP2's
    `cast_forward_inputs` does. A tuple of patterns (fnmatch, case-sensitive): only arguments with such a name
    are cast. Integers, booleans and complex numbers never change.
    """

    def __post_init__(self) -> None:
        _one_of("compute precision", self.compute, tuple(_COMPUTE_DTYPES))
        _one_of("states precision", self.states, _STATE_FORMATS)
        _one_of("accumulation precision", self.accumulate, _ACCUMULATION)
        keep = _patterns(self.keep)
        if keep is None:
            raise ConfigError(
                f"The value {self.keep!r} of keep is not a tuple of patterns.",
                'Give a tuple of parameter name patterns, such as ("*.norm.*",).',
            )
        object.__setattr__(self, "keep", keep)
        named = isinstance(self.inputs, str) and self.inputs in _INPUTS
        inputs = self.inputs if named else _patterns(self.inputs)
        if not inputs:
            raise ConfigError(
                f"The value {self.inputs!r} of inputs is not known.",
                'Give "keep", "cast", or a tuple of argument name patterns, such as ("pixel_*",).',
            )
        object.__setattr__(self, "inputs", inputs)

    @property
    def compute_dtype(self) -> torch.dtype:
        return _COMPUTE_DTYPES[self.compute]

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the parameter `name` is stored in its page. dtype: the parameter's dtype in the
        user's model. A dtype that is not floating-point is kept.
        """
        if not dtype.is_floating_point:
            return dtype
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.keep):
            return torch.float32
        return self.compute_dtype

    def accumulate_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients are summed, for parameters that are stored as `dtype`."""
        return torch.float32 if self.accumulate == "fp32" else dtype

    def gradient_dtype(self, dtype: torch.dtype, accumulation: int | None) -> torch.dtype:
        """The dtype in which gradients are stored, for parameters that are stored as `dtype`.

        accumulation: the declared number of backwards in a step; None if unknown. The gradient of a single
        backward is stored in `dtype` with all its bits, because nothing is added to it.
        """
        return dtype if accumulation == 1 else self.accumulate_dtype(dtype)


def _patterns(value: object) -> tuple[str, ...] | None:
    """`value` as a tuple of patterns; None if it is not a tuple or list of nonempty strings."""
    patterns = tuple(value) if isinstance(value, (tuple, list)) else (None,)
    return patterns if all(isinstance(pattern, str) and pattern for pattern in patterns) else None


def _one_of(what: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"The {what} is {value!r}.", f"Give one of {', '.join(choices)}.")
