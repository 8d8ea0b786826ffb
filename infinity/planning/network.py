"""Network: bytes that ranks receive from each other in a step, and the seconds of a link between nodes. Pure.

With N ranks each has 1/N of everything that is divided, so it receives (N-1)/N of it. Of the N-1 others N-K
run on other nodes, if each node has K ranks. What these have of parameters comes once for the whole node, if
the node keeps it (`Plan.node_cache_bytes`), and else for each of its ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from infinity.config import format_size
from infinity.errors import ConfigError
from infinity.planning.node_cache import wanted_bytes
from infinity.planning.placement import Kind
from infinity.planning.plan import Plan
from infinity.planning.stage_table import bytes_without_padding

_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt])(?:bit(?:/s)?|bps)", re.IGNORECASE)
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@dataclass(frozen=True)
class Network:
    """What travels in a step, at most: as if no page stayed where it was brought."""

    parameters: int
    """Bytes of parameters that a rank receives."""
    gradients: int
    """Bytes of gradients that a rank receives."""
    between_nodes: int
    """Bytes that all ranks of a node receive from other nodes."""
    link: float | None
    """Bytes per second of the link between nodes, in each direction; None if it is not known."""
    measured: bool = False
    """Whether `infinity tune` has measured the link; else it was given."""

    @property
    def seconds(self) -> float | None:
        """Seconds that the link between nodes takes for a step by itself; None if its rate is not known."""
        return None if self.link is None else self.between_nodes / self.link

    @property
    def text(self) -> str:
        """A line for people."""
        parameters, gradients = format_size(self.parameters), format_size(self.gradients)
        line = f"network: a rank receives {parameters} of parameters and {gradients} of gradients a step"
        if self.between_nodes:
            line += f", a node {format_size(self.between_nodes)} from other nodes"
        if self.between_nodes and self.link is None:
            line += (
                ": unknown seconds on the link, which was neither given (--link) nor measured (infinity tune)"
            )
        elif self.between_nodes:
            line += f": {self.seconds:.2f} s on the link"
        if self.between_nodes and self.measured:
            line += f" of {rate_text(self.link or 0.0)}, as measured"
        return line


def network(plan: Plan, link: float | None, micro_batches: int, *, measured: bool = False) -> Network:
    """The traffic of a step. plan: of one of several ranks, on the nodes of `plan.share`. link: bytes per
    second between two nodes. micro_batches: of a rank in a step. measured: as in Network.

    Stage 3 brings parameters for the forward and for the backward of each micro-batch, and takes its
    gradients to their owners. Stage 2 brings updated parameters once a step. Stages 0 and 1 take sums of
    gradients to their owners once a step; stage 0 brings the outcome back, stage 1 the updated parameters.
    """
    share = plan.share
    whole = bytes_without_padding(plan)
    values, summed = whole[Kind.PARAMETER], whole[Kind.GRADIENT]
    trained = sum(
        each.numel * each.dtype.itemsize
        for unit in plan.layout.units
        for each in unit.parameters
        if plan.rule is not None and each.trainable
    )
    parameters, gradients = {
        3: (2 * micro_batches * values, micro_batches * trained),
        2: (trained, micro_batches * trained),
        1: (trained, summed),
        0: (0, 2 * summed),
    }[share.stage]
    received = [nbytes * (share.ranks - 1) // share.ranks for nbytes in (parameters, gradients)]
    here = share.on_node or share.ranks
    crossing = here * parameters
    if plan.node_cache_bytes:
        crossing = round(_crossings(plan, micro_batches) * (values if share.stage == 3 else trained))
    crossing += here * gradients
    return Network(received[0], received[1], crossing * (share.ranks - here) // share.ranks, link, measured)


def _crossings(plan: Plan, micro_batches: int) -> float:
    """How often parameters come to a node in a step. What the node has no room to keep comes for each forward
    and each backward, though once for all of its ranks.
    """
    if plan.share.stage < 3:
        return 1.0
    kept = min(1.0, plan.node_cache_bytes / wanted_bytes(plan))
    return 1 + (2 * micro_batches - 1) * (1 - kept)


def rate_text(rate: float) -> str:
    """A rate in bytes per second as text that `link_rate` takes, such as "9.41Gbit"."""
    bits = 8 * rate
    return f"{bits / 1e9:.2f}Gbit" if bits >= 1e9 else f"{bits / 1e6:.2f}Mbit"


def link_rate(text: str) -> float:
    """The bytes per second of a rate such as "25Gbit/s" or "100Mbit". Raises ConfigError."""
    match = _RATE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(f"--link is {text!r}, which is no rate.", 'Give one such as "25Gbit" or "100Mbit".')
    return float(match[1]) * _BITS[match[2].lower()] / 8
