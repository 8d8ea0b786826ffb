"""Machine rates: the speed of disks, memory, link and arithmetic, measured once and then cached."""

from __future__ import annotations

import functools
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from infinity.cpu_adam.pool import stream_speed
from infinity.system.cache import JsonFile
from infinity.tiers.probes import disk_speed, link_speed
from infinity.tiers.trial_file import MODES

_DISK_BYTES = 1 << 30
"""The most bytes that the probes of all disks write together. Small files give wrong rates: on a virtual
disk, 32 MiB were written at burst speed, and a file that is read several times may come from a cache in the
disk.
"""
_DISK_SHARE, _DISK_LEAST = 8, 128 << 20
"""The probe of a disk writes at most its budget divided by _DISK_SHARE, or _DISK_LEAST bytes if that is more,
and never more than the budget.
"""
_FILL_SECONDS = 1.0
"""Approximate seconds for writing the test files of all disks, before any rate is measured. On a slow disk
the file stays shorter.
"""
_DISK_SECONDS = 0.6
"""Approximate seconds in total for measuring reads, writes and a mix of both on all disks."""
_DISK_EXPIRES = 300.0
"""Seconds for which a disk's rates are valid: other processes use the disk too, and clouds limit its rate."""
_NETWORK = "network"
_LINK_BYTES = 64 << 20
_MATRIX = 1024
_ROUNDS = 5
_ROUND_SECONDS = 0.04
"""A rate of operations of torch is the median of _ROUNDS rounds, each of about _ROUND_SECONDS seconds."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The dtypes in which matrix products are measured."""


@dataclass(frozen=True, kw_only=True)
class MachineRates:
    """The rates of a machine's disks, memory, link and device, in bytes per second except `flops`."""

    disk: Mapping[str, float] | None = None
    """The rates "read", "write" and "mixed" (half of the bytes each) of all directories of the NVMe tier
    together; None without an NVMe tier.
    """
    host_stream: float
    """Bytes per second that the threads of the CPU's updates read and write in host RAM, in place."""
    link: float | None = None
    """Bytes per second of copies between host RAM and the device, in one direction at a time. None if both
    are the same RAM.
    """
    network: float | None = None
    """Bytes per second that a node receives from other nodes; None if it is not known."""
    flops: Mapping[torch.dtype, float]
    """Floating-point operations per second of matrix products, by the dtype of the operands. Not empty."""
    compute_memory: float
    """Bytes per second that torch's other operations read and write in the memory of the device."""

    def flops_in(self, dtype: torch.dtype) -> float:
        """`flops` of `dtype`, or of the slowest dtype if there is no figure for `dtype`."""
        return self.flops.get(dtype, min(self.flops.values()))


def measure_rates(
    nvme: Mapping[str, int],
    device: torch.device,
    compute_dtype: torch.dtype,
    others: Collection[torch.dtype] = (),
    *,
    anew: bool = False,
    clock: Callable[[], float] = time.time,
) -> MachineRates:
    """Return the rates of this machine from the cache. Missing rates are measured, in about 2 s, and cached.

    nvme: for each directory, its budget in bytes. others: further dtypes in which to measure matrix products;
    those that `DTYPES` lacks are ignored. anew: whether to measure arithmetic even if the cache has its
    rates. clock: returns the present time in seconds. A disk's rates are valid for five minutes, all others
    until the cache file is removed. The rates of several disks are added. Raises StorageError for a directory
    that cannot be written.
    """
    figures = _Cache(clock)
    disks = [
        figures.get(_disk_name(path), functools.partial(_disk, path, limit, len(nvme)), expires=_DISK_EXPIRES)
        for path, limit in nvme.items()
    ]
    host = figures.get("stream", lambda: {"rate": stream_speed(repeats=2)})
    where = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    if device.type == "cpu":
        where += f" {torch.get_num_threads()} threads"

    def arithmetic(what: str, probe: Callable[..., dict[str, float]], dtype: torch.dtype) -> float:
        measured = functools.partial(probe, device, dtype)
        return figures.get(f"{what} {where} {dtype}", measured, expires=0.0 if anew else None)["rate"]

    flops = {
        dtype: arithmetic("flops", _flops, dtype)
        for dtype in dict.fromkeys((compute_dtype, *others))
        if dtype in DTYPES.values()
    }
    memory = arithmetic("memory", _compute_memory, compute_dtype)
    link = None
    if device.type == "cuda":
        link = figures.get(_link_name(device), functools.partial(_link, device))["rate"]
    figures.save()
    return MachineRates(
        disk={mode: sum(disk[mode] for disk in disks) for mode in MODES} if disks else None,
        host_stream=host["rate"],
        link=link,
        network=network_rate(),
        flops=flops,
        compute_memory=memory,
    )


def keep(
    disks: Mapping[str, Mapping[str, float]],
    *,
    stream: float,
    link: float | None = None,
    clock: Callable[[], float] = time.time,
) -> None:
    """Store rates that `infinity tune` has measured, in bytes per second, in the cache of `measure_rates`.

    disks: for each directory, the rates "read", "write" and "mixed". stream: the rate of host RAM. link: the
    rate of copies between host RAM and the current CUDA device; None without one. If the cache has a faster
    stream or link rate than the new one, it keeps that rate: the hardware does not change, and other
    processes can only slow a measurement down.
    """
    figures = _Cache(clock)
    for path, rates in disks.items():
        figures.put(_disk_name(path), rates)
    lasting = {"stream": stream}
    if link is not None:
        lasting[_link_name(torch.device("cuda"))] = link
    for what, rate in lasting.items():
        known = figures.get(what, functools.partial(dict, rate=rate))["rate"]
        figures.put(what, {"rate": max(rate, known)})
    figures.save()


def keep_network(rate: float, *, clock: Callable[[], float] = time.time) -> bool:
    """Store the bytes per second that a node receives from other nodes, which `infinity tune` has measured.
    Returns whether the file could be written.
    """
    figures = _Cache(clock)
    figures.put(_NETWORK, {"rate": rate})
    return figures.save()


def network_rate() -> float | None:
    """The last rate, in bytes per second, that `keep_network` has stored on this host; None without one."""
    return _Cache(time.time).get(_NETWORK, dict).get("rate")


def _disk_name(path: str) -> str:
    return f"disk {os.path.realpath(path)}"


def _link_name(device: torch.device) -> str:
    return f"link {torch.cuda.get_device_name(device)}"


class _Cache:
    """The measured rates of this host in the user's cache, by name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._file = JsonFile[dict[str, dict[str, float]]]("machine_rates.json", _figures, {})
        self._figures = self._file.content
        self._changed = False

    def get(
        self, what: str, probe: Callable[[], dict[str, float]], *, expires: float | None = None
    ) -> dict[str, float]:
        """Return the rates named `what`. If there are none, or if they are at least `expires` seconds old,
        `probe` measures them now.
        """
        found = self._figures.get(_key(what))
        if found is None or (expires is not None and self._age(found) >= expires):
            found = self.put(what, probe())
        return found

    def put(self, what: str, figures: Mapping[str, float]) -> dict[str, float]:
        """Store rates, adding the present time as "at", and return them."""
        self._changed = True
        found = self._figures[_key(what)] = {**figures, "at": self._clock()}
        return found

    def save(self) -> bool:
        """Write the file, without expired rates of disks, if rates were stored. Returns False on failure."""
        if not self._changed:
            return True
        disk = _key(_disk_name(os.sep))
        return self._file.save(
            {
                key: figures
                for key, figures in self._figures.items()
                if not key.startswith(disk) or self._age(figures) < _DISK_EXPIRES
            }
        )

    def _age(self, figures: Mapping[str, float]) -> float:
        """Seconds since the rates were measured; infinity if the time is unknown or lies in the future."""
        age = self._clock() - figures.get("at", -math.inf)
        return age if age >= 0 else math.inf


def _key(what: str) -> str:
    return f"{platform.node()} {what}"  # several machines may share a home directory


def _figures(found: Any) -> dict[str, dict[str, float]]:
    return {
        key: rates
        for key, rates in found.items()
        if isinstance(rates, dict) and all(isinstance(rate, float) and rate > 0 for rate in rates.values())
    }


def _disk(path: str, limit: int, paths: int) -> dict[str, float]:
    span = min(_DISK_BYTES, max(_DISK_LEAST, limit // _DISK_SHARE))
    nbytes = min(limit, span // paths) // 4096 * 4096
    speed = disk_speed(
        path,
        nbytes=max(4096, nbytes),
        seconds=_DISK_SECONDS / 3 / paths,
        fill_seconds=_FILL_SECONDS / paths,
    )
    return {"read": speed.read, "write": speed.write, "mixed": speed.mixed}


def _link(device: torch.device) -> dict[str, float]:
    memory = torch.empty(_LINK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    speed = link_speed(device, memory, repeats=3)
    return {"rate": min(speed.to_device, speed.to_host)}


def _flops(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    left = torch.ones(_MATRIX, _MATRIX, dtype=dtype, device=device)
    return {"rate": 2 * _MATRIX**3 / _seconds(lambda: left @ left, device)}


def _compute_memory(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Measure the bytes per second that a softmax reads and writes. On a CPU it is about as fast as norms and
    activation functions, and slower than a copy.
    """
    values = torch.ones(4 * _MATRIX, _MATRIX, dtype=dtype, device=device)
    return {"rate": 2 * values.nbytes / _seconds(lambda: values.softmax(-1), device)}


def multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrix products of `dtype` have instructions on `device`; on CUDA always True.

    Without them torch multiplies element by element: 0.7 GFLOP/s in bf16 and 105 in fp32 were measured on two
    cores with AVX2.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    found = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)  # no public function tells
    return found is None or bool(found())


def _seconds(run: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Measure the seconds of one call of `run`: the median over rounds of many calls each."""

    def seconds(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            result = run()
        result[0, 0].item()  # waits for the device
        return time.perf_counter() - start

    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        seconds(1)
        once = seconds(1)
        if once > _ROUNDS * _ROUND_SECONDS:  # as products in fp16 are on some CPUs
            return once
        times = max(1, int(_ROUND_SECONDS / once))
        return statistics.median(seconds(times) for _ in range(_ROUNDS)) / times
