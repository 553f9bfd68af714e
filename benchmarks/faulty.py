"""CartPole that does something wrong once, when a file says so.

The environment of `benchmarks/faults.py`: `faulty:Faulty-v0` looks for the file `fault` in the
folder that the variable FAULT_FOLDER names, takes it away (so that one column of one role finds
it), and does what stands in it.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path
from typing import Any

import gymnasium

LOOK_EVERY = 20  # steps


class Faulty(gymnasium.Wrapper[Any, Any, Any, Any]):
    """See the module."""

    def __init__(self) -> None:
        """An ordinary CartPole at first."""
        super().__init__(gymnasium.make("CartPole-v1"))
        self._steps = 0
        self._file = Path(os.environ.get("FAULT_FOLDER", "/nowhere")) / "fault"

    def step(self, action: Any) -> Any:
        """One step, in which something may be wrong."""
        observation, reward, *rest = self.env.step(action)
        self._steps += 1
        match self._due() if self._steps % LOOK_EVERY == 0 else None:
            case "raise":
                raise ValueError("boom")
            case "hang":
                time.sleep(3600)
            case "exit":
                os._exit(3)
            case "nan reward":
                reward = math.nan
            case "nan observation":
                observation = observation * math.nan
        return (observation, reward, *rest)

    def _due(self) -> str | None:
        """What to do, for the one that comes first."""
        with contextlib.suppress(OSError):
            taken = self._file.with_name(f"taken-{os.getpid()}")
            self._file.rename(taken)
            return taken.read_text()
        return None


gymnasium.register("Faulty-v0", Faulty, max_episode_steps=500)
