"""Specs: descriptions of contenders, parsed from the command-line options `--ours` and `--peer`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from peers.budgets import WORDS

STATES = ("fp32", "bf16", "int8")
UPDATES = ("lazy", "eager", "speculative", "sync")
PEERS = {
    "deepspeed": ("deepspeed", ("nvme", "cpu", "cpu3")),
    "torch": ("plain", ("fused", "plain")),
    "fsdp2": ("fsdp2", ("cpu",)),
}
"""For each peer: the name of its file in peers/, and its modes, with the default mode first."""

OURS_HELP = f"""a contender of infinity, as a list with commas: host=SIZE, device=SIZE, nvme=SIZE|none,
states={"|".join(STATES)}, update={"|".join(UPDATES)} (eager only with --clip 0).
In place of host=, the list may begin with {", ".join(WORDS)}: the part of the pages in RAM. Repeatable"""
PEER_HELP = "one of " + ", ".join(
    f"{name}:{mode}" if len(modes) > 1 else name for name, (_, modes) in PEERS.items() for mode in modes
)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A contender: its name in tables, and the settings that its process gets."""

    name: str
    contender: str
    """Name of the contender's file in peers/, without its suffix."""
    mode: str
    device: str | None = None
    host: str | None = None
    nvme: str | None = None
    """NVMe budget: a size, "none" for no NVMe, or None for as much as the model can use."""
    states: str = "fp32"
    update: str = "lazy"

    @property
    def ours(self) -> bool:
        """Whether the contender is infinity and not a peer."""
        return self.contender == "ours"


def ours(text: str) -> Spec:
    """Parse a value of `--ours`, such as "host=1GiB,states=bf16", and return the contender it describes.

    Sizes are not checked here but by infinity.Budget. Raises argparse.ArgumentTypeError, with a message for
    the user, if the text cannot be understood.
    """
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
            raise argparse.ArgumentTypeError(f"{text!r} has {key} twice")
        fields[key] = value
    for key, known in (("states", STATES), ("update", UPDATES)):
        if fields.get(key, known[0]) not in known:
            raise argparse.ArgumentTypeError(f"{key} is one of {', '.join(known)}, not {fields[key]!r}")
    if ("mode" in fields) == ("host" in fields):
        raise argparse.ArgumentTypeError(f"{text!r} needs host=SIZE or one of {', '.join(WORDS)}, not both")
    return Spec(name=f"infinity {text}", contender="ours", **{"mode": "fit"} | fields)


def peer(text: str) -> Spec:
    """Parse a value of `--peer`, such as "deepspeed:nvme", and return the contender it describes.

    Raises argparse.ArgumentTypeError, with a message for the user, for an unknown peer or mode.
    """
    name, _, mode = text.partition(":")
    if name not in PEERS:
        raise argparse.ArgumentTypeError(f"{text!r} is not {PEER_HELP}")
    module, modes = PEERS[name]
    mode = mode or modes[0]
    if mode not in modes:
        raise argparse.ArgumentTypeError(f"{text!r} is not {PEER_HELP}")
    return Spec(name=f"{name}:{mode}" if len(modes) > 1 else name, contender=module, mode=mode)
