"""Where V-trace leads: its expected operator, iterated, against a policy's value in closed form.

Espeholt et al. 2018, section 4.1 and appendix A: the operator contracts to the value of the policy

    pi_rho(a|x) = min(rho_clip mu(a|x), pi(a|x)) / sum over b of min(rho_clip mu(b|x), pi(b|x))

with behaviour policy mu and target policy pi. The expectation is taken over every path of three
ticks of the random process in `tests.markov`, which may end at any tick.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from repertory.targets import vtrace
from tests.markov import (
    ACTIONS,
    BEHAVIOUR,
    DISCOUNT,
    END,
    MOVE,
    REWARD,
    STATES,
    TARGET,
    clipped_policy,
    value_of,
)

TICKS = 3


class Paths:
    """Every path of `TICKS` ticks: what happens in it, and its chance under the behaviour policy.

    A path that ends stays at `END`; only action 0 is listed there, with chance 1.
    """

    def __init__(self) -> None:
        paths = [found for start in range(STATES) for found in self._continued([start], 1.0)]
        self.states = torch.tensor([path[0::2] for path, _ in paths]).T  # [TICKS + 1, paths]
        self.actions = torch.tensor([path[1::2] for path, _ in paths]).T  # [TICKS, paths]
        self.chances = torch.tensor([p for _, p in paths], dtype=torch.float64)

    def _continued(self, path: list[int], chance: float) -> list[tuple[list[int], float]]:
        if len(path) == 2 * TICKS + 1:
            return [(path, chance)]
        state = path[-1]
        if state == END:
            return self._continued([*path, 0, END], chance)
        found = []
        for action, following in itertools.product(range(ACTIONS), range(STATES + 1)):
            p = chance * BEHAVIOUR[state, action].item() * MOVE[state, action, following].item()
            found += self._continued([*path, action, following], p)
        return found


PATHS = Paths()


def expected_change(values: Tensor, *, ticks: int = TICKS, **clips: float) -> Tensor:
    """[STATES]; the expected V-trace target of each state less its value.

    All that lies behind an end is NaN, so that it cannot help.
    """
    nan = torch.full((1,), math.nan, dtype=torch.float64)
    states, actions = PATHS.states[: ticks + 1], PATHS.actions[:ticks]
    before, after = states[:-1], states[1:]

    def at_each_tick(table: Tensor) -> Tensor:
        padded = torch.cat([table, nan.expand(1, ACTIONS)])
        return padded[before, actions]

    result = vtrace(
        torch.cat([values, nan])[states],
        at_each_tick(REWARD),
        torch.where(after == END, 0.0, DISCOUNT).double(),
        before != END,
        at_each_tick(TARGET.log()),
        at_each_tick(BEHAVIOUR.log()),
        **clips,
    )
    excess = PATHS.chances * (result.values[0] - values[states[0]])
    return torch.zeros_like(values).index_add_(0, states[0], excess)


def fixed_point(*, rho_clip: float, **others: float) -> Tensor:
    """Iterate the operator from far away until it moves no more.

    A step is lengthened by what the clip takes from it: with tiny clips the operator hardly moves.
    Where it comes to rest does not depend on that.
    """
    values = torch.full((STATES,), 50.0, dtype=torch.float64)
    length = 1.0 / min(1.0, rho_clip)
    for _ in range(2000):
        change = length * expected_change(values, rho_clip=rho_clip, **others)
        values = values + change
        if change.abs().max() < 1e-10:
            return values
    raise AssertionError("the operator does not contract")


def test_every_path_is_there_once() -> None:
    starts = torch.zeros(STATES, dtype=torch.float64).index_add_(0, PATHS.states[0], PATHS.chances)
    torch.testing.assert_close(starts, torch.ones_like(starts))
    assert (PATHS.states[1:] == END).any(1).all()


@pytest.mark.parametrize("rho_clip", [0.05, 0.3, 0.7, 1.0, 1.5, 3.0, math.inf])
def test_vtrace_arrives_at_the_value_of_the_clipped_policy(rho_clip: float) -> None:
    expected = value_of(clipped_policy(rho_clip))
    found = fixed_point(rho_clip=rho_clip, trace_clip=min(1.0, rho_clip))
    assert (found - expected).abs().max() < 1e-6


def test_clip_one_learns_neither_policys_value() -> None:
    found = fixed_point(rho_clip=1.0)
    for policy in (TARGET, BEHAVIOUR):
        assert (found - value_of(policy)).abs().max() > 0.1


def test_without_a_clip_the_target_policys_value_is_learned() -> None:
    assert (fixed_point(rho_clip=math.inf) - value_of(TARGET)).abs().max() < 1e-6


def test_tiny_clips_approach_the_behaviour_policys_value() -> None:
    """And arrive there once the clip lies below every ratio: all actions then weigh the same."""
    behaviour = value_of(BEHAVIOUR)
    distances = [
        (fixed_point(rho_clip=clip, trace_clip=clip) - behaviour).abs().max().item()
        for clip in (1.0, 0.5, 0.2, 0.001)
    ]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 0.1
    assert (TARGET / BEHAVIOUR).min() > 0.001
    assert distances[-1] < 1e-6


@pytest.mark.parametrize(
    "others",
    [
        {"trace_clip": 0.0},
        {"trace_clip": 0.4},
        {"lambda_": 0.0},
        {"lambda_": 0.6},
        {"ticks": 1},
        {"ticks": 2},
    ],
)
def test_what_carries_errors_back_decides_only_the_speed(others: dict[str, float]) -> None:
    """Traces and the unroll's length leave the fixed point where it is."""
    expected = value_of(clipped_policy(1.0))
    assert (fixed_point(rho_clip=1.0, **others) - expected).abs().max() < 1e-6
