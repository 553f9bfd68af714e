"""What a seat does for its role: each verb of an end becomes a call to wherever the place is.

A verb gets the key of the shared thing, plain values and bytes, and returns a plain value and the
buffers that go back. No wait here is without an end: each is in short spells, between which the
run may turn out to be over. What is not here: the role's process (`seats`), the places (`places`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

import ray

from repertory.runtimes.ray_cluster.places import Place
from repertory.runtimes.ray_cluster.wire import Bytes

_POLL_SECONDS = 0.1
_LAST_SECONDS = 3.0
_SMALL = 65_536  # bytes; what is no larger travels inside the call, without the object store

Answer = tuple[Any, list[Any]]


class Over(Exception):
    """The run is over: nobody waits any more."""


class Servant:
    """The verbs; run on a thread of the seat's, beside its event loop."""

    def __init__(
        self,
        places: Mapping[str, Place],
        homes: Mapping[str, Any],
        generation: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Serve from now on.

        Args:
            places: What this seat keeps, by key.
            homes: Actors that keep the other things, by key.
            generation: How many seats this one's role had before.
            loop: Where `places` live.
        """
        self.over = threading.Event()
        self._places = places
        self._homes = homes
        self._generation = generation
        self._loop = loop
        self._under_way: defaultdict[tuple[str, int], deque[Any]] = defaultdict(deque)
        self._serials: defaultdict[tuple[str, int], int] = defaultdict(int)

    def slot(self, key: str, lane: int, capacity: int) -> Answer:
        """Wait until less than `capacity` is under way; False once the queue is closed."""
        under_way = self._under_way[key, lane]
        while under_way and (len(under_way) >= capacity or _has_come(under_way[0])):
            if not self._wait(under_way[0]):
                return False, []  # and stays there, for whoever asks next
            under_way.popleft()
        return True, []

    def put(self, key: str, lane: int, data: Bytes) -> Answer:
        """Send a trajectory on its way."""
        serial = self._serials[key, lane]
        self._serials[key, lane] += 1
        call = self._call(key, "put", lane, self._generation, serial, data)
        self._under_way[key, lane].append(call)
        return True, []

    def take(self, key: str, count: int) -> Answer:
        """Wait for trajectories; None once the queue is closed."""
        taken = self._wait(self._call(key, "take", count))
        return (None, []) if taken is None else (count, taken)

    def publish(self, key: str, version: int, data: Bytes) -> Answer:
        """Put a version into the object store, once, and say where it is."""
        self._wait(self._call(key, "publish", version, [ray.put(data)]))
        return None, []

    def refresh(self, key: str, version: int | None, has: int) -> Answer:
        """Wait for a version, and fetch it unless the role has it."""
        found = self._wait(self._call(key, "refresh", version, has))
        if found is None:
            return None, []
        number, held = found
        return number, self._fetch([held]) if held else []

    def sum(self, key: str, rank: int, stop: bool, counts: tuple[int, ...], data: Bytes) -> Answer:
        """Hand in a part, wait for all, and fetch the others'."""
        part = data if data.nbytes <= _SMALL else [ray.put(data)]
        summed = self._wait(self._call(key, "sum", rank, stop, counts, part))
        if summed is None:
            return None, []
        totals, parts = summed
        return totals, self._fetch([part for other, part in enumerate(parts) if other != rank])

    def pull(self, key: str, index: int) -> Answer:
        """Fetch the shared parameters."""
        version, env_steps, data = self._wait(self._call(key, "pull", index))
        return (version, env_steps), [data]

    def push(
        self,
        key: str,
        index: int,
        env_steps: int,
        learning_rate: float,
        max_lag: int | None,
        data: Bytes,
    ) -> Answer:
        """Have the shared optimiser make a step; the call is never repeated."""
        call = self._call(key, "push", index, env_steps, learning_rate, max_lag, data)
        return self._wait(call), []

    def state(self, key: str, index: int) -> Answer:
        """Fetch the shared state, pickled; for a while also once the run is over."""
        return None, [self._call(key, "state", index).result(_LAST_SECONDS)]

    def leave(self, key: str) -> Answer:
        """Leave a group."""
        return self._wait(self._call(key, "leave")), []

    def close(self, key: str) -> Answer:
        """Close a queue or a store."""
        return self._wait(self._call(key, "close")), []

    def _call(self, key: str, verb: str, *arguments: Any) -> concurrent.futures.Future[Any]:
        """Begin a verb where the place is: in this process, or with another actor."""
        if key in self._places:
            coroutine = getattr(self._places[key], verb)(*arguments)
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        future: concurrent.futures.Future[Any] = (
            self._homes[key].at.remote(key, verb, *arguments).future()
        )
        return future

    def _wait(self, future: concurrent.futures.Future[Any]) -> Any:
        while True:
            try:
                return future.result(_POLL_SECONDS)
            except TimeoutError:
                if self.over.is_set():
                    future.cancel()
                    raise Over from None

    def _fetch(self, parts: list[Any]) -> list[Any]:
        """The bytes of parts that are bytes, or lists of one reference; all are fetched at once."""
        coming = [part[0].future() if isinstance(part, list) else part for part in parts]
        return [
            self._wait(part) if isinstance(part, concurrent.futures.Future) else part
            for part in coming
        ]


def _has_come(future: concurrent.futures.Future[Any]) -> bool:
    come, _ = concurrent.futures.wait([future], timeout=0)
    return bool(come)
