"""Targets against double-sum oracles, against recorded cases, and in the cases of the field."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from repertory.targets import Targets, gae, n_step, vtrace
from tests.oracles import gae_oracle, random_rows, vtrace_oracle

CASES = json.loads((Path(__file__).parents[1] / "data" / "targets.json").read_text())["cases"]
NAN = math.nan


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)


def ticks(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.bool).unsqueeze(1)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", range(20))
def test_n_step_is_the_sum_of_discounted_rewards(seed: int) -> None:
    rows = random_rows(seed)
    targets, advantages = gae_oracle(rows, 1.0)
    result = n_step(*rows.arguments())
    assert_close(result.values, targets)
    assert_close(result.advantages, advantages)


@pytest.mark.parametrize("lambda_", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_gae_is_the_mixture_of_n_step_returns(seed: int, lambda_: float) -> None:
    rows = random_rows(seed)
    targets, advantages = gae_oracle(rows, lambda_)
    result = gae(*rows.arguments(), lambda_)
    assert_close(result.values, targets)
    assert_close(result.advantages, advantages)


@pytest.mark.parametrize("lambda_", [0.0, 0.9, 1.0])
@pytest.mark.parametrize(
    ("rho_clip", "trace_clip", "advantage_clip"),
    [(1.0, 1.0, None), (0.7, 0.3, None), (2.0, 0.5, 0.8), (math.inf, 1.0, 1.0), (1.0, 0.0, 3.0)],
)
def test_vtrace_is_the_sum_over_later_errors(
    lambda_: float, rho_clip: float, trace_clip: float, advantage_clip: float | None
) -> None:
    for seed in range(3):
        rows = random_rows(seed)
        targets, advantages = vtrace_oracle(
            rows,
            lambda_,
            rho_clip,
            trace_clip,
            rho_clip if advantage_clip is None else advantage_clip,
        )
        result = vtrace(
            *rows.arguments(),
            *rows.log_probs(),
            lambda_=lambda_,
            rho_clip=rho_clip,
            trace_clip=trace_clip,
            advantage_clip=advantage_clip,
        )
        assert_close(result.values, targets)
        assert_close(result.advantages, advantages)


@pytest.mark.parametrize("clip", [0.3, 1.0, math.inf])
def test_unweighted_advantages_lack_exactly_the_weight_of_their_own_tick(clip: float) -> None:
    for seed in range(5):
        rows = random_rows(seed)
        options = {"lambda_": 0.9, "rho_clip": clip}
        weighted = vtrace(*rows.arguments(), *rows.log_probs(), **options)
        result = vtrace(*rows.arguments(), *rows.log_probs(), **options, weighted_advantages=False)
        assert torch.equal(result.values, weighted.values)
        rho = (rows.target_log_probs - rows.behaviour_log_probs).exp().clamp(max=clip)
        assert_close(result.advantages * rho, weighted.advantages)
        assert not result.advantages[~rows.valid].any()


def test_a_clip_for_a_weight_that_is_left_out_is_refused() -> None:
    rows = random_rows(0)
    with pytest.raises(ValueError, match="advantage_clip"):
        vtrace(*rows.arguments(), *rows.log_probs(), advantage_clip=1.0, weighted_advantages=False)


def case_columns(case: dict[str, Any], b: int) -> tuple[dict[str, Tensor], list[int]]:
    """One column of a recorded case in this project's layout.

    A tick that merely resets is put behind each end, its row of values holding the recorded next
    value, all else on it NaN.

    Returns:
        Tensors by name, and the rows of the real ticks.
    """
    recorded = {
        name: [row[b] for row in rows] for name, rows in case.items() if isinstance(rows, list)
    }
    per_tick = [
        name for name in ("rewards", "target_log_probs", "behaviour_log_probs") if name in recorded
    ]
    result: dict[str, list[float]] = {
        name: [] for name in (*per_tick, "values", "discounts", "valid")
    }
    real = []
    num_ticks = len(recorded["rewards"])
    for t in range(num_ticks):
        real.append(len(result["valid"]))
        for name in (*per_tick, "values"):
            result[name].append(recorded[name][t])
        result["discounts"].append(0.0 if recorded["terminated"][t] else case["discount"])
        result["valid"].append(True)
        if t + 1 < num_ticks and (recorded["terminated"][t] or recorded["truncated"][t]):
            for name in per_tick:
                result[name].append(NAN)
            result["values"].append(recorded["next_values"][t])
            result["discounts"].append(NAN)
            result["valid"].append(False)
    result["values"].append(recorded["next_values"][-1])
    tensors = {name: column(*numbers) for name, numbers in result.items()}
    tensors["valid"] = tensors["valid"].bool()
    return tensors, real


@pytest.mark.parametrize("index", range(len(CASES)))
def test_recorded_case(index: int) -> None:
    case = CASES[index]
    for b in range(len(case["rewards"][0])):
        rows, real = case_columns(case, b)
        arguments = (rows["values"], rows["rewards"], rows["discounts"], rows["valid"])
        match case["kind"]:
            case "n_step":
                result = n_step(*arguments)
            case "gae":
                result = gae(*arguments, case["lambda"])
            case _:
                result = vtrace(
                    *arguments,
                    rows["target_log_probs"],
                    rows["behaviour_log_probs"],
                    lambda_=case["lambda"],
                    rho_clip=case["rho_clip"],
                    trace_clip=case["trace_clip"],
                    advantage_clip=case["advantage_clip"],
                )
        expected_values = column(*(row[b] for row in case["value_targets"]))
        expected_advantages = column(*(row[b] for row in case["advantages"]))
        assert_close(result.values[real], expected_values, 1e-6)
        assert_close(result.advantages[real], expected_advantages, 1e-6)


def truncated_in_the_middle(values: Tensor) -> Targets:
    """Five ticks of reward 1, the third truncated, a reset tick behind it."""
    rewards = column(1, 1, 1, 0, 1, 1)
    return gae(values, rewards, torch.full_like(rewards, 0.9), ticks(1, 1, 1, 0, 1, 1), 0.95)


def test_time_limit_is_not_death() -> None:
    """A truncated tick bootstraps from its own final observation, and nothing crosses it.

    Source: DLR-RM/stable-baselines3#651, hill-a/stable-baselines#1004, vwxyzjn/cleanrl#198.
    """
    result = truncated_in_the_middle(column(0.5, 0.5, 0.5, 2.0, 100, 0.5, 0.5))
    assert_close(
        result.advantages[[0, 1, 2, 4, 5]], column(3.44361, 2.9165, 2.3, -97.73775, 0.95), 1e-5
    )


def test_advantage_does_not_leak_across_a_truncation() -> None:
    """What follows a truncation belongs to another episode.

    Source: Toni-SM/skrl#449.
    """
    ordinary = truncated_in_the_middle(column(0.5, 0.5, 0.5, 2.0, 100, 0.5, 0.5))
    poisoned = truncated_in_the_middle(column(0.5, 0.5, 0.5, 2.0, 1e9, -1e9, 1e9))
    assert torch.equal(ordinary.advantages[:3], poisoned.advantages[:3])
    assert ordinary.advantages[2].item() == pytest.approx(2.3)


def test_timeout_bootstraps_from_the_observation_after_the_action() -> None:
    """One truncated tick from value 1 to value 5: the target is 5.

    Source: leggedrobotics/rsl_rl#151.
    """
    result = n_step(column(1, 5), column(0), column(1), ticks(1))
    assert (result.values.item(), result.advantages.item()) == (5.0, 4.0)


@pytest.mark.parametrize("reset_tick", [True, False])
def test_termination_stands_at_its_own_tick(reset_tick: bool) -> None:
    """Neither the tick before nor the one after is taken for the end.

    Source: DLR-RM/stable-baselines3#105.
    """
    valid = [1, 1, 0, 1, 1] if reset_tick else [1, 1, 1, 1]
    rewards = column(*valid)
    discounts = torch.ones_like(rewards)
    discounts[1] = 0.0
    values = torch.zeros(len(valid) + 1, 1, dtype=torch.float64)
    result = n_step(values, rewards, discounts, ticks(*valid))
    assert result.values[ticks(*valid)].tolist() == [2.0, 1.0, 2.0, 1.0]


def test_bootstrap_of_the_unroll_counts_once() -> None:
    """Value 10 behind the only tick, discount 0.9: advantage 9, not 18.

    Source: simonsays1980/rl-triton PR#4.
    """
    assert n_step(column(0, 10), column(0), column(0.9), ticks(1)).advantages.item() == 9.0


def test_last_tick_of_an_unroll_is_learned_from() -> None:
    """A reward that lies exactly on the last tick reaches the targets.

    Source: ray-project/ray PR#36013, PR#34779.
    """
    rewards, discounts = column(0, 0, 0, 0, 10), column(1, 1, 1, 1, 0)
    result = n_step(torch.zeros(6, 1).double(), rewards, discounts, ticks(1, 1, 1, 1, 1))
    assert result.values.flatten().tolist() == [10.0] * 5


def test_vtrace_does_not_read_the_next_episode_at_a_truncation() -> None:
    """Episode A of value 1 everywhere, episode B of value 100: every advantage is 0.

    Source: pytorch/rl#4209.
    """
    values, rewards = column(1, 1, 1, 100, 100, 100), column(0, 0, 0, 0, 0)
    ones, valid = torch.ones_like(rewards), ticks(1, 1, 0, 1, 1)
    result = vtrace(values, rewards, ones, valid, ones, ones)
    assert result.advantages.flatten().tolist() == [0.0] * 5
    assert result.values.flatten().tolist() == [1.0, 1.0, 0.0, 100.0, 100.0]


def hand_computed_vtrace(discounts: Tensor, clip: float) -> Targets:
    log_ratios = column(2.0, 0.5).log()
    return vtrace(
        column(1, 2, 3),
        column(1, 1),
        discounts,
        ticks(1, 1),
        log_ratios,
        torch.zeros_like(log_ratios),
        rho_clip=clip,
        trace_clip=clip,
    )


def test_where_the_bootstrap_value_and_the_ratios_belong() -> None:
    """Two ticks worked out by hand: running on, terminated, and without clips.

    Source: google-deepmind/scalable_agent#15, #26.
    """
    result = hand_computed_vtrace(column(0.9, 0.9), 1.0)
    assert_close(result.values, column(3.565, 2.85))
    assert_close(result.advantages, column(2.565, 0.85))
    terminated = hand_computed_vtrace(column(0.0, 0.9), 1.0)
    assert_close(terminated.values, column(1.0, 2.85))
    assert_close(terminated.advantages, column(0.0, 0.85))
    assert hand_computed_vtrace(column(0.9, 0.9), math.inf).values[0].item() == pytest.approx(6.13)


def test_value_behind_a_termination_is_never_read() -> None:
    """A critic that gives NaN for a terminal observation harms nobody."""
    for reset_tick in (True, False):
        valid = ticks(1, not reset_tick, 1)
        values, rewards = column(1, NAN if reset_tick else 7, 2, 3), column(1, 1, 1)
        ones = torch.ones_like(rewards)
        result = vtrace(values, rewards, column(0, 1, 1), valid, ones, ones)
        assert result.values[0].item() == 1.0
        assert result.advantages[0].item() == 0.0


def test_huge_ratios_are_cut() -> None:
    """A ratio beyond the range of floats weighs as much as the clip."""
    far = torch.full((1, 1), -1000.0)
    one = torch.ones(1, 1)
    result = vtrace(torch.zeros(2, 1), one, one, one.bool(), torch.zeros(1, 1), far, rho_clip=2.0)
    assert result.values.item() == 2.0
    assert result.advantages.item() == 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept_and_float32_is_accurate(dtype: torch.dtype) -> None:
    rows = random_rows(3, unroll_length=64)
    exact = vtrace(*rows.arguments(), *rows.log_probs())
    cast = [x.to(dtype) if x.is_floating_point() else x for x in rows.arguments()]
    result = vtrace(*cast, *(x.to(dtype) for x in rows.log_probs()))
    assert result.values.dtype == result.advantages.dtype == dtype
    assert_close(result.values.double(), exact.values, 1e-4)


@pytest.mark.parametrize("wrong", range(6))
def test_a_shape_that_would_broadcast_is_refused(wrong: int) -> None:
    good = [torch.ones(4, 1), *(torch.ones(3, 1) for _ in range(5))]
    good[3] = good[3].bool()
    vtrace(*good)
    bad = list(good)
    bad[wrong] = bad[wrong].squeeze(1)
    with pytest.raises(ValueError, match=r"shape|rewards"):
        vtrace(*bad)


def test_values_without_the_bootstrap_row_are_refused() -> None:
    ones = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"expected shape \[4, 2\], got values \[3, 2\]"):
        n_step(ones, ones, ones, ones.bool())


def test_no_ticks_are_refused() -> None:
    none = torch.ones(0, 2)
    with pytest.raises(ValueError, match="at least"):
        n_step(torch.ones(1, 2), none, none, none.bool())


def test_valid_must_be_bool() -> None:
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match="bool"):
        n_step(torch.ones(2, 1), ones, ones, ones)


@pytest.mark.parametrize("lambda_", [-0.1, 1.1, NAN])
def test_lambda_outside_the_unit_interval_is_refused(lambda_: float) -> None:
    with pytest.raises(ValueError, match="lambda_"):
        gae(*random_rows(0).arguments(), lambda_)


@pytest.mark.parametrize("name", ["rho_clip", "trace_clip", "advantage_clip"])
def test_negative_clip_is_refused(name: str) -> None:
    rows = random_rows(0)
    with pytest.raises(ValueError, match=name):
        vtrace(*rows.arguments(), *rows.log_probs(), **{name: -1.0})
