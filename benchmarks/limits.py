"""What this machine lets a step of training do at best, measured in the run that it is compared with."""

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
"""A parameter and its gradient in bf16: what forward and backward in memory need."""


@dataclass
class Speeds:
    """Bytes per second of the disk under a directory, of the update threads and of the link, over a run."""

    directory: Path
    device: str
    quick: bool
    fio: Fio | None = None
    """Asked each time, too, where it is given."""
    mixed: list[float] = field(default_factory=list)
    stream: list[float] = field(default_factory=list)
    link: list[float] = field(default_factory=list)
    fio_mixed: list[float] = field(default_factory=list)

    def measure(self) -> None:
        """Once more; nobody else may be at work."""
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
        """Everything that was measured, in bytes per second."""
        return {"mixed": self.mixed, "stream": self.stream, "link": self.link, "fio_mixed": self.fio_mixed}


def compute_bytes(decoder: DecoderConfig) -> int:
    """Bytes of memory that there are to be for `compute_seconds` to measure a decoder as it is."""
    return 2 * COMPUTE_BYTES * decoder.parameters


def compute_seconds(decoder: DecoderConfig, device: str, measure: Callable[[DecoderConfig], float]) -> float:
    """Seconds of a step's forward and backward with everything in memory.

    measure: the same of one decoder. One that takes more than half of the memory is measured with as many
    layers as fit, and with half of those, and its time extended by the difference: layers are alike.
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
    """The limit of one step in seconds, of what it is made, and the seconds of its bytes by fio's speed.

    turns: of one of ours. Bytes over the disk are those that the runtime counted; over the other edges, the
    plan's. Speeds are medians over the run.
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
