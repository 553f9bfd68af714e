"""Small environments whose optimal return is known, so that learning can be tested in seconds.

What is here: five tasks, each of which breaks one thing an agent may do wrong. Importing this
module registers them with Gymnasium as `repertory/Bandit-v0` and so on, and under their bare names
for ids of the form `repertory.environments.toy:Bandit-v0`. What is not here: anything hard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Result = tuple[NDArray[Any], float, bool, bool, dict[str, Any]]


class Bandit(gymnasium.Env[NDArray[np.float32], Any]):
    """Arms that pay 1 with a chance of their own; an episode is one pull.

    Nothing but the choice of an action can be wrong. The observation is always 1.

    Optimal return: the highest of `chances`, 0.8 by default.

    Args:
        chances: Of each arm, to pay 1 rather than 0.
    """

    def __init__(self, chances: Sequence[float] = (0.2, 0.8, 0.4)) -> None:
        self.chances = tuple(chances)
        self.observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(len(self.chances))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Offer the arms."""
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> Result:
        """Pull an arm; the episode ends."""
        pays = self.np_random.random() < self.chances[action]
        return np.ones(1, np.float32), float(pays), True, False, {}


class Chain(gymnasium.Env[NDArray[np.float32], Any]):
    """A row of places; leaving (action 0) pays a little at once, walking on (1) costs a little.

    The last place pays 1. An agent that looks only at the next reward leaves; credit has to travel
    back over the whole row. The observation marks the place, one of `length`.

    Optimal return: `1 - length * step_cost`, 0.84 by default; leaving at once pays `exit_reward`.

    Args:
        length: Env steps from the first place to the prize.
        step_cost: Price of walking on.
        exit_reward: What leaving pays, at any place.
    """

    def __init__(self, length: int = 8, step_cost: float = 0.02, exit_reward: float = 0.1) -> None:
        self.length = length
        self.step_cost = step_cost
        self.exit_reward = exit_reward
        self.observation_space = spaces.Box(0.0, 1.0, (length,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._place = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Go back to the first place."""
        super().reset(seed=seed)
        self._place = 0
        return self._observation(), {}

    def step(self, action: Any) -> Result:
        """Leave, or walk on."""
        if action == 0:
            return self._observation(), self.exit_reward, True, False, {}
        self._place += 1
        arrived = self._place == self.length
        reward = float(arrived) - self.step_cost
        return self._observation(), reward, arrived, False, {}

    def _observation(self) -> NDArray[np.float32]:
        """The place; none is marked where the prize is."""
        observation = np.zeros(self.length, np.float32)
        observation[self._place : self._place + 1] = 1.0
        return observation


class Catch(gymnasium.Env[NDArray[np.uint8], Any]):
    """A ball falls down a field of 10 rows and 5 columns; be where it lands.

    The smallest task with a picture: one channel of bytes, with the ball and, in the lowest row,
    the paddle. Actions move the paddle left, not at all, or right. The reward is 1 or -1 as the
    ball arrives, after 9 env steps.

    Optimal return: 1.

    Reference:
        The field and the rules are those of Mnih et al. 2014, "Recurrent Models of Visual
        Attention", section 4.2, made smaller.
    """

    ROWS = 10
    COLUMNS = 5

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (1, self.ROWS, self.COLUMNS), np.uint8)
        self.action_space = spaces.Discrete(3)
        self._ball = (0, 0)
        self._paddle = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Drop a ball somewhere; the paddle waits in the middle."""
        super().reset(seed=seed)
        self._ball = (0, int(self.np_random.integers(self.COLUMNS)))
        self._paddle = self.COLUMNS // 2
        return self._observation(), {}

    def step(self, action: Any) -> Result:
        """Move the paddle; the ball falls by a row."""
        self._paddle = min(max(self._paddle + int(action) - 1, 0), self.COLUMNS - 1)
        row, column = self._ball
        self._ball = (row + 1, column)
        if row + 1 < self.ROWS - 1:
            return self._observation(), 0.0, False, False, {}
        return self._observation(), 1.0 if column == self._paddle else -1.0, True, False, {}

    def _observation(self) -> NDArray[np.uint8]:
        field = np.zeros((1, self.ROWS, self.COLUMNS), np.uint8)
        field[0, self.ROWS - 1, self._paddle] = 255
        field[0, self._ball[0], self._ball[1]] = 255
        return field


class Memory(gymnasium.Env[NDArray[np.float32], Any]):
    """A cue is shown at the beginning and asked for at the end; nothing is shown between.

    The observation marks the cue, 0 or 1 with equal chance, at t = 0, and nothing after. The action
    at t = `delay` earns 1 if it equals the cue, and ends the episode.

    Optimal return: 1; without a memory, 0.5.

    Args:
        delay: Env steps between the cue and the answer.
    """

    def __init__(self, delay: int = 4) -> None:
        self.delay = delay
        self.observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._cue = 0
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Show a new cue."""
        super().reset(seed=seed)
        self._cue = int(self.np_random.integers(2))
        self._steps = 0
        return (np.arange(2) == self._cue).astype(np.float32), {}

    def step(self, action: Any) -> Result:
        """Wait, or answer."""
        asked = self._steps == self.delay
        self._steps += 1
        reward = float(asked and action == self._cue)
        return np.zeros(2, np.float32), reward, asked, False, {}


class Truncation(gymnasium.Env[NDArray[np.float32], Any]):
    """Pays 1 every env step, for ever; only a time limit cuts it, after 20 env steps by default.

    The observation is always 1, so that no critic can see the limit come: its value has to be that
    of the task without one. Whoever takes the limit for an end learns less.

    Optimal value: `1 / (1 - discount)` everywhere. Optimal return: the time limit, `k` with
    `max_episode_steps=k`.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Go on as before."""
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> Result:
        """Pay, whatever the action."""
        return np.ones(1, np.float32), 1.0, False, False, {}


for _id in ("Bandit-v0", "Chain-v0", "Catch-v0", "Memory-v0", "Truncation-v0"):
    for _prefix in ("repertory/", ""):
        gymnasium.register(
            id=f"{_prefix}{_id}",
            entry_point=f"{__name__}:{_id.removesuffix('-v0')}",
            max_episode_steps=20 if _id == "Truncation-v0" else None,
        )
