"""Committer: makes the state of a run after a step durable, while the run goes on.

[Note: the order of a commit]
1. `save` copies what is not in pages, and says which slot of each part the commit holds (the ledger).
   Parts in device memory have been updated and written to their slots before `save` returns.
2. The updates of the step run, as they would anyway, and write to these slots. Parts at home in memory that
   the CPU can use are written by the commit's thread.
3. When these writes have ended: fdatasync of every slab.
4. The manifest is written to a temporary file and synced. The first commit then renames the slabs and syncs
   their directories; see [Note: the name of a slab says whose it is] in infinity/tiers/slab.py. The manifest
   is renamed to commit-<generation>, and the directory is synced. From here on a crash resumes from this
   commit.
5. Only now the slots that the previous commit held are free. Slabs that only earlier commits needed are
   removed, and then the manifests of these commits: a manifest tells the next run which slabs to remove.

[Note: failed commits]
A commit that fails before its manifest has its name leaves the previous commit as it was. Its slots are free
again, and the run goes on. After a failed sync nobody knows what the disk holds: Linux reports the loss of
written pages once and forgets them. So the runtime refuses further use then, and a new process resumes from
the newest commit that is whole. If the manifest had its name already, that may be this commit or the previous
one, so the slots of both stay held.

[Note: commits of ranks]
Each of several ranks makes its rank commit, and none of these counts unless all are durable. So between 4 and
5 a rank waits until all others have done 4. If another rank fails, this rank takes the name of its manifest
away, and its commit has failed, too. infinity/distributed/barrier.py says why a restart finds a commit that
all ranks have.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from infinity.checkpoint import commit_files
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.record import Recorder, now
from infinity.checkpoint.run_state import generators
from infinity.errors import ConfigError, InfinityError
from infinity.optim.scheduler import UpdateScheduler
from infinity.pages.edits import EditTracker
from infinity.pages.health import Health
from infinity.pages.ledger import Commit, CommitState
from infinity.pages.optimizer_page import States
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.parts import Part
from infinity.pages.store import Store
from infinity.ranks import SingleVotes
from infinity.tiers.link import Transfer

_SLICE = 0.05
"""Seconds after which a waiting thread looks again, so that signals are handled meanwhile."""

_FLUSHES = 8
"""Number of parts in memory that are written at a time."""


class Committer:
    """Commits one runtime's state to a directory. All methods are called under the runtime's lock."""

    def __init__(
        self,
        directory: Path,
        *,
        pages: Sequence[ParameterPage],
        states: States,
        store: Store,
        scheduler: UpdateScheduler,
        edits: EditTracker,
        health: Health,
        recorder: Recorder,
        lock: AbstractContextManager[Any],
        generation: int,
        superseded: Callable[[], None] | None,
        votes: SingleVotes,
        released: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """directory: where manifests go. recorder: makes the manifests. lock: the runtime's lock. generation:
        number of the newest commit in the directory, 0 if there is none. superseded: called once, after the
        first commit of this runtime, to remove what that commit replaces; its StorageError is ignored. votes:
        agrees with the other ranks on each commit. released: makes a context without the lock, for waits for
        other ranks.
        """
        assert store.durable is not None
        self.directory = directory
        self.generation = generation
        """Number of the newest commit in the directory that is durable, or may be after an error."""
        self.last: Commit | None = None
        """The latest commit of this runtime."""
        self._thread: threading.Thread | None = None
        """The thread of the latest commit."""
        self._pages = pages
        self._store = store
        self._durable = store.durable
        self._ledger = store.ledger
        self._scheduler = scheduler
        self._edits = edits
        self._health = health
        self._recorder = recorder
        self._lock = lock
        self._superseded = superseded
        self._votes = votes
        self._released = released
        self._wanted = 0
        """Number of the last commit for which another rank waits."""
        self._frozen = [
            part for page in pages for part in page.home.parts if part.committed and not part.trained
        ]
        parts: dict[tuple[int, int], list[Part]] = {}
        for page in pages:
            for part in (*page.home.parts, *states.pages[page.index].home.parts):
                if part.trained and part.chunk_index is not None:
                    parts.setdefault((page.index, part.chunk_index), []).append(part)
        self._trained = parts
        self._in_device = {
            unit
            for (unit, _), several in parts.items()
            if any(part.home.nvme_lease is None and not part.home.in_place for part in several)
        }
        """The units with a page at home in device memory."""
        self._ledger.set_parts(parts)
        _close_at_exit(self)

    def save(self, state: object, *, rng: Mapping[str, Any] | None = None, identity: object = None) -> Commit:
        """Begin a commit of the state after the last step, and return it.

        The previous commit is completed first, and its error is raised if it was not raised before. state:
        the user's state. rng: states of the random number generators, by default their present states.
        identity: identifies the job. Raises ConfigError for a state that cannot be kept, and StorageError.
        """
        before = self.last
        try:
            number, created = self._begin()
            commit = self._save(number, created, state, generators() if rng is None else rng, identity)
        except Exception as error:
            refused = self._votes.refuse(error)
            if refused and self.last is not None and self.last is not before:
                self.last.reported = True  # by this error
            raise
        lent = [page for page in self._pages if self._edits.lent(page.index)]
        if lent:  # user code may change these pages at any time from now on
            self._scheduler.complete_awaited()
        for page in lent:
            self._store.settle_for_user(page.home)
        return commit

    def _begin(self) -> tuple[int, str]:
        """Complete the previous commit, and agree with all ranks on number and time of the next commit."""
        failure: InfinityError | None = None
        try:
            self.complete()
            if self.last is not None:
                self.last.report()
            self._health.check()
        except InfinityError as error:
            failure = error.again()
        return self._votes.begin(self.generation, now(), failure)

    def _save(
        self, number: int, created: str, state: object, rng: Mapping[str, Any], identity: object
    ) -> Commit:
        """Begin the commit for which `_begin` has returned `number` and `created`, and return it.

        state, rng, identity: as for `save`. Raises ConfigError if no thread can be started, and StorageError.
        """
        self._edits.sync_edits()
        for unit in self._in_device:
            self._scheduler.complete(unit)
        self._store.poll()
        outstanding = set(self._scheduler.outstanding())
        for chunk, parts in self._trained.items():
            if chunk not in outstanding:
                self._prepare(parts)
        self._prepare(part for part in self._frozen if part.durable is None)
        draft = self._recorder.draft(number, created, state, rng, identity)
        commit = Commit(number, self._complete_for)
        self._ledger.begin(commit, outstanding, self._frozen, self._store.writes_under_way())
        thread = _thread(self._run, commit, draft)
        try:
            thread.start()
        except RuntimeError as error:
            failure = ConfigError(f"A commit was given up: {error}.", "Allow more threads (ulimit -u).")
            self._ledger.end(commit, failure)
            raise failure from error
        self.last, self._thread = commit, thread
        if self._wanted == number:
            self.wanted(number)
        return commit

    def set_groups(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Set the param groups of the user's optimizer. The list is not a copy, so later changes count."""
        self._recorder.param_groups = param_groups

    def complete(self) -> None:
        """Complete the updates for which the pending commit waits, and wait until it is durable or has
        failed.

        Raises StorageError if a read of an update failed. The commit is still pending then, and the next call
        repeats the read.
        """
        commit = self.last
        if commit is not None and not commit.done:
            self._complete_for(commit)
            with self._released():
                commit.join()

    def wanted(self, generation: int) -> None:
        """Complete the updates for which the commit `generation` waits. Called when another rank waits for
        this commit.

        If this rank has not begun the commit yet, the updates are completed when it begins. If a read of an
        update fails, the commit fails. Otherwise the other rank might wait forever, because nothing is sure
        to repeat the read.
        """
        self._wanted = generation
        if self.last is not None and self.last.generation == generation:
            try:
                self._complete_updates(self.last)
            except InfinityError as error:
                self._ledger.give_up(error.again())

    def give_up(self) -> None:
        """Give up the pending commit without an error, unless its manifest is being written already.

        The previous commit stays. Called where the process has to end at once.
        """
        if self.last is not None and not self.last.done:
            self.last.reported = True
            self._ledger.give_up()

    def close(self) -> None:
        """Complete the pending commit, and raise its error if it was not raised before.

        If a read of a chunk update for which the commit waits fails, the commit fails, and the error of the
        read is raised.
        """
        try:
            self.complete()
        except InfinityError as error:
            assert self.last is not None
            self.last.reported = True
            self._ledger.give_up(error.again())
            raise
        if self.last is not None:
            self.last.report()

    def stop(self) -> None:
        """Give up the commit if it is pending, and wait until its thread uses no memory any more."""
        self._ledger.give_up()
        if self._thread is not None:
            while self._thread.is_alive():
                self._thread.join(_SLICE)

    # --- inside -----------------------------------------------------------------------------------------

    def _complete_for(self, commit: Commit) -> None:
        """Complete the updates for which a commit waits, because this process waits for the commit."""
        if self._health.forked:
            self._health.check()  # else it would wait for a thread that this process does not have
        with self._lock:
            if commit is self.last and not commit.done:
                commit.wanted = True
                self._complete_updates(commit)

    def _complete_updates(self, commit: Commit) -> None:
        """Complete the updates for which a pending commit waits; give it up if the runtime is lost."""
        if commit.done:
            return
        try:
            if self._health.failure is None:
                self._scheduler.complete_awaited()
        except InfinityError:
            if self._health.failure is None:
                raise  # a read failed, and the next call repeats it
        if self._health.failure is not None:
            self._ledger.give_up(self._health.failure)  # nobody completes the updates now

    def _prepare(self, parts: Iterable[Part]) -> None:
        """Copy parts at home on the device to disk, and learn the checksums of those at home on NVMe."""
        for part in parts:
            if part.home.nvme_lease is not None:
                self._durable.learn(part)
            elif not part.home.in_place:
                self._store.copy_to_disk(part)

    # --- the commit's thread ----------------------------------------------------------------------------

    def _run(self, commit: Commit, draft: SavedCommit) -> None:
        failure: InfinityError | None = None
        try:
            failure = self._outcome(commit, draft)
            if failure is None:
                self.generation = commit.generation
                self._remove_old(commit.generation)
        except BaseException as error:  # a bug must not leave others waiting
            failure = ConfigError(f"A commit failed by {error!r}.", "Report it, with the traceback.")
            self._votes.refuse(failure)
            raise
        finally:
            self._ledger.end(commit, failure)

    def _outcome(self, commit: Commit, draft: SavedCommit) -> InfinityError | None:
        """Make the commit durable here, or take it back if a rank refuses it. Returns the error or None."""
        first = not self._durable.nvme.keep
        try:
            self._make_durable(commit, draft)
        except InfinityError as error:
            self._votes.refuse(error)
            return error.again()
        try:
            failure = self._votes.decide(commit.generation, lambda: commit.wanted)
        except InfinityError as error:
            return error.again()  # the others may have the commit, so a restart may continue it
        if failure is not None:
            slabs = self._durable.nvme if first else None
            try:
                commit_files.take_back(self.directory, commit.generation, self._store.files, slabs)
            except InfinityError as error:
                self._health.lose(error)
            else:
                commit.state = CommitState.WRITING  # the manifest has lost its name
        return failure

    def _make_durable(self, commit: Commit, draft: SavedCommit) -> None:
        self._flush()
        for write in commit.writes:
            write.wait()
        self._ledger.complete(commit)
        nvme = self._durable.nvme
        nvme.check_names()
        with self._poisoning():
            nvme.sync().wait()
        made = self._recorder.finish(draft, commit)
        try:
            commit_files.write(made, self.directory, self._store.files, tier=nvme)
            commit.state = CommitState.NAMED
        except InfinityError as error:
            if self._may_be_named(commit.generation):
                commit.state = CommitState.NAMED
            if commit.state is CommitState.NAMED or nvme.sync_failed:
                self._health.lose(error)  # nobody knows whether the names are durable
            raise

    def _may_be_named(self, generation: int) -> bool:
        """Return whether the manifest of commit `generation` has its final name. Returns True, too, if the
        directory cannot be read.
        """
        try:
            return generation in commit_files.generations(self.directory)
        except InfinityError:
            return True

    def _flush(self) -> None:
        """Write all parts that are in memory to their slots, a few at a time."""
        under_way: deque[tuple[Part, Transfer]] = deque()
        while True:
            part = self._ledger.next_flush(block=not under_way)
            if part is not None:
                under_way.append(
                    (part, self._durable.copy_out(part, part.home.view(part.start, part.nbytes)))
                )
            if under_way and (part is None or len(under_way) >= _FLUSHES):
                written, transfer = under_way.popleft()
                transfer.wait()
                self._ledger.flushed(written)
            elif part is None:
                return

    @contextlib.contextmanager
    def _poisoning(self) -> Any:
        try:
            yield
        except InfinityError as error:
            self._health.lose(error)
            raise

    def _remove_old(self, generation: int) -> None:
        """Remove what the new commit replaces. Errors are ignored: the newest commit wins in any case."""
        with contextlib.suppress(InfinityError):
            if self._superseded is not None:
                self._superseded()
                self._superseded = None
            for each in commit_files.generations(self.directory):
                if each < generation:
                    commit_files.remove(self.directory, each, self._store.files)


def _thread(target: Callable[..., None], *args: object) -> threading.Thread:
    return threading.Thread(target=target, args=args, name="infinity-commit", daemon=True)


_committers: weakref.WeakSet[Committer] = weakref.WeakSet()


def _close_at_exit(committer: Committer) -> None:
    """Have the pending commit completed if the process ends before the runtime is closed.

    Called when the slabs are open. Handlers of atexit run in reverse order, so this handler runs before the
    one that removes slabs.
    """
    _committers.add(committer)
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def _close_all() -> None:
    for committer in list(_committers):
        if not committer._health.forked:
            try:
                committer.close()
            except InfinityError as error:
                warnings.warn(f"The last commit was not made: {error}", stacklevel=1)
