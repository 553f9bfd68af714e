"""Programs that tests run in a process of their own, with the package of this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_program(
    *words: str, timeout: float = 50.0, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python with `words` (`-c CODE ...`, `-m MODULE ...`), in a folder if one is given.

    The child finds modules where this process does, installed or not.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
        cwd=folder,
    )
