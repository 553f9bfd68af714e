"""Atari games: the native adapter against the bare emulator, and every trap of its interface."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from repertory.environments import (
    EnvironmentConfig,
    EnvironmentFailure,
    EnvironmentRefused,
    describe,
    make_single,
    make_vector,
)
from repertory.environments.atari import PROTOCOLS, AtariVector, Game

ale_py = pytest.importorskip("ale_py")
cv2 = pytest.importorskip("cv2")

pytestmark = pytest.mark.atari

BREAKOUT = EnvironmentConfig("BreakoutNoFrameskip-v4")
SMALL_PONG = EnvironmentConfig("ALE/Pong-v5", protocol="a3c42")
SMALL_BREAKOUT = EnvironmentConfig("BreakoutNoFrameskip-v4", protocol="a3c42")


class Emulator:
    """The oracle: one game, frame by frame, on the bare emulator; nothing of the adapter's code.

    How many frames go by before an agent sees the first picture is taken from the adapter, since
    the draw belongs to the native code; everything else is worked out here.
    """

    def __init__(self, rom, seed, sticky, full_action_space, fire_reset, cap=108_000):
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self.ale = ale_py.ALEInterface()
        self.ale.setFloat("repeat_action_probability", sticky)
        self.ale.setInt("random_seed", seed)
        self.ale.loadROM(ale_py.roms.get_rom_path(rom))
        legal, minimal = self.ale.getLegalActionSet(), self.ale.getMinimalActionSet()
        self.actions = legal if full_action_space else minimal
        self.fire_reset = fire_reset and ale_py.Action.FIRE in minimal
        self.cap = cap

    def reset(self, frames_before):
        self.ale.reset_game()
        if self.fire_reset:
            self.ale.act(ale_py.Action.FIRE)
            frames_before -= 1
        for _ in range(frames_before):
            self.ale.act(ale_py.Action.NOOP)
        self.captured = [
            self.ale.getScreenGrayscale(),
            np.zeros_like(self.ale.getScreenGrayscale()),
        ]
        self.stack = [np.zeros((84, 84), np.uint8)] * 3 + [self.picture()]
        self.frames = 0
        return np.stack(self.stack)

    def step(self, action):
        lives, reward = self.ale.lives(), 0
        for frame in range(4):
            reward += self.ale.act(self.actions[action])
            self.frames += 1
            if self.ale.game_over() or self.frames >= self.cap:
                break
            if frame >= 2:
                self.captured[3 - frame] = self.ale.getScreenGrayscale()
        self.stack = [*self.stack[1:], self.picture()]
        over = self.ale.game_over()
        life_lost = not over and self.ale.lives() < lives
        return np.stack(self.stack), reward, over, life_lost

    def picture(self):
        # The pooled picture is also what stays in the buffer if the game ends inside the next skip.
        self.captured[0] = np.maximum(*self.captured)
        return cv2.resize(self.captured[0], (84, 84), interpolation=cv2.INTER_AREA)


def frame_numbers(vector):
    """Frames since each column's game began, as the emulator counts them."""
    return vector._ends._frames


@pytest.mark.parametrize(
    ("env_id", "protocol", "rom", "sticky", "full", "fire", "num_steps"),
    [
        ("BreakoutNoFrameskip-v4", None, "breakout", 0.0, False, True, 500),
        ("FreewayNoFrameskip-v4", None, "freeway", 0.0, False, True, 60),
        ("ALE/Breakout-v5", None, "breakout", 0.25, False, False, 400),
        ("ALE/Pong-v5", "machado", "pong", 0.25, True, False, 200),
        ("ALE/MsPacman-v5", "dqn", "ms_pacman", 0.0, False, True, 200),
    ],
)
def test_a_column_equals_the_bare_emulator_frame_by_frame(
    env_id, protocol, rom, sticky, full, fire, num_steps
):
    """Pixels, rewards, lives, ends: skip, pooling, stack, FIRE, no-ops and sticky actions.

    B62 (google/dopamine#177, openai/gym PR#1790, sail-sg/envpool PR#370): the picture is the
    maximum of the last two of exactly four frames, with no frame older than that. B63
    (Farama-Foundation/Arcade-Learning-Environment#443, #435, Farama-Foundation/Gymnasium#702): four
    frames and no more a step, and the stickiness that the protocol says.
    """
    seed = 5
    vector = make_vector(EnvironmentConfig(env_id, protocol=protocol), [seed])
    emulator = Emulator(rom, seed, sticky, full, fire)
    assert vector.spec.action_space.n == len(emulator.actions)
    observations = vector.reset()
    expected = emulator.reset(frame_numbers(vector)[0])
    np.testing.assert_array_equal(observations[0], expected)
    signals_lives = PROTOCOLS[vector.spec.protocol].signals_lives
    generator = np.random.default_rng(seed)
    over = False
    num_games = 0
    for _ in range(num_steps):
        action = generator.integers(0, vector.spec.action_space.n)
        tick = vector.step(np.array([action]))
        assert tick.valid[0] == (not over)
        if over:
            expected, reward, over, life_lost = emulator.reset(frame_numbers(vector)[0]), 0, 0, 0
        else:
            expected, reward, over, life_lost = emulator.step(action)
        np.testing.assert_array_equal(tick.observations[0], expected)
        assert tick.rewards[0] == reward
        assert tick.terminated[0] == (over or (life_lost and signals_lives))
        assert not tick.truncated[0]
        assert (tick.episode_lengths[0] > 0) == over
        num_games += over
    assert num_games >= (1 if rom == "breakout" else 0)
    vector.close()


class SmallPictureEmulator(Emulator):
    """The same oracle under `a3c42`: the last frame of a step, made small, and its moments."""

    def __init__(self, rom, seed):
        super().__init__(rom, seed, sticky=0.0, full_action_space=False, fire_reset=False)
        self.mean = self.deviation = 0.0
        self.num_seen = 0

    def reset(self):
        self.ale.reset_game()
        self.captured = self.ale.getScreenGrayscale()
        return self.observation()

    def step(self, action):
        reward = 0
        for frame in range(4):
            reward += self.ale.act(self.actions[action])
            if self.ale.game_over():
                break
            if frame == 3:
                self.captured = self.ale.getScreenGrayscale()
        return self.observation(), reward, self.ale.game_over()

    def observation(self):
        court = cv2.resize(self.captured[34:194, :160], (80, 80)).astype(np.float32)
        picture = cv2.resize(court, (42, 42)).astype(np.float64) / 255
        self.num_seen += 1
        self.mean = self.mean * 0.9999 + picture.mean() * 0.0001
        self.deviation = self.deviation * 0.9999 + picture.std() * 0.0001
        share = 1 - 0.9999**self.num_seen
        return ((picture - self.mean / share) / (self.deviation / share + 1e-8))[None]


@pytest.mark.parametrize(
    ("config", "rom", "num_steps"),
    [(SMALL_PONG, "pong", 250), (SMALL_BREAKOUT, "breakout", 600)],
)
def test_a_small_picture_is_the_last_frame_and_its_moments_outlive_games(config, rom, num_steps):
    vector = make_vector(config, [5])
    emulator = SmallPictureEmulator(rom, 5)
    assert vector.spec.action_space.n == len(emulator.actions)
    observation, expected, over = vector.reset()[0], emulator.reset(), False
    generator = np.random.default_rng(5)
    num_games = 0
    for _ in range(num_steps):
        np.testing.assert_allclose(observation, expected, rtol=1e-3, atol=1e-3)
        action = generator.integers(0, vector.spec.action_space.n)
        tick = vector.step(np.array([action]))
        observation = tick.observations[0]
        assert tick.valid[0] == (not over)
        expected, reward, over = (emulator.reset(), 0, False) if over else emulator.step(action)
        assert tick.rewards[0] == reward
        assert tick.terminated[0] == over  # lives are no ends
        assert (tick.episode_lengths[0] > 0) == over
        num_games += over
    assert num_games >= (2 if rom == "breakout" else 0)
    vector.close()


def test_ball_and_paddles_of_pong_are_in_the_small_picture():
    """Where a thing is on the screen, the picture is brighter or darker than the empty court.

    The ball is as narrow as what the second resize can step over, so that it fades in places.
    """
    single = make_single(SMALL_PONG, render_mode="rgb_array")
    observation, _ = single.reset(seed=1)
    generator = np.random.default_rng(0)
    contrasts = {"ours": [], "theirs": [], "ball": []}
    courts = []
    for index in range(800):
        observation, *_ = single.step(generator.integers(0, 6))
        if index < 100:
            continue  # the game shows itself off in other colours first
        court, picture = single.render()[34:194].astype(int), observation[0]
        empty = np.median(picture)
        courts.append(picture)
        for name, colour, left, right in (
            ("ours", (92, 186, 92), 0, 160),
            ("theirs", (213, 130, 74), 0, 160),
            ("ball", (236, 236, 236), 24, 136),
        ):
            found = (court[:, left:right] == colour).all(-1)
            if found.sum() >= 8:
                row, column = (axis.mean() for axis in np.nonzero(found))
                row, column = (row + 0.5) * 42 / 160, (column + left + 0.5) * 42 / 160
                near = picture[
                    max(0, round(row) - 2) : round(row) + 2,
                    max(0, round(column) - 2) : round(column) + 2,
                ]
                contrasts[name].append((near - empty).max())
    assert min(len(found) for found in contrasts.values()) > 200
    assert min(contrasts["ours"]) > 1
    assert min(contrasts["theirs"]) > 1
    assert np.mean(np.array(contrasts["ball"]) > 1) > 0.9
    # Something moves in the paddles' lanes and between them, and nothing at the very left.
    moving = np.std(courts, 0).max(0)
    assert min(moving[4], moving[37], moving[10:32].max()) > 1
    assert moving[0] < 0.5
    single.close()


def test_a_small_picture_has_a_spec_of_its_own():
    for config, num_actions in ((SMALL_PONG, 6), (SMALL_BREAKOUT, 4)):
        spec = describe(config)
        space = spec.observation_space
        assert (space.shape, space.dtype) == ((1, 42, 42), np.float32)
        assert np.isneginf(space.low).all()
        assert np.isposinf(space.high).all()
        assert (spec.protocol, spec.action_space.n) == ("a3c42", num_actions)
        assert (spec.action_repeat, spec.frame_stack, spec.image_layout) == (4, 1, "chw")
        assert spec.max_episode_steps == 27_000
        single, vector = make_single(config), make_vector(config, [1, 2])
        assert single.observation_space == vector.spec.observation_space == space
        assert single.reset(seed=1)[0] in space
        first = vector.reset()
        assert first.shape == (2, 1, 42, 42)
        assert first.dtype == np.float32
        assert first[1] in space
        single.close()
        vector.close()


def test_a_taller_screen_gives_a_small_picture_of_the_same_size():
    vector = make_vector(EnvironmentConfig("ALE/AirRaid-v5", protocol="a3c42"), [1])
    assert vector.reset().shape == (1, 1, 42, 42)
    vector.close()


def test_moments_of_the_small_picture_begin_afresh_with_the_seed():
    vector, single = make_vector(SMALL_PONG, [7, 8]), make_single(SMALL_PONG)
    runs = []
    for _ in range(2):
        rows = [vector.reset()]
        rows += [vector.step(np.array([2, 3])).observations for _ in range(80)]
        runs.append(np.stack(rows))
    np.testing.assert_array_equal(runs[0], runs[1])
    first = single.reset(seed=7)[0]
    for _ in range(80):
        last = single.step(2)[0]
    np.testing.assert_array_equal(last, runs[0][-1, 0])
    assert not np.array_equal(single.reset()[0], first)  # it goes on where it was
    np.testing.assert_array_equal(single.reset(seed=7)[0], first)
    single.close()
    vector.close()


@pytest.mark.parametrize(
    ("env_id", "protocol", "name", "num_actions"),
    [
        ("ALE/Breakout-v5", None, "v5", 4),
        ("BreakoutNoFrameskip-v4", None, "dqn", 4),
        ("BreakoutNoframeskip-v4", None, "dqn", 4),
        ("ALE/Breakout-v5", "machado", "machado", 18),
        ("BreakoutNoFrameskip-v4", "v5", "v5", 4),
        ("ALE/MsPacman-v5", "dqn", "dqn", 9),
    ],
)
def test_an_id_stands_for_a_protocol_and_a_name_overrides_it(env_id, protocol, name, num_actions):
    spec = describe(EnvironmentConfig(env_id, protocol=protocol))
    assert spec.name == env_id
    assert spec.protocol == name
    assert spec.action_space.n == num_actions
    assert spec.observation_space.shape == (4, 84, 84)
    assert spec.observation_space.dtype == np.uint8
    assert (spec.action_repeat, spec.frame_stack, spec.image_layout) == (4, 4, "chw")


def test_a_misspelt_protocol_is_answered_with_the_closest():
    with pytest.raises(EnvironmentRefused, match="a3c42"):
        describe(EnvironmentConfig("ALE/Pong-v5", protocol="a3c"))


@pytest.mark.parametrize("settings", [{"protocol": "dqm"}, {"protocol": "atari"}])
def test_an_unknown_protocol_is_answered_with_those_there_are(settings):
    with pytest.raises(EnvironmentRefused, match="dqn"):
        describe(EnvironmentConfig("ALE/Pong-v5", **settings))


@pytest.mark.parametrize(
    "env_id",
    [
        "Pong-v0",
        "Pong-v4",
        "PongDeterministic-v4",
        "PongDeterministic-v0",
        "PongNoFrameskip-v0",
        "Pong-ram-v4",
        "Pong-ramNoFrameskip-v4",
    ],
)
def test_b63_old_ids_are_refused_with_what_to_say_instead(env_id):
    """Source: Farama-Foundation/Arcade-Learning-Environment#443.

    `Pong-v4` skips 2 to 4 frames at random, `PongDeterministic-v4` was 4 frames without pooling.
    """
    with pytest.raises(EnvironmentRefused) as refusal:
        describe(EnvironmentConfig(env_id))
    assert str(refusal.value) == (
        f"{env_id} is an old id with rules of its own; say PongNoFrameskip-v4 (protocol dqn) or "
        "ALE/Pong-v5 (protocol v5)"
    )


@pytest.mark.parametrize("key", ["frameskip", "repeat_action_probability", "mode", "noop_max"])
def test_b63_a_second_skip_or_any_other_loose_flag_is_refused(key):
    """Source: Farama-Foundation/Gymnasium#702, Farama-Foundation/Arcade-Learning-Environment#435"""
    with pytest.raises(EnvironmentRefused, match=f"no argument '{key}': .* --protocol dqn or mach"):
        describe(EnvironmentConfig("ALE/Pong-v5", {key: 1}))


def test_a_layout_that_games_do_not_have_is_refused():
    with pytest.raises(EnvironmentRefused, match="ALE/Pong-v5 has chw images"):
        describe(EnvironmentConfig("ALE/Pong-v5", image_layout="hwc"))
    assert describe(EnvironmentConfig("ALE/Pong-v5", image_layout="chw")).image_layout == "chw"


def test_games_for_several_players_are_unknown():
    with pytest.raises(EnvironmentRefused, match="no environment is called 'ALE/Warlords-v5'"):
        describe(EnvironmentConfig("ALE/Warlords-v5"))


def whole_games(vector, num_games, seed=0):
    """Tick after tick of random play until column 0 has ended `num_games` games."""
    generator = np.random.default_rng(seed)
    vector.reset()
    ticks, lives, frames = [], [vector._ends._lives[0]], [frame_numbers(vector)[0]]
    while num_games:
        tick = vector.step(generator.integers(0, vector.spec.action_space.n, vector.num_envs))
        ticks.append(tick)
        lives.append(vector._ends._lives[0])
        frames.append(frame_numbers(vector)[0])
        num_games -= tick.episode_lengths[0] > 0
        assert len(ticks) < 5000
    return ticks, lives, frames


def test_a_lost_life_terminates_but_the_game_and_its_next_tick_go_on():
    """Of the native flags, `episodic_life` begins a new game instead: no agent sees a second life.

    And a mask for "the tick after an end" would throw a real transition away after each life.
    """
    vector = make_vector(BREAKOUT, [3])
    ticks, lives, frames = whole_games(vector, 2)
    losses = [
        index
        for index, tick in enumerate(ticks)
        if tick.terminated[0] and not tick.episode_lengths[0]
    ]
    ends = [index for index, tick in enumerate(ticks) if tick.episode_lengths[0]]
    # Five lives: four are lost on the way, the fifth ends the game; twice.
    assert len(losses) == 8
    assert [lives[index + 1] for index in losses] == [4, 3, 2, 1] * 2
    for index in losses:
        assert ticks[index + 1].valid[0]
        assert frames[index + 2] == frames[index + 1] + 4  # the same game goes on
    first_end = ends[0]
    assert ticks[first_end].terminated[0]
    assert lives[first_end + 1] == 0
    assert not ticks[first_end + 1].valid[0]
    assert ticks[first_end + 1].rewards[0] == 0
    assert lives[first_end + 2] == 5
    invalid = [index for index, tick in enumerate(ticks) if not tick.valid[0]]
    assert invalid == [first_end + 1]
    vector.close()


def test_a_protocol_without_lives_shows_ends_of_games_only():
    vector = make_vector(EnvironmentConfig("ALE/Breakout-v5"), [3])
    ticks, lives, _ = whole_games(vector, 1)
    assert [tick.terminated[0] for tick in ticks] == [False] * (len(ticks) - 1) + [True]
    assert set(lives) == {5, 4, 3, 2, 1, 0}
    vector.close()


def test_b65_lengths_are_env_steps_and_frames_are_four_times_as_many():
    """Source: DLR-RM/rl-baselines3-zoo#367, ray-project/ray#4328, openai/baselines#397.

    The emulator's own counter differs by the no-ops at the start, and by a game's end in a skip.
    """
    vector = make_vector(BREAKOUT, [3])
    ticks, _, frames = whole_games(vector, 1)
    length = ticks[-1].episode_lengths[0]
    assert length == len(ticks) == sum(tick.valid[0] for tick in ticks)
    assert 0 <= length * vector.spec.action_repeat - (frames[-1] - frames[0]) < 4
    vector.close()


def test_b66_a_return_is_that_of_the_whole_game_with_raw_rewards():
    """Source: DLR-RM/stable-baselines3#146, #2159; sail-sg/envpool#299."""
    vector = make_vector(EnvironmentConfig("MsPacmanNoFrameskip-v4"), [3])
    ticks, _, _ = whole_games(vector, 1)
    rewards = [tick.rewards[0] for tick in ticks]
    assert max(rewards) >= 10  # a pellet; 1 if the emulator had clipped it
    assert ticks[-1].episode_returns[0] == sum(rewards)
    assert sum(tick.terminated[0] for tick in ticks) == 3  # three lives, one record
    assert sum(tick.episode_lengths[0] > 0 for tick in ticks) == 1
    vector.close()


class Script:
    """Stands in for the emulator where the case needs a course that no game can be made to take.

    Each row is what one tick says: reward, terminated, truncated, lives, frames since the game
    began. The first row is the reset.
    """

    def __init__(self, rows):
        self.rows = iter(rows)

    def reset(self, seed):
        _, _, _, lives, frame = next(self.rows)
        return np.zeros((1, 4, 84, 84), np.uint8), self.info(lives, frame)

    def step(self, actions):
        reward, terminated, truncated, lives, frame = next(self.rows)
        return (
            np.full((1, 4, 84, 84), frame % 256, np.uint8),
            np.array([reward], np.int32),
            np.array([terminated]),
            np.array([truncated]),
            self.info(lives, frame),
        )

    def info(self, lives, frame):
        return {
            "lives": np.array([lives], np.int32),
            "episode_frame_number": np.array([frame], np.int32),
        }


def scripted(rows):
    vector = AtariVector(BREAKOUT, [0])
    vector._native = Script(rows)
    vector.reset()
    return [vector.step(np.array([0])) for _ in rows[1:]]


def test_b66_a_game_of_three_lives_is_one_record_and_a_cut_game_leaks_nothing():
    """Source: DLR-RM/stable-baselines3#146, #2159, #894/#181 (PR#220); sail-sg/envpool#299."""
    ticks = scripted(
        [
            (0, False, False, 3, 10),
            (5, True, False, 2, 14),
            (0, True, False, 1, 18),
            (7, True, False, 0, 22),  # the game is over: 12
            (0, False, False, 3, 8),
            (4, False, False, 3, 12),
            (6, False, True, 3, 16),  # cut by time, with lives left: 10
            (0, False, False, 3, 5),
            (1, True, False, 2, 9),
            (0, True, False, 0, 13),  # over: 1, and nothing of the game before
        ]
    )
    assert [tick.terminated[0] for tick in ticks] == [1, 1, 1, 0, 0, 0, 0, 1, 1]
    assert [tick.truncated[0] for tick in ticks] == [0, 0, 0, 0, 0, 1, 0, 0, 0]
    assert [tick.valid[0] for tick in ticks] == [1, 1, 1, 0, 1, 1, 0, 1, 1]
    assert [tick.rewards[0] for tick in ticks] == [5, 0, 7, 0, 4, 6, 0, 1, 0]
    assert [tick.episode_returns[0] for tick in ticks] == [0, 0, 12, 0, 0, 10, 0, 0, 1]
    assert [tick.episode_lengths[0] for tick in ticks] == [0, 0, 3, 0, 0, 2, 0, 0, 2]


def test_b67_a_game_that_ends_right_after_a_lost_life():
    """Source: DLR-RM/stable-baselines3#1060 (PR#1297), openai/baselines#688.

    No hidden no-op is played here after a lost life; the agent's own action may still end the game.
    """
    ticks = scripted(
        [
            (0, False, False, 2, 10),
            (1, True, False, 1, 14),
            (0, True, False, 0, 15),
            (0, False, False, 2, 3),
            (1, False, False, 2, 7),
        ]
    )
    assert [tick.valid[0] for tick in ticks] == [1, 1, 0, 1]
    assert [tick.episode_lengths[0] for tick in ticks] == [0, 2, 0, 0]
    assert ticks[2].observations[0, 0, 0, 0] == 3


def test_b67_a_reset_in_the_middle_of_a_game_begins_a_new_one():
    """Source: DLR-RM/stable-baselines3#1060, toybox-rs/Toybox#140."""
    single = make_single(BREAKOUT)
    _, info = single.reset(seed=2)
    assert info["lives"] == 5
    while info["lives"] > 3:
        *_, terminated, _, info = single.step(1)
        assert not terminated
    _, info = single.reset()
    assert info["lives"] == 5
    assert info["episode_frame_number"] < 30
    single.close()

    vector = make_vector(BREAKOUT, [2])
    first = vector.reset()
    while vector._ends._lives[0] > 3:
        vector.step(np.array([1]))
    np.testing.assert_array_equal(vector.reset(), first)
    assert vector._ends._lives[0] == 5
    # Nothing of the game that was left stays in the statistics.
    while not (tick := vector.step(np.array([1]))).episode_lengths[0]:
        pass
    assert tick.episode_lengths[0] * 4 >= frame_numbers(vector)[0] - 30
    assert tick.episode_lengths[0] * 4 <= frame_numbers(vector)[0] + 4
    vector.close()


def test_a_time_limit_truncates_after_so_many_env_steps():
    vector = make_vector(replace(BREAKOUT, max_episode_steps=7), [1, 2])
    vector.reset()
    ticks = [vector.step(np.zeros(2, np.int64)) for _ in range(16)]
    np.testing.assert_array_equal(
        [tick.truncated[0] for tick in ticks], [0] * 6 + [1] + [0] * 7 + [1, 0]
    )
    assert not any(tick.terminated.any() for tick in ticks)
    np.testing.assert_array_equal(ticks[6].episode_lengths, [7, 7])
    np.testing.assert_array_equal(ticks[7].valid, [False, False])
    vector.close()


def test_a_life_lost_on_the_last_frame_allowed_still_ends_the_game():
    """The emulator then reports the life only, and begins a new game all the same."""
    vector = make_vector(BREAKOUT, [3])
    ticks, _, _ = whole_games(vector, 1)
    vector.close()
    first_loss = next(index for index, tick in enumerate(ticks) if tick.terminated[0])
    vector = make_vector(replace(BREAKOUT, max_episode_steps=first_loss + 1), [3])
    ticks, _, _ = whole_games(vector, 1)
    assert len(ticks) == first_loss + 1
    assert ticks[-1].terminated[0]
    assert not ticks[-1].truncated[0]
    assert not vector.step(np.array([0])).valid[0]
    assert vector.step(np.array([0])).valid[0]
    vector.close()


def test_an_end_that_goes_unnoticed_is_a_failure():
    with pytest.raises(EnvironmentFailure, match="column 0: the emulator began a new game"):
        scripted([(0, False, False, 3, 40), (0, False, False, 3, 44), (0, False, False, 3, 9)])


def test_an_illegal_action_is_refused_before_it_can_block_for_ever():
    """The emulator's threads would drop it, and the answer would never come."""
    vector = make_vector(BREAKOUT, [0, 1])
    vector.reset()
    for action in (-1, 4, 18):
        with pytest.raises(ValueError, match=f"action {action} of column 1"):
            vector.step(np.array([0, action]))
    assert vector.step(np.array([0, 3])).valid.all()
    for actions in (np.zeros(2, np.uint8), np.zeros(2, np.int32), [0, 1]):
        assert vector.step(actions).valid.all()
    vector.close()


def test_an_interrupted_call_is_not_followed_by_a_second_question():
    """The emulator takes a second `send` without a word, and all after it would be a tick late."""
    vector = make_vector(BREAKOUT, [0])
    vector.reset()
    native = vector._native

    class Interrupted:
        def step(self, actions):
            native.send(actions)
            raise KeyboardInterrupt

    vector._native = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        vector.step(np.array([0]))
    vector._native = native
    with pytest.raises(EnvironmentFailure, match="an earlier call was interrupted"):
        vector.step(np.array([0]))
    with pytest.raises(EnvironmentFailure, match="an earlier call was interrupted"):
        vector.reset()
    vector.close()


def test_every_column_answers_every_tick_in_order_and_nothing_is_made_up():
    """`batch_size` below the number of columns would answer in an order that timing decides.

    `final_obs` holds memory that nobody wrote, where a life is lost in SAME_STEP mode.
    """
    native = Game.of(BREAKOUT).build(num_envs=3, num_threads=2)
    assert native.batch_size == native.num_envs == 3
    assert native.autoreset_mode.name == "NEXT_STEP"
    native.reset(seed=np.arange(3, dtype=np.int32))
    for _ in range(50):
        *_, info = native.step(np.ones(3, np.int64))
        np.testing.assert_array_equal(info["env_id"], [0, 1, 2])
        assert "final_obs" not in info


def test_what_was_returned_is_never_written_again():
    vector = make_vector(BREAKOUT, [1])
    first = vector.reset()
    tick = vector.step(np.array([1]))
    copies = first.copy(), tick.observations.copy()
    for _ in range(30):
        later = vector.step(np.array([2]))
    np.testing.assert_array_equal(first, copies[0])
    np.testing.assert_array_equal(tick.observations, copies[1])
    assert not np.array_equal(later.observations, tick.observations)
    vector.close()
    np.testing.assert_array_equal(tick.observations, copies[1])


def test_seeds_are_taken_in_every_form():
    """The binding refuses lists and NumPy's integers."""
    firsts = []
    for seeds in ([3], (3,), [np.int64(3)], np.array([3]), range(3, 4)):
        vector = make_vector(BREAKOUT, seeds)
        firsts.append(vector.reset())
        vector.close()
    for first in firsts[1:]:
        np.testing.assert_array_equal(first, firsts[0])


def test_the_largest_seed_is_taken():
    vector = make_vector(BREAKOUT, [2**31 - 1])
    vector.reset()
    vector.close()


def test_reset_plays_the_same_games_again():
    vector = make_vector(EnvironmentConfig("ALE/Breakout-v5"), [7])
    runs = []
    for _ in range(2):
        rows = [vector.reset()]
        rows += [vector.step(np.array([1 + index % 3])).observations for index in range(60)]
        runs.append(np.stack(rows))
    np.testing.assert_array_equal(runs[0], runs[1])
    vector.close()


def test_the_number_of_threads_changes_no_bit():
    config = EnvironmentConfig("ALE/Breakout-v5")
    seeds = [5, 6, 7, 8]
    one = make_vector(config, seeds, num_threads=1)
    two = make_vector(config, seeds, num_threads=2)
    np.testing.assert_array_equal(one.reset(), two.reset())
    generator = np.random.default_rng(0)
    for _ in range(150):
        actions = generator.integers(0, 4, 4)
        first, second = one.step(actions), two.step(actions)
        for name, value in vars(first).items():
            np.testing.assert_array_equal(getattr(second, name), value, err_msg=name)
    # Sticky actions are drawn for each column apart: no two games are alike.
    games = [first.observations[column].tobytes() for column in range(4)]
    assert len(set(games)) == 4
    one.close()
    two.close()


def test_no_ops_are_drawn_from_0_to_29():
    """Others draw 1 to 30. In Freeway there is no FIRE to be pressed first."""
    single = make_single(EnvironmentConfig("FreewayNoFrameskip-v4"))
    drawn = {single.reset(seed=seed)[1]["episode_frame_number"] for seed in range(8)}
    assert min(drawn) >= 0
    assert max(drawn) <= 29
    assert len(drawn) > 4
    single.close()


@pytest.mark.parametrize(
    ("config", "seed"),
    [
        *((BREAKOUT, 3), (BREAKOUT, 11), (EnvironmentConfig("ALE/Breakout-v5"), 4)),
        *((SMALL_BREAKOUT, 3), (replace(SMALL_PONG, max_episode_steps=300), 3)),
    ],
)
def test_the_single_game_equals_a_column(config, seed):
    """Over several lives, the end of a game and the beginning of the next."""
    vector = make_vector(config, [seed])
    single = make_single(config)
    np.testing.assert_array_equal(single.reset(seed=seed)[0], vector.reset()[0])
    signals_lives = config is BREAKOUT
    generator = np.random.default_rng(seed)
    num_games = num_lives = 0
    while num_games < 2:
        action = generator.integers(0, 4)
        tick = vector.step(np.array([action]))
        ended = tick.episode_lengths[0] > 0
        if not tick.valid[0]:
            observation, _ = single.reset()
            reward, terminated, truncated, life_lost = 0.0, False, False, False
        else:
            observation, reward, terminated, truncated, info = single.step(action)
            life_lost = info["life_lost"]
        np.testing.assert_array_equal(observation, tick.observations[0])
        assert reward == tick.rewards[0]
        assert terminated == (ended and tick.terminated[0])
        assert truncated == tick.truncated[0]
        assert life_lost == (tick.terminated[0] and not ended)
        num_games += ended
        num_lives += life_lost
    assert num_lives == (8 if signals_lives else 0)
    vector.close()
    single.close()


@pytest.mark.parametrize("config", [BREAKOUT, EnvironmentConfig("ALE/Breakout-v5")])
def test_the_picture_shows_the_game_that_is_played(config):
    """A second emulator draws it; the two agree, sticky actions and all, past the game's end."""
    single = make_single(config, render_mode="rgb_array")
    assert single.metadata["render_fps"] == 15
    observation, _ = single.reset()  # without a seed, both still begin alike
    generator = np.random.default_rng(1)
    over = False
    num_games = 0
    for _ in range(400):
        assert_pictured(single, observation)
        if over:
            observation, _ = single.reset()
            over = False
        else:
            observation, _, over, *_ = single.step(generator.integers(0, 4))
            num_games += over
    assert num_games >= 1
    single.close()


def assert_pictured(single, observation):
    picture = single.render()
    assert picture.shape == (210, 160, 3)
    red, green, blue = (picture[..., channel].astype(np.float64) for channel in range(3))
    grey = 0.2989 * red + 0.587 * green + 0.114 * blue  # luma, as the emulator's palette has it
    small = cv2.resize(grey, (84, 84), interpolation=cv2.INTER_AREA)
    # Maximum of channels and maximum of grey differ where two sprites overlap.
    assert np.mean(np.abs(small - observation[-1]) > 2) < 0.02


def test_other_render_modes_are_refused():
    with pytest.raises(EnvironmentRefused, match="no render mode of Atari games is called 'human'"):
        make_single(BREAKOUT, render_mode="human")


def test_a_single_game_that_is_over_has_to_be_reset():
    single = make_single(replace(BREAKOUT, max_episode_steps=2))
    single.reset(seed=1)
    single.step(0)
    *_, truncated, _ = single.step(0)
    assert truncated
    with pytest.raises(EnvironmentFailure, match="reset it first"):
        single.step(0)
    single.reset()
    with pytest.raises(ValueError, match="action 4 of column 0"):
        single.step(4)
    single.close()
    single.close()


def test_b61_a_partial_reset_does_not_hang():
    """Source: Farama-Foundation/Arcade-Learning-Environment#673 (PR#716).

    The adapter never asks for one; the guard is a process, as a thread could not be interrupted.
    """
    program = (
        "import numpy as np\n"
        "from ale_py.vector_env import AtariVectorEnv\n"
        "env = AtariVectorEnv('breakout', 2, num_threads=1)\n"
        "env.reset(seed=np.arange(2))\n"
        "try: env.reset(options={'reset_mask': np.array([True, False])})\n"
        "except (ValueError, RuntimeError): pass\n"
        "print('back')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert result.stdout == "back\n", result.stderr
