"""Units: a survey of a model's parameters, and the cutting of a model into units.

`survey` checks and lists the parameters; `Survey.group` cuts the tree of modules into units, the groups of
parameters that are moved together. No tensor data is read.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from infinity.config import Precision, round_up
from infinity.errors import ConfigError
from infinity.layout.adapters import base_names
from infinity.layout.names import named_buffers, named_modules, named_parameters
from infinity.layout.strides import is_dense
from infinity.layout.tiles import row_ranges, tile_name, tiled_weights
from infinity.tiers import PAGE_ALIGNMENT

Grouping = tuple[tuple[str, tuple[int, ...]], ...]
"""The units of a model. A unit is a pair: the path of a module, and the indices in `Survey.parameters` of
the parameters that are in the unit.
"""

BLOCK_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
"""Types of containers that hold a model's repeated blocks.

If one child of a container is cut into several units, all children of the same type are cut.
"""

_WHOLE = (nn.MultiheadAttention,)
"""Types of modules that pass the parameters of their children to one operation.

A module of these types is never cut into several units.
"""


@dataclass(frozen=True)
class SurveyedParameter:
    """The properties of a parameter that determine its layout."""

    names: tuple[str, ...]
    """All names under which the parameter is registered. The first name is the canonical name."""
    shape: torch.Size
    stride: tuple[int, ...]
    """Strides of the user's tensor in elements. The tensor is dense, with its dimensions in any order."""
    dtype: torch.dtype
    """The dtype of the parameter's elements in the page."""
    numel: int
    trainable: bool
    """The value of the parameter's `requires_grad` when `survey` read the model. True also for all adapters
    of PEFT: one of them is trained at a time.
    """
    tile_of: str | None = field(default=None, kw_only=True)
    """For a tile, the canonical name of the user's Parameter; None for a parameter that is not tiled."""
    first_row: int = field(default=0, kw_only=True)
    """For a tile, the number of the tile's first row in the user's Parameter; else 0."""

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter in the page, without padding."""
        return self.numel * self.dtype.itemsize


def bytes_away(parameters: Iterable[SurveyedParameter]) -> tuple[int, int]:
    """(bytes of RAM that the gradients of tied tiles take in one backward, bytes of their copies each way).

    A tile is tied if it has several names. Its sum leaves after each use but the last, and comes back.
    """
    tiles = [each for each in parameters if each.tile_of is not None and each.trainable]
    tied = [each for each in tiles if len(each.names) > 1]
    ram = sum(round_up(each.nbytes, PAGE_ALIGNMENT) for each in tied)
    return ram, sum(each.nbytes * (len(each.names) - 1) for each in tied)


@dataclass
class _Node:
    """A module in the tree of modules, with the parameters that the module owns.

    A parameter that is registered in several modules is owned by the first of these modules.
    """

    path: str
    kind: type[nn.Module]
    own: list[int] = field(default_factory=list)
    tiles: list[int] = field(default_factory=list)
    """Indices of the tiles of the module's weight, in row order. They are not in `own`."""
    children: list[_Node] = field(default_factory=list)
    nbytes: int = 0
    """Bytes of all parameters that the module and its descendants own, without padding."""
    must_cut: bool = False
    """True if the module or a descendant is a list of experts (mixture of experts) or has tiles.

    Such a module is cut even if it fits into one unit, because two experts are never in the same unit, and a
    tile is a unit of its own.
    """

    def members(self) -> Iterator[int]:
        """Yield the indices of all parameters that the module and its descendants own, parents first."""
        yield from self.own
        yield from self.tiles
        for child in self.children:
            yield from child.members()


class Survey:
    """A model's parameters, and the tree of modules that own the parameters. Made by `survey`."""

    def __init__(self, parameters: tuple[SurveyedParameter, ...], root: _Node) -> None:
        self.parameters = parameters
        self._root = root

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, each in its dtype in the page, without padding."""
        return self._root.nbytes

    def group(self, unit_bytes: int) -> Grouping:
        """Cut the tree of modules into units of at most `unit_bytes` bytes each, as far as possible.

        A module that is too large becomes a unit of its direct parameters, and one or more units for each
        child. The direct parameters of a module always stay in one unit, even if they exceed `unit_bytes`.
        Where one child of a list of blocks is cut, its siblings of the same type are cut too. Two experts
        never share a unit, and a tile is a unit of its own.
        """
        return tuple(_cut(self._root, unit_bytes, forced=False))

    def together(self, grouping: Grouping) -> tuple[tuple[int, ...], ...]:
        """Return the sets of units that have to be resident at the same time, as indices in `grouping`.

        There is a set for each module whose direct parameters lie in several units: the set has these units.
        That happens where some of the module's parameters are tied to parameters of other modules. Tiles are
        in no set: no operation takes one together with other parameters.
        """
        unit_of = {index: unit for unit, (_, members) in enumerate(grouping) for index in members}
        units: dict[str, set[int]] = {}
        for index, parameter in enumerate(self.parameters):
            for name in parameter.names if parameter.tile_of is None else ():
                units.setdefault(name.rpartition(".")[0], set()).add(unit_of[index])
        return tuple({tuple(sorted(each)) for each in units.values() if len(each) > 1})


def survey(model: nn.Module, precision: Precision) -> Survey:
    """Collect and check the parameters of a model on any device, meta included. Reads no tensor data.

    precision: determines the dtype of each parameter in its page. Raises ConfigError if the model has no
    parameters, if two parameters overlap in memory, or if a parameter is not dense, is sparse or quantised,
    is complex and trainable, has no shape yet, or has another class than nn.Parameter.
    """
    _check_names(model)
    known: dict[nn.Parameter, list[str]] = {}
    for name, parameter in named_parameters(model):
        known.setdefault(parameter, []).append(name)
    if not known:
        raise ConfigError(
            f"The model, a {type(model).__name__}, has no parameters.", "Give a model that has some."
        )
    base = base_names(model)
    given = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, known_as in known.items():
        _check(parameter, known_as[0])
    _check_overlap({parameter: known_as[0] for parameter, known_as in known.items()})
    tiled = tiled_weights(model)
    surveyed: list[SurveyedParameter] = []
    for parameter, known_as in known.items():
        whole = SurveyedParameter(
            names=tuple(known_as),
            shape=parameter.shape,
            stride=parameter.stride(),
            dtype=_dtype(precision, (known_as[0], given[parameter]), parameter.dtype),
            numel=parameter.numel(),
            # Of several adapters of PEFT one is trained at a time, and the others are frozen until then.
            trainable=parameter.requires_grad
            or (id(parameter) not in base and parameter.is_floating_point()),
        )
        surveyed += _tiles(whole) if id(parameter) in tiled else [whole]
    parameters = tuple(surveyed)
    return Survey(parameters, _tree(model, parameters))


def _tiles(whole: SurveyedParameter) -> Iterator[SurveyedParameter]:
    """Yield the tiles of the weight `whole` of a tiled module, in row order."""
    for rows in row_ranges(whole.shape):
        yield replace(
            whole,
            names=tuple(tile_name(name, rows) for name in whole.names),
            shape=torch.Size((len(rows), *whole.shape[1:])),
            numel=len(rows) * whole.shape[1],
            tile_of=whole.names[0],
            first_row=rows.start,
        )


def _dtype(precision: Precision, names: Sequence[str], dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter in its page: fp32 if `precision` keeps any of its names in fp32."""
    found = [precision.dtype_of(name, dtype) for name in names]
    return torch.float32 if torch.float32 in found else found[0]


def _check_names(model: nn.Module) -> None:
    """Raise ConfigError if two tensors of a model have the same name without wrappers."""
    known: dict[str, torch.Tensor] = {}
    for name, tensor in (*named_parameters(model), *named_buffers(model, remove_duplicate=False)):
        if known.setdefault(name, tensor) is not tensor:
            raise ConfigError(
                f"The model has two tensors that are named {name}, once the names that torch.compile and "
                "checkpoint wrappers add are left out.",
                "Rename the module that is registered as _orig_mod or _checkpoint_wrapped_module.",
            )


def _check(parameter: nn.Parameter, name: str) -> None:
    kind = type(parameter)
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ConfigError(
            f"The parameter {name} has no shape yet.", "Run one forward pass first: it sets the shape."
        )
    if kind is not nn.Parameter:
        raise ConfigError(
            f"The parameter {name} is a {kind.__module__}.{kind.__name__}, whose memory is not its own.",
            "Give a model of plain nn.Parameter objects.",
        )
    if parameter.layout is not torch.strided:
        raise ConfigError(f"The parameter {name} is {parameter.layout}.", "Make it dense: to_dense().")
    if parameter.is_quantized:
        raise ConfigError(f"The parameter {name} is quantised.", "Give it in floating point: dequantize().")
    if parameter.is_complex() and parameter.requires_grad:
        raise ConfigError(
            f"The parameter {name} is complex and trainable, which no update kernel takes.",
            "Hold it as a real parameter (torch.view_as_real), or freeze it.",
        )
    if not is_dense(parameter.shape, parameter.stride()):
        raise ConfigError(
            f"The parameter {name}, of shape {tuple(parameter.shape)} and strides {parameter.stride()}, is "
            "not dense.",
            "Make it a parameter of its own memory: nn.Parameter(parameter.detach().clone()).",
        )


def _check_overlap(known: dict[nn.Parameter, str]) -> None:
    ranges = []
    for parameter, name in known.items():
        storage = parameter.untyped_storage()
        # A meta storage has no address, but two views of one meta storage share the storage object.
        address, base = (0, storage._cdata) if parameter.is_meta else (storage.data_ptr(), 0)
        if parameter.numel() == 0 or (address == 0 and not parameter.is_meta):
            continue
        start = address + parameter.storage_offset() * parameter.itemsize
        ranges.append((str(parameter.device), base, start, start + parameter.nbytes, name))
    ranges.sort()
    for first, second in itertools.pairwise(ranges):
        if first[:2] == second[:2] and second[2] < first[3]:
            raise ConfigError(
                f"The parameters {first[4]} and {second[4]} are different objects over the same memory.",
                "Tie them by assigning one Parameter to both places, or give each its own memory.",
            )


def _tree(model: nn.Module, parameters: tuple[SurveyedParameter, ...]) -> _Node:
    root = _Node("", type(model))
    nodes = {"": root}
    for path, module in named_modules(model):
        if path in nodes:
            nodes[path].kind = type(module)  # instead of the wrapper's
        else:
            nodes[path] = _Node(path, type(module))
            nodes[path.rpartition(".")[0]].children.append(nodes[path])
    for index, parameter in enumerate(parameters):
        node = nodes[parameter.names[0].rpartition(".")[0]]
        (node.own if parameter.tile_of is None else node.tiles).append(index)
    for node in reversed(nodes.values()):  # children come after their parents
        node.nbytes = sum(parameters[index].nbytes for index in (*node.own, *node.tiles))
        node.nbytes += sum(child.nbytes for child in node.children)
        node.must_cut = (
            bool(node.tiles) or _holds_experts(node) or any(child.must_cut for child in node.children)
        )
    return root


def _holds_experts(node: _Node) -> bool:
    name = node.path.rpartition(".")[2]
    return issubclass(node.kind, nn.ModuleList) and fnmatch.fnmatchcase(name, "*experts*")


def _cut(node: _Node, unit_bytes: int, *, forced: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    if not _cuttable(node) or not (forced or _needs_cut(node, unit_bytes)):
        members = tuple(node.members())
        if members:
            yield node.path, members
        return
    if node.own:
        yield node.path, tuple(node.own)
    for tile in node.tiles:
        yield node.path, (tile,)
    alike = set()
    if issubclass(node.kind, BLOCK_LISTS):
        alike = {child.kind for child in node.children if _needs_cut(child, unit_bytes)}
    for child in node.children:
        yield from _cut(child, unit_bytes, forced=child.kind in alike)


def _cuttable(node: _Node) -> bool:
    return bool(node.children or node.tiles) and not issubclass(node.kind, _WHOLE)


def _needs_cut(node: _Node, unit_bytes: int) -> bool:
    return node.must_cut or node.nbytes > unit_bytes
