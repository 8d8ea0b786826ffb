"""DeepSpeed with one rank or several, offloading to NVMe or to the CPU.

Mode "nvme" is ZeRO-Infinity: stage 3, with parameters and states on the disk, and a model built in zero.Init.
Mode "cpu" is ZeRO-Offload: stage 2, with the bf16 model on the computing device, and gradients and states in
RAM. Mode "cpu3" is stage 3, with parameters, gradients and states in RAM. DeepSpeedCPUAdam runs the update in
all modes.

If the CPU computes, the settings are tuned to a small machine: with the usual settings (sub_group_size
1e8), mode "nvme" takes 1.6 times the memory and is slower. For a GPU the settings suit a device with tens
of GB: RAM is pinned, copies overlap, and live parameters have DeepSpeed's default bounds. With an optimizer
buffer_count of 4, DeepSpeed ends in an AssertionError.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from peers import world
from peers.saving import sync_tree
from peers.task import BETAS, WEIGHT_DECAY, Task


@dataclass(frozen=True)
class Sizes:
    """Settings of DeepSpeed that are tuned to the machine."""

    sub_group: int
    """Elements whose optimizer states are swapped and updated together."""
    bucket: int
    """Number of gradient elements that are reduced together. Also the number of parameter elements that are
    prefetched at one time.
    """
    live: int
    """Greatest number of parameter elements that are gathered at one time."""
    persistent: int
    """Parameters of fewer elements than this stay on the computing device."""
    parameter_buffer: int
    """Least number of elements in a buffer for swapping parameters."""
    threads: int
    """Number of threads of DeepSpeed's own I/O engine."""


SMALL = Sizes(50_000_000, 20_000_000, 50_000_000, 10_000, 20_000_000, 2)
GPU = Sizes(100_000_000, 200_000_000, 1_000_000_000, 100_000, 100_000_000, 8)


def settings(task: Task, largest: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a training job.

    largest: elements of the largest parameter, which must fit in a buffer for swapping.
    """
    return {
        "train_micro_batch_size_per_gpu": task.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": task.clip or 0.0,
        "bf16": {"enabled": True},
        "steps_per_print": 1_000_000,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": task.learning_rate, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY},
        },
        "zero_optimization": _stage_2(task) if task.mode == "cpu" else _stage_3(task, largest),
        "aio": {
            "block_size": 4 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": _sizes(task).threads,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def _sizes(task: Task) -> Sizes:
    return GPU if task.device == "cuda" else SMALL


def _stage_2(task: Task) -> dict[str, Any]:
    sizes = _sizes(task)
    return {
        "stage": 2,
        "overlap_comm": task.device == "cuda",
        "reduce_bucket_size": sizes.bucket,
        "allgather_bucket_size": sizes.bucket,
        "offload_optimizer": {"device": "cpu", "pin_memory": task.device == "cuda"},
    }


def _stage_3(task: Task, largest: int) -> dict[str, Any]:
    sizes, nvme = _sizes(task), task.mode == "nvme"
    place: dict[str, Any] = {"device": "nvme" if nvme else "cpu", "pin_memory": task.device == "cuda"}
    if nvme:
        place["nvme_path"] = task.directory
    buffers = {"buffer_count": 8, "buffer_size": max(sizes.parameter_buffer, largest)}
    pipeline = {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
    return {
        "stage": 3,
        "overlap_comm": True,
        "sub_group_size": sizes.sub_group,
        "reduce_bucket_size": sizes.bucket,
        "stage3_prefetch_bucket_size": sizes.bucket,
        "stage3_max_live_parameters": sizes.live,
        "stage3_max_reuse_distance": sizes.live,
        "stage3_param_persistence_threshold": sizes.persistent,
        "offload_param": place | (buffers if nvme else {}),
        "offload_optimizer": place | (pipeline if nvme else {}),
    }


class DeepSpeed:
    """Contender that trains with a DeepSpeed engine."""

    def __init__(self, task: Task) -> None:
        world.set_environment(task)
        if task.device == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed  # type: ignore[import-not-found]

        deepspeed.init_distributed(dist_backend="gloo" if task.device == "cpu" else "nccl")
        self.rss_base = world.joined()
        torch.manual_seed(0)
        with torch.device("meta"):
            largest = max(parameter.numel() for parameter in task.model().parameters())
        config = settings(task, largest)
        if task.mode == "cpu":
            model = task.real_model()
        else:
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = task.model()
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )
        # Without the path of the swap directory, which is removed after the run.
        self._facts = {"version": deepspeed.__version__, "settings": _without_paths(config)}

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = self._engine(tokens, targets)
        self._engine.backward(loss)
        self._engine.step()
        return float(loss.detach())

    def save(self, directory: str) -> None:
        """Write a checkpoint into `directory`, and sync it to the disk."""
        self._engine.save_checkpoint(directory)
        sync_tree(directory)

    def landed(self) -> None:
        """Do nothing, for `save` waits until the checkpoint is on the disk."""

    def facts(self) -> dict[str, Any]:
        return self._facts

    def close(self) -> None:
        self._engine.destroy()
        torch.distributed.destroy_process_group()


def _without_paths(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {key: _without_paths(value) for key, value in config.items() if key != "nvme_path"}


def open_contender(task: Task) -> DeepSpeed:
    """Build the model and its DeepSpeed engine. task.mode: "nvme", "cpu" or "cpu3"."""
    return DeepSpeed(task)
