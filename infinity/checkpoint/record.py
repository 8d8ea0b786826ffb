"""Record: makes the manifest and the tensors of a commit from a runtime.

At the moment of `save`, steps, options of param groups, buffers, generators and the user's state are copied.
The slots and checksums of parts are added when the parts' bytes have reached the disk.
"""

from __future__ import annotations

import platform
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from infinity import cpu_adam
from infinity.checkpoint import manifest as form
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.manifest import Manifest
from infinity.checkpoint.run_state import RunState, capture
from infinity.checkpoint.tensor_files import TORCH_NAMES
from infinity.gradients.loss_scale import LossScale
from infinity.layout.chunks import ParameterLayout
from infinity.pages.ledger import Commit
from infinity.pages.optimizer_page import StatePage, States
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.parts import Part
from infinity.planning.plan import Plan
from infinity.system.version import VERSION
from infinity.tiers import VolumeRecord


class Recorder:
    """Makes the manifests of one runtime. `draft` is called under the runtime's lock."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        pages: Sequence[ParameterPage],
        states: States,
        scale: LossScale,
        volume: VolumeRecord,
    ) -> None:
        """volume: the slabs in which parts have their slots. The other arguments are components of the
        runtime.
        """
        self._model = weakref.ref(model)  # a pending commit must not keep a runtime that nobody refers to
        self._plan = plan
        self._pages = pages
        self._states = states
        self._scale = scale
        self._volume = volume
        self.param_groups: Sequence[Mapping[str, Any]] = ()
        """The param groups of the user's optimizer; set when the runtime is made."""

    def draft(
        self, generation: int, created: str, state: object, rng: Mapping[str, Any], identity: object
    ) -> SavedCommit:
        """Make a commit that lacks only the ranges of parameters and the checksums. Raises ConfigError for a
        value that cannot be kept.

        created: when the commit was begun, in UTC and ISO 8601.
        """
        model = self._model()
        assert model is not None
        run = capture(model, self.param_groups, self._scale, state=state, rng=rng, identity=identity)
        return SavedCommit(
            manifest_of(
                self._plan,
                run,
                generation=generation,
                created=created,
                volume=self._volume,
                rule=form.OptimizerRule.of(self._states),
                parameters=tuple(self._parameters()),
                rank=self._plan.share.rank,
                world_size=self._plan.share.ranks,
            ),
            np.zeros(0, dtype=np.uint32),
            run.tensors,
        )

    def finish(self, draft: SavedCommit, commit: Commit) -> SavedCommit:
        """Complete a result of `draft`: add where the slots that `commit` holds have each array, and the
        checksums of the arrays.
        """
        tables: list[npt.NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
        found: dict[str, dict[int, list[Any]]] = {}
        end = 0
        for part in self._parts():
            slot, checksums, _ = commit.held[part]
            at = end
            for (start, nbytes, block), label in zip(part.segments.tolist(), part.labels, strict=True):
                within = found.setdefault(label.parameter, {}).setdefault(label.first, [0, {}])
                within[1][label.array] = form.StoredArray(part.slots[slot] + start, at)
                if label.array == form.VALUES:
                    within[0] = nbytes * form.BLOCK // block
                at += -(-nbytes // block)
            tables.append(checksums)
            end += len(checksums)
        manifest = draft.manifest
        parameters = []
        for entry in manifest.parameters:
            kept = entry.arrays(manifest.rule)
            ranges = sorted(found.get(entry.names[0], {}).items())
            parameters.append(
                replace(
                    entry,
                    ranges=tuple(
                        form.Range(first, count, {name: arrays[name] for name in kept})
                        for first, (count, arrays) in ranges
                    ),
                )
            )
        table = np.concatenate(tables)
        table[table < 0] = 0  # blocks that have no values yet
        manifest = replace(manifest, parameters=tuple(parameters))
        return replace(draft, manifest=manifest, checksums=table.astype(np.uint32))

    # --- inside -----------------------------------------------------------------------------------------

    def _parts(self) -> Iterator[Part]:
        for page in self._pages:
            for home in (page.home, self._states.pages[page.index].home):
                yield from (part for part in home.parts if part.committed)

    def _parameters(self) -> Iterator[form.ParameterEntry]:
        for page in self._pages:
            states = self._states.pages[page.index]
            for index, layout in enumerate(page.layout.parameters):
                yield parameter_entry(layout, index, states)


def manifest_of(
    plan: Plan,
    run: RunState,
    *,
    generation: int,
    created: str,
    volume: VolumeRecord,
    rule: form.OptimizerRule | None,
    parameters: tuple[form.ParameterEntry, ...],
    rank: int = 0,
    world_size: int = 1,
) -> Manifest:
    """Make the manifest of a run. plan: the run's. run: the state outside of pages. The other arguments:
    fields of the manifest.
    """
    precision = plan.precision
    return Manifest(
        generation=generation,
        created=created,
        versions={"infinity": VERSION, "torch": torch.__version__, "python": platform.python_version()},
        isa=cpu_adam.runnable_isas()[0],
        threads=torch.get_num_threads(),
        volume=volume,
        codecs=form.CODECS,
        chunk_elements=plan.layout.chunk_elements,
        rule=rule,
        rank=rank,
        world_size=world_size,
        precision=form.PrecisionEntry(
            precision.compute, precision.states, precision.keep, precision.accumulate
        ),
        units=tuple(
            form.UnitEntry(unit.name, tuple(each.names[0] for each in unit.parameters))
            for unit in plan.layout.units
        ),
        parameters=parameters,
        run=run.record,
    )


def parameter_entry(layout: ParameterLayout, index: int, states: StatePage | None) -> form.ParameterEntry:
    """Make a parameter's entry in a manifest, without ranges. index: the parameter's index in the unit.
    states: the unit's optimizer page; None for inference, where no parameter is trained.
    """
    trainable = layout.trainable and states is not None
    return form.ParameterEntry(
        names=layout.names,
        shape=tuple(layout.shape),
        stride=tuple(layout.stride),
        dtype=TORCH_NAMES[layout.dtype],
        trainable=trainable,
        step=0 if states is None else states.steps[index],
        moments=states is not None and index in states.has_moments,
        edited=states is not None and index in states.edited,
        ranges=(),
    )


def now() -> str:
    """Return the present time, in UTC and ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")
