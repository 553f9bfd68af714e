"""A worker of A3C: pulls the shared parameters, and pushes its own gradient back into them.

What is here: one worker's copy of the parameters, its gradient, and what becomes of it. What is not
here: how a batch becomes a gradient (`objective`), and where shared parameters are and who may
touch them when (`runtimes`).
"""

from __future__ import annotations

from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from repertory import models
from repertory.checkpoints import load, resolve
from repertory.config import RunConfig
from repertory.environments.base import EnvironmentSpec
from repertory.losses import advantage_moments, normalize_advantages
from repertory.objective import Objective, Schedule, TargetFunction
from repertory.optimizers import load_in_place, prepare_state
from repertory.progress import Account, Stopwatch
from repertory.runtimes.base import Push, RoleContext, SharedModelWorker
from repertory.targets import Targets
from repertory.trajectories import Trajectory

TooOld = Literal["drop", "recompute"]
"""What becomes of a gradient that is older than allowed: nothing, or it is made once more."""


class Worker:
    """Owns a copy of the shared parameters and makes gradients with it.

    Attributes:
        model: The worker's own copy; plays and learns.
        version: Updates by all workers that the last pull had seen.
        env_steps: Env steps by all workers, as last heard.
    """

    def __init__(
        self,
        model: nn.Module,
        config: RunConfig,
        shared: SharedModelWorker,
        stopwatch: Stopwatch,
        *,
        index: int,
        tau: float = 1.0,
        max_lag: int | None = None,
        too_old: TooOld = "drop",
    ) -> None:
        """Stand before the first pull.

        Args:
            model: Keeps the `Model` protocol; overwritten by the first pull.
            config: Learning settings and the extent of the run.
            shared: This worker's end of the shared model.
            stopwatch: Where the seconds in `learning` and `waiting` are counted.
            index: Of this worker.
            tau: How far a pull moves the copy; 1 copies. The first pull always copies.
            max_lag: Updates by others after which a gradient is too old; None for no limit.
            too_old: What becomes of it then.
        """
        self.model = model
        self.version = 0
        self.env_steps = 0
        self._config = config
        self._shared = shared
        self._stopwatch = stopwatch
        self._index = index
        self._tau = tau
        self._max_lag = max_lag
        self._too_old = too_old
        self._has_pulled = False
        self._objective = Objective(model, config)
        self._account = Account(index, config.log_interval, stopwatch)

    @classmethod
    def create(
        cls,
        config: RunConfig,
        environment: EnvironmentSpec,
        shared: SharedModelWorker,
        stopwatch: Stopwatch,
        **settings: Any,
    ) -> Worker:
        """A worker with a model of its own, on the run's device; `settings` as in `__init__`."""
        model = models.create(config, environment, settings["index"])
        return cls(model, config, shared, stopwatch, **settings)

    @property
    def finished(self) -> bool:
        """Whether all workers together have learned from the run's env steps."""
        return self.env_steps >= self._config.leg_end

    def pull(self) -> bool:
        """Move the copy to, or towards, the shared parameters; False when asked to stop."""
        with self._stopwatch("waiting"):
            pulled = self._shared.pull(self.model, self._tau if self._has_pulled else 1.0)
        if pulled is None:
            return False
        self.version, self.env_steps, distance = pulled
        if self._tau < 1.0:
            self._account.window.observe("parameter_distance", distance)
        if not self._has_pulled:
            self._account.go_on(self.env_steps)
        self._has_pulled = True
        return True

    def push(self, batch: Trajectory, targets: TargetFunction) -> bool:
        """Step the shared parameters with the gradient of a batch, unless it is too old.

        Args:
            batch: Played since the last pull.
            targets: Makes value targets and advantages.

        Returns:
            False when the run was asked to stop: nothing was learned then.

        Raises:
            FloatingPointError: The gradient is not finite; the shared parameters are left alone.
                With `not_finite="skip"`, only once it has been so for many pushes in a row.
        """
        pushed = self._push(batch, targets, self._max_lag)
        if pushed is not None and not pushed.applied and self._too_old == "recompute":
            self._account.window.count("gradients_recomputed")
            if not self.pull():
                return False
            pushed = self._push(batch, targets, max_lag=None)  # as fresh as one can be
        if pushed is None:
            return False
        if not pushed.applied:
            self._account.window.count("gradients_dropped")
            self._account.window.add_played(batch, lag=None)
        return True

    def report(self, context: RoleContext) -> None:
        """Report the window that the last push completed, if it did, and offer the state."""
        self._account.report(context, self.env_steps, finished=self.finished)
        if self._index == 0:
            context.offer_state(self._shared.state_dict)

    def finish(self, context: RoleContext) -> dict[str, Any]:
        """Report what the last window holds; the shared state is the role's result."""
        self._account.close(context, self.env_steps)
        return self._shared.state_dict()

    def _push(self, batch: Trajectory, targets: TargetFunction, max_lag: int | None) -> Push | None:
        """Make the gradient of a batch and push it."""
        objective, here = self._objective, batch.to(self._objective.device)
        schedule = Schedule.at(self._config, self.env_steps)
        with self._stopwatch("learning"):
            estimates, entropies = objective.estimate(here)
            made = targets(estimates)
            if self._config.normalize_advantages:
                moments = advantage_moments(made.advantages, here.valid)
                advantages = normalize_advantages(made.advantages, here.valid, moments)
                made = Targets(made.values, advantages)
            losses = objective.differentiate(estimates, entropies, made, schedule.entropy_cost)
            count = int(losses.count)
            if count == 0:  # nothing was played but resets
                self._account.window.add_played(batch, lag=None)
                return Push(applied=True, lag=0, env_steps=self.env_steps)
            objective.reduce(count)
            try:
                norm = objective.clip(losses, self.version)
            except FloatingPointError as error:
                if self._config.not_finite == "stop":
                    raise
                self._account.refuse(error)
                self._account.window.add_played(batch, lag=None)
                return Push(applied=True, lag=0, env_steps=self.env_steps)
        with self._stopwatch("waiting"):
            pushed = self._shared.push(
                objective.gradient,
                count,
                learning_rate=schedule.learning_rate,
                max_lag=max_lag,
            )
        if pushed is None:
            return None
        self.env_steps = pushed.env_steps
        if pushed.applied:
            self._account.accept()
            # A gradient that was made once more is as old as the games behind it.
            lag = self.version - batch.policy_version + pushed.lag
            self._account.window.add(losses, norm, schedule)
            self._account.window.add_played(batch, lag)
        return pushed


def load_counted(config: RunConfig, optimizer: Optimizer) -> dict[str, int]:
    """Where a run goes on, load the optimiser's state; the updates and env steps behind it."""
    if config.resume_from is None:
        return {}
    state = load(resolve(config.resume_from))
    prepare_state(optimizer)
    load_in_place(optimizer, state["optimizer"])
    return {"updates": state["updates"], "env_steps": state["env_steps"]}
