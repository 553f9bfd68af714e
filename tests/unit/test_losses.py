"""Losses: signs, gradients by finite differences, reductions, and what must not count."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from repertory.losses import (
    Losses,
    actor_critic_losses,
    advantage_moments,
    explained_variance,
    normalize_advantages,
    transform_rewards,
)
from repertory.models.policies import Categorical
from repertory.targets import Targets

SHAPE = (4, 3)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch(seed: int = 0) -> tuple[list[Tensor], Targets, Tensor]:
    """Log-probabilities, entropies, values; targets; valid, with some rows invalid."""
    log_probs, entropies = -normal(seed, *SHAPE).abs(), normal(seed + 1, *SHAPE).abs()
    targets = Targets(normal(seed + 2, *SHAPE), normal(seed + 3, *SHAPE))
    valid = normal(seed + 4, *SHAPE) < 0.5
    return [log_probs, entropies, normal(seed + 5, *SHAPE)], targets, valid


def losses_of(
    tensors: list[Tensor],
    targets: Targets,
    valid: Tensor,
    value_cost: float = 0.5,
    entropy_cost: float = 0.01,
) -> Losses:
    return actor_critic_losses(
        *tensors, targets, valid, value_cost=value_cost, entropy_cost=entropy_cost
    )


def test_losses_are_the_sums_of_their_definitions() -> None:
    (log_probs, entropies, values), targets, valid = batch()
    rows = valid.nonzero().tolist()
    policy = -sum((log_probs[t, b] * targets.advantages[t, b]).item() for t, b in rows)
    value = sum(0.5 * (targets.values[t, b] - values[t, b]).item() ** 2 for t, b in rows)
    entropy = sum(entropies[t, b].item() for t, b in rows)
    losses = losses_of([log_probs, entropies, values], targets, valid)
    assert losses.count.item() == len(rows) < valid.numel()
    assert losses.policy.item() == pytest.approx(policy)
    assert losses.value.item() == pytest.approx(value)
    assert losses.entropy.item() == pytest.approx(entropy)
    assert losses.total.item() == pytest.approx(policy + 0.5 * value - 0.01 * entropy)


def test_gradient_agrees_with_finite_differences() -> None:
    tensors, targets, valid = batch()
    for tensor in tensors:
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *inputs: losses_of(list(inputs), targets, valid, 0.7, 0.3).total, tensors
    )


def test_gradient_through_the_policy_agrees_with_finite_differences() -> None:
    logits = normal(7, *SHAPE, 5).requires_grad_()
    actions = torch.randint(5, SHAPE, generator=torch.Generator().manual_seed(0))
    (_, _, values), targets, valid = batch()

    def total(logits: Tensor) -> Tensor:
        policy = Categorical(logits)
        tensors = [policy.log_prob(actions), policy.entropy(), values]
        return losses_of(tensors, targets, valid, 0.5, 0.3).total

    assert torch.autograd.gradcheck(total, logits)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_a_good_action_becomes_likelier_and_a_bad_one_less_likely(advantage: float) -> None:
    logits = torch.tensor([[[0.3, -0.2, 0.1]]], requires_grad=True)
    action = torch.tensor([[1]])
    policy = Categorical(logits)
    row = torch.ones(1, 1)
    losses_of(
        [policy.log_prob(action), policy.entropy(), row],
        Targets(row, advantage * row),
        row.bool(),
        entropy_cost=0.0,
    ).total.backward()
    after = Categorical(logits.detach() - 0.1 * logits.grad)
    change = after.log_prob(action) - policy.log_prob(action).detach()
    assert math.copysign(1.0, change.item()) == math.copysign(1.0, advantage)


def test_values_move_to_their_targets() -> None:
    tensors, targets, valid = batch()
    tensors[2].requires_grad_()
    losses_of(tensors, targets, valid, value_cost=1.0).total.backward()
    moved = tensors[2].detach() - tensors[2].grad
    torch.testing.assert_close(moved, torch.where(valid, targets.values, tensors[2].detach()))


def test_entropy_bonus_raises_entropy() -> None:
    """One step on the entropy alone: 0.58220 nats become 0.58985, not 0.57439.

    Source: google-deepmind/open_spiel#962, tensorflow/models PR#5058,
    MrSyee/pg-is-all-you-need#37.
    """
    logits = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=0.1)
    policy = Categorical(logits)
    row = torch.zeros(1, 1, dtype=torch.float64)
    losses = losses_of(
        [policy.log_prob(row.long()), policy.entropy(), row],
        Targets(row, row),
        row == 0,
        value_cost=0.0,
        entropy_cost=1.0,
    )
    losses.total.backward()
    optimizer.step()
    assert losses.entropy.item() == pytest.approx(0.58220, abs=5e-6)
    assert Categorical(logits).entropy().item() == pytest.approx(0.58985, abs=5e-6)


@pytest.mark.parametrize("name", ["value_cost", "entropy_cost"])
@pytest.mark.parametrize("cost", [-0.01, math.nan])
def test_negative_cost_is_refused(name: str, cost: float) -> None:
    """A negative coefficient hides a wrong sign.

    Source: google-deepmind/open_spiel#962.
    """
    tensors, targets, valid = batch()
    with pytest.raises(ValueError, match=name):
        losses_of(tensors, targets, valid, **{name: cost})


def test_all_terms_share_one_reduction() -> None:
    """Four copies of the data side by side: each term and gradient grows fourfold, as does count.

    Source: ray-project/ray PR#34779.
    """
    tensors, targets, valid = batch()
    copied = [tensor.repeat(1, 4).requires_grad_() for tensor in tensors]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    one = losses_of(tensors, targets, valid)
    four = losses_of(
        copied,
        Targets(targets.values.repeat(1, 4), targets.advantages.repeat(1, 4)),
        valid.repeat(1, 4),
    )
    for name in ("total", "policy", "value", "entropy", "count"):
        torch.testing.assert_close(getattr(four, name), 4 * getattr(one, name))
    (one.total / one.count).backward()
    (four.total / four.count).backward()
    for single, many in zip(tensors, copied, strict=True):
        summed = many.grad.unflatten(1, (4, SHAPE[1])).sum(1)
        torch.testing.assert_close(summed, single.grad)


def test_two_learners_on_halves_are_one_on_the_whole() -> None:
    tensors, targets, valid = batch()
    whole = losses_of(tensors, targets, valid)
    halves = [
        losses_of(
            [tensor[:, columns] for tensor in tensors],
            Targets(targets.values[:, columns], targets.advantages[:, columns]),
            valid[:, columns],
        )
        for columns in (slice(0, 1), slice(1, 3))
    ]
    for name in ("total", "policy", "value", "entropy", "count", "value_moments"):
        summed = sum(getattr(half, name) for half in halves)
        torch.testing.assert_close(summed, getattr(whole, name))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e300])
def test_garbage_in_invalid_rows_reaches_neither_losses_nor_gradients(garbage: float) -> None:
    tensors, targets, valid = batch()
    results = []
    for filler in (0.0, garbage):
        inputs = [torch.where(valid, x, filler).requires_grad_() for x in tensors]
        filled = Targets(
            torch.where(valid, targets.values, filler),
            torch.where(valid, targets.advantages, filler),
        )
        losses = losses_of(inputs, filled, valid)
        losses.total.backward()
        results.append([*vars(losses).values(), *(x.grad for x in inputs)])
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)


def test_no_gradient_into_targets() -> None:
    tensors, targets, valid = batch()
    targets.values.requires_grad_()
    targets.advantages.requires_grad_()
    losses = losses_of([x.requires_grad_() for x in tensors], targets, valid)
    losses.total.backward()
    assert targets.values.grad is None
    assert targets.advantages.grad is None
    carrying = [name for name, x in vars(losses).items() if x.requires_grad]
    assert carrying == ["total"]


def test_nothing_valid_gives_zeros() -> None:
    tensors, targets, valid = batch()
    losses = losses_of([x.requires_grad_() for x in tensors], targets, torch.zeros_like(valid))
    losses.total.backward()
    assert losses.count.item() == losses.total.item() == 0.0
    assert not any(x.grad.any() for x in tensors)
    assert explained_variance(losses.count, losses.value_moments) == 0.0


@pytest.mark.parametrize("wrong", range(3))
def test_a_shape_that_would_broadcast_is_refused(wrong: int) -> None:
    tensors, targets, valid = batch()
    tensors[wrong] = tensors[wrong][:, :1]
    with pytest.raises(ValueError, match="expected shape"):
        losses_of(tensors, targets, valid)


def test_explained_variance_is_that_of_the_valid_rows() -> None:
    tensors, targets, valid = batch()
    losses = losses_of(tensors, targets, valid)
    kept, errors = targets.values[valid], (targets.values - tensors[2])[valid]
    expected = 1.0 - errors.var(correction=0).item() / kept.var(correction=0).item()
    assert explained_variance(losses.count, losses.value_moments) == pytest.approx(expected)
    tensors[2] = targets.values
    perfect = losses_of(tensors, targets, valid)
    assert explained_variance(perfect.count, perfect.value_moments) == 1.0


def test_reward_transforms_do_what_they_are_called() -> None:
    """Clipping keeps small rewards, the sign does not, off leaves all.

    Source: DLR-RM/stable-baselines3#271, pytorch/rl#1777, gsurma/atari#14.
    """
    rewards = torch.tensor([-7.0, -0.2, 0.0, 0.01, 3.0])
    expected = {
        "none": [-7.0, -0.2, 0.0, 0.01, 3.0],
        "clip": [-1.0, -0.2, 0.0, 0.01, 1.0],
        "sign": [-1.0, -1.0, 0.0, 1.0, 1.0],
    }
    for kind, numbers in expected.items():
        assert torch.equal(transform_rewards(rewards, kind), torch.tensor(numbers))
    assert rewards.sum().item() == pytest.approx(-4.19)


def test_asymmetric_transform_favours_gains() -> None:
    rewards = torch.tensor([-1000.0, -5.0, -0.01, 0.0, 0.01, 5.0, 1000.0], dtype=torch.float64)
    expected = [-1.5, -1.5 * math.tanh(1), -0.003, 0.0, 0.01, 5 * math.tanh(1), 5.0]
    result = transform_rewards(rewards, "asymmetric")
    torch.testing.assert_close(result, torch.tensor(expected).double(), rtol=1e-5, atol=0)


def test_unknown_transform_is_refused() -> None:
    with pytest.raises(ValueError, match="'tanh'"):
        transform_rewards(torch.zeros(1), "tanh")


def normalized(advantages: Tensor, valid: Tensor | None = None) -> Tensor:
    valid = torch.ones_like(advantages, dtype=torch.bool) if valid is None else valid
    return normalize_advantages(advantages, valid, advantage_moments(advantages, valid))


@pytest.mark.parametrize("number", [2.0, 1.1, -3e7])
@pytest.mark.parametrize("count", [1, 3, 1000])
def test_equal_advantages_normalise_to_zero(number: float, count: int) -> None:
    """A single sample, or a constant batch, becomes 0 and never NaN.

    Source: HorizonRobotics/alf PR#1642, PR#1655, openai/baselines#362, #544.
    """
    result = normalized(torch.full((count, 1), number))
    assert result.abs().max() < 1e-4


def test_normalising_a_split_batch_is_normalising_the_whole() -> None:
    """Learners that add up their moments scale by the same numbers.

    Source: HorizonRobotics/alf PR#1642, PR#1655.
    """
    _, targets, valid = batch()
    advantages = targets.advantages.float()
    moments = sum(advantage_moments(advantages[:, b], valid[:, b]) for b in range(3))
    parts = [normalize_advantages(advantages[:, b], valid[:, b], moments) for b in range(3)]
    torch.testing.assert_close(torch.stack(parts, 1), normalized(advantages, valid))


def test_normalised_advantages_have_mean_zero_and_deviation_one() -> None:
    _, targets, valid = batch()
    result = normalized(1e3 + 0.1 * targets.advantages, valid)
    assert result[valid].mean().item() == pytest.approx(0.0, abs=1e-6)
    assert result[valid].std(correction=0).item() == pytest.approx(1.0, abs=1e-6)
    assert not result[~valid].any()


def test_invalid_rows_do_not_count_in_normalisation() -> None:
    _, targets, valid = batch()
    dirty = torch.where(valid, targets.advantages, math.nan)
    assert torch.equal(normalized(dirty, valid), normalized(targets.advantages, valid))
    assert not normalized(dirty, torch.zeros_like(valid)).any()
