"""Tests of Trainers whose models are in pages: numbers of plain ones, bits over homes, and checkpoints."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

import peft
import rank_processes
import transformers
from homes import HOMES
from parity import differences
from safetensors.torch import load_file
from trainers import DROPPED, MODELS, distance, make, trained, trainer_of

import infinity
from infinity.errors import ConfigError
from infinity.integrations.transformers import attach

STEPS = {"eval_strategy": "steps", "eval_steps": 4}
CASES: dict[str, dict[str, Any]] = {
    "clip": {"max_grad_norm": 0.5},
    "no clip": {"max_grad_norm": 0.0, "lr_scheduler_type": "cosine", "warmup_steps": 3},
    "accumulation": {"gradient_accumulation_steps": 4},
    "eval": STEPS,
    "checkpointing": {"gradient_checkpointing": True},
    "NEFTune": {"neftune_noise_alpha": 5.0},
    "load best": {
        **STEPS,
        "save_strategy": "steps",
        "save_steps": 4,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so that it is the first
    },
}
IMPOSSIBLE = [
    ("vit", "NEFTune"),  # it has no embeddings of words
    # A plain Trainer then finds no name that is another on disk than in the model.
    ("vit", "load best"),
    ("mixtral", "load best"),
]
PAIRS = [(name, case) for name in MODELS for case in CASES if (name, case) not in IMPOSSIBLE]
FIRST = [("llama", "accumulation"), ("llama", "load best"), ("mixtral", "checkpointing"), ("lora", "no clip")]


@pytest.mark.sweep(most=2)
@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(*pair, marks=() if pair in FIRST else pytest.mark.slow) for pair in PAIRS],
)
def test_numbers_of_a_plain_trainer(name: str, case: str, tmp_path: Path) -> None:
    plain, learnt = trained(name, tmp_path / "plain", **CASES[case])
    runs = [trained(name, tmp_path / home, home, **CASES[case]) for home in ("nvme", "unified")]
    for logged, _ in runs:
        assert distance(logged, plain) < 1e-5
    assert runs[0][0] == runs[1][0] and differences(runs[0][1], runs[1][1]) == []
    if case == "load best":  # elsewhere the losses tell, and biases of ViT's keys are rounding errors
        for key, value in learnt.items():
            torch.testing.assert_close(runs[0][1][key], value, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("home", [each for each in HOMES if each != "unified"])
def test_homes_change_no_bit(home: str, tmp_path: Path) -> None:
    case: dict[str, Any] = {**CASES["accumulation"], "bf16": True}
    found = [trained("llama", tmp_path / each, each, **case) for each in (home, "unified")]
    assert found[0][0] == found[1][0] and differences(found[0][1], found[1][1]) == []


def resumed(name: str, directory: Path, commits: bool, **options: Any) -> tuple[Any, Any]:
    """What an undisturbed run logs and learns, and what one does that ends after its fourth step."""
    options = {"save_strategy": "steps", "save_steps": 4, "dropout": DROPPED, **options}
    whole = trained(name, directory / "whole", "nvme", **options)
    first = {"checkpoint": directory / "commits"} if commits else {}
    # The schedule is that of the whole run, and the first part of it ends at the commit.
    begun = trainer_of(make(name, DROPPED), name, directory / "out", **_without(options, "dropout"))
    begun.add_callback(_End(4))
    with attach(begun, **first):
        begun.train()
    again = {"resume": directory / "commits"} if commits else {}
    checkpoint = str(directory / "out" / "checkpoint-4")
    return whole, trained(name, directory, "unified", attached=again, resume=checkpoint, **options)


def _without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


class _End(transformers.TrainerCallback):
    """Ends training after a step, as a job that is stopped."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self._step


@pytest.mark.sweep(most=1)
@pytest.mark.parametrize(
    ("name", "commits", "options"),
    [
        ("llama", False, {}),
        ("llama", True, {"bf16": True}),
        ("lora", True, {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("llama", True, {}),
                ("llama", False, {"bf16": True}),
                ("llama", False, {"gradient_accumulation_steps": 2}),
                ("llama", True, {"gradient_accumulation_steps": 2}),
                ("llama", False, {"lr_scheduler_type": "cosine", "warmup_steps": 3}),
                ("llama", True, {"gradient_checkpointing": True}),
                ("t5", False, {}),
                ("lora", False, {}),
                ("lora", False, {"bf16": True}),
            ]
        ),
    ],
)
def test_a_resumed_run_has_the_bits_of_one_without_a_break(
    name: str, commits: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    (whole, learnt), (logged, again) = resumed(name, tmp_path, commits, **options)
    steps = [each for each in logged if "loss" in each]
    assert steps == [each for each in whole if "loss" in each][-len(steps) :] and steps
    assert differences(again, learnt) == []


def test_a_commit_comes_after_all_files_of_its_checkpoint(tmp_path: Path) -> None:
    trainer = trainer_of(make("llama"), "llama", tmp_path / "out", save_strategy="steps", max_steps=2)
    with attach(trainer, checkpoint=tmp_path / "commits") as runtime:
        trainer.train()
        committed, seen = runtime.save, []

        def save(*, state: Any) -> Any:
            seen.append({each.name for each in (tmp_path / "out" / "checkpoint-2").iterdir()})
            return committed(state=state)

        runtime.save = save  # type: ignore[method-assign]
        trainer._save_checkpoint(trainer.model, None)
    files = {"model.safetensors", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
    assert len(seen) == 1 and files <= seen[0]


def test_from_pretrained_reads_a_checkpoint(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 8, "max_steps": 8}
    _, state = trained("mixtral", tmp_path, "nvme", **options)
    path = tmp_path / "out" / "checkpoint-8"
    again = transformers.MixtralForCausalLM.from_pretrained(path)
    assert differences(dict(again.state_dict()), state) == []
    assert sorted(json.loads((path / "trainer_state.json").read_text()))
    # A second run that writes there leaves nothing of the first.
    (path / "model-00001-of-00002.safetensors").write_bytes(b"old")
    trained("mixtral", tmp_path, "nvme", save_only_model=True, **options)
    assert [each.name for each in path.glob("*.safetensors")] == ["model.safetensors"]
    assert not (path / "run").exists() and not list(path.glob(".*"))


def _lora(**options: Any) -> peft.PeftConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj"], **options)


ADAPTERS: dict[str, list[peft.PeftConfig]] = {
    "embeddings that grew": [_lora()],
    "two": [_lora(), _lora(modules_to_save=["lm_head"])],
    "tokens": [_lora(trainable_token_indices=[1, 2])],
    "shared buffers": [peft.VeraConfig(r=4, target_modules=["q_proj"])],
    "buffers": [peft.BOFTConfig(target_modules=["q_proj"], boft_block_size=4)],
    "prompts": [peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)],
}


@pytest.mark.parametrize(
    "kind",
    [
        each if each in ("embeddings that grew", "two") else pytest.param(each, marks=pytest.mark.slow)
        for each in ADAPTERS
    ],
)
def test_adapters_are_saved_as_by_a_plain_trainer(kind: str, tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path / "base")

    def base() -> Any:
        transformers.set_seed(0)
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
        if kind == "embeddings that grew":
            model.resize_token_embeddings(60)
        return model

    files = []
    for paged in (False, True):
        first, *others = ADAPTERS[kind]
        model = peft.get_peft_model(base(), copy.deepcopy(first))
        for other in others:
            model.add_adapter("other", copy.deepcopy(other))
        output = tmp_path / str(paged)
        trainer = trainer_of(model, "llama", output, save_strategy="steps", save_steps=2, max_steps=2)
        if paged:
            attach(trainer)
        trainer.train()
        trainer.save_model()
        trainer.save_model()  # takes the place of what the first has written
        saved = {
            str(file.relative_to(output)): load_file(file)
            for file in output.rglob("adapter_model.safetensors")
        }
        assert len(saved) == 2 * len(ADAPTERS[kind])  # in checkpoint-2 and beside it
        files.append(saved)
        peft.PeftModel.from_pretrained(base(), output)
    plain, saved = files
    assert saved.keys() == plain.keys()
    for file, tensors in plain.items():
        assert saved[file].keys() == tensors.keys()
        for name, value in tensors.items():
            torch.testing.assert_close(saved[file][name], value, rtol=1e-5, atol=1e-6)
    if kind == "embeddings that grew":
        assert any("embed_tokens" in name for name in plain["adapter_model.safetensors"])


def test_a_plain_trainer_s_checkpoint_is_resumed_from(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    whole, state = trained("llama", tmp_path, **options)
    checkpoint = str(tmp_path / "out" / "checkpoint-4")
    logged, again = trained("llama", tmp_path, "unified", resume=checkpoint, **options)
    assert distance(logged[:-1], whole[4:-1]) < 1e-5
    for key, value in again.items():
        torch.testing.assert_close(value, state[key], rtol=1e-4, atol=1e-5)


def test_bf16_computes_and_saves_in_bf16(tmp_path: Path) -> None:
    options: dict[str, Any] = {"bf16": True, "save_strategy": "steps", "save_steps": 8, "max_steps": 8}
    plain, _ = trained("llama", tmp_path / "plain", **options)
    seen: list[tuple[torch.dtype, bool]] = []
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: (
            seen.append((output.dtype, torch.is_autocast_enabled("cpu")))
            if isinstance(module, torch.nn.Linear)
            else None
        )
    )
    with hook:
        logged, _ = trained("llama", tmp_path, "unified", **options)
    assert set(seen) == {(torch.bfloat16, False)}
    assert distance(logged, plain) < 2e-2
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-8")
    assert {each.dtype for each in again.parameters()} == {torch.bfloat16}


def test_the_best_run_comes_back_whole(tmp_path: Path) -> None:
    trainer = trainer_of(make("llama"), "llama", tmp_path, **CASES["load best"], max_steps=8)
    with attach(trainer) as runtime:
        trainer.train()
        assert trainer.state.best_global_step == 4
        steps = {int(runtime.optimizer.state[each]["step"]) for each in trainer.model.parameters()}
        assert steps == {4}
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
        assert differences(dict(again.state_dict()), dict(trainer.model.state_dict())) == []


def test_checkpoints_that_cannot_be_resumed_from(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    trained("llama", tmp_path, "unified", attached={"checkpoint": tmp_path / "commits"}, **options)
    first, last = (str(tmp_path / "out" / f"checkpoint-{step}") for step in (4, 8))
    with pytest.raises(ConfigError, match="without resume="):
        trained(
            "llama", tmp_path, "unified", attached={"checkpoint": tmp_path / "new"}, resume=last, **options
        )
    again = {"resume": tmp_path / "commits"}
    with pytest.raises(ConfigError, match="newest commit of step 8"):
        trained("llama", tmp_path, "unified", attached=again, resume=first, **options)
    with pytest.raises(ConfigError, match=r"train\(\) begins anew"):
        trained("llama", tmp_path, "unified", attached=again, **options)
    with pytest.raises(ConfigError, match="no states of an optimizer"):
        trained("llama", tmp_path, "unified", resume=last, **options)


def test_a_model_on_meta_is_left_there(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path / "base")
    plain, _ = trained("llama", tmp_path / "plain")
    with torch.device("meta"):
        model = make("llama")
    trainer = trainer_of(model, "llama", tmp_path / "out", placed=False)
    assert next(model.parameters()).is_meta
    with attach(trainer, weights=tmp_path / "base"):
        trainer.train()
    assert distance(trainer.logged.numbers, plain) < 1e-5
    with pytest.raises(NotImplementedError):
        trainer_of(transformers.LlamaForCausalLM(model.config).to("meta"), "llama", tmp_path / "out")


def test_evaluation_and_prediction(tmp_path: Path) -> None:
    found = []
    for paged in (False, True):
        trainer = trainer_of(make("vit"), "vit", tmp_path)
        if paged:
            attach(trainer)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        predicted = trainer.predict(trainer.eval_dataset)
        found.append(([before, trainer.evaluate()["eval_loss"]], predicted.predictions))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    assert abs(found[0][1] - found[1][1]).max() < 1e-5


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"torch_compile": True}, "torch_compile"),
        ({"bf16_full_eval": True}, "another dtype"),
        ({**CASES["load best"], "save_only_model": True}, "load_best_model_at_end"),
        ({"optim": "adafactor"}, "Adafactor"),
        ({"optim": "rmsprop"}, "RMSprop"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_trainers_that_are_refused(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    trainer = trainer_of(make("llama"), "llama", tmp_path, **options)
    before = dict(vars(trainer))
    with pytest.raises(infinity.InfinityError, match=match):
        attach(trainer)
    assert _without(vars(trainer), "optimizer") == _without(before, "optimizer")


def test_trainers_that_would_go_round_it_are_refused(tmp_path: Path) -> None:
    class Own(transformers.Trainer):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None: ...

    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ConfigError, match="a _save of its own"):
        attach(Own(make("llama"), arguments))
    evaluated = trainer_of(make("llama"), "llama", tmp_path)
    prepared = evaluated.accelerator.prepare(evaluated.model)
    found = type(prepared), evaluated.accelerator.distributed_type, evaluated.accelerator.state.dynamo_plugin
    assert evaluated.model._is_accelerate_prepared, found
    with pytest.raises(ConfigError, match="accelerate has prepared"):
        attach(evaluated)
    best = trainer_of(make("llama"), "llama", tmp_path, **CASES["load best"])
    with pytest.raises(ConfigError, match="load_best_model_at_end"):
        attach(best, checkpoint=tmp_path / "commits")


def test_a_loader_of_a_subclass_runs(tmp_path: Path) -> None:
    """As that of TRL's GRPOTrainer, which adds to what the Trainer loads."""
    trained("llama", tmp_path, "unified", save_strategy="steps", save_steps=4, max_steps=4)
    trainer = trainer_of(make("llama"), "llama", tmp_path / "out", max_steps=5)
    found: list[Any] = []

    class Adding(transformers.Trainer):
        def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
            super()._load_optimizer_and_scheduler(checkpoint)
            found.append(checkpoint)

    trainer.__class__ = Adding
    with attach(trainer):
        trainer.train(resume_from_checkpoint=True)
    assert found == [str(tmp_path / "out" / "checkpoint-4")]
    assert [each["learning_rate"] for each in trainer.logged.numbers if "loss" in each][:1] != [3e-3]


def test_a_search_and_models_that_are_made_anew_are_refused(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ConfigError, match="model_init"):
        attach(transformers.Trainer(args=arguments, model_init=lambda: make("llama")))
    trainer = trainer_of(make("llama"), "llama", tmp_path)
    with attach(trainer), pytest.raises(ConfigError, match="a new Trainer for each trial"):
        trainer.hyperparameter_search()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "compute"), [("llama", "fp32"), ("llama", "bf16"), ("lora", "fp32")])
def test_two_ranks_have_the_losses_of_one(name: str, compute: str, tmp_path: Path) -> None:
    environment = {"DIRECTORY": str(tmp_path), "COMPUTE": compute, "MODEL": name}
    two = rank_processes.run("trainer_ranks.py", "train", size=2, timeout=180.0, environment=environment)
    assert [(each.code, each.error) for each in two] == [(0, "")] * 2, two
    assert two[0].result is not None
    _check_as_one(two[0].result, name, compute, tmp_path)


def _check_as_one(two: dict[str, Any], name: str, compute: str, directory: Path) -> None:
    """Compare what rank 0 of two has logged with what one rank logs, and its resumed run with the first."""
    options: dict[str, Any] = {"dataloader_drop_last": True, "bf16": compute == "bf16"}
    one, _ = trained(name, directory / "one", "unified", per_device_train_batch_size=4, **options)
    within = 1e-5 if compute == "fp32" else 2e-2  # ranks round their parts of a gradient to bf16
    assert distance(_losses(two["logged"]), _losses(one)) < within
    assert two["resumed"] == two["logged"][-len(two["resumed"]) :]


def _enlarged(at: int) -> type[transformers.Trainer]:
    """A Trainer whose loss is beyond fp16 in one step."""

    class Enlarged(transformers.Trainer):
        def compute_loss(self, *args: Any, **options: Any) -> Any:
            loss = super().compute_loss(*args, **options)
            return loss * 1e30 if self.state.global_step == at else loss

    return Enlarged


def test_an_overflow_in_fp16_skips_the_update_and_the_scheduler(tmp_path: Path) -> None:
    trainer = trainer_of(make("llama"), "llama", tmp_path, fp16=True, max_steps=4)
    trainer.__class__ = _enlarged(1)
    weights: list[torch.Tensor] = []

    class Read(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            weights.append(trainer.model.lm_head.weight.detach().clone())

    trainer.add_callback(Read())
    with attach(trainer) as runtime:
        trainer.train()
        assert runtime.stats.skipped_steps == 1
    assert [not torch.equal(*pair) for pair in itertools.pairwise(weights)] == [False, True, True]
    rates = [each["learning_rate"] for each in trainer.logged.numbers if "loss" in each]
    # The rate is logged as it was in the update, and falls in each step that is not skipped.
    assert rates == pytest.approx([3e-3, 2.25e-3, 2.25e-3, 1.5e-3])


def test_the_scale_of_a_plain_trainer_is_left(tmp_path: Path) -> None:
    trained("llama", tmp_path, save_strategy="steps", save_steps=4, max_steps=4)
    checkpoint = tmp_path / "out" / "checkpoint-4"
    torch.save({"scale": 2.0**16}, checkpoint / "scaler.pt")
    logged, _ = trained("llama", tmp_path, "unified", resume=str(checkpoint), max_steps=5)
    assert len([each for each in logged if "loss" in each]) == 1


ARGUMENTS: dict[str, dict[str, Any]] = {
    "smoothed labels": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 4},
    "by length": {"train_sampling_strategy": "group_by_length"},
    "empty cache": {"torch_empty_cache_steps": 1},
    "plateau": {
        **STEPS,
        "eval_steps": 1,
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "metric_for_best_model": "eval_loss",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0, "threshold_mode": "abs"},
    },
    "restarts": {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
    "sgd": {"optim": "sgd"},
    "adagrad": {"optim": "adagrad"},
    "batch size": {"auto_find_batch_size": True, "gradient_accumulation_steps": 2},
}


class _Watching(transformers.TrainerCallback):
    """Reads the norm of each gradient, and generates, as users' callbacks do."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.words: list[list[int]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        gradients = [each.grad for each in model.parameters()]
        self.norms += [float(each.norm()) for each in gradients if each is not None]

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.eval()
        words = torch.tensor([[1, 2, 3]])
        self.words += model.generate(words, max_new_tokens=4, do_sample=False).tolist()

    on_step_end = on_substep_end


def _crowded() -> type[transformers.Trainer]:
    """A Trainer whose device has no room in the backward of its third step, once."""
    failed: list[bool] = []

    class Crowded(transformers.Trainer):
        def training_step(self, *args: Any, **options: Any) -> Any:
            loss = super().training_step(*args, **options)
            if self.state.global_step == 2 and not failed:
                failed.append(True)
                raise RuntimeError("CUDA out of memory.")
            return loss

    return Crowded


@pytest.mark.slow
@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_of_a_plain_trainer(case: str, tmp_path: Path) -> None:
    """Each trains twice, for a second train() begins anew with what the first has learnt."""
    found = []
    for paged in (False, True):
        trainer = trainer_of(make("llama"), "llama", tmp_path / str(paged), **ARGUMENTS[case])
        if case == "batch size":
            trainer.__class__ = _crowded()
        if paged:
            attach(trainer)
        watching = _Watching()
        trainer.add_callback(watching)
        trainer.train()
        trainer.train()
        found.append((trainer.logged.numbers, watching.norms, watching.words))
    plain, logged = found
    assert distance(logged[0], plain[0]) < 1e-5
    assert logged[1] == pytest.approx(plain[1], rel=1e-4) and plain[1]
    assert logged[2] == plain[2] and plain[2]


def test_fp16_is_near_fp32(tmp_path: Path) -> None:
    half, _ = trained("llama", tmp_path / "half", "unified", fp16=True, max_grad_norm=0.5)
    full, _ = trained("llama", tmp_path / "full", "unified", max_grad_norm=0.5)
    assert 0 < distance(_losses(half), _losses(full)) < 5e-3


@pytest.mark.slow
def test_two_ranks_that_torchrun_starts_have_the_losses_of_one(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    helpers = [str(each) for each in sorted((tests / "support").iterdir())]
    path = os.pathsep.join([*helpers, str(tests.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "DIRECTORY": str(tmp_path), "COMPUTE": "fp32"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command.append(str(tests / "support" / "ranks" / "trainer_ranks.py"))
    environment |= {"MODEL": "llama"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    _check_as_one(json.loads((tmp_path / "rank-0.json").read_text()), "llama", "fp32", tmp_path)


def _losses(logged: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: each[name] for name in ("loss", "grad_norm")} for each in logged if "loss" in each]


@pytest.mark.slow
def test_a_checkpoint_of_a_model_beyond_its_budget_takes_no_ram(tmp_path: Path) -> None:
    """56M parameters with their states are 0.9 GB, and the budget is 96 MiB."""
    config = transformers.LlamaConfig(
        hidden_size=640,
        intermediate_size=1792,
        num_hidden_layers=7,
        num_attention_heads=10,
        num_key_value_heads=10,
        vocab_size=16384,
    )
    model = transformers.LlamaForCausalLM(config)
    assert sum(each.numel() for each in model.parameters()) > 56e6
    trainer = trainer_of(model, "llama", tmp_path, max_steps=1)
    (tmp_path / "pages").mkdir()
    budget = infinity.Budget(host="96MiB", nvme={str(tmp_path / "pages"): "4GiB"})
    with attach(trainer, budget=budget, precision=infinity.Precision(compute="bf16")):
        trainer.train()
        assert risen(lambda: trainer._save_checkpoint(trainer.model, None)) < 32 << 20
        trainer.state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
        assert risen(trainer._load_best_model) < 32 << 20


def risen(call: Callable[[], object]) -> int:
    """By how many bytes this process's resident memory exceeds in a call what it had before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    call()
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(each for each in lines if each.startswith(name)).split()[1]) << 10
