"""The name of a checkpoint tells the env steps behind it, and so where a run that goes on began."""

from __future__ import annotations

import re
from pathlib import Path

_STEP_FILE = re.compile(r"step_(\d+)\.pt")


def step_path(folder: Path, env_steps: int) -> Path:
    """Where the checkpoint of so many env steps lies in a folder of checkpoints."""
    return folder / f"step_{env_steps:012d}.pt"


def steps_of(checkpoint: Path | None) -> int:
    """The env steps in a checkpoint's name; 0 for none, or if it was given another name."""
    match = None if checkpoint is None else _STEP_FILE.fullmatch(checkpoint.name)
    return int(match[1]) if match else 0


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """Env steps and path of every checkpoint in a folder that may not exist."""
    return [
        (int(match[1]), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _STEP_FILE.fullmatch(path.name))
    ]
