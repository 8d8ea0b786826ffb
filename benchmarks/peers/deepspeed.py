"""DeepSpeed ZeRO-3 with one rank, offloading to NVMe or to the CPU, as its users build a model: in zero.Init.

Settings are tuned for a small machine: with the common ones (sub_group_size 1e8) it takes 1.6 times the
memory and is slower. With an optimizer buffer_count of 4 it ends in an AssertionError.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from peers.task import BETAS, CLIP, WEIGHT_DECAY, Task

# Read when deepspeed is imported.
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")

import torch

SMALLEST_PARAMETER_BUFFER = 20_000_000


def settings(task: Task, largest: int) -> dict[str, Any]:
    """DeepSpeed's configuration. largest: elements of the largest parameter, which a buffer must hold."""
    nvme = task.mode == "nvme"
    place: dict[str, Any] = {"device": task.mode, "pin_memory": task.device == "cuda"}
    if nvme:
        place["nvme_path"] = task.directory
    buffers = {"buffer_count": 8, "buffer_size": max(SMALLEST_PARAMETER_BUFFER, largest)}
    pipeline = {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
    return {
        "train_micro_batch_size_per_gpu": task.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "steps_per_print": 1_000_000,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": task.learning_rate, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY},
        },
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 50_000_000,
            "reduce_bucket_size": 20_000_000,
            "stage3_prefetch_bucket_size": 20_000_000,
            "stage3_max_live_parameters": 50_000_000,
            "stage3_max_reuse_distance": 50_000_000,
            "stage3_param_persistence_threshold": 10_000,
            "offload_param": place | (buffers if nvme else {}),
            "offload_optimizer": place | (pipeline if nvme else {}),
        },
        "aio": {
            "block_size": 4 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 2,
            "single_submit": False,
            "overlap_events": True,
        },
    }


class DeepSpeed:
    """An engine and its step."""

    def __init__(self, task: Task) -> None:
        os.environ["MASTER_PORT"] = str(_free_port())
        if task.device == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed  # type: ignore[import-not-found]

        deepspeed.init_distributed(dist_backend="gloo" if task.device == "cpu" else "nccl")
        torch.manual_seed(0)
        with torch.device("meta"):
            largest = max(parameter.numel() for parameter in task.model().parameters())
        config = settings(task, largest)
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = task.model()
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )
        self._config = config

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = self._engine(tokens, targets)
        self._engine.backward(loss)
        self._engine.step()
        return float(loss.detach())

    def facts(self) -> dict[str, Any]:
        import deepspeed

        return {"version": deepspeed.__version__, "settings": self._config}

    def close(self) -> None:
        self._engine.destroy()
        torch.distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def open_contender(task: Task) -> DeepSpeed:
    """See peers. `task.mode`: "nvme" or "cpu"."""
    return DeepSpeed(task)
