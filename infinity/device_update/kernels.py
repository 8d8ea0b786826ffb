"""Device kernels: compiles the kernels for the updates of a run with NVRTC, caches and launches them.

The kernels are compiled from the source of the CPU's kernels (csrc/cpu_adam/device.cu), so their results have
the same bits as on the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import torch

from infinity import _cpu_adam, _driver
from infinity.cpu_adam.page import GRAD_DTYPES, MOMENT_FORMATS
from infinity.errors import KernelError
from infinity.system.cache import cache_file, read_bytes, write_bytes
from infinity.tiers.driver import cuda_driver

_MAJORS = (13, 12, 11)

Launch = Callable[[int, int, bytes], None]
"""Function that queues a kernel: (number of blocks, threads of each, bytes of the kernel's argument)."""


class Nvrtc:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, source: str, headers: Mapping[str, str], options: Sequence[str]) -> bytes:
        """Compile CUDA source to a cubin, or to PTX if the options name a virtual architecture.

        headers: name in an `#include` line -> text of the file. options: command line options of NVRTC.
        Raises KernelError with the compiler's log.
        """
        program = ctypes.c_void_p()
        names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
        texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
        arguments = (source.encode(), b"infinity.cu", len(headers), texts, names)
        self._check(self._library.nvrtcCreateProgram(ctypes.byref(program), *arguments), "")
        try:
            given = (ctypes.c_char_p * len(options))(*(each.encode() for each in options))
            # NVRTC 12.4 leaves its thread in the locale C, in which Python reads files as ASCII.
            with ThreadPoolExecutor(1) as thread:
                compiled = thread.submit(self._library.nvrtcCompileProgram, program, len(options), given)
            result = compiled.result()
            self._check(result, self._output(program, "ProgramLog").decode(errors="replace"))
            virtual = any(each.startswith("--gpu-architecture=compute_") for each in options)
            return self._output(program, "PTX" if virtual else "CUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _output(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), "")
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer), "")
        return buffer.raw if what == "CUBIN" else buffer.value

    def _check(self, result: int, log: str) -> None:
        if result:
            raise KernelError(
                f"NVRTC {self.version} could not compile the device's kernels: "
                f"{self._library.nvrtcGetErrorString(result).decode()}.",
                f"Use a build of torch whose CUDA knows this device.{_indented(log)}",
                log=log,
            )


@functools.cache
def find_nvrtc() -> Nvrtc | None:
    """Load NVRTC, in the major version of torch's CUDA if possible and never in a later one. Returns None if
    no such NVRTC is found.
    """
    for library, builtins in _candidates():
        try:
            for each in builtins:  # otherwise NVRTC looks for builtins only in the loader's paths
                ctypes.CDLL(each, mode=ctypes.RTLD_GLOBAL)
            return Nvrtc(ctypes.CDLL(library))
        except (OSError, AttributeError):
            continue
    return None


def _candidates() -> Iterator[tuple[str, list[str]]]:
    """Yield (path or name of the library, paths of the builtins that NVRTC opens), the best candidate first.

    The major version of torch's CUDA comes first, then the newest. For each version, libraries in NVIDIA's
    wheels come before the one that the dynamic loader finds. Versions later than torch's CUDA are left out:
    a driver that suits torch may be too old for their code.
    """
    torchs = int((torch.version.cuda or "0").partition(".")[0])
    wheels = [library for folder in _wheels() for library in sorted(folder.glob("*/lib/libnvrtc.so.*"))]
    known = {*_MAJORS, *(_major(library.name) for library in wheels)}
    for major in sorted(known, key=lambda each: (each != torchs, -each)):
        if torchs and major > torchs:
            continue
        for library in (each for each in wheels if _major(each.name) == major):
            builtins = sorted(library.parent.glob("libnvrtc-builtins.so.*"))
            yield str(library), [str(each) for each in builtins]
        yield f"libnvrtc.so.{major}", []


def _wheels() -> list[Path]:
    """The folders into which NVIDIA's Python wheels install libraries."""
    spec = importlib.util.find_spec("nvidia")
    return [] if spec is None else [Path(each) for each in spec.submodule_search_locations or ()]


def _major(name: str) -> int:
    match = re.search(r"\.so\.(\d+)", name)
    return int(match.group(1)) if match else 0


def _indented(log: str) -> str:
    return "".join(f"\n    {line}" for line in log.splitlines())


def _enumerators(kind: type[Enum]) -> tuple[str, ...]:
    """The names of the C++ enumerators of `kind`, such as "kAdamW", in the order of their values."""
    return tuple("k" + "".join(map(str.capitalize, each.name.split("_"))) for each in kind)


RULES = _enumerators(_cpu_adam.Rule)
DTYPES = _enumerators(_cpu_adam.Dtype)
PARAMETERS = _enumerators(_cpu_adam.ParameterFormat)
MOMENTS = _enumerators(_cpu_adam.MomentFormat)
"""RULES, DTYPES, PARAMETERS, MOMENTS: the enumerators of `Rule`, `Dtype`, `ParameterFormat` and
`MomentFormat` in csrc/cpu_adam/formats.hpp, in the order of their values.
"""

KERNELS = ("infinity_update", "infinity_update_pieces", "infinity_squares", "infinity_fresh_squares")

_PACKAGE = Path(__file__).parents[1]
_SOURCE = "device.cu"
_WARP = 32
_BLOCK = 256
_OPTIONS = (
    "--std=c++17",
    "--device-as-default-execution-space",
    # For the same bits as on the CPU: round as IEEE 754 does, do not flush denormals to zero, and fuse
    # operations only where the source does.
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
)
_INCLUDE = re.compile(r'^#include "([\w.]+)"', re.MULTILINE)


class UpdateKind(NamedTuple):
    """An update rule and data formats, for which a kernel is compiled: indices into RULES, DTYPES, PARAMETERS
    and MOMENTS.
    """

    rule: int
    gradient: int
    parameter: int
    moments: int

    def __str__(self) -> str:
        names = RULES[self.rule], DTYPES[self.gradient], PARAMETERS[self.parameter], MOMENTS[self.moments]
        return f"INFINITY_UPDATE({', '.join(names)})"


_ADAM_W = (_cpu_adam.Rule.ADAM_W, _cpu_adam.Rule.ADAM_W_SMALL_BETA)
_RULES_OF = {
    "AdamW": _ADAM_W,
    "Adam": (*_ADAM_W, _cpu_adam.Rule.ADAM, _cpu_adam.Rule.ADAM_SMALL_BETA),
    "SGD": (_cpu_adam.Rule.SGD, _cpu_adam.Rule.SGD_MOMENTUM),
    "Adagrad": (_cpu_adam.Rule.ADAGRAD,),
    "Lion": (_cpu_adam.Rule.LION,),
}
"""The name of a torch optimizer's class -> the update rules that its groups may need."""
_MASTERS = {
    torch.float32: _cpu_adam.ParameterFormat.PLAIN,
    torch.float16: _cpu_adam.ParameterFormat.PLAIN_F16,
    torch.bfloat16: _cpu_adam.ParameterFormat.SPLIT,
}
"""The dtype of a parameter in its page -> how the parameter and its fp32 master are stored."""


def kinds_of(
    optimizer: str, gradient: torch.dtype, parameter: torch.dtype, moments: torch.dtype
) -> set[UpdateKind]:
    """The kinds of updates that a torch optimizer may need. optimizer: the name of the optimizer's class.
    gradient, parameter, moments: dtypes in the gradient pages, parameter pages and optimizer pages.
    """
    formats = GRAD_DTYPES[gradient].value, _MASTERS[parameter].value, MOMENT_FORMATS[moments].value
    return {UpdateKind(rule.value, *formats) for rule in _RULES_OF[optimizer]}


class Kernels:
    def __init__(self, device: torch.device, kinds: Iterable[UpdateKind]) -> None:
        """Load kernels for updates of `kinds` on `device`. Raises the errors of `require`. Kernels for the
        CPU are compiled with the package, for all kinds.
        """
        self.device = device
        self._modules: dict[frozenset[UpdateKind], dict[str, Launch]] = {}
        self.require(kinds)

    def require(self, kinds: Iterable[UpdateKind]) -> None:
        """Load kernels that can do updates of all `kinds` in one launch, and compile them if necessary.
        Raises KernelError if they cannot be compiled, and DeviceError if the device does not accept them.
        """
        self._functions(frozenset(kinds))

    def launch(
        self, name: str, warps: int, arguments: bytes, kinds: frozenset[UpdateKind] = frozenset()
    ) -> None:
        """Queue the kernel `name`, one of KERNELS, on torch's current stream.

        warps: the fewest warps (32 threads each) to launch. arguments: the bytes of the kernel's argument, a
        struct of csrc/cpu_adam/device.hpp. kinds: the kinds of the updates in the launch. Raises the errors
        of `require`.
        """
        self._functions(kinds)[name](-(-warps * _WARP // _BLOCK), _BLOCK, arguments)

    def _functions(self, kinds: frozenset[UpdateKind]) -> dict[str, Launch]:
        """Find or load a CUDA module with kernels for all `kinds`. Returns its kernels by name."""
        for known, functions in self._modules.items():
            if kinds <= known or self.device.type == "cpu":
                return functions
        self._modules[kinds] = self._loaded(kinds)
        return self._modules[kinds]

    def _loaded(self, kinds: frozenset[UpdateKind]) -> dict[str, Launch]:
        if self.device.type == "cpu":
            return {name: _host_kernel(name) for name in KERNELS}
        major, minor = torch.cuda.get_device_capability(self.device)
        module = cuda_driver(_number(self.device)).module(image(kinds, f"sm_{major}{minor}"))
        return {name: _device_kernel(module.function(name), self.device) for name in KERNELS}


def can_compile() -> bool:
    return find_nvrtc() is not None


def image(kinds: Iterable[UpdateKind], architecture: str) -> bytes:
    """Return the compiled kernels for `kinds`, from the user's cache if they are there.

    architecture: a real one such as "sm_90" gives a cubin, a virtual one such as "compute_90" gives PTX.
    Raises KernelError if the kernels cannot be compiled.
    """
    nvrtc = find_nvrtc()
    assert nvrtc is not None, "the plan checks can_compile() first"
    text, headers = source(kinds)
    options = (f"--gpu-architecture={architecture}", *_OPTIONS)
    digest = hashlib.sha256(repr((text, sorted(headers.items()), options, nvrtc.version)).encode())
    path = cache_file(f"kernels-{digest.hexdigest()[:32]}.cubin")
    found = read_bytes(path)
    if found is None:
        found = nvrtc.compile(text, headers, options)
        write_bytes(path, found)
    return found


def source(kinds: Iterable[UpdateKind]) -> tuple[str, dict[str, str]]:
    """Return (CUDA source of the kernels for `kinds`, file name -> text of each file that it includes)."""
    headers: dict[str, str] = {}
    waiting = [_SOURCE]
    while waiting:
        name = waiting.pop()
        if name not in headers:
            headers[name] = (_folder() / name).read_text()
            waiting += _INCLUDE.findall(headers[name])
    wanted = " \\\n    ".join(str(kind) for kind in sorted(kinds))
    return f"#define INFINITY_UPDATES \\\n    {wanted}\n{headers.pop(_SOURCE)}", headers


@functools.cache
def _folder() -> Path:
    """The folder of the kernels' sources, in the installed package or in the source tree."""
    installed = _PACKAGE / "kernels"
    return installed if installed.is_dir() else _PACKAGE.parent / "csrc" / "cpu_adam"


def host_library() -> Path:
    """The shared library of the kernels compiled for the CPU."""
    return _PACKAGE / "libinfinity_host_kernels.so"


def _host_kernel(name: str) -> Launch:
    """Return a kernel of the shared library for the CPU. A launch returns after the kernel has run."""
    function = getattr(ctypes.CDLL(str(host_library())), name)
    function.argtypes = (ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint)
    function.restype = None
    return lambda grid, block, arguments: function(arguments, grid, block)


def _device_kernel(function: _driver.Function, device: torch.device) -> Launch:
    def launch(grid: int, block: int, arguments: bytes) -> None:
        queue = torch.cuda.current_stream(device).cuda_stream
        function.launch(cuda_driver(_number(device)).foreign(queue), grid, block, arguments)

    return launch


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
