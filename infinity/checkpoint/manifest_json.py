"""Manifest JSON: a manifest as a JSON text, and the checks that a text is a manifest.

A text is read strictly: every field must be there with its type, no other field may be, and places must lie
in the volume and checksums in the table. What passes can be used without further checks of its form.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from infinity.checkpoint.array_values import DTYPES, element_count, memory_order
from infinity.checkpoint.blobs import Blobs
from infinity.checkpoint.json_nodes import LARGEST, Node, parse
from infinity.checkpoint.manifest import (
    BLOCK,
    FORMAT,
    HEADER_BYTES,
    MASTER_DTYPES,
    MASTERS,
    MOMENT_BYTES,
    ChunkEntry,
    FrozenEntry,
    LossScale,
    Manifest,
    OptimizerRule,
    ParameterEntry,
    ParamGroup,
    Place,
    PrecisionEntry,
    Range,
    SlabEntry,
    UnitEntry,
    Volume,
    array_layout,
    blocks,
)
from infinity.checkpoint.values import Decoder

_PAGE = 4096
_UUID = re.compile("[0-9a-f]{32}")
_ROWS = (ChunkEntry, FrozenEntry, Place, Range)
"""Classes that are written as lists of their fields, for there are many of each."""


def to_json(manifest: Manifest, data: Mapping[str, int]) -> bytes:
    """The JSON text of a manifest, in ASCII. data: the fields "nbytes" and "crc32c" of its data file."""
    tree = {"format": FORMAT, "data": dict(data), **tree_of(manifest)}
    if manifest.rule.averaged is None:
        del tree["rule"]["averaged"]
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode("ascii")


def tree_of(value: Any) -> Any:
    """Dataclasses as objects, or as lists if they are in `_ROWS`; all else as it is.

    A commit makes thousands of calls beside the training thread, which waits for the interpreter meanwhile.
    So what is most frequent comes first, and the fields of a class are looked up once.
    """
    kind: Any = type(value)
    if kind is int or kind is str:
        return value
    names = _field_names(kind)
    if names:
        found = [tree_of(getattr(value, name)) for name in names]
        return found if kind in _ROWS else dict(zip(names, found, strict=True))
    if isinstance(value, tuple):
        return [tree_of(each) for each in value]
    if isinstance(value, Mapping):
        return {key: tree_of(each) for key, each in value.items()}
    return value


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    """The names of a dataclass's fields; () for another class."""
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


def data_file(tree: Node) -> tuple[int, int]:
    """The length in bytes and the CRC-32C of the data file, from the tree of a manifest."""
    content = tree.has(dict)
    if "data" not in content:
        tree.fail("lacks 'data'")
    nbytes, crc = Node(content["data"], "data", tree).fields("nbytes", "crc32c")
    return nbytes.integer(), crc.integer(0, 0xFFFFFFFF)


def parsed(text: bytes, where: str) -> Node:
    """The tree of a manifest's JSON text. where: names it in errors. Raises CorruptState as `parse` does."""
    return Node(parse(text, where), where)


def from_json(tree: Node, checksums: int, blobs: Blobs) -> Manifest:
    """The manifest that `to_json` wrote. Encoded values are decoded once, as a check, and then dropped.

    tree: the text's tree, from `parsed`. checksums: number of checksums in the data file. blobs: the blobs of
    the data file. Raises CorruptState, naming the place, for anything that `to_json` does not write.
    """
    names = [field.name for field in dataclasses.fields(Manifest)]
    top = dict(zip(("format", "data", *names), tree.fields("format", "data", *names), strict=True))
    top["format"].integer(FORMAT, FORMAT)
    data_file(tree)
    volume = _volume(top["volume"])
    rule = _rule(top["rule"])
    units = tuple(_unit(each, volume) for each in top["units"].items())
    world_size = top["world_size"].integer(1)
    parameters = _Parameters(volume, rule, units, checksums, whole=world_size == 1).all(top["parameters"])
    known = frozenset(each.names[0] for each in parameters)
    return Manifest(
        generation=top["generation"].integer(),
        created=top["created"].text(),
        versions={name: each.text() for name, each in top["versions"].entries()},
        isa=top["isa"].text(),
        threads=top["threads"].integer(),
        volume=volume,
        codecs={name: each.integer() for name, each in top["codecs"].entries()},
        chunk_elements=_multiple(top["chunk_elements"], BLOCK, low=1),
        rule=rule,
        precision=_precision(top["precision"]),
        units=units,
        parameters=parameters,
        rank=top["rank"].integer(0, world_size - 1),
        world_size=world_size,
        **run_fields(top, known, Decoder(blobs)),
    )


def run_fields(top: Mapping[str, Node], parameters: frozenset[str], check: Decoder) -> dict[str, Any]:
    """The fields of a manifest, by name, that describe what is in no page: those of `RunState`.

    top: the places of these fields. parameters: canonical names of all parameters. check: decodes every value
    once. Raises CorruptState as `from_json` does.
    """
    return {
        "param_groups": _groups(top["param_groups"], parameters, check),
        "buffers": _values(top["buffers"], check),
        "extra_state": _values(top["extra_state"], check),
        "loss_scale": _loss_scale(top["loss_scale"]),
        "rng": _values(top["rng"], check),
        "state": _value(top["state"], check),
        "identity": _value(top["identity"], check),
    }


def _names(node: Node) -> tuple[str, ...]:
    return node.unique([each.text() for each in node.items()])


def _multiple(node: Node, of: int, *, low: int = 0) -> int:
    found = node.integer(low)
    if found % of:
        node.fail(f"is {found}, not a multiple of {of}")
    return found


def _volume(node: Node) -> Volume:
    stripe, slabs, header = node.fields("stripe_bytes", "slabs", "header_bytes")
    entries = []
    for each in slabs.items():
        uuid, nbytes, weight = each.fields("uuid", "nbytes", "weight")
        if not _UUID.fullmatch(uuid.text()):
            uuid.fail("is not 32 hexadecimal digits")
        entries.append(SlabEntry(uuid.text(), _multiple(nbytes, _PAGE), weight.integer(0, 1 << 20)))
    slabs.unique([entry.uuid for entry in entries])
    volume = Volume(
        _multiple(stripe, _PAGE, low=1), tuple(entries), header.integer(HEADER_BYTES, HEADER_BYTES)
    )
    if not any(entry.weight for entry in entries):
        slabs.fail("has no slab that holds stripes")
    return volume


def _rule(node: Node) -> OptimizerRule:
    more = ("averaged",) if "averaged" in node.has(dict) else ()
    name, moments, states, *averaged = node.fields("name", "moments", "states", *more)
    return OptimizerRule(
        name.text(),
        _names(moments),
        states.choice(*MOMENT_BYTES),
        averaged[0].integer() if averaged else None,
    )


def _precision(node: Node) -> PrecisionEntry:
    compute, states, keep, accumulate = node.fields("compute", "states", "keep", "accumulate")
    return PrecisionEntry(
        compute.choice("bf16", "fp16", "fp32"),
        states.choice(*MOMENT_BYTES),
        tuple(each.text() for each in keep.items()),
        accumulate.choice("fp32", "compute"),
    )


def _unit(node: Node, volume: Volume) -> UnitEntry:
    fields = [field.name for field in dataclasses.fields(UnitEntry)]
    name, parameters, nbytes, state_bytes, places, state_places, chunks, frozen = node.fields(*fields)
    size, state_size = _multiple(nbytes, _PAGE), _multiple(state_bytes, _PAGE)
    homes = _places(places, (size, 0), volume)  # the second has the trained chunks alone
    state_homes = _places(state_places, (state_size, state_size), volume)
    entries = []
    for each in chunks.items():
        side, state_side, begun = each.tuple_of(3)
        entry = ChunkEntry(side.integer(0, 1), state_side.integer(0, 1), begun.boolean())
        if homes[entry.parameter_side] is None:
            side.fail("names a place that the unit lacks")
        if entry.begun and state_size and state_homes[entry.state_side] is None:
            state_side.fail("names a place that the unit lacks")
        entries.append(entry)
    regions = []
    for each in frozen.items():
        start, length, place = each.tuple_of(3)
        region = FrozenEntry(_multiple(start, _PAGE), _multiple(length, _PAGE), _multiple(place, _PAGE))
        if region.start + region.nbytes > size or region.place + region.nbytes > volume.nbytes:
            each.fail("goes past the end of the unit's page or of the volume")
        regions.append(region)
    return UnitEntry(
        name.text(),
        _names(parameters),
        size,
        state_size,
        homes,
        state_homes,
        tuple(entries),
        tuple(regions),
    )


def _places(node: Node, nbytes: tuple[int, int], volume: Volume) -> tuple[int | None, int | None]:
    """Two places of a page, each None or an offset in the volume. nbytes: the least that they take."""
    found: list[int | None] = []
    for each, least in zip(node.tuple_of(2), nbytes, strict=True):
        place = None if each.content is None else _multiple(each, _PAGE)
        if place is not None and place + least > volume.nbytes:
            each.fail("goes past the end of the volume")
        found.append(place)
    return found[0], found[1]


class _Parameters:
    """Reads the entries of parameters, which refer to the volume, the units and the table of checksums."""

    def __init__(
        self,
        volume: Volume,
        rule: OptimizerRule,
        units: tuple[UnitEntry, ...],
        checksums: int,
        *,
        whole: bool,
    ) -> None:
        """whole: whether the ranges of a parameter cover it, as they do with one rank."""
        self._whole = whole
        self._volume_bytes = volume.nbytes
        self._rule = rule
        self._units = units
        self._members = [frozenset(unit.parameters) for unit in units]
        self._checksums = checksums

    def all(self, node: Node) -> tuple[ParameterEntry, ...]:
        """The entries of all parameters, each of which is in its unit, and no unit has others."""
        found = tuple(self._one(each) for each in node.items())
        node.unique([name for each in found for name in each.names])
        if len(found) != sum(len(members) for members in self._members):
            node.fail("is not what the units name")
        return found

    def _one(self, node: Node) -> ParameterEntry:
        fields = [field.name for field in dataclasses.fields(ParameterEntry)]
        at = dict(zip(fields, node.fields(*fields), strict=True))
        names = _names(at["names"])
        if not names:
            at["names"].fail("is empty")
        unit = at["unit"].integer(0, len(self._units) - 1)
        if names[0] not in self._members[unit]:
            at["unit"].fail("is a unit without this parameter")
        dtype = at["dtype"].choice(*DTYPES)
        shape, numel = element_count(at["shape"], DTYPES[dtype].itemsize)
        stride = tuple(each.integer() for each in at["stride"].items())
        if len(stride) != len(shape) or (numel and not memory_order(shape, stride)):
            at["stride"].fail("is not the stride of a dense tensor of this shape")
        at["numel"].integer(numel, numel)
        trainable, master = at["trainable"].boolean(), at["master"].choice(*MASTERS)
        if MASTER_DTYPES.get(master, dtype) != dtype or (trainable and master == "none"):
            at["master"].fail(f"does not fit a {'trainable' if trainable else 'frozen'} parameter of {dtype}")
        moments = at["moments"].boolean()
        arrays = {"values", *MASTERS[master]}
        if moments:
            arrays.update(self._rule.moments)
            if self._rule.states == "int8":
                arrays.update(f"{name}.scale" for name in self._rule.moments)
        if trainable and self._rule.averaged:
            arrays.add("average")
        return ParameterEntry(
            names=names,
            shape=shape,
            stride=stride,
            dtype=dtype,
            trainable=trainable,
            numel=numel,
            master=master,
            step=at["step"].integer(),
            moments=moments,
            edited=at["edited"].boolean(),
            unit=unit,
            ranges=self._ranges(at["ranges"], numel, DTYPES[dtype].itemsize, arrays, cut=not trainable),
        )

    def _ranges(
        self, node: Node, numel: int, itemsize: int, arrays: set[str], *, cut: bool
    ) -> tuple[Range, ...]:
        """cut: whether ranges may begin at any element if they do not cover the parameter: ranks divide
        frozen parameters by their bytes.
        """
        found, end = [], 0
        for each in node.items():
            first, count, places = each.tuple_of(3)
            start = first.integer(end)
            if (self._whole and start != end) or (start % BLOCK and (self._whole or not cut)):
                first.fail(f"is not {end}, or not a multiple of {BLOCK}")
            if numel <= start:
                count.fail("is past the last element")
            number = count.integer(1, numel - start)
            end = start + number
            if places.has(dict).keys() != arrays:
                places.fail(f"has not exactly the arrays {', '.join(sorted(arrays))}")
            entries = {name: self._place(place, name, number, itemsize) for name, place in places.entries()}
            found.append(Range(start, number, entries))
        if self._whole and end != numel:
            node.fail(f"ends at element {end} of {numel}")
        return tuple(found)

    def _place(self, node: Node, name: str, count: int, itemsize: int) -> Place:
        start, nbytes, block_bytes, index = node.integers(4)
        layout = array_layout(name, itemsize, self._rule)
        assert layout is not None, "only known arrays are looked for"
        entry_bytes, per = layout
        length, block = -(-count // per) * entry_bytes, BLOCK // per * entry_bytes
        if nbytes != length:
            node.entry(1).integer(length, length)
        if block_bytes != block:
            node.entry(2).integer(block, block)
        if start + length > self._volume_bytes:
            node.entry(0).fail("goes past the end of the volume")
        if index + blocks(count) > self._checksums:
            node.entry(3).fail("goes past the end of the table of checksums")
        return Place(start, length, block, index)


def _groups(node: Node, parameters: frozenset[str], check: Decoder) -> tuple[ParamGroup, ...]:
    found = []
    for each in node.items():
        options, params = each.fields("options", "params")
        if type(check.value(options)) is not dict:
            options.fail("is not a dict of options")
        names = _names(params)
        if not parameters.issuperset(names):
            params.fail("names a parameter that the checkpoint lacks")
        found.append(ParamGroup(options.content, names))
    node.unique(list(itertools.chain.from_iterable(each.params for each in found)))
    return tuple(found)


def _loss_scale(node: Node) -> LossScale | None:
    if node.content is None:
        return None
    value, good_steps = node.fields("value", "good_steps")
    scale: float = value.has(float)
    if not 0 < scale < math.inf:
        value.fail("is not a positive number")
    return LossScale(scale, good_steps.integer(0, LARGEST))


def _values(node: Node, check: Decoder) -> dict[str, Any]:
    return {name: _value(each, check) for name, each in node.entries()}


def _value(node: Node, check: Decoder) -> Any:
    check.value(node)
    return node.content
