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

from infinity.cpu_adam.pool import stream_speed
from infinity.lm.decoder import DecoderConfig
from infinity.system import machine
from infinity.tiers import probes

COMPUTE_BYTES = 4
"""Bytes of memory per parameter of a model that is wholly in memory: bf16 parameter plus bf16 gradient."""


@dataclass
class Speeds:
    """Measures speeds of this machine, in bytes per second.

    Each list gets one value from each call of `measure`. mixed: bytes read plus bytes written on the disk
    under `directory`, while infinity's I/O engine does both at the same time.
    stream: bytes of memory read plus written by the threads of the CPU update. link: copies between RAM and
    the GPU, in the slower direction; empty without a GPU. quick: whether to measure briefly, for tests.
    """

    directory: Path
    device: str
    quick: bool
    mixed: list[float] = field(default_factory=list)
    stream: list[float] = field(default_factory=list)
    link: list[float] = field(default_factory=list)

    def measure(self) -> None:
        """Measure each speed once, and append it to its list. No other process may be at work meanwhile."""
        nbytes, seconds = (16 << 20, 0.02) if self.quick else (128 << 20, 0.5)
        self.mixed.append(probes.disk_speed(self.directory, nbytes=nbytes, seconds=seconds).mixed)
        self.stream.append(stream_speed(repeats=1 if self.quick else 3))
        if self.device == "cuda":
            pinned = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
            speed = probes.link_speed(torch.device("cuda"), pinned)
            self.link.append(min(speed.to_device, speed.to_host))

    def figures(self) -> dict[str, list[float]]:
        """Return the lists of measured speeds, in bytes per second, by their names."""
        return {"mixed": self.mixed, "stream": self.stream, "link": self.link}


def compute_bytes(decoder: DecoderConfig) -> int:
    """Return how many bytes of memory must be free so that `compute_seconds` measures the whole decoder.

    These are twice the bytes of the decoder's parameters and gradients. With less memory, `compute_seconds`
    measures decoders with fewer layers.
    """
    return 2 * COMPUTE_BYTES * decoder.parameters


def compute_seconds(decoder: DecoderConfig, device: str, measure: Callable[[DecoderConfig], float]) -> float:
    """Return the seconds of a step's forward plus backward if the whole decoder were in memory.

    measure: function that measures these seconds for a decoder that fits in memory. If the parameters and
    gradients of `decoder` take more than half of the free memory, it is called for a decoder with fewer
    layers, and then for one with half of those layers. All layers are alike, so the difference gives the
    seconds of one layer, and the seconds of the missing layers are added.
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
    """Return the least seconds that a step of infinity can take, and the seconds that each resource needs.

    The result has "seconds", the limit; "compute", "update", "disk" and, on a GPU, "link", the seconds of
    each resource if it never waits; and "disk_bytes", the bytes that a step reads and writes on the disk. On
    a GPU the limit is the largest of the four. On the CPU it is "compute" plus "update", or "disk" if that is
    more.

    turns: the replies (benchmarks/contender.py) of a process that trains with infinity, one for each turn.
    They have the bytes that the runtime read and wrote on the disk, and the plan, which has the bytes that
    updates touch and the bytes between RAM and GPU. speeds: the medians of its lists are used. compute:
    measured seconds of forward plus backward in memory; their median is used. device: "cpu" or "cuda".
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
    return {"seconds": seconds, **parts, "disk_bytes": disk_bytes}
