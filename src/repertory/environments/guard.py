"""One column's environment, held to what it declares.

What is here: `Guard`, which checks and copies all that an environment returns and names the culprit
when something fails; `SingleColumn`, which gives a vector environment of one column the shape of a
single environment; `OwnProcess`, for an environment that has a process to itself. What is not here:
how environments are found and how columns step together (`gymnasium`).
"""

from __future__ import annotations

import math
import random
import sys
import traceback
import warnings
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from repertory.environments.base import EnvironmentFailure, EnvironmentRefused
from repertory.spawning import end_with_the_parent, leave_signals_to_the_parent

_RESULT = ("an observation", "a reward", "terminated", "truncated", "info")
_FLOAT32_MAX = float(np.finfo(np.float32).max)

FAILURE = "failure"
"""Key under which `OwnProcess` reports a failure in `info`."""

Result = tuple[NDArray[Any], float, bool, bool, dict[str, Any]]


class Guard(gymnasium.Wrapper[NDArray[Any], Any, Any, Any]):
    """An environment with supported spaces, whose faults carry a name, a column and an env step.

    Observations are copied, so that an environment may re-use its buffer; they are cast to the
    space's dtype where that changes nothing but precision. Actions count from 0, whatever the
    space's `start`. `info` is dropped: nothing downstream reads it.

    Args:
        env: The environment; `Box` observations, `Discrete` actions.
        name: What it is called in messages.
        column: Its index in the vector environment, for messages.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], name: str, column: int) -> None:
        super().__init__(env)
        assert isinstance(env.action_space, gymnasium.spaces.Discrete)
        assert isinstance(env.observation_space, gymnasium.spaces.Box)
        self.action_space = gymnasium.spaces.Discrete(int(env.action_space.n))
        self._first_action = env.action_space.start
        self._space = env.observation_space
        # A byte image cannot leave its bounds, and infinite bounds cannot be left.
        self._watches_bounds = not _spans_its_dtype(env.observation_space)
        self._name = name
        self._column = column
        self._num_steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Reset; with a seed, the environment's action space is seeded as well.

        Raises:
            EnvironmentFailure: The environment raised or returned something else than it declares.
        """
        if seed is not None:
            # Some environments draw random actions of their own, from this space's generator.
            self.env.action_space.seed(seed)
        try:
            observation, _ = self.env.reset(seed=seed, options=options)
        except Exception as error:
            raise self._failure(f"reset: {type(error).__name__}: {error}") from error
        return self._checked_observation(observation), {}

    def step(self, action: Any) -> Result:
        """Play one env step; `action` counts from 0.

        Raises:
            EnvironmentFailure: The environment raised or returned something else than it declares.
        """
        self._num_steps += 1
        try:
            result = self.env.step(action + self._first_action)
        except Exception as error:
            raise self._failure(f"{type(error).__name__}: {error}") from error
        if not isinstance(result, tuple) or len(result) != len(_RESULT):
            raise self._failure(f"step has to return {', '.join(_RESULT)}")
        observation, reward, terminated, truncated, _ = result
        return (
            self._checked_observation(observation),
            self._checked_reward(reward),
            self._checked_flag("terminated", terminated),
            self._checked_flag("truncated", truncated),
            {},
        )

    def _checked_observation(self, observation: Any) -> NDArray[Any]:
        """A copy of `observation` with the space's own shape and dtype."""
        try:
            array = np.asarray(observation)
        except ValueError as error:  # a list of lists of different lengths
            raise self._failure(f"the observation is no array: {error}") from error
        if array.shape != self._space.shape:
            raise self._failure(
                f"expected an observation of shape {self._space.shape}, got {array.shape}"
            )
        copy = self._cast(array)
        if self._watches_bounds and not self._inside(copy):
            self._watches_bounds = False
            # The column is left out, so that Python shows the same warning only once a process.
            warnings.warn(
                f"environment {self._name} returned an observation outside of its space's bounds; "
                "it is used as it is",
                stacklevel=2,
            )
        return copy

    def _cast(self, array: NDArray[Any]) -> NDArray[Any]:
        wanted = self._space.dtype
        if array.dtype == wanted:
            return array.copy()
        # Rounding a float64 to a float32 is what users expect. Any other cast has to keep every
        # value: a float in a space of bytes would be cut to its integer part.
        if array.dtype.kind == "f" and np.issubdtype(wanted, np.floating):
            return array.astype(wanted)
        if array.dtype.kind in "biuf":
            with np.errstate(invalid="ignore"):
                copy = array.astype(wanted)
            if np.array_equal(copy, array):
                return copy
        raise self._failure(
            f"expected an observation of dtype {wanted}, got {array.dtype} with values that "
            f"{wanted} does not hold"
        )

    def _inside(self, array: NDArray[Any]) -> bool:
        # A NaN is on neither side of a bound; what becomes of it is the learner's business.
        return not bool(np.any((array < self._space.low) | (array > self._space.high)))

    def _checked_reward(self, reward: SupportsFloat) -> float:
        array = np.asarray(reward)
        if array.size != 1 or array.dtype.kind not in "biuf":
            raise self._failure(
                f"expected one number as reward, got {type(reward).__name__} of shape {array.shape}"
            )
        number = float(array.item())
        if _FLOAT32_MAX < abs(number) < math.inf:
            raise self._failure(f"the reward {number} is more than a float32 holds")
        return number

    def _checked_flag(self, name: str, value: Any) -> bool:
        array = np.asarray(value)
        if array.size != 1 or array.dtype.kind not in "biu":
            raise self._failure(f"expected true or false as {name}, got {value!r}")
        return bool(array.item())

    def _failure(self, what: str) -> EnvironmentFailure:
        where = f"environment {self._name}, column {self._column}, env step {self._num_steps}"
        return EnvironmentFailure(f"{where}: {what}")


def _spans_its_dtype(space: gymnasium.spaces.Box) -> bool:
    """Whether no value of the space's dtype lies outside of its bounds."""
    if np.issubdtype(space.dtype, np.floating):
        lowest, highest = -np.inf, np.inf
    elif np.issubdtype(space.dtype, np.bool_):
        return True
    else:
        limits = np.iinfo(space.dtype)  # type: ignore[type-var]  # integers are all that is left
        lowest, highest = limits.min, limits.max
    return bool((space.low == lowest).all() and (space.high == highest).all())


class SingleColumn(gymnasium.Env[NDArray[Any], Any]):
    """A vector environment of one column, as a single environment.

    This is how environments that exist only as vector environments are used: one of them a column.
    Several columns in one could not be held back one by one: where SAME_STEP mode has already begun
    the next episode, the other columns would have to wait for the tick that only resets.

    Args:
        vector: In NEXT_STEP or SAME_STEP mode.
        name: What it is called in messages.

    Raises:
        EnvironmentRefused: More than one column, or another autoreset mode.
    """

    def __init__(self, vector: VectorEnv[Any, Any, Any], name: str) -> None:
        declared = vector.metadata.get("autoreset_mode")
        try:
            mode = AutoresetMode(declared)
        except ValueError:
            mode = AutoresetMode.DISABLED
        if mode is AutoresetMode.DISABLED:
            raise EnvironmentRefused(
                f"{name} is a vector environment with autoreset mode {declared}; supported are "
                "NEXT_STEP and SAME_STEP"
            )
        if vector.num_envs != 1:
            raise EnvironmentRefused(
                f"{name} returned a vector environment of {vector.num_envs} columns; return one "
                "column, it is called once for each"
            )
        base = vector.unwrapped
        if isinstance(base, SyncVectorEnv):
            # It hands out the final observation without a copy, after the reset that may have
            # overwritten it.
            base.envs = [
                gymnasium.wrappers.TransformObservation(env, np.array, None) for env in base.envs
            ]
        self.metadata = vector.metadata
        self.render_mode = vector.render_mode
        self.observation_space = vector.single_observation_space
        self.action_space = vector.single_action_space
        self._vector = vector
        self._resets_at_once = mode is AutoresetMode.SAME_STEP
        self._first_observation: NDArray[Any] | None = None
        self._waits_for_tick = False
        self._last_actions = np.zeros(1, vector.action_space.dtype)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Begin an episode; at the end of another one, the one that autoreset has begun."""
        first, self._first_observation = self._first_observation, None
        waits, self._waits_for_tick = self._waits_for_tick, False
        if seed is None and first is not None:
            return first, {}
        if seed is None and waits:
            observations, *_ = self._vector.step(self._last_actions)  # the action is ignored
        else:
            observations, _ = self._vector.reset(seed=seed, options=options)
        return np.array(observations[0]), {}

    def step(self, action: Any) -> Result:
        """Play one env step; at an episode's end the observation is the final one."""
        self._last_actions = np.full_like(self._last_actions, action)
        observations, rewards, terminated, truncated, infos = self._vector.step(self._last_actions)
        observation = np.array(observations[0])
        if terminated[0] or truncated[0]:
            if self._resets_at_once:
                if "final_obs" not in infos:
                    raise LookupError("an episode ended without a final_obs in info")
                self._first_observation = observation
                observation = np.array(infos["final_obs"][0])
            else:
                self._waits_for_tick = True
        return observation, float(rewards[0]), bool(terminated[0]), bool(truncated[0]), {}

    def render(self) -> Any:
        """Picture of the column, or None."""
        pictures = self._vector.render()
        return pictures[0] if pictures else None

    def close(self) -> None:
        """Close the vector environment."""
        self._vector.close()


class OwnProcess(gymnasium.Wrapper[NDArray[Any], Any, Any, Any]):
    """An environment alone in its process.

    It seeds the generators that belong to the process rather than to the environment (`random`,
    NumPy's global one, torch's where torch is loaded), since environments draw from them and
    processes would otherwise all draw the same or none the same twice. It leaves Ctrl-C to the
    parent. It reports a failure in `info`, with the traceback as text, since exceptions with
    arguments of their own do not travel between processes.

    Args:
        env: A guarded environment.
    """

    def __init__(self, env: Guard) -> None:
        super().__init__(env)
        leave_signals_to_the_parent()
        end_with_the_parent()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Reset; a failure is reported instead of raised."""
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed)
            if "torch" in sys.modules:
                sys.modules["torch"].manual_seed(seed)
        try:
            return self.env.reset(seed=seed, options=options)
        except EnvironmentFailure as failure:
            return self._blank(), {FAILURE: _with_traceback(failure)}

    def step(self, action: Any) -> Result:
        """Play one env step; a failure is reported instead of raised."""
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
        except EnvironmentFailure as failure:
            return self._blank(), 0.0, False, False, {FAILURE: _with_traceback(failure)}
        return observation, float(reward), terminated, truncated, info

    def _blank(self) -> NDArray[Any]:
        space = self.observation_space
        return np.zeros(space.shape or (), space.dtype)


def _with_traceback(failure: EnvironmentFailure) -> str:
    """The message of a failure, followed by the traceback of what caused it."""
    if failure.__cause__ is None:
        return str(failure)
    trace = "".join(traceback.format_exception(failure.__cause__))
    return f"{failure}\n\nTraceback in the environment's process:\n{trace}"
