"""Value targets and advantages: pure functions over the time-major rows of a trajectory.

What is here: `n_step`, `gae` and `vtrace`, three settings of one backward recursion. What is not
here: discounts, reward transforms and losses (`losses`, `learners`), and anything with a gradient;
targets are numbers that the networks are moved towards.

With `V` the values, `r` the rewards and `d` the discounts, tick by tick from the last row:

    error_t = weight_t * (r_t + d_t * V_{t+1} - V_t)
    acc_t   = error_t + d_t * trace_t * acc_{t+1}          (0 on an invalid tick)
    value target_t = V_t + acc_t

n-step returns have weight and trace 1, GAE has trace `lambda_`, V-trace weighs by clipped
importance ratios. No case distinction is needed for the ways in which an episode ends: termination
has `d_t = 0`; after a truncation row `t + 1` holds the true final observation and its tick is
invalid, so `V_{t+1}` is the right bootstrap and nothing crosses; the unroll's end is an ordinary
row. Whatever must not count is selected away, never multiplied by 0, so that a NaN or an infinity
in an invalid row, or beyond a termination, changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Targets:
    """What critic and actor are moved towards; both detached, both 0 on invalid ticks.

    Attributes:
        values: [T, B]; value targets.
        advantages: [T, B]; weights of the policy gradient.
    """

    values: Tensor
    advantages: Tensor


def require_shape(shape: torch.Size, **tensors: Tensor) -> None:
    """Refuse tensors of any other shape before they can broadcast.

    Args:
        shape: What every tensor has to have.
        **tensors: The tensors, under the names that the message uses.

    Raises:
        ValueError: Names each tensor that differs, with its shape.
    """
    wrong = [f"{name} {list(t.shape)}" for name, t in tensors.items() if t.shape != shape]
    if wrong:
        raise ValueError(f"expected shape {list(shape)}, got {', '.join(wrong)}")


def n_step(values: Tensor, rewards: Tensor, discounts: Tensor, valid: Tensor) -> Targets:
    """Discounted returns to the end of the unroll, bootstrapped there and at truncations.

    The classic target of A3C: the first row looks T ticks ahead, the last row one tick. It is no
    sliding window of a fixed n.

    Shapes:
        T ticks, B columns. Row t of every [T, B] tensor describes the transition from
        observation t to observation t + 1.

    Args:
        values: [T+1, B]; critic at every observation, the last row bootstraps the unroll.
        rewards: [T, B].
        discounts: [T, B]; the discount, 0 where the tick terminated.
        valid: [T, B] bool; False on ticks that merely reset.

    Returns:
        Returns as value targets, and their excess over `values` as advantages.

    Raises:
        ValueError: Shapes do not fit, or `valid` is not bool.

    Reference:
        Mnih et al. 2016, "Asynchronous Methods for Deep Reinforcement Learning", algorithm S3.

    Example:
        Rewards 1 and 1, discount one half, the unroll's last value 4.

        >>> one = torch.ones(2, 1)
        >>> n_step(torch.tensor([[0.], [0.], [4.]]), one, one / 2, one.bool()).values.T
        tensor([[2.5000, 3.0000]])
    """
    return gae(values, rewards, discounts, valid, lambda_=1.0)


@torch.no_grad()
def gae(
    values: Tensor, rewards: Tensor, discounts: Tensor, valid: Tensor, lambda_: float
) -> Targets:
    """Generalised advantages, and lambda-returns as value targets.

    Use it to trade variance for bias: `lambda_` 1 gives `n_step`, 0 gives one-step errors.

    Args:
        values: [T+1, B]; critic at every observation, the last row bootstraps the unroll.
        rewards: [T, B].
        discounts: [T, B]; the discount, 0 where the tick terminated.
        valid: [T, B] bool; False on ticks that merely reset.
        lambda_: Share of a later error that is carried one tick back, in [0, 1].

    Returns:
        Lambda-returns as value targets, and their excess over `values` as advantages.

    Raises:
        ValueError: Shapes do not fit, `valid` is not bool, or `lambda_` lies outside [0, 1].

    Reference:
        Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage
        Estimation", equation 16.
    """
    _check(values, rewards, discounts, valid, lambda_)
    crosses = _crosses(discounts, valid)
    errors = _one_step_errors(values, rewards, discounts, valid, crosses)
    advantages = _accumulate(errors, discounts * lambda_, crosses)
    return Targets(torch.where(valid, values[:-1] + advantages, 0.0), advantages)


@torch.no_grad()
def vtrace(
    values: Tensor,
    rewards: Tensor,
    discounts: Tensor,
    valid: Tensor,
    target_log_probs: Tensor,
    behaviour_log_probs: Tensor,
    *,
    lambda_: float = 1.0,
    rho_clip: float = 1.0,
    trace_clip: float = 1.0,
    advantage_clip: float | None = None,
    weighted_advantages: bool = True,
) -> Targets:
    """Targets and advantages corrected for actions that an older policy took.

    Use it where actors run behind the learner. Each one-step error is weighted by the importance
    ratio `rho` of target to behaviour policy, and the ratios are cut so that one unlikely action
    cannot dominate. With equal policies and clips of at least 1 the result is `gae`'s.

    Args:
        values: [T+1, B]; critic at every observation, the last row bootstraps the unroll.
        rewards: [T, B].
        discounts: [T, B]; the discount, 0 where the tick terminated.
        valid: [T, B] bool; False on ticks that merely reset.
        target_log_probs: [T, B]; log-probability of the taken action under the newest policy.
        behaviour_log_probs: [T, B]; the same under the policy that took it.
        lambda_: Factor on every trace, in [0, 1].
        rho_clip: Largest weight of a one-step error. It decides which policy's value is learned:
            infinity the target policy's own, 1 (as published) one between the two.
        trace_clip: Largest factor that carries a later error one tick back. It decides only how
            fast that value is learned.
        advantage_clip: Largest weight of a policy gradient term; by default `rho_clip`.
        weighted_advantages: Whether advantages include the importance weight of their own tick, as
            a plain policy gradient needs it. Off for a surrogate that multiplies by the ratio
            itself (`losses.ClippedSurrogate`), where the weight would count twice. Value targets
            are the same either way, and so is the future that an advantage looks at.

    Returns:
        Value targets, and advantages with or without their importance weight.

    Raises:
        ValueError: Shapes do not fit, `valid` is not bool, `lambda_` lies outside [0, 1], a clip
            is negative, or `advantage_clip` is given for advantages without a weight.

    Reference:
        Espeholt et al. 2018, "IMPALA", section 4.1 (targets, remark 2 for lambda) and 4.2
        (policy gradient).

    Example:
        One transition of reward 1 without a future, ratio 2 cut to 1: the target is the reward.

        >>> one = torch.ones(1, 1)
        >>> none = torch.zeros(1, 1)
        >>> vtrace(torch.zeros(2, 1), one, none, one.bool(), one.log1p(), none).values.item()
        1.0
    """
    if advantage_clip is None:
        advantage_clip = rho_clip
    elif not weighted_advantages:
        raise ValueError("advantage_clip cuts a weight that weighted_advantages=False leaves out")
    _check(values, rewards, discounts, valid, lambda_)
    require_shape(
        rewards.shape, target_log_probs=target_log_probs, behaviour_log_probs=behaviour_log_probs
    )
    for name, clip in (
        ("rho_clip", rho_clip),
        ("trace_clip", trace_clip),
        ("advantage_clip", advantage_clip),
    ):
        if not clip >= 0.0:
            raise ValueError(f"{name} must not be negative, got {clip}")
    rho = (target_log_probs - behaviour_log_probs).exp()
    crosses = _crosses(discounts, valid)
    unweighted = _one_step_errors(values, rewards, discounts, valid, crosses)
    errors = torch.where(valid, rho.clamp(max=rho_clip) * unweighted, 0.0)
    traces = lambda_ * rho.clamp(max=trace_clip)
    accumulated = _accumulate(errors, discounts * traces, crosses)

    # r_t + d_t * (V_{t+1} + lambda * acc_{t+1}) - V_t: the lambda-return one tick ahead.
    ahead = torch.zeros_like(accumulated)
    ahead[:-1] = torch.where(crosses[:-1], discounts[:-1] * lambda_ * accumulated[1:], 0.0)
    advantages = unweighted + ahead
    if weighted_advantages:
        advantages = rho.clamp(max=advantage_clip) * advantages
    return Targets(
        values=torch.where(valid, values[:-1] + accumulated, 0.0),
        advantages=torch.where(valid, advantages, 0.0),
    )


def _check(
    values: Tensor, rewards: Tensor, discounts: Tensor, valid: Tensor, lambda_: float
) -> None:
    """Refuse what would broadcast, or silently mean something else."""
    if rewards.ndim != 2 or not rewards.numel():
        raise ValueError(f"expected rewards [T, B] with a row at least, got {list(rewards.shape)}")
    require_shape(rewards.shape, discounts=discounts, valid=valid)
    require_shape(torch.Size((rewards.shape[0] + 1, rewards.shape[1])), values=values)
    if valid.dtype != torch.bool:
        raise ValueError(f"valid must be bool, got {valid.dtype}")
    if not 0.0 <= lambda_ <= 1.0:
        raise ValueError(f"lambda_ must lie in [0, 1], got {lambda_}")


def _crosses(discounts: Tensor, valid: Tensor) -> Tensor:
    """[T, B] bool: where row t + 1 is the future of row t."""
    return valid & (discounts != 0.0)


def _one_step_errors(
    values: Tensor, rewards: Tensor, discounts: Tensor, valid: Tensor, crosses: Tensor
) -> Tensor:
    """`r_t + d_t * V_{t+1} - V_t`, [T, B]; 0 on invalid ticks."""
    future = torch.where(crosses, discounts * values[1:], 0.0)
    return torch.where(valid, rewards + future - values[:-1], 0.0)


def _accumulate(errors: Tensor, factors: Tensor, crosses: Tensor) -> Tensor:
    """The recursion: `acc_t = errors_t + factors_t * acc_{t+1}` where row t + 1 is its future.

    Args:
        errors: [T, B]; 0 on invalid ticks.
        factors: [T, B]; what a later error is multiplied by on its way back.
        crosses: [T, B] bool; where anything comes back at all.

    Returns:
        [T, B].
    """
    accumulated = torch.zeros_like(errors[0])
    rows = []
    backwards = zip(errors.unbind(), factors.unbind(), crosses.unbind(), strict=True)
    for error, factor, cross in reversed(list(backwards)):
        accumulated = torch.where(cross, torch.addcmul(error, factor, accumulated), error)
        rows.append(accumulated)
    return torch.stack(rows[::-1])
