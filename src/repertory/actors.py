"""An actor: T ticks of B environments become one trajectory.

What is here: playing with frozen parameters and recording what was seen, done and said. What is
not here: where parameters come from and where trajectories go; that is the algorithm's business.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from gymnasium.spaces import Discrete
from torch import Tensor, nn

from repertory import environments
from repertory.config import NotFinite, RunConfig
from repertory.environments.base import EnvironmentSpec, VectorEnvironment
from repertory.metrics import Record
from repertory.models.base import Model, Remembers, remember
from repertory.progress import Stopwatch
from repertory.runtimes.base import RoleContext
from repertory.seeds import Stream, generator_for, seed_for, seed_global_generators
from repertory.step_names import steps_of
from repertory.trajectories import CoreState, Trajectory, TrajectorySpec

_REPORT_SECONDS = 1.0
_UNROLLS_WITHOUT_NUMBERS = 10  # in a row, after which nothing good is to be hoped for


class Actor:
    """Plays a vector environment with a model it only reads."""

    def __init__(
        self,
        environment: VectorEnvironment,
        model: nn.Module,
        spec: TrajectorySpec,
        generator: torch.Generator,
        stopwatch: Stopwatch,
        not_finite: NotFinite = "stop",
    ) -> None:
        """Reset the environment and stand before its first tick.

        Args:
            environment: B columns; owned by the actor from now on.
            model: Its parameters may change between unrolls, never within one.
            spec: What a trajectory of this environment and model looks like.
            generator: Source of every action drawn; on the CPU.
            stopwatch: Where the seconds in `environment` and `inference` are counted.
            not_finite: What a reward or an observation that is not finite does: ends the run, or
                makes its transition invalid, as a tick that merely reset is.

        Raises:
            FloatingPointError: A first observation is not finite.
        """
        self._environment = environment
        self._model: Model = model  # type: ignore[assignment]
        self._generator = generator
        self._stopwatch = stopwatch
        self._remembers = isinstance(model, Remembers)  # asked once: it is no cheap question
        self._device = next(model.parameters()).device
        self._reported = time.monotonic()
        self._trajectory = spec.allocate()
        with stopwatch("environment"):
            first = environment.reset()
        arrived = self._trajectory.observations[-1]
        arrived.copy_(torch.from_numpy(first))
        self._core_state = self._model.initial_core_state(environment.num_envs)
        self._resets = torch.zeros(environment.num_envs, dtype=torch.bool)
        self._ticks = 0
        bad = self._not_finite_in("first observation", arrived, 0)
        if bad is not None and not_finite == "stop":
            raise FloatingPointError(bad)
        self._not_finite = not_finite
        self._made_up = _not_finite(arrived)  # columns that stand on no real observation
        arrived[self._made_up] = 0
        self._left_out = LeftOut(bad or "")

    @classmethod
    def create(
        cls,
        config: RunConfig,
        environment: EnvironmentSpec,
        model: nn.Module,
        stopwatch: Stopwatch,
        indices: Sequence[int],
        starts: int = 0,
    ) -> Actor:
        """The actor, or several side by side, with these indices; columns stand by actor index.

        Environments are seeded by actor and column, so games do not depend on who plays them. The
        process's global generators are seeded too, for environments that draw from them. One that
        begins in the place of another plays other games than that one: `starts` counts them.
        """
        root = played_seed(config)
        if starts:
            root = seed_for(root, Stream.REPLACED, starts)
        seed_global_generators(seed_for(root, Stream.GLOBALS, indices[0]))
        seeds = [
            seed
            for index in indices
            for seed in environments.seeds_for(root, index, config.num_envs)
        ]
        return cls(
            environments.make_vector(config.environment, seeds, config.threads_per_player),
            model,
            trajectory_spec(
                environment, model, unroll_length=config.unroll_length, num_columns=len(seeds)
            ),
            generator_for(root, Stream.ACTIONS, indices[0]),
            stopwatch,
            config.not_finite,
        )

    @torch.inference_mode()
    def unroll(self, version: int) -> Trajectory:
        """Play T ticks in all columns.

        Args:
            version: Of the parameters the model holds; noted with the trajectory.

        Returns:
            The trajectory, in memory that the next unroll overwrites.

        Raises:
            FloatingPointError: A reward, an observation or the policy is not finite; the message
                names the column and the tick. With `not_finite="skip"`, the policy is not, or
                nothing else has been for several unrolls.
        """
        trajectory = self._trajectory
        trajectory.observations[0].copy_(trajectory.observations[-1])
        trajectory.policy_version.fill_(version)
        self._core_state = reset_core_state(self._model, self._core_state, self._resets)
        for kept, now in zip(trajectory.initial_core_state, self._core_state, strict=True):
            kept.copy_(now)
        self._resets = torch.zeros_like(self._resets)
        for row in range(trajectory.unroll_length):
            self._tick(trajectory, row)
        self._ticks += trajectory.unroll_length
        self._left_out.end_unroll(something_left=bool(trajectory.valid.any()))
        return trajectory

    def report(self, context: RoleContext) -> None:
        """Tell the parent, about once a second, where this role's seconds went."""
        if time.monotonic() - self._reported >= _REPORT_SECONDS:
            self._reported = time.monotonic()
            context.report({"kind": "seconds", "seconds_in": self._stopwatch.take()})
        if (event := self._left_out.take()) is not None:
            context.report(event)

    def close(self) -> None:
        """Close the environment; one that cannot be closed has done its work all the same."""
        try:
            self._environment.close()
        except Exception as error:
            name = self._environment.spec.name
            warnings.warn(f"{name} cannot be closed: {error!r}", RuntimeWarning, stacklevel=2)

    def _tick(self, trajectory: Trajectory, row: int) -> None:
        with self._stopwatch("inference"):
            actions, log_probs = self._act(trajectory.observations[row])
            trajectory.actions[row].copy_(actions)
            trajectory.behaviour_log_probs[row].copy_(log_probs)
        if bad := self._not_finite_in("log-probability of the action drawn", log_probs, row):
            raise FloatingPointError(bad)
        with self._stopwatch("environment"):
            tick = self._environment.step(trajectory.actions[row].numpy())
        trajectory.observations[row + 1].copy_(torch.from_numpy(tick.observations))
        trajectory.rewards[row].copy_(torch.from_numpy(tick.rewards))
        trajectory.terminated[row].copy_(torch.from_numpy(tick.terminated))
        trajectory.truncated[row].copy_(torch.from_numpy(tick.truncated))
        trajectory.valid[row].copy_(torch.from_numpy(tick.valid))
        trajectory.episode_returns[row].copy_(torch.from_numpy(tick.episode_returns))
        trajectory.episode_lengths[row].copy_(torch.from_numpy(tick.episode_lengths))
        self._look_at_numbers(trajectory, row)
        if self._remembers:
            actions, rewards = (part[row] for part in (trajectory.actions, trajectory.rewards))
            self._core_state = remember(
                self._model, self._core_state, actions.to(self._device), rewards.to(self._device)
            )
        # The observation after a tick that merely reset is the first of an episode.
        self._resets = ~trajectory.valid[row]

    def _look_at_numbers(self, trajectory: Trajectory, row: int) -> None:
        """Refuse numbers that would make parameters NaN without a word, or leave them out."""
        arrived = trajectory.observations[row + 1]
        bad = self._not_finite_in("reward", trajectory.rewards[row], row)
        if bad is None and arrived.is_floating_point():
            bad = self._not_finite_in("observation", arrived, row)
        if self._not_finite == "stop":
            if bad is not None:
                raise FloatingPointError(bad)
            return
        if bad is None and not self._made_up.any():
            return
        of_rewards, of_observations = _not_finite(trajectory.rewards[row]), _not_finite(arrived)
        out = of_rewards | of_observations | self._made_up
        trajectory.valid[row] &= ~out
        trajectory.rewards[row].masked_fill_(of_rewards, 0.0)
        arrived[of_observations] = 0
        self._made_up = of_observations
        self._left_out.add(int(out.sum()), bad)

    def _not_finite_in(self, name: str, values: Tensor, row: int) -> str | None:
        """Which of `values` [B, ...] is not finite, and where; None if all are."""
        if torch.isfinite(values).all():
            return None
        column = int(_not_finite(values).nonzero()[0])
        found = values[column].flatten()
        return (
            f"{self._environment.spec.name}, column {column}, tick {self._ticks + row} of this "
            f"actor: the {name} is {found[~torch.isfinite(found)][0].item()}"
        )

    def _act(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        output = self._model(
            observations[None].to(self._device),
            self._core_state,
            self._resets[None].to(self._device),
        )
        self._core_state = output.core_state
        actions = output.policy.sample(self._generator)
        return actions[0], output.policy.log_prob(actions)[0]


class LeftOut:
    """Transitions that were left out because a number in them was not finite."""

    def __init__(self, newest: str) -> None:
        """None so far; `newest` says which number was met last, if any."""
        self._now = self._untold = self._unrolls = 0
        self._newest = newest
        self._told = -_REPORT_SECONDS

    def add(self, number: int, what: str | None) -> None:
        """Count some; `what` says which number it was, None where it was an earlier one."""
        self._now += number
        self._newest = what or self._newest

    def end_unroll(self, *, something_left: bool) -> None:
        """Look back on an unroll, in which there was something to learn from, or not.

        Raises:
            FloatingPointError: There has been nothing else for several unrolls.
        """
        self._unrolls = self._unrolls + 1 if self._now and not something_left else 0
        self._untold += self._now
        self._now = 0
        if self._unrolls == _UNROLLS_WITHOUT_NUMBERS:
            raise FloatingPointError(f"{self._newest}; so it has been for {self._unrolls} unrolls")

    def take(self) -> Record | None:
        """An event for the parent, about once a second; None if there is nothing new."""
        if not self._untold or time.monotonic() - self._told < _REPORT_SECONDS:
            return None
        self._told = time.monotonic()
        message = f"{self._newest}; {self._untold} transitions left out since the last such line"
        self._untold = 0
        return {"kind": "event", "event": "left_out", "message": message}


def _not_finite(values: Tensor) -> Tensor:
    """[B] bool: in which columns of `values` [B, ...] some number is not finite."""
    return ~torch.isfinite(values.reshape(len(values), -1)).all(1)


def played_seed(config: RunConfig) -> int:
    """Root of the games: a run that goes on plays others than those it began with."""
    if config.resume_from is None:
        return config.seed
    return seed_for(config.seed, Stream.RESUMED, steps_of(config.resume_from))


def reset_core_state(model: Model, core_state: CoreState, resets: Tensor) -> CoreState:
    """Put the core state back to its initial value in the columns where `resets` [B] is true."""
    if not core_state or not resets.any():
        return core_state
    initial = model.initial_core_state(resets.shape[0])
    return tuple(
        torch.where(resets.to(now.device).view(-1, *[1] * (now.dim() - 1)), start, now)
        for start, now in zip(initial, core_state, strict=True)
    )


def trajectory_spec(
    environment: EnvironmentSpec, model: nn.Module, *, unroll_length: int, num_columns: int
) -> TrajectorySpec:
    """What a trajectory of this environment and this model looks like."""
    keeps_protocol: Model = model  # type: ignore[assignment]
    observations, actions = environment.observation_space, environment.action_space
    assert observations.shape is not None
    assert observations.dtype is not None
    assert actions.shape is not None
    discrete = isinstance(actions, Discrete)
    return TrajectorySpec(
        unroll_length=unroll_length,
        num_columns=num_columns,
        observation_shape=observations.shape,
        observation_dtype=torch.from_numpy(np.empty(0, observations.dtype)).dtype,
        action_shape=actions.shape,
        action_dtype=torch.int64 if discrete else torch.float32,
        core_state_shapes=tuple(part.shape[1:] for part in keeps_protocol.initial_core_state(1)),
        frame_stack=environment.frame_stack,
    )
