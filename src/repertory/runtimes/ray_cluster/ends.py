"""The ends of shared things that a role on a cluster holds. Nothing here needs Ray.

An end knows the key of what it belongs to, and asks its seat. Data crosses the socket as bytes that
were laid out here, so that a seat never looks into them: a trajectory with the frames of a stack
kept once, parameters and gradients as one flat vector.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from repertory.parameters import (
    distance,
    flatten,
    move_towards,
    snapshot_size,
    travelling_tensors,
    unflatten,
)
from repertory.runtimes.base import Order, Pull, Push
from repertory.trajectories import Trajectory, TrajectorySlots, TrajectorySpec, split


class Line(Protocol):
    """What an end needs of its role's socket; see `lines.Line`."""

    stopping: bool

    def ask(
        self, verb: str, key: str, *arguments: Any, buffer: Tensor | None = None, times: int = 1
    ) -> Any:
        """Ask the seat for something, and wait."""
        ...

    def beat(self) -> None:
        """Give a sign of life."""
        ...


class End:
    """One end of something shared; it learns which role holds it when the role begins."""

    _line: Line | None = None

    def __init__(self, key: str) -> None:
        """Belong to the shared thing with that key."""
        self.key = key

    def attach_line(self, line: Line) -> None:
        """Say which role this is in."""
        self._line = line

    @property
    def line(self) -> Line:
        """The role's socket."""
        assert self._line is not None, "verbs belong to roles: this is the parent process"
        return self._line


class QueueWriter(End):
    """An actor's end of a queue; see `TrajectoryWriter`.

    A trajectory is under way until the learner takes it, so `capacity` bounds what waits at the
    learner and what is still between machines together.
    """

    def __init__(self, key: str, lane: int, spec: TrajectorySpec, capacity: int) -> None:
        """Write to a lane of a queue that has one for each actor."""
        super().__init__(key)
        self._lane = lane
        self._spec = spec
        self._capacity = capacity
        self._slots: TrajectorySlots | None = None

    def put(self, trajectory: Trajectory) -> bool:
        """See `TrajectoryWriter`."""
        if not self._take_slot():
            return False
        if self._slots is None:
            self._slots = TrajectorySlots(self._spec, 1, torch.zeros)
        self._slots.write(0, trajectory)
        return self.line.ask("put", self.key, self._lane, buffer=self._slots.memory(0)) is not None

    def _take_slot(self) -> bool:
        """Wait until one more may be under way; False once the queue is closed."""
        answer = self.line.ask("slot", self.key, self._lane, self._capacity)
        return answer is not None and bool(answer.value)


class QueueReader(End):
    """A learner's end of a queue; see `TrajectoryReader`."""

    def __init__(self, key: str, num_lanes: int, spec: TrajectorySpec, order: Order) -> None:
        """Read from all lanes."""
        super().__init__(key)
        self.num_lanes = num_lanes
        self.order = order
        self._slots_spec = spec
        self._slots: TrajectorySlots | None = None
        self._batch: Trajectory | None = None

    def take(self, count: int) -> Trajectory | None:
        """See `TrajectoryReader`."""
        if self.order == "actor" and count != self.num_lanes:
            raise ValueError(f"order 'actor' takes one from each of {self.num_lanes} actors")
        answer = self.line.ask("take", self.key, count, times=count)
        if answer is None or answer.value is None:
            return None
        columns = self._slots_spec.num_columns
        if self._slots is None:
            self._slots = TrajectorySlots(self._slots_spec, 1, torch.zeros)
        if self._batch is None or self._batch.num_columns != count * columns:
            self._batch = self._slots_spec.with_columns(count * columns).allocate()
        places = split(self._batch, [columns] * count)
        for memory, place in zip(answer.buffers, places, strict=True):
            self._slots.memory(0).copy_(memory)
            self._slots.read(0, place)
        return self._batch

    def close(self) -> None:
        """See `TrajectoryReader`."""
        self.line.ask("close", self.key)


class StoreWriter(End):
    """The publishing end of a parameter store; see `ParameterWriter`."""

    _flat: Tensor | None = None

    def publish(self, model: nn.Module, version: int) -> None:
        """See `ParameterWriter`."""
        if self._flat is None:
            self._flat = flat_for(model)
        flatten(travelling_tensors(model), self._flat)
        self.line.ask("publish", self.key, version, buffer=self._flat)

    def close(self) -> None:
        """See `ParameterWriter`."""
        self.line.ask("close", self.key)


class StoreReader(End):
    """A reading end of a parameter store; keeps the version it has, and fetches only others."""

    _flat: Tensor | None = None
    _has = -1

    def refresh(self, model: nn.Module, version: int | None = None) -> int | None:
        """See `ParameterReader`."""
        answer = self.line.ask("refresh", self.key, version, self._has)
        if answer is None or answer.value is None:
            return None
        found: int = answer.value
        if self._flat is None:
            self._flat = flat_for(model)
        if answer.buffers:
            self._flat.view(torch.uint8).copy_(answer.buffers[0])
            self._has = found
        unflatten(self._flat, travelling_tensors(model))
        return found


class Member(End):
    """One learner's end of a group; see `GroupMember`.

    Everyone gets everyone's vector and adds them up in order of rank, so all end with the same bits
    as one process would.
    """

    def __init__(self, key: str, rank: int, num_learners: int) -> None:
        """The end of the learner with that rank."""
        super().__init__(key)
        self._rank = rank
        self._num_learners = num_learners

    def sum(self, vector: Tensor, *counts: int) -> tuple[int, ...] | None:
        """See `GroupMember`."""
        self.line.beat()
        stop = self.line.stopping  # only the first learner's word counts, so that all agree
        if self._num_learners == 1:
            return None if stop else counts
        own = vector.detach().cpu().contiguous()
        answer = self.line.ask("sum", self.key, self._rank, stop, counts, buffer=own)
        if answer is None or answer.value is None:
            return None
        parts = [memory.view(own.dtype).view(own.shape) for memory in answer.buffers]
        parts.insert(self._rank, own)
        total = torch.add(parts[0], parts[1])
        for part in parts[2:]:
            total += part
        vector.copy_(total)
        return tuple(answer.value)

    def leave(self) -> None:
        """See `GroupMember`."""
        if self._num_learners > 1:
            self.line.ask("leave", self.key)


class ModelWorker(End):
    """A worker's end of a shared model; see `SharedModelWorker`."""

    def __init__(self, key: str, index: int) -> None:
        """The end of the worker with that index."""
        super().__init__(key)
        self._index = index

    def pull(self, model: nn.Module, tau: float = 1.0) -> Pull | None:
        """See `SharedModelWorker`."""
        answer = None if self.line.stopping else self.line.ask("pull", self.key, self._index)
        if answer is None:
            return None
        tensors = travelling_tensors(model)
        flat = answer.buffers[0].view(tensors[0].dtype)
        pieces = flat.split([tensor.numel() for tensor in tensors])
        shared = [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
        move_towards(tensors, shared, tau)
        left = 0.0 if tau == 1.0 else distance(tensors, shared)
        updates, env_steps = answer.value
        return Pull(updates, env_steps, left)

    def push(
        self,
        gradient: Tensor,
        env_steps: int,
        *,
        learning_rate: float,
        max_lag: int | None = None,
    ) -> Push | None:
        """See `SharedModelWorker`."""
        settings = (self._index, env_steps, learning_rate, max_lag)
        own = gradient.detach().cpu().contiguous()
        answer = self.line.ask("push", self.key, *settings, buffer=own)
        return None if answer is None or answer.value is None else Push(*answer.value)

    def state_dict(self) -> dict[str, Any]:
        """See `SharedModelWorker`.

        Raises:
            RuntimeError: The run is over, and with it whoever could tell.
        """
        answer = self.line.ask("state", self.key, self._index)
        if answer is None:
            raise RuntimeError("the run is over, and the shared parameters with it")
        state: dict[str, Any] = pickle.loads(answer.buffers[0].numpy().tobytes())
        return state


def flat_for(model: nn.Module) -> Tensor:
    """Room on the CPU for a snapshot of `model`."""
    return torch.empty(snapshot_size(model), dtype=travelling_tensors(model)[0].dtype)


def ends_in(arguments: Sequence[Any]) -> list[End]:
    """The ends among a role's arguments."""
    return [argument for argument in arguments if isinstance(argument, End)]
