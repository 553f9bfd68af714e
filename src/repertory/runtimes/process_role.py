"""A role's side of the `processes` runtime: its whole life in its own process, and its line out.

What is here: what the parent and its roles share beside data, a role's context, and the function
that its process runs. What is not here: starting, watching and ending it (`processes`).
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from repertory.metrics import Record
from repertory.runtimes.base import Role
from repertory.runtimes.last_words import live
from repertory.runtimes.shared_memory import Channel, Endpoint, shared_zeros

POLL_SECONDS = 0.1  # how soon a waiting role sees that the run is over
_MAX_ROLES = 1024


class Control:
    """A few shared numbers: each is written by one process at a time and read by all."""

    def __init__(self) -> None:
        self._flags = shared_zeros(3, dtype=torch.int64)
        self._beats = shared_zeros(_MAX_ROLES, dtype=torch.int64)

    @property
    def stopping(self) -> bool:
        """The run was asked to end after the update in progress."""
        return bool(self._flags[0])

    @property
    def aborted(self) -> bool:
        """The run is over: no verb waits any more."""
        return bool(self._flags[1])

    @property
    def states_asked(self) -> int:
        """How often the parent asked for the roles' states."""
        return int(self._flags[2])

    def stop(self) -> None:
        """Ask the roles to end after the update in progress."""
        self._flags[0] = 1

    def abort(self) -> None:
        """Have no verb wait any more."""
        self._flags[1] = 1

    def ask_for_state(self) -> None:
        """Ask the roles for their states at their next safe point."""
        self._flags[2] += 1

    def beat(self, index: int) -> None:
        """A role's sign of life."""
        self._beats[index] += 1

    def beats(self, index: int) -> int:
        """How many signs of life a role has given."""
        return int(self._beats[index])


class Context:
    """A role's line to the parent, in the role's process."""

    def __init__(
        self,
        name: str,
        index: int,
        control: Control,
        pipe: Connection,
        patience: float,
        starts: int,
    ) -> None:
        self.name = name
        self.starts = starts
        self._patience = patience
        self.control = control
        self._index = index
        self._pipe = pipe
        self._states_given = 0
        self._sending = False
        self.last_state: Callable[[], Mapping[str, Any]] | None = None

    @property
    def may_be_cut_short(self) -> bool:
        """Whether the run is over, and no half of a message would be left in the pipe."""
        return self.control.aborted and not self._sending

    @property
    def stopping(self) -> bool:
        """See `Waiter`."""
        return self.control.stopping

    @property
    def aborted(self) -> bool:
        """See `Waiter`."""
        return self.control.aborted

    def beat(self) -> None:
        """Give a sign of life."""
        self.control.beat(self._index)

    def report(self, record: Record) -> None:
        """See `RoleContext`."""
        self.beat()
        self.send("record", record)

    def offer_state(self, collect: Callable[[], Mapping[str, Any]]) -> None:
        """See `RoleContext`."""
        self.last_state = collect
        asked = self.control.states_asked
        if self._states_given < asked:
            self._states_given = asked
            self.report({"kind": "state", "state": collect()})

    def send(self, kind: str, content: Any) -> None:
        """Plain pickle: it copies tensors, where that of multiprocessing would share them."""
        message = pickle.dumps((kind, content))
        self._sending = True
        self._pipe.send_bytes(message)
        self._sending = False

    def wait_for(self, channels: list[Channel]) -> list[Channel]:
        """Wait until messages lie in some of `channels`; an empty list when the run is over.

        Raises:
            TimeoutError: Nothing came for longer than anything that is alive may take.
        """
        by_connection = {channel.receiving: channel for channel in channels}
        # Counted in looks, as the parent counts silence: a run that sleeps loses no patience.
        looks = math.ceil(self._patience / POLL_SECONDS)
        while True:
            looks -= 1
            if looks < 0:
                raise TimeoutError(
                    f"{self.name} has waited {self._patience:g} s for others who give signs of "
                    "life but nothing else"
                )
            self.beat()
            ready = wait(list(by_connection), POLL_SECONDS)
            if ready:
                return [by_connection[connection] for connection in ready]  # type: ignore[index]
            if self.control.aborted:
                return []


def run_role(
    name: str,
    index: int,
    role: Role,
    arguments: tuple[Any, ...],
    control: Control,
    pipe: Connection,
    threads: int,
    patience: float,
    starts: int,
) -> None:
    """A role's whole life, in its own process."""
    torch.set_num_threads(threads)
    context = Context(name, index, control, pipe, patience, starts)
    for argument in arguments:
        if isinstance(argument, Endpoint):
            argument.attach(context)
    live(
        lambda: role(context, *arguments),
        context.send,
        lambda: context.last_state,
        lambda: context.may_be_cut_short,
    )
