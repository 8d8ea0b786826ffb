"""FSDP2 with one rank or several, offloading to RAM: fp32 shards, gradients and states are in RAM, and are
updated there.

The settings are those of FSDP2's documentation and of torchtitan: each block and the root module are sharded,
parameters go to the device in bf16, gradients come back in fp32, and AdamW is fused. Nothing goes to a disk.
FSDP2 also runs on the CPU, over gloo. With one rank it saves no memory there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from peers import world
from peers.task import BETAS, WEIGHT_DECAY, Task


class Fsdp2:
    """Contender that trains a sharded model with FSDP2."""

    def __init__(self, task: Task) -> None:
        world.set_environment(task)
        on_gpu = task.device == "cuda"
        # Gradients are in RAM when their norm is computed, so gloo is needed besides nccl on a GPU, too.
        distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
        self.rss_base = world.joined()
        torch.manual_seed(0)
        self._clip = task.clip
        self._model = task.real_model()
        policies: dict[str, Any] = {
            "mesh": init_device_mesh(task.device, (task.ranks,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu),
        }
        for block in self._model.blocks:  # type: ignore[union-attr]
            fully_shard(block, **policies)
        fully_shard(self._model, **policies)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=task.learning_rate,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = self._model(tokens, targets)
        loss.backward()
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())

    def facts(self) -> dict[str, Any]:
        return {"version": torch.__version__}

    def close(self) -> None:
        distributed.destroy_process_group()


def open_contender(task: Task) -> Fsdp2:
    """Return a contender with a sharded model and its optimizer. `task.mode` is not used."""
    return Fsdp2(task)
