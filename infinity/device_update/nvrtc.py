"""NVRTC: NVIDIA's run-time compiler for CUDA, which every CUDA build of torch includes."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from infinity.errors import KernelError

_MAJORS = (13, 12, 11)


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
    """Load NVRTC, in the major version of torch's CUDA if possible; None if there is none."""
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

    Libraries in NVIDIA's wheels come before those that the dynamic loader finds. Among both, the major
    version of torch's CUDA comes first, then the newest version.
    """
    found = [
        (_major(library.name), library)
        for folder in _wheels()
        for library in sorted(folder.glob("*/lib/libnvrtc.so.*"))
    ]
    wanted = (torch.version.cuda or "").partition(".")[0]
    found.sort(key=lambda each: (str(each[0]) != wanted, -each[0]))
    for _, library in found:
        builtins = sorted(library.parent.glob("libnvrtc-builtins.so.*"))
        yield str(library), [str(each) for each in builtins]
    for major in sorted(_MAJORS, key=lambda each: (str(each) != wanted, -each)):
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
