"""Public calls: `plan` plans where the pages of a model lie and moves nothing; `offload` moves the model."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from infinity.activations.policy import PolicyChoice
from infinity.build import bytes_on, bytes_set_aside, carry_out
from infinity.checkpoint.directory import Checkpoint
from infinity.checkpoint.restore import division_of
from infinity.config import Budget, Precision, node_cache_limit
from infinity.device_update.kernel_trial import refusal
from infinity.errors import ConfigError
from infinity.formats.casts import InputCast
from infinity.formats.optimizer_rules import Rule
from infinity.gradients.tile_sums import add_up
from infinity.layout.adapters import keep_adapters
from infinity.layout.chunks import Division
from infinity.layout.shards import Share
from infinity.model.hooks import check_unsharded
from infinity.model.tiled_parameter import is_paged
from infinity.planning.fake_step import FakeStep, run_fake_step
from infinity.planning.machine_file import Machine
from infinity.planning.machine_rates import measure_rates
from infinity.planning.plan import Plan
from infinity.planning.planner import Available, make_plan, quickest
from infinity.planning.predict import UpdateTime
from infinity.planning.residual_states import Residuals
from infinity.ranks import SingleRank
from infinity.runtime import Runtime, close_dropped
from infinity.system import launcher
from infinity.system.directory import free_bytes, path_text
from infinity.system.disk_files import injected_files
from infinity.tiers.tier import usable_device

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def offload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    budget: Budget | None = None,
    precision: Precision | None = None,
    device: torch.device | str | None = None,
    weights: str | os.PathLike[str] | None = None,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
    update: str = "auto",
    activations: str = "auto",
    accumulation: int | None = None,
    average: float | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    mesh: DeviceMesh | None = None,
    partition: str | None = "parameters",
) -> Runtime:
    """Move the parameters, gradients and optimizer states of a model into pages; return the model's runtime.

    model: any nn.Module; it is changed in place. It may be in RAM, on the device, or built under
    torch.device("meta"); in the last case the model's own initialisers fill it, module by module. optimizer:
    AdamW, Adam, SGD, Adagrad or Muon of torch.optim, Lion of lion-pytorch, or AdamW or Lion of bitsandbytes,
    over the model's parameters; `Runtime.optimizer` replaces it. None: inference only. budget: bytes of each
    tier that the runtime may use. precision: the dtypes of computation and states. device: where the model
    computes; by default "cuda" if there is a GPU, else "cpu". weights: a safetensors file, or a directory of
    such files, from which the model is filled. example_inputs: see infinity.plan.

    update: the time when parameters are updated. A unit is a group of parameters that move together. "sync":
    all units before `step` returns. "lazy": each unit before its next use, while earlier units compute.
    "eager": each unit in the backward that brings the unit's last gradient; infinity/optim/decision.py says
    what this needs. "speculative": as "eager", but exact with clipping and with the loss scaling of fp16: an
    update that turns out to be wrong is undone and done again. What updates change then takes a second place
    in its tier, in RAM as far as it has room. "auto": "speculative" where `accumulation` is declared and the
    plan's prediction says that steps are at least 5% faster so; else, and without example_inputs, "lazy". A
    run that continues a commit keeps the commit's choice where that lets it adopt the commit's files.
    `Plan.update` says which.

    activations: what becomes of the tensors that autograd saves in a forward. "keep": they stay where the
    model computes. "recompute": each block that the model repeats, such as a decoder's layer, keeps only its
    inputs and runs again in the backward, with the same bits; infinity/activations/recomputation.py says
    which blocks are left alone. "auto": "keep", unless the plan says that activations do not fit, or that a
    step is at least 5% faster otherwise. Then the first blocks run again, saved tensors of the next ones
    leave the memory that computes, and the last ones keep their activations, as many as the prediction says.
    "keep" without example_inputs. `Plan.residuals` says which, and names the blocks. Without an optimizer
    autograd saves nothing, and all values mean "keep".

    accumulation: the number of backwards in a step; None: unknown. Eager and speculative updates need this
    number. Lazy
    updates use it to read their first states during the last backward. With accumulation=1 gradients move
    less, so the plan puts optimizer states before gradients into the nearer tiers. A gradient is then stored
    in its parameter's dtype, which changes no bit of the training results. A second gradient of a parameter
    in one step raises ConfigError.

    average: the decay, from 0 to 1, of a running average of each trainable parameter's fp32 master; None: no
    averages. The averages take 4 bytes a parameter, in pages beside the optimizer's states. They have the
    bits of torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(average) over fp32 parameters on the
    CPU, whose update_parameters is called after each step: the first step sets them to the masters. A step
    that fp16 skips leaves them unchanged. Commits and copies contain them. `Runtime.average` returns them,
    `Runtime.averaged` puts them into the model, and `Runtime.export` can write them. With averages no
    parameter is updated on the device. ConfigError is raised for averages with update="eager" or with several
    ranks.

    checkpoint: a directory for commits, which turns `Runtime.save` on. Parameters and states then take twice
    their bytes on disk, in the directories of the budget's nvme, or in this directory if the budget has none.
    The directory is made if it does not exist, and refused if it has the commits of another run. resume: a
    directory whose newest commit the run continues, bit by bit, with the same model, optimizer and precision;
    budgets, tiers, chunks and the partition may differ. Later commits go there too, unless `checkpoint` names
    another directory. Call `Runtime.load` for the state that was saved with the commit.

    mesh, partition: for several ranks, which are processes that train the model together, each with
    micro-batches of its own (torchrun starts them). mesh: a 1-D mesh of these ranks, such as one dimension of
    a larger mesh; by default all ranks.
    partition: the pages that the ranks divide among them. "parameters": all pages, which is ZeRO's stage 3.
    "gradients": gradients and optimizer states (stage 2). "optimizer": optimizer states (stage 1). None: no
    pages. Gradients are averaged over ranks. Every rank calls this function with an equal model and
    optimizer; parameters, buffers and optimizer states get rank 0's values. `budget` is then the budget of
    each rank.

    Raises BudgetError before anything is moved if a budget is too small; its `needed` is a budget in bytes
    that is enough. Raises UnsupportedOptimizer, ConfigError for a model that cannot be paged, and the errors
    of the tiers (StorageError, StorageFull, DeviceError). A commit that cannot be loaded raises CorruptState
    or IncompatibleCheckpoint. With several ranks, RankDivergence and RankFailure are raised, too. After an
    error the model and the optimizer are as they were.
    """
    launcher.record_at_exit()
    budget, precision = _check_kinds(budget, precision)
    stage = stage_of(partition)
    close_dropped()
    with ExitStack() as cleanup:
        ranks = cleanup.enter_context(meet(mesh, stage, device))
        try:
            check_model(model, optimizer)
            commits = None
            if checkpoint is not None or resume is not None:
                check_commits(optimizer, weights, resume)
                commits = cleanup.enter_context(checkpoint_of(ranks, checkpoint, resume))
            made = plan_for(
                ranks,
                model,
                optimizer,
                budget=budget,
                precision=precision,
                example_inputs=example_inputs,
                update=update,
                activations=activations,
                accumulation=accumulation,
                average=average,
                weights=weights,
                commits=commits,
            )
            if made.no_updates_there and made.rule is not None:
                warnings.warn(f"{made.no_updates_there} The CPU does all updates.", stacklevel=2)
            unmet = made.residuals.unmet if made.residuals.policy == activations else ""
            if unmet:
                warnings.warn(f'activations="{activations}" was asked for, but {unmet}.', stacklevel=2)
            runtime = carry_out(
                made, model, optimizer, budget=budget, weights=weights, checkpoint=commits, ranks=ranks
            )
        except BaseException as error:
            ranks.fail(error)
            raise
        cleanup.pop_all()
    return runtime


def meet(mesh: DeviceMesh | None, stage: int, device: torch.device | str | None) -> SingleRank:
    """Connect this process with the other ranks of its run, if there are any. All ranks call this.

    mesh, device: as in `offload`; "cuda" gives each rank of a node a GPU of its own. stage: ZeRO's stage, 0
    to 3. Raises ConfigError, RankDivergence and RankFailure.
    """
    several = several_ranks(mesh)
    if not several and mesh is None:
        return SingleRank(device)
    place = launcher.location()  # refuses an environment that is none before others are waited for
    usual = f"cuda:{launcher.local_rank()}" if torch.cuda.is_available() else "cpu"
    target = usable_device(usual if device is None or str(device) == "cuda" else device)
    if not several:  # the other ranks on this node train models of their own
        return SingleRank(target, place=place)
    from infinity.distributed.communicator import Communicator

    return Communicator(mesh, stage, target)


def checkpoint_of(
    ranks: SingleRank,
    checkpoint: str | os.PathLike[str] | None,
    resume: str | os.PathLike[str] | None,
) -> Checkpoint:
    """Open the directory for this rank's commits, and read the commit to continue if `resume` is given.

    checkpoint, resume: as in `offload`. All ranks call this. Raises the errors of `Checkpoint`, and
    RankDivergence if only some ranks give `checkpoint`, or only some give `resume`.
    """
    ranks.same("offload()", checkpoint=checkpoint is not None, resume=resume is not None)
    return Checkpoint(checkpoint, resume, injected_files(), ranks)


def plan(
    model_or_config: Any,
    optimizer: torch.optim.Optimizer | None,
    *,
    budget: Budget | None = None,
    precision: Precision | None = None,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    update: str = "auto",
    activations: str = "auto",
    accumulation: int | None = None,
    average: float | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    machine: str | os.PathLike[str] | None = None,
) -> Plan:
    """Make the plan by which `offload` would move a model with the same arguments; nothing is moved.

    model_or_config: a module on any device, including meta, or a transformers configuration. optimizer: None
    for inference only. example_inputs: positional or keyword arguments of one forward. With them the plan
    knows the memory of activations and predicts the seconds of a step. For this a copy of the model runs a
    step without data; the model and the inputs do not change. If the copy cannot run,
    `Plan.activations_unknown` says why. For the prediction the rates of this machine are probed in about 2 s,
    and kept in the user's cache directory; the rates of disks are kept for five minutes. checkpoint: the
    directory of commits, as in `offload`, which is not touched; None: commits are off. machine: the machine
    file of another machine, or the name of one that comes with the package, to plan for that machine. Nothing
    is then measured here, and budgets that are not given are taken from the file (docs/planning.md). All
    other arguments: as in `offload`.

    Raises BudgetError if a budget is too small; its `needed` is a budget in bytes that is enough. Raises
    ConfigError, UnsupportedOptimizer, and StorageError for a directory that cannot be probed.
    """
    return plan_for(
        SingleRank(device),
        model_or_config,
        optimizer,
        budget=budget,
        precision=precision,
        example_inputs=example_inputs,
        update=update,
        activations=activations,
        accumulation=accumulation,
        average=average,
        slab_directory=None if checkpoint is None else path_text(checkpoint),
        machine=machine,
    )


def plan_for(
    ranks: SingleRank,
    model_or_config: Any,
    optimizer: torch.optim.Optimizer | None,
    *,
    budget: Budget | None,
    precision: Precision | None,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | None,
    update: str,
    activations: str = "auto",
    accumulation: int | None,
    average: float | None = None,
    weights: str | os.PathLike[str] | None = None,
    commits: Checkpoint | None = None,
    slab_directory: str | None = None,
    prefer: Division | None = None,
    machine: str | os.PathLike[str] | None = None,
) -> Plan:
    """Make the plan of `plan` or `offload`. With several ranks, all call this, and divide the model alike.

    ranks: connects with the other ranks; its device is where the model computes. commits: the directory of
    commits and the commit to continue, for `offload`; None for `plan`, or if commits are off. slab_directory,
    prefer: used only without `commits`. slab_directory: where slabs would be; None if commits are off.
    prefer: the division of a commit, to be kept where possible, so that its pages could stay where they lie.
    Other parameters: as in `plan`. Raises the errors of `plan` and of SingleRank.agreed_plan.
    `infinity.build.carry_out` carries the plan out.
    """
    budget, precision = _check_kinds(budget, precision)
    ranks.check_equal(
        model_or_config,
        optimizer,
        precision=precision,
        weights=weights is None,
        commits=commits is None,
        activations=activations,
        average=average,
    )
    chosen = _update_time(update, accumulation, precision, ranks.share)
    other = None if machine is None else Machine.read(machine)
    if other is None:
        target = usable_device(ranks.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    else:
        target = other.device(ranks.device)
    model = as_model(model_or_config)
    precision = keep_adapters(precision, model)
    InputCast(model, precision)  # raises ConfigError for a pattern of inputs that matches no argument
    rule = _rule_of(optimizer, precision, average, chosen)
    if rule is not None:
        precision = replace(precision, states=rule.states)  # an 8-bit optimizer chooses them
    if commits is not None:
        slab_directory = str(commits.directory)
        prefer = None if commits.saved is None else division_of(commits.saved)
    on_node = ranks.place.ranks
    own = bytes_on(model, target) if other is None else 0
    available = Available.now(target, on_node, own) if other is None else Available.of(other, on_node)
    make = functools.partial(
        make_plan,
        model,
        rule,
        budget=budget,
        precision=precision,
        device=target,
        accumulation=accumulation,
        commits=slab_directory is not None,
        slab_directory=slab_directory,
        share=ranks.share,
        node_cache=node_cache_limit(),
        machine=None if other is None else other.text,
        searches={},
    )
    if other is None:
        make = functools.partial(_plan_here, make, target, available, own)
    else:
        make = functools.partial(make, available=available)
    run = None
    if example_inputs is not None:
        run = functools.partial(
            run_fake_step,
            model,
            example_inputs,
            precision=precision,
            device=target,
            train=rule is not None,
            add_up=None if budget.is_unified(target) else add_up,
        )
    policy = PolicyChoice(
        model,
        activations,
        run,
        budget=budget,
        device=target,
        headroom=available.headroom,
        train=rule is not None,
    )

    def draft(agreed: Division | None) -> Plan:
        return policy.plan(functools.partial(draft_for, agreed), could_adopt)

    def draft_for(agreed: Division | None, residuals: Residuals, estimate: FakeStep | None) -> Plan:
        made = functools.partial(make, update=chosen, prefer=agreed or prefer, residuals=residuals)
        if estimate is None:
            return made()
        if estimate.unknown is not None:
            return made(activations_unknown=estimate.unknown)
        made = functools.partial(made, activations=estimate.activations)
        made()  # if the model cannot fit, this raises before any measurement
        if other is None:
            speeds = measure_rates(budget.nvme_bytes, target, precision.compute_dtype, estimate.work.flops)
        else:
            speeds = other.rates(len(budget.nvme_bytes), on_node)
        made = functools.partial(made, work=estimate.work, speeds=speeds)
        if update != "auto":
            return made()
        return quickest(
            lambda time: made(update=time),
            functools.partial(_disks_hold, budget) if other is None else lambda plan: True,
            None if commits is None or commits.continued is None else could_adopt,
        )

    def could_adopt(made: Plan) -> bool:
        """Whether, as far as this rank knows, the slabs of the continued commit can be those of a plan."""
        return commits is not None and commits.adopted(made, budget) is not None

    def adopts(made: Plan) -> bool:
        if commits is not None and commits.continued is not None:
            commits.continued.divide(made)
        return could_adopt(made)

    return ranks.agreed_plan(budget, draft, adopts)


def _disks_hold(budget: Budget, plan: Plan) -> bool:
    """Whether the disks have as many free bytes as a plan's slabs and scratch take."""
    there = [each for each in budget.nvme_bytes or [plan.slab_directory] if each and os.path.isdir(each)]
    free = {os.stat(each).st_dev: free_bytes(each) for each in there}
    return not free or sum(free.values()) >= plan.nvme_bytes + plan.residuals.disk


def _plan_here(
    make: Callable[..., Plan], device: torch.device, available: Available, own: int, **more: Any
) -> Plan:
    """Make a plan for what this machine can do now.

    make: `make_plan` with all arguments but `available` and those in `more`. own: bytes of the model on
    `device`. They count as free if RAM has room for what must leave before the pages are there. Units are
    updated on `device` only if a trial has the CPU's bits there.
    """
    found = make(available=available, **more)
    if own and bytes_set_aside(found, own) + found.arena_bytes > available.host:
        available = replace(available, device=max(0, available.device - own))
        found = make(available=available, **more)
    reason = refusal(device, found.update_kinds) if found.update_kinds else None
    if reason is None:
        return found
    return make(available=replace(available, device_updates=False, no_updates_there=reason), **more)


def _check_kinds(budget: Budget | None, precision: Precision | None) -> tuple[Budget, Precision]:
    """Return budget and precision, with defaults for None. Raises ConfigError for values of other types."""
    if not isinstance(budget, Budget | None):
        raise ConfigError(f"The budget is a {type(budget).__name__}.", "Give infinity.Budget(host=..., ...).")
    if not isinstance(precision, Precision | None):
        raise ConfigError(
            f"The precision is a {type(precision).__name__}.", 'Give infinity.Precision(compute="bf16", ...).'
        )
    return budget or Budget(), precision or Precision()


def _rule_of(
    optimizer: torch.optim.Optimizer | None, precision: Precision, average: float | None, chosen: UpdateTime
) -> Rule | None:
    """The rule of an optimizer, with running averages if `average` is given; None without an optimizer.

    Raises UnsupportedOptimizer, and ConfigError if averages or whole matrices do not go with the time of the
    updates.
    """
    early = chosen in ("eager", "speculative")
    if average is not None and optimizer is None:
        raise ConfigError("Running averages were asked for without an optimizer.", "Leave average= out.")
    if average is not None and early:
        raise ConfigError(
            f"Running averages were asked for with {chosen} updates, for which they are not implemented.",
            'Give update="lazy", or leave average= out.',
        )
    rule = None if optimizer is None else Rule.of(optimizer, precision.states, average)
    if rule is not None and rule.matrix and early:
        raise ConfigError(
            f'update="{chosen}" was asked for with {rule.name}, which updates whole matrices.',
            'Give update="lazy".',
        )
    return rule


def _update_time(update: str, accumulation: int | None, precision: Precision, share: Share) -> UpdateTime:
    """Check the options `update` and `accumulation`, and return `update`, or "lazy" for "auto", of which
    `quickest` in infinity/planning/planner.py may make "speculative".

    update: the time when a step's updates run: "auto", or a value of `UpdateTime`. accumulation: number of
    backward passes in a step; None if unknown. Raises ConfigError for an unknown `update`, for an
    `accumulation` that is not a positive integer, for eager and speculative updates without `accumulation`,
    for eager ones with fp16, and for speculative ones of ranks that do not divide gradients.
    """
    if update not in ("auto", "lazy", "eager", "speculative", "sync"):
        raise ConfigError(
            f"The update {update!r} is not known.", 'Give "auto", "lazy", "eager", "speculative" or "sync".'
        )
    if accumulation is not None and (not isinstance(accumulation, int) or accumulation < 1):
        raise ConfigError(
            f"accumulation={accumulation!r} was declared.", "Give how many backwards a step has: at least 1."
        )
    if update not in ("eager", "speculative"):
        return "sync" if update == "sync" else "lazy"
    if accumulation is None:
        raise ConfigError(
            f'With update="{update}" updates run in the last backward of a step, and accumulation= does not '
            "say which that is.",
            "Declare how many backwards a step has: accumulation=1, or more.",
        )
    if update == "speculative":
        if share.ranks > 1 and share.whole_gradients:
            raise ConfigError(
                "Speculative updates were asked for with ranks that do not divide gradients, and add them up "
                "in step().",
                'Give partition="gradients" or "parameters", or update="lazy".',
            )
        return "speculative"
    if precision.compute_dtype == torch.float16:
        raise ConfigError(
            "Eager updates were asked for with fp16, whose steps are skipped where any gradient overflows.",
            'Give compute="bf16" or "fp32", or update="lazy".',
        )
    return "eager"


def as_model(model_or_config: Any) -> nn.Module:
    """Return a module unchanged, or build the model of a transformers configuration on the meta device.

    The model is a causal language model if transformers has one for this configuration. Raises ConfigError
    for any other argument, and if transformers is not installed.
    """
    if isinstance(model_or_config, nn.Module):
        return model_or_config
    if not hasattr(model_or_config, "model_type"):
        raise ConfigError(
            f"A {type(model_or_config).__name__} was given to plan.",
            "Give an nn.Module, or a transformers configuration (AutoConfig.from_pretrained).",
        )
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "A transformers configuration was given and transformers is not installed.",
            "Install transformers, or give the model, built under torch.device('meta').",
        ) from error
    causal = transformers.AutoModelForCausalLM._model_mapping
    kind = transformers.AutoModelForCausalLM if type(model_or_config) in causal else transformers.AutoModel
    with torch.device("meta"):
        built: nn.Module = kind.from_config(model_or_config)  # type: ignore[no-untyped-call]
    return built


def check_commits(
    optimizer: torch.optim.Optimizer | None,
    weights: str | os.PathLike[str] | None,
    resume: str | os.PathLike[str] | None,
) -> None:
    if optimizer is None:
        raise ConfigError(
            "Commits were asked for without an optimizer.", "Give infinity.offload an optimizer to train."
        )
    if resume is not None and weights is not None:
        raise ConfigError(
            "weights= and resume= were both given.", "Leave weights= out: the commit has the parameters."
        )


def several_ranks(mesh: DeviceMesh | None) -> bool:
    """Whether this process is one of several ranks. mesh: as in `offload`. Raises ConfigError."""
    if mesh is not None:
        _check_mesh(mesh)
        return mesh.size() > 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size() > 1
    return launcher.world_size() > 1


def _check_mesh(mesh: object) -> None:
    """Raise ConfigError unless `mesh` is a DeviceMesh with one dimension and with this process."""
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"The mesh is a {type(mesh).__name__}.",
            "Give a torch.distributed.device_mesh.DeviceMesh, which init_device_mesh makes, or leave mesh= "
            "out to train on all ranks.",
        )
    if mesh.ndim != 1:
        named = mesh.mesh_dim_names
        cure = (
            "Make it with init_device_mesh(..., mesh_dim_names=...), and give one of its dimensions by name."
        )
        raise ConfigError(
            f"The mesh has {mesh.ndim} dimensions, and pages are shared over one.",
            f'Give the one over which ranks have different data, such as mesh["{named[0]}"].'
            if named
            else cure,
        )
    if mesh.get_coordinate() is None:
        rank, ranks = torch.distributed.get_rank(), mesh.mesh.tolist()
        raise ConfigError(
            f"Rank {rank} is not in the mesh, which has the ranks {ranks}.",
            "Call offload only on ranks of the mesh.",
        )


def stage_of(partition: str | None) -> int:
    """The stage of ZeRO that `partition` names. Raises ConfigError for another name."""
    stages = {None: 0, "optimizer": 1, "gradients": 2, "parameters": 3}
    if partition not in stages:
        raise ConfigError(
            f"The partition is {partition!r}.", 'Give "parameters", "gradients", "optimizer" or None.'
        )
    return stages[partition]


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise ConfigError if the model cannot be paged, or if the optimizer is not made for this model."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"The model is a {type(model).__name__}.", "Give an nn.Module.")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel, torch.jit.ScriptModule)):
        raise ConfigError(
            f"The model is a {type(model).__name__}, which handles its parameters by itself.",
            "Give infinity.offload the plain module inside of it.",
        )
    check_unsharded(model)
    known = set()
    for name, parameter in model.named_parameters():
        known.add(id(parameter))
        if is_paged(parameter):
            raise ConfigError(
                f"The parameter {name} is in pages already.",
                "Close its runtime with runtime.close(keep=True) before, or build the model anew.",
            )
        if parameter.grad is not None:
            raise ConfigError(
                f"The parameter {name} has a gradient.", "Call optimizer.zero_grad() before infinity.offload."
            )
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    if any(id(each) not in known for group in groups for each in group["params"]):
        raise ConfigError(
            "The optimizer has a parameter that is not the model's.",
            "Build the optimizer of model.parameters(), after the last change to the model.",
        )
