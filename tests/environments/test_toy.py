"""Toy environments: the optimal returns their docstrings state are reached, and no more."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from repertory.environments import EnvironmentConfig, describe, make_vector, toy

IDS = ["Bandit-v0", "Chain-v0", "Catch-v0", "Memory-v0", "Truncation-v0"]


def mean_return(env_id, policy, num_episodes=1, **kwargs):
    """Mean return of `policy`, a function of the observations of the episode so far."""
    vector = make_vector(EnvironmentConfig(f"repertory/{env_id}", kwargs), [1])
    seen = [vector.reset()[0]]
    returns = []
    while len(returns) < num_episodes:
        tick = vector.step(np.array([policy(seen)]))
        if tick.episode_lengths[0]:
            returns.append(tick.episode_returns[0])
        if not tick.valid[0]:
            seen = []
        seen.append(tick.observations[0])
    vector.close()
    return np.mean(returns)


@pytest.mark.parametrize("env_id", IDS)
def test_every_id_is_found_both_ways_and_keeps_gymnasiums_rules(env_id):
    plain = describe(EnvironmentConfig(f"repertory/{env_id}"))
    of_module = describe(EnvironmentConfig(f"repertory.environments.toy:{env_id}"))
    assert plain.observation_space == of_module.observation_space
    assert plain.action_space == of_module.action_space
    check_env(gymnasium.make(f"repertory/{env_id}").unwrapped, skip_render_check=True)


def test_bandit_pays_as_often_as_the_arm_says():
    for arm, chance in enumerate((0.2, 0.8, 0.4)):
        found = mean_return("Bandit-v0", lambda seen, arm=arm: arm, num_episodes=2000)
        assert found == pytest.approx(chance, abs=0.05)


def test_bandit_takes_other_arms():
    assert mean_return("Bandit-v0", lambda seen: 1, num_episodes=20, chances=(0.0, 1.0)) == 1
    assert mean_return("Bandit-v0", lambda seen: 0, num_episodes=20, chances=(0.0, 1.0)) == 0


def test_chain_pays_more_to_those_who_wait():
    assert mean_return("Chain-v0", lambda seen: 1) == pytest.approx(1 - 8 * 0.02)
    assert mean_return("Chain-v0", lambda seen: 0) == pytest.approx(0.1)
    # The next reward alone, 0.1 against -0.02, speaks for leaving at every place but the last.
    for num_walked in range(1, 8):
        leaves = mean_return("Chain-v0", lambda seen, n=num_walked: int(len(seen) <= n))
        assert leaves == pytest.approx(0.1 - 0.02 * num_walked)


def test_chain_marks_each_place_apart():
    env = toy.Chain(length=3)
    rows = [env.reset(seed=1)[0]] + [env.step(1)[0] for _ in range(3)]
    np.testing.assert_array_equal(rows, [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]])


def test_catch_is_won_by_following_the_ball():
    def follow(seen):
        ball = seen[-1][0, :-1].any(axis=0).argmax()
        paddle = seen[-1][0, -1].argmax()
        return 1 + np.sign(ball - paddle)

    assert mean_return("Catch-v0", follow, num_episodes=30) == 1
    # Whoever stays in the middle catches one ball of five.
    assert mean_return("Catch-v0", lambda seen: 1, num_episodes=300) == pytest.approx(
        -0.6, abs=0.15
    )


def test_catch_shows_the_ball_and_the_paddle_as_bytes():
    env = toy.Catch()
    first, _ = env.reset(seed=3)
    assert first.dtype == np.uint8
    assert first.shape == (1, 10, 5)
    assert first.sum() == 2 * 255
    assert first[0, 0].any()
    assert first[0, 9, 2] == 255
    for _ in range(3):
        moved, *_ = env.step(0)
    assert moved[0, 3].any()
    assert moved[0, 9, 0] == 255  # at the wall, and no further
    ends = [env.step(2)[2] for _ in range(6)]
    assert ends == [False] * 5 + [True]


def test_memory_is_solved_with_the_first_observation_only():
    assert mean_return("Memory-v0", lambda seen: seen[0].argmax(), num_episodes=50) == 1
    assert mean_return("Memory-v0", lambda seen: 1 - seen[0].argmax(), num_episodes=50) == 0
    forgetful = mean_return("Memory-v0", lambda seen: seen[-1].argmax(), num_episodes=500)
    assert forgetful == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("delay", [0, 1, 4])
def test_memory_asks_after_the_delay_and_shows_nothing_on_the_way(delay):
    env = toy.Memory(delay)
    cue, _ = env.reset(seed=2)
    assert cue.sum() == 1
    for _ in range(delay):
        observation, reward, terminated, _, _ = env.step(cue.argmax())
        assert not observation.any()
        assert reward == 0
        assert not terminated
    _, reward, terminated, _, _ = env.step(cue.argmax())
    assert reward == 1
    assert terminated


def test_truncation_is_cut_and_never_ends():
    for config, limit in (
        (EnvironmentConfig("repertory/Truncation-v0"), 20),
        (EnvironmentConfig("repertory/Truncation-v0", max_episode_steps=7), 7),
    ):
        vector = make_vector(config, [1])
        first = vector.reset()
        ticks = [vector.step(np.array([0])) for _ in range(limit)]
        assert [bool(tick.truncated[0]) for tick in ticks] == [False] * (limit - 1) + [True]
        assert not any(tick.terminated[0] for tick in ticks)
        assert ticks[-1].episode_returns[0] == limit
        assert all((tick.observations == first).all() for tick in ticks)
        vector.close()
