"""A learner: a batch becomes one step of the optimiser, together with the other learners.

Gradient, sum over learners, clip, step: always in this order. Which targets is the algorithm's
choice; how gradients meet is the runtime's. What is not here: how a batch becomes a gradient
(`objective`), and when to learn from what.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from repertory import models
from repertory.checkpoints import check_plain, load, load_model_state, model_state, resolve
from repertory.config import RunConfig
from repertory.environments.base import EnvironmentSpec
from repertory.losses import advantage_moments, normalize_advantages
from repertory.objective import Objective, Schedule, TargetFunction
from repertory.optimizers import load_in_place, optimizer_for, prepare_state
from repertory.parameters import policy_lag
from repertory.progress import Account, Stopwatch, Window
from repertory.runtimes.base import GroupMember, RoleContext
from repertory.targets import Targets
from repertory.trajectories import Trajectory


class Learner:
    """Owns a model's parameters and the optimiser's state, and counts what they have seen."""

    def __init__(
        self,
        model: nn.Module,
        config: RunConfig,
        group: GroupMember,
        stopwatch: Stopwatch,
        *,
        rank: int = 0,
    ) -> None:
        """Start at version 0 with `model`'s parameters.

        Args:
            model: Keeps the `Model` protocol; learning happens on its device.
            config: Learning settings and the extent of the run.
            group: The learners that this one sums gradients with.
            stopwatch: Where the seconds in `learning` and `waiting` are counted.
            rank: Of this learner in its group.
        """
        self.model = model
        self.rank = rank
        self.version = 0
        self.updates = 0
        self.env_steps = 0
        self._whole = True
        self._kept: dict[str, Callable[[], Mapping[str, Any]]] = {}
        self._config = config
        self._group = group
        self._stopwatch = stopwatch
        self._objective = Objective(model, config)
        self._optimizer = optimizer_for(config, model.parameters())
        self._account = Account(rank, config.log_interval, stopwatch)

    @classmethod
    def create(
        cls,
        config: RunConfig,
        environment: EnvironmentSpec,
        group: GroupMember,
        stopwatch: Stopwatch,
        *,
        rank: int = 0,
    ) -> Learner:
        """A learner where the run begins, or where it goes on, on the run's device."""
        learner = cls(models.create(config, environment, rank), config, group, stopwatch, rank=rank)
        if config.resume_from is not None:
            learner.load_state_dict(load(resolve(config.resume_from)))
        return learner

    @property
    def window(self) -> Window:
        """What this learner has to tell at its next report."""
        return self._account.window

    @property
    def finished(self) -> bool:
        """Whether all learners together have seen the run's env steps."""
        return self.env_steps >= self._config.leg_end

    def keep(self, name: str, collect: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Have something else in the state from now on.

        Returns:
            What the checkpoint that the run goes on from holds of it; None without one.
        """
        self._kept[name] = collect
        if self._config.resume_from is None:
            return None
        held: Mapping[str, Any] | None = load(resolve(self._config.resume_from)).get(name)
        return held

    def update(
        self,
        batch: Trajectory,
        targets: TargetFunction,
        *,
        num_fresh: int | None = None,
        clip_range: float | None = None,
    ) -> bool:
        """Learn once from a batch.

        Where no learner has a valid transition, the parameters stay as they are.

        Args:
            batch: T ticks by this learner's columns, on any device.
            targets: Makes value targets and advantages.
            num_fresh: How many of the columns, from the first, were never learned from. The others
                count no env steps and no lag, and an update without any makes no new version.
                By default all.
            clip_range: Asks for the clipped surrogate in place of the plain policy gradient.

        Returns:
            False when the run was asked to stop: nothing was learned then.

        Raises:
            FloatingPointError: The gradient is not finite; the parameters are left as they were.
                With `not_finite="skip"`, only once it has been so for many updates in a row.
        """
        objective, here = self._objective, batch.to(self._objective.device)
        num_fresh = batch.num_columns if num_fresh is None else num_fresh
        env_steps = int(batch.valid[:, :num_fresh].sum())
        schedule = Schedule.at(self._config, self.env_steps)
        with self._stopwatch("learning"):
            estimates, entropies = objective.estimate(here)
            made = targets(estimates)
        if self._config.normalize_advantages:
            moments = advantage_moments(made.advantages, here.valid)
            with self._stopwatch("waiting"):
                if self._group.sum(moments) is None:
                    return False
            made = Targets(made.values, normalize_advantages(made.advantages, here.valid, moments))
        with self._stopwatch("learning"):
            losses = objective.differentiate(
                estimates, entropies, made, schedule.entropy_cost, clip_range
            )
        with self._stopwatch("waiting"):
            counts = self._group.sum(objective.gradient, int(losses.count), env_steps)
        if counts is None:
            return False
        if num_fresh:
            learned = batch.valid[:, :num_fresh].any(0)
            versions = policy_lag(self.version, batch.policy_version[:num_fresh][learned])
            lag = versions * self._config.updates_per_version
            self.window.add_played(batch, lag)
        if counts[0] > 0 or self._config.awaits_versions:
            self.version += num_fresh > 0
        if counts[0] == 0:
            return True
        with self._stopwatch("learning"):
            objective.reduce(counts[0])
            try:
                norm = objective.clip(losses, self.updates)
            except FloatingPointError as error:
                if self._config.not_finite == "stop":
                    raise
                self._account.refuse(error, told=self.rank == 0)
                return True
            for group in self._optimizer.param_groups:
                group["lr"] = schedule.learning_rate
            self._whole = False
            self._optimizer.step()
            self.updates += 1
            self.env_steps += counts[1]
            self._whole = True
        self._account.accept()
        self.window.add(losses, norm, schedule)
        return True

    def report(self, context: RoleContext) -> None:
        """Report the window that the last update completed, if it did, and offer the state.

        The first learner also gives a pulse about once a second, whatever the windows' length.
        """
        self._account.report(context, self.env_steps, finished=self.finished)
        if self.rank == 0:
            context.offer_state(self.state_dict)

    def finish(self, context: RoleContext) -> dict[str, Any]:
        """Report what the last window holds; the final state is the role's result."""
        self._account.close(context, self.env_steps)
        self._group.leave()
        return self.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; rates and epsilons are those of the settings."""
        load_model_state(self.model, state["model"])
        prepare_state(self._optimizer)
        load_in_place(self._optimizer, state["optimizer"])
        self.env_steps, self.updates = state["env_steps"], state["updates"]
        self.version = self.updates // self._config.updates_per_version
        self._account.go_on(self.env_steps)

    def state_dict(self) -> dict[str, Any]:
        """Parameters, optimiser state and counters, copied to the CPU; see `check_plain`.

        Whoever receives it in another process may have no GPU.

        Raises:
            RuntimeError: An update is half made.
        """
        if not self._whole:
            raise RuntimeError("an update is half made: there is no whole state")
        state: dict[str, Any] = check_plain(
            {
                "model": model_state(self.model),
                "optimizer": self._optimizer.state_dict(),
                "env_steps": self.env_steps,
                "updates": self.updates,
                **{name: collect() for name, collect in self._kept.items()},
            }
        )
        return state
