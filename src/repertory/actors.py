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
from repertory.models.base import Model, Remembers, remember, reset_core_state
from repertory.progress import Stopwatch
from repertory.runtimes.base import RoleContext
from repertory.seeds import Stream, generator_for, seed_for, seed_global_generators
from repertory.senses import Senses
from repertory.step_names import steps_of
from repertory.trajectories import Trajectory, TrajectorySpec

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
        self._senses = Senses(environment.spec.name, "this actor", not_finite, arrived)

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
        self._senses.end_unroll(something_left=bool(trajectory.valid.any()))
        return trajectory

    def report(self, context: RoleContext) -> None:
        """Tell the parent, about once a second, where this role's seconds went."""
        if time.monotonic() - self._reported >= _REPORT_SECONDS:
            self._reported = time.monotonic()
            context.report({"kind": "seconds", "seconds_in": self._stopwatch.take()})
        if (event := self._senses.take()) is not None:
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
        self._senses.require_finite("log-probability of the action drawn", log_probs)
        with self._stopwatch("environment"):
            tick = self._environment.step(trajectory.actions[row].numpy())
        trajectory.observations[row + 1].copy_(torch.from_numpy(tick.observations))
        trajectory.rewards[row].copy_(torch.from_numpy(tick.rewards))
        trajectory.terminated[row].copy_(torch.from_numpy(tick.terminated))
        trajectory.truncated[row].copy_(torch.from_numpy(tick.truncated))
        trajectory.valid[row].copy_(torch.from_numpy(tick.valid))
        trajectory.episode_returns[row].copy_(torch.from_numpy(tick.episode_returns))
        trajectory.episode_lengths[row].copy_(torch.from_numpy(tick.episode_lengths))
        left_out = self._senses.take_in(
            trajectory.observations[row + 1],
            trajectory.rewards[row],
            trajectory.terminated[row],
            trajectory.valid[row],
        )
        trajectory.valid[row] &= ~left_out
        if self._remembers:
            actions, rewards = (part[row] for part in (trajectory.actions, trajectory.rewards))
            self._core_state = remember(
                self._model, self._core_state, actions.to(self._device), rewards.to(self._device)
            )
        # The observation after a tick that merely reset is the first of an episode.
        self._resets = ~trajectory.valid[row]

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
