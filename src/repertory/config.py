"""The settings that every algorithm shares, and how settings become text and come back.

Each algorithm file derives its own frozen dataclass from `RunConfig` and adds what only it has.
The string under a field is its documentation, and what `--help` prints; a comment that stands
alone between two blank lines opens a group of fields. Values that follow from others are
properties, so that nothing is filled in later.

What is here: the dataclass, its conversion to and from plain values and YAML, and the ranges its
values must lie in. What is not here: the names these settings have in other libraries (`synonyms`),
flags (`commands.arguments`), named sets of values (`presets`), and any check that needs an
environment.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import math
import os
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import gymnasium
import numpy as np
import yaml

from repertory.environments.base import EnvironmentConfig
from repertory.step_names import steps_of
from repertory.synonyms import closest_hint, name_hint

Network = Literal["auto", "mlp", "a3c", "a3c42", "nature", "minatar", "impala"]
Core = Literal["none", "lstm", "gru"]
Initialization = Literal["published", "orthogonal"]
Precision = Literal["float32", "bfloat16"]
NotFinite = Literal["stop", "skip"]


class ConfigError(ValueError):
    """A setting has a wrong name or value; one line says which, and what would do."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Who plays what, for how long, with which model and which learning settings."""

    # Environment

    env: str | Callable[..., gymnasium.Env[Any, Any]]
    """Gymnasium id (`CartPole-v1`, `module:Env-v0`, `ALE/Pong-v5`); from Python, a callable too."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the environment's constructor."""
    protocol: str | None = None
    """Rules of an Atari game: `dqn`, `machado`, `v5` or `a3c42`; by default what the id says."""
    vectorization: Literal["sync", "async"] = "sync"
    """`async` gives each column a process of its own; Atari games are native and ignore it."""
    image_layout: Literal["auto", "chw", "hwc"] = "auto"
    """Where the channels of an image observation stand, if its shape does not tell."""
    max_episode_steps: int | None = None
    """Truncate episodes after so many env steps; by default the id's own limit."""

    # Extent

    total_steps: int = 1_000_000
    """Env steps (agent decisions) to train for; emulator frames are these times the repeat."""
    seed: int = 1
    """Root of every random number of the run."""
    stop_at_return: float | None = None
    """End early once the mean return of the last 100 episodes reaches this."""
    max_minutes: float | None = None
    """End after so many minutes of training."""
    checkpoint_minutes: float = 10.0
    """Minutes between checkpoints; there is one at the end in any case."""
    checkpoint_steps: int | None = None
    """Env steps between checkpoints, beside those by the clock; by default none."""
    exact_resume: bool = False
    """Begin all games anew at each checkpoint by env steps, so that a resume is the same run."""
    keep_checkpoints: int = 3
    """How many of the newest checkpoints stay; the best stays too."""

    evaluation_steps: int | None = None
    """Env steps between evaluations beside the training, each of a checkpoint; by default none."""
    evaluation_episodes: int = 20
    """Whole games of each evaluation."""

    # Who and where

    num_envs: int = 8
    """Environment columns per actor."""
    runtime: Literal["inline", "processes", "ray"] = "processes"
    """Where roles run: one deterministic process, a process each, or a Ray cluster."""
    address: str = "local"
    """Ray cluster: `local` makes one for the run, `auto` is this machine's, else `HOST:PORT`."""
    actor_cpus: float = 1.0
    """CPUs of the cluster for each actor or A3C worker; a learner asks for one per thread."""
    learner_gpus: float = 0.0
    """GPUs of the cluster for each learner."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model learns."""
    actor_threads: int = 1
    """torch threads of an actor; never derived from the machine, so that bits stay the same."""
    learner_threads: int = 1
    """torch threads of a learner; part of what decides the bits of a convolution's gradient."""
    environment_threads: int = 0
    """Threads of a native vector environment; 0 shares this machine's cores. Changes no bits."""
    role_timeout_seconds: float = 120.0
    """A role that is silent for so long counts as hung and is killed."""
    not_finite: NotFinite = "stop"
    """A NaN or infinite reward, observation or gradient ends the run, or is skipped and told."""
    max_restarts: int = 10
    """Killed or hung actors and workers that are replaced before one of them ends the run."""

    # Model

    network: Network = "auto"
    """Torso; `auto` takes `mlp` for vectors, `minatar` for small images and `a3c` for others."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Widths of the `mlp` torso's layers."""
    core: Core = "none"
    """Recurrent core between torso and heads."""
    core_size: int = 256
    """Width of the core."""
    last_inputs: bool = False
    """Give the core the last action and the last reward too (IMPALA's agent for DMLab)."""
    initialization: Initialization = "published"
    """First parameters: as the network was published, or orthogonal kernels of gain sqrt(2)."""
    standardize_images: bool = False
    """Give each image mean 0 and deviation 1, instead of dividing bytes by 255 (as published)."""
    precision: Precision = "float32"
    """Arithmetic of the network's passes; parameters and targets stay float32."""

    # Learning

    unroll_length: int = 5
    """T, ticks per unroll."""
    discount: float = 0.99
    """Factor per env step on the future (elsewhere: gamma)."""
    reward_transform: Literal["none", "clip", "sign", "asymmetric"] = "none"
    """What the learner sees of a reward; statistics are always raw."""
    value_cost: float = 0.5
    """Weight of the value loss, which is half the squared error (elsewhere: vf_coef)."""
    entropy_cost: float = 0.01
    """Weight of the entropy bonus (elsewhere: ent_coef)."""
    entropy_cost_end: float | None = None
    """Entropy cost at the last step, reached linearly; by default constant."""
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    """Stochastic optimiser."""
    learning_rate: float = 7e-4
    """Step size at the first update."""
    learning_rate_end: float | None = None
    """Learning rate at the last step, reached linearly; by default constant."""
    rmsprop_decay: float = 0.99
    """Decay of RMSprop's mean square (elsewhere: alpha)."""
    epsilon: float = 1e-5
    """The optimiser's epsilon."""
    epsilon_inside_root: bool = False
    """RMSprop only: add epsilon before the root (A3C, TensorFlow) or after it (PyTorch)."""
    clip_norm: float | None = 0.5
    """Gradients of a larger global norm are scaled down to it; `none` turns this off."""
    normalize_advantages: bool = False
    """Shift and scale advantages to mean 0 and deviation 1 over all learners' valid rows."""
    loss_reduction: Literal["mean", "sum"] = "mean"
    """Mean over valid transitions, or their sum where a paper asks for it."""

    # Files

    run_dir: Path | None = None
    """Folder of this run; by default `runs/{env}__{algorithm}__{seed}__{time}`."""
    init_from: Path | None = None
    """Run or checkpoint whose parameters the model starts from."""
    resume_from: Path | None = None
    """Checkpoint that a run goes on from; `repertory resume` sets it, and nobody else may."""
    log_every_steps: int | None = None
    """Env steps between lines of metrics; by default a two-hundredth of the run, 5,000 at most."""

    @property
    def environment(self) -> EnvironmentConfig:
        """The part that says which environment and under which rules."""
        return EnvironmentConfig(
            id=self.env,
            kwargs=self.env_kwargs,
            protocol=self.protocol,
            vectorization=self.vectorization,
            image_layout=self.image_layout,
            max_episode_steps=self.max_episode_steps,
        )

    @property
    def num_players(self) -> int:
        """Roles that own environments."""
        return 1

    @property
    def num_reporters(self) -> int:
        """Roles that learn and tell of it."""
        return 1

    @property
    def updates_per_version(self) -> int:
        """Updates that a learner makes from a batch before it publishes."""
        return 1

    @property
    def awaits_versions(self) -> bool:
        """Whether actors wait for versions by number, also for those without an update."""
        return True

    @property
    def in_step(self) -> bool:
        """Whether the roles that learn make every update together."""
        return True

    @property
    def leg_end(self) -> int:
        """Env steps at which roles end: the run's, or with `exact_resume` the next checkpoint's."""
        if not self.exact_resume or self.checkpoint_steps is None:
            return self.total_steps
        begun = steps_of(self.resume_from) // self.checkpoint_steps
        return min(self.total_steps, (begun + 1) * self.checkpoint_steps)

    @property
    def transitions_together(self) -> int:
        """Transitions of an update, whose advantages are normalised together; here one role's."""
        return self.unroll_length * self.num_envs

    def conflict(self) -> str | None:
        """What is wrong with settings that are each in their range, on one line."""
        if self.exact_resume and self.checkpoint_steps is None:
            return "exact_resume needs checkpoint_steps: it goes on from checkpoints by env steps"
        if self.last_inputs and self.core == "none":
            return "last_inputs needs a recurrent core: set core to lstm or gru"
        if self.runtime == "ray" and self.device == "cuda" and not self.learner_gpus:
            return "device=cuda on a Ray cluster needs learner_gpus, or Ray gives it none"
        if self.normalize_advantages and self.transitions_together == 1:
            return "normalize_advantages takes more than one transition: a single one becomes 0"
        return None

    @property
    def threads_per_player(self) -> int:
        """Threads of one role's native vector environment."""
        return self.environment_threads or max(1, num_cores() // self.num_players)

    @property
    def log_interval(self) -> int:
        """Env steps between lines of metrics."""
        interval = self.log_every_steps or max(1, min(5_000, self.total_steps // 200))
        # Whatever is due after so many env steps is looked at with a line of metrics.
        return min(
            interval, *filter(None, [self.checkpoint_steps, self.evaluation_steps, interval])
        )


def num_cores() -> int:
    """Cores that this process may use, which in a container can be few of the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


ConfigT = TypeVar("ConfigT", bound=RunConfig)


class FieldDoc(NamedTuple):
    """What the source says of a field: the heading it stands under and its documentation."""

    group: str
    text: str


def field_docs(config_class: type[RunConfig]) -> dict[str, FieldDoc]:
    """Group and documentation of every field, in the order of declaration.

    Fields of a subclass that stand under no heading of their own come under `Algorithm`.
    """
    docs: dict[str, FieldDoc] = {}
    for owner in reversed(config_class.__mro__):
        if dataclasses.is_dataclass(owner):
            docs |= _own_field_docs(textwrap.dedent(inspect.getsource(owner)))
    return docs


def _own_field_docs(source: str) -> dict[str, FieldDoc]:
    """The same for the fields that one class's source declares."""
    # A heading is a comment with blank lines around it, indented as the fields are.
    headings = {
        source.count("\n", 0, match.start()): match[1]
        for match in re.finditer(r"(?<=\n\n) {4}# (.+)(?=\n\n)", source)
    }
    (declaration,) = ast.parse(source).body
    assert isinstance(declaration, ast.ClassDef)
    docs = {}
    for statement, follower in itertools.pairwise([*declaration.body, ast.Pass()]):
        if not isinstance(statement, ast.AnnAssign):
            continue
        text = ""
        if isinstance(follower, ast.Expr) and isinstance(follower.value, ast.Constant):
            text = inspect.cleandoc(str(follower.value.value))
        above = [line for line in headings if line < statement.lineno]
        docs[ast.unparse(statement.target)] = FieldDoc(
            headings[max(above)] if above else "Algorithm", text
        )
    return docs


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The settings as numbers, strings, lists and dicts.

    Tuples become lists, paths strings, and a callable is shown as `module:qualname`.
    """
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def from_dict(config_class: type[ConfigT], settings: Mapping[str, Any]) -> ConfigT:
    """Build a configuration; fields that are not named keep their defaults.

    Values may come as their types or as text: `"1e6"` for a count, `"none"` where nothing is
    allowed.

    Raises:
        ConfigError: A name does not exist, a value has the wrong type, or `env` is missing.
    """
    hints = typing.get_type_hints(config_class)
    names = [f.name for f in dataclasses.fields(config_class)]
    values = {}
    for name, value in settings.items():
        if name not in names:
            raise ConfigError(f"unknown setting {name!r}{name_hint(str(name), names)}")
        values[name] = _convert(name, value, hints[name])
    if "env" not in values:
        raise ConfigError("no environment given: env names one, such as CartPole-v1")
    return config_class(**values)


def to_yaml(config: RunConfig, algorithm: str | None = None) -> str:
    """The settings as YAML, a line each; `from_yaml` reads them back to an equal object.

    Args:
        config: What to show.
        algorithm: If given, stands above the settings under the key `algorithm`.
    """
    settings = to_dict(config)
    if algorithm is not None:
        settings = {"algorithm": algorithm, **settings}
    # ASCII only: some characters that PyYAML would write as they are, it reads as others.
    return yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=100)


def from_yaml(config_class: type[ConfigT], text: str) -> ConfigT:
    """The opposite of `to_yaml`; the key `algorithm` is skipped.

    Raises:
        ConfigError: As `parse_yaml` and `from_dict` do.
    """
    settings = parse_yaml(text)
    settings.pop("algorithm", None)
    return from_dict(config_class, settings)


def parse_yaml(text: str) -> dict[str, Any]:
    """Read a YAML mapping of settings, without looking at its names.

    Raises:
        ConfigError: The text is not YAML, or not a mapping.
    """
    try:
        settings = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"not a YAML file of settings: {reason}") from error
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(
            f"not a YAML file of settings: `name: value` lines expected, got {settings!r:.60}"
        )
    return settings


def parse_value(text: str) -> Any:
    """One YAML value, as in `--env-kwargs gravity=9.8`; text that is no YAML stays text."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text


def validate(config: RunConfig) -> None:
    """Refuse values that no run can use.

    Raises:
        ConfigError: A value lies outside its range; the line names it and the range.
    """
    for name, allowed in _RANGES.items():
        value = getattr(config, name, None)
        if value is not None and not allowed.contains(value):
            raise ConfigError(f"{name} must be {allowed}, not {value}")
    for width in config.hidden_sizes:
        if not _AT_LEAST_ONE.contains(width):
            raise ConfigError(f"hidden_sizes must each be {_AT_LEAST_ONE}, not {width}")
    num_actors, num_learners = (getattr(config, n, 1) for n in ("num_actors", "num_learners"))
    if num_learners > num_actors:
        raise ConfigError(
            f"num_learners must be at most num_actors ({num_actors}), not {num_learners}: "
            "every learner needs an actor of its own"
        )
    if config.runtime != "ray" and config.address != "local":
        raise ConfigError(f"address is of a Ray cluster, and runtime is {config.runtime}, not ray")
    if (conflict := config.conflict()) is not None:
        raise ConfigError(conflict)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e6` and `7e-4` as text; here they are numbers, as in YAML 1.2."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


class _Range(NamedTuple):
    """An interval of numbers, written as one says it."""

    low: float
    high: float = math.inf
    low_included: bool = True
    high_included: bool = True

    def contains(self, value: float) -> bool:
        """Whether a finite number lies inside."""
        above = value >= self.low if self.low_included else value > self.low
        below = value <= self.high if self.high_included else value < self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        low = f"{'at least' if self.low_included else 'above'} {self.low:,}"
        if self.high == math.inf:
            return "finite" if self.low == -math.inf else low
        return f"{low} and {'at most' if self.high_included else 'below'} {self.high:,}"


_AT_LEAST_ONE = _Range(1)
_AT_LEAST_ZERO = _Range(0)
_ABOVE_ZERO = _Range(0, low_included=False)
_FRACTION = _Range(0, 1)

# A name means the same in every algorithm, so that fields of their own stand here as well.
_RANGES: Mapping[str, _Range] = types.MappingProxyType(
    {
        "max_episode_steps": _AT_LEAST_ONE,
        "total_steps": _AT_LEAST_ONE,
        "seed": _Range(0, 2**31, high_included=False),
        "max_minutes": _ABOVE_ZERO,
        "checkpoint_minutes": _ABOVE_ZERO,
        "checkpoint_steps": _AT_LEAST_ONE,
        "keep_checkpoints": _AT_LEAST_ONE,
        "stop_at_return": _Range(-math.inf),
        "evaluation_steps": _AT_LEAST_ONE,
        "evaluation_episodes": _AT_LEAST_ONE,
        "num_actors": _AT_LEAST_ONE,
        "num_envs": _AT_LEAST_ONE,
        "num_learners": _AT_LEAST_ONE,
        "num_workers": _AT_LEAST_ONE,
        "batch_trajectories": _AT_LEAST_ONE,
        "queue_capacity": _AT_LEAST_ONE,
        "passes": _AT_LEAST_ONE,
        "clip_range": _ABOVE_ZERO,
        "rho_clip": _ABOVE_ZERO,
        "trace_clip": _ABOVE_ZERO,
        "advantage_clip": _ABOVE_ZERO,
        "replay_share": _Range(0, 1, high_included=False),
        "replay_capacity": _AT_LEAST_ONE,
        "replay_max_bytes": _AT_LEAST_ONE,
        "tau": _Range(0, 1, low_included=False),
        "max_lag": _AT_LEAST_ZERO,
        "actor_threads": _AT_LEAST_ONE,
        "learner_threads": _AT_LEAST_ONE,
        "environment_threads": _AT_LEAST_ZERO,
        "actor_cpus": _AT_LEAST_ZERO,
        "learner_gpus": _AT_LEAST_ZERO,
        "role_timeout_seconds": _ABOVE_ZERO,
        "max_restarts": _AT_LEAST_ZERO,
        "core_size": _AT_LEAST_ONE,
        "unroll_length": _AT_LEAST_ONE,
        "discount": _FRACTION,
        "value_cost": _AT_LEAST_ZERO,
        "entropy_cost": _AT_LEAST_ZERO,
        "entropy_cost_end": _AT_LEAST_ZERO,
        "learning_rate": _ABOVE_ZERO,
        "learning_rate_end": _AT_LEAST_ZERO,
        "rmsprop_decay": _Range(0, 1, high_included=False),
        "epsilon": _ABOVE_ZERO,
        "clip_norm": _ABOVE_ZERO,
        "gae_lambda": _FRACTION,
        "vtrace_lambda": _FRACTION,
        "log_every_steps": _AT_LEAST_ONE,
    }
)


def _plain(value: Any) -> Any:
    """`value` as YAML can hold it; what it cannot hold is shown by its repr."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    return repr(value)


def _convert(name: str, value: Any, hint: Any) -> Any:
    """`value` as the type `hint`, or ConfigError; see `from_dict`."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(name, value, options)
    if origin is Literal:
        if value in options:
            return value
        listed = ", ".join(options)
        raise ConfigError(
            f"{name} must be one of {listed}, not {value!r}{closest_hint(str(value), options)}"
        )
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_convert(name, item, options[0]) for item in value)
    if origin is dict and isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if hint in _SCALARS:
        converted = _SCALARS[hint](value)
        if converted is not None:
            return converted
    expected = _EXPECTED.get(origin or hint, str(hint))
    raise ConfigError(f"{name} must be {expected}, not {value!r}")


def _convert_union(name: str, value: Any, options: tuple[Any, ...]) -> Any:
    """`value` as the first of a union's members that takes it."""
    if type(None) in options and (value is None or value == "none"):
        return None
    if callable(value) and any(typing.get_origin(o) is Callable for o in options):
        return value
    members = [
        option
        for option in options
        if option is not type(None) and typing.get_origin(option) is not Callable
    ]
    return _convert(name, value, members[0])


def _whole_number(value: Any) -> int | None:
    """A count: `1e6`, `10_000_000`, `5`, but not `2.5`."""
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            value = _real_number(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int else None


def _real_number(value: Any) -> float | None:
    """A number; infinities and NaN are left to `validate`, which names the range."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _truth(value: Any) -> bool | None:
    """True or false, also as words."""
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower())
    return value if isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    """A string as it is."""
    return value if isinstance(value, str) else None


def _path(value: Any) -> Path | None:
    """A path, also as a string."""
    return Path(value) if isinstance(value, (str, Path)) else None


_SCALARS: Mapping[Any, Callable[[Any], Any]] = types.MappingProxyType(
    {int: _whole_number, float: _real_number, bool: _truth, str: _text, Path: _path}
)
_EXPECTED: Mapping[Any, str] = types.MappingProxyType(
    {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        Path: "a path",
        tuple: "a list of whole numbers",
        dict: "a mapping of names to values",
    }
)
