"""What the server behind `spawning` imports before it makes children.

It is imported by that process alone. All that roles import is imported here, and nothing is run: a
fork may have no thread pool behind it. The server outlives what a terminal or a scheduler sends to
everybody, since its parent still waits for its children through it; so do children of ours until
they have begun. Children of others get the signals they would have got without us.
"""

from __future__ import annotations

import multiprocessing.process
import multiprocessing.util
import signal
import sys

import repertory.algorithms.a2c
import repertory.algorithms.a3c
import repertory.algorithms.batched_a2c
import repertory.algorithms.impala
import repertory.evaluator
import repertory.runtimes.process_role  # noqa: F401
from repertory import spawning

assert sys.platform == "linux"  # elsewhere there is no server


def _hear_signals(_: object) -> None:
    """In a child: lift the mask, unless `spawning` does it where it is safe."""
    if not isinstance(multiprocessing.process.current_process(), spawning.ServedChild):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, spawning.PARENTS_SIGNALS)


signal.pthread_sigmask(signal.SIG_BLOCK, spawning.PARENTS_SIGNALS)
multiprocessing.util.register_after_fork(multiprocessing.util, _hear_signals)
