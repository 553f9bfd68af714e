"""IMPALA: actors only play, learners only learn, and V-trace corrects for what lies between.

    actors ──trajectories, as they come──▶ queue ──▶ learners ──newest parameters──▶ actors
                                             │          ▲
                                             └─ replay ─┘

An actor takes the newest parameters, plays one unroll with them, and hands it on; it is held back
by nothing but a full queue. So a trajectory is some updates old when it is learned from, and
importance weights against the policy that played it correct for that: Espeholt et al. (2018). The
same weights allow a trajectory to be used again, from replay or in several passes.

With `schedule="fixed"` it is decided beforehand who plays with which version: trajectory k of every
actor with version max(k - 1, 0), and update k takes trajectory k of all. Same seed, same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Literal

from repertory import models
from repertory.actors import Actor, played_seed, trajectory_spec
from repertory.config import ConfigError, RunConfig
from repertory.environments.base import EnvironmentSpec
from repertory.learners import Learner
from repertory.losses import importance_moments, importance_spread
from repertory.objective import Estimates
from repertory.progress import Stopwatch
from repertory.replay import Replay, memory_needed
from repertory.runtimes.base import (
    GroupMember,
    ParameterReader,
    ParameterWriter,
    RoleContext,
    Runtime,
    TrajectoryReader,
    TrajectoryWriter,
)
from repertory.seeds import Stream, generator_for
from repertory.targets import Targets, vtrace
from repertory.trajectories import Trajectory, split, stack

_MOST_WAITING = 4_096  # their numbers have to fit into a pipe


@dataclass(frozen=True, kw_only=True)
class IMPALAConfig(RunConfig):
    """Settings of IMPALA."""

    num_actors: int = 2
    """Actors; each plays `num_envs` columns and does nothing else."""
    num_learners: int = 1
    """Learners that sum their gradients and stay equal; learner r has the actors r, r + L, ..."""
    actor_device: Literal["cpu", "auto"] = "cpu"
    """Where actors choose actions; `auto` is where the model learns, which pays off with many
    columns to an actor."""
    batch_trajectories: int | None = None
    """Unrolls of actors in a learner's batch; by default as many as it has actors."""
    schedule: Literal["free", "fixed"] = "free"
    """Learn from what comes first (as published), or from unroll k of every actor at update k."""
    queue_capacity: int = 2
    """Unrolls of each actor that may wait; together with the batch it bounds the policy lag."""
    prefetch: bool | None = None
    """Copy the next batch while this one is learned from, which may add an update to the policy
    lag (`runtime=processes`); by default where the learner has a GPU."""
    max_lag: int | None = None
    """Drop trajectories that are more updates old than this; none for no limit."""
    vtrace_lambda: float = 1.0
    """Factor on every trace of V-trace (as published: 1)."""
    rho_clip: float = 1.0
    """Largest importance weight of a one-step error; decides which policy's value is learned."""
    trace_clip: float = 1.0
    """Largest factor that carries an error a tick back; decides only how fast it is learned."""
    advantage_clip: float | None = None
    """Largest importance weight of a policy gradient; by default `rho_clip`."""
    passes: int = 1
    """Updates from each batch, each with importance weights against the policy that played."""
    surrogate: Literal["gradient", "clip"] = "gradient"
    """Plain policy gradient, or the clipped surrogate of PPO (the variant known as APPO)."""
    clip_range: float = 0.2
    """How far from 1 the clipped surrogate drives an importance ratio."""
    replay_share: float = 0.0
    """Share of each batch that is drawn from replay (in the paper's experiments with it: 0.5)."""
    replay_capacity: int = 10_000
    """Trajectories of one column that each learner's replay keeps."""
    replay_max_bytes: int = 4_000_000_000
    """Bytes that each learner's replay takes at most; may leave room for fewer trajectories."""
    checkpoint_replay: bool = False
    """Keep replay in every checkpoint, which grows by as much; otherwise a run that goes on, and
    with `exact_resume` every leg of it, begins with an empty one."""

    @property
    def num_players(self) -> int:
        """Roles that own environments."""
        return self.num_actors

    @property
    def num_reporters(self) -> int:
        """Roles that learn and tell of it."""
        return self.num_learners

    @property
    def updates_per_version(self) -> int:
        """Updates that a learner makes from a batch before it publishes."""
        return self.passes

    @property
    def awaits_versions(self) -> bool:
        """Whether actors wait for versions by number, also for those without an update."""
        return self.schedule == "fixed"

    @property
    def transitions_together(self) -> int:
        """Transitions of all learners' batches."""
        unrolls = sum(batch_size(rank, self) for rank in range(self.num_learners))
        return self.unroll_length * self.num_envs * unrolls

    def conflict(self) -> str | None:
        """What is wrong with settings that are each in their range, on one line."""
        if self.schedule == "fixed" and self.batch_trajectories is not None:
            return "schedule=fixed takes one trajectory of each actor: leave batch_trajectories out"
        if self.surrogate == "clip" and self.advantage_clip is not None:
            return "advantage_clip has no meaning with surrogate=clip, whose ratio is the weight"
        if self.schedule == "fixed" and self.max_lag is not None and self.max_lag < self.passes:
            return "schedule=fixed has a lag of one batch always: max_lag must be at least passes"
        if self.runtime == "ray" and self.actor_device != "cpu":
            return "actors have no GPU with runtime=ray: leave actor_device out"
        if self.checkpoint_replay and (self.replay_share == 0.0 or self.num_learners > 1):
            return (
                "checkpoint_replay is of one learner that replays: set replay_share and one learner"
            )
        if max(capacity_of(rank, self) for rank in range(self.num_learners)) > _MOST_WAITING:
            return (
                f"at most {_MOST_WAITING:,} unrolls of an actor can wait: lower queue_capacity, or "
                "batch_trajectories, or take more actors"
            )
        if self.exact_resume and self.schedule != "fixed":
            return "exact_resume needs schedule=fixed: what comes first is never the same twice"
        return super().conflict()


def train(config: IMPALAConfig, environment: EnvironmentSpec, runtime: Runtime) -> None:
    """Start the learners, and the actors that play for one learner each."""
    model = models.create_on_cpu(config, environment)
    spec = trajectory_spec(
        environment, model, unroll_length=config.unroll_length, num_columns=config.num_envs
    )
    if config.replay_share and config.replay_max_bytes < (needed := memory_needed(spec, 1)):
        raise ConfigError(f"replay_max_bytes must be at least {needed:,}: a column's unroll")
    group = runtime.learner_group(model, config.num_learners)
    parameters = runtime.parameter_store(model, num_readers=config.num_actors)
    for rank in range(config.num_learners):
        actors = actors_of(rank, config)
        trajectories = runtime.trajectory_queue(
            spec,
            len(actors),
            order="actor" if config.schedule == "fixed" else "arrival",
            capacity=capacity_of(rank, config),
        )
        runtime.start(
            f"learner-{rank}",
            learn,
            rank,
            config,
            environment,
            group.member(rank),
            trajectories.reader(prefetch=prefetches(rank, config)),
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
                replaceable=config.schedule == "free",  # a schedule counts on every unroll
            )


def actors_of(rank: int, config: IMPALAConfig) -> range:
    """The actors that play for one learner."""
    return range(rank, config.num_actors, config.num_learners)


def batch_size(rank: int, config: IMPALAConfig) -> int:
    """Unrolls in a batch of one learner."""
    return config.batch_trajectories or len(actors_of(rank, config))


def capacity_of(rank: int, config: IMPALAConfig) -> int:
    """Unrolls of each actor that may wait; a batch may ask for more than one of each."""
    each = -(-batch_size(rank, config) // len(actors_of(rank, config)))
    return max(config.queue_capacity, each)


def prefetches(rank: int, config: IMPALAConfig) -> bool:
    """Whether a learner's next batch is copied while it learns."""
    on_gpu = models.device_of(config, rank).type == "cuda"
    return on_gpu if config.prefetch is None else config.prefetch


def act(
    context: RoleContext,
    index: int,
    config: IMPALAConfig,
    environment: EnvironmentSpec,
    trajectories: TrajectoryWriter,
    parameters: ParameterReader,
) -> None:
    """Take the newest parameters, play an unroll, hand it on; wait only for a free slot.

    With `schedule="fixed"` it waits for its version, too.
    """
    stopwatch = Stopwatch()
    model = models.create_on_cpu(config, environment)
    if config.actor_device == "auto":
        model.to(models.device_of(config, index))
    actor = Actor.create(
        config, environment, model, stopwatch, indices=[index], starts=context.starts
    )
    first: int | None = None  # version; not 0 where a run goes on
    for unroll in count():
        wanted = None
        if config.schedule == "fixed" and first is not None:
            wanted = first + unroll - 1
        with stopwatch("waiting"):
            version = parameters.refresh(model, wanted)
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
    config: IMPALAConfig,
    environment: EnvironmentSpec,
    group: GroupMember,
    trajectories: TrajectoryReader,
    parameters: ParameterWriter,
) -> dict[str, Any]:
    """Take what has come, learn from it and from replay, publish the next version."""
    stopwatch = Stopwatch()
    learner = Learner.create(config, environment, group, stopwatch, rank=rank)
    replay = make_replay(context, rank, config, environment, learner)
    if rank == 0:
        parameters.publish(learner.model, learner.version)
    while not learner.finished:
        with stopwatch("waiting"):
            fresh = trajectories.take(batch_size(rank, config))
        if fresh is None or not learn_from(fresh, replay, config, learner):
            break
        learner.report(context)
        if rank == 0 and not learner.finished:
            parameters.publish(learner.model, learner.version)
    if rank == 0:
        parameters.close()
    trajectories.close()
    return learner.finish(context)


def learn_from(
    fresh: Trajectory, replay: Replay | None, config: IMPALAConfig, learner: Learner
) -> bool:
    """Make the passes over a batch; False when the run was asked to stop."""
    drop_old(fresh, config, learner)
    batch = fresh
    if replay is not None:
        batch = with_drawn(fresh, replay, config, learner)
        keep(fresh, replay)
    for index in range(config.passes):
        going_on = learner.update(
            batch,
            partial(targets, config, learner.window.observe),
            num_fresh=fresh.num_columns if index == 0 else 0,
            clip_range=config.clip_range if config.surrogate == "clip" else None,
        )
        if not going_on:
            return False
    return True


def drop_old(fresh: Trajectory, config: IMPALAConfig, learner: Learner) -> None:
    """Make trajectories invalid that are too old, and count them."""
    if config.max_lag is None:
        return
    old = (learner.version - fresh.policy_version) * config.passes > config.max_lag
    fresh.valid[:, old] = False
    learner.window.count("trajectories_dropped", int(old.sum()))


def with_drawn(
    fresh: Trajectory, replay: Replay, config: IMPALAConfig, learner: Learner
) -> Trajectory:
    """The fresh columns, and beside them the share that is drawn from replay.

    Where it is no whole number of columns, some batches have one more than others.
    """
    each = fresh.num_columns * config.replay_share / (1.0 - config.replay_share)
    before, after = (math.floor(each * k + 1e-6) for k in (learner.version, learner.version + 1))
    wanted = after - before
    if not len(replay):
        return fresh
    learner.window.observe("replay_ratio", wanted / fresh.num_columns)
    if not wanted:
        return fresh
    drawn = replay.draw(wanted)
    age = (learner.version - drawn.policy_version).double().mean().item()
    learner.window.observe("replay_age", age * config.passes)
    return stack([fresh, drawn])


def keep(fresh: Trajectory, replay: Replay) -> None:
    """Add the fresh columns to replay, without those that were dropped."""
    for column in split(fresh, [1] * fresh.num_columns):
        if column.valid.any():
            replay.add(column)


def make_replay(
    context: RoleContext,
    rank: int,
    config: IMPALAConfig,
    environment: EnvironmentSpec,
    learner: Learner,
) -> Replay | None:
    """A learner's own replay, with what it will take said at the start; None without a share."""
    if config.replay_share == 0.0:
        return None
    replay = Replay(
        trajectory_spec(
            environment, learner.model, unroll_length=config.unroll_length, num_columns=1
        ),
        config.replay_capacity,
        config.replay_max_bytes,
        generator_for(played_seed(config), Stream.REPLAY, rank),
    )
    message = f"replay of learner {rank}: {replay.capacity:,} trajectories, {replay.nbytes:,} bytes"
    message += " when full"
    if config.checkpoint_replay:
        message += ", and as many in every checkpoint"
        if (kept := learner.keep("replay", replay.state_dict)) is not None:
            try:
                replay.load_state_dict(kept)
                message += f"; it goes on with {len(replay):,}"
            except ValueError as error:  # of another unroll length, say
                message += f"; it begins empty: {error}"
    context.report({"kind": "event", "event": "replay", "message": message})
    return replay


def targets(
    config: IMPALAConfig, observe: Callable[[str, float], None], estimates: Estimates
) -> Targets:
    """V-trace against the policy that played, and how much it had to correct."""
    moments = importance_moments(
        estimates.target_log_probs,
        estimates.behaviour_log_probs,
        estimates.valid,
        rho_clip=config.rho_clip,
        trace_clip=config.trace_clip,
    )
    if moments[0]:  # where all was dropped there is nothing to tell
        spread = importance_spread(moments)
        observe("rho_clipped_share", spread.above_rho_clip)
        observe("trace_clipped_share", spread.above_trace_clip)
        observe("effective_sample_share", spread.effective_sample_share)
    return vtrace(
        estimates.values,
        estimates.rewards,
        estimates.discounts,
        estimates.valid,
        estimates.target_log_probs,
        estimates.behaviour_log_probs,
        lambda_=config.vtrace_lambda,
        rho_clip=config.rho_clip,
        trace_clip=config.trace_clip,
        advantage_clip=config.advantage_clip,
        weighted_advantages=config.surrogate == "gradient",
    )
