"""Limits: the least seconds that a training step can take on this machine.

The speeds of the machine are measured during the run whose steps are compared with the limit.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from peers.fio import Fio

from infinity.cpu_adam.stream_speed import stream_speed
from infinity.lm.decoder import DecoderConfig
from infinity.system import machine
from infinity.tiers import probes

COMPUTE_BYTES = 4
"""Bytes for each parameter element in a model that is wholly in memory: bf16 parameter and bf16 gradient."""


@dataclass
class Speeds:
    """Measures speeds of this machine, in bytes per second.

    Each list has one value for each measurement during a run. mixed: the disk under `directory`, read and
    written at the same time by infinity's I/O engine. fio_mixed: the same by fio. stream: memory, as the
    threads of the CPU update read and write it. link: copies between RAM and the GPU, in the slower
    direction.
    """

    directory: Path
    device: str
    quick: bool
    fio: Fio | None = None
    """The runner with which fio measures the disk as well; None if only infinity's I/O engine does."""
    mixed: list[float] = field(default_factory=list)
    stream: list[float] = field(default_factory=list)
    link: list[float] = field(default_factory=list)
    fio_mixed: list[float] = field(default_factory=list)

    def measure(self) -> None:
        """Measure all speeds, and append them to the lists. No other process may be at work meanwhile."""
        nbytes, seconds = (16 << 20, 0.02) if self.quick else (128 << 20, 0.5)
        self.mixed.append(probes.disk_speed(self.directory, nbytes=nbytes, seconds=seconds).mixed)
        if self.fio is not None:
            self.fio_mixed.append(self.fio.mixed())
        self.stream.append(stream_speed(repeats=1 if self.quick else 3))
        if self.device == "cuda":
            pinned = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
            speed = probes.link_speed(torch.device("cuda"), pinned)
            self.link.append(min(speed.to_device, speed.to_host))

    def figures(self) -> dict[str, list[float]]:
        """All measured speeds by name, in bytes per second."""
        return {"mixed": self.mixed, "stream": self.stream, "link": self.link, "fio_mixed": self.fio_mixed}


def compute_bytes(decoder: DecoderConfig) -> int:
    """Bytes of free memory that `compute_seconds` needs to measure a decoder with all its layers."""
    return 2 * COMPUTE_BYTES * decoder.parameters


def compute_seconds(decoder: DecoderConfig, device: str, measure: Callable[[DecoderConfig], float]) -> float:
    """Measure the seconds of a step's forward and backward with the whole decoder in memory.

    measure: function that returns these seconds for a decoder that fits in memory. A decoder that takes more
    than half of the memory is measured with fewer layers, and again with half as many layers. Since all
    layers are alike, the difference gives the seconds of a layer, by which the time is extended.
    """
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else machine.memory().usable
    layers = decoder.layers
    while layers > 2 and compute_bytes(replace(decoder, layers=layers)) > free:
        layers //= 2
    seconds = measure(replace(decoder, layers=layers))
    if layers == decoder.layers:
        return seconds
    fewer = layers // 2
    a_layer = (seconds - measure(replace(decoder, layers=fewer))) / (layers - fewer)
    return seconds + a_layer * (decoder.layers - layers)


def limit_of(
    turns: list[dict[str, Any]], speeds: Speeds, compute: list[float], device: str
) -> dict[str, Any]:
    """The limit of a step: the least seconds it can take, and the seconds of each resource.

    turns: replies of a contender of infinity, one for each turn. compute: measured seconds of forward and
    backward in memory. The bytes to and from the disk are those that the runtime counted. The bytes that
    updates touch, and those between RAM and GPU, are those of the plan. Speeds are medians over the run. If
    fio measured the disk, "fio_disk" has the disk's seconds at fio's speed.
    """
    traffic = turns[-1]["facts"]["plan"]["traffic"]
    disk_bytes = statistics.median(turn["facts"]["last_step"]["disk_bytes"] for turn in turns)
    phases = (traffic["forward"], traffic["backward"], traffic["update"])
    parts = {
        "compute": statistics.median(compute),
        "update": traffic["update"]["host"] / statistics.median(speeds.stream),
        "disk": disk_bytes / statistics.median(speeds.mixed),
    }
    if device == "cuda":
        link = statistics.median(speeds.link)
        parts["link"] = max(sum(phase[way] for phase in phases) for way in ("to_device", "to_host")) / link
        seconds = max(parts.values())
    else:
        seconds = max(parts["compute"] + parts["update"], parts["disk"])
    found = {"seconds": seconds, **parts, "disk_bytes": disk_bytes}
    if speeds.fio_mixed:
        found["fio_disk"] = disk_bytes / statistics.median(speeds.fio_mixed)
    return found
