"""The settings that every algorithm shares.

Each algorithm file derives its own frozen dataclass from `RunConfig` and adds what only it has.
The string under a field is its documentation, and what `--help` prints. Values that follow from
others are properties, so that nothing is filled in later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import gymnasium

from repertory.environments.base import EnvironmentConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Who plays what, for how long, with which model and which learning settings."""

    # Environment

    env: str | Callable[..., gymnasium.Env[Any, Any]]
    """Gymnasium id (`CartPole-v1`, `module:Env-v0`, `ALE/Pong-v5`); from Python, a callable too."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the environment's constructor."""
    protocol: str | None = None
    """Rules of an Atari game: `dqn`, `machado` or `v5`; by default what the id stands for."""
    vectorization: Literal["sync", "async"] = "sync"
    """`async` gives each column a process of its own; Atari games are native and ignore it."""
    image_layout: Literal["auto", "chw", "hwc"] = "auto"
    """Where the channels of an image observation stand, if its shape does not tell."""
    max_episode_steps: int | None = None
    """Truncate episodes after so many env steps; by default the id's own limit."""

    # Extent

    total_steps: int = 1_000_000
    """Env steps (agent decisions) to train for; emulator frames are these times the repeat."""
    seed: int = 1
    """Root of every random number of the run."""
    stop_at_return: float | None = None
    """End early once the mean return of the last 100 episodes reaches this."""

    # Who and where

    num_actors: int = 1
    """Actors; each owns `num_envs` columns and a random stream of its own."""
    num_envs: int = 8
    """Environment columns per actor."""
    num_learners: int = 1
    """Learners that sum their gradients and stay equal."""
    runtime: Literal["inline", "processes"] = "processes"
    """Where roles run: one deterministic process, or a spawned process each."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model learns."""
    actor_threads: int = 1
    """torch threads of an actor; never derived from the machine, so that bits stay the same."""
    learner_threads: int = 1
    """torch threads of a learner; part of what decides the bits of a convolution's gradient."""
    environment_threads: int = 0
    """Threads of a native vector environment; 0 shares this machine's cores. Changes no bits."""
    role_timeout_seconds: float = 120.0
    """A role that shows no sign of life for so long is named and the run stopped."""

    # Model

    network: Literal["auto", "mlp", "a3c", "nature", "minatar", "impala"] = "auto"
    """Torso; `auto` takes `mlp` for vectors, `minatar` for small images and `a3c` for others."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Widths of the `mlp` torso's layers."""
    core: Literal["none", "lstm", "gru"] = "none"
    """Recurrent core between torso and heads."""
    core_size: int = 256
    """Width of the core."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the network's passes; parameters and targets stay float32."""

    # Learning

    unroll_length: int = 5
    """T, ticks per unroll."""
    discount: float = 0.99
    """Factor per env step on the future (elsewhere: gamma)."""
    reward_transform: Literal["none", "clip", "sign", "asymmetric"] = "none"
    """What the learner sees of a reward; statistics are always raw."""
    value_cost: float = 0.5
    """Weight of the value loss, which is half the squared error (elsewhere: vf_coef)."""
    entropy_cost: float = 0.01
    """Weight of the entropy bonus (elsewhere: ent_coef)."""
    entropy_cost_end: float | None = None
    """Where the entropy cost arrives linearly at the last step; by default it stays."""
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    """Stochastic optimiser."""
    learning_rate: float = 7e-4
    """Step size at the first update."""
    learning_rate_end: float | None = None
    """Where the learning rate arrives linearly at the last step; by default it stays."""
    rmsprop_decay: float = 0.99
    """Decay of RMSprop's mean square (elsewhere: alpha)."""
    epsilon: float = 1e-5
    """The optimiser's epsilon."""
    epsilon_inside_root: bool = True
    """RMSprop only: add epsilon before the root (A3C, TensorFlow) or after it (PyTorch)."""
    clip_norm: float | None = 0.5
    """Largest global norm of a gradient; none to leave it."""
    normalize_advantages: bool = False
    """Shift and scale advantages to mean 0 and deviation 1 over all learners' valid rows."""
    loss_reduction: Literal["mean", "sum"] = "mean"
    """Mean over valid transitions, or their sum where a paper asks for it."""

    # Files

    run_dir: Path | None = None
    """Folder of this run; by default `runs/{env}__{algorithm}__{seed}__{time}`."""
    init_from: Path | None = None
    """Checkpoint whose parameters the model starts from."""
    log_every_steps: int | None = None
    """Env steps between lines of metrics; by default a two-hundredth of the run, 20,000 at most."""

    @property
    def environment(self) -> EnvironmentConfig:
        """The part that says which environment and under which rules."""
        return EnvironmentConfig(
            id=self.env,
            kwargs=self.env_kwargs,
            protocol=self.protocol,
            vectorization=self.vectorization,
            image_layout=self.image_layout,
            max_episode_steps=self.max_episode_steps,
        )

    @property
    def log_interval(self) -> int:
        """Env steps between lines of metrics."""
        return self.log_every_steps or max(1, min(20_000, self.total_steps // 200))
