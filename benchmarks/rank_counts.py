"""Rank counts: what the communication of several ranks costs on this machine, in counts and CPU seconds.

    python benchmarks/rank_counts.py [--against CHECKOUT] [--ranks 2 4 8] [--rounds 3] [--json]

For each number of ranks, in turns with another checkout whose native modules are built (`--against`), N
processes train a decoder of 9.9M parameters at ZeRO-3, in RAM, with a short micro-batch each. Wall times on
few cores say little of a cluster, so these are counted, of a rank (mean over ranks; median over rounds):

    messages, MB    messages, and bytes of payloads, that a rank sends to others in a step
    copied MB       bytes that it copies from the RAM of others in its node
    CPU s           CPU seconds of all threads of the process in a step
    comm. s         those minus the CPU seconds of a rank's part of a step without other ranks. For that, N
                    processes train alone at the same time, for the same load on caches and cores; each takes
                    F seconds for a forward and a backward and S seconds for a whole step, in which it updates
                    all parameters. A rank's part is F + (S - F) / N
    threads, sockets    of the process, from /proc/self
    store           operations on torch's store in a step and in a second without one, after the start
    RSS MB          growth of the peak RSS since all libraries were imported
    PSS / plan      growth of the PSS after the steps (a page that several processes map is divided by their
                    number), summed over ranks, divided by the RAM of all plans

With `--nodes 2` half of the ranks believe that they run on another node. Variables of the environment are
those of all processes, such as INFINITY_WINDOWS=0. `--plans` runs nothing: it says in how many seconds and
bytes of RSS one rank of 8 or 64 is planned for, of models with 7B and 1T parameters, and how many messages it
will send in a step, with and without shared memory in a node (8 ranks).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
_STORE = (
    "set",
    "get",
    "add",
    "append",
    "check",
    "compare_set",
    "delete_key",
    "multi_get",
    "multi_set",
    "wait",
)
_PLAN_SECONDS, _PLAN_BYTES = 90, 8 << 30
"""The most seconds and bytes of address space that a plan may take."""
_COLUMNS = {
    "messages": (1.0, 0),
    "MB": (1e-6, 2),
    "copied MB": (1e-6, 2),
    "CPU s": (1.0, 3),
    "comm. s": (1.0, 3),
    "threads": (1.0, 0),
    "sockets": (1.0, 0),
    "store/step": (1.0, 1),
    "store/s": (1.0, 1),
    "RSS MB": (1e-6, 0),
    "PSS / plan": (1.0, 2),
}


def train(options: argparse.Namespace) -> None:
    """Train as one rank, or alone without WORLD_SIZE in the environment, when lines on stdin say so."""
    import torch
    from peers import rss
    from torch._C._distributed_c10d import Store

    import infinity
    from infinity.lm.decoder import PRESETS, Decoder

    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Decoder(PRESETS[options.model].decoder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 256, (1, 33), generator=torch.Generator().manual_seed(rank))
    say({"loaded": True})
    rss.restart_peak()
    before, shared_before = rss.read("VmRSS"), pss()
    runtime = infinity.offload(
        model,
        optimizer,
        budget=infinity.Budget(host=options.host),
        precision=infinity.Precision(compute="bf16"),
        device="cpu",
        example_inputs=(tokens[:, :-1], tokens[:, 1:]),
    )

    def cpu(steps: int, *, update: bool = True) -> float:
        """The CPU seconds of a step, or of a forward and a backward."""
        began = time.process_time()
        for _ in range(steps):
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            if update:
                runtime.clip_grad_norm_(1.0)
                runtime.optimizer.step()
            runtime.optimizer.zero_grad()
        return (time.process_time() - began) / steps

    cpu(2)
    say({"ready": True})
    with runtime:
        if ranks == 1:
            whole, passes = cpu(options.steps), cpu(options.steps, update=False)
            say({"F": passes, "S": whole})
            return
        wire, operations = runtime._components.ranks.wire, counted(Store)
        first = wire.traffic()
        found: dict[str, Any] = {"CPU s": cpu(options.steps)}
        last, in_steps = wire.traffic(), len(operations)
        time.sleep(options.idle)
        copied = [sum(getattr(each, "copied", {}).values()) for each in (first, last)]
        found |= {
            "copied MB": (copied[1] - copied[0]) / options.steps,
            "messages": (last.messages_sent - first.messages_sent) / options.steps,
            "sent": {name: (n - first.sent[name]) / options.steps for name, n in last.sent.items()},
            "threads": len(os.listdir("/proc/self/task")),
            "sockets": sum(link.startswith("socket:") for link in links("/proc/self/fd")),
            "store/step": in_steps / options.steps,
            "store/s": (len(operations) - in_steps) / options.idle,
            "RSS MB": rss.read("VmHWM") - before,
            "pss": pss() - shared_before,
            "plan": runtime.plan.ram_bytes,
        }
        say(found | {"MB": sum(found["sent"].values())})


def say(found: Mapping[str, Any]) -> None:
    """Print a line of JSON, and wait for a line on stdin."""
    print(json.dumps(found), flush=True)
    sys.stdin.readline()


def links(directory: str) -> list[str]:
    """What the links in a directory point to."""
    return [os.readlink(each.path) for each in os.scandir(directory) if os.path.islink(each.path)]


def pss() -> int:
    """Bytes of this process's proportional set size."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def counted(store: Any) -> list[str]:
    """Have the methods of torch's stores append their names to the list that is returned, when called."""
    calls: list[str] = []

    def wrapped(name: str) -> Any:
        method = getattr(store, name)

        def call(*arguments: Any, **more: Any) -> Any:
            calls.append(name)
            return method(*arguments, **more)

        return call

    for name in _STORE:
        setattr(store, name, wrapped(name))
    return calls


def together(
    options: argparse.Namespace, checkout: Path, ranks: int, *, alone: bool = False
) -> list[dict[str, Any]]:
    """Run `ranks` processes of a checkout for one turn; returns what each has found. alone: each is the only
    rank of its run.
    """
    from peers.world import free_port

    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    # This checkout's own package may be one that was installed.
    package = os.environ.get("PYTHONPATH", "") if checkout == HERE else str(checkout)
    path = [each for each in (package, str(HERE / "benchmarks")) if each]
    shared |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    on_node = ranks // options.nodes
    with ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            environment = os.environ | shared
            if alone:
                del environment["WORLD_SIZE"]
            else:
                environment |= {"RANK": str(rank), "GROUP_RANK": str(rank // on_node)}
                environment |= {"LOCAL_RANK": str(rank % on_node), "LOCAL_WORLD_SIZE": str(on_node)}
            command = [sys.executable, __file__, "--work", "--model", options.model]
            command += ["--steps", str(options.steps), "--host", options.host, "--idle", str(options.idle)]
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=checkout,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        found: list[dict[str, Any]] = []
        for _ in ("loaded", "ready", "found"):
            found = [json.loads(process.stdout.readline() or "null") for process in processes]
            if None in found:
                raise SystemExit(f"Rank {found.index(None)} of {ranks} of {checkout} has ended.")
            for process in processes:
                process.stdin.write("\n")
                process.stdin.flush()
        for process in processes:
            process.stdin.close()
            process.wait()
        return found


def turn_of(ranks: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of a turn, by column. ranks, alone: what the processes have found that trained together,
    and those that trained alone.
    """
    means = {name: statistics.mean(each[name] for each in ranks) for name in _COLUMNS if name in ranks[0]}
    passes, whole = (statistics.mean(each[name] for each in alone) for name in ("F", "S"))
    own = passes + (whole - passes) / len(ranks)
    ratio = sum(each["pss"] for each in ranks) / sum(each["plan"] for each in ranks)
    return means | {
        "comm. s": means["CPU s"] - own,
        "PSS / plan": ratio,
        "alone": {"F": passes, "S": whole},
        "sent": {
            name: statistics.mean(each["sent"].get(name, 0) for each in ranks) for name in ranks[0]["sent"]
        },
    }


def plans(checkout: Path) -> list[dict[str, Any]]:
    """What planning for one rank takes and predicts, of several sizes; each in a process of its own."""
    found = []
    for model, ranks in (("7b", 8), ("7b", 64), ("1t", 64)):
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        command = [sys.executable, __file__, "--work", "--plans", "--model", model, "--ranks", str(ranks)]
        limits = (resource.RLIMIT_AS, (_PLAN_BYTES, _PLAN_BYTES))
        try:
            done = subprocess.run(
                command,
                env=environment,
                cwd=checkout,
                capture_output=True,
                text=True,
                timeout=_PLAN_SECONDS,
                check=True,
                preexec_fn=lambda limits=limits: resource.setrlimit(*limits),
            )
            told = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            told = {"failed": f"more than {_PLAN_SECONDS} s"}
        except subprocess.CalledProcessError as error:
            told = {"failed": (error.stderr.splitlines() or ["?"])[-1]}
        found.append({"model": model, "ranks": ranks} | told)
        print(json.dumps(found[-1]), flush=True)
    return found


def plan_alone(options: argparse.Namespace) -> None:
    """Plan for one rank, and print what it takes."""
    import torch
    from peers import rss

    from infinity.api import plan_for
    from infinity.config import Budget, Precision
    from infinity.layout.shards import Share
    from infinity.lm.decoder import PRESETS, Decoder, DecoderConfig
    from infinity.planning import network
    from infinity.ranks import SingleRank

    wide = DecoderConfig(width=25600, layers=128, heads=200, hidden=67584, vocabulary=32768)
    config = wide if options.model == "1t" else PRESETS[options.model].decoder
    with torch.device("meta"):
        model = Decoder(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    (ranks,) = options.ranks
    began, before = time.perf_counter(), rss.read("VmRSS")
    plan = plan_for(
        SingleRank("cpu", share=Share(0, ranks, 3, 8 if ranks > 8 else 0)),
        model,
        optimizer,
        budget=Budget(host=16 * config.parameters // ranks + (64 << 30)),
        precision=Precision(compute="bf16"),
        example_inputs=None,
        update="auto",
        accumulation=None,
    )
    found: dict[str, Any] = {"parameters": config.parameters, "seconds": time.perf_counter() - began}
    found["rss"] = rss.read("VmHWM") - before
    if hasattr(network, "messages"):  # an older checkout has none
        found["messages"] = {str(there): network.messages(plan, windows=there) for there in (False, True)}
    print(json.dumps(found))


def show(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the medians as a table in Markdown."""
    print("| ranks, checkout | " + " | ".join(_COLUMNS) + " |\n|---" + "|---" * len(_COLUMNS) + "|")
    for name, each in results.items():
        cells = [f"{each[column] * factor:.{digits}f}" for column, (factor, digits) in _COLUMNS.items()]
        print(f"| {name} | " + " | ".join(cells) + " |")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--against", type=Path, help="a checkout of another commit, native modules built")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="numbers of processes")
    parser.add_argument(
        "--nodes", type=int, default=1, help="emulated nodes, of which each has as many ranks"
    )
    parser.add_argument("--model", default="10m")
    parser.add_argument("--host", default="400MiB", help="host budget of each rank")
    parser.add_argument("--steps", type=int, default=4, help="counted steps of a turn")
    parser.add_argument("--idle", type=float, default=3.0, help="seconds without a step, for store/s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plans", action="store_true", help="plan, and run nothing")
    parser.add_argument("--json", action="store_true", help="print a JSON object in the last line")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if min(options.steps, options.rounds) < 1 or any(
        each < 2 or each % options.nodes for each in options.ranks
    ):
        parser.error("--steps and --rounds are at least 1, --ranks at least 2 and multiples of --nodes")
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    if options.work:
        return plan_alone(options) if options.plans else train(options)
    from machine_facts import machine_facts

    checkouts = {"this": HERE} | ({} if options.against is None else {"other": options.against.resolve()})
    report: dict[str, Any] = {"benchmark": "rank counts", "machine": machine_facts()}
    report["settings"] = vars(options) | {"against": None}
    if options.plans:
        report["plans"] = {name: plans(checkout) for name, checkout in checkouts.items()}
    else:
        turns: dict[str, list[dict[str, Any]]] = {}
        with tempfile.TemporaryDirectory() as cache:
            os.environ["XDG_CACHE_HOME"] = cache
            for number in range(options.rounds):
                for ranks in options.ranks:
                    alone = together(options, HERE, ranks, alone=True)
                    for name in sorted(checkouts, reverse=bool(number % 2)):
                        turn = turn_of(together(options, checkouts[name], ranks), alone)
                        turns.setdefault(f"{ranks}, {name}", []).append(turn)
                        print(f"{ranks} ranks, {name}: {turn}", flush=True)
        report["turns"] = turns
        report["medians"] = {
            name: {column: statistics.median(turn[column] for turn in each) for column in _COLUMNS}
            for name, each in turns.items()
        }
        show(report["medians"])
        if options.against is not None:
            report["ratios"] = {
                ranks: ratios(turns[f"{ranks}, other"], turns[f"{ranks}, this"]) for ranks in options.ranks
            }
            for ranks, each in report["ratios"].items():
                print(f"{ranks} ranks, other / this, medians of {options.rounds} rounds: {each}")
    if options.json:
        print(json.dumps(report, default=str))
    return None


def ratios(other: Sequence[Mapping[str, float]], this: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Column -> median over rounds of the other checkout's figure divided by this one's; without zeros."""
    return {
        column: round(statistics.median(a[column] / b[column] for a, b in zip(other, this, strict=True)), 3)
        for column in _COLUMNS
        if all(turn.get(column) for turn in this)
    }


if __name__ == "__main__":
    main()
