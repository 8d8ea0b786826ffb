"""Page content: which parameters' entries lie in which bytes of a page's home, for errors that name them."""

from __future__ import annotations

from collections.abc import Iterator

from infinity.layout.shards import PageShard
from infinity.pages.remote import kept_pieces
from infinity.planning.placement import Kind
from infinity.planning.plan import Plan
from infinity.tiers import PAGE_ALIGNMENT

_NAMED = 3
"""The most arrays that one error names."""

_Entry = tuple[int, int, str, str, int, int]
"""(offset in the home, bytes, array, parameter, its first element there, number of elements)."""


def content_at(plan: Plan, unit: int, kind: Kind, offset: int) -> str:
    """Words for what lies in the 4096 bytes from byte `offset` of the home of a unit's page: arrays,
    parameters and their elements.
    """
    found = []
    for start, nbytes, array, parameter, first, count in sorted(_entries(plan, unit, kind)):
        low, high = max(start, offset), min(start + nbytes, offset + PAGE_ALIGNMENT)
        if low < high:
            begin = first + (low - start) * count // nbytes
            end = first + min(count, -(-(high - start) * count // nbytes))
            found.append(f"{array} of {parameter} for its elements {begin} to {end}")
    if not found:
        return f"a page of {plan.layout.units[unit].name or 'the model'} without values"
    more = len(found) - _NAMED
    return ", ".join(found[:_NAMED]) + (f", and {more} more" if more > 0 else "")


def _entries(plan: Plan, unit: int, kind: Kind) -> Iterator[_Entry]:
    layout, share = plan.layout.units[unit], plan.share
    if kind is Kind.PARAMETER:
        shard = PageShard(layout, share)
        for index, each in enumerate(layout.parameters):
            size, start = each.dtype.itemsize, layout.start(index)
            for held in shard.pieces(start, each.numel * size):
                first = (held.page_start - start) // size
                yield held.home_start, held.nbytes, "values", each.names[0], first, held.nbytes // size
        return
    of_states = kind is Kind.OPTIMIZER
    whole = share.whole_states if of_states else share.whole_gradients
    pieces = kept_pieces(layout, share, whole=whole)
    for index, each in enumerate(layout.parameters):
        for chunk_index, piece in pieces(index) if each.trainable else ():
            if not of_states:
                size = plan.gradient_dtype(each.dtype).itemsize
                start = plan.gradient_offset(unit, chunk_index) + piece.offset * size
                yield start, piece.count * size, "gradient", each.names[0], piece.start, piece.count
                continue
            form = plan.state_format(unit, chunk_index)
            for array in form.arrays:
                start, nbytes = form.place(array.name, piece.offset, piece.count)
                start += plan.state_offset(unit, chunk_index)
                yield start, nbytes, array.name, each.names[0], piece.start, piece.count
