"""An actor: T ticks of B environments become one trajectory.

What is here: playing with frozen parameters and recording what was seen, done and said. What is
not here: where parameters come from and where trajectories go; that is the algorithm's business.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from gymnasium.spaces import Discrete
from torch import Tensor, nn

from repertory import environments
from repertory.config import RunConfig
from repertory.environments.base import EnvironmentSpec, VectorEnvironment
from repertory.models.base import Model
from repertory.progress import Stopwatch
from repertory.runtimes.base import RoleContext
from repertory.seeds import Stream, generator_for, seed_for, seed_global_generators
from repertory.step_names import steps_of
from repertory.trajectories import CoreState, Trajectory, TrajectorySpec

_REPORT_SECONDS = 1.0


class Actor:
    """Plays a vector environment with a model it only reads."""

    def __init__(
        self,
        environment: VectorEnvironment,
        model: nn.Module,
        spec: TrajectorySpec,
        generator: torch.Generator,
        stopwatch: Stopwatch,
    ) -> None:
        """Reset the environment and stand before its first tick.

        Args:
            environment: B columns; owned by the actor from now on.
            model: Its parameters may change between unrolls, never within one.
            spec: What a trajectory of this environment and model looks like.
            generator: Source of every action drawn; on the CPU.
            stopwatch: Where the seconds in `environment` and `inference` are counted.
        """
        self._environment = environment
        self._model: Model = model  # type: ignore[assignment]
        self._generator = generator
        self._stopwatch = stopwatch
        self._device = next(model.parameters()).device
        self._reported = time.monotonic()
        self._trajectory = spec.allocate()
        with stopwatch("environment"):
            first = environment.reset()
        self._trajectory.observations[-1].copy_(torch.from_numpy(first))
        self._core_state = self._model.initial_core_state(environment.num_envs)
        self._resets = torch.zeros(environment.num_envs, dtype=torch.bool)
        self._ticks = 0

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
                names the column and the tick.
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
        return trajectory

    def report(self, context: RoleContext) -> None:
        """Tell the parent, about once a second, where this role's seconds went."""
        if time.monotonic() - self._reported >= _REPORT_SECONDS:
            self._reported = time.monotonic()
            context.report({"kind": "seconds", "seconds_in": self._stopwatch.take()})

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()

    def _tick(self, trajectory: Trajectory, row: int) -> None:
        with self._stopwatch("inference"):
            actions, log_probs = self._act(trajectory.observations[row])
            trajectory.actions[row].copy_(actions)
            trajectory.behaviour_log_probs[row].copy_(log_probs)
            self._require_finite("log-probability of the action drawn", log_probs, row)
        with self._stopwatch("environment"):
            tick = self._environment.step(trajectory.actions[row].numpy())
        trajectory.observations[row + 1].copy_(torch.from_numpy(tick.observations))
        trajectory.rewards[row].copy_(torch.from_numpy(tick.rewards))
        trajectory.terminated[row].copy_(torch.from_numpy(tick.terminated))
        trajectory.truncated[row].copy_(torch.from_numpy(tick.truncated))
        trajectory.valid[row].copy_(torch.from_numpy(tick.valid))
        trajectory.episode_returns[row].copy_(torch.from_numpy(tick.episode_returns))
        trajectory.episode_lengths[row].copy_(torch.from_numpy(tick.episode_lengths))
        self._require_finite("reward", trajectory.rewards[row], row)
        if trajectory.observations.is_floating_point():
            self._require_finite("observation", trajectory.observations[row + 1], row)
        # The observation after a tick that merely reset is the first of an episode.
        self._resets = ~trajectory.valid[row]

    def _require_finite(self, name: str, values: Tensor, row: int) -> None:
        """Refuse numbers that would make parameters NaN without a word; `values` is [B, ...]."""
        rows = values.reshape(len(values), -1)
        finite = torch.isfinite(rows)
        if not finite.all():
            column, place = (~finite).nonzero()[0].tolist()
            raise FloatingPointError(
                f"{self._environment.spec.name}, column {column}, tick {self._ticks + row} of this "
                f"actor: the {name} is {rows[column, place].item()}"
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
