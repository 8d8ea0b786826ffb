"""Transformers: a Trainer whose model is in pages, and whose checkpoints are written and read page by page.

`attach` changes one trainer, and no class. The loop stays transformers' own: it clips, scales and drops
gradients through `p.grad` (infinity/model/paged_gradient.py) and steps `Runtime.optimizer`.

[Note: files of a checkpoint] The directory `checkpoint-N` has the model as from_pretrained reads it, and
Trainer's own files. Without commits, its directory `run` is a copy of the run, written by `Runtime.save`.
With commits, each checkpoint is made together with a commit, which has the optimizer states, and the number N
in its user state. For a model of PEFT, `checkpoint-N` has the files of the adapters; without commits, their
optimizer states are in optimizer.pt and not in `run`.

[Note: backwards of a step] The last step of an epoch may have fewer backwards than accumulation= declares.
Its updates are then neither eager nor read ahead, and have the same bits.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers.trainer import (
    OPTIMIZER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    TRAINING_ARGS_NAME,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from infinity.api import offload
from infinity.checkpoint.run_state import generators, set_generators
from infinity.config import Budget, Precision
from infinity.errors import ConfigError, storage_errors
from infinity.layout.adapters import tuned_layers
from infinity.layout.names import is_a
from infinity.runtime import Runtime

_WRITTEN = ("*.safetensors", "*.safetensors.index.json")
"""Patterns of the names of the files in which a model is written."""
_RUN = "run"
"""The name of the directory, in a checkpoint, that is a copy of the run."""
_STEP = "global_step"
_OWN = ("_save", "_save_optimizer_and_scheduler", "_load_from_checkpoint", "_load_best_model")
"""The methods of a Trainer that `_Checkpoints` replaces."""


def attach(
    trainer: transformers.Trainer,
    *,
    budget: Budget | None = None,
    precision: Precision | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Runtime:
    """Offload a Trainer's model with the optimizer that the Trainer makes; return the model's runtime.

    Called once, before `Trainer.train`. trainer: a transformers.Trainer or one of a subclass, such as TRL's.
    precision: by default compute in bf16 or fp16 if the arguments say bf16=True or fp16=True, else in fp32.
    Autocast and accelerate's loss scale are turned off: pages and the runtime replace them. budget, options:
    as for infinity.offload. By default `accumulation` is gradient_accumulation_steps and `device` the
    Trainer's.

    `checkpoint-N` directories are written without the RAM that a state_dict takes; each can be resumed from,
    and from_pretrained reads its model. With `checkpoint=DIRECTORY` the states are committed there instead of
    copied, which is faster. Only the newest checkpoint can then be resumed: attach with resume=DIRECTORY, and
    train(resume_from_checkpoint=True). load_best_model_at_end restores the whole run of the best checkpoint,
    with its optimizer states.

    With several ranks, started by torchrun, all attach; DistributedDataParallel does not wrap the model.

    A Trainer's constructor moves its model to the device. To prevent this, give the constructor arguments of
    a class with place_model_on_device = False. This is needed for a model that does not fit the device, and
    for a model on meta, which weights= fills.

    Raises ConfigError for features that need a model without pages: model_init and hyperparameter search,
    torch_compile, FSDP, DeepSpeed, DataParallel, and evaluation in another dtype. Raises ConfigError also for
    a model that accelerate has prepared, and for a subclass that overrides the Trainer's methods that save
    and load checkpoints. Raises the errors of infinity.offload.
    """
    _check(trainer, checkpoint is not None or resume is not None)
    arguments, model = trainer.args, cast(Any, trainer.model)
    if precision is None:
        precision = Precision(compute="bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "fp32")
    options = {
        "accumulation": arguments.gradient_accumulation_steps,
        "device": arguments.device,
        **options,
    }
    runtime = offload(
        model,
        trainer.create_optimizer(),
        budget=budget,
        precision=precision,
        checkpoint=checkpoint,
        resume=resume,
        **options,
    )
    vars(trainer).update(
        optimizer=runtime.optimizer,
        create_optimizer=lambda model=None: runtime.optimizer,
        hyperparameter_search=_no_search,
        _load_scaler=lambda checkpoint: None,  # of a plain Trainer: pages have a loss scale of their own
    )
    model._is_accelerate_prepared = True  # accelerate then wraps it in nothing
    trainer.accelerator.native_amp, trainer.accelerator.scaler = False, None
    trainer.accelerator.state._mixed_precision = "no"
    _Checkpoints(trainer, runtime, commits=checkpoint is not None or resume is not None, resumed=resume)
    return runtime


class _Checkpoints(transformers.TrainerCallback):
    """Writes and reads the checkpoints of one trainer; see [Note: files of a checkpoint]."""

    def __init__(self, trainer: Any, runtime: Runtime, *, commits: bool, resumed: object) -> None:
        """commits: whether commits are on. resumed: the directory of the commit that the run continues, or
        None.
        """
        self._trainer = trainer
        self._runtime = runtime
        self._commits = commits
        self._resumed = resumed
        self._adapters = is_a(trainer.model, "PeftModel")
        self._due: str | None = None
        """The checkpoint from which training is to continue; None if there is none, and once it is loaded."""
        self._plain = {name: getattr(trainer, name) for name in _OWN}
        for name, own in zip(
            _OWN, (self.save, self.save_states, self.load_model, self.load_best), strict=True
        ):
            setattr(trainer, name, own)
        trainer.callback_handler.callbacks.insert(0, self)  # others shall see what was loaded

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        checkpoint, self._due = self._due, None
        if checkpoint is not None:
            self._load(checkpoint)
            # The scheduler comes after the groups' options, which its constructor has changed.
            scheduler = torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True)
            self._trainer.lr_scheduler.load_state_dict(scheduler)
        elif self._resumed is not None and not self._runtime.stats.steps:
            raise ConfigError(
                f"The model was attached with resume={self._resumed!s}, and train() begins anew.",
                "Call train(resume_from_checkpoint=True), or attach without resume=.",
            )

    def save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the model, and the tokenizer and the Trainer's arguments. Replaces `Trainer._save`.

        Without commits, also write a copy of the run to a `checkpoint-N` directory, unless the Trainer saves
        only models or the model's adapters.
        """
        trainer = self._trainer
        directory = Path(trainer.args.output_dir if output_dir is None else output_dir)
        if self._adapters and not tuned_layers(trainer.model):
            # PEFT computes the prompts that it saves from these.
            trained = {
                name: each.detach().clone()
                for name, each in trainer.model.named_parameters()
                if each.requires_grad
            }
            self._plain["_save"](str(directory), trained)
            return
        of_run = directory.name.startswith(PREFIX_CHECKPOINT_DIR) and not trainer.args.save_only_model
        copies = of_run and not self._commits and not self._adapters
        self._write(directory, copies)
        if not trainer.args.should_save:
            return
        tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        with storage_errors("write", str(directory / TRAINING_ARGS_NAME)):
            torch.save(trainer.args, directory / TRAINING_ARGS_NAME)

    def save_states(self, output_dir: str) -> None:
        """Save the scheduler's state. Replaces `Trainer._save_optimizer_and_scheduler`.

        With commits, also make a commit and wait for it. Without commits, also save the optimizer's states if
        adapters are trained; for other models `save` has written them.
        """
        trainer, directory = self._trainer, Path(output_dir)
        writes = trainer.args.should_save
        states = None
        if self._adapters and not self._commits:
            states = self._runtime.optimizer.state_dict()  # with several ranks, all take part
        with storage_errors("write to", output_dir):
            if writes:
                torch.save(trainer.lr_scheduler.state_dict(), directory / SCHEDULER_NAME)
            if writes and states is not None:
                torch.save(states, directory / OPTIMIZER_NAME)
        if self._commits:
            # The checkpoint is complete before its commit replaces the previous commit.
            trainer._save_rng_state(output_dir)
            if writes:
                trainer.state.save_to_json(str(directory / TRAINER_STATE_NAME))
            self._runtime.save(state={_STEP: trainer.state.global_step}).wait()

    def load_model(self, checkpoint: str, model: Any = None) -> None:
        """Load a plain Trainer's checkpoint now; have `on_train_begin` load a checkpoint of a paged model.
        Replaces `Trainer._load_from_checkpoint`.
        """
        if self._is_plain(checkpoint):
            self._plain["_load_from_checkpoint"](checkpoint, model)
        else:
            self._due = checkpoint

    def load_best(self) -> None:
        """Load the best checkpoint. Replaces `Trainer._load_best_model`."""
        best = self._trainer.state.best_model_checkpoint
        self._plain["_load_best_model"]() if self._is_plain(best) else self._load(best)

    def _is_plain(self, checkpoint: str) -> bool:
        """Whether a checkpoint has the files of a Trainer without pages, so that Trainer can read it."""
        return os.path.isfile(os.path.join(checkpoint, OPTIMIZER_NAME))

    def _load(self, checkpoint: str) -> None:
        """Restore the run of a checkpoint. Random number generators are left to Trainer, which sets them
        later.
        """
        kept = generators()
        if not self._commits:
            if not os.path.isdir(os.path.join(checkpoint, _RUN)):
                raise ConfigError(
                    f"{checkpoint} has no states of an optimizer, so training cannot go on from it.",
                    "If its states were committed, attach with resume= and the directory of the commits.",
                )
            self._runtime.load(os.path.join(checkpoint, _RUN))
        else:
            self._check_step(checkpoint)
        set_generators(kept)

    def _check_step(self, checkpoint: str) -> None:
        """Load the commit that the run continues, and check that it is of the same step as `checkpoint`.

        Raises ConfigError if the steps differ, or if the run continues no commit.
        """
        if self._resumed is None:
            raise ConfigError(
                f"The states of {checkpoint} are in a commit, and attach was called without resume=.",
                "Give attach resume= with the directory of the commits.",
            )
        step = int(self._runtime.load()[_STEP])
        asked = transformers.TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
        if asked.global_step != step:
            raise ConfigError(
                f"{checkpoint} is of step {asked.global_step}, and the newest commit of step {step}.",
                f"Resume from checkpoint-{step}, or leave checkpoint= out to have a copy in each checkpoint.",
            )

    def _write(self, directory: Path, copies: bool) -> None:
        """Replace the model and the copy of the run in `directory`. copies: whether to write a new copy."""
        with storage_errors("write to", str(directory)):
            directory.mkdir(parents=True, exist_ok=True)
            beside = Path(tempfile.mkdtemp(prefix=".writing-", dir=directory))
        try:
            self._runtime.export(beside)
            if copies:
                self._runtime.save(beside / _RUN)
            if self._trainer.args.should_save:
                with storage_errors("write to", str(directory)):
                    shutil.rmtree(directory / _RUN, ignore_errors=True)
                    for pattern in _WRITTEN:
                        for old in directory.glob(pattern):
                            old.unlink()
                    for new in beside.iterdir():
                        if new.is_dir():
                            shutil.rmtree(directory / new.name, ignore_errors=True)
                        new.replace(directory / new.name)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def _check(trainer: Any, commits: bool) -> None:
    """Raise ConfigError for a trainer that cannot be attached. commits: whether commits are on."""
    arguments = trainer.args
    refused = {
        "model_init, which makes the model in train()": (
            trainer.model_init is not None,
            "Give the Trainer model=.",
        ),
        "torch_compile": (arguments.torch_compile, "Leave it out; compile the functions that blocks call."),
        "FSDP": (trainer.is_fsdp_enabled, "Leave fsdp out: partition= of attach divides the model."),
        "DeepSpeed": (
            trainer.is_deepspeed_enabled,
            "Leave deepspeed out; see infinity.from_deepspeed_config.",
        ),
        "several GPUs in one process": (
            arguments.n_gpu > 1,
            "Start one process for each GPU with torchrun, or set CUDA_VISIBLE_DEVICES to one.",
        ),
        "evaluation in another dtype": (
            arguments.fp16_full_eval or arguments.bf16_full_eval,
            "Leave fp16_full_eval and bf16_full_eval out: precision= says in what the model computes.",
        ),
        "load_best_model_at_end, and checkpoints that cannot bring a run back": (
            arguments.load_best_model_at_end and (commits or arguments.save_only_model),
            "Leave checkpoint=, resume= and save_only_model out.",
        ),
        "save_on_each_node": (
            arguments.save_on_each_node and arguments.world_size > 1,
            "Leave it out, and give all nodes one output_dir: the first rank writes for all.",
        ),
        "a model that accelerate has prepared": (
            getattr(trainer.model, "_is_accelerate_prepared", False)
            or trainer.model_wrapped is not trainer.model,
            "Attach a new Trainer, before train() and evaluate().",
        ),
    }
    for name in _OWN:
        changed = getattr(type(trainer), name) is not getattr(transformers.Trainer, name)
        refused[f"a {name} of its own"] = (changed, "Override save_model or train, or use a callback.")
    for what, (found, cure) in refused.items():
        if found:
            raise ConfigError(f"attach was called with a Trainer that has {what}.", cure)


def _no_search(*_: Any, **__: Any) -> Any:
    raise ConfigError(
        "hyperparameter_search was called on a Trainer whose model is in pages.",
        "Make and attach a new Trainer for each trial.",
    )
