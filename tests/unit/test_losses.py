"""Losses: signs, gradients by finite differences, reductions, and what must not count."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from repertory.losses import (
    ClippedSurrogate,
    Losses,
    actor_critic_losses,
    advantage_moments,
    explained_variance,
    importance_moments,
    importance_spread,
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
    surrogate: ClippedSurrogate | None = None,
) -> Losses:
    return actor_critic_losses(
        *tensors,
        targets,
        valid,
        value_cost=value_cost,
        entropy_cost=entropy_cost,
        surrogate=surrogate,
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


CLIP = 0.2


def clipped_batch(seed: int = 0) -> tuple[list[Tensor], Targets, Tensor, Tensor]:
    """As `batch`, and behaviour log-probabilities with ratios on both sides of both bounds."""
    tensors, targets, valid = batch(seed)
    ratios = torch.tensor([0.3, 0.7, 0.81, 1.0, 1.19, 1.3, 4.0], dtype=torch.float64)
    order = torch.randint(7, SHAPE, generator=torch.Generator().manual_seed(seed))
    return tensors, targets, valid, tensors[0] - ratios[order].log()


def test_clipped_surrogate_is_the_sum_of_the_smaller_terms() -> None:
    """Value and gradient against loops; a term that is clipped for the better has no gradient."""
    clipped = counted = 0
    for seed in range(10):
        tensors, targets, valid, behaviour = clipped_batch(seed)
        log_probs = tensors[0].requires_grad_()
        losses = losses_of(tensors, targets, valid, surrogate=ClippedSurrogate(CLIP, behaviour))
        losses.total.backward()
        policy, gradients = 0.0, torch.zeros_like(log_probs)
        for t, b in valid.nonzero().tolist():
            ratio = math.exp((log_probs[t, b] - behaviour[t, b]).item())
            advantage = targets.advantages[t, b].item()
            bounded = min(max(ratio, 1.0 - CLIP), 1.0 + CLIP)
            policy -= min(ratio * advantage, bounded * advantage)
            if ratio > 1.0 + CLIP if advantage > 0.0 else ratio < 1.0 - CLIP:
                clipped += 1
            else:
                gradients[t, b] = -ratio * advantage
            counted += 1
        assert losses.policy.item() == pytest.approx(policy)
        torch.testing.assert_close(log_probs.grad, gradients)
        assert torch.equal(log_probs.grad == 0.0, gradients == 0.0)
        plain = losses_of([x.detach() for x in tensors], targets, valid)
        for name in ("value", "entropy", "count", "value_moments"):
            assert torch.equal(getattr(losses, name), getattr(plain, name))
        total = losses.policy + 0.5 * losses.value - 0.01 * losses.entropy
        assert losses.total.item() == pytest.approx(total.item())
    assert 0.1 * counted < clipped < 0.9 * counted


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("ratio", [0.5, 1.5])
def test_clipping_holds_only_what_has_gone_far_enough(ratio: float, advantage: float) -> None:
    """A ratio on the wrong side is pulled back however far it is."""
    row = torch.ones(1, 1, dtype=torch.float64)
    log_prob = torch.full_like(row, -1.0).requires_grad_()
    losses_of(
        [log_prob, row, row],
        Targets(row, advantage * row),
        row.bool(),
        surrogate=ClippedSurrogate(CLIP, log_prob.detach() - math.log(ratio)),
    ).total.backward()
    far_enough = (ratio > 1.0) == (advantage > 0.0)
    assert log_prob.grad.item() == (0.0 if far_enough else pytest.approx(-ratio * advantage))


@pytest.mark.parametrize("clip", [1e-6, CLIP, 3.0, math.inf])
def test_ratio_one_gives_the_plain_policy_gradient(clip: float) -> None:
    tensors, targets, valid = batch()
    gradients = []
    for surrogate in (None, ClippedSurrogate(clip, tensors[0].detach())):
        inputs = [tensor.detach().requires_grad_() for tensor in tensors]
        losses_of(inputs, targets, valid, surrogate=surrogate).total.backward()
        gradients.append([tensor.grad for tensor in inputs])
    for plain, clipped in zip(*gradients, strict=True):
        assert torch.equal(plain, clipped)


def test_without_a_clip_the_surrogate_is_the_weighted_policy_gradient() -> None:
    """The ratio counts once: unweighted advantages under it, or weighted ones without it."""
    tensors, targets, valid, behaviour = clipped_batch()
    rho = (tensors[0] - behaviour).exp()
    weighted = Targets(targets.values, rho * targets.advantages)
    gradients = []
    for used, surrogate in ((weighted, None), (targets, ClippedSurrogate(math.inf, behaviour))):
        log_probs = tensors[0].detach().requires_grad_()
        losses_of([log_probs, *tensors[1:]], used, valid, surrogate=surrogate).total.backward()
        gradients.append(log_probs.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e300])
def test_garbage_in_invalid_rows_does_not_reach_the_surrogate(garbage: float) -> None:
    tensors, targets, valid, behaviour = clipped_batch()
    results = []
    for filler in (0.0, garbage):
        inputs = [torch.where(valid, x, filler).requires_grad_() for x in tensors]
        filled = Targets(
            torch.where(valid, targets.values, filler),
            torch.where(valid, targets.advantages, filler),
        )
        surrogate = ClippedSurrogate(CLIP, torch.where(valid, behaviour, -filler))
        losses = losses_of(inputs, filled, valid, surrogate=surrogate)
        losses.total.backward()
        results.append([*vars(losses).values(), *(x.grad for x in inputs)])
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_a_ratio_beyond_the_range_of_floats_is_clipped(advantage: float) -> None:
    row = torch.ones(1, 1)
    log_prob = torch.zeros(1, 1, requires_grad=True)
    losses = losses_of(
        [log_prob, row, row],
        Targets(row, advantage * row),
        row.bool(),
        surrogate=ClippedSurrogate(CLIP, torch.full((1, 1), -1000.0)),
    )
    losses.total.backward()
    assert losses.policy.item() == pytest.approx(-1.2 * advantage)
    assert log_prob.grad.item() == 0.0


def test_no_gradient_into_behaviour_log_probs() -> None:
    tensors, targets, valid, behaviour = clipped_batch()
    behaviour.requires_grad_()
    surrogate = ClippedSurrogate(CLIP, behaviour)
    losses = losses_of([x.requires_grad_() for x in tensors], targets, valid, surrogate=surrogate)
    losses.total.backward()
    assert behaviour.grad is None
    assert [name for name, x in vars(losses).items() if x.requires_grad] == ["total"]


@pytest.mark.parametrize("clip", [0.0, -0.2, math.nan])
def test_a_clip_that_is_not_positive_is_refused(clip: float) -> None:
    tensors, targets, valid, behaviour = clipped_batch()
    with pytest.raises(ValueError, match="clip must be positive"):
        losses_of(tensors, targets, valid, surrogate=ClippedSurrogate(clip, behaviour))


def test_behaviour_log_probs_that_would_broadcast_are_refused() -> None:
    tensors, targets, valid, behaviour = clipped_batch()
    with pytest.raises(ValueError, match="behaviour_log_probs"):
        losses_of(tensors, targets, valid, surrogate=ClippedSurrogate(CLIP, behaviour[:, :1]))


def moments_of(log_ratios: Tensor, valid: Tensor) -> Tensor:
    behaviour = -torch.ones_like(log_ratios)
    return importance_moments(
        behaviour + log_ratios, behaviour, valid, rho_clip=1.5, trace_clip=0.8
    )


def test_importance_spread_is_that_of_the_valid_rows() -> None:
    log_ratios, valid = normal(3, 40, 6), normal(4, 40, 6) < 0.5
    rho = [math.exp(log_ratios[t, b].item()) for t, b in valid.nonzero().tolist()]
    spread = importance_spread(moments_of(log_ratios, valid))
    assert 0.0 < spread.above_rho_clip < spread.above_trace_clip < 1.0
    assert spread.above_rho_clip == pytest.approx(sum(x > 1.5 for x in rho) / len(rho))
    assert spread.above_trace_clip == pytest.approx(sum(x > 0.8 for x in rho) / len(rho))
    effective = sum(rho) ** 2 / (len(rho) * sum(x * x for x in rho))
    assert spread.effective_sample_share == pytest.approx(effective)


def test_importance_moments_add_up_over_learners_and_windows() -> None:
    log_ratios, valid = normal(3, 40, 6), normal(4, 40, 6) < 0.5
    whole = moments_of(log_ratios, valid)
    assert whole.dtype == torch.float64
    parts = [moments_of(log_ratios[:, b : b + 2], valid[:, b : b + 2]) for b in (0, 2, 4)]
    torch.testing.assert_close(sum(parts), whole)
    dirty = torch.where(valid, log_ratios, math.nan)
    assert torch.equal(moments_of(dirty, valid), whole)


def test_equal_policies_are_not_clipped_and_lose_no_samples() -> None:
    ones = torch.ones(5, 2)
    moments = importance_moments(ones, ones, ones.bool(), rho_clip=1.0, trace_clip=1.0)
    assert importance_spread(moments) == (0.0, 0.0, 1.0)


def test_one_huge_ratio_leaves_one_effective_sample() -> None:
    """Beyond the range of floats as well: sums stay finite."""
    for log_ratio in (50.0, 1000.0, math.inf):
        log_ratios = torch.zeros(5, 2)
        log_ratios[3, 1] = log_ratio
        moments = moments_of(log_ratios, torch.ones(5, 2, dtype=torch.bool))
        assert moments.isfinite().all()
        assert importance_spread(moments).effective_sample_share == pytest.approx(0.1)


def test_importance_spread_of_nothing_is_zero() -> None:
    zeros = torch.zeros(2, 2)
    assert importance_spread(moments_of(zeros, zeros.bool())) == (0.0, 0.0, 0.0)


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
