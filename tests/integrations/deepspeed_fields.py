"""DeepSpeed fields: the names that the installed DeepSpeed reads from a configuration, by block.

`python tests/integrations/deepspeed_fields.py` writes them beside this file, with DeepSpeed's version, for
machines without DeepSpeed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_suffix(".json")

MODELS = {
    "zero_optimization": "runtime.zero.config.DeepSpeedZeroConfig",
    "zero_optimization.offload_optimizer": "runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig",
    "zero_optimization.offload_param": "runtime.zero.offload_config.DeepSpeedZeroOffloadParamConfig",
    "zero_optimization.leaf_module": "runtime.zero.leaf_module_config.DeepSpeedZeroLeafModuleConfig",
    "zero_optimization.zenflow": "runtime.zenflow.zenflow_config.ZenFlowConfig",
    "bf16": "runtime.precision_config.DeepSpeedBF16Config",
    "fp16": "runtime.precision_config.DeepSpeedFP16Config",
    "tensor_parallel": "runtime.tensor_parallel.config.TPTrainingConfig",
    "compile": "compile.config.CompileConfig",
    "hybrid_engine": "runtime.config.HybridEngineConfig",
    "tensorboard": "monitor.config.TensorBoardConfig",
    "wandb": "monitor.config.WandbConfig",
    "comet": "monitor.config.CometConfig",
    "csv_monitor": "monitor.config.CSVConfig",
    "comms_logger": "comm.config.CommsLoggerConfig",
    "timers.throughput": "utils.config.DeepSpeedThroughputTimerConfig",
}
"""The class of each block that DeepSpeed declares as a model, below the package."""

READ = ("", "optimizer", "scheduler", "data_types", "aio", "activation_checkpointing", "checkpoint")
"""Blocks without a class: their names are those that DeepSpeed asks a dictionary for ("": the top)."""


class _Asked(dict[str, Any]):
    """A dictionary that notes the names that it is asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)

    def keys(self) -> Any:
        return self  # `name in config.keys()` asks, too

    def __copy__(self) -> _Asked:
        return self


def read_fields() -> dict[str, list[str]]:
    """The names of each block, sorted. DeepSpeed must be importable."""
    import importlib

    from deepspeed.runtime import config

    blocks = {name: _Asked({"type": "AdamW"} if name == "optimizer" else {}) for name in READ if name}
    blocks["scheduler"]["type"] = "WarmupLR"
    top = _Asked({"train_batch_size": 1, **blocks})
    config.DeepSpeedConfig(top)
    fields = {"": top.names, **{name: block.names for name, block in blocks.items()}}
    fields[""] |= set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    for block, path in MODELS.items():
        module, _, name = f"deepspeed.{path}".rpartition(".")
        model = getattr(importlib.import_module(module), name).model_fields
        fields[block] = {*model, *(each.alias for each in model.values() if each.alias)}
    fields["zero_optimization"] |= set(config._REMOVED_ZERO_CONFIG_KEYS)
    return {block: sorted(names) for block, names in fields.items()}


if __name__ == "__main__":
    import deepspeed

    found = {"deepspeed": deepspeed.__version__, "fields": read_fields()}
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")
