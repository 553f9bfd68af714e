"""Everything in one process, one role at a time, in a fixed order: the deterministic reference.

Roles are threads, but only the holder of a single baton runs. The baton is passed on at the verbs,
to the next role (by order of start) that can proceed, so a run's interleaving is always the same.
Where no role can proceed, that is a deadlock, and is said instead of waited for.
"""

from __future__ import annotations

import math
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from repertory.metrics import Record
from repertory.parameters import flatten, snapshot_size, travelling_tensors, unflatten
from repertory.runtimes.base import Order, Push, Role, RoleFailed, SharedModelWorker
from repertory.runtimes.hogwild import NoLock, SharedParameters
from repertory.runtimes.last_words import state_left
from repertory.runtimes.shared_memory import Channel
from repertory.runtimes.stops import GRACE_SECONDS, LATE, NOT_BEGUN, Stop
from repertory.seeds import global_generators, restore_global_generators
from repertory.trajectories import Trajectory, TrajectorySpec, stack


class _Aborted(BaseException):
    """Unwinds a role's thread after another's failure; no `Exception`, so that none swallows it."""


@dataclass
class _Thread:
    """One role: its thread, and whether and why it waits."""

    name: str
    body: Callable[[], Any]
    threads: int
    ready: Callable[[], bool] = lambda: True
    waiting_for: str = "its first turn"
    ended: bool = False
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class _Baton:
    """Held by the one role that runs."""

    def __init__(self) -> None:
        self.roles: list[_Thread] = []
        self.holder: _Thread | None = None
        self.failure: RoleFailed | None = None
        self.finished = threading.Event()

    def pass_on(self, waiting_for: str, ready: Callable[[], bool] = lambda: True) -> None:
        """Let others run; return once this role is next and `ready()` holds."""
        me = self.holder
        assert me is not None, "verbs belong to roles: none runs now"
        me.ready, me.waiting_for = ready, waiting_for
        self._hand_over(me)
        self._await_turn(me)

    def begin(self) -> None:
        """Give the baton to the first role."""
        if self.roles:
            self._give(self.roles[0])
        else:
            self.finished.set()

    def run(self, me: _Thread, results: dict[str, Any]) -> None:
        """A role's whole life, on its own thread."""
        try:
            self._await_turn(me)
            results[me.name] = me.body()
        except _Aborted:
            pass
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            failure = RoleFailed(me.name, reason, traceback.format_exc())
            failure.__cause__ = error
            self.failure = self.failure or failure
        me.ended = True
        self._hand_over(me)

    def _await_turn(self, me: _Thread) -> None:
        me.turn.acquire()
        if self.failure is not None:
            raise _Aborted
        if torch.get_num_threads() != me.threads:
            torch.set_num_threads(me.threads)

    def _hand_over(self, me: _Thread) -> None:
        """Give the baton to the next role, from `me` on, that can proceed."""
        after = self.roles.index(me) + 1
        circle = [role for role in self.roles[after:] + self.roles[:after] if not role.ended]
        if not circle:
            self.finished.set()
            return
        if self.failure is None:
            for role in circle:
                if role.ready():
                    self._give(role)
                    return
            waits = "; ".join(f"{role.name} waits for {role.waiting_for}" for role in circle)
            self.failure = RoleFailed(circle[0].name, f"no role can proceed: {waits}")
        self._give(circle[0])

    def _give(self, role: _Thread) -> None:
        self.holder = role
        role.turn.release()


class _Queue:
    """Both ends of a queue at once; `writer` binds the actor's index."""

    def __init__(self, baton: _Baton, num_actors: int, order: Order, capacity: int) -> None:
        self._baton = baton
        self._order = order
        self._capacity = capacity
        self._lanes: list[deque[tuple[int, Trajectory]]] = [deque() for _ in range(num_actors)]
        self._arrivals = 0
        self._closed = False

    def writer(self, actor: int) -> _QueueWriter:
        return _QueueWriter(self, actor)

    def reader(self, *, prefetch: bool = False) -> _Queue:
        return self  # one role at a time: there is no while

    def put(self, actor: int, trajectory: Trajectory) -> bool:
        lane = self._lanes[actor]
        self._baton.pass_on("a free slot", lambda: self._closed or len(lane) < self._capacity)
        if self._closed:
            return False
        lane.append((self._arrivals, trajectory.clone()))
        self._arrivals += 1
        return True

    def take(self, count: int) -> Trajectory | None:
        if self._order == "actor" and count != len(self._lanes):
            raise ValueError(f"order 'actor' takes one from each of {len(self._lanes)} actors")
        self._baton.pass_on("trajectories", lambda: self._closed or self._available() >= count)
        if self._closed:
            return None
        if self._order == "actor":
            return stack([lane.popleft()[1] for lane in self._lanes])
        return stack([self._oldest() for _ in range(count)])

    def close(self) -> None:
        self._closed = True

    def _available(self) -> int:
        if self._order == "actor":
            return len(self._lanes) if all(self._lanes) else 0
        return sum(len(lane) for lane in self._lanes)

    def _oldest(self) -> Trajectory:
        lane = min((lane for lane in self._lanes if lane), key=lambda lane: lane[0][0])
        return lane.popleft()[1]


class _QueueWriter:
    def __init__(self, queue: _Queue, actor: int) -> None:
        self._queue = queue
        self._actor = actor

    def put(self, trajectory: Trajectory) -> bool:
        return self._queue.put(self._actor, trajectory)


class _Store:
    """Both ends of a parameter store at once."""

    def __init__(self, baton: _Baton, model: nn.Module) -> None:
        self._baton = baton
        first = travelling_tensors(model)[0]
        self._buffers = [torch.empty(snapshot_size(model), dtype=first.dtype) for _ in range(2)]
        self._newest = -1
        self._closed = False

    def writer(self) -> _Store:
        return self

    def reader(self, actor: int) -> _Store:
        return self

    def publish(self, model: nn.Module, version: int) -> None:
        flatten(travelling_tensors(model), self._buffers[version % 2])
        self._newest = version
        self._baton.pass_on("its next turn")

    def refresh(self, model: nn.Module, version: int | None = None) -> int | None:
        wanted = 0 if version is None else version
        self._baton.pass_on(f"version {wanted}", lambda: self._closed or self._newest >= wanted)
        if self._closed:
            return None
        found = self._newest if version is None else version
        if found < self._newest - 1:
            raise ValueError(f"version {found} is gone; the newest is {self._newest}")
        unflatten(self._buffers[found % 2], travelling_tensors(model))
        return found

    def close(self) -> None:
        self._closed = True


class _Group:
    """A learner group: the last one to arrive adds up, in rank order, for all."""

    def __init__(self, baton: _Baton, stopping: Callable[[], bool], num_learners: int) -> None:
        self._baton = baton
        self._stopping = stopping
        self._num_learners = num_learners
        self._round = 0
        self._parts: dict[int, tuple[Tensor, tuple[int, ...]]] = {}
        self._total: tuple[Tensor, tuple[int, ...]] | None = None
        self._left = False

    def leave(self) -> None:
        self._left = True

    def member(self, rank: int) -> _Member:
        return _Member(self, rank)

    def sum(self, rank: int, vector: Tensor, counts: tuple[int, ...]) -> tuple[int, ...] | None:
        if self._left:
            return None
        own_round = self._round
        self._parts[rank] = (vector.clone(), counts)
        if len(self._parts) == self._num_learners:
            self._total = None if self._stopping() else self._add_up()
            self._parts.clear()
            self._round += 1
        self._baton.pass_on("the other learners", lambda: self._round > own_round or self._left)
        if self._total is None or self._round == own_round:
            return None
        vector.copy_(self._total[0])
        return self._total[1]

    def _add_up(self) -> tuple[Tensor, tuple[int, ...]]:
        total, counts = self._parts[0]
        for rank in range(1, self._num_learners):
            part, more = self._parts[rank]
            total += part.to(total.device)
            counts = tuple(a + b for a, b in zip(counts, more, strict=True))
        return total, counts


class _Member:
    def __init__(self, group: _Group, rank: int) -> None:
        self._group = group
        self._rank = rank

    def sum(self, vector: Tensor, *counts: int) -> tuple[int, ...] | None:
        return self._group.sum(self._rank, vector, counts)

    def leave(self) -> None:
        self._group.leave()


class _SharedModel:
    """A shared model: every worker has one turn between two pushes of its own.

    So a gradient is as old as it would be if all workers were equally fast: one update of each
    other worker.
    """

    def __init__(self, runtime: InlineRuntime, parameters: SharedParameters) -> None:
        self._runtime = runtime
        self._parameters = parameters

    def worker(self, index: int) -> _SharedModelWorker:
        end = self._parameters.worker(index)
        end.attach(_Presence(self._runtime))
        return _SharedModelWorker(self._runtime._baton, end)


class _SharedModelWorker:
    def __init__(self, baton: _Baton, end: SharedModelWorker) -> None:
        self._baton = baton
        self._end = end
        self.pull = end.pull
        self.state_dict = end.state_dict

    def push(
        self,
        gradient: Tensor,
        env_steps: int,
        *,
        learning_rate: float,
        max_lag: int | None = None,
    ) -> Push | None:
        self._baton.pass_on("its next turn")
        return self._end.push(gradient, env_steps, learning_rate=learning_rate, max_lag=max_lag)


class _Presence:
    """What ends that are made for processes ask of their role; here nobody dies alone or waits."""

    aborted = False

    def __init__(self, runtime: InlineRuntime) -> None:
        self._runtime = runtime

    @property
    def stopping(self) -> bool:
        return self._runtime._stop.asked

    def beat(self) -> None:
        """Nobody counts them."""

    def wait_for(self, channels: list[Channel]) -> list[Channel]:
        return []


class _Context:
    """A role's line to the parent: a direct call."""

    def __init__(self, runtime: InlineRuntime, name: str) -> None:
        self.name = name
        self.starts = 0
        self._runtime = runtime
        self._states_given = 0

    def report(self, record: Record) -> None:
        self._runtime._report(self.name, record)

    def offer_state(self, collect: Callable[[], Mapping[str, Any]]) -> None:
        self._runtime._last_states[self.name] = collect
        if self._states_given < self._runtime._states_asked:
            self._states_given = self._runtime._states_asked
            self.report({"kind": "state", "state": collect()})


class InlineRuntime:
    """The `Runtime` of one process; see the module."""

    def __init__(self) -> None:
        """Nothing runs before `supervise`."""
        self._baton = _Baton()
        self.results: dict[str, Any] = {}
        self._stop = Stop(math.inf)  # without a hurry, roles have the time that they take
        self._states_asked = 0
        self._last_states: dict[str, Callable[[], Mapping[str, Any]]] = {}
        self._deliver: Callable[[str, Record], None] = lambda name, record: None
        self._parents_error: Exception | None = None

    def trajectory_queue(
        self, spec: TrajectorySpec, num_actors: int, *, order: Order, capacity: int = 2
    ) -> _Queue:
        """See `Runtime`."""
        return _Queue(self._baton, num_actors, order, capacity)

    def parameter_store(self, model: nn.Module, num_readers: int) -> _Store:
        """See `Runtime`."""
        return _Store(self._baton, model)

    def learner_group(self, model: nn.Module, num_learners: int) -> _Group:
        """See `Runtime`."""
        return _Group(self._baton, lambda: self._stop.asked, num_learners)

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
    ) -> _SharedModel:
        """See `Runtime`. One role runs at a time, so there is nothing to lock."""
        return _SharedModel(
            self,
            SharedParameters(
                model,
                optimizer,
                num_workers,
                NoLock(),
                shared_statistics=shared_statistics,
                counted=(updates, env_steps),
                place=lambda tensor: tensor,
            ),
        )

    def start(
        self,
        name: str,
        role: Role,
        *arguments: Any,
        threads: int = 1,
        replaceable: bool = False,
    ) -> None:
        """See `Runtime`. The role begins when `supervise` is called."""
        context = _Context(self, name)
        self._baton.roles.append(_Thread(name, lambda: role(context, *arguments), threads))

    def supervise(self, on_record: Callable[[str, Record], None]) -> dict[str, Any]:
        """See `Runtime`. `on_record` is called on the reporting role's thread, in its turn."""
        self._deliver = on_record
        threads_before = torch.get_num_threads()
        generators_before = global_generators()
        pool = [
            threading.Thread(
                target=self._baton.run, args=(role, self.results), name=role.name, daemon=True
            )
            for role in self._baton.roles
        ]
        for thread in pool:
            thread.start()
        self._baton.begin()
        late = None
        while late is None and not self._baton.finished.wait(0.2):  # short: signals are handled
            if self._stop.over(GRACE_SECONDS / 2):
                late = self._leave_behind()
        for thread in pool if late is None else []:
            thread.join()
        torch.set_num_threads(threads_before)
        restore_global_generators(generators_before)
        if self._baton.failure is not None:
            for name, collect in self._last_states.items():
                if name not in self.results:
                    self.results[name] = state_left(collect)
        if self._parents_error is not None:
            raise self._parents_error
        have_a_state = any(result is not None for result in self.results.values())
        if self._baton.failure is not None and not (late and have_a_state):
            self._baton.failure.results = self.results
            raise self._baton.failure
        return self.results

    def _leave_behind(self) -> _Thread | None:
        """The role that runs and does not end, if there is one.

        A thread cannot be ended from outside. It and those that wait for it go their ways once it
        comes to a verb, and hold up nobody.
        """
        late = self._baton.holder
        if late is not None:
            begun = late.name in self._last_states
            self._baton.failure = RoleFailed(late.name, LATE if begun else NOT_BEGUN)
            self._deliver = lambda name, record: None
        return late

    def collect_state(self) -> None:
        """See `Runtime`."""
        self._states_asked += 1

    def _report(self, name: str, record: Record) -> None:
        """Deliver a record; what goes wrong there is the parent's error, not the role's."""
        try:
            self._deliver(name, record)
        except Exception as error:
            self._parents_error = error
            self._baton.failure = RoleFailed(name, "the parent failed")
            raise _Aborted from error

    def stop(self, *, hurry: bool = False) -> None:
        """See `Runtime`."""
        self._stop.ask(hurry)

    def close(self) -> None:
        """See `Runtime`. Threads end with `supervise`; there is nothing else."""
