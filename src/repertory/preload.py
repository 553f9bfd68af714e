"""What the server behind `spawning` imports before it makes children.

It is imported by that process alone. All that roles import is imported here, and nothing is run: a
fork may have no thread pool behind it. The server outlives what a terminal or a scheduler sends to
everybody, since its parent still waits for its children through it; so do children of ours until
they have begun. Children of others get the signals they would have got without us.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.process
import multiprocessing.util
import os
import signal
import sys
import weakref
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import torch._dynamo  # noqa: F401 (an optimiser imports it when it is made, for half a second)

import repertory.algorithms.a2c
import repertory.algorithms.a3c
import repertory.algorithms.batched_a2c
import repertory.algorithms.impala
import repertory.evaluator
import repertory.runtimes.process_role  # noqa: F401
from repertory import spawning

assert sys.platform == "linux"  # elsewhere there is no server


def _forget_the_servers_end(server: int) -> None:
    """In a child, at the fork: what is to be done at the end of a process was the server's.

    What a module has done that only the child imports, the user's own for instance, comes after.
    """
    if os.getppid() == server:
        atexit._clear()
        finalize: Any = weakref.finalize
        finalize._registry.clear()
        finalize._registered_with_atexit = False


def _begin_child(_: object) -> None:
    """In a child: what a spawned process has by itself."""
    np.random.seed()  # forks of one server would all draw the same; Python's own does so itself
    # Ours lifts the mask where it is safe.
    if not isinstance(multiprocessing.process.current_process(), spawning.ServedChild):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, spawning.PARENTS_SIGNALS)


def _remove_the_socket(server: int, parent: int) -> None:
    """At the server's end, what its parent would have removed if it had not been killed."""
    address: Any = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    if os.getpid() == server and _was_killed(parent) and isinstance(address, str):
        with contextlib.suppress(OSError):
            os.unlink(address)
            os.rmdir(os.path.dirname(address))


def _was_killed(parent: int) -> bool:
    """Whether the parent has ended, or is about to: its memory goes before its end of a pipe."""
    try:
        return os.getppid() != parent or not Path(f"/proc/{parent}/cmdline").read_bytes()
    except OSError:
        return True


# Whoever else imports this, to look at every module of the package say, is left as it was.
if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    for _name in spawning.VARIABLES_OF_THE_SERVER:
        os.environ.pop(_name, None)  # children of ours are given their own
    signal.pthread_sigmask(signal.SIG_BLOCK, spawning.PARENTS_SIGNALS)
    multiprocessing.util.register_after_fork(multiprocessing.util, _begin_child)
    os.register_at_fork(after_in_child=partial(_forget_the_servers_end, os.getpid()))
    atexit.register(_remove_the_socket, os.getpid(), os.getppid())
