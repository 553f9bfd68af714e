"""Small environments that each show one kind of fault; shared by tests of every layer.

They are plain classes with plain arguments, so that they travel to other processes. A fault that is
to strike one column only is tied to that column's seed.
"""

import os
import random
import signal
import sys
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Counter(gymnasium.Env):
    """The observation is the number of the env step, each pays 1, the k-th ends the episode."""

    def __init__(self, length: int = 3, end: str = "term") -> None:
        self.length = length
        self.end = end
        self.observation_space = spaces.Box(0, 1000, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.steps = 0

    def observation(self) -> Any:
        return np.full(1, self.steps, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observation(), {}

    def step(self, action):
        self.steps += 1
        ends = self.steps >= self.length
        terminated = ends and self.end in ("term", "both")
        truncated = ends and self.end in ("trunc", "both")
        return self.observation(), self.reward(), terminated, truncated, {}

    def reward(self) -> Any:
        return 1.0


class SeedCounter(Counter):
    """A counter whose episodes are as long as its seed says: columns of different lengths."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.length = seed
        return super().reset(seed=seed, options=options)


class Alias(SeedCounter):
    """Hands out one array again and again, and writes to it."""

    def __init__(self, length: int = 3, end: str = "term") -> None:
        super().__init__(length, end)
        self.buffer = np.zeros(1, np.float32)

    def observation(self) -> Any:
        self.buffer[0] = self.steps
        return self.buffer


class Endless(Counter):
    """Base of the faults below: never ends, and knows whether its seed is the chosen one."""

    def __init__(self, at: int = 3, on_seed: int | None = None) -> None:
        super().__init__(length=sys.maxsize)
        self.at = at
        self.on_seed = on_seed
        self.is_chosen = on_seed is None

    def reset(self, *, seed=None, options=None):
        if seed is not None and self.on_seed is not None:
            self.is_chosen = seed == self.on_seed
        return super().reset(seed=seed, options=options)

    @property
    def is_due(self) -> bool:
        return self.is_chosen and self.steps == self.at


class Raise(Endless):
    """Raises `ValueError("boom")` in its n-th env step."""

    def observation(self):
        if self.is_due:
            raise ValueError("boom")
        return super().observation()


class Hang(Endless):
    """Stays in its n-th env step for ever."""

    def observation(self):
        while self.is_due:
            time.sleep(3600)
        return super().observation()


class Die(Endless):
    """Kills its own process in its n-th env step."""

    def __init__(self, at: int = 3, on_seed: int | None = None, by: int = signal.SIGKILL) -> None:
        super().__init__(at, on_seed)
        self.by = by

    def observation(self):
        if self.is_due:
            os.kill(os.getpid(), self.by)
        return super().observation()


class Pace(Endless):
    """Takes as long for an env step as its seed says; the observation also says which seed."""

    def __init__(self, pauses: dict[int, float]) -> None:
        super().__init__()
        self.pauses = pauses
        self.observation_space = spaces.Box(0, sys.maxsize, (2,), np.float64)
        self.place = 0

    def reset(self, *, seed=None, options=None):
        if seed in self.pauses:
            self.place = list(self.pauses).index(seed)
        return super().reset(seed=seed, options=options)

    def observation(self):
        return np.array([self.steps, self.place], np.float64)

    def step(self, action):
        time.sleep(list(self.pauses.values())[self.place])
        return super().step(action)


class SlowInit(Counter):
    """Takes its time to be built."""

    def __init__(self, seconds: float, length: int = 3) -> None:
        time.sleep(seconds)
        super().__init__(length)


class ShapeShift(Endless):
    """Observes four numbers, and five from its n-th env step on."""

    def __init__(self, at: int = 3, on_seed: int | None = None) -> None:
        super().__init__(at, on_seed)
        self.observation_space = spaces.Box(-1, 1, (4,), np.float32)

    def observation(self):
        return np.zeros(5 if self.is_due else 4, np.float32)


class NaN(Endless):
    """Puts `value` (NaN unless told otherwise) into the n-th observation or reward, once."""

    def __init__(
        self,
        at: int = 3,
        on_seed: int | None = None,
        where: str = "reward",
        value: float = float("nan"),
    ) -> None:
        super().__init__(at, on_seed)
        self.where = where
        self.value = value

    def observation(self):
        if self.is_due and self.where == "observation":
            return np.full(1, self.value, np.float32)
        return super().observation()

    def reward(self):
        return self.value if self.is_due and self.where == "reward" else 1.0


class Constant(gymnasium.Env):
    """Always observes `value` in the space given, whatever type `value` has."""

    def __init__(self, space: spaces.Space, value: Any, reward: Any = 0.0) -> None:
        self.observation_space = space
        self.action_space = spaces.Discrete(2)
        self.value = value
        self.reward = reward

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.value, {}

    def step(self, action):
        return self.value, self.reward, False, False, {}


class Actions(gymnasium.Env):
    """Observes the action it was given, after asserting that its space contains it."""

    def __init__(self, action_space: spaces.Space) -> None:
        self.observation_space = spaces.Box(-100, 100, (1,), np.float32)
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return np.full(1, action, np.float32), 0.0, False, False, {}


class Draws(gymnasium.Env):
    """Observes four random numbers: NumPy's global, its own, Python's and torch's."""

    def __init__(self, with_torch: bool = False) -> None:
        self.observation_space = spaces.Box(0, 1, (4,), np.float64)
        self.action_space = spaces.Discrete(2)
        self.with_torch = with_torch
        if with_torch:
            import torch

            self.torch = torch

    def observation(self):
        drawn = self.torch.rand(()).item() if self.with_torch else 0.0
        return np.array([np.random.random(), self.np_random.random(), random.random(), drawn])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation(), {}

    def step(self, action):
        return self.observation(), 0.0, False, False, {}


class Whims(gymnasium.Env):
    """Observes a random action of its own choice, drawn from its action space."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 1000, (1,), np.float32)
        self.action_space = spaces.Discrete(1000)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.full(1, self.action_space.sample(), np.float32), 0.0, False, False, {}


class Scenarios(Counter):
    """Has ten scenarios, and takes no seed that names another."""

    def reset(self, *, seed=None, options=None):
        if seed is not None and seed > 9:
            raise ValueError(f"there is no scenario {seed}")
        return super().reset(seed=seed, options=options)


SPACE_ZOO = {
    "discrete that starts at -1": spaces.Discrete(3, start=-1),
    "multi-discrete": spaces.MultiDiscrete([2, 3]),
    "multi-binary": spaces.MultiBinary(3),
    "box with odd and half-infinite bounds": spaces.Box(
        np.array([-3.0, 0.5], np.float32), np.array([7.0, np.inf], np.float32)
    ),
    "dict": spaces.Dict(image=spaces.Box(0, 255, (8, 8, 3), np.uint8), speed=spaces.Box(-1, 1)),
    "tuple": spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1)]),
    "channels first": spaces.Box(0, 255, (3, 64, 64), np.uint8),
    "channels last": spaces.Box(0, 255, (64, 64, 3), np.uint8),
}
"""One space of every kind that an adapter or a model meets."""
