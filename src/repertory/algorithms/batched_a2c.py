"""Batched A2C: many columns, one synchronous update; everyone waits for everyone.

With `sync="step"` all of a learner's columns are one vector environment beside it, and a tick is
one forward pass:

    environments ──▶ unroll ──▶ update ◀──sum of gradients──▶ update ◀── unroll ◀── environments
                   learner 0                                learner 1

With `sync="trajectory"` actors are roles of their own, and each unrolls alone:

    actors ──trajectories, one from each──▶ learners ──parameters, version k──▶ actors

The two are the "sync step" and "sync trajectory" batched A2C that Espeholt et al. (2018), section 3
and table 1, compare IMPALA with. Both play trajectory k with version k: the policy lag is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Literal

from repertory import models
from repertory.actors import Actor, trajectory_spec
from repertory.config import RunConfig
from repertory.environments.base import EnvironmentSpec
from repertory.learners import Learner
from repertory.objective import Estimates
from repertory.progress import Stopwatch
from repertory.runtimes.base import (
    GroupMember,
    ParameterReader,
    ParameterWriter,
    RoleContext,
    Runtime,
    TrajectoryReader,
    TrajectoryWriter,
)
from repertory.targets import Targets, gae


@dataclass(frozen=True, kw_only=True)
class BatchedA2CConfig(RunConfig):
    """Settings of batched A2C."""

    sync: Literal["step", "trajectory"] = "step"
    """Wait for one another at every tick (columns beside the learner) or unroll (actor roles)."""
    num_actors: int = 1
    """Actors; each owns `num_envs` columns. With `sync=step` they play inside the learners."""
    num_learners: int = 1
    """Learners that sum their gradients and stay equal; learner r has the actors r, r + L, ..."""
    gae_lambda: float = 1.0
    """How far advantages look: 0 one step, 1 to the unroll's end (the published setting)."""

    @property
    def num_players(self) -> int:
        """Roles that own environments."""
        return self.num_learners if self.sync == "step" else self.num_actors

    @property
    def num_reporters(self) -> int:
        """Roles that learn and tell of it."""
        return self.num_learners

    @property
    def transitions_together(self) -> int:
        """Transitions of all actors."""
        return self.unroll_length * self.num_envs * self.num_actors


def train(config: BatchedA2CConfig, environment: EnvironmentSpec, runtime: Runtime) -> None:
    """Start the learners and, if they are roles of their own, the actors."""
    start = start_step if config.sync == "step" else start_trajectory
    start(config, environment, runtime)


def start_step(config: BatchedA2CConfig, environment: EnvironmentSpec, runtime: Runtime) -> None:
    """Learners that play their share of columns themselves."""
    model = models.create_on_cpu(config, environment)
    group = runtime.learner_group(model, config.num_learners)
    for rank in range(config.num_learners):
        runtime.start(
            f"learner-{rank}",
            play_and_learn,
            rank,
            config,
            environment,
            group.member(rank),
            threads=config.learner_threads,
        )


def start_trajectory(
    config: BatchedA2CConfig, environment: EnvironmentSpec, runtime: Runtime
) -> None:
    """Learners, and actors that play for one learner each."""
    model = models.create_on_cpu(config, environment)
    spec = trajectory_spec(
        environment, model, unroll_length=config.unroll_length, num_columns=config.num_envs
    )
    group = runtime.learner_group(model, config.num_learners)
    parameters = runtime.parameter_store(model, num_readers=config.num_actors)
    for rank in range(config.num_learners):
        actors = actors_of(rank, config)
        trajectories = runtime.trajectory_queue(spec, len(actors), order="actor")
        runtime.start(
            f"learner-{rank}",
            learn,
            rank,
            config,
            environment,
            group.member(rank),
            trajectories.reader(),
            parameters.writer(),
            threads=config.learner_threads,
        )
        for place, actor in enumerate(actors):
            runtime.start(
                f"actor-{actor}",
                act,
                actor,
                config,
                environment,
                trajectories.writer(place),
                parameters.reader(actor),
                threads=config.actor_threads,
            )


def actors_of(rank: int, config: BatchedA2CConfig) -> range:
    """The actors that play for one learner."""
    return range(rank, config.num_actors, config.num_learners)


def play_and_learn(
    context: RoleContext,
    rank: int,
    config: BatchedA2CConfig,
    environment: EnvironmentSpec,
    group: GroupMember,
) -> dict[str, Any]:
    """A2C's `learn` in this learner's columns, with gradients summed over all learners."""
    stopwatch = Stopwatch()
    learner = Learner.create(config, environment, group, stopwatch, rank=rank)
    actor = Actor.create(
        config, environment, learner.model, stopwatch, indices=actors_of(rank, config)
    )
    while not learner.finished:
        batch = actor.unroll(learner.version)
        if not learner.update(batch, partial(targets, config)):
            break
        learner.report(context)
        actor.report(context)
    state = learner.finish(context)
    actor.close()
    return state


def act(
    context: RoleContext,
    index: int,
    config: BatchedA2CConfig,
    environment: EnvironmentSpec,
    trajectories: TrajectoryWriter,
    parameters: ParameterReader,
) -> None:
    """Play trajectory k with version k, waiting for it."""
    stopwatch = Stopwatch()
    model = models.create_on_cpu(config, environment)
    actor = Actor.create(config, environment, model, stopwatch, indices=[index])
    first: int | None = None  # version; not 0 where a run goes on
    for unroll in count():
        with stopwatch("waiting"):
            version = parameters.refresh(model, None if first is None else first + unroll)
        if version is None:
            break
        first = version if first is None else first
        trajectory = actor.unroll(version)
        with stopwatch("waiting"):
            if not trajectories.put(trajectory):
                break
        actor.report(context)
    actor.close()


def learn(
    context: RoleContext,
    rank: int,
    config: BatchedA2CConfig,
    environment: EnvironmentSpec,
    group: GroupMember,
    trajectories: TrajectoryReader,
    parameters: ParameterWriter,
) -> dict[str, Any]:
    """Wait for one trajectory from each actor, learn from all, publish the next version."""
    stopwatch = Stopwatch()
    learner = Learner.create(config, environment, group, stopwatch, rank=rank)
    if rank == 0:
        parameters.publish(learner.model, learner.version)
    while not learner.finished:
        with stopwatch("waiting"):
            batch = trajectories.take(len(actors_of(rank, config)))
        if batch is None or not learner.update(batch, partial(targets, config)):
            break
        learner.report(context)
        if rank == 0 and not learner.finished:
            parameters.publish(learner.model, learner.version)
    if rank == 0:
        parameters.close()
    trajectories.close()
    return learner.finish(context)


def targets(config: BatchedA2CConfig, estimates: Estimates) -> Targets:
    """Lambda returns: nothing to correct, as the behaviour policy is the target policy."""
    return gae(
        estimates.values,
        estimates.rewards,
        estimates.discounts,
        estimates.valid,
        config.gae_lambda,
    )
