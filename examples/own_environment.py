"""Train IMPALA on an environment of your own, in several processes.

python examples/own_environment.py
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

import repertory


class Corridor(gymnasium.Env[Any, Any]):
    """Walk ten steps to the right; every step costs a little."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin at the left end."""
        super().reset(seed=seed)
        self.place = 0
        return np.array([0.0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move left or right; the right end terminates, 50 steps are the environment's limit."""
        self.place = max(0, self.place + (1 if action == 1 else -1))
        arrived = self.place == 10
        observation = np.array([self.place / 10], np.float32)
        return observation, 1.0 if arrived else -0.01, arrived, False, {}


if __name__ == "__main__":  # processes are new, and import this file again
    result = repertory.train(
        repertory.IMPALAConfig(
            env=Corridor,
            max_episode_steps=50,
            num_actors=2,
            num_envs=4,
            total_steps=40_000,
            unroll_length=10,
            learning_rate=2e-3,
        )
    )
    print(f"mean return {result.episode_return_mean}, optimum 0.91")
