"""What a run must not leave behind: processes, threads, files in shared memory, descriptors."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass
class Leftovers:
    """What there was at one moment."""

    children: set[int]
    threads: set[int]
    shared_files: set[str]
    descriptors: int

    @classmethod
    def now(cls) -> Leftovers:
        """Look around."""
        gc.collect()
        process = psutil.Process()
        shared = Path("/dev/shm")
        return cls(
            children={child.pid for child in process.children(recursive=True)},
            threads={thread.ident or 0 for thread in threading.enumerate()},
            shared_files={path.name for path in shared.iterdir()} if shared.is_dir() else set(),
            descriptors=process.num_fds() - len(_standing_processes() - {None}),
        )

    def check(self, within_seconds: float = 20.0, *, descriptors: bool = True) -> None:
        """Fail unless everything that came since has gone again.

        The first start of a process starts two of multiprocessing's own, which stay by design: the
        resource tracker and the server that makes children. Each has one descriptor here, and one
        more is allowed, for what a library opens once and keeps.

        Args:
            within_seconds: How long to wait for it; other tests may run beside this one.
            descriptors: Count file descriptors too; shared memory that a test still holds has some.
        """
        deadline = time.monotonic() + within_seconds
        while (more := self._more(descriptors)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not more, more

    def _more(self, descriptors: bool) -> dict[str, object]:
        now = Leftovers.now()
        standing = _standing_processes()
        found: dict[str, object] = {
            "children": [pid for pid in now.children - self.children if pid not in standing],
            "threads": now.threads - self.threads,
            "shared_files": now.shared_files - self.shared_files,
            "descriptors": descriptors and max(0, now.descriptors - self.descriptors - 1),
        }
        return {name: value for name, value in found.items() if value}


def _standing_processes() -> set[int | None]:
    from multiprocessing import forkserver, resource_tracker

    return {resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid}
