"""A batch becomes a gradient: estimates, targets, losses, backward pass, clipping.

The one place where a model is differentiated. Which targets is the algorithm's choice. What is not
here: what a gradient is for. Learners sum theirs and step together (`learners`), workers push each
its own into shared parameters (`workers`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from repertory.config import RunConfig
from repertory.losses import ClippedSurrogate, Losses, actor_critic_losses, transform_rewards
from repertory.models.base import Model, Remembers
from repertory.optimizers import linear
from repertory.parameters import flat_gradient
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


TargetFunction = Callable[[Estimates], Targets]


@dataclass(frozen=True)
class Schedule:
    """What changes linearly with the env steps that the whole run has learned from."""

    learning_rate: float
    entropy_cost: float

    @classmethod
    def at(cls, config: RunConfig, env_steps: int) -> Schedule:
        """The values for an update that begins after so many env steps."""
        fraction = min(1.0, env_steps / config.total_steps)
        return cls(
            linear(config.learning_rate, config.learning_rate_end, fraction),
            linear(config.entropy_cost, config.entropy_cost_end, fraction),
        )


class Objective:
    """What a model is asked to do better, as a gradient of its parameters.

    Attributes:
        model: Keeps the `Model` protocol.
        gradient: [parameters]; one vector that all gradients of the model are views of.
        device: Where the model is.
    """

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        """Make room for the gradient."""
        self.model = model
        self.gradient = flat_gradient(model)
        self.device = self.gradient.device
        self._config = config

    def estimate(self, batch: Trajectory) -> tuple[Estimates, Tensor]:
        """Run the model over the batch; also entropies, [T, B]."""
        model: Model = self.model  # type: ignore[assignment]
        config, resets = self._config, batch.resets
        rows = (batch.observations[:-1], batch.initial_core_state, resets[:-1])
        if isinstance(model, Remembers):
            output = model.run(*rows, batch.actions, batch.rewards)
        else:
            output = model(*rows)
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

    def differentiate(
        self,
        estimates: Estimates,
        entropies: Tensor,
        targets: Targets,
        entropy_cost: float,
        clip_range: float | None = None,
    ) -> Losses:
        """Put the gradient of the summed loss into `gradient`, in place of what was there.

        Args:
            estimates: Of `estimate`.
            entropies: [T, B]; of `estimate`.
            targets: Value targets and advantages.
            entropy_cost: Weight of the entropy bonus.
            clip_range: Asks for the clipped surrogate in place of the plain policy gradient.
        """
        surrogate = None
        if clip_range is not None:
            surrogate = ClippedSurrogate(clip_range, estimates.behaviour_log_probs)
        losses = actor_critic_losses(
            estimates.target_log_probs,
            entropies,
            estimates.values[:-1],
            targets,
            estimates.valid,
            value_cost=self._config.value_cost,
            entropy_cost=entropy_cost,
            surrogate=surrogate,
        )
        self.gradient.zero_()
        losses.total.backward()
        return losses

    def reduce(self, count: int) -> None:
        """Turn a sum over `count` valid transitions into what the settings ask for."""
        if self._config.loss_reduction == "mean":
            self.gradient /= max(1, count)

    def clip(self, losses: Losses, update: int) -> float:
        """Scale the gradient down to the largest norm allowed; return its norm before.

        Args:
            losses: What it is the gradient of, for the message.
            update: Number of the update, for the message.

        Raises:
            FloatingPointError: The gradient is not finite.
        """
        norm = float(self.gradient.norm())
        if not torch.isfinite(torch.tensor(norm)):
            raise FloatingPointError(
                f"update {update} has a gradient that is not finite (sums of this learner: "
                f"policy loss {losses.policy:g}, value loss {losses.value:g}, "
                f"entropy {losses.entropy:g}); the parameters are as before it"
            )
        if self._config.clip_norm is not None and norm > self._config.clip_norm:
            self.gradient *= self._config.clip_norm / norm
        return norm
