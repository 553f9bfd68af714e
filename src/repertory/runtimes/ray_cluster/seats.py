"""The Ray actor that a role has: its process's parent, its servant, and keeper of places.

What is here: the start, the watch and the end of one role's process, and the news of it. What is
not here: what becomes of a role that has ended (`runtime`), and what its verbs do (`servants`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import ray
from ray.exceptions import RayError

from repertory.runtimes.ray_cluster.places import GroupPlace, Place, QueuePlace, StorePlace
from repertory.runtimes.ray_cluster.servants import Over, Servant
from repertory.runtimes.ray_cluster.wire import receive, send
from repertory.spawning import how_it_ended

_PLACES: Mapping[str, Any] = {"queue": QueuePlace, "store": StorePlace, "group": GroupPlace}
_PROGRAM = "repertory.runtimes.ray_cluster.lines"
_LOOK_SECONDS = 0.1
_DEAD_LOOKS = 20  # at a process that has ended, for what it still had to say
_MOST_RECORDS = 1_000  # that wait for the parent; a role that reports more waits too
_LOST_SECONDS = 60.0  # for the parent to end the run after an actor was lost that a role asked


@dataclass(frozen=True)
class Seating:
    """All that a seat has to know of its role.

    Attributes:
        name: Of the role.
        packed: The role and its arguments, pickled; for its process alone.
        threads: Of torch, in the role.
        timeout_seconds: A role that gives no sign of life for so long is taken to hang.
        start_seconds: The same before its first.
        patience_seconds: How long a role waits for others that are alive.
        keeps: What the seat keeps, by key: a kind of place, and its arguments.
        homes: Actors that keep the other things, by key.
        generation: How many seats the role had before.
        starts: How often the role was begun before, on any seat.
        files: Checkpoints that the role may load, by path; an object of Ray's store.
        variables: Environment variables of the role's process; None removes one.
        folder: Where it runs, if there is such a folder on that machine.
    """

    name: str
    packed: bytes
    threads: int
    timeout_seconds: float
    start_seconds: float
    patience_seconds: float
    keeps: Mapping[str, tuple[str, tuple[Any, ...]]]
    homes: Mapping[str, Any]
    generation: int
    starts: int
    files: Any
    variables: Mapping[str, str | None]
    folder: str

    def greeting(self, files: Mapping[str, bytes]) -> tuple[Any, ...]:
        """What the role's process is told first; see `lines.run_role`."""
        return self.name, self.starts, self.threads, self.patience_seconds, self.packed, files


@dataclass
class _Child:
    """A role's process, and what its seat knows of it.

    Silence is counted a look at a time, and a look counts little: a machine that sleeps makes
    nobody look dead. A role that waits for an answer is not silent.
    """

    process: subprocess.Popen[bytes]
    connection: Connection
    begun: bool = False
    asking: bool = False
    silent_seconds: float = 0.0
    reason: str | None = None
    dead_looks: int = 0
    ended: bool = False
    sending: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, *header: Any, buffers: Any = ()) -> None:
        """Send a message; one that is gone misses it."""
        with self.sending, contextlib.suppress(OSError):
            send(self.connection, *header, buffers=buffers)

    def hang_up(self) -> None:
        """End the line for whoever still listens to it here."""
        line = socket.socket(fileno=os.dup(self.connection.fileno()))
        with line, contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)


class Seat:
    """See the module. An asynchronous actor: places and news wait in its event loop."""

    def __init__(self) -> None:
        """No role has come yet."""
        self._places: dict[str, Place] = {}
        self._opened = asyncio.Event()
        self._news: list[tuple[str, Any]] = []
        self._has_news = asyncio.Event()
        self._room = threading.Semaphore(_MOST_RECORDS)
        self._flags = (False, False, 0)
        self._servant: Servant | None = None
        self._child: _Child | None = None
        self._seating: Seating | None = None

    async def launch(self, seating: Seating) -> int:
        """Start the role's process, for the first time or again; returns its pid."""
        self._loop = asyncio.get_running_loop()
        if self._servant is None:
            self._places = {key: _PLACES[kind](*how) for key, (kind, how) in seating.keeps.items()}
            self._servant = Servant(self._places, seating.homes, seating.generation, self._loop)
            self._watcher = self._loop.create_task(self._watch())
            self._opened.set()
        self._seating = seating
        files = await seating.files
        child = _start(seating)
        # Its first message; it has to import torch before it reads that.
        await asyncio.to_thread(child.tell, *seating.greeting(files))
        self._child = child
        await asyncio.to_thread(child.tell, "flags", *self._flags)
        threading.Thread(target=self._serve, args=(child, self._servant), daemon=True).start()
        return child.process.pid

    async def news(self, seconds: float) -> list[tuple[str, Any]]:
        """What the role has sent since the last call, in order, waiting so long for the first.

        A message is `record`, `result`, `error` (each pickled) or `ended` (in words, with the pid).
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_news.wait(), seconds)
        news, self._news = self._news, []
        self._has_news.clear()
        records = sum(kind == "record" for kind, _ in news)
        if records:
            self._room.release(records)
        return news

    async def at(self, key: str, verb: str, *arguments: Any) -> Any:
        """A verb of a place that this seat keeps, for a role of another seat."""
        await self._opened.wait()
        return await getattr(self._places[key], verb)(*arguments)

    async def tell(self, stopping: bool, aborted: bool, states_asked: int) -> None:
        """Pass on to the role what the run wants of it."""
        self._flags = (stopping, aborted, states_asked)
        if self._servant is not None and aborted:
            self._servant.over.set()
        if self._child is not None:
            await asyncio.to_thread(self._child.tell, "flags", *self._flags)

    async def cut_short(self) -> None:
        """Have the role leave what it is in the midst of, and hand over what it has."""
        if self._child is not None:
            self._child.process.terminate()

    async def end(self) -> None:
        """Kill the role's process, if it still runs."""
        if self._child is not None:
            self._child.process.kill()
            await asyncio.to_thread(self._child.process.wait)

    def _serve(self, child: _Child, servant: Servant) -> None:
        """Do what the role asks, and keep what it sends for the parent, until its end."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                (kind, *rest), buffers = receive(child.connection)
                child.begun, child.silent_seconds = True, 0.0
                if kind == "ask":
                    child.asking = True
                    number, verb, key, arguments = rest
                    said, value, out = self._answer(servant, verb, key, *arguments, *buffers)
                    child.asking, child.silent_seconds = False, 0.0
                    child.tell(said, number, value, buffers=out)
                    del out  # may lie in the object store, and the next question be long in coming
                elif kind != "beat":
                    if kind == "record":
                        self._room.acquire(timeout=_LOST_SECONDS)
                    self._post(kind, rest[0])
        child.ended = True
        try:
            code = child.process.wait(_LOST_SECONDS)
        except subprocess.TimeoutExpired:
            child.process.kill()
            code = child.process.wait()
        child.connection.close()
        self._post("ended", child.reason or f"{how_it_ended(code)} (pid {child.process.pid})")

    def _answer(self, servant: Servant, verb: str, key: str, *arguments: Any) -> Any:
        """What the role is told: `answer`, `over` or `refused`, a value and buffers."""
        try:
            value, buffers = getattr(servant, verb)(key, *arguments)
            return "answer", value, buffers
        except (Over, TimeoutError):
            return "over", None, []
        except ValueError as error:  # of a place, here or elsewhere
            return "refused", str(getattr(error, "cause", error)), []
        except RayError as error:
            # Whoever keeps the place is lost. The parent hears that as well, and says it better.
            if servant.over.wait(_LOST_SECONDS):
                return "over", None, []
            return "refused", " ".join(str(error).split()), []

    def _post(self, kind: str, content: Any) -> None:
        """Add to the news, from another thread."""

        def add() -> None:
            self._news.append((kind, content))
            self._has_news.set()

        self._loop.call_soon_threadsafe(add)

    async def _watch(self) -> None:
        """Kill the role's process if it has been silent for too long; its end is what is told."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            passed, looked = min(now - looked, 1.0), now
            child, seating = self._child, self._seating
            if child is None or seating is None or child.ended:
                continue
            if child.process.poll() is not None:
                # Its line stays open where it has forked somebody who lives on.
                child.dead_looks += 1
                if child.dead_looks == _DEAD_LOOKS:
                    child.hang_up()
                continue
            if child.asking:
                continue
            child.silent_seconds += passed
            allowed = seating.timeout_seconds
            if not child.begun:
                allowed = max(allowed, seating.start_seconds)
            if child.silent_seconds > allowed and child.reason is None:
                child.reason = (
                    f"no sign of life for {allowed:g} s (pid {child.process.pid}); "
                    "if an unroll or an update may take longer, raise role_timeout_seconds"
                )
                child.process.kill()


def _start(seating: Seating) -> _Child:
    """Start a role's process, joined to this one by a socket."""
    ours, theirs = Pipe(duplex=True)
    # Modules are found there where they are here, but for those that Ray brings for itself.
    brought = os.path.dirname(ray.__file__)
    paths = [path for path in sys.path if path and not path.startswith(brought)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    for name, value in seating.variables.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    process = subprocess.Popen(
        # The name stands there for whoever looks at the list of processes.
        [sys.executable, "-P", "-m", _PROGRAM, str(theirs.fileno()), seating.name],
        env=environment,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        cwd=seating.folder if os.path.isdir(seating.folder) else None,
    )
    theirs.close()
    return _Child(process, ours)
