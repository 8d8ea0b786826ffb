"""Tests of device kernels compiled by NVRTC, without a GPU.

The compiled code computes exactly what the source says and is cached, and errors carry the compiler's words.

test_device_update.py runs kernels from the same sources, compiled for the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from cover import pairwise
from homes import needs_cuda

from infinity.device_update import kernels as device_kernels
from infinity.device_update.kernels import (
    KERNELS,
    RULES,
    Kernels,
    Nvrtc,
    UpdateKind,
    find_nvrtc,
    image,
    kinds_of,
    source,
)
from infinity.errors import KernelError
from infinity.system import cache

NVRTC = find_nvrtc()
needs_nvrtc = pytest.mark.skipif(NVRTC is None, reason="no NVRTC: pip install nvidia-cuda-nvrtc")
ADAMW = kinds_of("AdamW", torch.bfloat16, torch.bfloat16, torch.uint8)
ARCHITECTURES = ("80", "90")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Redirect the user's cache to a directory of the test, and return the folder of compiled kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "infinity"


@pytest.fixture
def nvrtc() -> Nvrtc:
    assert NVRTC is not None
    return NVRTC


@pytest.mark.sweep(most=1)
@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_is_in_the_image(architecture: str, kept: Path) -> None:
    made = image(ADAMW, f"sm_{architecture}")
    assert made[:4] == b"\x7fELF"
    assert all(f".text.{name}\0".encode() in made for name in KERNELS)


@needs_nvrtc
def test_an_image_is_compiled_once_for_each_architecture_and_set(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def compiled(self: Nvrtc, text: str, headers: object, options: list[str]) -> bytes:
        asked.append(options[0].removeprefix("--gpu-architecture="))
        return f"image {len(asked)}".encode()

    monkeypatch.setattr(Nvrtc, "compile", compiled)
    assert [image(ADAMW, "sm_90") for _ in range(2)] == [b"image 1"] * 2
    assert image(ADAMW, "sm_80") == b"image 2"
    assert image([*ADAMW, UpdateKind(4, 0, 0, 0)], "sm_90") == b"image 3"
    assert asked == ["sm_90", "sm_80", "sm_90"]
    assert len(list(kept.iterdir())) == 3
    for each in kept.iterdir():
        each.write_bytes(b"")  # cached files that are incomplete are treated as missing
    assert [image(ADAMW, each) for each in ("sm_80", "sm_90")] == [b"image 4", b"image 5"]
    monkeypatch.setattr(cache.Path, "write_bytes", _refused)
    assert image(ADAMW, "sm_70") == b"image 6"


def _refused(self: Path, content: bytes) -> int:
    raise PermissionError(13, "no")


KINDS = pairwise(
    {"rule": range(len(RULES)), "formats": ((0, 0, 0), (1, 4, 2), (2, 3, 1)), "architecture": ARCHITECTURES}
)
"""Kinds of updates that test_nothing_is_fused_approximated_or_flushed compiles, each for one architecture.

"rule" and "formats" are the fields of an UpdateKind: the index of the update rule, and the indices of the
formats of gradients, parameters and moments.
"""


@pytest.mark.sweep(most=1)
@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_is_fused_approximated_or_flushed(architecture: str, kept: Path) -> None:
    """All fp32 and fp64 arithmetic in the kernels is rounded to nearest and keeps denormals."""
    kinds = {
        UpdateKind(case["rule"], *case["formats"]) for case in KINDS if case["architecture"] == architecture
    }
    text = image(kinds, f"compute_{architecture}").decode()
    assert all(f".entry {name}(" in text for name in KERNELS)
    arithmetic = set(re.findall(r"\b((?:add|sub|mul|div|fma|mad|sqrt|rcp|rsqrt)\.[\w.]*f(?:32|64))\b", text))
    assert arithmetic == {
        *("add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32", "fma.rn.f32", "sqrt.rn.f32"),
        *("add.rn.f64", "mul.rn.f64"),
    }
    assert not re.search(r"\.(ftz|approx|full)\b", text)


@needs_nvrtc
def test_a_kernel_of_a_run_keeps_its_values_in_registers(kept: Path) -> None:
    """The kernel of a training run uses less than 1 KiB of local memory per thread.

    The kernel reads the launch's arguments of 4 KB in place, so no thread has a copy of them.
    """
    text = image(ADAMW, "compute_90").decode()
    entry = text[text.index(".entry infinity_update(") :]
    local = [int(size) for size in re.findall(r"\.local .*?\[(\d+)\];", entry)]
    assert sum(local) < 1024


@needs_nvrtc
def test_what_cannot_be_compiled_is_told_with_the_compilers_words(nvrtc: Nvrtc) -> None:
    with pytest.raises(KernelError, match="could not compile") as caught:
        nvrtc.compile("__global__ void broken() { nonsense; }", {}, ["--gpu-architecture=sm_90"])
    assert "nonsense" in caught.value.log and "nonsense" in str(caught.value)
    with pytest.raises(KernelError):
        nvrtc.compile("", {}, ["--gpu-architecture=sm_1"])


@needs_nvrtc
def test_the_newest_of_torchs_version_is_found(nvrtc: Nvrtc) -> None:
    assert re.fullmatch(r"\d+\.\d+", nvrtc.version)
    assert find_nvrtc() is nvrtc and device_kernels.can_compile()


def test_nvrtc_is_of_torchs_cuda_or_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The major version of torch's CUDA comes first, wherever it is found, and no later version is used:
    NVRTC 13 writes code that a driver for CUDA 12 refuses.
    """
    wheels = {
        12: "cuda_nvrtc/lib/libnvrtc.so.12",
        13: "cu13/lib/libnvrtc.so.13",
        11: "old/lib/libnvrtc.so.11.2",
    }
    for name in wheels.values():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(device_kernels, "_wheels", lambda: [tmp_path])

    def found(cuda: str | None) -> list[str]:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        return [library for library, _ in device_kernels._candidates()]

    def of(*majors: int) -> list[str]:
        return [each for major in majors for each in (str(tmp_path / wheels[major]), f"libnvrtc.so.{major}")]

    assert found("12.4") == of(12, 11)
    assert found("13.0") == found(None) == of(13, 12, 11)
    (tmp_path / wheels[12]).unlink()
    assert found("12.4") == ["libnvrtc.so.12", *of(11)]


def test_a_source_is_assembled_from_files_without_a_library() -> None:
    text, headers = source(ADAMW)
    assert "INFINITY_UPDATE(kAdamW, kBf16, kSplit, kInt8)" in text
    assert {"rules.inl", "moments.inl", "vec_warp.hpp", "formats.hpp"} <= set(headers)
    assert not {"table.inl", "stream.inl", "vec_scalar.hpp"} & set(headers)
    assert text.index("kAdamW,") < text.index("kAdamWSmallBeta,")


def test_each_optimizer_has_the_rules_that_its_groups_may_ask_for() -> None:
    def rules(name: str) -> set[str]:
        return {RULES[each.rule] for each in kinds_of(name, torch.float32, torch.float16, torch.float32)}

    assert rules("AdamW") == {"kAdamW", "kAdamWSmallBeta"}
    assert rules("Adam") == {"kAdamW", "kAdamWSmallBeta", "kAdam", "kAdamSmallBeta"}
    assert rules("SGD") == {"kSgd", "kSgdMomentum"} and rules("Adagrad") == {"kAdagrad"}
    assert rules("Lion") == {"kLion"}
    assert str(UpdateKind(6, 2, 3, 1)) == "INFINITY_UPDATE(kAdagrad, kF16, kPlainF16, kBf16)"


class FakeDriver:
    """A fake of the driver that accepts any image as a module."""

    def module(self, image: bytes) -> FakeDriver:
        return self

    def function(self, name: str) -> str:
        return name


def test_updates_that_nobody_foresaw_are_compiled_when_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update kind that is not compiled yet is compiled at the first launch that needs it.

    All new kinds of that launch are compiled together. A parameter group may change to another rule at any
    step, and one launch may have updates of several rules.
    """
    asked: list[tuple[set[UpdateKind], str]] = []

    def compiled(kinds: Iterable[UpdateKind], architecture: str) -> bytes:
        asked.append((set(kinds), architecture))
        return b""

    monkeypatch.setattr(device_kernels, "image", compiled)
    monkeypatch.setattr(device_kernels, "cuda_driver", lambda number: FakeDriver())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    kernels = Kernels(torch.device("cuda", 0), ADAMW)
    one, other = UpdateKind(6, 0, 0, 0), UpdateKind(6, 1, 0, 0)
    for kinds in (list(ADAMW)[:1], {one, other}, {other}, ADAMW, {one}):
        kernels.require(kinds)
    assert asked == [(ADAMW, "sm_90"), ({one, other}, "sm_90")]


@needs_cuda
def test_the_device_takes_what_was_compiled() -> None:
    Kernels(torch.device("cuda"), ADAMW).require({UpdateKind(6, 0, 0, 0)})
