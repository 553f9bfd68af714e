"""Every role a process of its own on this machine; data in shared memory.

Processes are never forks of this one (see `spawning`). They are not daemonic, so that an
environment may have processes of its own.
The parent reads each role's records through a pipe of that role's own, sees that it still gives
signs of life, and ends all of them at the first failure. A role ends by itself when the parent
dies.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from repertory.metrics import Record
from repertory.runtimes.base import Order, Role, RoleFailed
from repertory.runtimes.hogwild import FileLock, NoLock, SharedParameters
from repertory.runtimes.process_role import POLL_SECONDS, Control, run_role
from repertory.runtimes.shared_memory import (
    Channel,
    SharedGroup,
    SharedMember,
    SharedQueue,
    SharedStore,
)
from repertory.runtimes.stops import GRACE_SECONDS, LATE, NOT_BEGUN, Stop
from repertory.spawning import SERVER_IS_DEAD, how_it_ended, start_child
from repertory.trajectories import TrajectorySpec

_START_SECONDS = 600.0  # for a role to give its first sign of life; slow starts are no failure
_LAST_UPDATE_SECONDS = 30.0  # more, for a learner after the failure of another role
_DEAD_LOOKS = 20  # at a process that has ended, for what it still had to say


@dataclass
class _Child:
    """What the parent knows of a role.

    Silence is counted a look at a time, and a look counts little: a machine that sleeps, or a run
    that is stopped and continued, makes nobody look dead.
    """

    name: str
    index: int
    role: Role
    arguments: tuple[Any, ...]
    threads: int
    replaceable: bool
    process: multiprocessing.process.BaseProcess
    reader: threading.Thread
    first_beats: int
    beats: int
    starts: int
    silent_seconds: float = 0.0
    reason: str | None = None
    dead_looks: int = 0
    ended: bool = False

    @property
    def learns(self) -> bool:
        """Whether it is a learner: one that sums with others, or could."""
        return any(isinstance(argument, SharedMember) for argument in self.arguments)


class ProcessRuntime:
    """The `Runtime` of one machine; see the module."""

    def __init__(
        self,
        role_timeout_seconds: float = 120.0,
        start_seconds: float | None = None,
        max_restarts: int = 0,
    ) -> None:
        """Nothing is started yet.

        Args:
            role_timeout_seconds: A role that gives no sign of life for so long is taken to hang.
            start_seconds: For a role to give its first sign of life; by default ten minutes.
            max_restarts: How many dead or hung roles are replaced before one ends the run; only
                those that were started as replaceable.
        """
        self._control = Control()
        self._timeout = role_timeout_seconds
        self._start_seconds = start_seconds or _START_SECONDS
        # Others may still be starting, and then be silent for as long as is allowed.
        self._patience = self._start_seconds + 2 * role_timeout_seconds
        self._channels: list[Channel] = []
        self._locks: list[FileLock] = []
        self._children: list[_Child] = []
        self._names: list[str] = []
        self._inbox: queue.SimpleQueue[tuple[int, int, str, Any]] = queue.SimpleQueue()
        self.results: dict[str, Any] = {}
        self._failure: RoleFailed | None = None
        self._looked = time.monotonic()
        self._stop = Stop(role_timeout_seconds)
        self._max_restarts = max_restarts
        self._restarts = 0

    def trajectory_queue(
        self, spec: TrajectorySpec, num_actors: int, *, order: Order, capacity: int = 2
    ) -> SharedQueue:
        """See `Runtime`."""
        return SharedQueue(self._channels, spec, num_actors, order, capacity)

    def parameter_store(self, model: nn.Module, num_readers: int) -> SharedStore:
        """See `Runtime`."""
        return SharedStore(self._channels, model, num_readers)

    def learner_group(self, model: nn.Module, num_learners: int) -> SharedGroup:
        """See `Runtime`."""
        return SharedGroup(self._channels, model, num_learners)

    def shared_model(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        num_workers: int,
        *,
        lock: bool,
        shared_statistics: bool,
        updates: int = 0,
        env_steps: int = 0,
    ) -> SharedParameters:
        """See `Runtime`."""
        if lock:
            self._locks.append(FileLock())
        return SharedParameters(
            model,
            optimizer,
            num_workers,
            self._locks[-1] if lock else NoLock(),
            shared_statistics=shared_statistics,
            counted=(updates, env_steps),
            place=Tensor.share_memory_,
        )

    def start(
        self,
        name: str,
        role: Role,
        *arguments: Any,
        threads: int = 1,
        replaceable: bool = False,
    ) -> None:
        """See `Runtime`. The process starts at once."""
        index = len(self._children)
        self._names.append(name)
        self._children.append(self._launch(name, index, role, arguments, threads, replaceable))

    def _launch(
        self,
        name: str,
        index: int,
        role: Role,
        arguments: tuple[Any, ...],
        threads: int,
        replaceable: bool,
        starts: int = 0,
    ) -> _Child:
        """Start a role's process, and a thread that listens to it."""
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = start_child(
            name,
            run_role,
            name,
            index,
            role,
            arguments,
            self._control,
            theirs,
            threads,
            self._patience,
            starts,
        )
        theirs.close()
        reader = threading.Thread(target=self._listen, args=(index, starts, ours), daemon=True)
        beats = self._control.beats(index)
        reader.start()
        return _Child(
            name,
            index,
            role,
            arguments,
            threads,
            replaceable,
            process,
            reader,
            beats,
            beats,
            starts,
        )

    def supervise(self, on_record: Callable[[str, Record], None]) -> dict[str, Any]:
        """See `Runtime`."""
        try:
            while not all(child.ended for child in self._children):
                self._read_messages(on_record)
                self._look_for_the_hung()
                if self._stop.over():
                    self._control.abort()  # nobody waits any more; learners still give their state
                if self._stop.over(GRACE_SECONDS / 2):
                    break
                if self._failure is not None:
                    raise self._failure
        finally:
            late = [child for child in self._children if not child.ended]
            if self._stop.asked:
                for child in late:
                    child.process.terminate()  # whatever it is in, it hands over what it has
            self.close()
            self._keep_late_results()
            if self._stop.asked:
                self._stop.missing += [
                    RoleFailed(c.name, LATE if c.beats > c.first_beats else NOT_BEGUN) for c in late
                ]
                self._failure = self._failure or self._stop.failure(self.results)
            if self._failure is not None:
                self._failure.results = self.results
        if self._failure is not None:
            raise self._failure
        return self.results

    def collect_state(self) -> None:
        """See `Runtime`."""
        self._control.ask_for_state()

    def stop(self, *, hurry: bool = False) -> None:
        """See `Runtime`."""
        self._stop.ask(hurry)
        self._control.stop()

    def close(self) -> None:
        """End every role, by force after a few seconds, and release what they shared."""
        spent = GRACE_SECONDS / 2 if self._control.aborted else 0.0
        self._control.abort()
        deadline = time.monotonic() + GRACE_SECONDS - spent
        # Where another role failed, a learner may still be in an update whose state is to be saved.
        last_update = 0.0 if self._stop.asked else min(self._timeout, _LAST_UPDATE_SECONDS)
        for child in self._children:
            more = last_update if child.learns and self._failure is not None else 0.0
            remaining = max(0.0, deadline + more - time.monotonic())
            if child.process.exitcode == SERVER_IS_DEAD:
                child.reader.join(remaining)  # its own line still tells of its end
            else:
                child.process.join(remaining)
        for child in self._children:
            child.process.kill()  # it may be out of sight and alive
            child.process.join()
            child.reader.join(1.0)
            child.process.close()
        self._children.clear()
        for channel in self._channels:
            channel.close()
        self._channels.clear()
        for lock in self._locks:
            lock.close()
        self._locks.clear()

    def _listen(self, index: int, starts: int, pipe: Connection) -> None:
        """Pass on what a role sends; a thread a role, so that a stuck one blocks no other."""
        with pipe:
            while True:
                try:
                    message = pipe.recv_bytes()
                except (EOFError, OSError):
                    break
                try:
                    kind, content = pickle.loads(message)
                except Exception as error:  # of a class that only the role can import, say
                    kind, content = "error", (f"unreadable message: {error}", "", None)
                self._inbox.put((index, starts, kind, content))
        self._inbox.put((index, starts, "ended", None))

    def _read_messages(self, on_record: Callable[[str, Record], None]) -> None:
        """Handle what has come, waiting a little for the first."""
        with contextlib.suppress(queue.Empty):
            message = self._inbox.get(timeout=POLL_SECONDS)
            while True:
                index, starts, kind, content = message
                child = self._children[index]
                if child.starts == starts:  # not of one that was replaced since
                    self._handle(child, kind, content, on_record)
                message = self._inbox.get_nowait()

    def _keep_late_results(self) -> None:
        """What other roles returned when they saw that the run was over."""
        with contextlib.suppress(queue.Empty):
            while True:
                index, _, kind, content = self._inbox.get_nowait()
                if kind == "result":
                    self.results[self._names[index]] = content
                elif kind in ("error", "lost") and content[2] is not None:
                    self.results[self._names[index]] = content[2]

    def _handle(
        self, child: _Child, kind: str, content: Any, on_record: Callable[[str, Record], None]
    ) -> None:
        if kind == "record":
            on_record(child.name, content)
        elif kind == "result":
            self.results[child.name] = content
        elif kind == "lost" and child.replaceable:
            child.reason = content[0]
        elif kind in ("error", "lost"):
            reason, trace, state = content
            if state is not None:
                self.results[child.name] = state
            self._fail(child, reason, trace)
        elif not child.ended:
            child.ended = True
            child.process.join(GRACE_SECONDS)
            if child.name not in self.results and self._failure is None:
                self._replace_or_fail(child, on_record)

    def _replace_or_fail(self, child: _Child, on_record: Callable[[str, Record], None]) -> None:
        """A role has ended without a result or an error: killed from outside, or hung."""
        reason = child.reason or f"{how_it_ended(child.process.exitcode)} (pid {child.process.pid})"
        if self._stop.asked:  # another one would only have to end again
            self._stop.missing.append(RoleFailed(child.name, reason))
            return
        if not child.replaceable:
            self._fail(child, reason)
            return
        if self._restarts == self._max_restarts:
            self._fail(child, f"{reason}, after {self._restarts} replacements in this run")
            return
        self._restarts += 1
        message = (
            f"{child.name} failed: {reason}; it is replaced ({self._restarts} of at most "
            f"{self._max_restarts} replacements)"
        )
        on_record(child.name, {"kind": "event", "event": "replaced", "message": message})
        child.process.kill()  # one that has only closed its line
        child.process.join()
        try:
            self._children[child.index] = self._launch(
                child.name,
                child.index,
                child.role,
                child.arguments,
                child.threads,
                child.replaceable,
                starts=child.starts + 1,
            )
        except OSError as error:  # no memory, or too many open files
            self._fail(child, f"{reason}; another one cannot be started: {error}")
            return
        child.process.close()

    def _look_for_the_hung(self) -> None:
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 1.0), now
        for child in self._children:
            if child.ended:
                continue
            if not child.process.is_alive():
                # Its line stays open where it has forked somebody who lives on.
                child.dead_looks += 1
                if child.dead_looks == _DEAD_LOOKS:
                    self._inbox.put((child.index, child.starts, "ended", None))
                continue
            beats = self._control.beats(child.index)
            child.silent_seconds = child.silent_seconds + passed if beats == child.beats else 0.0
            child.beats = beats
            has_begun = beats > child.first_beats
            allowed = self._timeout if has_begun else max(self._timeout, self._start_seconds)
            if child.silent_seconds > allowed and child.reason is None:
                child.reason = (
                    f"no sign of life for {allowed:g} s (pid {child.process.pid}); if an "
                    "unroll or an update may take longer, raise role_timeout_seconds"
                )
                child.process.kill()  # its end is what is handled

    def _fail(self, child: _Child, reason: str, trace: str = "") -> None:
        if self._failure is None:
            self._failure = RoleFailed(child.name, reason, trace)
