"""A learner: a batch becomes one step of the optimiser.

Targets, loss, gradient, sum over learners, clip, step: always in this order. Which targets is the
algorithm's choice; how gradients meet is the runtime's. What is not here: when to learn from what.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from repertory import models
from repertory.checkpoints import model_state
from repertory.config import RunConfig
from repertory.environments.base import EnvironmentSpec
from repertory.losses import (
    actor_critic_losses,
    advantage_moments,
    normalize_advantages,
    transform_rewards,
)
from repertory.models.base import Model
from repertory.optimizers import linear, make_optimizer
from repertory.parameters import policy_lag
from repertory.progress import Stopwatch, Window
from repertory.runtimes.base import GroupMember, RoleContext
from repertory.targets import Targets
from repertory.trajectories import Trajectory


@dataclass(frozen=True)
class Estimates:
    """What value targets and advantages are made of; see `targets`.

    Attributes:
        values: [T+1, B]; the critic at every observation.
        rewards: [T, B]; as the learner sees them.
        discounts: [T, B]; the discount where there is a future, 0 where the task terminated.
        valid: [T, B] bool.
        target_log_probs: [T, B]; of the action taken, by the learner's policy.
        behaviour_log_probs: [T, B]; the same by the policy that took it.
    """

    values: Tensor
    rewards: Tensor
    discounts: Tensor
    valid: Tensor
    target_log_probs: Tensor
    behaviour_log_probs: Tensor


_PULSE_SECONDS = 1.0

TargetFunction = Callable[[Estimates], Targets]


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
        self.env_steps = 0
        self._config = config
        self._group = group
        self._stopwatch = stopwatch
        self._device = next(model.parameters()).device
        self._optimizer = make_optimizer(
            model.parameters(),
            kind=config.optimizer,
            learning_rate=config.learning_rate,
            epsilon=config.epsilon,
            rmsprop_decay=config.rmsprop_decay,
            epsilon_inside_root=config.epsilon_inside_root,
        )
        self._gradient = _flat_gradient(model)
        self._window = Window()
        self._window_due = config.log_interval
        self._pulse_due = time.monotonic() + _PULSE_SECONDS

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
        """A learner at version 0, with the run's initial parameters, on the run's device."""
        model = models.create(config, environment)
        return cls(model, config, group, stopwatch, rank=rank)

    @property
    def finished(self) -> bool:
        """Whether all learners together have seen the run's env steps."""
        return self.env_steps >= self._config.total_steps

    def update(self, batch: Trajectory, targets: TargetFunction) -> bool:
        """Learn once from a batch.

        Args:
            batch: T ticks by this learner's columns, on any device.
            targets: Makes value targets and advantages.

        Returns:
            False when the run was asked to stop: nothing was learned then.

        Raises:
            FloatingPointError: The gradient is not finite; the parameters are left as they were.
        """
        config, here = self._config, batch.to(self._device)
        fraction = min(1.0, self.env_steps / config.total_steps)
        entropy_cost = linear(config.entropy_cost, config.entropy_cost_end, fraction)
        learning_rate = linear(config.learning_rate, config.learning_rate_end, fraction)

        with self._stopwatch("learning"):
            estimates, entropies = self._estimate(here)
            made = targets(estimates)
        if config.normalize_advantages:
            moments = advantage_moments(made.advantages, here.valid)
            with self._stopwatch("waiting"):
                if self._group.sum(moments) is None:
                    return False
            made = Targets(made.values, normalize_advantages(made.advantages, here.valid, moments))
        with self._stopwatch("learning"):
            losses = actor_critic_losses(
                estimates.target_log_probs,
                entropies,
                estimates.values[:-1],
                made,
                here.valid,
                value_cost=config.value_cost,
                entropy_cost=entropy_cost,
            )
            self._gradient.zero_()
            losses.total.backward()
        with self._stopwatch("waiting"):
            counts = self._group.sum(self._gradient, int(losses.count))
        if counts is None:
            return False
        with self._stopwatch("learning"):
            if config.loss_reduction == "mean":
                self._gradient /= max(1, counts[0])
            terms = torch.stack([losses.policy, losses.value, losses.entropy])
            norm = self._clip(terms)
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()

        lag = policy_lag(self.version, batch.policy_version)
        sums = torch.cat([terms.double(), losses.value_moments]).cpu()
        self._window.add(batch, sums, lag, norm)
        self._window.learning_rate, self._window.entropy_cost = learning_rate, entropy_cost
        self.version += 1
        self.env_steps += counts[0]
        return True

    def report(self, context: RoleContext) -> None:
        """Report the window that the last update completed, if it did, and offer the state.

        The first learner also gives a pulse about once a second, whatever the windows' length.
        """
        if self._window.updates and (self.env_steps >= self._window_due or self.finished):
            while self._window_due <= self.env_steps:
                self._window_due += self._config.log_interval
            self._report_window(context)
        if self.rank > 0:
            return
        if time.monotonic() >= self._pulse_due:
            self._pulse_due = time.monotonic() + _PULSE_SECONDS
            context.report({"kind": "pulse", "env_steps": self.env_steps})
        context.offer_state(self.state_dict)

    def finish(self, context: RoleContext) -> dict[str, Any]:
        """Report what the last window holds; the final state is the role's result."""
        if self._window.updates:
            self._report_window(context)
        return self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Parameters, optimiser state and counters: the live tensors, and plain values."""
        return {
            "model": model_state(self.model),
            "optimizer": self._optimizer.state_dict(),
            "env_steps": self.env_steps,
            "updates": self.version,
        }

    def _report_window(self, context: RoleContext) -> None:
        seconds_in = self._stopwatch.take()
        context.report(self._window.to_record(self.rank, self.env_steps, seconds_in))
        self._window = Window()

    def _estimate(self, batch: Trajectory) -> tuple[Estimates, Tensor]:
        """Run the model over the batch; also entropies, [T, B]."""
        model: Model = self.model  # type: ignore[assignment]
        config, resets = self._config, batch.resets
        output = model(batch.observations[:-1], batch.initial_core_state, resets[:-1])
        with torch.no_grad():  # the last row only bootstraps: no gradient, so no graph
            last = model(batch.observations[-1:], output.core_state, resets[-1:])
        estimates = Estimates(
            values=torch.cat([output.values, last.values]),
            rewards=transform_rewards(batch.rewards, config.reward_transform),
            discounts=config.discount * (~batch.terminated).to(output.values.dtype),
            valid=batch.valid,
            target_log_probs=output.policy.log_prob(batch.actions),
            behaviour_log_probs=batch.behaviour_log_probs,
        )
        return estimates, output.policy.entropy()

    def _clip(self, terms: Tensor) -> float:
        """Scale the summed gradient down to the largest norm allowed; return its norm before."""
        norm = float(self._gradient.norm())
        if not torch.isfinite(torch.tensor(norm)):
            policy, value, entropy = terms.tolist()
            raise FloatingPointError(
                f"update {self.version} has a gradient that is not finite (sums of this learner: "
                f"policy loss {policy:g}, value loss {value:g}, entropy {entropy:g}); "
                "the parameters are as before it"
            )
        if self._config.clip_norm is not None and norm > self._config.clip_norm:
            self._gradient *= self._config.clip_norm / norm
        return norm


def _flat_gradient(model: nn.Module) -> Tensor:
    """One vector that all gradients of `model` are views of, each laid out as its parameter.

    Gradients then meet, are clipped and are cleared with one operation each.
    """
    parameters = list(model.parameters())
    flat = torch.zeros(
        sum(parameter.numel() for parameter in parameters),
        dtype=parameters[0].dtype,
        device=parameters[0].device,
    )
    start = 0
    for parameter in parameters:
        parameter.grad = flat.as_strided(parameter.shape, parameter.stride(), start)
        start += parameter.numel()
    return flat
