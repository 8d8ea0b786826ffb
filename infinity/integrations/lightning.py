"""Lightning strategy: trains a LightningModule whose states are in pages, by Lightning's own Trainer.

[Note: checkpoints of Lightning] Lightning puts the model's and the optimizer's tensors into one dictionary,
which would take RAM for all of them. With this strategy the dictionary has an `_Elsewhere` in their place,
and a checkpoint is a directory:

- checkpoint.pt: the dictionary without these tensors, written by torch.save.
- run/: a copy of the run, written by `Runtime.save`. If only weights were asked for, it has weights/ instead:
  the fp32 masters, written by `Runtime.export`.

[Note: generators] A resumed run must draw the random numbers of the undisturbed run. The Trainer draws some
before it trains: it tries out loaders, and begins to iterate over the training data. So generators get the
states of the checkpoint when training starts. At the start of an epoch the iteration then begins once more.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision
from lightning.pytorch.plugins import Precision as Plugin
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn

from infinity.api import offload, several_ranks
from infinity.checkpoint.atomic_directory import published, storing, sync
from infinity.checkpoint.run_state import generators, set_generators
from infinity.checkpoint.safetensors_files import load, open_weights
from infinity.config import Budget, Precision
from infinity.errors import ConfigError
from infinity.runtime import Runtime

_COMPUTE = {"32": "fp32", "bf16": "bf16", "16": "fp16"}
"""`Precision.compute` by the first part of the Trainer's `precision`, as in "bf16-mixed"."""
_OF_INFERENCE = ("weights", "example_inputs")
_OPTIONS = (*_OF_INFERENCE, "update", "activations", "accumulation", "average", "checkpoint")
_DICTIONARY, _RUN, _WEIGHTS = "checkpoint.pt", "run", "weights"


class InfinityStrategy(SingleDeviceStrategy):
    """A strategy for `lightning.pytorch.Trainer` that offloads the LightningModule, for one process.

    `Trainer.fit` offloads with the optimizer of `configure_optimizers`, whose schedulers keep working; a run
    without training offloads for inference. `runtime` stays open after the run, so that `Trainer.test` and
    `Trainer.save_checkpoint` work. `strategy.runtime.close(keep=True)` makes the model a plain one. Another
    `Trainer.fit` needs no such call: it closes the runtime, and offloads again with a new optimizer, as any
    strategy makes one.
    """

    strategy_name = "infinity"

    def __init__(
        self, *, budget: Budget | None = None, precision: Precision | None = None, **options: Any
    ) -> None:
        """budget, precision: as in infinity.offload. If precision is None, Trainer(precision=) decides: for
        "bf16" and "16" parameters have this dtype, with fp32 masters, and autocast is not used. options:
        weights, example_inputs, update, activations, accumulation, average and checkpoint of
        infinity.offload. accumulation is by default Trainer(accumulate_grad_batches=); a step may have fewer
        backwards. The device is the Trainer's.

        The methods raise ConfigError for a model or Trainer that cannot be used, and the errors of
        infinity.offload.
        """
        unknown = options.keys() - set(_OPTIONS)
        if unknown:
            raise ConfigError(
                f"InfinityStrategy was given {', '.join(sorted(unknown))}.",
                f"Its options are budget, precision, {', '.join(_OPTIONS)}. "
                "The device is the Trainer's, and fit(ckpt_path=) resumes.",
            )
        super().__init__()
        self.runtime: Runtime | None = None
        """The runtime of the model that was offloaded last; None before the first offload."""
        self.parallel_devices: list[torch.device] = []
        """The devices that the Trainer sets. There must be exactly one."""
        self.num_nodes = 1
        """The number of nodes that the Trainer sets. It must be 1."""
        self._module: LightningModule | None = None
        self._budget, self._precision, self._options = budget, precision, options
        self._resumed: dict[str, Any] | None = None
        """The states of random number generators of the checkpoint that was loaded for this run."""

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[0]

    # --- the run ---------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Offload the model, with its optimizer if it is to be trained. Raises ConfigError for a Trainer or
        an optimizer that cannot be used, and the errors of infinity.offload.
        """
        module, trains = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        assert self.accelerator is not None and module is not None
        compute = self._check()
        name = self.precision_plugin.precision
        half = isinstance(self.precision_plugin, HalfPrecision)
        self.precision_plugin = _PagedHalf(self, name) if half else _PagedClipping(self)
        self.precision_plugin.precision = name
        self.accelerator.setup(trainer)
        self._resumed = None
        if self.runtime is not None and not self.runtime.closed:
            if self._module is module and not trains:
                return
            self.runtime.close(keep=True)
        self._reset_optimizers_and_schedulers()
        options = {name: each for name, each in self._options.items() if trains or name in _OF_INFERENCE}
        if trains:
            self.setup_optimizers(trainer)
            found = sum(bool(each.param_groups) for each in self.optimizers)
            if found != 1:
                raise ConfigError(
                    f"configure_optimizers returned {found or 'no'} optimizers.",
                    "Return one, which may have several parameter groups.",
                )
            regular = not any(isinstance(each, GradientAccumulationScheduler) for each in trainer.callbacks)  # type: ignore[attr-defined]
            if regular and module.automatic_optimization:
                options.setdefault("accumulation", trainer.accumulate_grad_batches)
        self.runtime = offload(
            module,
            self.optimizers[0] if trains else None,
            budget=self._budget,
            precision=self._precision or Precision(compute=compute),
            device=self.root_device,
            **options,
        )
        self._module = module
        self._options.pop("weights", None)  # a second time the model has trained values
        if trains:
            self.optimizers = [self.runtime.optimizer]

    def _check(self) -> str:
        """Return the dtype in which the model computes, as in `Precision.compute`. Raises ConfigError for a
        Trainer that cannot be used.
        """
        plugin, io, number = self.precision_plugin, self.checkpoint_io, len(self.parallel_devices)
        named, compute = f'precision="{plugin.precision}"', _COMPUTE.get(plugin.precision.split("-")[0])
        given = compute if self._precision is None else self._precision.compute
        refused = {
            f"devices={number} and num_nodes={self.num_nodes}, or one of several ranks": (
                number != 1 or self.num_nodes != 1 or several_ranks(None),
                "Start one process, with Trainer(devices=1, num_nodes=1); loops of your own with "
                "infinity.offload train on several ranks.",
            ),
            f"{type(io).__name__}, which needs all tensors in RAM": (
                type(io) is not TorchCheckpointIO,
                "Remove it from Trainer(plugins=): checkpoints are streamed to a local directory.",
            ),
            f"{named}, by the plugin {type(plugin).__name__}": (
                compute is None or type(plugin) not in _PLUGINS,
                'Give "32-true", "bf16-mixed", "bf16-true", "16-mixed" or "16-true".',
            ),
            f"{named}, and itself computes in {given}": (compute not in ("fp32", given), "Give one of them."),
        }
        for what, (found, cure) in refused.items():
            if found:
                raise ConfigError(f"InfinityStrategy was used with {what}.", cure)
        return str(given)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run the closure, then call step() if there is a gradient. After a `training_step` that returned
        None there is none, and step() of runtime.optimizer would raise ConfigError.
        """
        assert self.lightning_module is not None
        result = self.precision_plugin._wrap_closure(self.lightning_module, optimizer, closure)
        if any(each.grad is not None for each in self.precision_plugin.main_params(optimizer)):
            optimizer.step(**kwargs)
        return result

    def on_train_start(self) -> None:
        """Set random number generators, if the Trainer resumes a run; see [Note: generators]."""
        states, self._resumed = self._resumed, None
        if states is None:
            return
        assert self.lightning_module is not None
        set_generators(states)
        loop = self.lightning_module.trainer.fit_loop
        progress = loop.epoch_loop.batch_progress
        if loop._data_fetcher is not None and (progress.current.ready == 0 or progress.is_last_batch):
            iter(loop._data_fetcher)

    def teardown(self) -> None:
        """Leave the model in its pages. (Other strategies copy the model and its optimizer states to the
        CPU.)
        """
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()

    # --- checkpoints; see [Note: checkpoints of Lightning] ----------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: checkpoints are read into pages."""
        return True

    def lightning_module_state_dict(self) -> Any:
        """Return the object that replaces the model's tensors in the dictionary of a checkpoint."""
        return _Elsewhere()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> Any:
        return _Elsewhere()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint, a directory that appears whole or not at all, and replaces an older one.

        Raises ConfigError if there is no offloaded model yet; if the path is not local, or something other
        than a checkpoint of this strategy is there; if a hook has put something else in place of the model's
        or the optimizer's state in `checkpoint`; and where `Runtime.save` or `Runtime.export` raises it.
        Raises StorageError or StorageFull if writing fails.
        """
        tensors = [checkpoint.pop("state_dict"), *checkpoint.pop("optimizer_states", [])]
        target = Path(os.path.abspath(filepath))
        refused = {
            "before the model was offloaded": (self.runtime is None, "Call fit() first."),
            "with a state_dict that a hook has replaced": (
                not all(isinstance(each, _Elsewhere) for each in tensors),
                "Put other tensors under keys of their own in on_save_checkpoint.",
            ),
            "and is not to be a local directory": (
                storage_options is not None or "://" in os.fspath(filepath),
                "Give a path of a file system.",
            ),
            "where there is something that is no checkpoint of this strategy": (
                target.exists() and not (target / _DICTIONARY).is_file(),
                "Give another path.",
            ),
        }
        for how, (found, cure) in refused.items():
            if found:
                raise ConfigError(f"The checkpoint {filepath} was asked for {how}.", cure)
        assert self.runtime is not None
        new, former = (target.with_name(f".{target.name}-{secrets.token_hex(8)}") for _ in range(2))
        with storing("write", target):
            with published(new) as directory:
                if len(tensors) == 1:
                    self.runtime.export(directory / _WEIGHTS, dtype="fp32")
                else:
                    self.runtime.save(directory / _RUN)
                torch.save(checkpoint, directory / _DICTIONARY)
            if target.exists():
                target.rename(former)
            new.rename(target)
            sync(target.parent)
            shutil.rmtree(former, ignore_errors=True)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the dictionary of a checkpoint, or of a file that another strategy has saved."""
        path = Path(checkpoint_path)
        ours = path.is_dir()
        file = path / _DICTIONARY if ours else checkpoint_path
        found: dict[str, Any] = super().load_checkpoint(file, weights_only=weights_only)
        if ours:
            found["state_dict"] = _Elsewhere(path)
            if (path / _RUN).exists():
                found["optimizer_states"] = [_Elsewhere(path)]
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model's values from a checkpoint into the model's pages. If the checkpoint has a whole
        run, as `Runtime.save` writes it, also load the optimizer's states, and keep the states of the random
        number generators until training starts.

        Raises IncompatibleCheckpoint if the run has another model or optimizer, ConfigError for weights of
        another model, CorruptState for damaged files, and StorageError.
        """
        tensors, module = checkpoint["state_dict"], self.lightning_module
        assert self.runtime is not None and module is not None
        if not isinstance(tensors, _Elsewhere) or tensors.path is None:
            super().load_model_state_dict(checkpoint, strict=strict)
        elif (tensors.path / _RUN).exists():
            before = generators()
            self.runtime.load(tensors.path / _RUN)
            self._resumed = generators()
            set_generators(before)
        else:
            with torch.no_grad():
                weights = open_weights(tensors.path / _WEIGHTS)
                load(module, weights, _copy, self.root_device)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states that another strategy saved. Those that this strategy saved are loaded by
        `load_model_state_dict`.
        """
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if not isinstance(state, _Elsewhere):
                optimizer.load_state_dict(state)


class _Elsewhere(Mapping[str, Any]):
    """Replaces tensors in the dictionary of a checkpoint, where no hook can read them."""

    def __init__(self, path: Path | None = None) -> None:
        """path: the directory of the checkpoint; None while a checkpoint is saved."""
        self.path = path

    def _refuse(self, *_: Any) -> NoReturn:
        raise ConfigError(
            "A hook has read the model's or the optimizer's tensors in the dictionary of a checkpoint, which "
            "are in pages and files of their own.",
            "Read them from the model, or from strategy.runtime.optimizer.state.",
        )

    __getitem__ = __iter__ = __len__ = __contains__ = _refuse


def _copy(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    parameter.copy_(values)


class _PagedClipping(Plugin):
    """The precision plugin for gradients in pages, without autocast."""

    def __init__(self, strategy: InfinityStrategy, *args: Any) -> None:
        super().__init__(*args)
        self._strategy = strategy

    def clip_grad_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clamp the elements of all gradients to [-clip_val, clip_val], one gradient at a time. In fp16,
        gradients that overflowed are not changed, so that `step` skips the update.
        """
        runtime = self._strategy.runtime
        assert runtime is not None
        skips = runtime.plan.precision.compute == "fp16"
        for parameter in self.main_params(optimizer):
            gradient = runtime.grad(parameter)
            if gradient is not None and (not skips or gradient.isfinite().all()):
                parameter.grad = gradient.clamp_(-clip_val, clip_val)


class _PagedHalf(_PagedClipping, HalfPrecision):
    """The plugin for "bf16-true" and "16-true": converts inputs to bf16 or fp16, and makes new
    tensors in this dtype.
    """


_PLUGINS = (Plugin, MixedPrecision, HalfPrecision, _PagedClipping, _PagedHalf)
"""The precision plugins that a Trainer may have, before and after its first run."""
