"""Policies against `torch.distributions`, sampling against expected frequencies."""

from __future__ import annotations

import math

import gymnasium
import pytest
import torch
from torch import Tensor

from repertory.models.policies import Categorical, policy_head

FORBIDDEN = -math.inf

# Chi-square that one fair sample in a thousand exceeds, by degrees of freedom.
CHI_SQUARE_LIMIT = {3: 16.27, 4: 18.47}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_logits(*shape: int, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(shape, generator=generator(1), dtype=torch.float64)


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = counts.sum() * probabilities
    return ((counts - expected).square() / expected).sum().item()


def test_agrees_with_torch_distributions() -> None:
    logits = random_logits(4, 3, 6)
    ours, theirs = Categorical(logits), torch.distributions.Categorical(logits=logits)
    actions = torch.randint(6, (4, 3), generator=generator())
    torch.testing.assert_close(ours.log_prob(actions), theirs.log_prob(actions))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    assert torch.equal(ours.mode(), logits.argmax(-1))


def test_gradients_agree_with_torch_distributions() -> None:
    actions = torch.randint(6, (4, 3), generator=generator())
    gradients = []
    for make in (Categorical, lambda logits: torch.distributions.Categorical(logits=logits)):
        logits = random_logits(4, 3, 6).requires_grad_()
        policy = make(logits)
        (policy.log_prob(actions) + 0.3 * policy.entropy()).sum().backward()
        gradients.append(logits.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("seed", range(3))
def test_sampling_frequencies_are_the_probabilities(seed: int) -> None:
    logits = torch.tensor([0.0, 1.0, -2.0, 0.5, -0.3])
    num_draws = 200_000
    actions = Categorical(logits.expand(20, num_draws // 20, 5)).sample(generator(seed))
    counts = actions.flatten().bincount(minlength=5)
    assert chi_square(counts, logits.double().softmax(-1)) < CHI_SQUARE_LIMIT[4]


def test_columns_are_drawn_independently() -> None:
    actions = Categorical(torch.zeros(100_000, 2, 2)).sample(generator())
    counts = (2 * actions[:, 0] + actions[:, 1]).bincount(minlength=4)
    assert chi_square(counts, torch.full((4,), 0.25)) < CHI_SQUARE_LIMIT[3]


def test_draws_come_from_the_given_generator_alone() -> None:
    policy = Categorical(random_logits(5, 40, 6))
    state = torch.get_rng_state()
    first = policy.sample(generator(3))
    assert torch.equal(first, policy.sample(generator(3)))
    assert not torch.equal(first, policy.sample(generator(4)))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_forbidden_action_is_never_drawn(dtype: torch.dtype) -> None:
    logits = torch.tensor([FORBIDDEN, -3.0, FORBIDDEN, -40.0, 2.0], dtype=dtype)
    drawn = Categorical(logits.expand(300_000, 5)).sample(generator()).unique().tolist()
    assert drawn == [1, 4]


def test_noise_of_zero_lets_no_forbidden_action_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """The race's noise is positive by contract; should it underflow, the draw is still legal."""
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, generator: self.zero_())
    logits = torch.tensor([FORBIDDEN, 0.0, 1.0])
    assert Categorical(logits).sample(generator()).item() == 2


def test_one_allowed_action_is_certain() -> None:
    policy = Categorical(torch.tensor([FORBIDDEN, 5.0, FORBIDDEN]))
    assert policy.sample(generator()).item() == policy.mode().item() == 1
    assert policy.entropy().item() == policy.log_prob(torch.tensor(1)).item() == 0.0


def test_a_forbidden_action_leaves_entropy_and_gradients_alone() -> None:
    allowed = torch.tensor([0.2, -1.0, 0.7], dtype=torch.float64, requires_grad=True)
    masked = torch.tensor([0.2, FORBIDDEN, -1.0, 0.7], dtype=torch.float64, requires_grad=True)
    for logits, action in ((allowed, 1), (masked, 2)):
        policy = Categorical(logits)
        (policy.entropy() + policy.log_prob(torch.tensor(action))).backward()
    torch.testing.assert_close(masked.grad[[0, 2, 3]], allowed.grad)
    assert masked.grad[1].item() == 0.0
    torch.testing.assert_close(Categorical(masked).entropy(), Categorical(allowed).entropy())


def test_entropy_lies_between_zero_and_the_logarithm_of_n() -> None:
    entropies = Categorical(random_logits(50, 50, 7, scale=30.0)).entropy()
    assert entropies.min() >= 0.0
    assert entropies.max() <= math.log(7)
    uniform = Categorical(torch.full((7,), -123.0)).entropy()
    assert uniform.item() == pytest.approx(math.log(7))


def test_bfloat16_logits_are_computed_with_in_float32() -> None:
    logits = random_logits(4, 3, 6).bfloat16()
    exact = torch.distributions.Categorical(logits=logits.float())
    policy = Categorical(logits)
    actions = torch.zeros(4, 3, dtype=torch.int64)
    assert policy.log_prob(actions).dtype == policy.entropy().dtype == torch.float32
    torch.testing.assert_close(policy.log_prob(actions), exact.log_prob(actions))
    torch.testing.assert_close(policy.entropy(), exact.entropy())


def test_extreme_logits_stay_finite() -> None:
    policy = Categorical(torch.tensor([3e38, 0.0, -3e38]))
    assert policy.sample(generator()).item() == 0
    assert policy.entropy().item() == 0.0


@pytest.mark.parametrize("shape", [(3,), (4, 1), (4, 3, 1)])
def test_actions_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    policy = Categorical(random_logits(4, 3, 6))
    with pytest.raises(ValueError, match=r"expected actions of shape \[4, 3\]"):
        policy.log_prob(torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("start", [0, 5])
def test_head_of_a_discrete_space_has_one_logit_an_action(start: int) -> None:
    """Actions count from 0 whatever the space starts at; the environment shifts them."""
    head = policy_head(gymnasium.spaces.Discrete(3, start=start))
    assert head.num_outputs == 3
    policy = head(torch.zeros(200, 4, 3))
    assert policy.sample(generator()).unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "space",
    [gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.MultiDiscrete([2, 3])],
    ids=["box", "multi-discrete"],
)
def test_other_spaces_are_refused_by_name(space: gymnasium.Space) -> None:
    with pytest.raises(ValueError, match=type(space).__name__):
        policy_head(space)
