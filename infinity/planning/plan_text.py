"""Plan text: prints a plan as text or, for notebooks, as HTML; and prints tables."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from infinity.config import format_size
from infinity.planning.machine_rates import multiplies
from infinity.telemetry.stats import html_of
from infinity.tiers import Tier

if TYPE_CHECKING:
    from infinity.planning.plan import Plan


def text_of(plan: Plan) -> str:
    """The table of a plan's tiers, and lines on the step, on the device, on commits and on budgets."""
    return "\n".join([render(plan.rows()), *_notes(plan)])


def html_of_plan(plan: Plan) -> str:
    """The table and lines of `text_of` as HTML."""
    rows = plan.rows()
    return html_of([list(rows[0]), *([cell(each) for each in row.values()] for row in rows)], _notes(plan))


_DIVIDED = ("nothing is", "optimizer states are", "gradients and optimizer states are", "all pages are")
"""The kinds of pages that the ranks divide among them, by stage of ZeRO."""


def _notes(plan: Plan) -> Iterator[str]:
    guess = plan.prediction
    seconds = "predicted unknown s/step"
    if guess is not None:
        what = "measured" if guess.measured else "predicted"
        seconds = f"{what} {guess.text} s/step · limited by {guess.limited_by}"
        if plan.share.on_node and plan.speeds is not None and not (guess.measured or plan.speeds.network):
            seconds += ", without the network, whose rate is unknown (--link, infinity tune)"
    writes = Tier.NVME in plan.budgets or plan.commits
    yield f"{seconds} · {_writes(plan)}" if writes else seconds
    if plan.machine:
        yield f"machine: {plan.machine}"
    if plan.activations_unknown:
        yield f"activations unknown: {plan.activations_unknown}"
    yield from plan.residuals.lines
    share = plan.share
    if share.ranks > 1:
        line = f"rank {share.rank} of {share.ranks} · stage {share.stage}: {_DIVIDED[share.stage]} divided"
        line += f" · {format_size(plan.exchange_bytes)} of working in RAM are exchange buffers"
        cache = f", {format_size(plan.node_cache_bytes)} a cache of other nodes' parameters"
        yield line + cache * bool(plan.node_cache_bytes)
        asked = 0 if plan.mates is None else plan.mates[0] - plan.mates[1]
        if asked:
            yield (
                f"parameters of {asked} ranks of this node come by messages, because this rank cannot read "
                "their RAM: they have another user or container, or INFINITY_WINDOWS=0"
                + ", and each rank asks other nodes for all that they own"
                * bool(share.on_node > 1)
            )
        if plan.unreached:
            yield (
                f"parameters on the devices of {plan.unreached} ranks of this node come through RAM and "
                "messages, because this rank's device cannot reach them; the log says why"
            )
        if plan.messages:
            yield f"messages: {plan.messages}"
    yield from _updates(plan)
    if plan.pinned:
        yield plan.pinned
    if plan.speculative:
        yield from _speculation(plan)
    yield from _limits(plan)
    for facility in plan.off:
        yield f"off: {facility}"
    if plan.commits:
        place = "on nvme" if Tier.NVME in plan.budgets else f"in {plan.slab_directory or 'its directory'}"
        places = "three" if plan.speculative else "two"
        line = f"commits: {format_size(plan.durable_bytes)} {place} ({places} places for each trained byte)"
        written = f" · a commit writes {format_size(plan.commit_bytes)}"
        yield line + written * bool(plan.commit_bytes)
    smallest = " · ".join(f"{tier.value} {format_size(nbytes)}" for tier, nbytes in plan.smallest.items())
    yield f"smallest budgets that would do: {smallest}"


def _updates(plan: Plan) -> Iterator[str]:
    """The lines on when parameters are updated, and on what the device updates."""
    trained = plan.gradient_bytes
    if plan.why:
        yield f"updates: {plan.update}, {plan.why}"
    if plan.updated_on_device:
        part = sum(trained[unit] for unit in plan.updated_on_device) / sum(trained)
        yield f"updates: {part:.0%} on the device"
    elif plan.no_updates_there and plan.rule is not None:
        yield f"updates: all on the CPU. {plan.no_updates_there}"
    if plan.visiting_units:
        part = sum(trained[unit] for unit in plan.visiting_units) / sum(trained)
        guess, share = plan.prediction, f"up to {part:.0%}"
        if guess is not None and guess.visiting_share is not None:
            share = f"{part * guess.visiting_share:.0%} ({'measured' if guess.measured else 'predicted'})"
        room = f"{format_size(plan.visiting_bytes)} of working are for them"
        if plan.staying_bytes:
            room += f", {format_size(plan.staying_bytes)} for gradients that wait"
        yield f"visits: the device updates {share}, whose states come from RAM ({room})"


def _speculation(plan: Plan) -> Iterator[str]:
    """The line on updates that begin before all gradients are known."""
    trained = plan.gradient_bytes
    share = sum(trained[unit] for unit in plan.speculating) / max(1, sum(trained))
    line = f"speculative updates: {share:.0%}"
    if plan.second_bytes:
        units = "" if share == 1 else ", of the units whose gradients come first"
        line += f"{units}, with {format_size(plan.second_bytes)} of RAM beside the homes"
    yield line


def _writes(plan: Plan) -> str:
    """The bytes written to disk in a step and in a day, as text. They include commits if the interval between
    commits is known.
    """
    written = f"writes {format_size(round(plan.bytes_per_step))}/step to disk"
    if plan.bytes_per_day is not None:
        written += f" ({format_size(round(plan.bytes_per_day))}/day)"
    if plan.commit_bytes and plan.commit_interval is None:
        written += f", plus {format_size(plan.commit_bytes)} a commit"
    elif plan.commit_bytes:
        steps = "step" if plan.commit_interval == 1 else f"{plan.commit_interval} steps"
        written += f", with a commit every {steps}"
    return written


def _limits(plan: Plan) -> Iterator[str]:
    """The lines on uses of memory or time that a user might not expect."""
    if plan.rule is not None and plan.rule.average is not None:
        trained = (each for unit in plan.layout.units for each in unit.parameters if each.trainable)
        nbytes = sum(each.numel * torch.float32.itemsize for each in trained)
        yield (
            f"averages of fp32 masters, decay {plan.rule.average:g}: {format_size(nbytes)} of optimizer; "
            "they exclude updates on a device"
        )
    if plan.headroom and plan.device.type == "cpu":
        yield f"working: {format_size(plan.headroom)} are for holes in the heap, beside activations"
    elif plan.headroom:
        own = format_size(plan.headroom)
        yield f"working on the device: {own} are torch's, for cuBLAS and segments that are not full"
    if plan.machine is None and not multiplies(plan.device, plan.precision.compute_dtype):
        yield (
            f"this CPU has no instructions for products in {plan.precision.compute}, which can take 100 "
            'times as long as in fp32: Precision(compute="fp32") takes twice the bytes for activations and '
            "parameters"
        )


_WIDTH = 110


def render(rows: Sequence[Mapping[str, Any]], *, words: bool = False) -> str:
    """A plain text table. rows: at least one mapping from titles of columns to values, all with the same
    keys. words: whether all values are words; columns are then left-aligned, and long values in the last one
    are wrapped.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, name in enumerate(rows[0]):
        right, wraps = bool(index) and not words, words and index == len(rows[0]) - 1
        table.add_column(name, justify="right" if right else "left", no_wrap=not wraps)
    for row in rows:
        table.add_row(*(Text(cell(value)) for value in row.values()))
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, force_terminal=False)
    with console.capture() as text:
        console.print(table)
    return "\n".join(line.rstrip() for line in text.get().splitlines() if line.strip())


def cell(value: object) -> str:
    """The text of a value in a table. An integer is a number of bytes; None is unknown."""
    if value is None:
        return "unknown"
    if isinstance(value, int):
        return format_size(value) if value else "-"
    return str(value)
