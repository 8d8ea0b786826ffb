"""Kernel trial: whether a device computes updates and squares with the CPU's bits. Else the CPU does."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch

from infinity._cpu_adam import Dtype, MomentFormat, ParameterFormat
from infinity.cpu_adam import (
    BLOCK,
    CODE_BLOCK,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Gradient,
    Hyper,
    Lion,
    Segment,
    Update,
)
from infinity.cpu_adam.page import GRAD_DTYPES, MOMENT_FORMATS
from infinity.cpu_adam.pool import ThreadPool
from infinity.device_update.kernels import RULES, Kernels, UpdateKind
from infinity.device_update.table import DeviceChunk, WorkspaceSize, fresh_squares_launch
from infinity.device_update.update import DeviceUpdates, MovingChunk, ParameterUpdate
from infinity.errors import InfinityError
from infinity.formats.encodings import split

_ELEMENTS = BLOCK + 100
"""Elements of the parameter of each kind: more than one tile, and a last tile that is not full."""

_HYPERS: dict[str, Hyper] = {
    "kAdamW": AdamW(step=1),
    "kAdamWSmallBeta": AdamW(betas=(0.3, 0.4), step=1),
    "kAdam": Adam(weight_decay=0.1, step=1),
    "kAdamSmallBeta": Adam(betas=(0.3, 0.4), weight_decay=0.1, step=1),
    "kSgd": SGD(first_step=True),
    "kSgdMomentum": SGD(momentum=0.9, first_step=True),
    "kAdagrad": Adagrad(step=1),
    "kLion": Lion(),
}
"""The name of a rule -> hyper-parameters whose update has this rule."""


def refusal(device: torch.device, kinds: Iterable[UpdateKind]) -> str | None:
    """Load the kernels for updates of `kinds` on `device`, and do one update of each kind with each. Returns
    None, or the reason why the device cannot be used for updates, as a sentence.
    """
    wanted = sorted(kinds)
    given = [_arrays(kind) for kind in wanted]
    try:
        kernels = Kernels(device, wanted)
        found = _on_device(device, kernels, wanted, given) + _moving(device, kernels, wanted, given)
    except InfinityError as error:
        return error.cause
    with ThreadPool(threads=1) as pool:
        for kind, arrays in zip(wanted, given, strict=True):
            segments = [Segment(0, _ELEMENTS)]
            pool.run(Update(**arrays, segments=segments, hypers=[_HYPERS[RULES[kind.rule]]]))
    for kind, arrays, results in zip(wanted * 2, given * 2, found, strict=True):
        wrong = [name for name, each in arrays.items() if not _same_bits(each, results[name])]
        if wrong:
            return f"The device's kernel computes other bits than the CPU: {wrong[0]} of {kind}."
    return None


def kernels_that_measure(device: torch.device) -> Kernels | None:
    """Load the kernels that sum the squares of gradients. Returns None if the device cannot use them, or they
    compute other bits than the CPU, which then sums the squares.
    """
    try:
        kernels = Kernels(device, ())
        with ThreadPool(threads=1) as pool:
            for dtype in GRAD_DTYPES:
                gradient = ((torch.arange(_ELEMENTS, device="cpu") % 97 - 48) / 64).to(dtype)
                there, whole = gradient.to(device), [Segment(0, _ELEMENTS)]
                sums = torch.empty(-(-_ELEMENTS // BLOCK), dtype=torch.float64, device=device)
                kernels.launch(
                    "infinity_fresh_squares", len(sums), fresh_squares_launch(there, sums).tobytes()
                )
                expected = pool.run(Gradient(grad=gradient, squares=True, segments=whole)).blocks[0]
                if sums.tolist() != expected.tolist():
                    return None
    except InfinityError:
        return None
    return kernels


def _on_device(
    device: torch.device, kernels: Kernels, kinds: list[UpdateKind], given: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Update copies of the arrays on the device, and return the results in RAM."""
    there = [{name: each.to(device, copy=True) for name, each in arrays.items()} for arrays in given]
    segments = [Segment(0, _ELEMENTS)]
    chunks = [
        DeviceChunk(Update(**arrays, segments=segments, hypers=[]), [number])
        for number, arrays in enumerate(there)
    ]
    size = WorkspaceSize(pieces=len(chunks), blocks=len(chunks) * -(-_ELEMENTS // BLOCK))
    memory = torch.empty(size.nbytes, dtype=torch.uint8, device=device)
    updates = DeviceUpdates(chunks, memory, kernels)
    hypers: dict[Hashable, ParameterUpdate] = {
        number: ParameterUpdate(_HYPERS[RULES[kind.rule]], 0) for number, kind in enumerate(kinds)
    }
    updates.update(hypers, 1.0)
    return [{name: each.cpu() for name, each in arrays.items()} for arrays in there]


def _moving(
    device: torch.device, kernels: Kernels, kinds: list[UpdateKind], given: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Do what `_on_device` does by the kernel for chunks whose arrays lie elsewhere in each step."""
    there = [{name: each.to(device, copy=True) for name, each in arrays.items()} for arrays in given]
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    for kind, arrays in zip(kinds, there, strict=True):
        chunk = MovingChunk(Update(**arrays, segments=[Segment(0, _ELEMENTS)], hypers=[]), nothing)
        update = ParameterUpdate(_HYPERS[RULES[kind.rule]], 0)
        chunk.update(kernels, nothing, [arrays["grad"].data_ptr()], [update], 1.0)
    return [{name: each.cpu() for name, each in arrays.items()} for arrays in there]


def _arrays(kind: UpdateKind) -> dict[str, Any]:
    """Arrays in RAM for an update of a kind. Their moments are zero."""
    numbers = torch.arange(_ELEMENTS, dtype=torch.float32, device="cpu")
    master = (numbers % 89 - 44) / 61
    made = {"grad": ((numbers % 97 - 48) / 64).to(_dtype(GRAD_DTYPES, kind.gradient)), "parameter": master}
    if kind.parameter == ParameterFormat.SPLIT.value:
        made["parameter"], made["remainder"] = split(master)
    elif kind.parameter == ParameterFormat.PLAIN_F16.value:
        made["copy"] = master.to(torch.float16)
    moments = _dtype(MOMENT_FORMATS, kind.moments)
    for order in ("first", "second"):
        made[f"{order}_moment"] = torch.zeros(_ELEMENTS, dtype=moments, device="cpu")
        if moments == torch.uint8:
            blocks = -(-_ELEMENTS // CODE_BLOCK)
            made[f"{order}_scale"] = torch.zeros(blocks, dtype=torch.uint8, device="cpu")
    return made


def _dtype(formats: Mapping[torch.dtype, Dtype | MomentFormat], number: int) -> torch.dtype:
    """The dtype of the format with this number."""
    return next(dtype for dtype, each in formats.items() if each.value == number)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
