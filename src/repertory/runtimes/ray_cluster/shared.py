"""What a run's roles share, as an algorithm gets it from the runtime: each hands out its ends.

Nothing is made here: that is done where a role begins (`seats`), or by the runtime. Nothing here
needs Ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from repertory.runtimes.base import Order
from repertory.runtimes.ray_cluster.ends import (
    Member,
    ModelWorker,
    QueueReader,
    QueueWriter,
    StoreReader,
    StoreWriter,
)
from repertory.trajectories import TrajectorySpec, slot_bytes


class Queue:
    """See `TrajectoryQueue`."""

    def __init__(
        self, key: str, spec: TrajectorySpec, num_actors: int, order: Order, capacity: int
    ) -> None:
        self._key = key
        self._spec = spec
        self._num_actors = num_actors
        self._order: Order = order
        self._capacity = capacity

    @property
    def nbytes(self) -> int:
        """Bytes that unrolls under way take at most."""
        return self._num_actors * self._capacity * slot_bytes(self._spec)

    def writer(self, actor: int) -> QueueWriter:
        """An actor's end."""
        return QueueWriter(self._key, actor, self._spec, self._capacity)

    def reader(self, *, prefetch: bool = False) -> QueueReader:
        """The learner's end."""
        # The seat has fetched what came while the learner learned, whether asked to or not.
        return QueueReader(self._key, self._num_actors, self._spec, self._order)


class Store:
    """See `ParameterStore`."""

    def __init__(self, key: str) -> None:
        self._key = key

    def writer(self) -> StoreWriter:
        """The publishing end."""
        return StoreWriter(self._key)

    def reader(self, actor: int) -> StoreReader:
        """An actor's end."""
        return StoreReader(self._key)


class Group:
    """See `LearnerGroup`."""

    def __init__(self, key: str, num_learners: int) -> None:
        self._key = key
        self._num_learners = num_learners

    def member(self, rank: int) -> Member:
        """A learner's end."""
        return Member(self._key, rank, self._num_learners)


@dataclass
class Model:
    """See `SharedModel`.

    Attributes:
        key: Of the shared thing.
        model: Where its parameters come from, and go in the end.
        settings: Of the actor that keeps it.
        server: That actor, from `supervise` on.
        coming: What it is asked for next, which tells whether it lives.
    """

    key: str
    model: nn.Module
    settings: tuple[Any, ...]
    server: Any = None
    coming: Any = None

    def worker(self, index: int) -> ModelWorker:
        """A worker's end."""
        return ModelWorker(self.key, index)
