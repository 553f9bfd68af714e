"""What the scripts beside this one share: where figures come from, how they are written down."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from repertory import metrics

RESULTS = Path(__file__).parent / "results"


def say(line: str) -> None:
    """Print at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def origin(script: str) -> dict[str, Any]:
    """What belongs to any figure: when, by which command and revision, and where.

    Args:
        script: The script's `__file__`.
    """
    command = shlex.join(["python", f"benchmarks/{Path(script).name}", *sys.argv[1:]])
    return {"command": elsewhere(command), **metrics.origin()}


def elsewhere(command: str) -> str:
    """A command as it would be given anywhere: of absolute paths only the last part."""
    words = shlex.split(command)
    return shlex.join(Path(word).name if word.startswith("/") else word for word in words)


def write(output: Path, content: dict[str, Any]) -> None:
    """Write a result and say where it is."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(content, indent=2) + "\n")
    say(f"written to {output}")


def as_words(flags: Sequence[str]) -> list[str]:
    """Flags without dashes, `network=a3c` or `epsilon-inside-root`, as a command line has them."""
    words = []
    for flag in flags:
        name, equals, value = flag.partition("=")
        words += [f"--{name}", value] if equals else [f"--{name}"]
    return words
