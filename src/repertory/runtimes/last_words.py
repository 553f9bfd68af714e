"""What a role in a process of its own says last: its result, its failure, or what it has learned.

What is here: a role's life seen from its end. What is not here: how a message travels
(`process_role`, `ray_cluster.lines`), and how long a role has for its end (`stops`).
"""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from repertory.runtimes.base import is_loss

Collect = Callable[[], Mapping[str, Any]]
"""Makes a copy of a role's state."""


class OutOfTime(BaseException):
    """Cuts short what a role is in the midst of; no `Exception`, so that none swallows it."""


def live(
    role: Callable[[], Any],
    send: Callable[[str, Any], None],
    last_state: Callable[[], Collect | None],
    may_be_cut_short: Callable[[], bool],
) -> None:
    """Run a role in this process, and send how it ended.

    A request to terminate cuts it short wherever Python runs or waits, in an environment that
    sleeps for instance, if it may. Then its last state stands in place of its result.

    Args:
        role: What is run.
        send: Takes `result` and a value; or `error`, or `lost` of one that may be replaced, and the
            reason, the traceback and the state that is left.
        last_state: What the role has last offered.
        may_be_cut_short: Asked in the signal's handler. Requests from elsewhere, which come to all
            processes of a terminal or a scheduler, are the parent's to answer.
    """

    def end(number: int, frame: FrameType | None) -> None:
        if may_be_cut_short():
            _answer_no_requests()
            raise OutOfTime

    signal.signal(signal.SIGTERM, end)
    try:
        result = role()
        _answer_no_requests()
        send("result", result)
    except OutOfTime:
        if (state := state_left(last_state())) is not None:
            send("result", state)
    except BaseException as error:
        _answer_no_requests()
        reason = f"{type(error).__name__}: {error}"
        kind = "lost" if is_loss(error) else "error"
        with contextlib.suppress(OSError):
            send(kind, (reason, traceback.format_exc(), state_left(last_state())))


def state_left(collect: Collect | None) -> dict[str, Any] | None:
    """The state that a role has last offered, where it is whole and can still be collected.

    What ends a role may have broken that too: a GPU that has failed gives no parameters back.
    """
    if collect is None:
        return None
    try:
        return dict(collect())
    except Exception:
        return None


def _answer_no_requests() -> None:
    """From now on a request to terminate does nothing in this process."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)
