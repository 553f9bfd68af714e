"""What a seat keeps for others to come to: a queue, a parameter store, a learner group.

All of it runs in one event loop, so nothing here needs a lock; whoever waits awaits a condition.
Data is opaque: an array of bytes, or a reference to one. Nothing here needs Ray or torch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


class Place(Protocol):
    """Something shared, in the seat that keeps it; verbs are its coroutines."""

    async def close(self) -> None:
        """End it: nobody waits there any more."""
        ...


@dataclass
class _Parcel:
    """A trajectory on its way.

    Attributes:
        arrival: Counts what came before it.
        data: Its bytes.
        taken: Becomes True when the learner takes it, False when it never will.
    """

    arrival: int
    data: Any
    taken: asyncio.Future[bool] = field(default_factory=lambda: asyncio.Future())


class QueuePlace:
    """A queue, beside the learner that reads it."""

    def __init__(self, num_lanes: int, order: Literal["arrival", "actor"]) -> None:
        """One lane for each actor."""
        self._order = order
        self._lanes: list[deque[_Parcel]] = [deque() for _ in range(num_lanes)]
        self._next = [(0, 0)] * num_lanes  # (generation, serial) of the parcel that is due
        self._arrivals = 0
        self._closed = False
        self._changed = asyncio.Condition()

    async def put(self, lane: int, generation: int, serial: int, data: Any) -> bool:
        """Add a trajectory, and wait until it is taken; False once the queue is closed.

        Args:
            lane: The actor's.
            generation: Of the actor's seat; one that replaces a lost seat counts from 0 again.
            serial: Counts the seat's trajectories, since calls may overtake one another.
            data: The trajectory.
        """
        async with self._changed:
            if generation > self._next[lane][0]:
                self._next[lane] = (generation, 0)
            due = (generation, serial)
            await self._changed.wait_for(lambda: self._closed or self._next[lane] >= due)
            if self._closed or self._next[lane] > due:
                return False
            self._next[lane] = (generation, serial + 1)
            parcel = _Parcel(self._arrivals, data)
            self._arrivals += 1
            self._lanes[lane].append(parcel)
            self._changed.notify_all()
        return await parcel.taken

    async def take(self, count: int) -> list[Any] | None:
        """Wait for `count` trajectories; None once the queue is closed."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or self._available() >= count)
            if self._closed:
                return None
            if self._order == "actor":
                parcels = [lane.popleft() for lane in self._lanes]
            else:
                parcels = [self._oldest() for _ in range(count)]
        for parcel in parcels:
            parcel.taken.set_result(True)
        return [parcel.data for parcel in parcels]

    async def close(self) -> None:
        """End the queue."""
        async with self._changed:
            self._closed = True
            for lane in self._lanes:
                while lane:
                    lane.popleft().taken.set_result(False)
            self._changed.notify_all()

    def _available(self) -> int:
        if self._order == "actor":
            return len(self._lanes) if all(self._lanes) else 0
        return sum(len(lane) for lane in self._lanes)

    def _oldest(self) -> _Parcel:
        lane = min((lane for lane in self._lanes if lane), key=lambda lane: lane[0].arrival)
        return lane.popleft()


class StorePlace:
    """A parameter store, beside the learner that publishes: references to the two newest versions.

    The bytes stay where Ray put them and travel once to each machine, however many read there.
    """

    def __init__(self) -> None:
        """Nothing is published yet."""
        self._versions: dict[int, Any] = {}
        self._newest = -1
        self._closed = False
        self._changed = asyncio.Condition()

    async def publish(self, version: int, held: list[Any]) -> None:
        """Make a version the newest; `held` is a list of its one reference."""
        async with self._changed:
            self._versions = {
                number: old for number, old in self._versions.items() if number == version - 1
            }
            self._versions[version] = held
            self._newest = version
            self._changed.notify_all()

    async def refresh(self, version: int | None, has: int) -> tuple[int, list[Any]] | None:
        """Wait for a version.

        Args:
            version: None for the newest.
            has: What the reader holds already.

        Returns:
            Its number, and its reference where the reader lacks it; None once the store is closed.

        Raises:
            ValueError: The version is older than the two that are kept.
        """
        wanted = 0 if version is None else version
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or self._newest >= wanted)
            if self._closed:
                return None
            found = self._newest if version is None else version
            if found != has and found not in self._versions:
                raise ValueError(f"version {found} is gone; the newest is {self._newest}")
            return found, [] if found == has else self._versions[found]

    async def close(self) -> None:
        """End the store."""
        async with self._changed:
            self._closed = True
            self._versions.clear()
            self._changed.notify_all()


class GroupPlace:
    """A learner group, beside its first learner: each hands in its part and gets everyone's."""

    def __init__(self, num_learners: int) -> None:
        """Nobody has handed in anything."""
        self._num_learners = num_learners
        self._parts: dict[int, tuple[bool, tuple[int, ...], Any]] = {}
        self._round: asyncio.Future[tuple[list[int], list[Any]] | None] | None = None
        self._left = False

    async def sum(
        self, rank: int, stop: bool, counts: tuple[int, ...], part: Any
    ) -> tuple[list[int], list[Any]] | None:
        """Wait for the others.

        Args:
            rank: Of the learner.
            stop: Whether it was asked to stop; only the first learner's word counts.
            counts: To be added up.
            part: Its vector, or a list of one reference to it.

        Returns:
            The summed counts, and the parts by rank; None when the run is to stop or a learner has
            left.
        """
        if self._left:
            return None
        self._round = self._round or asyncio.Future()
        mine = self._round
        self._parts[rank] = (stop, counts, part)
        if len(self._parts) == self._num_learners:
            in_order = [self._parts[rank] for rank in range(self._num_learners)]
            self._parts, self._round = {}, None
            totals = [sum(column) for column in zip(*(c for _, c, _ in in_order), strict=True)]
            mine.set_result(None if in_order[0][0] else (totals, [part for *_, part in in_order]))
        # Shielded: one that gives up while waiting must not cancel the round of the others.
        return await asyncio.shield(mine)

    async def leave(self) -> None:
        """Sum no more, for all."""
        self._left = True
        if self._round is not None:
            self._round.set_result(None)
            self._parts, self._round = {}, None

    async def close(self) -> None:
        """The same."""
        await self.leave()
