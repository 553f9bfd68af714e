"""Runs made without training, and small environments that evaluation can go wrong on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from repertory import environments
from repertory.algorithms import ALGORITHMS
from repertory.checkpoints import make_state, model_state, save_step
from repertory.config import from_dict, to_yaml
from repertory.environments.base import EnvironmentSpec, EpisodeStatistics, Tick
from repertory.metrics import RunFolder
from repertory.models.networks import ActorCritic, build_model
from tests.probes import Counter

Result = tuple[NDArray[Any], float, bool, bool, dict[str, Any]]


class Endless(gymnasium.Env[NDArray[np.float32], Any]):
    """Pays 1 an env step and never ends, whatever the action."""

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> Result:
        return np.ones(1, np.float32), 1.0, False, False, {}


class TwoArms(Endless):
    """One pull an episode; arm 10 pays 1 and arm 11 nothing, so a return tells the arm."""

    action_space = spaces.Discrete(2, start=10)

    def step(self, action: Any) -> Result:
        assert action in (10, 11)
        return np.ones(1, np.float32), float(action == 10), True, False, {}


class ShortOrLong(Endless):
    """Episodes of 1 env step that pay 0 or of 30 that pay 1, as likely, whatever the action."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        first = super().reset(seed=seed)
        self._left = 30 if self.np_random.random() < 0.5 else 1
        self._reward = float(self._left == 30)
        return first

    def step(self, action: Any) -> Result:
        self._left -= 1
        ended = self._left == 0
        return np.ones(1, np.float32), self._reward if ended else 0.0, ended, False, {}


class Counted(Counter):
    """Pays 1 in each of ten env steps."""

    def __init__(self) -> None:
        super().__init__(10, "term")


class EndsItself(Counted):
    """Cuts its episodes after five env steps, and no wrapper tells anybody."""

    def step(self, action: Any) -> Any:
        observation, reward, _, _, info = super().step(action)
        return observation, reward, False, self.steps == 5, info


class Gappy(Counted):
    """Observes nothing that is a number in each third env step."""

    def observation(self) -> Any:
        return np.full(1, math.nan if self.steps % 3 == 2 else self.steps, np.float32)


class Priceless(Counted):
    """Pays nothing that is a number."""

    def reward(self) -> Any:
        return math.nan


for _class in (Endless, TwoArms, ShortOrLong, EndsItself, Gappy, Priceless):
    gymnasium.register(id=f"{_class.__name__}-v0", entry_point=_class)


class LivesVector:
    """One column of a fake game with three lives that follows a script.

    A lost life is signalled as `terminated` in a tick that is followed by an ordinary one; the
    first game ends with its last life, the second one is cut by time with lives left.
    """

    # (reward, life lost, whole game over, cut by time)
    SCRIPT = (
        (5.0, True, False, False),
        (0.0, True, False, False),
        (7.0, True, True, False),
        None,
        (3.0, True, False, False),
        (2.0, False, True, True),
        None,
        (4.0, True, True, False),
        None,
    )

    def __init__(self) -> None:
        self.spec = EnvironmentSpec(
            name="Lives",
            protocol="fake",
            observation_space=Endless.observation_space,
            action_space=Endless.action_space,
        )
        self.num_envs = 1
        self._statistics = EpisodeStatistics(1)
        self._ticks = 0

    def reset(self) -> NDArray[Any]:
        return np.ones((1, 1), np.float32)

    def step(self, actions: NDArray[Any]) -> Tick:
        entry = self.SCRIPT[self._ticks % len(self.SCRIPT)]
        self._ticks += 1
        reward, life_lost, over, cut = entry or (0.0, False, False, False)
        rewards, valid = np.array([reward], np.float32), np.array([entry is not None])
        returns, lengths = self._statistics.record(rewards, valid, np.array([over]))
        return Tick(
            observations=np.ones((1, 1), np.float32),
            rewards=rewards,
            terminated=np.array([life_lost and not cut]),
            truncated=np.array([cut]),
            valid=valid,
            episode_returns=returns,
            episode_lengths=lengths,
        )

    def close(self) -> None:
        pass


def make_run(
    folder: Path,
    env: str,
    *,
    env_steps: int = 1000,
    chances: Sequence[float] | None = None,
    prepare: Callable[[ActorCritic], None] | None = None,
    **settings: Any,
) -> Path:
    """A run folder with one checkpoint of a fresh model.

    Args:
        folder: Where; does not exist yet.
        env: The environment's id.
        env_steps: What the checkpoint says it has learned from.
        chances: If given, the model's policy has these chances of each action, always.
        prepare: If given, sets the model's parameters.
        settings: Of the run.
    """
    config = from_dict(ALGORITHMS["a2c"].config, {"env": env, "run_dir": folder, **settings})
    spec = environments.describe(config.environment)
    run = RunFolder.create(config, "a2c", spec)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model(
            spec, network=config.network, core=config.core, core_size=config.core_size
        )
    if chances is not None:
        fix_policy(model, chances)
    if prepare is not None:
        prepare(model)
    state = make_state(
        model=model_state(model),
        optimizer={},
        env_steps=env_steps,
        updates=1,
        algorithm="a2c",
        config=to_yaml(config),
        spec=spec,
    )
    save_step(run.checkpoints, state)
    return folder


def fix_policy(model: ActorCritic, chances: Sequence[float]) -> None:
    """Give the policy these chances of each action, whatever is observed."""
    with torch.no_grad():
        model.policy.weight.zero_()
        model.policy.bias.copy_(torch.tensor([math.log(chance) for chance in chances]))


def remember_the_cue(model: ActorCritic) -> None:
    """Set the parameters of an `mlp` with an LSTM of one cell so that it solves `Memory-v0`.

    The cell takes the cue, minus or plus one, into its state, keeps it as long as nothing is shown,
    and the policy plays it; without its state the model knows nothing.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.torso.layers[0].weight[0] = torch.tensor([-5.0, 5.0])
        model.torso.layers[2].weight[0, 0] = 5.0
        lstm = model.core.recurrent
        lstm.weight_ih_l0[2, 0] = 5.0  # gates stand as input, forget, cell, output
        lstm.bias_ih_l0[[0, 1, 3]] = 10.0
        model.policy.weight[:, 0] = torch.tensor([-5.0, 5.0])
