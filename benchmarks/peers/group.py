"""Group: the ranks of one contender, each in a process of its own (process.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Any

from peers.nodes import Node
from peers.process import ContenderFailed, Process
from peers.task import Task
from peers.world import free_port


class Group:
    """The processes of all ranks, to be used in a `with` statement, whose end kills them.

    name: the contender's name in error messages. tasks: that of each rank, in order. python: path of the
    interpreter. timeout: seconds to wait for a reply. threads: number of OpenMP's threads in each process.
    nodes: by rank; none: all run where this process does.
    """

    def __init__(
        self,
        name: str,
        tasks: Sequence[Task],
        python: str,
        timeout: float,
        threads: int,
        *,
        nodes: Sequence[Node] = (),
    ) -> None:
        self._exits = ExitStack()
        self._processes: list[Process] = []
        # The variables are torchrun's; infinity has a time-out of its own for other ranks.
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(len(tasks)),
            "LOCAL_WORLD_SIZE": str(len(tasks)),
            "OMP_NUM_THREADS": str(threads),
            "INFINITY_RANK_TIMEOUT": str(timeout),
        }
        with ExitStack() as started:
            for task in tasks:
                rank = {"RANK": str(task.rank), "LOCAL_RANK": str(task.rank)}
                node = nodes[task.rank] if nodes else Node("", {})
                process = Process(
                    f"{name} rank {task.rank}",
                    task,
                    python,
                    timeout,
                    environment=shared | rank | node.environment,
                    command=node.command,
                )
                self._processes.append(started.enter_context(process))
            self._exits = started.pop_all()

    def ready(self) -> list[dict[str, Any]]:
        """Wait until all ranks have built their models; returns their replies. Raises ContenderFailed."""
        return self._each(Process.ready)

    def ask(self, way: str, **arguments: Any) -> list[dict[str, Any]]:
        """Have all ranks run a turn, as `Process.ask` does; returns their replies. Raises ContenderFailed."""
        return self._each(lambda process: process.ask(way, **arguments))

    def finish(self) -> None:
        """Ask all ranks to close and end. Raises ContenderFailed."""
        self._each(Process.finish)

    def _each(self, call: Callable[[Process], Any]) -> list[Any]:
        """Call `call` for all processes at the same time; returns the results in the order of ranks.

        As soon as one fails, all are killed, because the others may wait for it.
        """
        with ThreadPoolExecutor(len(self._processes)) as pool:
            futures = [pool.submit(call, process) for process in self._processes]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                words = [str(each.exception()) for each in futures if each in done and each.exception()]
                if words:
                    raise ContenderFailed("\n".join(words))
            except BaseException:
                for process in self._processes:
                    process.kill()  # their threads end, too
                raise
            return [each.result() for each in futures]

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()
