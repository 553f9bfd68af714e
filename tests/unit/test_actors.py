"""The actor on environments that count: every array compared exactly."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from repertory.actors import Actor, trajectory_spec
from repertory.config import NotFinite
from repertory.environments import EnvironmentConfig, describe, make_vector
from repertory.models.base import ModelOutput
from repertory.models.policies import Categorical
from repertory.progress import Stopwatch, Window
from repertory.targets import n_step
from repertory.trajectories import CoreState, Trajectory
from tests.alone import Line
from tests.probes import Counter


class Spy(nn.Module):
    """Keeps what it was shown; its core state counts the rows since the last reset."""

    def __init__(self, num_actions: int = 2) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(num_actions))
        self.shown: list[Tensor] = []

    def initial_core_state(self, num_columns: int) -> CoreState:
        return (torch.full((num_columns, 1), 0.5),)

    def forward(self, observations: Tensor, core_state: CoreState, resets: Tensor) -> ModelOutput:
        (count,) = core_state
        for row in range(observations.shape[0]):
            count = torch.where(resets[row, :, None], 0.5, count) + 1
        self.shown.append(observations.clone())
        logits = self.bias.expand(*observations.shape[:2], -1)
        return ModelOutput(Categorical(logits), observations.flatten(2).sum(-1), (count,))


def play(
    make: Any,
    unroll_length: int,
    unrolls: int,
    columns: int = 1,
    not_finite: NotFinite = "stop",
    context: Any = None,
) -> list[Trajectory]:
    config = EnvironmentConfig(make)
    spec, model = describe(config), Spy()
    actor = Actor(
        make_vector(config, list(range(1, columns + 1))),
        model,
        trajectory_spec(spec, model, unroll_length=unroll_length, num_columns=columns),
        torch.Generator().manual_seed(0),
        Stopwatch(),
        not_finite,
    )
    played = [actor.unroll(version).clone() for version in range(unrolls)]
    if context is not None:
        actor._reported = -math.inf
        actor.report(context)
    actor.close()
    return played


def test_every_array_around_a_termination() -> None:
    (one,) = play(lambda: Counter(3, "term"), unroll_length=9, unrolls=1)
    assert one.observations[:, 0, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert one.rewards[:, 0].tolist() == [1, 1, 1, 0, 1, 1, 1, 0, 1]
    assert one.terminated[:, 0].tolist() == [0, 0, 1, 0, 0, 0, 1, 0, 0]
    assert not one.truncated.any()
    assert one.valid[:, 0].tolist() == [1, 1, 1, 0, 1, 1, 1, 0, 1]
    assert one.episode_lengths[:, 0].tolist() == [0, 0, 3, 0, 0, 0, 3, 0, 0]
    assert one.episode_returns[:, 0].tolist() == [0, 0, 3, 0, 0, 0, 3, 0, 0]


def test_truncation_stands_apart_and_termination_wins() -> None:
    (cut,) = play(lambda: Counter(2, "trunc"), unroll_length=3, unrolls=1)
    assert cut.truncated[:, 0].tolist() == [0, 1, 0]
    assert not cut.terminated.any()
    (both,) = play(lambda: Counter(2, "both"), unroll_length=3, unrolls=1)
    assert both.terminated[:, 0].tolist() == [0, 1, 0]
    assert not both.truncated.any()


def test_unrolls_join_without_losing_a_tick() -> None:
    """Source of the fault: ray-project/ray PR#36013 (B10), the last step of each fragment."""
    parts = play(lambda: Counter(3, "term"), unroll_length=2, unrolls=4)
    (whole,) = play(lambda: Counter(3, "term"), unroll_length=8, unrolls=1)
    for name in ("rewards", "valid", "terminated", "episode_lengths"):
        joined = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(joined, getattr(whole, name)), name
    observations = torch.cat([part.observations[:-1] for part in parts])
    assert torch.equal(observations, whole.observations[:-1])
    for left, right in pairwise(parts):
        assert torch.equal(left.observations[-1], right.observations[0])


class PaysLast(Counter):
    """Five env steps, of which the last pays 10."""

    def __init__(self) -> None:
        super().__init__(5)

    def reward(self) -> float:
        return 10.0 * (self.steps == 5)


def test_b10_the_last_step_of_an_unroll_is_learned_from() -> None:
    """Last step of each fragment thrown away. Source: ray-project/ray PR#36013, PR#34779."""
    (unroll,) = play(PaysLast, unroll_length=5, unrolls=1)
    assert unroll.valid.sum() == 5
    assert unroll.rewards[:, 0].tolist() == [0, 0, 0, 0, 10]
    discounts = 0.9 * (~unroll.terminated).float()
    made = n_step(torch.full((6, 1), 3.0), unroll.rewards, discounts, unroll.valid)
    assert made.values[-1].item() == 10.0
    assert made.values[0].item() == pytest.approx(10 * 0.9**4)


def test_the_core_state_is_reset_at_episode_starts_only() -> None:
    """One unroll a tick: `initial_core_state` shows the state before each row."""
    parts = play(lambda: Counter(3, "term"), unroll_length=1, unrolls=9)
    states = [part.initial_core_state[0].item() for part in parts]
    # Rows 0..3 are one episode with its final observation, row 4 begins the next.
    assert states == [0.5, 1.5, 2.5, 3.5, 0.5, 1.5, 2.5, 3.5, 0.5]


def test_b28_a_custom_initial_state_stands_at_the_start_of_every_episode() -> None:
    """Custom initial state ignored between episodes. Source: ray-project/ray#15483."""
    (whole,) = play(lambda: Counter(1, "term"), unroll_length=8, unrolls=1)
    parts = play(lambda: Counter(1, "term"), unroll_length=1, unrolls=8)
    for row in range(1, 8):
        if whole.resets[row].item():
            assert parts[row].initial_core_state[0].item() == 0.5


def test_b21_one_version_for_the_whole_unroll_and_its_own_log_probs() -> None:
    """Weights change in the middle of a rollout.

    Source: facebookresearch/torchbeast#8; seungeunrho/minimalRL#9.
    """
    config = EnvironmentConfig(lambda: Counter(5, "term"))
    spec, model = describe(config), Spy()
    actor = Actor(
        make_vector(config, [1, 2]),
        model,
        trajectory_spec(spec, model, unroll_length=20, num_columns=2),
        torch.Generator().manual_seed(0),
        Stopwatch(),
    )
    for version, bias in enumerate(([0.0, 0.0], [2.0, -1.0])):
        with torch.no_grad():
            model.bias.copy_(torch.tensor(bias))
        trajectory = actor.unroll(version)
        assert trajectory.policy_version.tolist() == [version, version]
        expected = Categorical(torch.tensor(bias).expand(20, 2, -1)).log_prob(trajectory.actions)
        assert torch.equal(trajectory.behaviour_log_probs, expected)
    actor.close()


def test_b40_acting_builds_no_graph() -> None:
    """`volatile=True` became a no-op, so that acting builds graphs and grows.

    Source: ikostrikov/pytorch-a3c#52, #57; ray-project/ray PR#2036; facebookresearch/ELF PR#109;
    yunjey/pytorch-tutorial PR#143.
    """
    (one,) = play(lambda: Counter(3, "term"), unroll_length=5, unrolls=1)
    for tensor in one.to_fields().values():
        assert tensor.grad_fn is None
        assert not tensor.requires_grad


def test_b04_the_policy_never_plays_on_a_dead_state_and_the_critic_sees_the_true_last() -> None:
    """Reset observation used for the timeout value, or terminal observation fed to the actor.

    Source: Unity-Technologies/ml-agents PR#574; Motphys/UniLab#236.
    """
    (one,) = play(lambda: Counter(3, "trunc"), unroll_length=8, unrolls=1)
    played_on = one.observations[:-1, 0, 0][one.valid[:, 0]]
    assert played_on.tolist() == [0, 1, 2, 0, 1, 2]
    border = one.truncated[:, 0].nonzero().flatten()
    assert one.observations[border + 1, 0, 0].tolist() == [3, 3]


def test_b11_the_first_input_of_an_episode_is_the_reset_observation() -> None:
    """Reset code is a no-op because of statement order. Source: openai/baselines#617, #383."""

    class Labelled(Counter):
        episode = 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.episode += 1
            return super().reset(seed=seed, options=options)

        def observation(self) -> Any:
            return np.array([10 * self.episode + self.steps], np.float32)

    (one,) = play(lambda: Labelled(2, "term"), unroll_length=7, unrolls=1)
    assert one.observations[:, 0, 0].tolist() == [10, 11, 12, 20, 21, 22, 30, 31]
    assert one.terminated[:, 0].tolist() == [0, 1, 0, 0, 1, 0, 0]


def test_b47_observations_keep_their_dtype_and_values() -> None:
    """Float observations stored as uint8. Source: openai/baselines#362."""

    class Fixed(gymnasium.Env[Any, Any]):
        def __init__(self, value: Any, space: gymnasium.spaces.Box) -> None:
            self.observation_space, self.value = space, np.full(space.shape, value, space.dtype)
            self.action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return self.value, {}

        def step(self, action: Any) -> Any:
            return self.value, 0.0, False, False, {}

    for value, space in (
        (0.25, gymnasium.spaces.Box(-1, 1, (2,), np.float32)),
        (300.7, gymnasium.spaces.Box(0, 1000, (3,), np.float64)),
        (-123_456, gymnasium.spaces.Box(-(2**31), 2**31 - 1, (1,), np.int32)),
    ):
        (one,) = play(lambda v=value, s=space: Fixed(v, s), unroll_length=2, unrolls=1)
        assert (one.observations.numpy() == np.asarray(value, space.dtype)).all()
        assert one.observations.numpy().dtype == space.dtype


class Bad(Counter):
    """Counts to 4, and gives one number that is not finite at its third step."""

    def __init__(self, what: str, number: float) -> None:
        super().__init__(4, "term")
        self.what, self.number = what, number

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        if self.steps == 3:
            reward = self.number if self.what == "reward" else reward
            if self.what == "observation":
                observation = np.full_like(observation, self.number)
        return observation, reward, terminated, truncated, info


# An observation of infinity has already left its space's bounds, and is refused for that.
@pytest.mark.parametrize(
    ("what", "number"), [("reward", math.nan), ("reward", math.inf), ("observation", math.nan)]
)
def test_a_number_that_is_not_finite_is_named_where_it_comes_from(what: str, number: float) -> None:
    with pytest.raises(FloatingPointError, match=rf"column 0, tick 2 .* the {what} is {number}"):
        play(lambda: Bad(what, number), unroll_length=2, unrolls=3)


def test_b103_a_reward_that_is_not_finite_can_be_left_out() -> None:
    """One bad number kills the model silently.

    Source: pytorch/pytorch#46849; facebookresearch/habitat-lab PR#2229.
    """
    line = Line()
    (one,) = play(lambda: Bad("reward", math.nan), 8, 1, not_finite="skip", context=line)
    assert one.valid[:, 0].tolist() == [1, 1, 0, 1, 0, 1, 1, 0]
    assert one.rewards[:, 0].tolist() == [1, 1, 0, 1, 0, 1, 1, 0]
    assert one.observations[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    window = Window()
    window.add_played(one, lag=None)
    assert not window.episodes, "the episode's return is not known"
    (event,) = [record for record in line.records if record["kind"] == "event"]
    assert event["event"] == "left_out"
    assert "column 0, tick 7 of this actor: the reward is nan; 2 transitions" in event["message"]


def test_b103_an_observation_that_is_not_finite_takes_the_transitions_on_both_sides() -> None:
    """One bad number kills the model silently.

    Source: pytorch/pytorch#46849; facebookresearch/habitat-lab PR#2229.
    """
    first, second = play(lambda: Bad("observation", math.nan), 3, 2, not_finite="skip")
    assert first.observations[:, 0, 0].tolist() == [0, 1, 2, 0]
    assert first.valid[:, 0].tolist() == [1, 1, 0]
    assert second.observations[:, 0, 0].tolist() == [0, 4, 0, 1]
    assert second.valid[:, 0].tolist() == [0, 0, 1]
    assert second.episode_lengths[:, 0].tolist() == [4, 0, 0]


@pytest.mark.parametrize("not_finite", ["stop", "skip"])
def test_an_observation_behind_a_termination_may_be_anything(not_finite: NotFinite) -> None:
    """Nobody looks at it; a simulator that has blown up often ends so, with the penalty for it."""

    class BlownUp(Counter):
        def observation(self) -> Any:
            return np.full(1, math.nan if self.steps == self.length else self.steps, np.float32)

    (one,) = play(lambda: BlownUp(3, "term"), 6, 1, not_finite=not_finite)
    assert one.observations[:, 0, 0].tolist() == [0, 1, 2, 0, 0, 1, 2]
    assert one.valid[:, 0].tolist() == [1, 1, 1, 0, 1, 1]
    assert one.terminated[:, 0].tolist() == [0, 0, 1, 0, 0, 0]
    assert one.episode_lengths[:, 0].tolist() == [0, 0, 3, 0, 0, 0]
    if not_finite == "stop":
        with pytest.raises(FloatingPointError, match="tick 2 of this actor: the observation is"):
            play(lambda: BlownUp(3, "trunc"), 6, 1)


def test_numbers_that_are_never_finite_end_the_run_all_the_same() -> None:
    class Hopeless(Counter):
        def step(self, action: Any) -> Any:
            observation, _, terminated, truncated, info = super().step(action)
            return observation, math.nan, terminated, truncated, info

    with pytest.raises(
        FloatingPointError, match="the reward is nan; so it has been for 10 unrolls"
    ):
        play(lambda: Hopeless(4, "term"), 4, 11, not_finite="skip")


def test_a_first_observation_that_is_not_finite_is_named() -> None:
    class Born(Counter):
        def reset(self, **keywords: Any) -> Any:
            observation, info = super().reset(**keywords)
            return np.full_like(observation, math.nan), info

    with pytest.raises(FloatingPointError, match=r"column 0, .* the first observation is nan"):
        play(lambda: Born(4, "term"), 4, 1)


def test_a_policy_that_is_not_finite_plays_no_action() -> None:
    class Broken(Spy):
        def forward(self, *arguments: Any) -> ModelOutput:
            output = super().forward(*arguments)
            return output._replace(policy=Categorical(torch.full((1, 1, 2), math.nan)))

    config = EnvironmentConfig(lambda: Counter(3, "term"))
    spec, model = describe(config), Broken()
    actor = Actor(
        make_vector(config, [1]),
        model,
        trajectory_spec(spec, model, unroll_length=2, num_columns=1),
        torch.Generator(),
        Stopwatch(),
    )
    with pytest.raises((FloatingPointError, RuntimeError)):
        actor.unroll(0)
    actor.close()
