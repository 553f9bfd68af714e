"""A3C: every worker plays and learns, and nobody waits for anybody.

                  ┌── pull ── shared parameters and statistics ── pull ──┐
                  ▼                 ▲            ▲                       ▼
    environments ──▶ unroll ──▶ gradient        gradient ◀── unroll ◀── environments
                  worker 0                                worker 1

Each worker copies the shared parameters, unrolls, differentiates on its own copy and steps the
shared parameters with its own gradient, whatever the others did meanwhile: Mnih et al. (2016),
section 4 and algorithm S3. How many updates by others lie between a worker's pull and its push is
its policy lag, and is measured at the push.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from repertory import models
from repertory.actors import Actor
from repertory.config import RunConfig
from repertory.environments.base import EnvironmentSpec
from repertory.objective import Estimates
from repertory.optimizers import optimizer_for
from repertory.progress import Stopwatch
from repertory.runtimes.base import RoleContext, Runtime, SharedModelWorker
from repertory.targets import Targets, gae
from repertory.workers import TooOld, Worker, load_counted


@dataclass(frozen=True, kw_only=True)
class A3CConfig(RunConfig):
    """Settings of A3C."""

    num_workers: int = 2
    """Workers; each plays `num_envs` columns and learns."""
    lock: bool = False
    """Pull and push one at a time, so that no step is lost; by default nobody waits."""
    shared_statistics: bool = True
    """One optimiser state for all workers (the published setting), or one each, of which a
    checkpoint holds one."""
    sync: Literal["copy", "soft"] = "copy"
    """Before each unroll a worker copies the shared parameters, or moves towards them by `tau`."""
    tau: float = 0.5
    """With `sync=soft`: own becomes (1 - tau) own + tau shared (pytorch-a3c: tau is gae_lambda)."""
    max_lag: int | None = None
    """Updates by others after which a gradient is too old; none for no limit."""
    too_old: TooOld = "drop"
    """Drop a gradient that is too old, or make it once more with fresh parameters."""
    gae_lambda: float = 1.0
    """How far advantages look: 0 one step, 1 to the unroll's end (the published setting)."""

    @property
    def num_players(self) -> int:
        """Roles that own environments."""
        return self.num_workers

    @property
    def num_reporters(self) -> int:
        """Roles that learn and tell of it."""
        return self.num_workers

    @property
    def in_step(self) -> bool:
        """Whether the roles that learn make every update together."""
        return False

    def conflict(self) -> str | None:
        """What is wrong with settings that are each in their range, on one line."""
        if self.runtime == "ray" and (self.device == "cuda" or self.learner_gpus):
            return "workers of a3c are on CPUs with runtime=ray: leave device and learner_gpus out"
        if self.sync == "copy" and self.tau != 0.5:
            return "tau has no meaning with sync=copy; pytorch-a3c's tau is gae_lambda here"
        if self.too_old == "recompute" and self.max_lag is None:
            return "too_old=recompute has no meaning without max_lag"
        if self.exact_resume and self.runtime != "inline":
            return "exact_resume needs runtime=inline: workers that wait for nobody never repeat"
        return super().conflict()


def train(config: A3CConfig, environment: EnvironmentSpec, runtime: Runtime) -> None:
    """Start the workers around one set of shared parameters."""
    model = models.create_on_cpu(config, environment)
    optimizer = optimizer_for(config, model.parameters())
    shared = runtime.shared_model(
        model,
        optimizer,
        config.num_workers,
        lock=config.lock,
        shared_statistics=config.shared_statistics,
        **load_counted(config, optimizer),
    )
    for index in range(config.num_workers):
        runtime.start(
            f"worker-{index}",
            learn,
            index,
            config,
            environment,
            shared.worker(index),
            threads=config.learner_threads,
            replaceable=True,
        )


def learn(
    context: RoleContext,
    index: int,
    config: A3CConfig,
    environment: EnvironmentSpec,
    shared: SharedModelWorker,
) -> dict[str, Any]:
    """Pull, play an unroll, push its gradient, and so on until the env steps are spent."""
    stopwatch = Stopwatch()
    worker = Worker.create(
        config,
        environment,
        shared,
        stopwatch,
        index=index,
        tau=config.tau if config.sync == "soft" else 1.0,
        max_lag=config.max_lag,
        too_old=config.too_old,
    )
    actor = Actor.create(
        config, environment, worker.model, stopwatch, indices=[index], starts=context.starts
    )
    while worker.pull() and not worker.finished:
        batch = actor.unroll(worker.version)
        if not worker.push(batch, partial(targets, config)):
            break
        worker.report(context)
        actor.report(context)
    state = worker.finish(context)
    actor.close()
    return state


def targets(config: A3CConfig, estimates: Estimates) -> Targets:
    """Lambda returns; what the lag changes is measured and left uncorrected, as published."""
    return gae(
        estimates.values,
        estimates.rewards,
        estimates.discounts,
        estimates.valid,
        config.gae_lambda,
    )
