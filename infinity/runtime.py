"""Runtime: the public interface of a paged model, which `offload` returns and which owns its components."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from infinity.accumulation.vertical import Accumulator
from infinity.activations.recomputation import recompute
from infinity.checkpoint.copies import Copies
from infinity.checkpoint.export import Source, export
from infinity.config import Size, format_size
from infinity.errors import BudgetError, ConfigError
from infinity.formats.casts import InputCast
from infinity.model.compiled_blocks import compile_blocks
from infinity.model.hooks import ModuleHooks, weakly
from infinity.model.materialize import PlainParameters
from infinity.model.scaled_backward import scale_backwards
from infinity.model.tiled_parameter import is_paged, paged
from infinity.optim.paged_optimizer import PagedOptimizer
from infinity.pages.health import Health
from infinity.pages.ledger import Commit, copied
from infinity.pages.optimizer_page import States
from infinity.planning.plan import Plan
from infinity.planning.predict import Prediction
from infinity.ranks import SingleStep
from infinity.system import machine
from infinity.system.closing import Closing
from infinity.system.lock import undivided
from infinity.telemetry.stats import Stats
from infinity.telemetry.timeline import Timeline
from infinity.training_step import TrainingStep

if TYPE_CHECKING:
    from infinity.build import Components


class Runtime(Closing):
    """A model whose parameters, gradients and optimizer states are in pages. `infinity.offload` makes it. A
    context manager, which closes the runtime at its end.
    """

    def __init__(self, parts: Components, model: nn.Module, step: SingleStep | None) -> None:
        """step: the training step's view of the ranks; None for inference."""
        self._components = parts
        self._model = model
        self._refuse = parts.health.check
        self._accumulator: Accumulator | None = None
        self._optimizer: PagedOptimizer | None = None
        self.training_step: TrainingStep | None = None
        """Takes gradients from autograd and carries out `runtime.optimizer.step()`; None without an
        optimizer.
        """
        self._hooks = ModuleHooks(
            self._model,
            parts.pager,
            parts.plan.layout.module_units,
            InputCast(self._model, parts.plan.precision),
            check_copy=self._check_copy,
            forward_done=self._forward_done,
        )
        if step is not None:
            self.training_step = TrainingStep(parts, step, functools.partial(_check_capacity, parts.health))
            parts.pager.read_master = self.training_step.read_master
        self._end_scaling = scale_backwards(parts.scale) if parts.scale.dynamic else None
        arrived = undivided(weakly(self._gradient_arrived))
        self._handles = [
            _hooked(parameter, arrived)
            for page in parts.pages
            for index, parameter in enumerate(page.parameters)
            if page.layout.parameters[index].trainable
        ]
        self._handles += recompute(self._model, parts.plan.residuals.recomputed, parts.pager.saving)
        if parts.ranks.closes_dropped:
            _opened.append((weakref.ref(self), _Remains(parts)))

    # --- public ----------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the runtime: the home of each page, and the predicted seconds of a step.

        After the first step it has the measured seconds of the last step in place of predicted seconds, and
        measured bytes of activations if the planner did not know them.
        """
        plan, last = self._components.plan, self._components.meter.snapshot().last_step
        store, ranks = self._components.store, self._components.ranks
        plan = replace(plan, unreached=ranks.unreached, off=store.off, pinned=store.host.pinned)
        if last is None:
            return plan
        activations = (
            self._components.pager.saved_bytes.peak if plan.activations is None else plan.activations
        )
        return replace(
            plan,
            activations=activations,
            activations_unknown=None,
            prediction=Prediction.of_step(last),
        )

    @property
    def optimizer(self) -> PagedOptimizer:
        """The optimizer of the model, to be used instead of the one that was given to `infinity.offload`.
        Raises ConfigError if the model was offloaded without an optimizer.
        """
        if self.training_step is None:
            raise ConfigError(
                "The model was offloaded without an optimizer.",
                "Give infinity.offload an optimizer to train.",
            )
        assert self._optimizer is not None
        return self._optimizer

    def take(self, optimizer: PagedOptimizer) -> None:
        """Set the optimizer that the property `optimizer` returns. Called once, by `infinity.offload`."""
        self._optimizer = optimizer

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._components.health.closed

    @property
    def stats(self) -> Stats:
        """Measurements of the run so far and of its last step.

        They include bytes moved between tiers, seconds of waiting, the most bytes used of each pool, the
        share of uses for which the page was present or on its way, and the resource that limited the last
        step. In fp16 `loss_scale` is the factor by which gradients are larger in the backward of a
        torch.autograd.Function.
        """
        store, scale = self._components.store, self._components.scale
        if scale.dynamic:
            self._components.meter.scaled(scale.value)
        for name, pool in store.pools.items():
            self._components.meter.peak(name, pool.counters.peak)
        return self._components.meter.snapshot()

    @contextmanager
    def timeline(self, to: str | os.PathLike[str] | Timeline) -> Iterator[Timeline]:
        """A context manager within which the runtime's work is recorded for Perfetto; yields the Timeline.

        to: the path of the file to write, or a Timeline. `Timeline.annotate(loss=...)` adds figures to the
        last step. infinity/telemetry/timeline.py says what a timeline shows. Each of several ranks needs a
        path of its own. Raises StorageError or StorageFull if the file cannot be written, and ConfigError if
        another timeline of the runtime is being recorded.
        """
        with ExitStack() as inside:
            timeline = to
            if not isinstance(timeline, Timeline):
                timeline = inside.enter_context(self._components.ranks.timeline(os.fspath(timeline)))
            inside.enter_context(self._components.store.link.timed())
            inside.enter_context(self._components.meter.recording(timeline))
            yield timeline

    def accumulate(
        self,
        batches: Iterable[Any],
        loss_fn: Callable[[Any], torch.Tensor],
        *,
        together: int | None = None,
        recompute: bool = False,
    ) -> list[torch.Tensor]:
        """Run forward and backward of all micro-batches together, page by page; returns the detached losses.

        The gradients have the same bits as after `for batch in batches: loss_fn(batch).backward()`, but each
        page is fetched once for all micro-batches. loss_fn: function that takes a batch, calls the model and
        returns the scalar loss, already divided by the number of micro-batches. together: the most
        micro-batches that run together; None: as many as the budget has room for. The activations of these
        micro-batches are in memory at the same time. recompute: whether each repeated module of the model,
        such as a decoder layer, keeps only its inputs and runs again in backward, even if the plan keeps
        activations.
        infinity.accumulation.vertical.Accumulator.run describes details and warnings.
        """
        training_step, parts = self._training(), self._components
        with parts.pager.lock:
            self._refuse()
            if self._accumulator is None:
                assert parts.gradients is not None
                self._accumulator = Accumulator(
                    self._model,
                    parts.plan,
                    parts.pager,
                    parts.gradients,
                    add=training_step.add,
                    expect=training_step.expect,
                    ended=training_step.backwards_done,
                )
        return self._accumulator.run(batches, loss_fn, together=together, recompute=recompute)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients to a global 2-norm of at most `max_norm`; returns the norm before scaling.

        The norm is a float32 scalar on the CPU, summed in float64. The factor is max_norm / (norm + 1e-6), as
        in torch.nn.utils.clip_grad_norm_, and at most 1. If the norm is not finite, no gradient is scaled,
        and `step` treats the gradients as not finite. Raises ConfigError if updates are eager, or if
        gradients have different factors (p.grad.mul_).
        """
        norm = self._training().clip(float(max_norm))
        return torch.tensor(norm, dtype=torch.float32, device="cpu")

    def grad(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return a copy, in host RAM, of a parameter's gradient; None if there is no gradient.

        The loss scale is divided out, and the factor of an earlier `clip_grad_norm_` is applied. The copy has
        the parameter's shape and strides, and the dtype in which gradients are accumulated
        (`Precision.accumulate`).

        With several ranks the copy has the average over ranks. Where every rank keeps all gradients (stages 0
        and 1), all ranks call this for the same parameter, or it raises RankDivergence. At stages 2 and 3, if
        this rank has ended n backwards, the copy has the gradients of each rank's first n backwards, and
        possibly later gradients of ranks that are ahead. After clip_grad_norm_ and step() it has all
        gradients.
        """
        return self._training().gradient(parameter)

    @contextmanager
    def full_parameters(self, module: nn.Module) -> Iterator[None]:
        """A context manager within which all parameters of `module` are resident, to be read or edited in
        place.

        Edits also change the fp32 masters, the exact values from which the optimizer updates the parameters.
        Raises BudgetError if the parameters do not fit together; the error's `needed` is a sufficient budget
        in bytes.
        """
        units = {
            parameter._place.page.index
            for parameter in paged(module.parameters())
            if parameter._place.pager is self._components.pager
        }
        with self._components.pager.whole(sorted(units)):
            yield

    @contextmanager
    def masters(self) -> Iterator[None]:
        """A context manager within which reads of bf16 and fp16 parameters give copies of their fp32 masters,
        the exact values from which the optimizer updates them.

        Use it where user code averages parameters, or copies the model: deepcopy(model) and
        model.state_dict() are fp32 and exact within it. torch.optim.swa_utils.AveragedModel reads masters
        without it. The copies are on the device of the parameters. A parameter without a master, such as a
        frozen one, is converted to fp32. `p.dtype` is still the parameter's own. No gradients are computed.
        Other threads are not affected. Raises ConfigError if the model was offloaded without an optimizer.
        Within the context, edits of these parameters and calls of the model raise ConfigError, and reads
        raise BudgetError if a copy does not fit.
        """
        self._training()
        with self._components.pager.masters():
            yield

    def average(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return a copy, in host RAM, of the running average of a parameter's fp32 masters.

        The copy is float32 and has the parameter's shape and strides. Before the first step it has the
        master's values; for a frozen parameter always the parameter's own. Raises ConfigError if the model
        was offloaded without average=.
        """
        return self._training().average(parameter)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context manager within which the model's parameters have the values of the running averages of
        their masters, in the dtypes in which the model computes. Afterwards masters and averages have all
        their bits again.

        Averages and masters are exchanged in place, one parameter at a time, without further memory, and
        exchanged back at the end. No gradients are computed. `export` writes averages within the context.
        Steps, commits, copies, and reads of averages or of optimizer states raise ConfigError there. Raises
        ConfigError if the model was offloaded without average=, and wherever `save` raises it. Raises
        ConfigError at the end if a parameter was edited: the edit is then in the parameter's average.
        """
        training = self._training()
        with ExitStack() as ends:
            with self._components.pager.lock:
                self._check_between("averaged")
                training.check_averages()
                copies, states = self._copies(), self._components.states
                assert states is not None
                copies.exchange_averages()
                ends.callback(self._exchange_back, copies, states, states.edits)
            with torch.no_grad():
                yield

    def _exchange_back(self, copies: Copies, states: States, before: dict[int, Any]) -> None:
        """Put masters and averages back at the end of `averaged`. before: `States.edits` when it began.

        Raises ConfigError if a parameter was edited since.
        """
        with self._components.pager.lock:
            if self._components.health.closed:
                return
            copies.complete()
            edited = [unit for unit, now in states.edits.items() if now != before[unit]]
            copies.exchange_averages()
            if edited and states.keeps_averages:
                name = self.plan.layout.units[edited[0]].name or "the model"
                raise ConfigError(
                    f"A parameter of {name} was edited within averaged(); the edit is in its average now.",
                    "Edit parameters outside of averaged().",
                )

    def save(self, path: str | os.PathLike[str] | None = None, *, state: Any = None) -> Commit:
        """Begin a commit of the run as it is after its last step, and return it; training goes on meanwhile.

        The pages of the NVMe tier become the commit where they lie. Before this returns, all other state is
        copied: options of param groups, buffers, random number generators and `state`, which `load` returns.
        Pages at home in device memory are updated and written to disk before this returns. The commit becomes
        durable when the updates of the step have been written, at the latest in `Commit.wait`, in `close`, or
        in the next call of `save`.

        state: numbers, texts, bytes, tensors, arrays and containers of them; the state_dict() of a scheduler
        or of a data loader, for instance. Raises ConfigError if commits are off, inside a forward, a backward
        or full_parameters, between the first backward of a step and its step(), and for a state of other
        types. Raises the error by which the previous commit failed, once.

        path: a directory that is empty or does not exist. The whole run is then copied into it, and no commit
        of the run is made. The copy is a commit of one rank, which `load(path)` reads, `infinity checkpoint`
        checks and resume= continues. Copies do not need checkpoint=, and are complete when the call returns.
        Raises StorageFull or StorageError if a file cannot be written; nothing is left then, and the run goes
        on. (`export` writes weights for other programs.)

        With several ranks all call this together, and an error of one is raised on all. Each rank keeps its
        rank commit, with its own `state`. A copy is written by rank 0 alone, with rank 0's path, state,
        buffers and generators, and looks as if one rank had made it.
        """
        if path is None:
            return self._commit(state)
        with self._components.pager.lock:
            self._check_between("save")
            self._copies().save(path, self._groups(), state)
            return copied()

    def _commit(self, state: Any, *, rng: Mapping[str, Any] | None = None, identity: Any = None) -> Commit:
        """Begin a commit, as `save` does without a path. rng, identity: as in `Committer.save`."""
        parts = self._components
        with parts.pager.lock:
            self._refuse()
            if parts.committer is None:
                raise ConfigError(
                    "save() was called and commits are off.", "Give infinity.offload checkpoint=DIRECTORY."
                )
            self._check_between("save")
            return parts.committer.save(state, rng=rng, identity=identity)

    def _abandon(self) -> None:
        """Give up the pending commit, so that `close` does not wait for its updates."""
        if self._components.committer is not None:
            self._components.committer.give_up()

    def load(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Return the state that was given to `save` at the commit from which this run was resumed.

        Also sets the options of all param groups and the random number generators to those of the commit. So
        call it after making schedulers, whose constructors change the options of groups, and before their
        load_state_dict. It may be called several times before the first step. Raises ConfigError if the run
        was not resumed, or has taken a step since. With more ranks than at the commit (n), a rank r >= n gets
        the state of rank r % n, and keeps the generators that the program has set.

        path: a directory that `save(path)` has made. Its run replaces this run: parameters, states, buffers,
        and all that `save` keeps. `load(path)` may be called whenever `save` may. Homes, chunks and budgets
        may differ. Raises ConfigError if the directory has no run, or if a frozen parameter that a commit
        holds has another value there. Raises IncompatibleCheckpoint if the model or the optimizer differs,
        CorruptState and StorageError. After an error in the middle the runtime cannot be used any more. Warns
        of parameters that are trained in only one of the two runs: their optimizer states begin anew, or are
        left out. (infinity.offload with resume= does the same.)

        With several ranks all call load(path) together, and an error of one is raised on all. Each rank reads
        from its own path, and all paths must have the same copy, which any number of ranks may have made. The
        generators of all ranks are set to the same states.
        """
        parts = self._components
        with parts.pager.lock:
            if path is not None:
                self._check_between("load")
                return self._copies().load(path, self._groups())
            self._refuse()
            checkpoint = parts.checkpoint
            if checkpoint is None or checkpoint.continued is None:
                raise ConfigError(
                    "load() was called on a run that was not resumed.",
                    "Give infinity.offload resume=DIRECTORY.",
                )
            self._training()
            if self.stats.steps:
                raise ConfigError(
                    "load() was called after steps of this run, which it cannot undo.",
                    "Close the runtime, build the model anew, and offload it with resume=DIRECTORY.",
                )
            self.resumed()
            run = checkpoint.continued.saved.run
            if not checkpoint.continued.repeats:
                run.set_generators()
            return run.user_state

    def resumed(self) -> None:
        """Set the options of param groups to those of the commit that the run continues, if there is one."""
        checkpoint, committer = self._components.checkpoint, self._components.committer
        if committer is not None:
            committer.set_groups(self.optimizer.param_groups)
        if checkpoint is not None and checkpoint.saved is not None:
            checkpoint.saved.run.set_groups(self.optimizer.param_groups)

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: str = "compute",
        shard: Size = "4GiB",
        merge: bool = False,
    ) -> None:
        """Write the model to the directory `path` as safetensors files in Hugging Face's layout.

        For a PEFT model only the adapters are written, or with merge=True the base model with the active
        adapters merged into it.

        dtype: which values to write. "compute": in the dtypes in which the model computes. "fp32": the fp32
        masters, which are the exact values that the optimizer updates. "average": the running averages of the
        masters. shard: the most bytes of tensors in a file. infinity.checkpoint.export.export describes files
        and errors.
        """
        parts = self._components
        with parts.pager.lock:
            self._refuse()
            if dtype == "average" and self.training_step is not None:
                self.training_step.check_averages()
            if parts.scheduler is not None:
                parts.scheduler.complete_all()
            parts.edits.sync_edits()
            export(self._source(), path, dtype=dtype, shard=shard, merge=merge)

    def compile(self, block_class: type[nn.Module], **options: Any) -> int:
        """Compile the modules of class `block_class` in the model; return how many there are.

        Each module runs as one graph (torch.compile with fullgraph=True). All its pages are fetched before
        the graph runs, so the device needs room for the pages of a whole module. Modules that differ only in
        their parameters share a graph. options: more options of torch.compile, such as backend=.

        Raises ConfigError if the model has no such module. A module that cannot be one graph raises
        ConfigError when it is called.
        """
        parts = self._components
        with parts.pager.lock:
            self._refuse()
            blocks = compile_blocks(self._model, block_class, parts.pager, options)
            self._handles += blocks
            return len(blocks)

    def close(self, *, keep: bool = False) -> None:
        """Wait for all work under way, and free the runtime's memory and files. A second call does nothing.

        keep: False: the model's parameters cannot be used afterwards. True: the model is a plain model in RAM
        afterwards, with trained values. Its parameters are the same objects, now of class nn.Parameter, in
        the dtypes that they had before infinity.offload. A trained parameter that was fp32 has the exact
        values of its fp32 master; a frozen parameter has the values of its page. Make a new optimizer for the
        model, which can load a state_dict() that runtime.optimizer has returned before the call. With
        keep=True, raises BudgetError if RAM has no room for all parameters beside the pages, and ConfigError
        wherever `save` does; the runtime is still open then. With several ranks, which must all give the same
        `keep`, each rank gets all parameters.

        In a process that was forked from the runtime's process the call does nothing.
        """
        parts = self._components
        if parts.health.forked:
            return
        with parts.pager.lock:
            kept = self._plain_parameters() if keep else None
            scaling = [] if self._end_scaling is None else [self._end_scaling]
            hooks = functools.partial(self._hooks.remove, all_of_them=keep)
            if not parts.health.closed:
                parts.ranks.leave()
            ends = [*(handle.remove for handle in self._handles), *scaling, hooks]
            _end(parts, ends, finally_=None if kept is None else kept.give_back)

    def _plain_parameters(self) -> PlainParameters | None:
        """Copy all parameters for `close`; None if they are plain already."""
        parts = self._components
        paged_now = any(is_paged(each) for each in self._model.parameters())
        if parts.health.closed and not paged_now:
            return None
        self._check_between("close(keep=True)")
        if parts.scheduler is not None:
            parts.scheduler.complete_all()
        parts.edits.sync_edits()
        return PlainParameters(self._model, parts.pager, parts.ranks.place.ranks)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._components.health.closed:
            self._components.ranks.fail(error)
        self.close()

    # --- called by hooks -------------------------------------------------------------------------------

    def _gradient_arrived(self, parameter: torch.Tensor) -> None:
        self._training().gradient_arrived(parameter, self._accumulator)

    def _forward_done(self) -> None:
        if self._components.gradients is None:
            with self._components.pager.lock:
                self._components.prefetch_engine.step_done()

    def _check_copy(self, module: nn.Module) -> None:
        nbytes = sum(each.numel() * each.element_size() for each in module.parameters())
        _check_capacity(self._components.health, nbytes)

    def _unfinished(self) -> str:
        """Return why no commit is possible now, as a phrase for an error; "" if a commit is possible."""
        pager = self._components.pager
        if pager.inside:
            return "inside of a forward or a backward"
        if any(page.holds for page in pager.pages):
            return "inside of full_parameters"
        if self._components.states is not None and self._components.states.exchanged:
            return "inside of averaged"
        if self.training_step is not None and self.training_step.open:
            return "between the first backward of a step and its step()"
        return ""

    # --- helpers ---------------------------------------------------------------------------------------

    def _check_between(self, call: str) -> None:
        """Raise ConfigError if no commit is possible now, and the runtime's failure if there is one."""
        self._refuse()
        where = self._unfinished()
        if where:
            raise ConfigError(f"{call}() was called {where}.", "Call it after optimizer.step().")

    def _copies(self) -> Copies:
        parts = self._components
        return Copies(
            self._source(),
            pages=parts.pages,
            edits=parts.edits,
            prefetch_engine=parts.prefetch_engine,
            scheduler=parts.scheduler,
            committer=parts.committer,
            scale=parts.scale,
            health=parts.health,
            ranks=parts.ranks,
        )

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.training_step is None else self.optimizer.param_groups

    def _source(self) -> Source:
        parts = self._components
        compute = parts.plan.precision.compute_dtype
        return Source(self._model, parts.pager, parts.store, parts.states, compute)

    def _training(self) -> TrainingStep:
        if self.training_step is None:
            raise ConfigError(
                "The model was offloaded without an optimizer, so it has no gradients.",
                "Give infinity.offload an optimizer to train, or run the model under torch.no_grad().",
            )
        return self.training_step


def _hooked(parameter: Any, arrived: Callable[[torch.Tensor], None]) -> Any:
    """Have `arrived` called with a parameter after each of its gradients; return the hook's handle.

    The parameter may be frozen, such as an adapter of PEFT that is trained later. Torch accepts no hook on a
    frozen parameter, so it is made trainable while the hook is registered.
    """
    trained = parameter.requires_grad
    parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(arrived)
    parameter.requires_grad_(trained)
    return handle


def _check_capacity(health: Health, nbytes: int) -> None:
    """Raise BudgetError if a copy of `nbytes` bytes, to be made for user code, does not fit in free RAM."""
    health.check()
    usable = machine.memory().usable
    if nbytes > usable:
        raise BudgetError(
            f"A copy of {format_size(nbytes)} was asked for, and {format_size(usable)} of RAM are free.",
            "Read single parameters and states instead (runtime.full_parameters(module), "
            "runtime.optimizer.state[p]).",
        )


class _Remains:
    """The Components of a runtime, by weak references. An attribute is None once its object is freed."""

    def __init__(self, parts: Components) -> None:
        self._parts = {
            each.name: weakref.ref(getattr(parts, each.name))
            for each in dataclasses.fields(parts)
            if each.name != "pages" and getattr(parts, each.name) is not None
        }

    def __getattr__(self, name: str) -> Any:
        found = self._parts.get(name)
        return None if found is None else found()

    @property
    def open(self) -> bool:
        """Whether the runtime has not been closed, and its pages are alive."""
        pager, health = self.pager, self.health
        return pager is not None and not health.closed


_opened: list[tuple[weakref.ref[Runtime], _Remains]] = []
"""The runtimes of this process that may be open, without those of several ranks."""


def close_dropped() -> None:
    """Close the runtimes of this process to which nothing refers any more, but whose components are still
    referred to.

    For example, the graph of a loss refers to parameters, and these to their pages, which keep files and
    memory. A model's hooks refer to its runtime, so a runtime that is gone has no model left that could be
    trained or read. With several ranks nothing is closed, because ranks collect garbage at different times.
    """

    _opened[:] = [each for each in _opened if each[1].open]
    if _opened:
        gc.collect()
    for runtime, remains in list(_opened):
        if runtime() is None and remains.open:
            _end(remains, [])


def _end(
    parts: Components | _Remains,
    ends_of_hooks: Iterable[Callable[[], None]],
    *,
    finally_: Callable[[], None] | None = None,
) -> None:
    """End a runtime as `Runtime.close` says. ends_of_hooks: functions that remove hooks. finally_: function
    that is called at the end.
    """
    if parts.health.forked:
        return
    with parts.pager.lock:
        if parts.health.closed:
            return
        parts.health.closed = True
        with ExitStack() as ends:  # runs the callbacks from last to first, even if one fails
            ends.callback(parts.pager.lock.close)
            if finally_ is not None:
                ends.callback(finally_)
            for owner in (parts.ranks, parts.checkpoint, parts.store, parts.threads, parts.gradients):
                if owner is not None:
                    ends.callback(owner.close)
            ends.callback(parts.pager.forget)
            for page in parts.pager.pages:
                ends.callback(page.end)
            ends.callback(parts.pager.prefetch_engine.abandon)
            if parts.scheduler is not None:
                ends.callback(parts.scheduler.abandon)
            for end in ends_of_hooks:
                ends.callback(end)
            ends.callback(parts.pager.forwards.prune)
            if parts.committer is not None:
                ends.callback(parts.committer.stop)  # even if the line below fails
                ends.callback(parts.committer.close)
