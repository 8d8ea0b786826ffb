"""Programs of ranks that train on meshes which are a part of the world; see tests/distributed/test_meshes.py.

Each rank in a mesh returns what `ranked_cases.train` does, for each of CASES; a rank in none returns None.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rank_processes
import torch
import torch.distributed as dist
from ranked_cases import Case, Place, train
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

CASES = (
    Case("mlp", 3, accumulate=2, clip=0.05),
    Case("decoder", 2, home="nvme", compute="bf16"),
    Case("mlp", 1, home="host", clip=0.05),
    Case("mlp", 0),
)


def _trained(mesh: DeviceMesh, name: str = "mesh", cases: Sequence[Case] = CASES) -> list[dict[str, Any]]:
    """Train cases on the mesh. name: of a directory for its pages."""
    torch.set_num_threads(1)
    directory = Path(os.environ["DIRECTORY"]) / name
    directory.mkdir(exist_ok=True)
    (number,) = mesh.get_coordinate() or ()
    place = Place(number, mesh.size(), alone=False)
    return [train(case, place, directory, mesh) for case in cases]


def one_is_left_out() -> Any:
    """Ranks 0 and 2 train, and rank 1 ends at once."""
    mesh = DeviceMesh("cpu", [0, 2])
    return None if dist.get_rank() == 1 else _trained(mesh)


def the_first_is_left_out() -> Any:
    """Ranks 2 and 1 train, in this order. Rank 0 keeps the store, so it waits for them."""
    mesh = DeviceMesh("cpu", [2, 1])
    found = None if dist.get_rank() == 0 else _trained(mesh)
    dist.barrier()
    return found


def two_at_once() -> Any:
    """Ranks 0 and 2 train one model, and ranks 1 and 3 another one, with each rank as its own tensor-parallel
    group. Half of the cases run on a slice of the mesh, half on a flattened mesh of the same ranks.
    """
    every = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    name = f"mesh{every.get_local_rank('tp')}"
    flat = every["dp", "cp"]._flatten("data")
    found = _trained(every["dp"], name, CASES[:2]) + _trained(flat, name, CASES[2:])
    dist.barrier()  # rank 0 keeps the store, in which the other mesh may still have to meet
    return found


if __name__ == "__main__":
    rank_processes.serve(globals())
