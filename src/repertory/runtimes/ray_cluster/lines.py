"""A role's process on a cluster, and the socket that joins it to its seat. Nothing here needs Ray.

The role asks one thing at a time and waits for the answer. The seat may say at any moment that the
run is to stop, is over, or wants a state. If the socket closes, the process ends: nobody is left
who would want it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from repertory import checkpoints
from repertory.metrics import Record
from repertory.runtimes.last_words import live
from repertory.runtimes.ray_cluster.wire import Bytes, receive, send
from repertory.spawning import leave_signals_to_the_parent

_BEAT_SECONDS = 0.2  # between two signs of life that say nothing else
_POLL_SECONDS = 1.0
_LAST_WORDS = ("state",)  # what is still answered once the run is over, for the last checkpoint


class Answer(NamedTuple):
    """What a seat answers: a plain value, and buffers of bytes."""

    value: Any
    buffers: list[Tensor]


class Line:
    """A role's side of the socket.

    Attributes:
        stopping: The run was asked to end after the update in progress.
        aborted: The run is over: no verb waits any more.
        states_asked: How often the parent asked for the roles' states.
    """

    def __init__(self, connection: Connection, name: str, patience: float) -> None:
        """Listen from now on.

        Args:
            connection: To the seat.
            name: Of the role.
            patience: Seconds that an answer may take.
        """
        self.stopping = False
        self.aborted = False
        self.states_asked = 0
        self._connection = connection
        self._name = name
        self._patience = patience
        self._answers: queue.SimpleQueue[tuple[int, str, Any, list[Tensor]]] = queue.SimpleQueue()
        self._asked = 0
        self._last_beat = 0.0
        self._sending = False
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(
        self, verb: str, key: str, *arguments: Any, buffer: Tensor | None = None, times: int = 1
    ) -> Any:
        """Ask the seat for something, and wait.

        Args:
            verb: What to do; a method of the seat's servant.
            key: Of the shared thing that it is done to.
            arguments: Plain values.
            buffer: A contiguous tensor on the CPU, sent as bytes.
            times: How many things are waited for, one after the other.

        Returns:
            An `Answer`, or None when the run is over.

        Raises:
            ValueError: The seat says that there is no such thing.
            TimeoutError: No answer for longer than anything that is alive may take.
        """
        if self.aborted and verb not in _LAST_WORDS:
            return None
        self._asked += 1
        buffers = [] if buffer is None else [as_bytes(buffer)]
        self.send("ask", self._asked, verb, key, arguments, buffers=buffers)
        patience = times * self._patience
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                number, kind, value, received = self._answers.get(timeout=_POLL_SECONDS)
                if number != self._asked:
                    continue  # an answer to what this role has given up on
                if kind == "refused":
                    raise ValueError(value)
                return Answer(value, received) if kind == "answer" else None
        raise TimeoutError(
            f"{self._name} has waited {patience:g} s for others who give signs of life but "
            "nothing else"
        )

    def beat(self) -> None:
        """Give a sign of life; a role that asks or reports gives one anyway."""
        now = time.monotonic()
        if now - self._last_beat > _BEAT_SECONDS:
            self._last_beat = now
            self.send("beat")

    def send(self, *header: Any, buffers: Sequence[Bytes] = ()) -> None:
        """Send a message that has no answer."""
        self._sending = True
        send(self._connection, *header, buffers=buffers)
        self._sending = False

    @property
    def may_be_cut_short(self) -> bool:
        """Whether the run is over, and no half of a message would be left in the socket."""
        return self.aborted and not self._sending

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                (kind, *rest), buffers = receive(self._connection)
                if kind == "flags":
                    self.stopping, self.aborted, self.states_asked = rest
                else:
                    number, value = rest
                    tensors = [torch.from_numpy(buffer) for buffer in buffers]
                    self._answers.put((number, kind, value, tensors))
        os._exit(1)


class Context:
    """A role's line to the parent; see `RoleContext`."""

    def __init__(self, name: str, starts: int, line: Line) -> None:
        """Name the role, say how often it was begun before, and how to reach its seat."""
        self.name = name
        self.starts = starts
        self.last_state: Callable[[], Mapping[str, Any]] | None = None
        self._line = line
        self._states_given = 0

    def report(self, record: Record) -> None:
        """See `RoleContext`; the record is copied at once."""
        self._line.send("record", pickle.dumps(record))

    def offer_state(self, collect: Callable[[], Mapping[str, Any]]) -> None:
        """See `RoleContext`."""
        self.last_state = collect
        asked = self._line.states_asked
        if self._states_given < asked:
            self._states_given = asked
            self.report({"kind": "state", "state": collect()})


def as_bytes(tensor: Tensor) -> Bytes:
    """The memory of a contiguous tensor on the CPU."""
    memory: Bytes = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memory


def run_role(descriptor: int) -> None:
    """A role's whole life, in its own process.

    Args:
        descriptor: Of the socket to the seat, whose first message says which role.
    """
    leave_signals_to_the_parent()
    connection = Connection(descriptor)
    (name, starts, threads, patience, packed, files), _ = receive(connection)
    checkpoints.bring(files)
    line = Line(connection, name, patience)
    context = Context(name, starts, line)

    def run() -> Any:
        torch.set_num_threads(threads)
        role, arguments = pickle.loads(packed)
        for argument in arguments:
            if hasattr(argument, "attach_line"):
                argument.attach_line(line)
        return role(context, *arguments)

    live(
        run,
        lambda kind, content: line.send(kind, pickle.dumps(content)),
        lambda: context.last_state,
        lambda: line.may_be_cut_short,
    )


if __name__ == "__main__":
    run_role(int(sys.argv[1]))
