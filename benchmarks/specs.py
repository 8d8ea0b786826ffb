"""Contenders by name: what `--ours` and `--peer` say, read."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from peers.budgets import WORDS

STATES = ("fp32", "bf16", "int8")
UPDATES = ("lazy", "eager", "sync")
PEERS = {
    "deepspeed": ("deepspeed", ("nvme", "cpu", "cpu3")),
    "torch": ("plain", ("fused", "plain")),
    "fsdp2": ("fsdp2", ("cpu",)),
}
"""Peer -> its file in peers/, and its modes, the default first."""

OURS_HELP = f"""a contender of ours, commas between: host=SIZE, device=SIZE, nvme=SIZE|none,
states={"|".join(STATES)}, update={"|".join(UPDATES)} (eager with --clip 0);
or first, instead of host=, one of {", ".join(WORDS)}: as many pages in RAM as that says; repeatable"""
PEER_HELP = "one of " + ", ".join(
    f"{name}:{mode}" if len(modes) > 1 else name for name, (_, modes) in PEERS.items() for mode in modes
)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One contender: what it is called in tables, and what its process is told."""

    name: str
    contender: str
    """Its file in peers/."""
    mode: str
    device: str | None = None
    host: str | None = None
    nvme: str | None = None
    """A size, "none", or None for as much as the model can take."""
    states: str = "fp32"
    update: str = "lazy"

    @property
    def ours(self) -> bool:
        """Not a peer."""
        return self.contender == "ours"


def ours(text: str) -> Spec:
    """Of `--ours`. Raises argparse.ArgumentTypeError; sizes are left to Budget to judge."""
    fields: dict[str, str] = {}
    for number, part in enumerate(text.split(",")):
        key, equals, value = part.partition("=")
        if number == 0 and part in WORDS:
            key, value = "mode", part
        elif not equals or not value or key not in ("host", "device", "nvme", "states", "update"):
            raise argparse.ArgumentTypeError(
                f"{part!r} in {text!r} is none of host=, device=, nvme=, states=, update="
            )
        if key in fields:
            raise argparse.ArgumentTypeError(f"{text!r} says {key} twice")
        fields[key] = value
    for key, known in (("states", STATES), ("update", UPDATES)):
        if fields.get(key, known[0]) not in known:
            raise argparse.ArgumentTypeError(f"{key} is one of {', '.join(known)}, not {fields[key]!r}")
    if ("mode" in fields) == ("host" in fields):
        raise argparse.ArgumentTypeError(f"{text!r} needs host=SIZE or one of {', '.join(WORDS)}, not both")
    return Spec(name=f"infinity {text}", contender="ours", **{"mode": "fit"} | fields)


def peer(text: str) -> Spec:
    """Of `--peer`. Raises argparse.ArgumentTypeError."""
    name, _, mode = text.partition(":")
    if name not in PEERS:
        raise argparse.ArgumentTypeError(f"{text!r} is {PEER_HELP}")
    module, modes = PEERS[name]
    mode = mode or modes[0]
    if mode not in modes:
        raise argparse.ArgumentTypeError(f"{text!r} is {PEER_HELP}")
    return Spec(name=f"{name}:{mode}" if len(modes) > 1 else name, contender=module, mode=mode)
