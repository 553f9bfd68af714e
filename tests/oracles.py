"""Slow, plain transcriptions of the formulas, in Python floats and double sums.

Nothing here imports the package, and nothing here is a backward recursion, so that a mistake in
one of the two cannot hide in the other. `Rows` are random trajectories' numbers with episodes that
end in every way inside the unroll.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Rows:
    """What targets are computed from; [T, B] each, `values` [T+1, B], all float64."""

    values: Tensor
    rewards: Tensor
    discounts: Tensor
    valid: Tensor
    target_log_probs: Tensor
    behaviour_log_probs: Tensor

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What every target takes."""
        return self.values, self.rewards, self.discounts, self.valid

    def log_probs(self) -> tuple[Tensor, Tensor]:
        """What V-trace takes besides."""
        return self.target_log_probs, self.behaviour_log_probs

    def columns(self, index: slice | Tensor) -> Rows:
        """Some of the columns."""
        return Rows(**{name: tensor[:, index] for name, tensor in vars(self).items()})

    def rows(self, start: int, stop: int) -> Rows:
        """Some of the rows, with the values up to the observation after the last."""
        return Rows(
            **{
                name: tensor[start : stop + (name == "values")]
                for name, tensor in vars(self).items()
            }
        )


def random_rows(seed: int, unroll_length: int = 12, num_columns: int = 5) -> Rows:
    """Numbers of an unroll in which episodes end by termination, truncation and lost lives.

    A lost life is a termination whose next tick is an ordinary, valid one.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (unroll_length, num_columns)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    def chance(probability: float) -> Tensor:
        return torch.rand(shape, generator=generator) < probability

    ended, lost_life = chance(0.3), chance(0.1)
    terminated = (ended & chance(0.5)) | lost_life
    valid = torch.ones(shape, dtype=torch.bool)
    valid[0] = ~chance(0.2)[0]
    for t in range(1, unroll_length):
        valid[t] = ~(valid[t - 1] & ended[t - 1])
    discount = 0.8 + 0.2 * torch.rand(1, generator=generator, dtype=torch.float64)
    return Rows(
        values=3.0 * normal(unroll_length + 1, num_columns),
        rewards=torch.where(valid, normal(*shape), 0.0),
        discounts=discount * ~(terminated & valid),
        valid=valid,
        target_log_probs=-normal(*shape).abs(),
        behaviour_log_probs=-normal(*shape).abs(),
    )


def _future(rows: Rows, t: int, b: int) -> int:
    """How many ticks lie between row t and the end of its episode or of the unroll."""
    last = t
    while (
        last + 1 < rows.rewards.shape[0]
        and rows.discounts[last, b] != 0.0
        and rows.valid[last + 1, b]
    ):
        last += 1
    return last - t + 1


def n_step_return(rows: Rows, t: int, b: int, n: int) -> float:
    """Sum of n discounted rewards from row t, plus the discounted value of what follows."""
    total, factor = 0.0, 1.0
    for k in range(t, t + n):
        total += factor * rows.rewards[k, b].item()
        factor *= rows.discounts[k, b].item()
    return total + (factor * rows.values[t + n, b].item() if factor else 0.0)


def lambda_return(rows: Rows, t: int, b: int, lambda_: float) -> float:
    """Mixture of all n-step returns within the episode, weights (1 - lambda) lambda^(n-1)."""
    horizon = _future(rows, t, b)
    mixture = sum(
        (1.0 - lambda_) * lambda_ ** (n - 1) * n_step_return(rows, t, b, n)
        for n in range(1, horizon)
    )
    return mixture + lambda_ ** (horizon - 1) * n_step_return(rows, t, b, horizon)


def gae_oracle(rows: Rows, lambda_: float) -> tuple[Tensor, Tensor]:
    """Value targets and advantages from lambda-returns; 0 on invalid ticks."""
    targets, advantages = torch.zeros_like(rows.rewards), torch.zeros_like(rows.rewards)
    for t, b in rows.valid.nonzero().tolist():
        targets[t, b] = lambda_return(rows, t, b, lambda_)
        advantages[t, b] = targets[t, b] - rows.values[t, b]
    return targets, advantages


def vtrace_oracle(
    rows: Rows, lambda_: float, rho_clip: float, trace_clip: float, advantage_clip: float
) -> tuple[Tensor, Tensor]:
    """V-trace by the paper's sum over all later ticks; 0 on invalid ticks."""
    rho = [
        [math.exp(x) for x in row]
        for row in (rows.target_log_probs - rows.behaviour_log_probs).tolist()
    ]

    def excess(t: int, b: int) -> float:
        """Value target minus value of row t."""
        total = 0.0
        for k in range(t, t + _future(rows, t, b)):
            product = math.prod(
                rows.discounts[i, b].item() * lambda_ * min(trace_clip, rho[i][b])
                for i in range(t, k)
            )
            error = n_step_return(rows, k, b, 1) - rows.values[k, b].item()
            total += product * min(rho_clip, rho[k][b]) * error
        return total

    targets, advantages = torch.zeros_like(rows.rewards), torch.zeros_like(rows.rewards)
    for t, b in rows.valid.nonzero().tolist():
        targets[t, b] = rows.values[t, b].item() + excess(t, b)
        ahead = n_step_return(rows, t, b, 1)
        if _future(rows, t, b) > 1:
            ahead += rows.discounts[t, b].item() * lambda_ * excess(t + 1, b)
        advantages[t, b] = min(advantage_clip, rho[t][b]) * (ahead - rows.values[t, b].item())
    return targets, advantages
