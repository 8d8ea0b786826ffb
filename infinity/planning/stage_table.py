"""Stage table: the bytes that a rank keeps at each stage of ZeRO, beside those of ZeRO's formulas. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from infinity.formats.optimizer_rules import state_format
from infinity.planning.placement import Kind
from infinity.planning.plan import Plan
from infinity.planning.table import render


@dataclass(frozen=True)
class StageBytes:
    """The bytes of all homes of one kind of pages on one rank, at one stage of ZeRO."""

    stage: int
    kind: Kind
    planned: int
    """Bytes with padding and gaps, as the plan counts them."""
    formula: float
    """Bytes without padding and gaps, by figure 1 of ZeRO (Rajbhandari et al., 2020): the bytes of an element
    times the number of elements, divided by the number of ranks if the stage divides this kind. The paper
    has 2, 2 and 12 bytes for parameters, gradients and optimizer states. Here they follow from the dtypes of
    the plan, and frozen parameters have neither gradients nor states.
    """


def bytes_by_stage(plan: Plan) -> tuple[StageBytes, ...]:
    """The bytes of each kind at each stage, for the plan's layout and number of ranks: stages in order, and
    the kinds of each stage in the order of `Kind`.
    """
    elements = bytes_without_padding(plan)
    found = []
    for stage in range(4):
        share = replace(plan.share, stage=stage)
        sizes = replace(plan, share=share).page_sizes
        whole = {
            Kind.PARAMETER: share.whole_parameters,
            Kind.GRADIENT: share.whole_gradients,
            Kind.OPTIMIZER: share.whole_states,
        }
        for kind in Kind:
            formula = elements[kind] / (1 if whole[kind] else share.ranks)
            found.append(StageBytes(stage, kind, sum(sizes[kind]), formula))
    return tuple(found)


def text_by_stage(found: Sequence[StageBytes]) -> str:
    """The table of `bytes_by_stage` as text, with a row for each stage."""
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
            found[Kind.OPTIMIZER] += sum(state_format(arrays, parameter.numel).sizes)
    return found
