"""How a child process starts and ends: deaf to what the parent alone answers, dead when it dies.

On Linux children are forks of a server: multiprocessing's own, a process that has imported what
roles import and has run nothing. A fork of it takes milliseconds, where a spawned process imports
PyTorch first, for seconds. Elsewhere children are spawned. None is ever a fork of a process that
has run torch: that would inherit a thread pool that no longer runs.

What is here: the start of a child, its first lines, and words for its end. What is not here: what
children do (`runtimes`, `environments.guard`, `evaluator`), what the server imports (`preload`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""What a terminal or a scheduler sends to everybody, and the parent alone answers."""

_PRELOAD = ["repertory.preload"]
_SERVER_IS_DEAD = 255  # multiprocessing's exit code of a child whose end nobody can tell

if sys.platform == "linux":  # on macOS, what PyTorch imports does not survive a fork
    from multiprocessing import forkserver
    from multiprocessing.context import ForkServerProcess

    class ServedChild(ForkServerProcess):
        """A child that the server makes; `preload` tells it from those of other programs."""

        def kill(self) -> None:
            """End it at once, also where the server, which would tell of its end, has died."""
            super().kill()
            if self.exitcode == _SERVER_IS_DEAD:
                assert self.pid is not None  # it was started
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)


def start_child(name: str, function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Run a function in a process of its own, which ends with this one.

    Args:
        name: What the process is called.
        function: At the top level of a module.
        arguments: What it is called with; tensors in shared memory stay shared.

    Raises:
        OSError: The machine has no room for another process.
    """
    whole = (dict(os.environ), function, arguments)
    with _deaf_to_signals():
        if sys.platform == "linux":
            forkserver.set_forkserver_preload(_PRELOAD)
            process: BaseProcess = ServedChild(target=_begin, args=whole, name=name)
            try:
                process.start()
                return process
            except (ValueError, EOFError):
                pass  # more descriptors than one message may carry, or the server was killed
        process = multiprocessing.get_context("spawn").Process(target=_begin, args=whole, name=name)
        process.start()
        return process


def prepare_to_start_children() -> None:
    """Have the server import while this process does, so that the first child starts sooner."""
    if sys.platform == "linux":
        with _deaf_to_signals():
            forkserver.set_forkserver_preload(_PRELOAD)
            forkserver.ensure_running()


@contextlib.contextmanager
def _deaf_to_signals() -> Iterator[None]:
    """Hold back, from a process that is started in the block, what the parent alone answers.

    Signals from a terminal go to the whole group, and a new process would die of Ctrl-C while it
    still imports. It inherits the mask, and ignores them from `_begin` on. The parent itself gets
    what was held back when the block ends.
    """
    resource_tracker.ensure_running()  # started with the first process, it would lift the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(
    variables: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """A child's whole life: whatever started it, it begins as a spawned one would."""
    leave_signals_to_the_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)
    end_with_the_parent()
    os.environ.clear()
    os.environ.update(variables)  # those of now, and not of when the server began
    if "numpy" in sys.modules:
        # Forks of one server would all draw the same; Python's own generator sees to it itself.
        sys.modules["numpy"].random.seed()
    function(*arguments)


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
    if sys.platform == "linux" and exit_code == _SERVER_IS_DEAD:
        return "out of sight, since the process that makes roles was killed"
    return f"ended with exit code {exit_code} and without a word"


def _wait_for_the_end() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
