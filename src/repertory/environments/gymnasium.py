"""Any environment with a Gymnasium id, or a callable that makes one.

What is here: finding and building environments, and the adapter that steps columns of them in one
process or in a spawned process each. What is not here: Atari games, which have an adapter of their
own (`atari`), and the checks of a single column (`guard`).
"""

from __future__ import annotations

import importlib
import inspect
import multiprocessing.connection
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from repertory.environments import atari
from repertory.environments.base import (
    EnvironmentConfig,
    EnvironmentFailure,
    EnvironmentLost,
    EnvironmentRefused,
    EnvironmentSpec,
    EpisodeStatistics,
    Tick,
)
from repertory.environments.guard import FAILURE, Guard, OwnProcess, SingleColumn
from repertory.environments.names import closest, not_installed, unknown
from repertory.environments.spaces import image_layout, legal_actions, require_supported
from repertory.spawning import how_it_ended

_EXIT_SECONDS = 1.0
"""How long to wait for the exit code of a process whose pipe has closed."""

_EXTRAS = {"gymnasium.envs.box2d": ("Box2D", "box2d")}
"""Package and extra by the module of an entry point."""


def describe(config: EnvironmentConfig) -> EnvironmentSpec:
    """Build one environment to see its spaces, and close it.

    Raises:
        EnvironmentRefused: It cannot be found, built or used.
    """
    return Recipe.of(config).describe()


def make_single(
    config: EnvironmentConfig, render_mode: str | None = None
) -> gymnasium.Env[Any, Any]:
    """One environment by itself, guarded; it takes the actions that its space has.

    Raises:
        EnvironmentRefused: It cannot be found, built or used.
    """
    guarded = Recipe.of(config).build_guarded(column=0, render_mode=render_mode)
    space = guarded.env.action_space
    assert isinstance(space, gymnasium.spaces.Discrete)
    if space.start == 0:
        return guarded
    return gymnasium.wrappers.TransformAction(guarded, lambda action: action - space.start, space)


def make_vector(config: EnvironmentConfig, seeds: Sequence[int]) -> GymnasiumVector:
    """Columns of one environment, a seed each.

    Raises:
        EnvironmentRefused: It cannot be found, built or used.
    """
    return GymnasiumVector(config, seeds)


@dataclass(frozen=True)
class Recipe:
    """How to build one environment; travels to other processes.

    Attributes:
        name: What it is called in messages and results.
        source: The registry's entry or the user's callable. The entry itself travels, not its id: a
            spawned process lacks what was registered by hand in this one.
        kwargs: For the constructor.
        max_episode_steps: Truncate after so many env steps; None keeps the id's limit.
        wanted_layout: What the user says of the image layout.
    """

    name: str
    source: EnvSpec | Callable[..., Any]
    kwargs: Mapping[str, Any]
    max_episode_steps: int | None
    wanted_layout: Literal["auto", "chw", "hwc"]

    @classmethod
    def of(cls, config: EnvironmentConfig) -> Recipe:
        """Look up what `config` names, without building it.

        Raises:
            EnvironmentRefused: Unknown id, or a setting that does not apply.
        """
        name = name_of(config.id)
        if config.protocol is not None:
            raise EnvironmentRefused(
                f"{name} has no protocol {config.protocol!r}: only Atari games have protocols"
            )
        if config.max_episode_steps is not None and config.max_episode_steps < 1:
            raise EnvironmentRefused(
                f"max_episode_steps has to be positive, not {config.max_episode_steps}"
            )
        source = _registered(config.id) if isinstance(config.id, str) else config.id
        layout = config.image_layout
        if layout == "auto" and name.startswith("MinAtar/"):
            layout = "hwc"  # Seaquest is 10 by 10 with 10 channels
        return cls(name, source, dict(config.kwargs), config.max_episode_steps, layout)

    def build(self, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
        """Build the environment.

        Raises:
            EnvironmentRefused: Unknown keyword argument, the constructor raised, or what it
                returned cannot be used.
        """
        kwargs = dict(self.kwargs)
        if render_mode is not None:
            kwargs["render_mode"] = render_mode
        try:
            _require_known_arguments(self.name, self.source, kwargs)
            if isinstance(self.source, EnvSpec):
                # The guard makes the checks that Gymnasium's own checker makes, and names columns.
                return gymnasium.make(
                    self.source,
                    max_episode_steps=self.max_episode_steps,
                    disable_env_checker=True,
                    **kwargs,
                )
            returned = self.source(**kwargs)
        except EnvironmentRefused:
            raise
        except Exception as error:
            raise self._refusal(error) from error
        if isinstance(returned, VectorEnv):
            returned = SingleColumn(returned, self.name)
        if not isinstance(returned, gymnasium.Env):
            raise EnvironmentRefused(
                f"{self.name} returned {type(returned).__name__}, which is no gymnasium.Env"
            )
        if self.max_episode_steps is None:
            return returned
        return gymnasium.wrappers.TimeLimit(returned, self.max_episode_steps)

    def build_guarded(self, column: int, render_mode: str | None = None) -> Guard:
        """Build the environment and guard it.

        Raises:
            EnvironmentRefused: As `build`, or its spaces are not supported.
        """
        env = self.build(render_mode)
        require_supported(self.name, env.observation_space, env.action_space)
        return Guard(env, self.name, column)

    def describe(self) -> EnvironmentSpec:
        """Build the environment to see its spaces, and close it.

        Raises:
            EnvironmentRefused: As `build`, or its spaces are not supported.
        """
        env = self.build()
        env.close()
        require_supported(self.name, env.observation_space, env.action_space)
        return EnvironmentSpec(
            name=self.name,
            protocol="default",
            observation_space=env.observation_space,
            action_space=env.action_space,
            image_layout=image_layout(self.name, env.observation_space, self.wanted_layout),
            max_episode_steps=self.max_episode_steps
            or (self.source.max_episode_steps if isinstance(self.source, EnvSpec) else None),
        )

    def _refusal(self, error: Exception) -> EnvironmentRefused:
        """One line for an exception of the constructor."""
        if isinstance(error, gymnasium.error.DependencyNotInstalled | ImportError):
            entry_point = getattr(self.source, "entry_point", None)
            for module, (package, extra) in _EXTRAS.items():
                if isinstance(entry_point, str) and entry_point.startswith(module):
                    return not_installed(self.name, package, extra)
        first_line = str(error).partition("\n")[0]
        return EnvironmentRefused(
            f"{self.name} cannot be made: {type(error).__name__}: {first_line}"
        )


class GymnasiumVector:
    """Columns of one Gymnasium environment, in NEXT_STEP mode.

    With `vectorization="sync"` they step one after the other in this process. With `async` each has
    a spawned process of its own, never a forked one: a fork copies locks that other threads hold.

    Args:
        config: Which environment.
        seeds: One a column.

    Raises:
        EnvironmentRefused: It cannot be found, built or used.
        EnvironmentFailure: A process ended while it built its environment.
    """

    def __init__(self, config: EnvironmentConfig, seeds: Sequence[int]) -> None:
        recipe = Recipe.of(config)
        self.spec = recipe.describe()
        self.num_envs = len(seeds)
        assert isinstance(self.spec.action_space, gymnasium.spaces.Discrete)
        self._num_actions = int(self.spec.action_space.n)
        self._seeds = [int(seed) for seed in seeds]
        self._num_steps: NDArray[np.int64]
        self._ended: NDArray[np.bool_]
        self._statistics: EpisodeStatistics
        columns = range(self.num_envs)
        self._vector: SyncVectorEnv | AsyncVectorEnv
        if config.vectorization == "sync":
            self._vector = SyncVectorEnv(
                [partial(recipe.build_guarded, column) for column in columns],
                autoreset_mode=AutoresetMode.NEXT_STEP,
            )
        else:
            try:
                self._vector = AsyncVectorEnv(
                    [partial(_build_in_process, recipe, column, os.getpid()) for column in columns],
                    context="spawn",
                    autoreset_mode=AutoresetMode.NEXT_STEP,
                )
            except (EOFError, ConnectionError) as error:
                raise EnvironmentFailure(
                    f"environment {self.spec.name}: a process ended while it built the environment"
                ) from error

    def reset(self) -> NDArray[Any]:
        """Start every column afresh from its seed; [B, ...]."""
        self._num_steps = np.zeros(self.num_envs, np.int64)
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._statistics = EpisodeStatistics(self.num_envs)
        with self._exchange():
            observations, infos = self._vector.reset(seed=list(self._seeds))
        self._raise_reported(infos)
        return np.asarray(observations)

    def step(self, actions: NDArray[Any]) -> Tick:
        """Play one tick; see `VectorEnvironment.step`."""
        legal = legal_actions(actions, self.num_envs, self._num_actions)
        with self._exchange():
            observations, rewards, terminated, truncated, infos = self._vector.step(legal)
        self._raise_reported(infos)
        valid = ~self._ended
        truncated = truncated & ~terminated
        self._ended = terminated | truncated
        self._num_steps += valid
        returns, lengths = self._statistics.record(rewards, valid, self._ended)
        return Tick(
            observations=np.asarray(observations),
            rewards=rewards.astype(np.float32),
            terminated=terminated,
            truncated=truncated,
            valid=valid,
            episode_returns=returns,
            episode_lengths=lengths,
        )

    def close(self) -> None:
        """Close every column and end its process. Harmless when called twice."""
        self._vector.close()

    def _raise_reported(self, infos: dict[str, Any]) -> None:
        """Raise the first failure that a process reported."""
        if FAILURE in infos:
            self.close()
            raise EnvironmentFailure(next(text for text in infos[FAILURE] if text is not None))

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Let the columns answer, and leave no process behind where one of them cannot.

        A process that ended is named. After an interrupt, other pipes may hold answers, or half an
        answer, that nobody will read; there is no polite close from there.
        """
        try:
            yield
        except (EOFError, ConnectionError) as error:
            raise EnvironmentLost(
                f"environment {self.spec.name}, {self._end_processes()}"
            ) from error
        except KeyboardInterrupt:
            self._end_processes()
            raise

    def _end_processes(self) -> str:
        """End all processes at once, and say which had ended by itself and how."""
        if not isinstance(self._vector, AsyncVectorEnv):
            return ""
        processes = self._vector.processes
        ended = multiprocessing.connection.wait([p.sentinel for p in processes], _EXIT_SECONDS)
        what = "a column's process closed its pipe"
        for column, process in enumerate(processes):
            if process.sentinel in ended:
                process.join()
                what = (
                    f"column {column}, env step {self._num_steps[column] + 1}: "
                    f"its process: {how_it_ended(process.exitcode)} (pid {process.pid})"
                )
            process.kill()  # what runs in a role ignores a request to terminate
        for process in processes:
            process.join()
        self._vector.closed = True
        return what


def _build_in_process(recipe: Recipe, column: int, parent: int) -> gymnasium.Env[Any, Any]:
    """Build a column where it will run.

    `AsyncVectorEnv` calls this once in the parent, too, to see the spaces. There, Ctrl-C and the
    global generators are not the environment's.
    """
    guarded = recipe.build_guarded(column)
    return guarded if os.getpid() == parent else OwnProcess(guarded)


def name_of(source: str | Callable[..., Any]) -> str:
    """The id, or `module:qualname` of a callable."""
    if isinstance(source, str):
        return source
    function = source.func if isinstance(source, partial) else source
    if not hasattr(function, "__qualname__"):
        function = type(function)
    return f"{function.__module__}:{function.__qualname__}"


def _registered(env_id: str) -> EnvSpec:
    """The registry's entry for an id, after importing the module that it names.

    Raises:
        EnvironmentRefused: There is none, or its module cannot be imported.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise EnvironmentRefused(
                f"{env_id}: cannot import {module}: {type(error).__name__}: {error}"
            ) from error
    _register_namespace(env_id, name.partition("/")[0].lower())
    spec = gymnasium.registry.get(name)
    if spec is None:
        imported = sys.modules.get(module)
        if callable(getattr(imported, name, None)):
            raise EnvironmentRefused(
                f"{env_id} is a class or a function, and no id that is registered with Gymnasium: "
                f"register it, or hand it over from Python, env={name}"
            )
        raise unknown("environment", env_id, [*_ids_of(module), *_known_ids()])
    return spec


def _ids_of(module: str) -> list[str]:
    """Ids that code of a module answers for, as they have to be given."""
    return [
        f"{module}:{name}"
        for name, spec in gymnasium.registry.items()
        if module and str(spec.entry_point).startswith(f"{module}:")
    ]


def _register_namespace(env_id: str, namespace: str) -> None:
    """Register the environments of a namespace that does not do so by itself.

    Raises:
        EnvironmentRefused: Its package is not installed.
    """
    if namespace == "repertory":
        importlib.import_module("repertory.environments.toy")
    elif namespace == "minatar" and not any(id.startswith("MinAtar/") for id in gymnasium.registry):
        try:
            minatar = importlib.import_module("minatar.gym")
        except ImportError as error:
            raise not_installed(env_id, "MinAtar", "minatar") from error
        minatar.register_envs()


def _known_ids() -> Iterable[str]:
    """Ids to search for what a user may have meant."""
    importlib.import_module("repertory.environments.toy")
    games = atari.known_ids()
    # The ALE registers each game under old names too, which `atari` refuses.
    return [*(id for id in gymnasium.registry if not atari.is_game(id)), *games]


def _require_known_arguments(
    name: str, source: EnvSpec | Callable[..., Any], kwargs: Mapping[str, Any]
) -> None:
    """Refuse keyword arguments that the constructor does not take.

    Raises:
        EnvironmentRefused: Names the argument, and the closest that exists.
    """
    if not kwargs:
        return
    creator: Callable[..., Any]
    if not isinstance(source, EnvSpec):
        creator = source
    elif callable(source.entry_point):
        creator = source.entry_point
    else:
        creator = load_env_creator(str(source.entry_point))
    parameters = inspect.signature(creator).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for key in kwargs:
        if key not in parameters:
            match = closest(key, parameters)
            hint = f"; did you mean {match}?" if match else f"; it takes {', '.join(parameters)}"
            raise EnvironmentRefused(f"{name} takes no argument {key!r}{hint}")
