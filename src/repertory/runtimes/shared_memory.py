"""What processes on one machine share: slabs of memory, one-way channels, and what is made of them.

Data stays where it is: a slab is one shared allocation, mapped by every process that holds it and
unlinked from the file system from the start, so that no kill leaves a file behind. What travels is
a few whole numbers through a pipe with one writer and one reader. No lock is shared by two
processes: one killed while holding it would block the others for ever.

What is here: the queue, the store and the group of the `processes` runtime, whose ends travel to a
role's process. What is not here: starting, watching and ending those processes (`processes`).
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Protocol

import torch
from torch import Tensor, nn

from repertory.parameters import flatten, snapshot_size, travelling_tensors, unflatten
from repertory.runtimes.base import Order
from repertory.trajectories import Trajectory, TrajectorySlots, TrajectorySpec, split

_SMALLEST_ROOM = 64  # bytes; for the few numbers that learners add up beside gradients
_GO_ON, _STOP, _LEFT = range(3)  # what a learner says beside its counts
_MAX_COUNTS = 4
_CLOSED = -1


class Channel:
    """A one-way pipe for whole numbers: one process sends, one receives.

    A message is far below the size that pipes write in one piece, so a sender that is killed
    leaves either a whole message or none.
    """

    def __init__(self, width: int) -> None:
        """Make a channel whose messages are `width` whole numbers each."""
        self._format = f"{width}q"
        self.receiving: Connection
        self._sending: Connection
        self.receiving, self._sending = Pipe(duplex=False)
        os.set_blocking(self._sending.fileno(), False)

    def send(self, *numbers: int) -> None:
        """Send a message.

        Raises:
            BlockingIOError: Tens of thousands of bytes lie unread; nothing was sent.
        """
        os.write(self._sending.fileno(), struct.pack(self._format, *numbers))

    def receive(self) -> tuple[int, ...]:
        """Read one message that is known to be there."""
        size = struct.calcsize(self._format)
        return struct.unpack(self._format, os.read(self.receiving.fileno(), size))

    def pending(self) -> bool:
        """Whether a message lies unread."""
        return bool(arrived_on([self]))

    def close(self) -> None:
        """Close this process's ends."""
        self.receiving.close()
        self._sending.close()


def arrived_on(channels: list[Channel]) -> list[Channel]:
    """Those with a message that lies unread."""
    ready = wait([channel.receiving for channel in channels], 0)
    return [channel for channel in channels if channel.receiving in ready]


def shared_zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """A zeroed tensor in shared memory."""
    shared: Tensor = torch.zeros(*shape, dtype=dtype).share_memory_()
    return shared


class Waiter(Protocol):
    """What an end needs of the role that holds it."""

    @property
    def stopping(self) -> bool:
        """The run was asked to end after the update in progress."""
        ...

    @property
    def aborted(self) -> bool:
        """The run is over: no verb waits any more."""
        ...

    def beat(self) -> None:
        """Give a sign of life."""
        ...

    def wait_for(self, channels: list[Channel]) -> list[Channel]:
        """Wait until messages lie in some of `channels`; an empty list when the run is over."""
        ...


class Endpoint:
    """One end of something shared; it learns in whose process it is when the role begins."""

    _context: Waiter | None = None

    def attach(self, context: Waiter) -> None:
        """Say who waits."""
        self._context = context

    @property
    def context(self) -> Waiter:
        """Who waits."""
        assert self._context is not None, "verbs belong to roles: this is the parent process"
        return self._context


class _QueueWriter(Endpoint):
    def __init__(
        self, slots: TrajectorySlots, free: Channel, full: Channel, held: Tensor, closed: Tensor
    ) -> None:
        self._slots = slots
        self._free = free
        self._full = full
        self._held = held  # [slots]; those that are in this writer's hands, or its predecessor's
        self._closed = closed

    def put(self, trajectory: Trajectory) -> bool:
        slot = self._take_slot()
        if slot is None or self._closed:
            return False
        self._slots.write(slot, trajectory)
        # In this order a writer that is killed between the two loses a slot; in the other one its
        # successor would overwrite what the learner reads.
        self._held[slot] = False
        self._full.send(slot)
        return True

    def _take_slot(self) -> int | None:
        """A slot to write to; None once the queue is closed or the run is over."""
        left_behind = self._held.nonzero()
        if len(left_behind):
            return int(left_behind[0])
        if self._closed or not self.context.wait_for([self._free]):
            return None
        (slot,) = self._free.receive()
        if slot == _CLOSED:
            return None
        self._held[slot] = True
        return slot


class _QueueReader(Endpoint):
    def __init__(
        self,
        slots: TrajectorySlots,
        free: list[Channel],
        full: list[Channel],
        order: Order,
        closed: Tensor,
        *,
        prefetch: bool,
    ) -> None:
        self._slots = slots
        self._free = free
        self._full = full
        self._order = order
        self._closed = closed
        self._prefetch = prefetch
        self._arrived: deque[tuple[int, int]] = deque()  # (actor, slot), oldest first
        self._batches: deque[Trajectory] = deque()  # they take turns; the learner has the last
        self._copier: ThreadPoolExecutor | None = None
        self._coming: Future[Trajectory] | None = None

    def take(self, count: int) -> Trajectory | None:
        if self._order == "actor" and count != len(self._full):
            raise ValueError(f"order 'actor' takes one from each of {len(self._full)} actors")
        if self._closed:
            return None
        if self._coming is not None:
            batch = self._coming.result()
            if batch.num_columns != count * self._slots.spec.num_columns:
                raise ValueError("with prefetch, every take is of the same count")
        elif taken := self._collect(count):
            batch = self._copy(taken)
        else:
            return None
        self._coming = self._begin_next(count) if self._prefetch else None
        return batch

    def _begin_next(self, count: int) -> Future[Trajectory] | None:
        """Have a thread copy the next batch, if all of it has come.

        A thread that waited for it would give signs of life for a learner that hangs.
        """
        taken = self._collect(count, patient=False)
        if taken is None:
            return None
        if self._copier is None:
            self._copier = ThreadPoolExecutor(1, "prefetch")
        return self._copier.submit(self._copy, taken)

    def _copy(self, taken: list[tuple[int, int]]) -> Trajectory:
        """Copy slots into a batch, and free them."""
        columns = self._slots.spec.num_columns
        spec = self._slots.spec.with_columns(len(taken) * columns)
        batch = self._batches.popleft() if len(self._batches) > self._prefetch else None
        if batch is None or batch.num_columns != spec.num_columns:
            # A learner on a GPU has initialised it by now; from pinned memory the way is shorter.
            batch = spec.allocate(pinned=torch.cuda.is_initialized())
        self._batches.append(batch)
        for (actor, slot), place in zip(taken, split(batch, [columns] * len(taken)), strict=True):
            self._slots.read(slot, place)
            self._free[actor].send(slot)
        return batch

    def close(self) -> None:
        self._closed.fill_(True)
        for channel in self._free:
            channel.send(_CLOSED)  # wakes an actor that waits for a slot

    def _collect(self, count: int, *, patient: bool = True) -> list[tuple[int, int]] | None:
        """Which slots to take; None when the run is over, or without patience not all have come."""
        while (taken := self._choose(count)) is None:
            missing = self._full
            if self._order == "actor":
                present = {actor for actor, _ in self._arrived}
                missing = [c for actor, c in enumerate(self._full) if actor not in present]
            ready = self.context.wait_for(missing) if patient else arrived_on(missing)
            if not ready:
                return None
            for channel in ready:
                (slot,) = channel.receive()
                self._arrived.append((self._full.index(channel), slot))
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


class SharedQueue:
    """The `TrajectoryQueue` of processes: a slab of slots, and two channels an actor.

    A slot's number travels to the actor when the slot is free and to the learner when it is full.
    """

    def __init__(
        self,
        channels: list[Channel],
        spec: TrajectorySpec,
        num_actors: int,
        order: Order,
        capacity: int,
    ) -> None:
        self._slots = TrajectorySlots(spec, num_actors * capacity, shared_zeros)
        self._free = [Channel(1) for _ in range(num_actors)]
        self._full = [Channel(1) for _ in range(num_actors)]
        channels.extend([*self._free, *self._full])
        self._order = order
        self._held = shared_zeros(num_actors, num_actors * capacity, dtype=torch.bool)
        self._closed = shared_zeros(1, dtype=torch.bool)
        for actor, channel in enumerate(self._free):
            for slot in range(capacity):
                channel.send(actor * capacity + slot)

    def writer(self, actor: int) -> _QueueWriter:
        """See `TrajectoryQueue`."""
        return _QueueWriter(
            self._slots, self._free[actor], self._full[actor], self._held[actor], self._closed
        )

    def reader(self, *, prefetch: bool = False) -> _QueueReader:
        """See `TrajectoryQueue`."""
        return _QueueReader(
            self._slots, self._free, self._full, self._order, self._closed, prefetch=prefetch
        )


class _ParameterMemory:
    """Two buffers that take turns, and the sequence numbers that make a mixture visible."""

    def __init__(self, model: nn.Module) -> None:
        dtype = travelling_tensors(model)[0].dtype
        self._buffers = shared_zeros(2, snapshot_size(model), dtype=dtype)
        self._begun = shared_zeros(2, dtype=torch.int64).fill_(-1)
        self._complete = shared_zeros(1, dtype=torch.int64).fill_(-1)

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


class _ParameterWriter(Endpoint):
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


class _ParameterReader(Endpoint):
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


class SharedStore:
    """The `ParameterStore` of processes: double-buffered memory, and a channel of news a reader."""

    def __init__(self, channels: list[Channel], model: nn.Module, num_readers: int) -> None:
        """Allocate; the channels are added to `channels`, for the runtime to close."""
        self._memory = _ParameterMemory(model)
        self._news = [Channel(1) for _ in range(num_readers)]
        channels.extend(self._news)

    def writer(self) -> _ParameterWriter:
        """See `ParameterStore`."""
        return _ParameterWriter(self._memory, self._news)

    def reader(self, actor: int) -> _ParameterReader:
        """See `ParameterStore`."""
        return _ParameterReader(self._memory, self._news[actor])


class SharedMember(Endpoint):
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
        self._has_left = False

    def leave(self) -> None:
        """See `GroupMember`."""
        if not self._has_left:
            self._has_left = True
            self._tell(_LEFT)

    def sum(self, vector: Tensor, *counts: int) -> tuple[int, ...] | None:
        """See `GroupMember`."""
        self.context.beat()
        stop = self.context.stopping  # only the first learner's word counts, so that all agree
        if not self._outbox:
            return None if stop else counts
        room = self._rooms[self._round % 2].view(vector.dtype)[:, : vector.numel()]
        self._round += 1
        room[self._rank].copy_(vector)
        self._tell(_STOP if stop else _GO_ON, *counts)
        totals = list(counts)
        for rank, channel in self._inbox.items():
            if not self.context.wait_for([channel]):
                return None
            word, *theirs = channel.receive()
            if word == _LEFT:
                return None
            stop = word == _STOP if rank == 0 else stop
            totals = [a + b for a, b in zip(totals, theirs, strict=False)]
        if stop or self.context.aborted:
            return None
        total = vector if vector.device == room.device else torch.empty_like(room[0])
        torch.add(room[0], room[1], out=total)
        for part in room[2:]:
            total += part
        if total is not vector:
            vector.copy_(total)
        return tuple(totals)

    def _tell(self, word: int, *counts: int) -> None:
        for channel in self._outbox.values():
            with contextlib.suppress(BlockingIOError):  # nobody reads what a full channel holds
                channel.send(word, *counts, *[0] * (_MAX_COUNTS - len(counts)))


class SharedGroup:
    """The `LearnerGroup` of processes: a room a learner, and a channel from each to each."""

    def __init__(self, channels: list[Channel], model: nn.Module, num_learners: int) -> None:
        """Allocate; the channels are added to `channels`, for the runtime to close."""
        size = sum(parameter.nbytes for parameter in model.parameters())
        room = max(size, _SMALLEST_ROOM) if num_learners > 1 else 0
        self._rooms = shared_zeros(2, num_learners, -(-room // 8) * 8, dtype=torch.uint8)
        ranks = range(num_learners)
        self._ways = {(a, b): Channel(1 + _MAX_COUNTS) for a in ranks for b in ranks if a != b}
        channels.extend(self._ways.values())

    def member(self, rank: int) -> SharedMember:
        """See `LearnerGroup`."""
        inbox = {a: way for (a, b), way in self._ways.items() if b == rank}
        outbox = {b: way for (a, b), way in self._ways.items() if a == rank}
        return SharedMember(rank, self._rooms, inbox, outbox)
