"""Mailbox: messages between the ranks of a node, its **mates**, through shared memory (csrc/tiers/mail.hpp).

Each rank has a region that its mates map for reading, and writes there what it sends to each of them. No
message needs a MAC: the kernel opens the memory for processes of the same user alone.

[Note: who reads messages of mates]
- While the training thread uses the runtime, it reads and acts on messages itself, whenever it takes the
  runtime's lock (`ServiceThread.look`). Nobody wakes anybody.
- A thread that waits for other ranks sleeps until a message comes (`Listener`), and then does the same.
- The thread that receives messages by ZeroMQ looks every LOOK seconds whether others have looked at all
  meanwhile. If not, it sleeps until a message comes, and the service thread acts on it.

Sleepers are woken by a byte in a pipe, if they say that they sleep ([Note: need wakeup] in
csrc/tiers/mail.hpp). So a message is read at the latest 2 * LOOK seconds after it was sent. For messages that
are not urgent (gradient shards) the sender wakes nobody before it waits itself or its thread looks again: the
sleeper then acts on several of them.
"""

from __future__ import annotations

import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from infinity import _tiers

Told = list[int]
"""(process, descriptor, inode, bytes) of shared memory, or of a pipe, as ranks tell it each other."""
LOOK = 0.005
"""Seconds."""
_LONGEST = 1 << 28
"""The most bytes of a message."""
_THREAD, _LISTENER = range(2)
"""The sleepers of a process, as csrc/tiers/mail.hpp numbers them."""
_MESSAGES, _ROOM = 1, 2
"""What a sleeper wants to be woken for."""
_HEAD = struct.Struct("<II")
"""Before each message: its length, and that of the bytes of a stream behind it."""


class Mailbox:
    """This rank's messages to its mates, and theirs to this rank, as bytes. All of it is for `Connections`,
    but `tell`, `open` and `meet`.
    """

    def __init__(self, rank: int, near: Sequence[int]) -> None:
        """near: all ranks of this node, in the same order on each. Raises OSError if the kernel grants no
        shared memory.
        """
        self._places = {each: place for place, each in enumerate(near)}
        """Rank of this node -> its number in `_mail`."""
        self._memory = _tiers.map_host(_tiers.Mail.nbytes(len(near)), huge_pages=False, shared=True)
        self._mail = _tiers.Mail(self._memory, len(near), self._places[rank])
        self._pipes = [os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) for _ in (_THREAD, _LISTENER)]
        self._bells: dict[int, list[int]] = {}
        """Mate -> the descriptors by which its sleepers are woken."""
        self.left: dict[int, deque[bytes | memoryview]] = {}
        """Mate -> bytes for which there was no room, which go before all later ones; no empty ones."""
        self._unaware: set[int] = set()
        """Mates that have got messages which were not urgent, and have not been woken since."""
        self._begun: dict[int, bytes] = {}
        """Mate -> the part of a message that has come."""
        self.mates: frozenset[int] = frozenset()
        self.processes: dict[int, int] = {}
        """Descriptor that becomes readable when a mate's process ends -> the mate."""
        self._looks = self._seen = self._watcher = 0
        self._sleeps = False
        """Whether the thread of `watch` sleeps until it is woken."""
        self._to_rouse = False
        """Whether the thread of `watch` has to wake the one that listens."""
        self.unread = self._mail.unread

    def tell(self) -> list[Told]:
        """What this rank tells the others, so that they can open its mailbox."""
        pipes = [[os.getpid(), end, os.fstat(end).st_ino, 0] for end, _ in self._pipes]
        return [described(self._memory), *pipes]

    def open(self, tellers: Mapping[int, Sequence[Told]]) -> list[int]:
        """Open the mailboxes of other ranks. tellers: rank -> what it told. Returns the ranks for which this
        worked.
        """
        for rank, (memory, *pipes) in tellers.items():
            with suppress(OSError, IndexError):  # the latter: of memory of another size
                self.processes[_tiers.open_process(memory[0])] = rank  # first: the number may be used again
                self._mail.meet(self._places[rank], window(memory))
                self._bells[rank] = []
                for each in pipes:
                    self._bells[rank].append(opened(each, os.O_WRONLY | os.O_NONBLOCK))
        return [rank for rank, bells in self._bells.items() if len(bells) == len(self._pipes)]

    def meet(self, mates: Sequence[int]) -> None:
        """Note the ranks that read this rank's mailbox, and whose mailboxes this rank reads."""
        self._memory.close_descriptor()
        for rank in self._bells.keys() - set(mates):
            for each in self._bells.pop(rank):
                os.close(each)
        for descriptor, rank in [*self.processes.items()]:
            if rank not in mates:
                del self.processes[descriptor]
                os.close(descriptor)
        self.mates = frozenset(mates)

    # --- sending: one thread at a time ----------------------------------------------------------------------

    def post(self, mate: int, message: bytes, portion: Sequence[memoryview], *, urgent: bool) -> bool:
        """Send a message and bytes of a stream. Never blocks. Returns False if there was no room for all of
        it: `flush` sends the rest. urgent: whether the mate is woken now; else `ring` wakes it. Raises
        RuntimeError if the mate's memory has impossible numbers; what is left for it is dropped then.
        """
        head = _HEAD.pack(len(message), sum(map(len, portion)))
        self.left.setdefault(mate, deque()).extend([head + message, *portion])
        return self._write(mate, urgent=urgent)

    def flush(self) -> list[tuple[int, str]]:
        """Send what there was no room for, as far as there is by now. Returns (mate, error) of `post`."""
        failed = []
        for mate in [*self.left]:
            try:
                self._write(mate)
            except RuntimeError as error:
                failed.append((mate, str(error)))
        return failed

    def _write(self, mate: int, *, urgent: bool = True) -> bool:
        left, done = self.left.pop(mate), True
        while left and done:
            count = self._mail.write(self._places[mate], left[0])
            done = count == len(left[0])
            if done:
                left.popleft()
            else:
                left[0] = memoryview(left[0])[count:]
        if left:
            self.left[mate] = left
        if urgent or left:
            self._unaware.discard(mate)
            self._ring(mate)
        else:
            self._unaware.add(mate)
            if self._sleeps:
                self._wake(self._pipes[_THREAD][1])  # it calls `ring`
        return not left

    def ring(self) -> None:
        """Wake the mates that sleep and have got messages that were not urgent. Any thread may call this."""
        while self._unaware:
            with suppress(KeyError):  # another thread takes it
                self._ring(self._unaware.pop())

    def _ring(self, mate: int) -> None:
        if self._mail.sleeper(self._places[mate], _LISTENER):
            self._wake(self._bells[mate][_LISTENER])
        elif self._mail.sleeper(self._places[mate], _THREAD) & _MESSAGES:
            self._wake(self._bells[mate][_THREAD])

    def forget(self, mate: int) -> None:
        """Drop what was not sent to a mate that is lost."""
        self.left.pop(mate, None)

    @staticmethod
    def _wake(descriptor: int) -> None:
        with suppress(OSError):  # the pipe is full, so the sleeper wakes; or its process has ended
            os.write(descriptor, b"!")

    # --- reading: one thread at a time ----------------------------------------------------------------------

    def read(self) -> Iterator[tuple[int, bytes | None, list[memoryview]]]:
        """Yield (mate, message, bytes of a stream) for all messages that are here, in each mate's order; None
        instead of the message if what the mate has sent is no message.
        """
        for mate in self._bells:
            try:
                data = self._begun.pop(mate, b"") + self._mail.read(self._places[mate])
            except RuntimeError:
                yield mate, None, []
                continue
            if self._mail.sleeper(self._places[mate], _THREAD) & _ROOM:
                self._wake(self._bells[mate][_THREAD])
            at = 0
            while len(data) >= at + _HEAD.size:
                nbytes, behind = _HEAD.unpack_from(data, at)
                start = at + _HEAD.size
                end = start + nbytes + behind
                if end - at > _LONGEST:
                    yield mate, None, []
                    at = len(data)
                if end > len(data):
                    break
                portion = [memoryview(data[start + nbytes : end])] if behind else []
                yield mate, data[start : start + nbytes], portion
                at = end
            if at < len(data):
                self._begun[mate] = data[at:]

    def looked(self) -> None:
        """Note that a thread has read all messages."""
        self._looks += 1

    # --- sleeping -------------------------------------------------------------------------------------------

    @property
    def descriptor(self) -> int:
        """Becomes readable when the thread of `watch` has to wake; see `woken`."""
        return self._pipes[_THREAD][0]

    def watch(self) -> bool:
        """Return whether another thread has looked since the last call. If not, the caller is woken from now
        on when a message comes; in any case when a mate has made room for what `flush` sends. Only one thread
        calls this, before `flush`.
        """
        self._watcher = threading.get_ident()
        others = self._looks != self._seen
        self._seen = self._looks
        self._sleeps = not others
        self._mail.sleep(_THREAD, _MESSAGES * self._sleeps + _ROOM * bool(self.left))
        return others

    def rouse(self) -> None:
        """Wake this rank's own listener. The thread of `watch` does so in `rouse_now`: when it has dropped
        what it refers to of a transfer that has ended, so that the listener finds this memory free.
        """
        self._to_rouse = True
        if threading.get_ident() != self._watcher:
            self.rouse_now()

    def rouse_now(self) -> None:
        if self._to_rouse:
            self._to_rouse = False
            self._wake(self._pipes[_LISTENER][1])

    def woken(self, sleeper: int = _THREAD) -> None:
        """Take the bytes that have woken a sleeper."""
        with suppress(BlockingIOError):
            os.read(self._pipes[sleeper][0], 1 << 12)

    def close(self) -> None:
        """Close all descriptors, when nobody sends, reads or sleeps any more."""
        self.left.clear()  # it refers to memory, as what has begun does
        self._begun.clear()
        bells, self._bells = self._bells, {}
        for each in [*self._pipes, *bells.values(), self.processes]:
            for end in each:
                os.close(end)


class Listener:
    """Lets a thread that waits for other ranks act on messages of mates meanwhile; one thread at a time."""

    def __init__(self, mailbox: Mailbox, attend: Callable[[], object], may: Callable[[], bool]) -> None:
        """attend: reads messages, and acts on them under the runtime's lock. may: whether the calling thread
        may do so.
        """
        self._mailbox = mailbox
        self._attend = attend
        self._may = may
        self._listening = threading.Lock()
        self._listens = 0
        """The thread that listens, or 0."""
        self._poll = select.poll()
        self._poll.register(mailbox._pipes[_LISTENER][0], select.POLLIN)

    def wait(self, over: Callable[[], bool], seconds: float) -> bool:
        """Wait until `over()`, or until the time has passed. Returns False at once if the calling thread may
        not listen, or another one does.
        """
        self._mailbox.ring()  # no mate sleeps on messages of a rank that waits
        if not self._may() or not self._listening.acquire(blocking=False):
            return False
        self._listens, until = threading.get_ident(), time.monotonic() + seconds
        mail = self._mailbox._mail
        try:
            while True:
                mail.sleep(_LISTENER, 1)
                self._attend()
                left = until - time.monotonic()
                if over() or left <= 0:
                    return True
                self._poll.poll(1 + int(1000 * min(left, 3600)))
                mail.sleep(_LISTENER, 0)
                self._mailbox.woken(_LISTENER)
        finally:
            self._listens = 0
            mail.sleep(_LISTENER, 0)
            self._listening.release()
            self._attend()  # what has come since is for no sleeper

    def rouse(self) -> None:
        """Have the thread that listens look again, after a change that may end its wait."""
        if self._listens not in (0, threading.get_ident()):
            self._mailbox.rouse()


def described(memory: _tiers.Region) -> Told:
    """What a rank tells of shared memory, so that others can map it (`window`)."""
    inode = os.fstat(memory.descriptor).st_ino
    return [os.getpid(), memory.descriptor, inode, memory.nbytes]


def window(said: Told) -> _tiers.Window:
    """Map another process's shared memory. Raises OSError if this process may not."""
    descriptor = opened(said)
    try:
        return _tiers.map_window(descriptor, said[-1])
    finally:
        os.close(descriptor)


def opened(said: Told, flags: int = os.O_RDONLY) -> int:
    """Open what another process has told of. Returns a descriptor. Raises OSError if this process may not."""
    process, number, inode, _ = said
    descriptor = os.open(f"/proc/{process}/fd/{number}", flags | os.O_CLOEXEC)
    if os.fstat(descriptor).st_ino == inode:
        return descriptor
    os.close(descriptor)
    raise FileNotFoundError(f"process {process} is another one")
