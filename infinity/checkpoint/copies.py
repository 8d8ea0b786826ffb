"""Copies: writes the run of a live runtime into a directory, and sets a runtime to a run written before.

The files are those of infinity/checkpoint/run_copy.py. Their record is that of a RunState, and the tensors
beside it are its own. Commits may be on or off.

[Note: copies of ranks]
Several ranks make one copy, which has no trace of their number. One of them writes it, and fetches what
others have. Its RunState is the one in the copy. To load a copy, each rank reads what it keeps. Both calls
consist of phases: no rank begins one before all have ended the phase before, and all raise an error if one
does. So no rank serves or reads values that are about to be replaced, and none goes on if a copy is not
whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from infinity.checkpoint.averages import exchange_averages
from infinity.checkpoint.committer import Committer
from infinity.checkpoint.copy_source import CopySource
from infinity.checkpoint.export import Source
from infinity.checkpoint.manifest import RunRecord
from infinity.checkpoint.restore import check_held, match, restore, show
from infinity.checkpoint.run_copy import DATA, RECORD, write_copy
from infinity.checkpoint.run_state import RunState, capture, generators, group_names
from infinity.checkpoint.tensor_files import packed
from infinity.checkpoint.tensor_reader import unpacked
from infinity.checkpoint.typed_json import corrupt, typed
from infinity.config import Size
from infinity.errors import ConfigError, InfinityError
from infinity.gradients.loss_scale import LossScale
from infinity.optim.scheduler import UpdateScheduler
from infinity.pages.edits import EditTracker
from infinity.pages.health import Health
from infinity.pages.parameter_page import ParameterPage
from infinity.prefetch.engine import PrefetchEngine


class CopyingRanks(Protocol):
    """The ranks with which copies are saved and loaded; see [Note: copies of ranks]."""

    @property
    def writes(self) -> bool:
        """Whether this rank writes the copy."""
        ...

    def end(
        self, phase: str, failure: InfinityError | None, same: Mapping[str, object], *, first: bool
    ) -> None:
        """Wait until all ranks have ended a phase.

        phase: its name, for errors. failure: the error by which it has failed here, which the caller raises.
        same: name -> what must be equal on all ranks. first: whether it is the first phase of a call. Raises
        the error by which the phase has failed on another rank, and RankFailure.
        """
        ...

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends with an error."""
        ...


class Copies:
    """Saves and loads copies of one runtime's run. All methods are called under the runtime's lock."""

    def __init__(
        self,
        source: Source,
        *,
        pages: Sequence[ParameterPage],
        edits: EditTracker,
        prefetch_engine: PrefetchEngine,
        scheduler: UpdateScheduler | None,
        committer: Committer | None,
        scale: LossScale,
        health: Health,
        others: CopyingRanks | None,
    ) -> None:
        """source: the model with its pages. scheduler: None for inference. committer: None if commits are
        off. others: the other ranks; None with one. The rest: parts of the runtime.
        """
        self._others = others
        self._source = source
        self._pages = pages
        self._edits = edits
        self._prefetch_engine = prefetch_engine
        self._scheduler = scheduler
        self._committer = committer
        self._scale = scale
        self._health = health

    def save(
        self, path: str | os.PathLike[str], groups: Sequence[Mapping[str, Any]], state: object, shard: Size
    ) -> None:
        """Write the run into the directory `path`, as `Runtime.save` says. groups: the optimizer's param
        groups, none for inference. state: the user's. shard: as in `write_copy`.
        """
        writes = self._others is None or self._others.writes
        with self._phase("save(path)", first=True):
            run = None
            if writes:
                run = capture(self._source.model, groups, self._scale, state=state, rng=generators())
            self.complete()
        with self._phase("the writing of a copy"):
            if run is not None:
                write_copy(self._source, path, record=run.record, shard=shard, data=packed(run.tensors))

    def load(self, path: str | os.PathLike[str], groups: Sequence[dict[str, Any]]) -> Any:
        """Set the run to the one in the directory `path`, as `Runtime.load` says. Returns the user's state.

        groups: the optimizer's param groups, whose options are set in place; none for inference.
        """
        source, store = self._source, self._source.store
        layout, homes = store.plan.layout, [page.home for page in self._pages]
        with self._phase("load(path)", first=True) as same:
            copy = CopySource(path, store.files)
            run = _run_state(copy, Path(path))
            match(copy, layout, source.states)
            with_groups = copy.optimizer is not None and source.states is not None
            if with_groups:
                run.check_groups([group_names(group) for group in groups])
            run.check_buffers(source.model)
            user_state = run.user_state
            self.complete()
            held = check_held(copy, layout, homes, source.states, store)
            if self._committer is not None:
                self._committer.complete()
            same["run.json"] = copy.digest
        with self._poisoning():
            with self._phase("the reading of a copy"):
                restored = restore(copy, layout, homes, source.states, store, besides=held)
                self._prefetch_engine.homes_replaced()
                show(self._pages, self._edits, store)
            with self._phase("the end of load(path)"):
                self._prefetch_engine.bring_exposed()
                if with_groups:
                    run.set_groups(groups)
                run.set_module_state(source.model, self._scale, store.plan.device)
                run.set_generators()
        restored.tell(stacklevel=3)
        return user_state

    def exchange_averages(self) -> None:
        """Exchange the masters of a running model with their running averages, as `Runtime.averaged` does.

        Raises StorageError; after an error in the exchange the runtime cannot be used.
        """
        states, store = self._source.states, self._source.store
        assert states is not None
        self.complete()
        if self._committer is not None:
            self._committer.complete()
        with self._poisoning():
            exchange_averages(self._pages, states, store)
            self._prefetch_engine.homes_replaced()
            show(self._pages, self._edits, store)

    def complete(self) -> None:
        """Complete all updates, reads ahead and writes, and write the user's edits home. Raises StorageError
        if one of them fails.
        """
        if self._scheduler is not None:
            self._scheduler.complete_all()
        self._prefetch_engine.land_all()
        self._edits.sync_edits()
        self._source.store.settle()

    @contextmanager
    def _phase(self, name: str, *, first: bool = False) -> Iterator[dict[str, object]]:
        """Context of a phase, which all ranks end together; see [Note: copies of ranks].

        name, first: as in `CopyingRanks.end`. Yields a dict for what must be equal on all ranks.
        """
        same: dict[str, object] = {}
        try:
            yield same
        except InfinityError as error:
            if self._others is not None:
                with suppress(InfinityError):  # another rank's error, or its loss: this one has its own
                    self._others.end(name, error.again(), {}, first=first)
            raise
        except BaseException as error:
            if self._others is not None:
                self._others.fail(error)
            raise
        if self._others is not None:
            self._others.end(name, None, same, first=first)

    @contextmanager
    def _poisoning(self) -> Iterator[None]:
        """Context after an error in which the runtime is lost: its pages are a mixture of two runs."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, InfinityError):
                self._health.lose(
                    ConfigError(
                        f"A load ended half way ({type(error).__name__}).",
                        "Offload the model anew, and load again.",
                    )
                )
            else:
                self._health.lose(error)
            raise


def _run_state(copy: CopySource, path: Path) -> RunState:
    """Read the record of a copy and the tensors beside it. Raises CorruptState if they are wrong."""
    where = f"record in {path / RECORD}"
    record = typed(copy.record, RunRecord, where)
    if not copy.parameters().keys() >= set(record.grouped):
        raise corrupt((where, ".param_groups"), "names a parameter that the copy lacks")
    data = copy.data()
    run = RunState(record, {} if data is None else unpacked(data, str(path / DATA)))
    run.check(where)
    return run
