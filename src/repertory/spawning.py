"""How a child process starts and ends: deaf to what the parent alone answers, dead when it dies.

What is here: the mask around a start, the first lines of a child, and words for its end. What is
not here: any process itself (`runtimes`, `environments.guard`, `evaluator`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import wait

_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def deaf_to_signals() -> Iterator[None]:
    """Hold back, from a process that is started in the block, what the parent alone answers.

    Signals from a terminal go to the whole group, and a new process would die of Ctrl-C while it
    still imports. It inherits the mask, and ignores them from `begin_child` on. The parent itself
    gets what was held back when the block ends.
    """
    resource_tracker.ensure_running()  # started with the first process, it would lift the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_child() -> None:
    """First thing in a child that was started `deaf_to_signals`."""
    leave_signals_to_the_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS_SIGNALS)
    end_with_the_parent()


def leave_signals_to_the_parent() -> None:
    """From now on, the parent alone answers what a terminal or a scheduler sends to everybody.

    Programs that an environment starts must hear a request to terminate from it: an ignored signal
    would stay ignored there, where one that is handled is not.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)


def end_with_the_parent() -> None:
    """From now on, end this process as soon as its parent has died, whatever it is doing."""
    threading.Thread(target=_wait_for_the_end, daemon=True).start()


def how_it_ended(exit_code: int | None) -> str:
    """In words; None is the code of a process that goes on."""
    if exit_code is None:
        return "closed its line and goes on"
    if exit_code < 0:
        known = {number.value: number.name for number in signal.Signals}
        return f"killed by {known.get(-exit_code, f'signal {-exit_code}')}"
    return f"ended with exit code {exit_code} and without a word"


def _wait_for_the_end() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
