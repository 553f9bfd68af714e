"""Laws that targets keep for any data; each caught a public fault somewhere, or would have."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from repertory.targets import Targets, gae, n_step, vtrace
from tests.oracles import Rows, random_rows

seeds = st.integers(0, 2**32 - 1)
lambdas = st.sampled_from([0.0, 0.3, 0.95, 1.0])
lengths = st.integers(1, 10)


def law(function):
    """Thirty random unrolls; nothing is stored between runs."""
    return settings(max_examples=30, deadline=None, database=None, derandomize=True)(function)


def all_targets(rows: Rows, lambda_: float = 0.9) -> list[Targets]:
    return [
        n_step(*rows.arguments()),
        gae(*rows.arguments(), lambda_),
        vtrace(*rows.arguments(), *rows.log_probs(), lambda_=lambda_, rho_clip=1.5),
    ]


def assert_same(actual: Targets, expected: Targets) -> None:
    torch.testing.assert_close(actual.values, expected.values, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(actual.advantages, expected.advantages, rtol=1e-9, atol=1e-9)


def one_step_errors(rows: Rows) -> Tensor:
    future = rows.discounts * rows.values[1:]
    return torch.where(rows.valid, rows.rewards + future - rows.values[:-1], 0.0)


@given(seed=seeds, lambda_=lambdas)
@law
def test_without_a_future_the_target_is_the_reward(seed: int, lambda_: float) -> None:
    rows = random_rows(seed)
    rows.discounts = torch.zeros_like(rows.discounts)
    rows.target_log_probs = rows.behaviour_log_probs
    for result in all_targets(rows, lambda_):
        torch.testing.assert_close(result.values, rows.rewards, rtol=1e-9, atol=1e-9)


@given(seed=seeds)
@law
def test_lambda_one_is_monte_carlo_where_the_episode_ends_inside(seed: int) -> None:
    rows = random_rows(seed)
    rows.valid = torch.ones_like(rows.valid)
    discount = 0.9
    rows.discounts = torch.full_like(rows.discounts, discount)
    rows.discounts[-1] = 0.0
    powers = discount ** torch.arange(len(rows.rewards), dtype=torch.float64)
    for t in range(len(rows.rewards)):
        sum_of_rewards = (powers[: len(powers) - t, None] * rows.rewards[t:]).sum(0)
        advantages = gae(*rows.arguments(), 1.0).advantages[t]
        torch.testing.assert_close(advantages, sum_of_rewards - rows.values[t])


@given(seed=seeds)
@law
def test_lambda_zero_is_the_one_step_error(seed: int) -> None:
    rows = random_rows(seed)
    torch.testing.assert_close(gae(*rows.arguments(), 0.0).advantages, one_step_errors(rows))


@given(seed=seeds, lambda_=lambdas, clip=st.floats(1.0, 5.0))
@law
def test_equal_policies_make_vtrace_gae(seed: int, lambda_: float, clip: float) -> None:
    rows = random_rows(seed)
    rows.target_log_probs = rows.behaviour_log_probs
    result = vtrace(
        *rows.arguments(), *rows.log_probs(), lambda_=lambda_, rho_clip=clip, trace_clip=clip
    )
    assert_same(result, gae(*rows.arguments(), lambda_))


@given(seed=seeds)
@law
def test_equal_policies_make_vtrace_n_step(seed: int) -> None:
    rows = random_rows(seed)
    rows.target_log_probs = rows.behaviour_log_probs
    assert_same(vtrace(*rows.arguments(), *rows.log_probs()), n_step(*rows.arguments()))


@given(seed=seeds)
@law
def test_trace_clip_zero_leaves_one_step_value_targets(seed: int) -> None:
    rows = random_rows(seed)
    result = vtrace(*rows.arguments(), *rows.log_probs(), trace_clip=0.0)
    rho = (rows.target_log_probs - rows.behaviour_log_probs).exp().clamp(max=1.0)
    expected = torch.where(rows.valid, rows.values[:-1] + rho * one_step_errors(rows), 0.0)
    torch.testing.assert_close(result.values, expected)


@given(seed=seeds, first=lengths, second=lengths)
@law
def test_cutting_at_an_end_and_joining_changes_nothing(seed: int, first: int, second: int) -> None:
    rows = random_rows(seed, first + second)
    rows.valid[first - 1 : first + 1] = True
    rows.valid[first] = False  # the tick that merely resets
    halves = [rows.rows(0, first), rows.rows(first, first + second)]
    for whole, *parts in zip(all_targets(rows), *map(all_targets, halves), strict=True):
        joined = Targets(
            torch.cat([part.values for part in parts]),
            torch.cat([part.advantages for part in parts]),
        )
        assert_same(whole, joined)


@given(seed=seeds)
@law
def test_columns_do_not_know_of_each_other(seed: int) -> None:
    rows = random_rows(seed)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    for whole, permuted in zip(all_targets(rows), all_targets(rows.columns(order)), strict=True):
        assert_same(permuted, Targets(whole.values[:, order], whole.advantages[:, order]))


@given(seed=seeds, garbage=st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30]))
@law
def test_what_stands_in_invalid_rows_is_irrelevant(seed: int, garbage: float) -> None:
    rows = random_rows(seed)
    before = all_targets(rows)
    invalid = ~rows.valid
    for name in ("rewards", "discounts", "target_log_probs", "behaviour_log_probs"):
        setattr(rows, name, torch.where(invalid, garbage, getattr(rows, name)))
    # The value in such a row is the bootstrap of the tick before, unless that one terminated or
    # was invalid as well.
    unused = invalid.clone()
    unused[1:] &= (rows.discounts[:-1] == 0.0) | invalid[:-1]
    rows.values[:-1] = torch.where(unused, garbage, rows.values[:-1])
    for result, expected in zip(all_targets(rows), before, strict=True):
        assert torch.equal(result.values, expected.values)
        assert torch.equal(result.advantages, expected.advantages)
        assert not result.values[invalid].any()
        assert not result.advantages[invalid].any()


@given(seed=seeds, lambda_=lambdas)
@law
def test_targets_are_linear_in_values_and_rewards(seed: int, lambda_: float) -> None:
    rows, other = random_rows(seed), random_rows(seed + 1)
    other.discounts, other.valid = rows.discounts, rows.valid
    other.rewards = torch.where(rows.valid, other.rewards, 0.0)
    other.target_log_probs = rows.target_log_probs
    other.behaviour_log_probs = rows.behaviour_log_probs
    both = Rows(**vars(rows))
    both.values, both.rewards = rows.values + other.values, rows.rewards + other.rewards
    every = (all_targets(x, lambda_) for x in (both, rows, other))
    for result, first, second in zip(*every, strict=True):
        assert_same(
            result, Targets(first.values + second.values, first.advantages + second.advantages)
        )


@given(seed=seeds, constant=st.floats(-10.0, 10.0))
@law
def test_a_constant_on_all_values_arrives_discounted(seed: int, constant: float) -> None:
    rows = random_rows(seed)
    rows.valid, rows.discounts = torch.ones_like(rows.valid), torch.full_like(rows.discounts, 0.9)
    before = n_step(*rows.arguments()).values
    rows.values = rows.values + constant
    distances = torch.arange(len(rows.rewards), 0, -1, dtype=torch.float64)
    expected = before + constant * (0.9**distances)[:, None]
    torch.testing.assert_close(n_step(*rows.arguments()).values, expected, rtol=1e-9, atol=1e-9)


def test_no_gradient_flows_into_targets() -> None:
    rows = random_rows(0)
    for name in ("values", "rewards", "target_log_probs"):
        getattr(rows, name).requires_grad_()
    for result in all_targets(rows):
        assert not result.values.requires_grad
        assert not result.advantages.requires_grad
