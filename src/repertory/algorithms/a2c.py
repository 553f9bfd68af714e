"""A2C: one role plays and learns, in turns.

    environment ──▶ unroll ──▶ update ──▶ (the same parameters play on)

An advantage actor-critic with lambda-return advantages and an entropy bonus: the synchronous form
of Mnih et al. (2016), section 4. Data is always of the very policy that learns from it, so no
correction is needed and the policy lag is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from repertory import models
from repertory.actors import Actor
from repertory.config import RunConfig
from repertory.environments.base import EnvironmentSpec
from repertory.learners import Learner
from repertory.objective import Estimates
from repertory.progress import Stopwatch
from repertory.runtimes.base import GroupMember, RoleContext, Runtime
from repertory.targets import Targets, gae


@dataclass(frozen=True, kw_only=True)
class A2CConfig(RunConfig):
    """Settings of A2C."""

    runtime: Literal["inline", "processes", "ray"] = "inline"
    """Where the one role runs. From Python the default is `inline`, else `processes`."""
    gae_lambda: float = 1.0
    """How far advantages look: 0 one step, 1 to the unroll's end (the published setting)."""


def train(config: A2CConfig, environment: EnvironmentSpec, runtime: Runtime) -> None:
    """Start one role that does everything."""
    model = models.create_on_cpu(config, environment)
    group = runtime.learner_group(model, num_learners=1)
    runtime.start(
        "learner-0",
        learn,
        config,
        environment,
        group.member(0),
        threads=config.learner_threads,
    )


def learn(
    context: RoleContext, config: A2CConfig, environment: EnvironmentSpec, group: GroupMember
) -> dict[str, Any]:
    """Play an unroll, learn from it, and so on until the env steps are spent."""
    stopwatch = Stopwatch()
    learner = Learner.create(config, environment, group, stopwatch)
    actor = Actor.create(config, environment, learner.model, stopwatch, indices=[0])
    while not learner.finished:
        batch = actor.unroll(learner.version)
        if not learner.update(batch, partial(targets, config)):
            break
        learner.report(context)
        actor.report(context)
    state = learner.finish(context)
    actor.close()
    return state


def targets(config: A2CConfig, estimates: Estimates) -> Targets:
    """Lambda returns: nothing to correct, as the behaviour policy is the target policy."""
    return gae(
        estimates.values,
        estimates.rewards,
        estimates.discounts,
        estimates.valid,
        config.gae_lambda,
    )
