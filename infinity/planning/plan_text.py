"""Plan text: the text by which a plan is printed, or shown in a notebook, and tables as text."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from infinity.config import format_size
from infinity.planning.machine_rates import multiplies
from infinity.planning.placement import Kind
from infinity.telemetry.stats import html_of
from infinity.tiers import Tier

if TYPE_CHECKING:
    from infinity.planning.plan import Plan


def text_of(plan: Plan) -> str:
    """The table of a plan's tiers, and lines on the step, on the device, on commits and on budgets."""
    return "\n".join([render(plan.rows()), *_notes(plan)])


def html_of_plan(plan: Plan) -> str:
    """The same as `text_of`, as HTML."""
    rows = plan.rows()
    return html_of([list(rows[0]), *([cell(each) for each in row.values()] for row in rows)], _notes(plan))


def _notes(plan: Plan) -> list[str]:
    """The lines below the table."""
    smallest = " · ".join(f"{tier.value} {format_size(nbytes)}" for tier, nbytes in plan.smallest.items())
    return [
        _step(plan),
        *([f"machine: {plan.machine}"] if plan.machine else []),
        *_unknown(plan),
        *_ranks(plan),
        *_share(plan),
        *_averages(plan),
        *_headroom(plan),
        *_slow_products(plan),
        *_commits(plan),
        f"smallest budgets that would do: {smallest}",
    ]


def _step(plan: Plan) -> str:
    """The line with the seconds of a step, what limits it, and what is written to disk."""
    line = "predicted unknown s/step"
    if plan.prediction is not None:
        what = "measured" if plan.prediction.measured else "predicted"
        line = f"{what} {plan.prediction.text} s/step · limited by {plan.prediction.limited_by}"
    return " · ".join([line, *_writes(plan)])


def _unknown(plan: Plan) -> list[str]:
    """The line with the reason why activations are unknown although there were example inputs."""
    return [f"activations unknown: {plan.activations_unknown}"] if plan.activations_unknown else []


def _writes(plan: Plan) -> list[str]:
    """The phrase on what is written to disk in a step and a day. None if the plan has neither an NVMe tier
    nor commits.

    Commits are part of all figures if their interval is known. Otherwise their bytes are told apart.
    """
    if Tier.NVME not in plan.budgets and not plan.commits:
        return []
    written = f"writes {format_size(round(plan.bytes_per_step))}/step to disk"
    if plan.bytes_per_day is not None:
        written += f" ({format_size(round(plan.bytes_per_day))}/day)"
    if plan.commit_bytes and plan.commit_interval is None:
        written += f", plus {format_size(plan.commit_bytes)} a commit"
    elif plan.commit_bytes:
        steps = "step" if plan.commit_interval == 1 else f"{plan.commit_interval} steps"
        written += f", with a commit every {steps}"
    return [written]


_DIVIDED = ("nothing is", "optimizer states are", "gradients and optimizer states are", "all pages are")
"""What the ranks divide among them, by stage of ZeRO."""


def _ranks(plan: Plan) -> list[str]:
    """The line on the rank that the plan is for. No line with one rank."""
    share = plan.share
    if share.ranks == 1:
        return []
    line = f"rank {share.rank} of {share.ranks} · stage {share.stage}: {_DIVIDED[share.stage]} divided"
    line += f" · {format_size(plan.exchange_bytes)} of working in RAM are exchange buffers"
    if plan.node_cache_bytes:
        line += f", {format_size(plan.node_cache_bytes)} a cache of other nodes' parameters"
    return [line]


def _share(plan: Plan) -> list[str]:
    """The line with the share of all gradient bytes that belongs to units that the device updates. No line
    if the device updates no unit.
    """
    if not plan.updated_on_device:
        return []
    trained = plan.page_sizes[Kind.GRADIENT]
    share = sum(trained[unit] for unit in plan.updated_on_device) / sum(trained)
    return [f"updates: {share:.0%} on the device"]


def _averages(plan: Plan) -> list[str]:
    """The line with the bytes of running averages. No line if there are none."""
    if plan.rule is None or plan.rule.average is None:
        return []
    trained = (each for unit in plan.layout.units for each in unit.parameters if each.trainable)
    nbytes = sum(each.numel * torch.float32.itemsize for each in trained)
    return [
        f"averages of fp32 masters, decay {plan.rule.average:g}: {format_size(nbytes)} of optimizer; they "
        "exclude updates on a device"
    ]


def _headroom(plan: Plan) -> list[str]:
    if not plan.headroom:
        return []
    own = format_size(plan.headroom)
    if plan.device.type == "cpu":
        return [f"working: {own} are for holes in the heap, beside activations"]
    return [f"working on the device: {own} are torch's, for cuBLAS and segments that are not full"]


def _slow_products(plan: Plan) -> list[str]:
    """The line on products that this CPU has no instructions for. No line on a machine that is not here."""
    dtype = plan.precision.compute_dtype
    if plan.machine is not None or multiplies(plan.device, dtype):
        return []
    return [
        f"this CPU has no instructions for products in {plan.precision.compute}, which can take 100 times as "
        'long as in fp32: Precision(compute="fp32") takes twice the bytes for activations and parameters'
    ]


def _commits(plan: Plan) -> list[str]:
    """The line with the bytes that commits take on disk, and that each commit writes. No line without
    commits.
    """
    if not plan.commits:
        return []
    place = "on nvme" if Tier.NVME in plan.budgets else f"in {plan.slab_directory or 'its directory'}"
    line = f"commits: {format_size(plan.durable_bytes)} {place} (two places for each trained byte)"
    if plan.commit_bytes:
        line += f" · a commit writes {format_size(plan.commit_bytes)}"
    return [line]


_WIDTH = 110


def render(rows: Sequence[Mapping[str, Any]], *, words: bool = False) -> str:
    """Render rows as a plain text table, and return the text. The header shows the keys of the first row.

    rows: at least one mapping, each from the title of a column to the value shown there; all have the same
    keys in the same order. An integer counts as a number of bytes and is shown with a unit such as MiB. The
    integer 0 is shown as "-", None as "unknown", and any other value as str() gives it. words: whether all
    values are words, which begin at the left, and go on in the next line in the last column.
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
    """The text of a value in a table, as `render` says."""
    if value is None:
        return "unknown"
    if isinstance(value, int):
        return format_size(value) if value else "-"
    return str(value)
