"""Network: the bytes that one of several ranks receives in a step, and those that it keeps. Pure.

With N ranks, a rank keeps 1/N of whatever is divided, and receives the other (N-1)/N. With K ranks on each
node, N-K ranks run on other nodes. Their parameters come to a node once for all of its ranks if it has a
cache for them (`Plan.node_cache_bytes`), and otherwise once for each of its ranks. If the cache has room for
all of them, each parameter crosses the link between nodes once a step and node. Otherwise the parameters that
were used longest ago give way, and are brought again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from infinity.config import format_size
from infinity.errors import ConfigError
from infinity.formats.optimizer_rules import StateFormat
from infinity.layout.shards import Share, part_bytes, spans
from infinity.planning.placement import Kind
from infinity.planning.plan_text import render
from infinity.planning.predict import PhaseBytes, missing_share

if TYPE_CHECKING:
    from infinity.planning.plan import Plan

_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt])(?:bit(?:/s)?|bps)", re.IGNORECASE)
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@dataclass(frozen=True)
class Network:
    """An upper bound on the bytes that travel in a step, and the rate of the link between nodes."""

    parameters: int
    """Bytes of parameters that a rank receives."""
    gradients: int
    """Bytes of gradients that a rank receives."""
    between_nodes: int
    """Bytes that all ranks of a node receive from other nodes."""
    gradients_between: int
    """Those of them that are gradients."""
    link: float | None
    """Bytes per second of the link between nodes, in each direction; None if it is not known."""
    measured: bool = False
    """Whether `infinity tune` has measured the link; else it was given."""

    @property
    def brought(self) -> tuple[PhaseBytes, PhaseBytes]:
        """(bytes that come in a step for parameters, for gradients)."""
        between = self.between_nodes - self.gradients_between
        parameters = PhaseBytes(received=self.parameters, crossing=between)
        return parameters, PhaseBytes(received=self.gradients, crossing=self.gradients_between)

    @property
    def seconds(self) -> float | None:
        """Seconds in which a step's bytes cross the link between nodes; None if its rate is not known."""
        return None if self.link is None else self.between_nodes / self.link

    @property
    def text(self) -> str:
        """The line about the network that is printed below a plan."""
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
    """Count the bytes that travel in a step. plan: the plan of one of several ranks. micro_batches: number
    that each rank has in a step. link, measured: fields of Network.

    Stage 3 brings parameters once a step, and those that leave the pool of resident pages for each further
    forward and backward, and takes the gradients of each micro-batch to their owners. Stage 2 brings updated
    parameters once a step. Stages 0 and 1 take sums of gradients to their owners once a step. Stage 0 then
    brings the sums of all ranks back, and stage 1 the updated parameters.
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
        3: (math.ceil(values * _times(missing_share(plan), micro_batches)), micro_batches * trained),
        2: (trained, micro_batches * trained),
        1: (trained, summed),
        0: (0, 2 * summed),
    }[share.stage]
    received = [nbytes * (share.ranks - 1) // share.ranks for nbytes in (parameters, gradients)]
    here = share.on_node or share.ranks
    crossing = here * parameters
    if plan.node_cache_bytes:
        crossing = round(_crossings(plan, micro_batches) * (values if share.stage == 3 else trained))
    sums = here * gradients
    between = [nbytes * (share.ranks - here) // share.ranks for nbytes in (crossing + sums, sums)]
    return Network(received[0], received[1], between[0], between[1], link, measured)


def _crossings(plan: Plan, micro_batches: int) -> float:
    """How often a parameter of another node comes to this node in a step, on average: once if the node's
    cache keeps it, otherwise for each forward and each backward.
    """
    if plan.share.stage < 3:
        return 1.0
    kept = min(1.0, plan.node_cache_bytes / plan.relayed_bytes)
    return _times(min(missing_share(plan), 1 - kept), micro_batches)


def _times(missing: float, micro_batches: int) -> float:
    """How often a parameter comes in a step, on average, if `missing` of all leave after each use."""
    return 1 + (2 * micro_batches - 1) * missing


def messages(plan: Plan, micro_batches: int = 1, *, windows: bool = False) -> float:
    """Count the messages that a rank sends in a step at stage 3, as a mean over ranks, without those of
    agreements, less than two for each, and of the ends of backwards, a few for each other rank.

    What a rank owns of a page comes by a request and an answer, or as many as its blocks need. Each gradient
    is sent to each rank that owns a range of it.
    windows: whether ranks of a node read each other's RAM. Then parameters take no message there, if they are
    at home in RAM; those of other nodes come once, and each other rank of the node asks the relay for a
    page, unless it is there already. A gradient takes an offer and an answer.
    """
    share, here = plan.share, plan.share.on_node or plan.share.ranks
    most = plan.exchange_block_bytes
    if not plan.unified:
        most = min(most, plan.transit_buffer_bytes)
    asked = offers = 0
    for unit in plan.layout.units:
        own = [span.nbytes for span in spans(unit, share.ranks) if span.owner == share.rank]
        asked += share.ranks * sum(math.ceil(each / most) for each in ([sum(own)] if plan.unified else own))
        for index, parameter in enumerate(unit.parameters):
            offers += len(list(unit.owned(index))) * parameter.trainable
    others = (share.ranks - here) / here if windows else share.ranks - 1
    times = _times(missing_share(plan), micro_batches)
    readers = here - 1 if windows else 0
    gradients = micro_batches * (readers * 2 + share.ranks - 1 - readers) * offers
    relays = share.ranks * (here - 1) * len(plan.layout.units) * bool(windows and plan.node_cache_bytes)
    return (2 * times * (others * asked + relays) + gradients) / share.ranks


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


@dataclass(frozen=True)
class StageBytes:
    """The bytes of all homes of one kind of pages on one rank, at one stage of ZeRO."""

    stage: int
    kind: Kind
    planned: int
    """Bytes with padding and gaps, as the plan counts them."""
    formula: float
    """Bytes without padding and gaps, by figure 1 of ZeRO (Rajbhandari et al., 2020), with the dtypes of the
    plan. Frozen parameters have neither gradients nor states.
    """


def bytes_by_stage(plan: Plan) -> tuple[StageBytes, ...]:
    """The bytes of each kind at each stage, in order, for the plan's layout and number of ranks."""
    elements, here, ranks = bytes_without_padding(plan), _kept_whole(plan.share), plan.share.ranks
    part = {kind: sum(plan.page_sizes[kind]) // (ranks if here[kind] else 1) for kind in Kind}
    part[Kind.PARAMETER] = sum(part_bytes(unit, ranks) for unit in plan.layout.units)
    found = []
    for stage in range(4):
        whole = _kept_whole(replace(plan.share, stage=stage))
        for kind in Kind:
            times = ranks if whole[kind] else 1
            found.append(StageBytes(stage, kind, part[kind] * times, elements[kind] * times / ranks))
    return tuple(found)


def _kept_whole(share: Share) -> dict[Kind, bool]:
    """Whether a rank keeps whole pages of each kind."""
    return {
        Kind.PARAMETER: share.whole_parameters,
        Kind.GRADIENT: share.whole_gradients,
        Kind.OPTIMIZER: share.whole_states,
    }


def text_by_stage(found: Sequence[StageBytes]) -> str:
    """The table of `bytes_by_stage` as text."""
    titles = {Kind.PARAMETER: "params", Kind.GRADIENT: "gradients", Kind.OPTIMIZER: "optimizer"}
    rows: dict[int, dict[str, Any]] = {}
    for each in found:
        row = rows.setdefault(each.stage, {"stage": str(each.stage)})
        row[titles[each.kind]] = each.planned
        row[f"{titles[each.kind]} (ZeRO)"] = round(each.formula)
    for stage, row in rows.items():
        row["sum"] = sum(each.planned for each in found if each.stage == stage)
    return render(list(rows.values()))


def bytes_without_padding(plan: Plan) -> dict[Kind, int]:
    """The bytes of each kind that all parameters of the model take, without padding and gaps."""
    found = dict.fromkeys(Kind, 0)
    for unit in plan.layout.units:
        for parameter in unit.parameters:
            found[Kind.PARAMETER] += parameter.numel * parameter.dtype.itemsize
            if plan.rule is None or not parameter.trainable:
                continue
            found[Kind.GRADIENT] += parameter.numel * plan.gradient_dtype(parameter.dtype).itemsize
            arrays = plan.rule.arrays(parameter.dtype)
            found[Kind.OPTIMIZER] += sum(StateFormat(arrays, parameter.numel).sizes)
    return found
