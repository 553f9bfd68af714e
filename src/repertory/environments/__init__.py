"""Environments: what plays, under one contract.

What is here: the contract (`base`), and the four functions through which the rest of the pipeline
meets environments, whatever kind they are. In reading order: `base`, `gymnasium`, `guard`, `atari`,
`pictures`, `toy`; `spaces`, `names` and `seeding` are what these share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as _gymnasium

from repertory.environments import atari as _atari
from repertory.environments import gymnasium as _adapter
from repertory.environments.base import (
    EnvironmentConfig,
    EnvironmentFailure,
    EnvironmentRefused,
    EnvironmentSpec,
    EpisodeStatistics,
    ImageLayout,
    Tick,
    VectorEnvironment,
)
from repertory.environments.seeding import NUM_SEEDS, seeds_for

__all__ = [
    "EnvironmentConfig",
    "EnvironmentFailure",
    "EnvironmentRefused",
    "EnvironmentSpec",
    "EpisodeStatistics",
    "ImageLayout",
    "Tick",
    "VectorEnvironment",
    "describe",
    "make_single",
    "make_vector",
    "seeds_for",
]


def describe(config: EnvironmentConfig) -> EnvironmentSpec:
    """Say what an environment is, before anything starts.

    Builds one of it to see its spaces, and closes it.

    Raises:
        EnvironmentRefused: It cannot be found, built or used; one line says why and what would do.
    """
    if _atari.is_game(config.id):
        return _atari.describe(config)
    return _adapter.describe(config)


def make_vector(
    config: EnvironmentConfig, seeds: Sequence[int], num_threads: int = 1
) -> VectorEnvironment:
    """Make columns of an environment that step together.

    Call it in the process and the thread that will use it: native environments keep their threads
    there.

    Args:
        config: Which environment.
        seeds: One a column, each in [0, 2**31); see `seeds_for`.
        num_threads: Threads of a native environment, 0 for as many as there are cores; others step
            in this thread or in processes of their own. Changes no bits.

    Raises:
        EnvironmentRefused: It cannot be found, built or used.
        ValueError: No seeds, or one out of range.
    """
    if len(seeds) == 0 or not all(0 <= seed < NUM_SEEDS for seed in seeds):
        raise ValueError(f"expected at least one seed, each in [0, 2**31), got {list(seeds)}")
    if _atari.is_game(config.id):
        return _atari.make_vector(config, seeds, num_threads)
    return _adapter.make_vector(config, seeds)


def make_single(
    config: EnvironmentConfig, render_mode: str | None = None
) -> _gymnasium.Env[Any, Any]:
    """Make one environment by itself, to watch or to record.

    It plays as a column of `make_vector` does: same observations, rewards and ends for the same
    seed and actions. Actions are those of its space, as `Agent.predict` returns them, where a
    vector environment counts them from 0. It never resets by itself. Where lost lives are
    signalled, `terminated` still means the whole game, and the life stands in
    `info["life_lost"]`.

    Args:
        config: Which environment.
        render_mode: As Gymnasium has it; Atari games know `rgb_array`.

    Raises:
        EnvironmentRefused: It cannot be found, built or used.
    """
    if _atari.is_game(config.id):
        return _atari.make_single(config, render_mode)
    return _adapter.make_single(config, render_mode)
