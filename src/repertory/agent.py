"""A trained agent to use from Python: load it, give it observations, get actions.

What is here: the way from a checkpoint to a model, and `predict`, which means what users of
Stable-Baselines3 know by that name. What is not here: whole games (`evaluation`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from repertory import environments, models
from repertory.checkpoints import CheckpointError, load, load_model_state, resolve, spec_text
from repertory.config import ConfigError, RunConfig, from_yaml
from repertory.environments.base import EnvironmentSpec
from repertory.models.base import Model, Remembers, remember, reset_core_state
from repertory.senses import not_finite_in

CoreStateArrays = tuple[NDArray[Any], ...]
"""A core state between calls of `predict`: each [B, ...]."""


class Agent:
    """A model with the environment it was made for.

    Attributes:
        model: The model, on the CPU.
        spec: The environment's own description.
        config: Settings of the run it comes from.
        algorithm: Name of the algorithm that trained it.
        env_steps: Env steps it has learned from.
    """

    def __init__(
        self,
        model: Model,
        spec: EnvironmentSpec,
        config: RunConfig,
        *,
        algorithm: str,
        env_steps: int = 0,
        seed: int | None = None,
    ) -> None:
        """Take a model that is ready to play.

        Args:
            model: On the CPU.
            spec: Of the environment it plays.
            config: Settings of its run.
            algorithm: Name of the algorithm.
            env_steps: Env steps it has learned from.
            seed: Of the actions that are drawn; None for other ones every time.
        """
        self.model = model
        self.spec = spec
        self.config = config
        self.algorithm = algorithm
        self.env_steps = env_steps
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        env: str | Callable[..., gymnasium.Env[Any, Any]] | None = None,
        seed: int | None = None,
    ) -> Agent:
        """The agent of a run or of a checkpoint. Nothing stored in the file is run.

        Args:
            path: A run folder (its latest checkpoint), a checkpoint, or `best` or `latest` in a
                folder of checkpoints.
            env: The environment, if it is not the one the settings name; a run whose environment
                was a callable needs it, since a checkpoint holds no code.
            seed: As in `__init__`.

        Raises:
            CheckpointError: There is no usable checkpoint, or it does not fit the environment.
            EnvironmentRefused: The environment does not exist or cannot be used.
        """
        # Imported late: algorithms import much that a loaded agent does not need.
        from repertory.algorithms import ALGORITHMS

        file = resolve(Path(path))
        state = load(file)
        algorithm = state["algorithm"]
        if algorithm not in ALGORITHMS:
            raise CheckpointError(f"{file} is of an unknown algorithm, {algorithm!r}")
        try:
            config = from_yaml(ALGORITHMS[algorithm].config, state["config"])
        except ConfigError as error:
            raise CheckpointError(f"{file} holds settings that cannot be read: {error}") from error
        if env is not None:
            config = dataclasses.replace(config, env=env)
        spec = environments.describe(config.environment)
        if spec_text(spec) != state["spec"]:
            raise CheckpointError(
                f"{file} was made for {state['spec']}; {spec.name} now has {spec_text(spec)}"
            )
        # Whatever the run started from and wherever it learned, here its own parameters count.
        model = models.create(
            dataclasses.replace(config, init_from=None, resume_from=None, device="cpu"), spec
        )
        load_model_state(model, state["model"])
        model.eval()
        return cls(
            model, spec, config, algorithm=algorithm, env_steps=state["env_steps"], seed=seed
        )

    @torch.inference_mode()
    def predict(
        self,
        observation: ArrayLike,
        state: CoreStateArrays | None = None,
        episode_start: ArrayLike | None = None,
        deterministic: bool = False,
        rewards: ArrayLike | None = None,
    ) -> tuple[NDArray[Any], CoreStateArrays | None]:
        """The action for an observation, or one action for each of a batch.

        Args:
            observation: One observation, or a batch of them, [B, ...].
            state: What the last call returned; None at the beginning.
            episode_start: Bool or [B] bool; where an episode begins with this observation, so
                that what the core remembers of the one before is dropped.
            deterministic: Take the likeliest action, and not one drawn from the policy.
            rewards: Number or [B]; what came of the action before, for an agent that was trained
                with `last_inputs`. Others do not look at it.

        Returns:
            The action or the [B, ...] actions as the environment wants them, and the core state
            for the next call (None for a model without a core).

        Raises:
            ValueError: The observation has neither shape, the state is of another batch size, or
                a number is not finite and the agent was not trained with `not_finite="skip"`.
        """
        space = self.spec.observation_space
        given = np.asarray(observation)
        single = given.shape == space.shape
        batch = given[None] if single else given
        if batch.shape[1:] != space.shape:
            raise ValueError(
                f"expected an observation {space.shape} or a batch of them, got {given.shape}"
            )
        num_columns = len(batch)
        # Copied, so that a read-only or strided array will do; never from float to int.
        batch = batch.astype(space.dtype, order="C", casting="same_kind", copy=True)
        starts = np.zeros(num_columns, bool)
        if episode_start is not None:
            starts |= np.asarray(episode_start, bool)
        # As in training: zeros stand in, and the core forgets, before and after.
        made_up = not_finite_in(torch.from_numpy(batch))
        if made_up.any():
            if self.config.not_finite == "stop":
                raise ValueError(f"the observation holds a number that is not finite: {given}")
            batch[made_up.numpy()] = 0
            starts |= made_up.numpy()
        core_state = self.model.initial_core_state(num_columns)
        if state is not None:
            if len(state) != len(core_state) or any(len(part) != num_columns for part in state):
                raise ValueError(f"the state is not one for {num_columns} observations")
            core_state = tuple(torch.tensor(part) for part in state)
            if isinstance(self.model, Remembers) and rewards is not None:
                last = core_state[-1].clone()
                last[:, -1] = torch.as_tensor(rewards, dtype=last.dtype).clamp(-1.0, 1.0)
                core_state = (*core_state[:-1], last)
        output = self.model(
            torch.from_numpy(batch)[None], core_state, torch.from_numpy(starts)[None]
        )
        policy = output.policy
        actions = policy.mode() if deterministic else policy.sample(self._generator)
        # Policies count discrete actions from 0.
        played = actions[0].numpy() + getattr(self.spec.action_space, "start", 0)
        after = remember(self.model, output.core_state, actions[0], torch.zeros(num_columns))
        after = reset_core_state(self.model, after, made_up)
        kept = tuple(part.numpy() for part in after) or None
        return (played[0] if single else played), kept
