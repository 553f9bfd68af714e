"""The adapter over Gymnasium: its contract, and the faults that others met at this border."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from repertory.environments import (
    EnvironmentConfig,
    EnvironmentFailure,
    EnvironmentRefused,
    make_single,
    make_vector,
    seeds_for,
)
from tests.probes import (
    SPACE_ZOO,
    Actions,
    Alias,
    Constant,
    Counter,
    Draws,
    NaN,
    Raise,
    Scenarios,
    SeedCounter,
    ShapeShift,
    Whims,
)


def one_column(mode, make=SeedCounter):
    """A callable that returns a vector environment of one column in `mode`."""
    return lambda: SyncVectorEnv([make], autoreset_mode=mode)


MODES = {
    "plain": SeedCounter,
    "next step": one_column(AutoresetMode.NEXT_STEP),
    "same step": one_column(AutoresetMode.SAME_STEP),
}

ALIASES = {
    "plain": Alias,
    "next step": one_column(AutoresetMode.NEXT_STEP, Alias),
    "same step": one_column(AutoresetMode.SAME_STEP, Alias),
}


def play(vector, num_ticks):
    """First observations, then every tick of `num_ticks`, all actions 0."""
    first = vector.reset()
    actions = np.zeros(vector.num_envs, np.int64)
    return first, [vector.step(actions) for _ in range(num_ticks)]


@pytest.mark.parametrize("end", ["term", "trunc", "both"])
def test_every_array_of_a_counter_is_as_the_contract_says(end):
    vector = make_vector(EnvironmentConfig(SeedCounter, {"end": end}), [2, 3])
    first, ticks = play(vector, 5)
    np.testing.assert_array_equal(first, [[0], [0]])
    assert first.dtype == np.float32
    observations = np.stack([tick.observations[:, 0] for tick in ticks])
    np.testing.assert_array_equal(observations, [[1, 1], [2, 2], [0, 3], [1, 0], [2, 1]])
    ends = np.array([[0, 0], [1, 0], [0, 1], [0, 0], [1, 0]], bool)
    terminated = np.stack([tick.terminated for tick in ticks])
    truncated = np.stack([tick.truncated for tick in ticks])
    # If both, termination wins.
    np.testing.assert_array_equal(terminated, ends & (end != "trunc"))
    np.testing.assert_array_equal(truncated, ends & (end == "trunc"))
    valid = np.array([[1, 1], [1, 1], [0, 1], [1, 0], [1, 1]], bool)
    np.testing.assert_array_equal(np.stack([tick.valid for tick in ticks]), valid)
    rewards = np.stack([tick.rewards for tick in ticks])
    np.testing.assert_array_equal(rewards, valid.astype(np.float32))
    assert rewards.dtype == np.float32
    np.testing.assert_array_equal(
        np.stack([tick.episode_lengths for tick in ticks]),
        [[0, 0], [2, 0], [0, 3], [0, 0], [2, 0]],
    )
    np.testing.assert_array_equal(
        np.stack([tick.episode_returns for tick in ticks]),
        [[0, 0], [2, 0], [0, 3], [0, 0], [2, 0]],
    )
    vector.close()


def test_reset_starts_every_column_and_every_statistic_afresh():
    vector = make_vector(EnvironmentConfig(SeedCounter), [3, 3])
    play(vector, 2)
    first, ticks = play(vector, 3)
    np.testing.assert_array_equal(first, [[0], [0]])
    np.testing.assert_array_equal(ticks[2].episode_lengths, [3, 3])
    # ... also where the next tick would have been the one that only resets.
    first, ticks = play(vector, 1)
    np.testing.assert_array_equal(ticks[0].observations, [[1], [1]])
    assert ticks[0].valid.all()
    vector.close()


def test_a_time_limit_truncates():
    for source in (lambda: Counter(length=100), "CartPole-v1", "repertory/Truncation-v0"):
        vector = make_vector(EnvironmentConfig(source, max_episode_steps=4), [1, 2])
        _, ticks = play(vector, 5)
        np.testing.assert_array_equal(ticks[3].truncated, [True, True])
        np.testing.assert_array_equal(ticks[3].terminated, [False, False])
        np.testing.assert_array_equal(ticks[3].episode_lengths, [4, 4])
        np.testing.assert_array_equal(ticks[4].valid, [False, False])
        vector.close()


def test_an_illegal_action_is_refused_and_does_no_harm():
    vector = make_vector(EnvironmentConfig(SeedCounter), [5, 5])
    vector.reset()
    with pytest.raises(ValueError, match=r"action 2 of column 1 is not one of 0\.\.1"):
        vector.step(np.array([0, 2]))
    np.testing.assert_array_equal(vector.step(np.array([0, 1])).observations, [[1], [1]])
    vector.close()


def test_the_single_environment_plays_as_a_column_does():
    config = EnvironmentConfig("CartPole-v1")
    vector = make_vector(config, [11, 12])
    singles = [make_single(config) for _ in range(2)]
    observations = vector.reset()
    for column, single in enumerate(singles):
        np.testing.assert_array_equal(single.reset(seed=11 + column)[0], observations[column])
    generator = np.random.default_rng(0)
    for _ in range(200):
        actions = generator.integers(0, 2, 2)
        tick = vector.step(actions)
        for column, single in enumerate(singles):
            if tick.valid[column]:
                observation, reward, terminated, truncated, _ = single.step(actions[column])
            else:
                observation, _ = single.reset()
                reward, terminated, truncated = 0.0, False, False
            np.testing.assert_array_equal(observation, tick.observations[column])
            assert reward == tick.rewards[column]
            assert (terminated, truncated) == (tick.terminated[column], tick.truncated[column])
    vector.close()


def test_the_single_environment_draws():
    env = make_single(EnvironmentConfig("CartPole-v1"), render_mode="rgb_array")
    env.reset(seed=1)
    assert env.render().shape == (400, 600, 3)
    env.close()


def test_b41_discrete_that_does_not_start_at_zero():
    """Source: DLR-RM/stable-baselines3#913, #1295, #2052, #2241; ray-project/ray#42196."""
    vector = make_vector(EnvironmentConfig(lambda: Actions(spaces.Discrete(3, start=-1))), [0] * 3)
    vector.reset()
    tick = vector.step(np.array([0, 1, 2]))
    np.testing.assert_array_equal(tick.observations[:, 0], [-1, 0, 1])
    with pytest.raises(ValueError, match=r"action -1 of column 0 is not one of 0\.\.2"):
        vector.step(np.array([-1, 0, 1]))
    vector.close()

    vector = make_vector(EnvironmentConfig(lambda: Actions(spaces.Discrete(1, start=2))), [0])
    vector.reset()
    np.testing.assert_array_equal(vector.step(np.array([0])).observations, [[2]])
    vector.close()

    single = make_single(EnvironmentConfig(lambda: Actions(spaces.Discrete(3, start=-1))))
    single.reset()
    assert single.action_space == spaces.Discrete(3, start=-1)
    assert single.step(-1)[0] == [-1], "as Agent.predict returns them"


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (spaces.Box(-1, 1, (2,), np.float32), np.array([0.25, -0.25], np.float32)),
        (spaces.Box(0, 1000, (1,), np.float32), np.array([300.7], np.float32)),
        (spaces.Box(-10, 10, (2,), np.int32), np.array([-7, 3], np.int32)),
        (spaces.Box(-1, 1, (1,), np.float64), np.array([1 / 3])),
        (spaces.Box(-1, 1, (), np.float32), np.float32(0.5)),
        (SPACE_ZOO["channels first"], np.full((3, 64, 64), 200, np.uint8)),
        (SPACE_ZOO["box with odd and half-infinite bounds"], np.array([6.9, 1e9], np.float32)),
    ],
)
def test_b47_observations_keep_their_values_and_dtype(space, value):
    """Source: openai/baselines#362, second comment."""
    vector = make_vector(EnvironmentConfig(lambda: Constant(space, value)), [0, 1])
    first, ticks = play(vector, 1)
    for observations in (first, ticks[0].observations):
        assert observations.dtype == space.dtype
        np.testing.assert_array_equal(observations, np.stack([value, value]))
    vector.close()


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (spaces.Box(0, 255, (1,), np.uint8), np.array([44.7])),
        (spaces.Box(0, 255, (1,), np.uint8), np.array([300])),
        (spaces.Box(0, 255, (1,), np.uint8), np.array([np.nan])),
        (spaces.Box(-10, 10, (1,), np.int32), np.array([2**40])),
        (spaces.Box(-1, 1, (1,), np.float32), np.array(["1"])),
        (spaces.Box(-1, 1, (1,), np.float32), None),
    ],
)
def test_b47_a_cast_that_would_change_values_is_refused(space, value):
    """Source: openai/baselines#362, second comment."""
    vector = make_vector(EnvironmentConfig(lambda: Constant(space, value)), [0])
    with pytest.raises(EnvironmentFailure, match=r"column 0, env step 0: expected an observation"):
        vector.reset()


@pytest.mark.parametrize("mode", ALIASES)
def test_b50_an_environment_that_reuses_its_observation_buffer(mode):
    """Source: openai/baselines PR#418, thu-ml/tianshou#1281, Farama-Foundation/Gymnasium PR#1680.

    Two columns, so that one that is written to by another would show as well.
    """
    vector = make_vector(EnvironmentConfig(ALIASES[mode]), [3, 3])
    first, ticks = play(vector, 6)
    # Inputs 0, 1, 2, 0, 1 and successors 1, 2, 3, 1, 2 of the valid ticks; all are looked at only
    # now, after everything has been written that will be.
    rows = [first, *(tick.observations for tick in ticks)]
    valid = [tick.valid.all() for tick in ticks]
    assert valid == [True, True, True, False, True, True]
    played = [index for index, is_valid in enumerate(valid) if is_valid]
    for column in range(2):
        assert [rows[index][column, 0] for index in played] == [0, 1, 2, 0, 1]
        assert [rows[index + 1][column, 0] for index in played] == [1, 2, 3, 1, 2]
    vector.close()


def test_b50_writing_to_what_was_returned_changes_nothing():
    """Source: openai/baselines PR#418, google-deepmind/dm_control#34."""
    vector = make_vector(EnvironmentConfig(Alias), [5])
    first = vector.reset()
    first[:] = 99
    tick = vector.step(np.array([0]))
    np.testing.assert_array_equal(tick.observations, [[1]])
    for array in (tick.observations, tick.rewards, tick.terminated, tick.truncated, tick.valid):
        array[:] = True
    tick.episode_lengths[:] = 99
    later = vector.step(np.array([0]))
    np.testing.assert_array_equal(later.observations, [[2]])
    assert later.valid.all()
    assert not later.terminated.any()
    np.testing.assert_array_equal(later.episode_lengths, [0])
    vector.close()


def test_b50_the_single_environment_copies_too():
    """Source: openai/baselines PR#418, google-deepmind/dm_control#34."""
    single = make_single(EnvironmentConfig(Alias))
    rows = [single.reset(seed=5)[0], *(single.step(0)[0] for _ in range(3))]
    assert [row[0] for row in rows] == [0, 1, 2, 3]


def test_b54_an_observation_of_another_shape_names_column_and_step():
    """Source: hill-a/stable-baselines#1062, hill-a/stable-baselines#283."""
    vector = make_vector(EnvironmentConfig(ShapeShift, {"at": 3, "on_seed": 8}), [7, 8])
    vector.reset()
    vector.step(np.zeros(2, np.int64))
    vector.step(np.zeros(2, np.int64))
    with pytest.raises(
        EnvironmentFailure,
        match=r"tests.probes:ShapeShift, column 1, env step 3: "
        r"expected an observation of shape \(4,\), got \(5,\)",
    ):
        vector.step(np.zeros(2, np.int64))


def test_b54_a_ragged_observation_names_column_and_step():
    """Source: hill-a/stable-baselines#283."""
    space = spaces.Box(-1, 1, (2, 2))
    vector = make_vector(EnvironmentConfig(lambda: Constant(space, [[1, 2], [3]])), [0])
    with pytest.raises(EnvironmentFailure, match="column 0, env step 0: the observation is no arr"):
        vector.reset()


@pytest.mark.parametrize("value", [np.array([0.1, 0.2]), [0.1, 0.2], (1, 0), np.array([1, 0])])
def test_b54_another_dtype_is_cast(value):
    """Source: hill-a/stable-baselines#1062."""
    space = spaces.Box(-1, 1, (2,), np.float32)
    vector = make_vector(EnvironmentConfig(lambda: Constant(space, value)), [0])
    observations = vector.reset()
    assert observations.dtype == np.float32
    np.testing.assert_array_equal(observations, [np.asarray(value, np.float32)])
    vector.close()


def test_b54_an_observation_out_of_bounds_is_used_and_warned_of_once():
    """Source: hill-a/stable-baselines#1062."""
    space = spaces.Box(-1, 1, (2,), np.float32)
    value = np.array([0.0, 1.5], np.float32)
    vector = make_vector(EnvironmentConfig(lambda: Constant(space, value)), [0])
    with pytest.warns(UserWarning, match="outside of its space's bounds") as record:
        _, ticks = play(vector, 5)
    assert len(record) == 1
    np.testing.assert_array_equal(ticks[-1].observations, [value])
    vector.close()


@pytest.mark.parametrize(
    "reward", [2, 2.0, np.float32(2), np.int64(2), np.array(2.0), np.array([2.0]), [2], True + 1]
)
def test_rewards_are_taken_in_every_form_that_is_one_number(reward):
    config = EnvironmentConfig(lambda: Constant(spaces.Box(0, 1, (1,)), np.zeros(1), reward))
    vector = make_vector(config, [0, 1])
    _, ticks = play(vector, 1)
    np.testing.assert_array_equal(ticks[0].rewards, np.full(2, 2, np.float32))
    vector.close()


@pytest.mark.parametrize("reward", [None, "2", np.zeros(2), [], np.array([1j])])
def test_rewards_that_are_not_one_number_are_refused(reward):
    config = EnvironmentConfig(lambda: Constant(spaces.Box(0, 1, (1,)), np.zeros(1), reward))
    vector = make_vector(config, [0])
    vector.reset()
    with pytest.raises(EnvironmentFailure, match="env step 1: expected one number as reward"):
        vector.step(np.array([0]))


@pytest.mark.parametrize("reward", [1e300, -1e39, 10**400])
def test_rewards_that_a_float32_does_not_hold_are_refused(reward):
    """They became infinite on the way, and the message spoke of an infinity nobody had seen."""
    config = EnvironmentConfig(lambda: Constant(spaces.Box(0, 1, (1,)), np.zeros(1), reward))
    vector = make_vector(config, [0])
    vector.reset()
    with pytest.raises(EnvironmentFailure, match="env step 1: "):
        vector.step(np.array([0]))


@pytest.mark.parametrize("flag", [np.array([False, True]), None, "no", 0.0])
@pytest.mark.parametrize("name", ["terminated", "truncated"])
def test_ends_that_are_not_true_or_false_are_refused(name, flag):
    """`bool` of them is often true, or an error that names nobody."""

    class Odd(Counter):
        def step(self, action):
            observation, reward, *_ = super().step(action)
            ends = {"terminated": False, "truncated": False, name: flag}
            return observation, reward, *ends.values(), {}

    vector = make_vector(EnvironmentConfig(Odd), [0])
    vector.reset()
    with pytest.raises(EnvironmentFailure, match=f"expected true or false as {name}, got"):
        vector.step(np.array([0]))


def test_a_nan_reaches_whoever_learns():
    vector = make_vector(EnvironmentConfig(NaN, {"at": 2, "where": "observation"}), [0])
    _, ticks = play(vector, 3)
    assert [bool(np.isnan(tick.observations).any()) for tick in ticks] == [False, True, False]
    vector.close()


def transitions(vector, num_ticks, discount=0.9):
    """Valid transitions by column, each with its one-step target under a critic V(obs) = obs."""
    row, ticks = play(vector, num_ticks)
    found = [[] for _ in range(vector.num_envs)]
    for tick in ticks:
        for column in np.flatnonzero(tick.valid):
            future = tick.observations[column, 0] * (not tick.terminated[column])
            found[column].append(
                (
                    row[column, 0],
                    tick.rewards[column],
                    tick.observations[column, 0],
                    tick.terminated[column],
                    tick.truncated[column],
                    tick.rewards[column] + discount * future,
                )
            )
        row = tick.observations
    return found


@pytest.mark.parametrize("mode", MODES)
def test_b57_valid_transitions_are_the_same_in_every_autoreset_mode(mode):
    """Source: Farama-Foundation/Gymnasium#1103, #1265, PR#1227; vwxyzjn/cleanrl#499."""
    vector = make_vector(EnvironmentConfig(MODES[mode]), [3, 5])
    found = transitions(vector, 12)
    vector.close()
    assert [len(column) for column in found] == [9, 10]
    for column, length in zip(found, (3, 5), strict=True):
        for index, (start, reward, following, terminated, truncated, target) in enumerate(column):
            step = index % length
            assert (start, reward, following) == (step, 1, step + 1)
            assert terminated == (step == length - 1)
            assert not truncated
            assert target == pytest.approx(1 + (0 if terminated else 0.9 * (step + 1)))


def test_b57_an_autoreset_of_the_environments_own_is_left_to_it():
    """Source: Farama-Foundation/Gymnasium#1103. A reset from outside may be a costlier one."""
    resets = []

    class Counted(SyncVectorEnv):
        def reset(self, *, seed=None, options=None):
            resets.append(seed)
            return super().reset(seed=seed, options=options)

    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
        config = EnvironmentConfig(lambda mode=mode: Counted([SeedCounter], autoreset_mode=mode))
        vector = make_vector(config, [2])
        resets.clear()
        _, ticks = play(vector, 9)
        assert sum(tick.episode_lengths[0] > 0 for tick in ticks) == 3
        assert resets == [2]
        vector.close()


def test_b57_truncations_keep_their_future_in_every_autoreset_mode():
    """Source: Farama-Foundation/Gymnasium#1103, #1265."""

    class Truncated(SeedCounter):
        def __init__(self):
            super().__init__(end="trunc")

    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
        vector = make_vector(EnvironmentConfig(one_column(mode, Truncated)), [3])
        targets = [transition[-1] for transition in transitions(vector, 8)[0]]
        assert targets == pytest.approx([1.9, 2.8, 3.7, 1.9, 2.8, 3.7])
        vector.close()


def test_b57_disabled_autoreset_is_refused_by_name():
    """Source: Farama-Foundation/Gymnasium#1265."""
    config = EnvironmentConfig(one_column(AutoresetMode.DISABLED))
    with pytest.raises(EnvironmentRefused, match=r"AutoresetMode\.DISABLED; supported are NEXT"):
        make_vector(config, [3])


def test_b57_an_unknown_autoreset_mode_is_refused():
    """Source: sail-sg/envpool#194."""

    def unlabelled():
        vector = SyncVectorEnv([SeedCounter])
        del vector.metadata["autoreset_mode"]
        return vector

    with pytest.raises(EnvironmentRefused, match="autoreset mode None"):
        make_vector(EnvironmentConfig(unlabelled), [3])


def test_a_vector_environment_of_several_columns_is_refused():
    config = EnvironmentConfig(lambda: SyncVectorEnv([SeedCounter, SeedCounter]))
    with pytest.raises(EnvironmentRefused, match="of 2 columns; return one column"):
        make_vector(config, [3])


def test_a_vector_environment_that_gives_no_final_observation_fails():
    class Forgetful(SyncVectorEnv):
        def step(self, actions):
            *rest, infos = super().step(actions)
            infos.pop("final_obs", None)
            return *rest, infos

    config = EnvironmentConfig(
        lambda: Forgetful([SeedCounter], autoreset_mode=AutoresetMode.SAME_STEP)
    )
    vector = make_vector(config, [1])
    vector.reset()
    with pytest.raises(EnvironmentFailure, match="without a final_obs"):
        vector.step(np.array([0]))


def test_gymnasiums_own_vector_cartpole_is_never_taken():
    """`make_vec` silently takes another, NumPy, implementation for this id."""
    config = EnvironmentConfig("CartPole-v1")
    vector = make_vector(config, [4])
    plain = gymnasium.make("CartPole-v1")
    np.testing.assert_array_equal(vector.reset()[0], plain.reset(seed=4)[0])
    for _ in range(5):
        tick = vector.step(np.array([1]))
        np.testing.assert_array_equal(tick.observations[0], plain.step(1)[0])
    vector.close()
    plain.close()


@pytest.mark.parametrize("mode", MODES)
def test_b58_every_record_of_a_three_step_episode_is_three(mode):
    """Source: Farama-Foundation/Gymnasium#1017, PR#1018, PR#1624."""
    vector = make_vector(EnvironmentConfig(MODES[mode]), [3, 3])
    _, ticks = play(vector, 16)
    records = [
        (tick.episode_returns[column], tick.episode_lengths[column])
        for tick in ticks
        for column in np.flatnonzero(tick.episode_lengths)
    ]
    assert records == [(3.0, 3)] * 8
    vector.close()


def test_b59_an_exception_keeps_message_traceback_column_and_step():
    """Source: Farama-Foundation/Gymnasium#177, PR#178; openai/gym#1542."""
    vector = make_vector(EnvironmentConfig(Raise, {"at": 7, "on_seed": 11}), [10, 11, 12])
    vector.reset()
    for _ in range(6):
        vector.step(np.zeros(3, np.int64))
    with pytest.raises(EnvironmentFailure) as caught:
        vector.step(np.zeros(3, np.int64))
    assert str(caught.value) == (
        "environment tests.probes:Raise, column 1, env step 7: ValueError: boom"
    )
    assert isinstance(caught.value.__cause__, ValueError)
    names = [frame.name for frame in caught.traceback] + [
        entry.tb_frame.f_code.co_name for entry in _entries(caught.value.__cause__)
    ]
    assert "observation" in names
    vector.close()


def _entries(error):
    entry = error.__traceback__
    while entry is not None:
        yield entry
        entry = entry.tb_next


def test_b59_an_environment_of_the_old_interface_says_what_is_wrong():
    """Source: openai/gym#1542."""

    class Old(Counter):
        def step(self, action):
            return super().step(action)[:4]

    vector = make_vector(EnvironmentConfig(Old), [0])
    vector.reset()
    with pytest.raises(EnvironmentFailure, match="env step 1: step has to return an obs"):
        vector.step(np.array([0]))


def test_b59_an_exception_in_reset_is_named_too():
    """Source: Farama-Foundation/Gymnasium#177."""
    vector = make_vector(EnvironmentConfig(Scenarios), [3, 10])
    with pytest.raises(EnvironmentFailure, match=r"column 1, env step 0: reset: ValueError: there"):
        vector.reset()


def test_b84_columns_of_one_process_draw_different_numbers():
    """Source: hill-a/stable-baselines#79, #1120; numpy/numpy#9650; pytorch/pytorch#5059."""
    vector = make_vector(EnvironmentConfig(Draws, {"with_torch": True}), seeds_for(1, 0, 4))
    first, ticks = play(vector, 4)
    draws = np.stack([first, *(tick.observations for tick in ticks)])
    assert len(np.unique(draws)) == draws.size
    vector.close()


def test_b84_numbers_of_an_environments_own_generator_come_again_with_the_seed():
    """Source: hill-a/stable-baselines#1120."""
    own = []
    for _ in range(2):
        vector = make_vector(EnvironmentConfig(Draws), seeds_for(1, 0, 4))
        first, ticks = play(vector, 4)
        own.append(np.stack([first, *(tick.observations for tick in ticks)])[..., 1])
        vector.close()
    np.testing.assert_array_equal(own[0], own[1])


def test_b87_a_seed_out_of_an_environments_range_can_be_mapped_by_a_wrapper():
    """Source: DLR-RM/stable-baselines3#1921."""

    class Mapped(gymnasium.Wrapper):
        def reset(self, *, seed=None, options=None):
            return self.env.reset(seed=None if seed is None else seed % 10, options=options)

    vector = make_vector(EnvironmentConfig(lambda: Mapped(Scenarios())), seeds_for(1, 0, 4))
    vector.reset()
    vector.close()


def test_b87_random_actions_of_an_environment_come_again_with_the_seed():
    """Source: DLR-RM/stable-baselines3#2097."""
    observed = []
    for _ in range(2):
        vector = make_vector(EnvironmentConfig(Whims), [5, 6])
        _, ticks = play(vector, 5)
        observed.append(np.stack([tick.observations for tick in ticks]))
        vector.close()
    np.testing.assert_array_equal(observed[0], observed[1])
    assert not np.array_equal(observed[0][:, 0], observed[0][:, 1])


@pytest.mark.slow
def test_minatar_is_bool_hwc_and_plays_the_same_for_a_seed():
    config = EnvironmentConfig("MinAtar/Breakout-v1")
    observed = []
    for seeds in ([1, 2], [1, 2], [3, 4]):
        vector = make_vector(config, seeds)
        assert vector.spec.image_layout == "hwc"
        _, ticks = play(vector, 100)
        observed.append(np.stack([tick.observations for tick in ticks]))
        vector.close()
    assert observed[0].dtype == np.bool_
    assert observed[0].shape == (100, 2, 10, 10, 4)
    np.testing.assert_array_equal(observed[0], observed[1])
    assert not np.array_equal(observed[0], observed[2])
    # Ten by ten with ten channels: the shape alone would not tell.
    vector = make_vector(EnvironmentConfig("MinAtar/Seaquest-v0"), [1])
    assert vector.spec.image_layout == "hwc"
    vector.close()


# Box2D's bindings warn as they are imported, and crash where a warning is an error.
@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")
def test_box2d_is_played():
    vector = make_vector(EnvironmentConfig("LunarLander-v3"), [1, 2])
    first, ticks = play(vector, 20)
    assert first.shape == (2, 8)
    assert all(tick.valid.all() for tick in ticks)
    vector.close()
