"""What an algorithm knows of where it runs: five protocols, and nothing else.

Roles (an actor, a learner) are plain functions. A runtime starts them, and hands them one end of
each thing they share. An algorithm calls these verbs in its own order; that order is the algorithm.
One contract suite (`tests/contracts`) runs over every runtime.

The fifth protocol, the shared model of A3C, comes with A3C.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from repertory.metrics import Record
from repertory.trajectories import Trajectory, TrajectorySpec

Order = Literal["arrival", "actor"]
"""How a queue takes: whatever came first, or one from each actor, by index."""


class RoleFailed(RuntimeError):
    """A role raised, was killed or hung; the message says which, and how, with its traceback."""

    def __init__(self, role: str, reason: str, traceback: str = "") -> None:
        """Keep the role's name, a one-line reason and the original traceback's text."""
        super().__init__(f"{role} failed: {reason}")
        self.role = role
        self.reason = reason
        self.traceback = traceback
        self.results: dict[str, Any] = {}
        """What other roles returned all the same, by name."""


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

    def reader(self) -> TrajectoryReader:
        """The learner's end."""
        ...


class ParameterWriter(Protocol):
    """The publishing end of a parameter store."""

    def publish(self, model: nn.Module, version: int) -> None:
        """Make a whole version visible. Versions grow by one from call to call."""
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
            The summed counts, or None when the run was asked to stop: then no learner has summed,
            and all of them learn so at the same call.
        """
        ...


class LearnerGroup(Protocol):
    """Learners that sum their gradients and so stay equal."""

    def member(self, rank: int) -> GroupMember:
        """The end of the learner with that rank."""
        ...


class RoleContext(Protocol):
    """A role's line to the parent; the first argument of every role."""

    name: str

    def report(self, record: Record) -> None:
        """Send a record to the parent, in order."""
        ...

    def offer_state(self, collect: Callable[[], Mapping[str, Any]]) -> None:
        """Say that this is a safe point; `collect` is called only where the parent has asked."""
        ...


Role = Callable[..., Any]
"""`role(context, *arguments)`; what it returns reaches the parent as the role's result."""


class Runtime(Protocol):
    """Starts roles, carries what they share, and watches over them."""

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

    def start(self, name: str, role: Role, *arguments: Any, threads: int = 1) -> None:
        """Have a role run, with that many torch threads, once `supervise` is called or before."""
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

    def stop(self) -> None:
        """Ask the roles to end after the update in progress. Safe in a signal handler."""
        ...

    def close(self) -> None:
        """End what still runs and release what was shared. Harmless when called twice."""
        ...
