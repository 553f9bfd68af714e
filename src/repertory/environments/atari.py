"""Atari games through the emulator's own vector environment, under named protocols.

What is here: the protocols, the ids that stand for them, the adapter `AtariVector`, and the same
game as a single environment that can be watched. What is not here: any preprocessing; skipping,
pooling, resizing and stacking happen in one place, the emulator's native code. The one exception is
the picture of `a3c42`, whose second half is in `pictures`.

This is the only module that imports `ale_py`, and it does so when a game is asked for.

What differs from other stacks, and is left as the native code has it: the number of no-ops is drawn
from 0..29 (others draw 1..30), FIRE is pressed once before them and counts as one of them, it is
not pressed again after a lost life, the stack is filled with zeros at a reset, and the picture of
the env step that ends a game shows the last frame that was captured before the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from repertory.environments.base import (
    EnvironmentConfig,
    EnvironmentFailure,
    EnvironmentRefused,
    EnvironmentSpec,
    EpisodeStatistics,
    Tick,
)
from repertory.environments.names import not_installed, unknown
from repertory.environments.pictures import SHAPE, SmallPictures
from repertory.environments.spaces import legal_actions

ACTION_REPEAT = 4
"""Frames an env step takes, in every protocol."""

FRAME_STACK = 4
"""Frames in an observation, in every protocol but `a3c42`."""

_FRAMES_PER_SECOND = 60

_MULTI_PLAYER = frozenset({"combat", "joust", "maze_craze", "warlords"})
"""ROMs that nobody can play alone."""

_V5 = re.compile(r"ALE/(?P<game>\w+)-v5")
_NO_FRAMESKIP = re.compile(r"(?P<game>\w+)No[Ff]rame[Ss]kip-v4")
_LEGACY = re.compile(r"(?P<game>\w+?)(-ram)?(NoFrameskip|Noframeskip|Deterministic)?-v[0-4]")


@dataclass(frozen=True)
class Protocol:
    """The rules a game is played under; scores of different protocols do not compare.

    Attributes:
        name: What users call it.
        repeat_action_probability: Chance, each frame, that the emulator repeats the action of the
            frame before instead (sticky actions).
        full_action_space: All 18 joystick actions, or only those that do something in the game.
        signals_lives: A lost life is `terminated`, though the game goes on.
        fire_reset: FIRE is pressed once as a game begins, where the game knows it.
        max_noops: A game begins with a random number of no-ops below this; 0 for none.
        max_frames: A game is truncated after so many frames.
        small_picture: An observation is the last frame alone, 42 by 42, normalised (see
            `pictures`). Otherwise it is four of 84 by 84 bytes, each the maximum of the last two
            frames of its env step.
    """

    name: str
    repeat_action_probability: float
    full_action_space: bool
    signals_lives: bool
    fire_reset: bool
    max_noops: int
    max_frames: int
    small_picture: bool = False


DQN = Protocol(
    name="dqn",
    repeat_action_probability=0.0,
    full_action_space=False,
    signals_lives=True,
    fire_reset=True,
    max_noops=30,
    max_frames=108_000,
)
"""The rules of the DQN, A3C and IMPALA years: deterministic but for the random no-ops at the
beginning (Mnih et al. 2015, extended data table 1), a lost life is signalled as an end. 30 minutes
a game are the usual cap of that time; the first of these papers played 5."""

MACHADO = Protocol(
    name="machado",
    repeat_action_probability=0.25,
    full_action_space=True,
    signals_lives=False,
    fire_reset=False,
    max_noops=0,
    max_frames=18_000,
)
"""Sticky actions, all 18 actions, no knowledge of lives, 5 minutes a game: what Machado et al.
2018, "Revisiting the Arcade Learning Environment", recommend."""

V5 = Protocol(
    name="v5",
    repeat_action_probability=0.25,
    full_action_space=False,
    signals_lives=False,
    fire_reset=False,
    max_noops=0,
    max_frames=108_000,
)
"""What the emulator's own `ALE/*-v5` ids stand for: sticky actions, the game's own actions, 30
minutes a game."""

A3C42 = Protocol(
    name="a3c42",
    repeat_action_probability=0.0,
    full_action_space=False,
    signals_lives=False,
    fire_reset=False,
    max_noops=0,
    max_frames=108_000,
    small_picture=True,
)
"""What the widely used PyTorch A3C program (ikostrikov/pytorch-a3c, 2017) made of
`PongDeterministic-v4`: deterministic, every game begins alike, no knowledge of lives, and a small
normalised picture of one frame, so that a recurrent core has to tell where things move. Its own
games end after a million env steps; 30 minutes are the cap here."""

PROTOCOLS = {protocol.name: protocol for protocol in (DQN, MACHADO, V5, A3C42)}
"""Every protocol by name."""


def is_game(env_id: Any) -> bool:
    """Whether an id is one that only this module may answer for, old and wrong ones included."""
    if not isinstance(env_id, str):
        return False
    if env_id.lower().startswith("ale/") or _NO_FRAMESKIP.fullmatch(env_id):
        return True
    legacy = _LEGACY.fullmatch(env_id)
    if legacy is None:
        return False
    if env_id in gymnasium.registry:
        return str(gymnasium.registry[env_id].entry_point).startswith("ale_py")
    try:
        return legacy["game"] in _roms_by_game()
    except ImportError:
        return False


def known_ids() -> list[str]:
    """Every id that can be played; empty without the emulator."""
    try:
        games = _roms_by_game()
    except ImportError:
        return []
    return [f"ALE/{game}-v5" for game in games] + [f"{game}NoFrameskip-v4" for game in games]


def describe(config: EnvironmentConfig) -> EnvironmentSpec:
    """Look a game up; builds one of it to see its actions.

    Raises:
        EnvironmentRefused: Unknown game or protocol, an old id, a setting that games do not have,
            or the emulator is not installed.
    """
    return Game.of(config).describe()


def make_vector(
    config: EnvironmentConfig, seeds: Sequence[int], num_threads: int = 1
) -> AtariVector:
    """Columns of one game, a seed each.

    Raises:
        EnvironmentRefused: As `describe`.
    """
    return AtariVector(config, seeds, num_threads)


def make_single(config: EnvironmentConfig, render_mode: str | None = None) -> AtariSingle:
    """One game by itself, to be watched.

    Raises:
        EnvironmentRefused: As `describe`, or an unknown render mode.
    """
    return AtariSingle(config, render_mode)


@dataclass(frozen=True)
class Game:
    """A game and the rules it is played under.

    Attributes:
        env_id: As the user wrote it.
        rom: The emulator's name of the game.
        protocol: The rules.
        max_frames: Truncate after so many frames.
    """

    env_id: str
    rom: str
    protocol: Protocol
    max_frames: int

    @classmethod
    def of(cls, config: EnvironmentConfig) -> Game:
        """Look up what `config` names, without building it.

        Raises:
            EnvironmentRefused: See `describe`.
        """
        env_id = config.id
        assert isinstance(env_id, str)
        try:
            games = _roms_by_game()
        except ImportError as error:
            raise not_installed(env_id, "ale-py", "atari") from error
        match, protocol = _V5.fullmatch(env_id), V5
        if match is None:
            match, protocol = _NO_FRAMESKIP.fullmatch(env_id), DQN
        if match is None:
            legacy = _LEGACY.fullmatch(env_id)
            if legacy is None:
                raise unknown("environment", env_id, known_ids())
            game = legacy["game"]
            raise EnvironmentRefused(
                f"{env_id} is an old id with rules of its own; say {game}NoFrameskip-v4 (protocol "
                f"dqn) or ALE/{game}-v5 (protocol v5)"
            )
        if match["game"] not in games:
            raise unknown("environment", env_id, known_ids())
        if config.protocol is not None:
            if config.protocol not in PROTOCOLS:
                raise unknown("protocol", config.protocol, PROTOCOLS)
            protocol = PROTOCOLS[config.protocol]
        _refuse_settings(env_id, config)
        max_frames = protocol.max_frames
        if config.max_episode_steps is not None:
            max_frames = config.max_episode_steps * ACTION_REPEAT
        return cls(env_id, games[match["game"]], protocol, max_frames)

    def build(self, num_envs: int, num_threads: int, **picture: Any) -> Any:
        """The emulator's vector environment for this game.

        Rewards are never clipped here: they would be lost for statistics. `episodic_life` is never
        used: at a lost life it begins a whole new game, and no agent would see a second life. All
        columns answer every tick (`batch_size`), in order, so that results do not depend on timing.

        Args:
            num_envs: B.
            num_threads: Threads that step the columns; 0 for as many as there are cores.
            picture: What the emulator shows; by default 84 by 84, grey, stacked, or the halved
                screen that `pictures` asks for.
        """
        from ale_py.vector_env import AtariVectorEnv

        defaults = {"stack_num": FRAME_STACK}
        if self.protocol.small_picture:
            height, width = self.halved_screen
            defaults = {"stack_num": 1, "img_height": height, "img_width": width}
        return AtariVectorEnv(
            self.rom,
            num_envs,
            batch_size=num_envs,
            num_threads=num_threads,
            autoreset_mode=AutoresetMode.NEXT_STEP,
            frameskip=ACTION_REPEAT,
            maxpool=not self.protocol.small_picture,
            reward_clipping=False,
            episodic_life=False,
            life_loss_info=self.protocol.signals_lives,
            repeat_action_probability=self.protocol.repeat_action_probability,
            full_action_space=self.protocol.full_action_space,
            use_fire_reset=self.protocol.fire_reset,
            noop_max=self.protocol.max_noops,
            max_num_frames_per_episode=self.max_frames,
            **(defaults | picture),
        )

    @property
    def halved_screen(self) -> tuple[int, int]:
        """Half the height and width of the game's screen, in pixels."""
        height, width = _screen_size(self.rom)
        return height // 2, width // 2

    def pictures(self, num_columns: int) -> SmallPictures | None:
        """What makes observations of the emulator's; None where they are as the emulator has them.

        It remembers what the columns have seen.
        """
        if not self.protocol.small_picture:
            return None
        return SmallPictures(num_columns, *self.halved_screen)

    def describe(self, native: Any | None = None) -> EnvironmentSpec:
        """The specification; `native` saves building a game to see its actions."""
        if native is None:
            native = self.build(num_envs=1, num_threads=1)
        space = native.single_observation_space
        if self.protocol.small_picture:
            space = gymnasium.spaces.Box(-np.inf, np.inf, SHAPE, np.float32)
        return EnvironmentSpec(
            name=self.env_id,
            protocol=self.protocol.name,
            observation_space=space,
            action_space=native.single_action_space,
            action_repeat=ACTION_REPEAT,
            repeat_action_probability=self.protocol.repeat_action_probability,
            frame_stack=1 if self.protocol.small_picture else FRAME_STACK,
            image_layout="chw",
            max_episode_steps=self.max_frames // ACTION_REPEAT,
        )


class Ends:
    """Tells where games end, which the emulator's flags alone do not.

    `terminated` stands for a lost life as well as for a lost game, and a life lost on the very last
    frame allowed hides the truncation.

    Args:
        name: The environment, for messages.
        max_frames: Frames a game may take.
    """

    def __init__(self, name: str, max_frames: int) -> None:
        self._name = name
        self._max_frames = max_frames

    def begin(self, info: dict[str, NDArray[np.int32]]) -> None:
        """All columns have just been reset; `info` is what the emulator said of it."""
        self._lives = info["lives"]
        self._frames = self._first_frames = info["episode_frame_number"]
        self.ended = np.zeros(len(self._frames), np.bool_)

    def observe(
        self,
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        info: dict[str, NDArray[np.int32]],
    ) -> NDArray[np.bool_]:
        """Count one tick, of which the emulator said this.

        Returns:
            [B]; where a whole game ended at this tick.

        Raises:
            EnvironmentFailure: A game began without the one before having ended.
        """
        valid = ~self.ended
        frames, lives = info["episode_frame_number"], info["lives"]
        # A game's frame counter only grows. Where it fell, an end has gone unnoticed.
        unnoticed = np.flatnonzero(valid & (frames <= self._frames))
        if unnoticed.size:
            raise EnvironmentFailure(
                f"environment {self._name}, column {unnoticed[0]}: the emulator began a new game "
                "without having reported the end of the one before"
            )
        self._first_frames = np.where(valid, self._first_frames, frames)
        life_lost = (lives < self._lives) & (lives > 0)
        capped = frames - self._first_frames >= self._max_frames
        self._frames, self._lives = frames, lives
        self.ended = valid & ((terminated & ~life_lost) | truncated | capped)
        return self.ended


class AtariVector:
    """Columns of one game, stepped by native threads that live in this process.

    It never waits for ever: the one thing known to leave the emulator waiting, an illegal action,
    is refused before it is sent. A thread that is stuck inside the emulator cannot be interrupted
    from Python, so whoever runs roles watches them from outside.

    Args:
        config: Which game, and under which rules.
        seeds: One a column.
        num_threads: Threads that step the columns; 0 for as many as there are cores. Changes no
            bits.

    Raises:
        EnvironmentRefused: See `describe`.
    """

    def __init__(
        self, config: EnvironmentConfig, seeds: Sequence[int], num_threads: int = 1
    ) -> None:
        game = Game.of(config)
        self.num_envs = len(seeds)
        self._native: Any = game.build(self.num_envs, num_threads)
        self._pictures = game.pictures(self.num_envs)
        self.spec = game.describe(self._native)
        # The binding takes neither lists nor NumPy's scalars.
        self._seeds = np.array(seeds, np.int32)
        self._num_actions = int(self._native.single_action_space.n)
        self._ends = Ends(game.env_id, game.max_frames)
        self._waiting = False

    def reset(self) -> NDArray[Any]:
        """Start every column's game afresh from its seed; observations as `spec` has them."""
        observations, info = self._exchange(lambda: self._native.reset(seed=self._seeds))
        self._ends.begin(info)
        self._statistics = EpisodeStatistics(self.num_envs)
        if self._pictures is None:
            return np.asarray(observations)
        self._pictures.restart()
        return self._pictures.observe(observations)

    def step(self, actions: NDArray[Any]) -> Tick:
        """Play one tick; see `VectorEnvironment.step`.

        A lost life is `terminated` where the protocol signals it, and the tick after it is a valid
        one of the same game. Returns and lengths are those of whole games.

        Raises:
            ValueError: An illegal action.
            EnvironmentFailure: An earlier call was interrupted, or the emulator began a game
                without having ended the one before.
        """
        legal = legal_actions(actions, self.num_envs, self._num_actions)
        # Each call returns fresh arrays, which the emulator does not write to again.
        observations, rewards, terminated, truncated, info = self._exchange(
            lambda: self._native.step(legal)
        )
        valid = ~self._ends.ended
        ended = self._ends.observe(terminated, truncated, info)
        returns, lengths = self._statistics.record(rewards, valid, ended)
        if self._pictures is not None:
            observations = self._pictures.observe(observations)
        return Tick(
            observations=np.asarray(observations),
            rewards=rewards.astype(np.float32),
            terminated=terminated,
            truncated=truncated & ~terminated,
            valid=valid,
            episode_returns=returns,
            episode_lengths=lengths,
        )

    def close(self) -> None:
        """End the threads and free the games. Harmless when called twice."""
        self._native = None

    def _exchange(self, call: Callable[[], Any]) -> Any:
        """Send to the emulator and receive, never twice without receiving.

        An exception between the two, such as Ctrl-C, leaves an answer that belongs to no question;
        all that came after would be one tick late.
        """
        if self._waiting:
            raise EnvironmentFailure(
                f"environment {self.spec.name}: an earlier call was interrupted; make a new one"
            )
        self._waiting = True
        answer = call()
        self._waiting = False
        return answer


class AtariSingle(gymnasium.Env[NDArray[Any], Any]):
    """One game by itself, equal to a column of `AtariVector` in observations, rewards and ends.

    `terminated` means that the whole game is over; a lost life stands in `info["life_lost"]`, where
    the protocol signals lives. `reset` always begins a new game, in the middle of another one too;
    without a seed it goes on with the generators as they are, and with the moments of `pictures`.

    The emulator's vector environment plays it, as it does in training. That one draws no pictures,
    so for `rgb_array` a second one plays the same game beside it, with the same seeds and the same
    actions, and observes in full size and colour.

    Args:
        config: Which game, and under which rules.
        render_mode: None or `rgb_array`.

    Raises:
        EnvironmentRefused: See `describe`, or an unknown render mode.
    """

    def __init__(self, config: EnvironmentConfig, render_mode: str | None = None) -> None:
        game = Game.of(config)
        if render_mode not in (None, "rgb_array"):
            raise unknown("render mode of Atari games", str(render_mode), ["rgb_array"])
        self.metadata = {
            "render_modes": ["rgb_array"],
            "render_fps": _FRAMES_PER_SECOND // ACTION_REPEAT,
        }
        self.render_mode = render_mode
        self._native: Any = game.build(num_envs=1, num_threads=1)
        self._pictures = game.pictures(num_columns=1)
        self._painter: Any = None
        if render_mode == "rgb_array":
            height, width = _screen_size(game.rom)
            self._painter = game.build(
                num_envs=1,
                num_threads=1,
                img_height=height,
                img_width=width,
                grayscale=False,
                stack_num=1,
            )
        self._picture: NDArray[np.uint8] | None = None
        self._ends = Ends(game.env_id, game.max_frames)
        self._is_seeded = False
        self.observation_space = game.describe(self._native).observation_space
        self.action_space = self._native.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Begin a new game; returns the first observation."""
        super().reset(seed=seed)
        if seed is None and not self._is_seeded:
            # Left to themselves, the game and its pictures would take a seed each.
            seed = int(self.np_random.integers(2**31))
        self._is_seeded = True
        seeds = None if seed is None else np.array([seed], np.int32)
        if self._painter is not None:
            pictures, _ = self._painter.reset(seed=seeds)
            self._picture = pictures[0, 0]
        observations, info = self._native.reset(seed=seeds)
        self._ends.begin(info)
        if self._pictures is not None:
            if seeds is not None:
                self._pictures.restart()
            observations = self._pictures.observe(observations)
        return observations[0], self._info(info)

    def step(self, action: Any) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        """Play one env step, which is four frames.

        Raises:
            ValueError: An illegal action.
            EnvironmentFailure: The game is over; it has to be reset first.
        """
        if self._ends.ended[0]:
            raise EnvironmentFailure("the game is over: reset it first")
        legal = legal_actions(np.array([action]), 1, int(self._native.single_action_space.n))
        if self._painter is not None:
            self._picture = self._painter.step(legal)[0][0, 0]
        observations, rewards, terminated, truncated, info = self._native.step(legal)
        if self._pictures is not None:
            observations = self._pictures.observe(observations)
        over = bool(self._ends.observe(terminated, truncated, info)[0])
        return (
            observations[0],
            float(rewards[0]),
            over and bool(terminated[0]),
            over and bool(truncated[0]),
            self._info(info) | {"life_lost": bool(terminated[0]) and not over},
        )

    def render(self) -> Any:
        """Picture of the newest frames, [height, width, 3] bytes; None without a render mode."""
        return None if self._picture is None else self._picture.copy()

    def close(self) -> None:
        """End the threads and free the games. Harmless when called twice."""
        self._native = self._painter = None

    @staticmethod
    def _info(info: dict[str, NDArray[np.int32]]) -> dict[str, Any]:
        return {key: int(info[key][0]) for key in ("lives", "episode_frame_number")}


def _roms_by_game() -> dict[str, str]:
    """The emulator's name of every game by the name in its ids: `MsPacman` to `ms_pacman`.

    Raises:
        ImportError: The emulator is not installed.
    """
    from ale_py import roms

    return {
        rom.title().replace("_", ""): rom
        for rom in sorted(roms.get_all_rom_ids())
        if rom not in _MULTI_PLAYER
    }


def _screen_size(rom: str) -> tuple[int, int]:
    """Height and width of a game's screen, in pixels; consoles for Europe had more lines."""
    import ale_py
    from ale_py import roms

    path = roms.get_rom_path(rom)
    assert path is not None
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.loadROM(path)
    height, width = ale.getScreenDims()
    return height, width


def _refuse_settings(env_id: str, config: EnvironmentConfig) -> None:
    """Refuse settings that games do not have.

    Raises:
        EnvironmentRefused: Names the setting.
    """
    if config.kwargs:
        raise EnvironmentRefused(
            f"{env_id} takes no argument {next(iter(config.kwargs))!r}: the rules of a game are "
            f"chosen by name, --protocol {' or '.join(PROTOCOLS)}"
        )
    if config.image_layout == "hwc":
        raise EnvironmentRefused(f"{env_id} has chw images: leave --image-layout at auto")
    if config.max_episode_steps is not None and config.max_episode_steps < 1:
        raise EnvironmentRefused(
            f"max_episode_steps has to be positive, not {config.max_episode_steps}"
        )
