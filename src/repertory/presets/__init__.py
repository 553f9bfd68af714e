"""Named sets of settings for environments that people train on.

What is here: the list and two ways to look into it. A preset changes how an agent learns, never
what it is judged by: no preset sets a protocol, a seed or a budget that the user gave. What is
not here: how presets, files and flags are laid over each other (`commands.arguments`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from repertory.config import ConfigError
from repertory.synonyms import closest_hint


@dataclass(frozen=True)
class Preset:
    """Settings that are known to work somewhere.

    Attributes:
        name: What `--preset` takes; one algorithm has it once.
        algorithm: Whose settings these are.
        environments: Patterns of environment ids, as `fnmatch` reads them, case matters.
        settings: Values by field name, as `config.from_dict` takes them.
        source: Where the values come from.
        protocol: The rules that the values were published with, where a preset is all but
            meaningless without; it does not choose them.
    """

    name: str
    algorithm: str
    environments: tuple[str, ...]
    settings: Mapping[str, Any]
    source: str
    protocol: str | None = None

    def matches(self, env: str) -> bool:
        """Whether this preset is made for the environment."""
        return any(fnmatch.fnmatchcase(env, pattern) for pattern in self.environments)


def for_environment(algorithm: str, env: str) -> Preset | None:
    """The first preset of `algorithm` that is made for `env`, or None."""
    return next((p for p in PRESETS if p.algorithm == algorithm and p.matches(env)), None)


def names(algorithm: str) -> list[str]:
    """Names of the presets of `algorithm`."""
    return [preset.name for preset in PRESETS if preset.algorithm == algorithm]


def by_name(algorithm: str, name: str) -> Preset:
    """The preset of `algorithm` with that name.

    Raises:
        ConfigError: There is none; the line names the closest.
    """
    presets = {preset.name: preset for preset in PRESETS if preset.algorithm == algorithm}
    if name not in presets:
        known = ", ".join(names(algorithm)) or "none"
        raise ConfigError(
            f"{algorithm} has no preset {name!r}{closest_hint(name, presets)} (known: {known})"
        )
    return presets[name]


# Several libraries weigh the whole squared error of the critic, this one half of it: their
# coefficient .5 is a value cost of 1 here, their .25 is .5.

_CLASSIC_A2C = {
    # Defaults of A2C in OpenAI Baselines (2017) and, with epsilon after the root, of
    # Stable-Baselines3: five ticks, RMSprop .99 with 7e-4 and 1e-5, clipping at .5.
    "unroll_length": 5,
    "discount": 0.99,
    "gae_lambda": 1.0,
    "optimizer": "rmsprop",
    "learning_rate": 7e-4,
    "rmsprop_decay": 0.99,
    "epsilon": 1e-5,
    "clip_norm": 0.5,
    "value_cost": 1.0,
    "epsilon_inside_root": False,
}

_CARTPOLE = {
    **_CLASSIC_A2C,
    # RL Baselines3 Zoo, hyperparams/a2c.yml: 8 environments, 500,000 steps, no entropy bonus. The
    # rate falls to 0 here, so that a policy that balances for ever is not lost again.
    "total_steps": 500_000,
    "learning_rate_end": 0.0,
    "entropy_cost": 0.0,
    # A rate of 7e-4 needs 500,000 steps; this one balances in about 100,000.
    "learning_rate": 2e-3,
    "network": "mlp",
}

_LUNAR_LANDER = {
    **_CLASSIC_A2C,
    # RL Baselines3 Zoo, hyperparams/a2c.yml: 8 environments, 8.3e-4 to 0, discount .995.
    # It stops after 200,000 steps of LunarLander-v2; more make the landing reliable.
    "total_steps": 1_000_000,
    "discount": 0.995,
    "learning_rate": 8.3e-4,
    "learning_rate_end": 0.0,
    "entropy_cost": 1e-5,
    "network": "mlp",
}

_MINATAR = {
    **_CLASSIC_A2C,
    # Young and Tian (2019), examples/AC_lambda.py: 5 million frames, discount .99, entropy .01,
    # their network. Their optimiser steps on single frames; RMSprop is the classic one above.
    # Rewards of these games are 0 and +-1 already.
    "total_steps": 5_000_000,
    "reward_transform": "none",
    "entropy_cost": 0.01,
    "learning_rate_end": 0.0,
    "network": "minatar",
}

_ATARI = {
    **_CLASSIC_A2C,
    # A2C of OpenAI Baselines (2017) on Atari: 16 environments, clipped rewards, entropy .01, rate
    # to 0, the network of Mnih et al. (2015). Their epsilon stands inside the root, where 1e-5 is
    # far above the mean square of these gradients (docs/decisions/0006).
    "total_steps": 10_000_000,
    "reward_transform": "clip",
    "entropy_cost": 0.01,
    "learning_rate_end": 0.0,
    "network": "nature",
}

_FAST = {
    # For few cores: the small network of Mnih et al. (2016), many columns to a process, and unrolls
    # long enough to see what a move led to. Pictures are scaled, so that a small moving ball is
    # worth learning about (docs/decisions/0007). Advantages are not: while there is nothing to
    # learn from yet, that would make a policy of noise. The rate falls to 0 within a run of half an
    # hour to an hour.
    "total_steps": 4_000_000,
    "network": "a3c",
    "initialization": "orthogonal",
    "standardize_images": True,
    "unroll_length": 16,
    "discount": 0.99,
    "gae_lambda": 0.95,
    "reward_transform": "clip",
    "optimizer": "adam",
    "learning_rate": 7e-4,
    "learning_rate_end": 0.0,
    "epsilon": 1e-5,
    "clip_norm": 0.5,
    "value_cost": 0.5,
    "entropy_cost": 0.01,
}

_FAST_IMPALA = {
    # An env step of Atari costs twice an update's share of it, so three updates are made of each.
    # One actor and one learner share two cores evenly.
    **_FAST,
    "total_steps": 3_000_000,
    "learning_rate": 3e-4,
    "passes": 3,
    "surrogate": "clip",
    "queue_capacity": 1,
}

_A3C_PAPER = {
    # Mnih et al. (2016), section 4 and supplement 8, with what the first author told others who
    # reproduced it: epsilon .1 inside the root, rate 7e-4, the value's gradient scaled by .5. The
    # norm is clipped at 40 by everyone since, the paper has no number. 16 workers of one
    # environment; on fewer cores than workers they take turns.
    "total_steps": 80_000_000,
    "num_workers": 16,
    "num_envs": 1,
    "network": "a3c",
    "unroll_length": 5,
    "discount": 0.99,
    "gae_lambda": 1.0,
    "reward_transform": "clip",
    "loss_reduction": "sum",
    "optimizer": "rmsprop",
    "learning_rate": 7e-4,
    "learning_rate_end": 0.0,
    "rmsprop_decay": 0.99,
    "epsilon": 0.1,
    "epsilon_inside_root": True,
    "clip_norm": 40.0,
    "value_cost": 0.5,
    "entropy_cost": 0.01,
}

_A3C_LSTM = {
    # The program that most people know A3C by, ikostrikov/pytorch-a3c (2017): four processes of one
    # environment, shared Adam, 20 ticks, norm 50, its network and its core. Its picture is the
    # protocol a3c42, which a preset does not choose.
    "total_steps": 10_000_000,
    "num_workers": 4,
    "num_envs": 1,
    "network": "a3c42",
    "core": "lstm",
    "core_size": 256,
    "unroll_length": 20,
    "discount": 0.99,
    "gae_lambda": 1.0,
    "reward_transform": "clip",
    "loss_reduction": "sum",
    "optimizer": "adam",
    "learning_rate": 1e-4,
    "epsilon": 1e-8,
    "clip_norm": 50.0,
    "value_cost": 0.5,
    "entropy_cost": 0.01,
}

_IMPALA_PAPER = {
    # Espeholt et al. (2018), appendix G for Atari: batches of 32 unrolls of 20 ticks, sums, RMSprop
    # without momentum with epsilon .01 (TensorFlow's, inside the root), rate 6e-4 to 0, norm 40.
    "total_steps": 50_000_000,
    "num_actors": 32,
    "num_envs": 1,
    "batch_trajectories": 32,
    "network": "impala",
    "unroll_length": 20,
    "discount": 0.99,
    "reward_transform": "clip",
    "loss_reduction": "sum",
    "optimizer": "rmsprop",
    "learning_rate": 6e-4,
    "learning_rate_end": 0.0,
    "rmsprop_decay": 0.99,
    "epsilon": 0.01,
    "epsilon_inside_root": True,
    "clip_norm": 40.0,
    "value_cost": 0.5,
    "entropy_cost": 0.01,
}

_CARTPOLE_IDS = ("CartPole-v1",)
_LUNAR_LANDER_IDS = ("LunarLander-v3",)
_MINATAR_IDS = ("MinAtar/*",)
_PONG_IDS = ("ALE/Pong-v5", "PongNoFrameskip-v4")
_ATARI_IDS = ("ALE/*", "*NoFrameskip-v4")

_ZOO = "after RL Baselines3 Zoo, hyperparams/a2c.yml, changed"
_YOUNG_TIAN = "Young and Tian 2019 (MinAtar, examples/AC_lambda.py); OpenAI Baselines, A2C"
_OPENAI_A2C = "OpenAI Baselines, A2C on Atari (2017)"
_MEASURED = "docs/results.md: measured here, on two cores"
_DERIVED = "from the Pong runs in docs/results.md; not measured itself"


def _one_actor(settings: Mapping[str, Any], num_columns: int) -> Mapping[str, Any]:
    """The settings with all columns in one vector environment."""
    return {**settings, "num_envs": num_columns}


def _several_actors(settings: Mapping[str, Any], num_actors: int, num_envs: int) -> dict[str, Any]:
    """The settings with the columns spread over actors that move in step."""
    return {
        **settings,
        "num_actors": num_actors,
        "num_envs": num_envs,
        "num_learners": 2,
        "sync": "step",
    }


def _workers(settings: Mapping[str, Any], num_workers: int, num_envs: int) -> dict[str, Any]:
    """The settings with the columns spread over workers of A3C."""
    return {**settings, "num_workers": num_workers, "num_envs": num_envs}


def _actors(settings: Mapping[str, Any], num_actors: int, num_envs: int) -> dict[str, Any]:
    """The settings with the columns spread over actors of IMPALA."""
    settings = dict(settings)
    if "gae_lambda" in settings:
        settings["vtrace_lambda"] = settings.pop("gae_lambda")
    return {**settings, "num_actors": num_actors, "num_envs": num_envs}


PRESETS: tuple[Preset, ...] = (
    Preset("cartpole", "a2c", _CARTPOLE_IDS, _one_actor(_CARTPOLE, 8), _ZOO),
    Preset("lunarlander", "a2c", _LUNAR_LANDER_IDS, _one_actor(_LUNAR_LANDER, 8), _ZOO),
    Preset("minatar", "a2c", _MINATAR_IDS, _one_actor(_MINATAR, 16), _YOUNG_TIAN),
    Preset("pong", "a2c", _PONG_IDS, _one_actor(_FAST, 16), _DERIVED),
    Preset("atari", "a2c", _ATARI_IDS, _one_actor(_ATARI, 16), _OPENAI_A2C),
    Preset("cartpole", "batched_a2c", _CARTPOLE_IDS, _several_actors(_CARTPOLE, 2, 4), _ZOO),
    Preset(
        "lunarlander", "batched_a2c", _LUNAR_LANDER_IDS, _several_actors(_LUNAR_LANDER, 2, 4), _ZOO
    ),
    Preset("minatar", "batched_a2c", _MINATAR_IDS, _several_actors(_MINATAR, 4, 4), _YOUNG_TIAN),
    Preset("pong", "batched_a2c", _PONG_IDS, _several_actors(_FAST, 4, 4), _MEASURED),
    Preset("atari", "batched_a2c", _ATARI_IDS, _several_actors(_ATARI, 4, 4), _OPENAI_A2C),
    Preset("cartpole", "a3c", _CARTPOLE_IDS, _workers(_CARTPOLE, 2, 4), _ZOO),
    Preset("lunarlander", "a3c", _LUNAR_LANDER_IDS, _workers(_LUNAR_LANDER, 2, 4), _ZOO),
    Preset("minatar", "a3c", _MINATAR_IDS, _workers(_MINATAR, 2, 8), _YOUNG_TIAN),
    Preset("a3c-fast", "a3c", _ATARI_IDS, _workers(_FAST, 2, 16), _MEASURED),
    Preset("a3c-paper", "a3c", (), _A3C_PAPER, "Mnih et al. 2016, and its first author's notes"),
    Preset("a3c-lstm", "a3c", (), _A3C_LSTM, "ikostrikov/pytorch-a3c (2017)", "a3c42"),
    Preset("cartpole", "impala", _CARTPOLE_IDS, _actors(_CARTPOLE, 2, 4), _ZOO),
    Preset("lunarlander", "impala", _LUNAR_LANDER_IDS, _actors(_LUNAR_LANDER, 2, 4), _ZOO),
    Preset("minatar", "impala", _MINATAR_IDS, _actors(_MINATAR, 2, 8), _YOUNG_TIAN),
    Preset("impala-fast", "impala", _ATARI_IDS, _actors(_FAST_IMPALA, 1, 16), _MEASURED),
    Preset("impala-atari", "impala", (), _IMPALA_PAPER, "Espeholt et al. 2018, appendix G"),
)
