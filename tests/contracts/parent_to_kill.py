"""A parent with two busy roles, for a test that kills it."""

from __future__ import annotations

import sys

from repertory.runtimes.processes import ProcessRuntime
from tests.contracts import roles


def main() -> None:
    """Run until killed."""
    runtime = ProcessRuntime()
    queue = runtime.trajectory_queue(roles.SPEC, 1, order="actor")
    runtime.start("learner-0", roles.consume, 1, 10**9, queue.reader())
    runtime.start("actor-0", roles.produce, 0, 10**9, queue.writer(0), 0.01)
    seen: set[str] = set()

    def watch(role: str, record: dict[str, object]) -> None:
        seen.add(role)
        if len(seen) == 2:
            sys.stdout.write("running\n")
            sys.stdout.flush()
            seen.add("said")

    runtime.supervise(watch)


if __name__ == "__main__":
    main()
