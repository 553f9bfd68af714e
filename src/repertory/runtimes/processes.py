"""Every role a spawned process of its own on this machine; data in shared memory.

Processes are spawned, never forked: a fork of a process that has run torch inherits a thread pool
that no longer runs. They are not daemonic, so that an environment may have processes of its own.
The parent reads each role's records through a pipe of that role's own, sees that it still gives
signs of life, and ends all of them at the first failure. A role ends by itself when the parent dies.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing  # registers how tensors travel to a spawned process
from torch import Tensor, nn

from repertory.parameters import flatten, snapshot_size, travelling_tensors, unflatten
from repertory.runtimes.base import Order, Record, Role, RoleFailed
from repertory.runtimes.shared_memory import Channel, TrajectorySlots, shared_zeros
from repertory.trajectories import Trajectory, TrajectorySpec, split

_MAX_ROLES = 1024
_POLL_SECONDS = 0.1  # how soon a waiting role sees that the run is over
_GRACE_SECONDS = 5.0  # for roles to end by themselves before they are killed
_START_SECONDS = 600.0  # for a role to give its first sign of life; slow starts are no failure
_MAX_COUNTS = 4
_SMALLEST_ROOM = 64  # bytes; for the few numbers that learners add up beside gradients
_CLOSED = -1


class _Control:
    """A few shared numbers: each is written by one process at a time and read by all."""

    def __init__(self) -> None:
        self._flags = shared_zeros(3, dtype=torch.int64)
        self._beats = shared_zeros(_MAX_ROLES, dtype=torch.int64)

    @property
    def stopping(self) -> bool:
        """The run was asked to end after the update in progress."""
        return bool(self._flags[0])

    @property
    def aborted(self) -> bool:
        """The run is over: no verb waits any more."""
        return bool(self._flags[1])

    @property
    def states_asked(self) -> int:
        """How often the parent asked for the roles' states."""
        return int(self._flags[2])

    def stop(self) -> None:
        self._flags[0] = 1

    def abort(self) -> None:
        self._flags[1] = 1

    def ask_for_state(self) -> None:
        self._flags[2] += 1

    def beat(self, index: int) -> None:
        """A role's sign of life."""
        self._beats[index] = time.monotonic_ns()

    def silent_seconds(self, index: int) -> float | None:
        """How long ago the last sign of life was; None before the first."""
        last = int(self._beats[index])
        return (time.monotonic_ns() - last) / 1e9 if last else None


class _Context:
    """A role's line to the parent, in the role's process."""

    def __init__(self, name: str, index: int, control: _Control, pipe: Connection) -> None:
        self.name = name
        self.control = control
        self._index = index
        self._pipe = pipe
        self._states_given = 0

    def beat(self) -> None:
        """Give a sign of life."""
        self.control.beat(self._index)

    def report(self, record: Record) -> None:
        self.beat()
        self.send("record", record)

    def offer_state(self, collect: Callable[[], Mapping[str, Any]]) -> None:
        asked = self.control.states_asked
        if self._states_given < asked:
            self._states_given = asked
            self.report({"kind": "state", "state": collect()})

    def send(self, kind: str, content: Any) -> None:
        """Plain pickle: it copies tensors, where the spawning one would share them."""
        self._pipe.send_bytes(pickle.dumps((kind, content)))

    def wait_for(self, channels: list[Channel]) -> list[Channel]:
        """Wait until messages lie in some of `channels`; an empty list when the run is over."""
        by_connection = {channel.receiving: channel for channel in channels}
        while True:
            self.beat()
            ready = wait(list(by_connection), _POLL_SECONDS)
            if ready:
                return [by_connection[connection] for connection in ready]  # type: ignore[index]
            if self.control.aborted:
                return []


class _Endpoint:
    """One end of something shared; it learns in whose process it is when the role begins."""

    _context: _Context | None = None

    def attach(self, context: _Context) -> None:
        self._context = context

    @property
    def context(self) -> _Context:
        assert self._context is not None, "verbs belong to roles: this is the parent process"
        return self._context


class _QueueWriter(_Endpoint):
    def __init__(self, slots: TrajectorySlots, free: Channel, full: Channel) -> None:
        self._slots = slots
        self._free = free
        self._full = full
        self._closed = False

    def put(self, trajectory: Trajectory) -> bool:
        if self._closed or not self.context.wait_for([self._free]):
            return False
        (slot,) = self._free.receive()
        if slot == _CLOSED:
            self._closed = True
            return False
        self._slots.write(slot, trajectory)
        self._full.send(slot)
        return True


class _QueueReader(_Endpoint):
    def __init__(
        self, slots: TrajectorySlots, free: list[Channel], full: list[Channel], order: Order
    ) -> None:
        self._slots = slots
        self._free = free
        self._full = full
        self._order = order
        self._arrived: deque[tuple[int, int]] = deque()  # (actor, slot), oldest first
        self._batch: Trajectory | None = None
        self._closed = False

    def take(self, count: int) -> Trajectory | None:
        if self._order == "actor" and count != len(self._full):
            raise ValueError(f"order 'actor' takes one from each of {len(self._full)} actors")
        taken = None if self._closed else self._collect(count)
        if taken is None:
            return None
        columns = self._slots.spec.num_columns
        if self._batch is None or self._batch.num_columns != count * columns:
            self._batch = self._slots.spec.with_columns(count * columns).allocate()
        for (actor, slot), place in zip(taken, split(self._batch, [columns] * count), strict=True):
            self._slots.read(slot, place)
            self._free[actor].send(slot)
        return self._batch

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for channel in self._free:
                channel.send(_CLOSED)

    def _collect(self, count: int) -> list[tuple[int, int]] | None:
        """Which slots to take; None when the run is over."""
        while (taken := self._choose(count)) is None:
            missing = self._full
            if self._order == "actor":
                present = {actor for actor, _ in self._arrived}
                missing = [c for actor, c in enumerate(self._full) if actor not in present]
            ready = self.context.wait_for(missing)
            if not ready:
                return None
            for channel in ready:
                self._arrived.append((self._full.index(channel), *channel.receive()))
        return taken

    def _choose(self, count: int) -> list[tuple[int, int]] | None:
        if self._order == "arrival":
            if len(self._arrived) < count:
                return None
            return [self._arrived.popleft() for _ in range(count)]
        if len(self._arrived) < count:
            return None
        taken = sorted(self._arrived)
        self._arrived.clear()
        return taken


class _Queue:
    def __init__(
        self, channels: list[Channel], spec: TrajectorySpec, num_actors: int, order: Order, capacity: int
    ) -> None:
        self._slots = TrajectorySlots(spec, num_actors * capacity)
        self._free = [Channel(1) for _ in range(num_actors)]
        self._full = [Channel(1) for _ in range(num_actors)]
        channels.extend([*self._free, *self._full])
        self._order = order
        for actor, channel in enumerate(self._free):
            for slot in range(capacity):
                channel.send(actor * capacity + slot)

    def writer(self, actor: int) -> _QueueWriter:
        return _QueueWriter(self._slots, self._free[actor], self._full[actor])

    def reader(self) -> _QueueReader:
        return _QueueReader(self._slots, self._free, self._full, self._order)


class _ParameterMemory:
    """Two buffers that take turns, and the sequence numbers that make a mixture visible."""

    def __init__(self, model: nn.Module) -> None:
        dtype = travelling_tensors(model)[0].dtype
        self._buffers = shared_zeros(2, snapshot_size(model), dtype=dtype)
        self._begun = torch.full((2,), -1, dtype=torch.int64).share_memory_()
        self._complete = torch.full((1,), -1, dtype=torch.int64).share_memory_()

    @property
    def newest(self) -> int:
        return int(self._complete[0])

    def write(self, model: nn.Module, version: int) -> None:
        self._begun[version % 2] = version
        flatten(travelling_tensors(model), self._buffers[version % 2])
        self._complete[0] = version

    def read(self, model: nn.Module, version: int) -> bool:
        """Load `version`; False if it was overwritten before or meanwhile."""
        copy = self._buffers[version % 2].clone()
        if int(self._begun[version % 2]) != version:
            return False
        unflatten(copy, travelling_tensors(model))
        return True


class _ParameterWriter(_Endpoint):
    def __init__(self, memory: _ParameterMemory, news: list[Channel]) -> None:
        self._memory = memory
        self._news = news

    def publish(self, model: nn.Module, version: int) -> None:
        self._memory.write(model, version)
        self._tell(version)

    def close(self) -> None:
        self._tell(_CLOSED)

    def _tell(self, number: int) -> None:
        for channel in self._news:
            # A reader that leaves thousands of messages unread finds the newest in the memory.
            with contextlib.suppress(BlockingIOError):
                channel.send(number)


class _ParameterReader(_Endpoint):
    def __init__(self, memory: _ParameterMemory, news: Channel) -> None:
        self._memory = memory
        self._news = news
        self._closed = False

    def refresh(self, model: nn.Module, version: int | None = None) -> int | None:
        wanted = 0 if version is None else version
        while True:
            while self._news.pending():
                self._closed |= self._news.receive() == (_CLOSED,)
            if self._closed:
                return None
            newest = self._memory.newest
            if newest < wanted:
                if not self.context.wait_for([self._news]):
                    return None
                continue
            found = newest if version is None else version
            if self._memory.read(model, found):
                return found
            if version is not None:
                raise ValueError(f"version {version} is gone; the newest is {self._memory.newest}")


class _Store:
    def __init__(self, channels: list[Channel], model: nn.Module, num_readers: int) -> None:
        self._memory = _ParameterMemory(model)
        self._news = [Channel(1) for _ in range(num_readers)]
        channels.extend(self._news)

    def writer(self) -> _ParameterWriter:
        return _ParameterWriter(self._memory, self._news)

    def reader(self, actor: int) -> _ParameterReader:
        return _ParameterReader(self._memory, self._news[actor])


class _Member(_Endpoint):
    """Two rooms take turns, so that one round may be read while the next is written.

    Whoever enters round k + 2 has every message of round k + 1, which each learner sends after it
    has read all of round k.
    """

    def __init__(
        self, rank: int, rooms: Tensor, inbox: dict[int, Channel], outbox: dict[int, Channel]
    ) -> None:
        self._rank = rank
        self._rooms = rooms  # [2, num_learners, bytes]
        self._inbox = inbox
        self._outbox = outbox
        self._round = 0

    def sum(self, vector: Tensor, *counts: int) -> tuple[int, ...] | None:
        control = self.context.control
        self.context.beat()
        stop = control.stopping  # only the first learner's word counts, so that all agree
        if not self._outbox:
            return None if stop else counts
        room = self._rooms[self._round % 2].view(vector.dtype)[:, : vector.numel()]
        self._round += 1
        room[self._rank].copy_(vector)
        for channel in self._outbox.values():
            channel.send(int(stop), *counts, *[0] * (_MAX_COUNTS - len(counts)))
        totals = list(counts)
        for rank, channel in self._inbox.items():
            if not self.context.wait_for([channel]):
                return None
            word, *theirs = channel.receive()
            stop = bool(word) if rank == 0 else stop
            totals = [a + b for a, b in zip(totals, theirs, strict=False)]
        if stop or control.aborted:
            return None
        vector.copy_(room[0])
        for part in room[1:]:
            vector += part
        return tuple(totals)


class _Group:
    def __init__(self, channels: list[Channel], model: nn.Module, num_learners: int) -> None:
        size = sum(parameter.nbytes for parameter in model.parameters())
        room = max(size, _SMALLEST_ROOM) if num_learners > 1 else 0
        self._rooms = shared_zeros(2, num_learners, -(-room // 8) * 8, dtype=torch.uint8)
        ranks = range(num_learners)
        self._ways = {(a, b): Channel(1 + _MAX_COUNTS) for a in ranks for b in ranks if a != b}
        channels.extend(self._ways.values())

    def member(self, rank: int) -> _Member:
        inbox = {a: way for (a, b), way in self._ways.items() if b == rank}
        outbox = {b: way for (a, b), way in self._ways.items() if a == rank}
        return _Member(rank, self._rooms, inbox, outbox)


@dataclass
class _Child:
    """What the parent knows of a role."""

    name: str
    index: int
    process: multiprocessing.process.BaseProcess
    started: float
    reader: threading.Thread
    ended: bool = False


class ProcessRuntime:
    """The `Runtime` of one machine; see the module."""

    def __init__(self, role_timeout_seconds: float = 120.0) -> None:
        """Nothing is started yet.

        Args:
            role_timeout_seconds: A role that gives no sign of life for so long is taken to hang.
        """
        self._control = _Control()
        self._timeout = role_timeout_seconds
        self._channels: list[Channel] = []
        self._children: list[_Child] = []
        self._inbox: queue.SimpleQueue[tuple[_Child, str, Any]] = queue.SimpleQueue()
        self._results: dict[str, Any] = {}
        self._failure: RoleFailed | None = None

    def trajectory_queue(
        self, spec: TrajectorySpec, num_actors: int, *, order: Order, capacity: int = 2
    ) -> _Queue:
        """See `Runtime`."""
        return _Queue(self._channels, spec, num_actors, order, capacity)

    def parameter_store(self, model: nn.Module, num_readers: int) -> _Store:
        """See `Runtime`."""
        return _Store(self._channels, model, num_readers)

    def learner_group(self, model: nn.Module, num_learners: int) -> _Group:
        """See `Runtime`."""
        return _Group(self._channels, model, num_learners)

    def start(self, name: str, role: Role, *arguments: Any, threads: int = 1) -> None:
        """See `Runtime`. The process starts at once."""
        spawn = multiprocessing.get_context("spawn")
        index = len(self._children)
        ours, theirs = spawn.Pipe(duplex=False)
        process = spawn.Process(
            target=_run_role,
            args=(name, index, role, arguments, self._control, theirs, threads),
            name=name,
            daemon=False,
        )
        process.start()
        theirs.close()
        reader = threading.Thread(target=self._listen, args=(index, ours), daemon=True)
        self._children.append(_Child(name, index, process, time.monotonic(), reader))
        reader.start()

    def supervise(self, on_record: Callable[[str, Record], None]) -> dict[str, Any]:
        """See `Runtime`."""
        try:
            while not all(child.ended for child in self._children):
                self._read_messages(on_record)
                self._look_for_the_hung()
                if self._failure is not None:
                    raise self._failure
            return self._results
        finally:
            self.close()

    def collect_state(self) -> None:
        """See `Runtime`."""
        self._control.ask_for_state()

    def stop(self) -> None:
        """See `Runtime`."""
        self._control.stop()

    def close(self) -> None:
        """End every role, by force after a few seconds, and release what they shared."""
        self._control.abort()
        deadline = time.monotonic() + _GRACE_SECONDS
        for child in self._children:
            child.process.join(max(0.0, deadline - time.monotonic()))
        for child in self._children:
            if child.process.is_alive():
                child.process.kill()
            child.process.join()
            child.reader.join(1.0)
            child.process.close()
        self._children.clear()
        for channel in self._channels:
            channel.close()
        self._channels.clear()

    def _listen(self, index: int, pipe: Connection) -> None:
        """Pass on what a role sends; a thread a role, so that a stuck one blocks no other."""
        while True:
            try:
                kind, content = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                break
            self._inbox.put((self._children[index], kind, content))
        pipe.close()
        self._inbox.put((self._children[index], "ended", None))

    def _read_messages(self, on_record: Callable[[str, Record], None]) -> None:
        """Handle what has come, waiting a little for the first."""
        with contextlib.suppress(queue.Empty):
            child, kind, content = self._inbox.get(timeout=_POLL_SECONDS)
            while True:
                self._handle(child, kind, content, on_record)
                child, kind, content = self._inbox.get_nowait()

    def _handle(
        self, child: _Child, kind: str, content: Any, on_record: Callable[[str, Record], None]
    ) -> None:
        if kind == "record":
            on_record(child.name, content)
        elif kind == "result":
            self._results[child.name] = content
        elif kind == "error":
            self._fail(child, *content)
        elif not child.ended:
            child.ended = True
            child.process.join(_GRACE_SECONDS)
            if child.name not in self._results:
                self._fail(child, f"{_how_it_ended(child.process)} (pid {child.process.pid})")

    def _look_for_the_hung(self) -> None:
        for child in self._children:
            if child.ended:
                continue
            silent = self._control.silent_seconds(child.index)
            if silent is None:
                silent = time.monotonic() - child.started - _START_SECONDS + self._timeout
            if silent > self._timeout:
                self._fail(
                    child, f"no sign of life for {self._timeout:g} s (pid {child.process.pid})"
                )
                child.process.kill()

    def _fail(self, child: _Child, reason: str, trace: str = "") -> None:
        if self._failure is None:
            self._failure = RoleFailed(child.name, reason, trace)


def _how_it_ended(process: multiprocessing.process.BaseProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code} and without a word"


def _run_role(
    name: str,
    index: int,
    role: Role,
    arguments: tuple[Any, ...],
    control: _Control,
    pipe: Connection,
    threads: int,
) -> None:
    """A role's whole life, in its own process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they go to the whole group; the parent decides
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    torch.set_num_threads(threads)
    context = _Context(name, index, control, pipe)
    for argument in arguments:
        if isinstance(argument, _Endpoint):
            argument.attach(context)
    try:
        result = role(context, *arguments)
        context.send("result", result)
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            context.send("error", (reason, traceback.format_exc()))


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
