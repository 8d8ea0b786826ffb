"""Lightning strategy: trains a LightningModule whose states are in pages, by Lightning's own Trainer.

[Note: checkpoints of Lightning]
Lightning puts the model's and the optimizer's tensors into one dictionary, which would take RAM for all of
them. Here the dictionary has an `_Elsewhere` in their places, and a checkpoint is a directory:

- checkpoint.pt: the dictionary without these tensors, written by torch.save.
- run/: a copy of the run, which `Runtime.save` wrote. Or, if only weights were asked for, weights/: what
  `Runtime.export` wrote of the fp32 masters.

[Note: generators]
A run that is resumed shall draw the random numbers of the undisturbed run, which draws some where it begins
to iterate over the training data of an epoch. Before that, the Trainer tries out an iterator, of which the
undisturbed run knows nothing; after that, it tries out the validation data. So generators get the states of
the checkpoint when loaders are processed. When training starts, they get those from before the trial of
validation data, or again those of the checkpoint, if the epoch goes on in which it was made.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision
from lightning.pytorch.plugins import Precision as Plugin
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn

from infinity.api import offload, several_ranks
from infinity.checkpoint.atomic_directory import published, storing
from infinity.checkpoint.run_state import generators, set_generators
from infinity.checkpoint.safetensors_files import open_weights
from infinity.config import Budget, Precision
from infinity.errors import ConfigError
from infinity.runtime import Runtime

_COMPUTE = {
    "32-true": "fp32",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "16-mixed": "fp16",
    "16-true": "fp16",
}
"""`Precision.compute` by the Trainer's `precision`."""
_OF_INFERENCE = ("weights", "example_inputs")
_OF_TRAINING = ("update", "accumulation", "average", "checkpoint")
_DICTIONARY, _RUN, _WEIGHTS = "checkpoint.pt", "run", "weights"


class InfinityStrategy(SingleDeviceStrategy):
    """A strategy for `lightning.pytorch.Trainer` that offloads the LightningModule, for one process.

    `Trainer.fit` offloads with the optimizer of `configure_optimizers`, whose schedulers go on working; a run
    without training offloads for inference. `runtime` stays open after the run, so that `Trainer.test` and
    `Trainer.save_checkpoint` work; `strategy.runtime.close(keep=True)` hands back a plain model. A further
    fit does this by itself, and offloads anew, with a new optimizer as in any strategy.
    """

    strategy_name = "infinity"

    def __init__(
        self, *, budget: Budget | None = None, precision: Precision | None = None, **options: Any
    ) -> None:
        """budget: as in infinity.offload. precision: as there; None: what Trainer(precision=) says, with
        parameters in bf16 or fp16, fp32 masters, and no autocast. options: weights, example_inputs, update,
        accumulation, average and checkpoint of infinity.offload. accumulation is by default what
        Trainer(accumulate_grad_batches=) says; a step may have fewer backwards. The device is the
        Trainer's.

        The methods raise ConfigError for what cannot be trained, and the errors of infinity.offload.
        """
        unknown = options.keys() - {*_OF_INFERENCE, *_OF_TRAINING}
        if unknown:
            raise ConfigError(
                f"InfinityStrategy was given {', '.join(sorted(unknown))}.",
                f"Its options are budget, precision, {', '.join((*_OF_INFERENCE, *_OF_TRAINING))}. "
                "The device is the Trainer's, and fit(ckpt_path=) resumes.",
            )
        self.runtime: Runtime | None = None
        """The runtime of the model that was offloaded last; None before."""
        self._module: LightningModule | None = None
        """The model of `runtime`."""
        self._budget = budget
        self._given = precision
        self._precision = precision
        self._options = options
        self._resumed: dict[str, Any] | None = None
        """The states of random number generators of the checkpoint that fit resumes."""
        self._before_validation: dict[str, Any] | None = None
        """States of generators that such a fit has before it looks at validation data."""
        super().__init__()

    # --- what the Trainer chooses ----------------------------------------------------------------------

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The Trainer's devices, of which there must be one."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        _check_alone("devices", len(devices))
        self._root_device = devices[0]

    @property
    def num_nodes(self) -> int:
        """Number of nodes, which must be 1."""
        return 1

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        _check_alone("num_nodes", number)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Reads the dictionary of checkpoints. Setting the property raises ConfigError."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        raise ConfigError(
            f"A {type(io).__name__} was given to write checkpoints, which needs all tensors in RAM.",
            "Remove it from Trainer(plugins=): InfinityStrategy streams checkpoints to a local directory.",
        )

    @property
    def precision_plugin(self) -> Plugin:
        """Clips gradients in pages, and converts inputs as the Trainer's precision says."""
        plugin: Plugin = super().precision_plugin
        return plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Plugin | None) -> None:
        if plugin is None:  # the constructor: the Trainer's plugin comes later
            self._precision_plugin = None
            return
        compute = _COMPUTE.get(plugin.precision)
        if compute is None or type(plugin) not in (Plugin, MixedPrecision, HalfPrecision):
            raise ConfigError(
                f"The Trainer's precision plugin is {type(plugin).__name__} ({plugin.precision}).",
                f"Give Trainer(precision=) one of {', '.join(_COMPUTE)}.",
            )
        if self._given is None:
            self._precision = Precision(compute=compute)
        elif compute not in ("fp32", self._given.compute):
            raise ConfigError(
                f'The Trainer has precision="{plugin.precision}", and InfinityStrategy computes in '
                f"{self._given.compute}.",
                "Give one of them.",
            )
        half = isinstance(plugin, HalfPrecision)
        self._precision_plugin = _PagedHalf(self, plugin.precision) if half else _PagedClipping(self)
        self._precision_plugin.precision = plugin.precision

    # --- the run ---------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Offload the model, with its optimizer if it is to be trained."""
        if several_ranks(None):
            raise ConfigError(
                "InfinityStrategy was started as one of several ranks.",
                "Start one process; loops of your own with infinity.offload train on several ranks.",
            )
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        self.model = module
        if trainer.state.fn == TrainerFn.FITTING:
            self._close()
            self.setup_optimizers(trainer)
        elif self.runtime is None or self.runtime.closed or self._module is not module:
            self._close()
            self._offload(module, None, {name: self._options.get(name) for name in _OF_INFERENCE})
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Offload with the one optimizer of `configure_optimizers`. Raises ConfigError if it has none or
        several, and UnsupportedOptimizer.
        """
        module = self.lightning_module
        assert module is not None
        optimizers, self.lr_scheduler_configs = _init_optimizers_and_lr_schedulers(module)
        if len(optimizers) != 1 or not optimizers[0].param_groups:
            raise ConfigError(
                f"configure_optimizers returned {len(optimizers)} optimizers."
                if len(optimizers) > 1
                else "configure_optimizers returned no optimizer.",
                "Return one, which may have several parameter groups.",
            )
        options = dict(self._options)
        regular = not any(isinstance(each, GradientAccumulationScheduler) for each in trainer.callbacks)  # type: ignore[attr-defined]
        if regular and module.automatic_optimization:
            options.setdefault("accumulation", trainer.accumulate_grad_batches)
        runtime = self._offload(module, optimizers[0], options)
        self.optimizers = [runtime.optimizer]

    def _offload(
        self, module: LightningModule, optimizer: torch.optim.Optimizer | None, options: Mapping[str, Any]
    ) -> Runtime:
        self.runtime = offload(
            module,
            optimizer,
            budget=self._budget,
            precision=self._precision,
            device=self.root_device,
            **options,
        )
        self._module = module
        self._options.pop("weights", None)  # a second time the model has trained values
        return self.runtime

    def _close(self) -> None:
        """Hand back the model that was offloaded before, as a plain one."""
        if self.runtime is not None and not self.runtime.closed:
            self.runtime.close(keep=True)
        self.runtime = None
        self._reset_optimizers_and_schedulers()

    def model_to_device(self) -> None:
        """Do nothing: pages go to the device, and `infinity.offload` moves buffers."""

    def process_dataloader(self, dataloader: object) -> object:
        """Return the loader. Before the Trainer iterates over the training data of a run that it resumes,
        random number generators are set; see [Note: generators].
        """
        if self._resumed is not None and self._trainer().training:
            set_generators(self._resumed)
            self._before_validation = None  # the sanity check, which restores generators, came before
        return dataloader

    def barrier(self, name: str | None = None, *_: Any, **__: Any) -> None:
        """Note the states of generators before the Trainer looks at validation data; see [Note: generators].

        name: of the place in Lightning's loops.
        """
        if self._resumed is not None and name == "val_dataloader()":
            self._before_validation = generators()

    def on_train_start(self) -> None:
        """Set random number generators, if the Trainer resumes a run; see [Note: generators]."""
        progress = self._trainer().fit_loop.epoch_loop.batch_progress
        inside_epoch = progress.current.ready > 0 and not progress.is_last_batch
        states = self._resumed if inside_epoch else self._before_validation
        if states is not None:
            set_generators(states)
        self._resumed = self._before_validation = None

    def teardown(self) -> None:
        """Leave the model in its pages. (Other strategies copy it and all optimizer states to the CPU.)"""
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()

    # --- checkpoints; see [Note: checkpoints of Lightning] ----------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: checkpoints are read into pages."""
        return True

    def lightning_module_state_dict(self) -> Any:
        """Return what stands for the model's tensors in the dictionary of a checkpoint."""
        return _Elsewhere()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return what stands for the optimizer's states in the dictionary of a checkpoint."""
        return _Elsewhere()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint, a directory that appears whole or not at all, in place of one that is there.

        Raises ConfigError for a path that is not local or is taken by something else, if a hook has replaced
        the tensors, and wherever `Runtime.save` does; StorageError and StorageFull.
        """
        tensors = [checkpoint.pop("state_dict"), *checkpoint.pop("optimizer_states", [])]
        if storage_options is not None or "://" in os.fspath(filepath):
            raise ConfigError(
                f"The checkpoint {filepath} is not to be a local directory.", "Give a path of a file system."
            )
        if not all(isinstance(each, _Elsewhere) for each in tensors):
            raise ConfigError(
                "A hook has replaced the state_dict of a checkpoint, whose tensors are in pages.",
                "Put other tensors under keys of their own in on_save_checkpoint.",
            )
        runtime = self._running()
        with _replaced(Path(os.path.abspath(filepath))) as directory:
            if len(tensors) == 1:
                runtime.export(directory / _WEIGHTS, dtype="fp32")
            else:
                runtime.save(directory / _RUN)
            with storing("write", directory / _DICTIONARY):
                torch.save(checkpoint, directory / _DICTIONARY)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the dictionary of a checkpoint, or of a file that another strategy has saved."""
        path = Path(checkpoint_path)
        if not path.is_dir():
            found: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
            return found
        found = super().load_checkpoint(path / _DICTIONARY, weights_only=weights_only)
        found["state_dict"] = _Elsewhere(path)
        if (path / _RUN).exists():
            found["optimizer_states"] = [_Elsewhere(path)]
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read the model's tensors into pages, and optimizer states and generators if it is to be trained.

        Raises IncompatibleCheckpoint for a checkpoint of another model or optimizer, CorruptState and
        StorageError.
        """
        tensors = checkpoint["state_dict"]
        path = tensors.path if isinstance(tensors, _Elsewhere) else None
        if path is None:
            super().load_model_state_dict(checkpoint, strict=strict)
        elif (path / _RUN).exists():
            before = generators()
            self._running().load(path / _RUN)
            if self._trainer().state.fn == TrainerFn.FITTING:
                self._resumed = generators()
            else:
                set_generators(before)
        else:
            self._load_weights(path / _WEIGHTS)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of a file that another strategy has saved. `load_model_state_dict` reads others."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if not isinstance(state, _Elsewhere):
                optimizer.load_state_dict(state)

    @torch.no_grad()
    def _load_weights(self, directory: Path) -> None:
        assert self.lightning_module is not None
        module, weights = self.lightning_module, open_weights(directory)
        tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
        for name in weights.names:
            if name not in tensors or tuple(tensors[name].shape) != weights.shape(name):
                raise ConfigError(
                    f"The checkpoint has {name}, {list(weights.shape(name))}, which is not in the model.",
                    "Build the model that was saved.",
                )
            tensors[name].copy_(weights.read(name))

    # --- helpers ---------------------------------------------------------------------------------------

    def _running(self) -> Runtime:
        if self.runtime is None:
            raise ConfigError(
                "A checkpoint was asked for before the model was offloaded.", "Call fit() first."
            )
        return self.runtime

    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


class _Elsewhere(Mapping[str, Any]):
    """Stands for tensors in the dictionary of a checkpoint, which no hook can read there."""

    def __init__(self, path: Path | None = None) -> None:
        """path: the directory of the checkpoint; None while one is saved."""
        self.path = path

    def _refuse(self, *_: Any) -> NoReturn:
        raise ConfigError(
            "A hook has read the model's or the optimizer's tensors in the dictionary of a checkpoint, which "
            "are in pages and files of their own.",
            "Read them from the model, or from strategy.runtime.optimizer.state.",
        )

    __getitem__ = __iter__ = __len__ = __contains__ = _refuse


class _PagedClipping(Plugin):
    """The precision plugin for gradients in pages, without autocast."""

    def __init__(self, strategy: InfinityStrategy, *args: Any) -> None:
        super().__init__(*args)
        self._strategy = strategy

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Call step() unless there is no gradient, as if `training_step` has returned None: torch's
        optimizers do nothing then, and runtime.optimizer raises ConfigError.
        """
        result = self._wrap_closure(model, optimizer, closure)
        if any(each.grad is not None for each in self.main_params(optimizer)):
            optimizer.step(**kwargs)
        return result

    def clip_grad_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Replace each gradient by one with elements from -clip_val to clip_val, one at a time.

        Gradients that fp16 has overflowed are left, so that `step` skips them.
        """
        runtime = self._strategy.runtime
        assert runtime is not None
        for parameter in self.main_params(optimizer):
            gradient = runtime.grad(parameter)
            if gradient is None:
                continue
            if runtime.plan.precision.compute == "fp16" and not gradient.isfinite().all():
                return
            parameter.grad = gradient.clamp_(-clip_val, clip_val)


class _PagedHalf(_PagedClipping, HalfPrecision):
    """The plugin for "bf16-true" and "16-true": converts inputs, and makes new tensors in that dtype."""


def _check_alone(what: str, number: int) -> None:
    if number != 1:
        raise ConfigError(
            f"The Trainer has {what}={number}, and InfinityStrategy trains in one process, on one device.",
            f"Give Trainer({what}=1).",
        )


@contextlib.contextmanager
def _replaced(target: Path) -> Iterator[Path]:
    """Context that yields a new temporary directory, which takes the place of the checkpoint `target` at the
    end; the former one is removed then. After an error in the context, `target` is as it was.
    """
    if target.exists() and not (target / _DICTIONARY).is_file():
        raise ConfigError(f"{target} is there, and is no checkpoint of this strategy.", "Give another path.")
    aside = target.with_name(f".{target.name}-{secrets.token_hex(8)}")
    with storing("write", target):
        try:
            with published(target) as directory:
                yield directory
                if target.exists():
                    target.rename(aside)
        except BaseException:
            if aside.exists():
                aside.rename(target)
            raise
        shutil.rmtree(aside, ignore_errors=True)
