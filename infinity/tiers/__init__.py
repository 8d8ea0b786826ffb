"""Tiers: device memory, host RAM, and slab files on NVMe. Each tier lends its bytes in leases."""

from infinity.tiers.arena import HostArena
from infinity.tiers.device import CpuDeviceTier, CudaTier, DeviceTier, UnifiedTier, open_device
from infinity.tiers.nvme import NvmeExtent, NvmeLease, NvmeTier
from infinity.tiers.pool import Lease, Pool, PoolCounters
from infinity.tiers.slab import Slab, remove_slab
from infinity.tiers.striping import SlabRecord, VolumeRecord
from infinity.tiers.tier import PAGE_ALIGNMENT, MemoryTier, Tier, aligned_ram

__all__ = [
    "PAGE_ALIGNMENT",
    "CpuDeviceTier",
    "CudaTier",
    "DeviceTier",
    "HostArena",
    "Lease",
    "MemoryTier",
    "NvmeExtent",
    "NvmeLease",
    "NvmeTier",
    "Pool",
    "PoolCounters",
    "Slab",
    "SlabRecord",
    "Tier",
    "UnifiedTier",
    "VolumeRecord",
    "aligned_ram",
    "open_device",
    "remove_slab",
]
