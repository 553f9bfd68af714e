"""An environment that only waits: what a simulator on cores of its own looks like from here.

`sleepy:Sleepy-v0` gives pictures of four stacked frames of 84 x 84 bytes and takes `milliseconds`
of sleep an env step.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Sleepy(gymnasium.Env[Any, Any]):
    """See the module."""

    def __init__(self, milliseconds: float) -> None:
        """The picture is always the same."""
        self.observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
        self.action_space = spaces.Discrete(4)
        self._seconds = milliseconds / 1000
        self._picture = np.zeros((4, 84, 84), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """The picture."""
        return self._picture, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Sleep."""
        time.sleep(self._seconds)
        return self._picture, 0.0, False, False, {}


gymnasium.register("Sleepy-v0", Sleepy, max_episode_steps=1000)
