"""What an algorithm knows of where it runs: five protocols, and nothing else.

Roles (an actor, a learner) are plain functions. A runtime starts them, and hands them one end of
each thing they share. An algorithm calls these verbs in its own order; that order is the algorithm.
One contract suite (`tests/contracts`) runs over every runtime.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from repertory.metrics import Record
from repertory.trajectories import Trajectory, TrajectorySpec

Order = Literal["arrival", "actor"]
"""How a queue takes: whatever came first, or one from each actor, by index."""


class RoleFailed(RuntimeError):
    """A role raised, was killed or hung; the message says which, and how, with its traceback."""

    def __init__(self, role: str, reason: str, traceback: str = "") -> None:
        """Keep the role's name, a one-line reason and the original traceback's text."""
        if os.strerror(errno.EMFILE) in reason:
            reason += "; raise the limit on open files (ulimit -n), or start fewer roles"
        super().__init__(f"{role} failed: {reason}")
        self.role = role
        self.reason = reason
        self.traceback = traceback
        if traceback:
            self.add_note(traceback)  # Python shows it below the message
        self.results: dict[str, Any] = {}
        """What other roles returned all the same, by name."""


def is_loss(error: BaseException) -> bool:
    """Whether a role that raised this was lost, as one that is killed, and may be replaced."""
    return bool(getattr(error, "loses_role", False))


class TrajectoryWriter(Protocol):
    """An actor's end of a trajectory queue."""

    def put(self, trajectory: Trajectory) -> bool:
        """Copy a trajectory in, waiting for a free slot; False once the queue is closed."""
        ...


class TrajectoryReader(Protocol):
    """A learner's end of a trajectory queue."""

    def take(self, count: int) -> Trajectory | None:
        """Wait for `count` trajectories and return them side by side; None once it is closed.

        With order `actor`, `count` is the number of actors and columns stand by actor index.
        The batch's memory is overwritten by the next `take`.
        """
        ...

    def close(self) -> None:
        """End the queue: every `put` returns False from now on."""
        ...


class TrajectoryQueue(Protocol):
    """Bounded way of trajectories from several actors to one learner; nothing is dropped."""

    def writer(self, actor: int) -> TrajectoryWriter:
        """The end of the actor with that index (counted within this queue)."""
        ...

    def reader(self, *, prefetch: bool = False) -> TrajectoryReader:
        """The learner's end.

        Args:
            prefetch: While the learner learns from a batch, copy the next one out of the queue, if
                all of it has come. So one batch more may wait than the queue has slots for, and
                every `take` is of the same count. A runtime in which nothing runs at once does not.
        """
        ...


class ParameterWriter(Protocol):
    """The publishing end of a parameter store."""

    def publish(self, model: nn.Module, version: int) -> None:
        """Make a whole version visible. Versions never fall; after an update they grow by one."""
        ...

    def close(self) -> None:
        """End the store: every `refresh` returns None from now on."""
        ...


class ParameterReader(Protocol):
    """A reading end of a parameter store."""

    def refresh(self, model: nn.Module, version: int | None = None) -> int | None:
        """Load a version into `model` and return its number; None means stop.

        Args:
            model: Overwritten, with one whole version, never a mixture.
            version: None for the newest one; else exactly that one, waiting for it.
        """
        ...


class ParameterStore(Protocol):
    """Versions of the parameters, from one learner to many actors."""

    def writer(self) -> ParameterWriter:
        """The learner's end."""
        ...

    def reader(self, actor: int) -> ParameterReader:
        """The end of the actor with that index."""
        ...


class GroupMember(Protocol):
    """One learner's end of a learner group."""

    def sum(self, vector: Tensor, *counts: int) -> tuple[int, ...] | None:
        """Add up a flat vector over all learners, in rank order, in place.

        Every learner ends with the same bits. The sum is of at most the group's size in numbers.

        Args:
            vector: [n]; overwritten with the sum over learners.
            counts: Whole numbers to add up along with it.

        Returns:
            The summed counts, or None when the run was asked to stop or a learner has left: then
            no learner has summed, and all of them learn so at the same call.
        """
        ...

    def leave(self) -> None:
        """Sum no more; the others' next `sum` returns None. Harmless when called twice."""
        ...


class LearnerGroup(Protocol):
    """Learners that sum their gradients and so stay equal."""

    def member(self, rank: int) -> GroupMember:
        """The end of the learner with that rank."""
        ...


class Pull(NamedTuple):
    """What a worker learned along with parameters.

    Attributes:
        version: Updates that the shared parameters had seen.
        env_steps: Env steps that all workers together had learned from.
        distance: Norm of what still lies between the worker's parameters and the shared ones.
    """

    version: int
    env_steps: int
    distance: float = 0.0


class Push(NamedTuple):
    """What became of a gradient.

    Attributes:
        applied: Whether the shared parameters moved; False if the gradient was too old.
        lag: Updates by others between the worker's last pull and this push.
        env_steps: Env steps that all workers together have learned from now.
    """

    applied: bool
    lag: int
    env_steps: int


class SharedModelWorker(Protocol):
    """A worker's end of a shared model."""

    def pull(self, model: nn.Module, tau: float = 1.0) -> Pull | None:
        """Move `model` towards the shared parameters; None means stop.

        Args:
            model: The worker's own copy; becomes `(1 - tau) * own + tau * shared`.
            tau: 1 copies.
        """
        ...

    def push(
        self,
        gradient: Tensor,
        env_steps: int,
        *,
        learning_rate: float,
        max_lag: int | None = None,
    ) -> Push | None:
        """Step the shared optimiser with one worker's gradient; None means stop.

        Args:
            gradient: [parameters]; flat, private to the worker, on any device. Left as it was.
            env_steps: How many the gradient was made of.
            learning_rate: Of this step alone.
            max_lag: A gradient that is older is not applied.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Shared parameters, optimiser state and counters, as a learner's state."""
        ...


class SharedModel(Protocol):
    """Parameters and optimiser statistics that many workers step, each with its own gradients.

    A push is never applied twice, and exactly once under `lock`. Without, pushes may overlap, as
    Mnih et al. (2016), section 4, and Recht et al. (2011) have it; a number that two of them write
    at the same moment keeps one of the two steps.
    """

    def worker(self, index: int) -> SharedModelWorker:
        """The end of the worker with that index."""
        ...


class RoleContext(Protocol):
    """A role's line to the parent; the first argument of every role.

    Attributes:
        name: Of the role.
        starts: How often this role was begun before, because its process had died.
    """

    name: str
    starts: int

    def report(self, record: Record) -> None:
        """Send a record to the parent, in order."""
        ...

    def offer_state(self, collect: Callable[[], Mapping[str, Any]]) -> None:
        """Say that this is a safe point; `collect` is called only where the parent has asked.

        If the role fails later, it is called once more, and stands for the role's result.
        """
        ...


Role = Callable[..., Any]
"""`role(context, *arguments)`; what it returns reaches the parent as the role's result."""


class Runtime(Protocol):
    """Starts roles, carries what they share, and watches over them.

    Attributes:
        results: What roles have returned so far, or could still give when they failed, by name.
    """

    results: dict[str, Any]

    def trajectory_queue(
        self, spec: TrajectorySpec, num_actors: int, *, order: Order, capacity: int = 2
    ) -> TrajectoryQueue:
        """A queue with `capacity` slots for each of `num_actors` actors."""
        ...

    def parameter_store(self, model: nn.Module, num_readers: int) -> ParameterStore:
        """A store for versions of `model`'s parameters; nothing is published in it yet."""
        ...

    def learner_group(self, model: nn.Module, num_learners: int) -> LearnerGroup:
        """A group of learners that sums vectors as large as `model`'s gradient, or smaller."""
        ...

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
    ) -> SharedModel:
        """Parameters that `num_workers` workers pull and push.

        Args:
            model: The initial parameters; belongs to the runtime from now on.
            optimizer: Of `model`'s parameters.
            num_workers: How many ends there will be.
            lock: One push or pull at a time, so that none is lost or mixed.
            shared_statistics: One optimiser state for all, or one for each worker.
            updates: How many the parameters have seen, where a run goes on.
            env_steps: How many they have learned from, where a run goes on.
        """
        ...

    def start(
        self,
        name: str,
        role: Role,
        *arguments: Any,
        threads: int = 1,
        replaceable: bool = False,
    ) -> None:
        """Have a role run, once `supervise` is called or before.

        Args:
            name: Unique in the run.
            role: Called with a context and the arguments.
            arguments: Plain values, and ends of what roles share.
            threads: Of torch, in this role.
            replaceable: Whether, if it is killed or hangs, another one may begin in its place. What
                a role raises ends the run in any case.
        """
        ...

    def supervise(self, on_record: Callable[[str, Record], None]) -> dict[str, Any]:
        """Stay until every role has ended; return their results by name.

        Args:
            on_record: Called in this process with a role's name and each record it reports.

        Raises:
            RoleFailed: The first failure of a role. By then no role is left.
        """
        ...

    def collect_state(self) -> None:
        """Ask roles for their state at their next safe point; it arrives as a `state` record."""
        ...

    def stop(self, *, hurry: bool = False) -> None:
        """Ask the roles to end after the update in progress. Safe in a signal handler.

        Args:
            hurry: Somebody waits: end within ten seconds, by force if need be. Otherwise roles have
                the time that they have for any unroll or update.
        """
        ...

    def close(self) -> None:
        """End what still runs and release what was shared. Harmless when called twice."""
        ...
