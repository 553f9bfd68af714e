"""Evaluation: whole games by fixed rules, and what came of them.

Returns are raw and undiscounted, a game ends when it ends and not with a life, every column plays a
number of games that is fixed beforehand (whoever counts the first games to finish counts the short
ones), no column plays a game that was trained on, and no game lasts for ever. Actions are drawn
from the policy unless the likeliest ones are asked for, as the papers evaluate.

What is here: playing and summing up. What is not here: loading (`agent`), printing (`commands`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from repertory import environments
from repertory.agent import Agent
from repertory.config import ConfigError, NotFinite
from repertory.environments.base import EnvironmentFailure, VectorEnvironment
from repertory.models.base import Model, remember
from repertory.senses import Senses

MAX_EPISODE_FRAMES = 108_000
"""Frames after which a game is cut unless a limit is given: half an hour at 60 frames a second,
the limit of the ALE's v5 environments and of every protocol here but `machado` (18,000)."""

EVALUATOR = 65_535
"""Index under which the evaluator's seeds are drawn; no actor has it."""


class GivenUp(RuntimeError):
    """Whoever wanted an evaluation does not wait for it any more."""


class Episode(NamedTuple):
    """One whole game.

    Attributes:
        episode_return: Raw and undiscounted.
        length: In env steps.
        column: Which column played it.
        truncated: Whether a limit ended it, the environment's own or the evaluation's.
    """

    episode_return: float
    length: int
    column: int
    truncated: bool


@dataclass(frozen=True)
class Evaluation:
    """What an agent reached, and under which rules.

    Attributes:
        env: Name of the environment.
        protocol: Its rules.
        algorithm: What trained the agent.
        env_steps: Env steps the agent had learned from.
        action_repeat: Frames an env step takes.
        greedy: Whether the likeliest actions were played, and not ones drawn from the policy.
        max_episode_steps: Env steps after which a game was cut.
        num_cut: Games that the evaluation's limit ended, and not the environment's own rules.
        episodes: The games, at least one, by column and in order.
    """

    env: str
    protocol: str
    algorithm: str
    env_steps: int
    action_repeat: int
    greedy: bool
    max_episode_steps: int
    num_cut: int
    episodes: tuple[Episode, ...]

    @property
    def returns(self) -> list[float]:
        """Return of every game."""
        return [episode.episode_return for episode in self.episodes]

    @property
    def lengths(self) -> list[int]:
        """Length of every game in env steps."""
        return [episode.length for episode in self.episodes]

    def to_record(self) -> dict[str, Any]:
        """An `eval` record: the rules, the numbers, and every game."""
        return {
            "kind": "eval",
            "env": self.env,
            "protocol": self.protocol,
            "algorithm": self.algorithm,
            "env_steps": self.env_steps,
            "frames": self.env_steps * self.action_repeat,
            "greedy": self.greedy,
            "max_episode_steps": self.max_episode_steps,
            "episodes": len(self.episodes),
            "episode_return_mean": float(np.mean(self.returns)),
            "episode_return_std": float(np.std(self.returns)),
            "episode_return_min": min(self.returns),
            "episode_return_max": max(self.returns),
            "episode_length_mean": float(np.mean(self.lengths)),
            "episodes_cut": self.num_cut,
            "episode_returns": self.returns,
            "episode_lengths": self.lengths,
        }


def evaluate(
    agent: Agent,
    *,
    episodes: int = 20,
    greedy: bool = False,
    num_envs: int | None = None,
    max_episode_steps: int | None = None,
    give_up: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Play whole games with an agent.

    The same agent gets the same games and draws the same actions every time.

    Args:
        agent: Who plays.
        episodes: How many games.
        greedy: Play the likeliest action, and not one drawn from the policy.
        num_envs: Columns that play side by side; by default 8, or as many as there are games.
        max_episode_steps: Env steps after which a game is cut and counted as it stands; by default
            those of `MAX_EPISODE_FRAMES`. A shorter limit of the environment itself holds.
        give_up: Asked at every tick; True ends the evaluation.

    Raises:
        ConfigError: A number is below 1.
        GivenUp: `give_up` said so.
        EnvironmentFailure: The environment broke.
    """
    num_envs = min(episodes, 8) if num_envs is None else num_envs
    for name, value in (
        ("episodes", episodes),
        ("num_envs", num_envs),
        ("max_episode_steps", max_episode_steps),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    config, spec = agent.config, agent.spec
    own_limit = spec.max_episode_steps
    limit = max_episode_steps or max(1, MAX_EPISODE_FRAMES // spec.action_repeat)
    limit = limit if own_limit is None else min(limit, own_limit)
    # One seed more than there are columns: the first is that of the actions.
    action_seed, *seeds = environments.seeds_for(config.seed, EVALUATOR, 1 + num_envs)
    environment = environments.make_vector(
        dataclasses.replace(config.environment, max_episode_steps=limit), seeds
    )
    try:
        played = play(
            agent.model,
            environment,
            shares(episodes, num_envs),
            greedy=greedy,
            generator=torch.Generator().manual_seed(action_seed),
            max_episode_steps=limit,
            not_finite=config.not_finite,
            give_up=give_up,
        )
    except FloatingPointError as error:
        raise EnvironmentFailure(str(error)) from error
    finally:
        environment.close()
    return Evaluation(
        env=spec.name,
        protocol=spec.protocol,
        algorithm=agent.algorithm,
        env_steps=agent.env_steps,
        action_repeat=spec.action_repeat,
        greedy=greedy,
        max_episode_steps=limit,
        # An environment's own time limit is one of its rules, and no cut.
        num_cut=0
        if limit == own_limit
        else sum(game.truncated and game.length >= limit for game in played),
        episodes=tuple(played),
    )


@torch.inference_mode()
def play(
    model: Model,
    environment: VectorEnvironment,
    episodes: Sequence[int],
    *,
    greedy: bool,
    generator: torch.Generator,
    max_episode_steps: int,
    not_finite: NotFinite = "stop",
    give_up: Callable[[], bool] = lambda: False,
) -> list[Episode]:
    """Play until every column has finished its games; later games of a column count nothing.

    Args:
        model: On the CPU.
        environment: B columns that truncate after `max_episode_steps`.
        episodes: [B]; games of each column.
        greedy: Play the likeliest action, and not one drawn from the policy.
        generator: Source of the actions that are drawn.
        max_episode_steps: Env steps after which a game is over.
        not_finite: What becomes of numbers that are not finite, as in training.
        give_up: Asked at every tick; True ends the games.

    Returns:
        The games, by column and in order.

    Raises:
        EnvironmentFailure: A game goes on past the limit, which would keep this from ever ending.
        FloatingPointError: A number is not finite, with `not_finite="stop"`, or the return of a
            game is not: it cannot be scored.
        GivenUp: `give_up` said so.
    """
    observations = torch.from_numpy(environment.reset())
    senses = Senses(environment.spec.name, "this evaluation", not_finite, observations)
    core_state = model.initial_core_state(environment.num_envs)
    resets = torch.zeros(environment.num_envs, dtype=torch.bool)
    running = np.zeros(environment.num_envs, np.int64)
    played: list[list[Episode]] = [[] for _ in episodes]
    while any(len(games) < due for games, due in zip(played, episodes, strict=True)):
        if give_up():
            raise GivenUp("the games were given up")
        output = model(observations[None], core_state, resets[None])
        core_state = output.core_state
        actions = output.policy.mode() if greedy else output.policy.sample(generator)
        tick = environment.step(actions[0].numpy())
        observations, rewards = torch.from_numpy(tick.observations), torch.tensor(tick.rewards)
        valid = torch.from_numpy(tick.valid)
        left_out = senses.take_in(observations, rewards, torch.from_numpy(tick.terminated), valid)
        core_state = remember(model, core_state, actions[0], rewards)
        # The observation after a tick that merely reset is the first of an episode.
        resets = ~valid | left_out
        running += tick.valid
        for column in np.flatnonzero(tick.episode_lengths):
            game = Episode(
                episode_return=float(tick.episode_returns[column]),
                length=int(tick.episode_lengths[column]),
                column=int(column),
                truncated=bool(tick.truncated[column]),
            )
            if not math.isfinite(game.episode_return):
                raise FloatingPointError(
                    f"{environment.spec.name}, column {column}: the return of a game is "
                    f"{game.episode_return}, which is no score"
                )
            played[column].append(game)
            running[column] = 0
        if (running > max_episode_steps).any():
            raise EnvironmentFailure(
                f"{environment.spec.name}, column {running.argmax()}: the episode goes on past "
                f"the limit of {max_episode_steps:,} env steps"
            )
    return [game for games, due in zip(played, episodes, strict=True) for game in games[:due]]


def shares(episodes: int, num_columns: int) -> list[int]:
    """How many games each column plays, equal but for one; fixed before any game begins."""
    each, rest = divmod(episodes, num_columns)
    return [each + (column < rest) for column in range(num_columns)]
