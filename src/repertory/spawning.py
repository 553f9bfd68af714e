"""How a child process starts and ends: deaf to what the parent alone answers, dead when it dies.

On Linux children are forks of a server: multiprocessing's own, a process that has imported what
roles import and has run nothing. A fork of it takes milliseconds, where a spawned process imports
PyTorch first, for seconds. Elsewhere, and wherever the server cannot be had, children are spawned.
None is ever a fork of a process that has run torch: that would inherit a thread pool that no longer
runs.

What is here: the start of a child, its first lines, and words for its end. What is not here: what
children do (`runtimes`, `environments.guard`, `evaluator`), what the server imports (`preload`).
"""

from __future__ import annotations

import atexit
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

VARIABLES_OF_THE_SERVER = ("PYTHONPATH", "PYTHONSAFEPATH")
"""What the server is started with besides this process's own variables; see `preload`."""

SERVER_IS_DEAD = 255
"""multiprocessing's exit code of a child whose end the server can no longer tell."""

_MOST_DESCRIPTORS = 248  # the kernel passes 253 in a message, and multiprocessing adds 4

if sys.platform == "linux":  # on macOS, what PyTorch imports does not survive a fork
    from multiprocessing import forkserver, popen_forkserver
    from multiprocessing.context import ForkServerProcess

    class _Start(popen_forkserver.Popen):
        """The start of a child; refuses what would end the server, which cannot take it."""

        def duplicate_for_child(self, fd: int) -> int:
            """Note a descriptor that the child is to have; its index among them."""
            if len(self._fds) == _MOST_DESCRIPTORS:  # type: ignore[attr-defined]
                raise ValueError("more descriptors than one message to the server may carry")
            index: int = super().duplicate_for_child(fd)
            return index

    class ServedChild(ForkServerProcess):
        """A child that the server makes; `preload` tells it from those of other programs."""

        @staticmethod
        def _Popen(process: BaseProcess) -> popen_forkserver.Popen:
            return _Start(process)

        def kill(self) -> None:
            """End it at once, also where the server, which would tell of its end, has died."""
            super().kill()
            if self.exitcode == SERVER_IS_DEAD:
                assert self.pid is not None  # it was started
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)

    _our_servers: set[int] = set()

    _starting = threading.Lock()

    def _have_a_server() -> bool:
        """Start the server unless it runs; False where a server of somebody else's does."""
        server: Any = forkserver._forkserver
        with _starting:  # variables of this process change for a moment
            before = server._forkserver_pid
            if before is None or before in _our_servers:
                forkserver.set_forkserver_preload(["repertory.preload"])
                with _deaf_to_signals(), _variables_of_the_server():
                    forkserver.ensure_running()
                _our_servers.add(server._forkserver_pid)
            return server._forkserver_pid in _our_servers


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
    if sys.platform == "linux":
        # Among the reasons to spawn instead: more descriptors than one message carries, no sockets
        # in the folder of temporary files, a server that was killed a moment ago.
        with contextlib.suppress(OSError, ValueError, EOFError):
            if _have_a_server():
                served = ServedChild(target=_begin, args=whole, name=name)
                served.start()
                return served
    process = multiprocessing.get_context("spawn").Process(target=_begin, args=whole, name=name)
    with _deaf_to_signals():
        process.start()
    return process


def prepare_to_start_children() -> None:
    """Have the server import while this process does, so that the first child starts sooner."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            _have_a_server()


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


@contextlib.contextmanager
def _variables_of_the_server() -> Iterator[None]:
    """Have a server that is started in the block import from where this process does.

    A spawned process is told; the server of some versions of Python looks where it was started.
    """
    before = {name: os.environ.get(name) for name in VARIABLES_OF_THE_SERVER}
    paths = [path for path in sys.path if isinstance(path, str)]  # Python skips all others
    os.environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in paths)
    os.environ["PYTHONSAFEPATH"] = "1"  # and not in the current folder before all others
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _begin(
    variables: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """A child's whole life: whatever started it, it begins and ends as a spawned one would."""
    leave_signals_to_the_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)
    end_with_the_parent()
    os.environ.clear()
    os.environ.update(variables)  # those of now, and not of when the server began
    multiprocessing.set_start_method("spawn", force=True)  # for what an environment starts
    try:
        function(*arguments)
    finally:
        atexit._run_exitfuncs()  # a fork ends without, in some versions of Python


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
    if sys.platform == "linux" and exit_code == SERVER_IS_DEAD:
        return "ended with exit code 255, or the server that makes roles was killed"
    return f"ended with exit code {exit_code} and without a word"


def _wait_for_the_end() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
