"""The actor-critic loss, its diagnostics, and what is done to rewards and advantages before it.

What is here: reward transforms, advantage normalisation, the sum of policy, value and entropy
terms, and how far importance ratios spread. What is not here: value targets (`targets`), the
division by the number of valid transitions and the optimiser's step (`learners`).

Everything is a sum over valid transitions, together with their count. So several learners can add
theirs up and divide once, and a coefficient means the same for any batch size and any number of
learners.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from repertory.targets import Targets, require_shape

RewardTransform = Literal["none", "clip", "sign", "asymmetric"]

_SMALLEST_DEVIATION = 1e-8
"""Added to the deviation of advantages, so that equal ones become 0 instead of 0 / 0."""

_LARGEST_LOG_RATIO = 300.0
"""Where ratios are cut before they are summed: the square of e^300 is still a finite float64."""


@dataclass(frozen=True)
class Losses:
    """Sums over the valid transitions of a batch; divide by `count` for means.

    Attributes:
        total: Scalar to differentiate: `policy + value_cost * value - entropy_cost * entropy`.
        policy: Scalar, detached; minus log-probability times advantage, or minus the surrogate.
        value: Scalar, detached; half the squared error of the critic.
        entropy: Scalar, detached; entropies in nats, at least 0 for discrete actions.
        count: Scalar int64; valid transitions.
        value_moments: [4] float64, detached; see `explained_variance`.
    """

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor
    count: Tensor
    value_moments: Tensor


@dataclass(frozen=True)
class ClippedSurrogate:
    """Asks for the clipped surrogate in place of the plain policy gradient.

    A ratio that has moved beyond the clip in the direction that its advantage asks for is pushed no
    further, so that several updates can be made from the same transitions. It belongs with
    advantages that hold no importance weight: `targets.vtrace(..., weighted_advantages=False)`.

    Attributes:
        clip: How far from 1 an importance ratio is driven; positive, 0.2 as published.
        behaviour_log_probs: [T, B]; of the actions taken, by the policy that took them.

    Reference:
        Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7. With V-trace
        targets the method is known as APPO.
    """

    clip: float
    behaviour_log_probs: Tensor


def transform_rewards(rewards: Tensor, kind: RewardTransform) -> Tensor:
    """What the learner sees of raw rewards.

    Args:
        rewards: Any shape.
        kind: `none` leaves them. `clip` cuts to [-1, 1], so 0.01 stays 0.01. `sign` keeps only
            the direction (bins to -1, 0, 1). `asymmetric` is 5 tanh(r / 5), times 0.3 where
            negative: about r when small, bounded by -1.5 and 5.

    Returns:
        Transformed rewards in the shape and dtype of `rewards`.

    Raises:
        ValueError: No transform of that name.

    Reference:
        `clip`: Mnih et al. 2016. `asymmetric`: the optimistic asymmetric clipping of Espeholt et
        al. 2018 on DMLab-30, as the program published with the paper computes it. The paper's
        text has 0.3 min(tanh r, 0) + 5 max(tanh r, 0), whose slope jumps from 0.3 to 5 at 0.

    Example:
        >>> transform_rewards(torch.tensor([-7.0, 0.25]), "clip")
        tensor([-1.0000,  0.2500])
    """
    match kind:
        case "none":
            return rewards
        case "clip":
            return rewards.clamp(-1.0, 1.0)
        case "sign":
            return rewards.sign()
        case "asymmetric":
            squeezed = 5.0 * (rewards / 5.0).tanh()
            return torch.where(rewards < 0.0, 0.3 * squeezed, squeezed)
        case _:
            raise ValueError(f"unknown reward transform {kind!r}: none, clip, sign or asymmetric")


def advantage_moments(advantages: Tensor, valid: Tensor) -> Tensor:
    """What `normalize_advantages` needs to know; sums of it over learners are as good.

    Args:
        advantages: [T, B].
        valid: [T, B] bool.

    Returns:
        [3] float64: count, sum and sum of squares over valid rows.

    Raises:
        ValueError: Shapes differ.
    """
    require_shape(advantages.shape, valid=valid)
    kept = torch.where(valid, advantages.detach(), 0.0).double()
    return torch.stack([valid.sum().double(), kept.sum(), kept.square().sum()])


def normalize_advantages(advantages: Tensor, valid: Tensor, moments: Tensor) -> Tensor:
    """Shift and scale advantages to mean 0 and (population) deviation 1.

    Args:
        advantages: [T, B].
        valid: [T, B] bool.
        moments: [3] of `advantage_moments`, summed over all learners, so that a batch split over
            learners gives what the whole batch gives.

    Returns:
        [T, B] in the dtype of `advantages`; 0 on invalid rows, and everywhere if all are equal.

    Raises:
        ValueError: Shapes do not fit.
    """
    require_shape(advantages.shape, valid=valid)
    require_shape(torch.Size((3,)), moments=moments)
    count, total, squares = moments.unbind()
    mean = total / count
    # Rounding can leave a variance just below 0.
    deviation = (squares / count - mean.square()).clamp(min=0.0).sqrt()
    normalized = (advantages.double() - mean) / (deviation + _SMALLEST_DEVIATION)
    return torch.where(valid, normalized, 0.0).to(advantages.dtype)


def actor_critic_losses(
    log_probs: Tensor,
    entropies: Tensor,
    values: Tensor,
    targets: Targets,
    valid: Tensor,
    *,
    value_cost: float,
    entropy_cost: float,
    surrogate: ClippedSurrogate | None = None,
) -> Losses:
    """Sum the three terms of the actor-critic loss over valid transitions.

    Descending `total` makes actions of positive advantage likelier, moves values to their targets
    and, by the entropy bonus, keeps the policy from settling too early. All terms share one
    reduction, so their ratio does not depend on the batch size.

    Args:
        log_probs: [T, B]; of the actions taken, by the policy that learns.
        entropies: [T, B], nats; of the same policy.
        values: [T, B]; the critic without its last row, which only bootstraps.
        targets: Value targets and advantages; taken as constants.
        valid: [T, B] bool. Whatever stands in other rows reaches neither losses nor gradients.
        value_cost: Weight of the value loss, at least 0.
        entropy_cost: Weight of the entropy bonus, at least 0.
        surrogate: If given, the policy term is minus the clipped surrogate. While the ratios are 1
            its gradient is the plain policy gradient.

    Returns:
        Losses; only `total` carries a gradient.

    Raises:
        ValueError: Shapes differ, a cost is negative, or the surrogate's clip is not positive.

    Reference:
        Mnih et al. 2016, section 4 (entropy); Espeholt et al. 2018, section 4.2 (sums).
    """
    for name, cost in (("value_cost", value_cost), ("entropy_cost", entropy_cost)):
        if not cost >= 0.0:
            raise ValueError(f"{name} must not be negative, got {cost}")
    require_shape(
        valid.shape,
        log_probs=log_probs,
        entropies=entropies,
        values=values,
        value_targets=targets.values,
        advantages=targets.advantages,
    )
    # Selected before any arithmetic: selecting afterwards would still send 0 * NaN back.
    log_probs, entropies, values, value_targets, advantages = (
        torch.where(valid, tensor, 0.0)
        for tensor in (
            log_probs,
            entropies,
            values,
            targets.values.detach(),
            targets.advantages.detach(),
        )
    )
    errors = value_targets - values
    if surrogate is None:
        policy = -(log_probs * advantages).sum()
    else:
        policy = -_clipped_surrogate(log_probs, advantages, valid, surrogate).sum()
    value = 0.5 * errors.square().sum()
    entropy = entropies.sum()
    spread = torch.stack([value_targets, errors.detach()]).double()
    return Losses(
        total=policy + value_cost * value - entropy_cost * entropy,
        policy=policy.detach(),
        value=value.detach(),
        entropy=entropy.detach(),
        count=valid.sum(),
        value_moments=torch.cat([spread.sum((1, 2)), spread.square().sum((1, 2))]),
    )


def _clipped_surrogate(
    log_probs: Tensor, advantages: Tensor, valid: Tensor, surrogate: ClippedSurrogate
) -> Tensor:
    """The smaller of ratio and clipped ratio times advantage, [T, B]; 0 on invalid rows.

    Args:
        log_probs: [T, B]; 0 on invalid rows, as are `advantages`.
        advantages: [T, B].
        valid: [T, B] bool.
        surrogate: Clip and behaviour policy.
    """
    if not surrogate.clip > 0.0:
        raise ValueError(f"the surrogate's clip must be positive, got {surrogate.clip}")
    require_shape(valid.shape, behaviour_log_probs=surrogate.behaviour_log_probs)
    log_ratios = log_probs - torch.where(valid, surrogate.behaviour_log_probs.detach(), 0.0)
    low, high = 1.0 - surrogate.clip, 1.0 + surrogate.clip
    with torch.no_grad():
        ratios = log_ratios.exp()
        beyond = torch.where(advantages < 0.0, ratios < low, ratios > high)
        bound = ratios.clamp(low, high)
    # Where the bound counts, the ratio is left out before it is made: the backward pass through one
    # that has overflowed would be 0 * infinity.
    ratios = torch.where(beyond, 0.0, log_ratios).exp()
    return torch.where(beyond, bound, ratios) * advantages


def importance_moments(
    target_log_probs: Tensor,
    behaviour_log_probs: Tensor,
    valid: Tensor,
    *,
    rho_clip: float,
    trace_clip: float,
) -> Tensor:
    """What `importance_spread` needs to know; sums of it over learners and windows are as good.

    Args:
        target_log_probs: [T, B]; of the actions taken, by the policy that learns.
        behaviour_log_probs: [T, B]; the same by the policy that took them.
        valid: [T, B] bool. Whatever stands in other rows does not count.
        rho_clip: As V-trace has it.
        trace_clip: As V-trace has it.

    Returns:
        [5] float64, detached: count of valid rows, number of ratios above `rho_clip`, number above
        `trace_clip`, sum of ratios, sum of squared ratios. Beyond e^300 a ratio counts as that.

    Raises:
        ValueError: Shapes differ.
    """
    require_shape(
        valid.shape, target_log_probs=target_log_probs, behaviour_log_probs=behaviour_log_probs
    )
    # Subtracted before the conversion, as V-trace does it: equal log-probabilities give exactly 1.
    difference = (target_log_probs - behaviour_log_probs).detach()
    rho = difference.double().clamp(max=_LARGEST_LOG_RATIO).exp()
    kept = torch.where(valid, rho, 0.0)
    return torch.stack(
        [
            valid.sum().double(),
            (valid & (rho > rho_clip)).sum().double(),
            (valid & (rho > trace_clip)).sum().double(),
            kept.sum(),
            kept.square().sum(),
        ]
    )


class ImportanceSpread(NamedTuple):
    """How far the policy that learns is from the one that played; shares in [0, 1].

    Attributes:
        above_rho_clip: Share of ratios that `rho_clip` cuts.
        above_trace_clip: Share of ratios that `trace_clip` cuts.
        effective_sample_share: Effective sample size of the ratios over their count; 1 for equal
            policies, near 0 where a few transitions outweigh all others.
    """

    above_rho_clip: float
    above_trace_clip: float
    effective_sample_share: float


def importance_spread(moments: Tensor) -> ImportanceSpread:
    """Shares of cut ratios, and the effective share of the samples.

    Args:
        moments: [5] of `importance_moments`, of one batch or summed over several.

    Returns:
        Shares; all 0 where there were no transitions.

    Reference:
        Kong 1992, "A note on importance sampling using standardized weights": the effective sample
        size (sum rho)^2 / sum rho^2.
    """
    require_shape(torch.Size((5,)), moments=moments)
    count, above_rho_clip, above_trace_clip, total, squares = moments.tolist()
    if not count:
        return ImportanceSpread(0.0, 0.0, 0.0)
    effective = total**2 / squares if squares else 0.0
    return ImportanceSpread(above_rho_clip / count, above_trace_clip / count, effective / count)


def explained_variance(count: Tensor, value_moments: Tensor) -> float:
    """Share of the value targets' variance that the critic accounts for.

    Args:
        count: Valid transitions, of one batch or summed over several.
        value_moments: [4], summed likewise: sum of value targets, sum of errors (target minus
            value), sum of squared targets, sum of squared errors.

    Returns:
        1 for a perfect critic, 0 for one no better than a constant, negative for a worse one; 0
        also where targets do not vary and there is nothing to explain.
    """
    means = value_moments / count
    target_variance, error_variance = (means[2:] - means[:2].square()).clamp(min=0.0).tolist()
    return 1.0 - error_variance / target_variance if target_variance > 0.0 else 0.0
