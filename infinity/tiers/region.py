"""Regions: ranges of memory that live as long as any tensor or lease uses them, and tensors over their bytes.
A lease is a part of a region that a pool has given to one user until the user releases it.
"""

from __future__ import annotations

import torch
from torch.utils.dlpack import from_dlpack

from infinity import _tiers

_CPU_KIND, _CUDA_KIND = 1, 2
"""DLPack's numbers for the device types kDLCPU and kDLCUDA."""


def adopt(address: int, nbytes: int, device: torch.device, owner: object) -> _tiers.Region:
    """Make a region over memory that other code, such as torch, has allocated.

    address: the address of the first byte. nbytes: bytes of the memory. device: where the memory lies, the
    CPU or a CUDA device with its index. owner: an object that keeps the memory allocated. The region keeps
    this object until the region's last user is gone.
    """
    kind = _CUDA_KIND if device.type == "cuda" else _CPU_KIND
    return _tiers.adopt(address, nbytes, device_kind=kind, device_index=device.index or 0, owner=owner)


def tensor_over(memory: _tiers.Region | _tiers.Lease) -> torch.Tensor:
    """Make a uint8 tensor of shape (nbytes,) over the bytes of a region or a lease.

    As long as the tensor's Storage lives, the region is not freed, and the pool gives the lease's bytes to no
    other lease, even if the lease is released meanwhile. Raises ValueError for a lease that was released
    before.
    """
    with torch.inference_mode(False):  # the tensor may outlive the mode and be saved for backward
        tensor: torch.Tensor = from_dlpack(memory.to_dlpack())
        return tensor
