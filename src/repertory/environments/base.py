"""The contract between an environment and the rest of the pipeline.

What is here: one call of a vector environment (`Tick`), what an environment says of itself
(`EnvironmentSpec`), the protocol an adapter keeps (`VectorEnvironment`) and the book-keeping of
whole episodes (`EpisodeStatistics`). What is not here: any concrete environment.

The contract is Gymnasium's NEXT_STEP autoreset mode with a `valid` mask. When an episode ends at
tick t, the observation of tick t is the true final one; tick t + 1 ignores its action, returns the
first observation of the next episode with reward 0, and is marked `valid = False`. Nothing is
learned from an invalid tick and nothing counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import gymnasium
import numpy as np
from numpy.typing import NDArray

ImageLayout = Literal["none", "chw", "hwc"]


class EnvironmentFailure(RuntimeError):
    """An environment raised, or broke its own declaration; the message names which and when."""


class EnvironmentLost(EnvironmentFailure):
    """A process of the environment has ended: nothing is wrong with whoever played it."""

    loses_role = True  # see `runtimes.base.is_loss`


class EnvironmentRefused(ValueError):
    """An environment cannot be used here; one line says why and what would do."""


@dataclass(frozen=True)
class EnvironmentConfig:
    """Which environment, and under which rules.

    Attributes:
        id: A Gymnasium id (`CartPole-v1`, `module:Env-v0`, `ALE/Pong-v5`) or a callable that
            returns a `gymnasium.Env` (picklable where roles are processes).
        kwargs: Keyword arguments for the environment's constructor.
        protocol: Name of the rules a game is played under (`dqn`, `machado`, `v5`, `a3c42`); None
            means what the id itself stands for. Only Atari games have more than one.
        vectorization: `sync` steps the columns one after the other in this process, `async` gives
            each column a spawned process of its own. Atari games ignore it: they are native.
        image_layout: `auto`, or where the channels of an image observation stand.
        max_episode_steps: Truncate episodes after so many env steps; None keeps the id's limit.
    """

    id: str | Callable[..., gymnasium.Env[Any, Any]]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    protocol: str | None = None
    vectorization: Literal["sync", "async"] = "sync"
    image_layout: Literal["auto", "chw", "hwc"] = "auto"
    max_episode_steps: int | None = None


@dataclass(frozen=True)
class EnvironmentSpec:
    """What an environment says of itself; enough to build a model and to read its numbers.

    Attributes:
        name: The id, or the callable's `module:qualname`.
        protocol: The rules in force, by name (`default` where there is only one set).
        observation_space: Space of one column's observation.
        action_space: Space of one column's action, as the environment wants it.
        action_repeat: Emulator frames a single env step takes (1 where there is no emulator).
        repeat_action_probability: Chance of each frame that the emulator repeats the last action
            (sticky actions).
        frame_stack: How many single frames lie along the first axis of an observation; 1 where
            observations are not stacked.
        image_layout: Where the channels of an image observation stand; `none` for other shapes.
        max_episode_steps: Env steps after which the environment itself truncates; None where there
            is no limit or none is known.
    """

    name: str
    protocol: str
    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    action_repeat: int = 1
    repeat_action_probability: float = 0.0
    frame_stack: int = 1
    image_layout: ImageLayout = "none"
    max_episode_steps: int | None = None


@dataclass
class Tick:
    """What one call of a vector environment returns, one entry a column.

    Shapes: B columns.

    Attributes:
        observations: [B, ...] in the space's dtype; where an episode ends, the true final one.
        rewards: [B] float32, raw.
        terminated: [B] bool; no future is to be expected. True on a lost life as well, where the
            protocol signals lives: the next tick is then an ordinary, valid one.
        truncated: [B] bool; the episode was cut and its future still has a value. Never true
            together with `terminated`: termination wins.
        valid: [B] bool; False only on the tick that merely resets.
        episode_returns: [B] float64; raw, undiscounted return of the whole episode that ended at
            this tick (whole game, all lives). Meaningless where `episode_lengths` is 0.
        episode_lengths: [B] int64; length in env steps of that episode, 0 where none ended.
    """

    observations: NDArray[Any]
    rewards: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    valid: NDArray[np.bool_]
    episode_returns: NDArray[np.float64]
    episode_lengths: NDArray[np.int64]


class VectorEnvironment(Protocol):
    """B environments that step together, in NEXT_STEP mode.

    An adapter copies: arrays it returns are never written again by the environment.
    """

    spec: EnvironmentSpec
    num_envs: int

    def reset(self) -> NDArray[Any]:
        """Start every column afresh from its seed and return the first observations, [B, ...]."""
        ...

    def step(self, actions: NDArray[Any]) -> Tick:
        """Play one tick. `actions` are as the policy drew them: `Discrete` ones count from 0.

        Raises:
            EnvironmentFailure: A column raised or broke its declaration; names column and step.
        """
        ...

    def close(self) -> None:
        """Release processes and memory. Harmless when called twice."""
        ...


class EpisodeStatistics:
    """Returns and lengths of whole episodes, from raw rewards; reset ticks are counted nowhere."""

    def __init__(self, num_envs: int) -> None:
        """Start with every column at the beginning of an episode."""
        self._returns = np.zeros(num_envs, np.float64)
        self._lengths = np.zeros(num_envs, np.int64)

    def record(
        self,
        rewards: NDArray[Any],
        valid: NDArray[np.bool_],
        ended: NDArray[np.bool_],
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Count one tick.

        Args:
            rewards: [B], raw.
            valid: [B]; False on reset ticks, which add nothing.
            ended: [B]; where the whole episode (the game, not a life) ended at this tick.

        Returns:
            `episode_returns` and `episode_lengths` as `Tick` wants them, both [B].
        """
        self._returns += np.where(valid, rewards, 0.0)
        self._lengths += valid
        returns = np.where(ended, self._returns, 0.0)
        lengths = np.where(ended, self._lengths, 0)
        self._returns[ended] = 0.0
        self._lengths[ended] = 0
        return returns, lengths
