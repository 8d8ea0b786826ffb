"""Tests that the sums of squares of gradients have the same bits on the device as on the CPU.

One kernel launch must be enough for all parameters together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from cpu_adam_cases import floats
from device_arrays import GRADIENTS, kernels, opened, squares
from homes import each_device

from infinity.cpu_adam import BLOCK, Segment, Update
from infinity.device_update.table import DeviceChunk, fresh_squares_launch


def measured(values: Mapping[str, Sequence[torch.Tensor]], device: str) -> dict[str, list[float]]:
    """Have the device compute the sum of squares of each block of each parameter's gradient.

    values: the pieces of each gradient, by the parameter's name. Each piece is put into a chunk of its own.
    All pieces of a gradient but the last must have a multiple of BLOCK elements. Returns the sums of the
    blocks, in order, by name. Asserts that the device runs one kernel for all gradients together.
    """
    chunks = []
    for name, pieces in values.items():
        index = 0
        for each in pieces:
            work = Update(
                grad=each.to(device),
                parameter=torch.zeros(each.numel(), device=device),
                segments=[Segment(0, each.numel(), index=index)],
                hypers=[],
            )
            chunks.append(DeviceChunk(work, [name]))
            index += each.numel()
    updates, memory = opened(chunks, device)
    updates.measure()
    found = updates.table.squares(memory).tolist()
    assert kernels(device).launched == ["infinity_squares"]
    assert len(found) == sum(-(-each.numel() // BLOCK) for pieces in values.values() for each in pieces)
    return {name: found[updates.table.place(name)] for name in values}


@each_device
@pytest.mark.parametrize("dtype", GRADIENTS)
def test_sums_of_squares_have_the_bits_of_the_cpus(dtype: torch.dtype, device: str) -> None:
    def piece(seed: int, n: int) -> torch.Tensor:
        return floats(seed, n, finite=True).clamp(-1e4, 1e4).to(dtype)

    values = {
        "one": [piece(1, 1)],
        "short": [piece(2, BLOCK - 1)],
        "cut": [piece(3, BLOCK), piece(4, 2 * BLOCK), piece(5, 37)],
        "long": [piece(6, 100 * BLOCK + 33)],
        "wild": [floats(7, 5 * BLOCK).nan_to_num(posinf=3e38, neginf=-3e38).to(dtype).nan_to_num(0, 1, -1)],
    }
    found = measured(values, device)
    for name, pieces in values.items():
        assert found[name] == squares(pieces), name


@each_device
@pytest.mark.parametrize("dtype", GRADIENTS)
def test_sums_of_squares_of_one_gradient_have_the_bits_of_the_cpus(dtype: torch.dtype, device: str) -> None:
    for count in (1, BLOCK - 1, BLOCK, 9 * BLOCK + 37):
        gradient = floats(count, count, finite=True).clamp(-1e4, 1e4).to(dtype)
        there = gradient.to(device)
        sums = torch.full((-(-count // BLOCK) + 1,), torch.nan, dtype=torch.float64, device=device)
        arguments = fresh_squares_launch(there, sums).tobytes()
        kernels(device).launch("infinity_fresh_squares", len(sums) - 1, arguments)
        *found, beyond = sums.tolist()
        assert found == squares([gradient])
        assert np.isnan(beyond), "nothing beyond the last block is written"


@each_device
def test_squares_are_finite_if_and_only_if_the_elements_are(device: str) -> None:
    fine = torch.full((2 * BLOCK,), 3e38)
    values = {"fine": [fine]}
    for bad in (torch.inf, -torch.inf, torch.nan):
        broken = fine.clone()
        broken[BLOCK + 17] = bad
        values[str(bad)] = [broken]
    found = measured(values, device)
    for name, sums in found.items():
        assert np.isfinite(sums).tolist() == [True, name == "fine"], name
