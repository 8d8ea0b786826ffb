"""Initial pages: leases the homes of a model's pages, and fills them with initial values.

The values come from the model and the optimizer, from files, from a commit, or from rank 0.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from infinity.activations.heap import HeapGuard
from infinity.checkpoint.commit_source import CommitSource
from infinity.checkpoint.directory import Checkpoint
from infinity.checkpoint.restore import adopt_slabs, ranges_at_home, restore
from infinity.checkpoint.retiled_source import retiled
from infinity.checkpoint.safetensors_files import Weights, load, open_weights
from infinity.config import Budget, round_up
from infinity.cpu_adam import default_cpus
from infinity.layout.chunks import ParameterLayout
from infinity.layout.names import named_parameters, transformers_model
from infinity.layout.shards import PageShard, kept_chunks
from infinity.layout.strides import part_in_memory_order
from infinity.model.materialize import materialize
from infinity.model.tiled_parameter import split, split_state
from infinity.optim.paged_optimizer import adopt
from infinity.pages.home import Home, content_at
from infinity.pages.optimizer_page import StatePage, States
from infinity.pages.parts import parameter_parts, state_parts
from infinity.pages.store import Store
from infinity.planning.placement import Kind
from infinity.planning.plan import Plan
from infinity.ranks import Given, SingleRank, Take
from infinity.tiers import PAGE_ALIGNMENT, Tier

_DRAWN_SHARE = 32
"""The RAM budget divided by this number is for tensors whose initial values are drawn while those of others
are written to their pages.
"""


def weights_for(model: nn.Module, path: str | os.PathLike[str]) -> Weights:
    """Open the weights at `path` for a model, as `open_weights` does.

    For a transformers model, the tensors that save_pretrained wrote are converted to the model's names and
    shapes. A conversion uses RAM of up to twice the bytes of the converted tensor. Raises ConfigError if a
    tensor cannot be converted.
    """
    weights, theirs = open_weights(path), transformers_model(model)
    if theirs is None:
        return weights
    from infinity.checkpoint.conversion import ConvertedWeights

    return ConvertedWeights(theirs, weights)


class InitialPages:
    """The homes of a model's pages and their initial values, while a runtime is made."""

    def __init__(self, model: nn.Module, plan: Plan, store: Store, ranks: SingleRank) -> None:
        """Lease the homes of parameter and optimizer pages. ranks: connects with the other ranks."""
        self.ranks = ranks
        self.remote = ranks.remote_pages(store.node_cache, plan.exchange_block_bytes)
        self.shards = [PageShard(unit, plan.share) for unit in plan.layout.units]
        self.model = model
        self.plan = plan
        self.store = store
        named = dict(named_parameters(model))
        self.tiles: dict[str, dict[int, nn.Parameter]] = {}
        """Canonical name of a tiled parameter -> a tile's first row -> the tile, on the meta device."""
        self.parameters = [
            [
                named[each.names[0]] if each.tile_of is None else self._tile(each, named[each.tile_of])
                for each in unit.parameters
            ]
            for unit in plan.layout.units
        ]
        self.tiled = [
            (named[name], [tiles[row] for row in sorted(tiles)]) for name, tiles in self.tiles.items()
        ]
        """The tiled parameters, each with its tiles in row order."""
        self._tiles_of = {id(whole): tiles for whole, tiles in self.tiled}
        self.places = {
            id(parameter): (unit, index)
            for unit, parameters in enumerate(self.parameters)
            for index, parameter in enumerate(parameters)
        }
        self.homes: list[Home] = [self.home(unit, Kind.PARAMETER) for unit in range(len(plan.layout.units))]
        if plan.slab_layout is not None:
            for home, shard, images in zip(self.homes, self.shards, plan.slab_layout.parameters, strict=True):
                if self._has_slots(home.tier, Kind.PARAMETER):
                    home.parts = parameter_parts(shard, images, home)
        self.states: States | None = None
        if plan.rule is not None:
            self.states = States(self._state_pages(), store, plan.rule, remote=self.remote)

    def fill(self, weights: str | os.PathLike[str] | None, heap: HeapGuard) -> None:
        """Write the initial values of all parameters to the pages' homes, or of the elements that this rank
        keeps.

        weights: the file or directory with the values. None: take the values that the parameters have, or run
        the initialisers of parameters on the meta device. heap: the heap guard, which returns freed memory of
        the heap to the kernel. It is told how many bytes each parameter's values took.
        """
        with self.ranks.initial_values(self.model) as take:
            self._fill(weights, heap, take)

    def _fill(
        self, weights: str | os.PathLike[str] | None, heap: HeapGuard, take: Take | None = None
    ) -> None:
        """Write the initial values home, as `fill` says. take: for parameters that are not on the meta
        device; None: their own values are taken.
        """

        def put(parameter: nn.Parameter, values: torch.Tensor) -> None:
            tiles, parts, passed = [parameter], [values.detach()], 0
            if id(parameter) in self._tiles_of:
                tiles = self._tiles_of[id(parameter)]
                parts = list(split(values.detach(), tiles))
            for tile, part in zip(tiles, parts, strict=True):
                unit, index = self.places[id(tile)]
                layout = self.plan.layout.units[unit].parameters[index]
                for held in ranges_at_home(self.shards[unit], index):
                    if take is not None and values is parameter:
                        found = take(parameter, passed + held.first, held.count)
                    else:
                        found = part_in_memory_order(part, layout.stride, held.first, held.count).cpu()
                    if self.states is not None:
                        found = self.states.encode(unit, index, found, held.first)
                    self.store.patch(self.homes[unit], held.place, found.to(layout.dtype))
                passed += layout.numel
            heap.allocated(values.nbytes)

        if weights is not None:
            load(self.model, weights_for(self.model, weights), put, self.plan.device)
            return
        if any(each.is_meta for each in (*self.model.parameters(), *self.model.buffers())):
            threads = len(self.ranks.node_share(default_cpus()))
            room = self.plan.ram_budget // _DRAWN_SHARE
            materialize(self.model, self.plan.device, put, threads=threads, room=room)
        for parameter in (*itertools.chain(*self.parameters), *(whole for whole, _ in self.tiled)):
            if not parameter.is_meta:
                put(parameter, parameter)

    def resume(
        self, checkpoint: Checkpoint, optimizer: torch.optim.Optimizer, budget: Budget, *, streamed: bool
    ) -> None:
        """Restore the parameters and optimizer states from the commit that a run continues.

        streamed: whether they are copied to new slabs; False if the store has adopted the commit's slabs.
        Raises IncompatibleCheckpoint if the model or the optimizer differs, CorruptState and StorageError.
        Warns of parameters whose states were not restored.
        """
        commit, layout = checkpoint.continued, self.plan.layout
        assert commit is not None and self.states is not None and self.store.nvme is not None
        saved = commit.saved
        placed = [
            [self.places[id(each)] for each in self._with_tiles(group["params"])]
            for group in optimizer.param_groups
        ]
        saved.run.check_groups(
            [[layout.units[unit].parameters[index].names[0] for unit, index in group] for group in placed]
        )
        saved.run.check_buffers(self.model)
        locks = {**checkpoint.locks, **self.store.nvme.locks}
        commit.restore(budget, locks, self._restore, adopted=not streamed)
        if not streamed:
            adopt_slabs(saved, self.homes, self.states, self.store)

    def _restore(self, source: CommitSource) -> None:
        """Copy what this rank keeps from a commit. Other ranks' chunks are pulled from their owners later."""
        own_chunks = not self.plan.share.whole_states
        layout = self.plan.layout
        restored = restore(
            retiled(source, layout), layout, self.homes, self.states, self.store, own_chunks=own_chunks
        )
        restored.warn(stacklevel=6)

    def adopt_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Write the optimizer's states to the optimizer pages; with several ranks, those of rank 0's
        optimizer.

        Called after `fill`, and before parameters are converted to paged parameters. Raises ConfigError if a
        state does not fit its parameter.
        """
        assert self.states is not None
        given: list[Given] = []

        def give(parameter: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
            tiles = self._tiles_of.get(id(parameter))
            states = [state] if tiles is None else split_state(state, tiles)
            for each, part in zip(self._with_tiles([parameter]), states, strict=True):
                given.append((*self.places[id(each)], part))

        adopt(optimizer, give, self._dtype_in_page)
        self.ranks.write_states(self.states, given, self._present)

    def _present(self, unit: int, index: int, first: int, count: int) -> torch.Tensor:
        """Return values [first, first + count) of a parameter, which must be one range of the home."""
        layout = self.plan.layout.units[unit]
        dtype = layout.parameters[index].dtype
        if not count:
            return torch.empty(0, dtype=dtype, device="cpu")
        start = layout.start(index) + first * dtype.itemsize
        (held,) = self.shards[unit].pieces(start, count * dtype.itemsize)
        return self.store.fetch(self.homes[unit], held.home_start, held.nbytes).view(dtype)

    def _tile(self, layout: ParameterLayout, whole: nn.Parameter) -> nn.Parameter:
        """Make a tile, without values, of the parameter `whole`."""
        assert layout.tile_of is not None
        tile = nn.Parameter(torch.empty(layout.shape, dtype=whole.dtype, device="meta"), whole.requires_grad)
        self.tiles.setdefault(layout.tile_of, {})[layout.first_row] = tile
        return tile

    def _with_tiles(self, parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield `parameters`, and the tiles of tiled ones in their place."""
        for each in parameters:
            yield from self._tiles_of.get(id(each), [each])

    def _dtype_in_page(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the dtype that a parameter will have in its page."""
        (parameter, *_) = self._with_tiles([parameter])
        unit, index = self.places[id(parameter)]
        return self.plan.layout.units[unit].parameters[index].dtype

    def _state_pages(self) -> dict[int, StatePage]:
        pages = {
            unit: StatePage(unit, layout, self.home(unit, Kind.OPTIMIZER), self.plan)
            for unit, layout in enumerate(self.plan.layout.units)
        }
        places = self.plan.slab_layout
        if places is not None:
            for unit, page in pages.items():
                images = places.states[unit]
                if self._has_slots(page.home.tier, Kind.OPTIMIZER):
                    page.home.parts = state_parts(
                        page.layout, page.formats, images, page.home, begun=page.begun, kept=page.kept
                    )
        return pages

    def _has_slots(self, tier: Tier, kind: Kind) -> bool:
        """Whether a page at home in `tier` has slots in the slabs."""
        if kind is Kind.GRADIENT or self.plan.slab_layout is None:
            return False
        return self.plan.commits or tier is Tier.NVME

    def home(self, unit: int, kind: Kind) -> Home:
        tier = self.plan.homes[unit][kind]
        nbytes = self.plan.page_bytes(unit, kind)
        if tier is None or not nbytes:
            return Home.of_nothing()
        home = self.store.home(tier, nbytes, durable=self._has_slots(tier, kind))
        copied = kind is Kind.PARAMETER and tier is Tier.DEVICE and not self.plan.share.whole_parameters
        home.computed = copied or unit in self.plan.updated_on_device
        home.describe = functools.partial(content_at, self.plan, unit, kind)
        if kind is not Kind.GRADIENT and tier is Tier.HOST and unit in self.plan.speculating:
            shown = self.store.device.shares_host or self.plan.share.ranks > 1
            home.shown = kind is Kind.PARAMETER and shown
            self.store.pair_up(home, [each for each in self._changed(unit, kind) if each[1]])
        return home

    def _changed(self, unit: int, kind: Kind) -> Iterator[tuple[int, int]]:
        """The ranges (start, bytes) of a home that chunk updates change, in order."""
        plan, layout, shard = self.plan, self.plan.layout.units[unit], self.shards[unit]
        for index in kept_chunks(layout, plan.share, whole=plan.share.whole_states):
            if kind is Kind.OPTIMIZER:
                yield plan.state_offset(unit, index), plan.state_format(unit, index).nbytes
            else:
                chunk = layout.chunks[index]
                itemsize = layout.regions[chunk.region].dtype.itemsize
                yield shard.home_start(index), round_up(chunk.count * itemsize, PAGE_ALIGNMENT)
