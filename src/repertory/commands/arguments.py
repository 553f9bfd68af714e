"""The command line of `repertory train`, from words to checked settings.

Settings are laid over each other: the algorithm's defaults, then the environment's own preset (or
the one that `--preset` names), then the file that `--config` names, then the flags. Which preset
applies depends on flags and file, so that three flags are looked up before tyro reads them all.

What is here: that order, the flags made from the fields of a configuration, and lists of seeds.
What is not here: what a value may be (`config`), and what is done with the settings (`train`).
"""

from __future__ import annotations

import dataclasses
import re
import sys
import typing
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from repertory import presets
from repertory.config import (
    ConfigError,
    RunConfig,
    field_docs,
    from_dict,
    parse_value,
    parse_yaml,
    validate,
)
from repertory.presets import Preset
from repertory.synonyms import closest_hint, name_hint

_HELP = ("-h", "--help")


@dataclass(frozen=True)
class TrainArguments:
    """What a command line of `repertory train` asks for.

    Attributes:
        algorithm: Its name.
        configs: One checked configuration a run; they differ by their seed.
        preset: The preset that lies under file and flags, if any.
        print_config: Show the settings and train nothing.
    """

    algorithm: str
    configs: tuple[RunConfig, ...]
    preset: Preset | None
    print_config: bool


_HERE = ("inline", "processes")
_NO_FLAGS = ("resume_from",)
"""Settings that are not for users to set."""

_SOURCES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "preset": ("NAME", "Preset to start from, or `none`; by default the environment's own."),
        "config": ("FILE", "YAML of settings, as `--print-config` prints it; flags go over it."),
        "seeds": ("1..5", "Several runs one after another: `1..5` or `1,2,3`."),
        "print_config": ("", "Print the settings that would be used, and stop."),
    }
)
"""Flags of `train` that are not settings, with what stands for their value and their help."""


def parse_train(arguments: Sequence[str]) -> TrainArguments:
    """Read what stands after `repertory train`.

    Raises:
        ConfigError: A word, name or value is wrong; the message is one line.
        SystemExit: Help was asked for (code 0), or a flag lacks its value (code 2, after tyro's
            own message on stderr).
    """
    # Imported late: an algorithm brings torch, which takes longer than all the rest.
    from repertory.algorithms import ALGORITHMS

    algorithm, arguments = _algorithm(arguments, list(ALGORITHMS))
    config_class: type[RunConfig] = ALGORITHMS[algorithm].config
    _check_flags(arguments, config_class, {n: a.config for n, a in ALGORITHMS.items()})
    file_settings = _read_file(_peek(arguments, "config"), algorithm)
    env = _peek(arguments, "env") or file_settings.get("env")
    preset = _preset(_peek(arguments, "preset"), algorithm, env)

    below = {"runtime": "processes", **(preset.settings if preset else {}), **file_settings}
    help_wanted = any(flag in arguments for flag in _HELP)
    if env is None and not help_wanted:
        raise ConfigError("no environment given: --env names one, such as --env CartPole-v1")
    defaults = from_dict(config_class, {"env": env or "ID", **below})
    given = _read_flags(arguments, algorithm, defaults, preset)
    config = from_dict(config_class, {name: given[name] for name in field_docs(config_class)})

    configs = [config]
    if given["seeds"] is not None:
        if _peek(arguments, "seed") is not None:
            raise ConfigError("give either --seed or --seeds, not both")
        configs = [dataclasses.replace(config, seed=seed) for seed in parse_seeds(given["seeds"])]
        if config.run_dir is not None and len(configs) > 1:
            raise ConfigError("--run-dir names the folder of one run; leave it out with --seeds")
    for each in configs:
        validate(each)
    _refuse_idle({_flag_name(word) for word in arguments}, config)
    return TrainArguments(algorithm, tuple(configs), preset, given["print_config"])


def changed_settings(arguments: Sequence[str]) -> dict[str, Any]:
    """Settings given as flags, by name and as text, without a look at what they mean.

    `--name value`, `--name=value`, and for what is true or false `--name` or `--no-name`.

    Raises:
        ConfigError: A word is no flag.
    """
    changes: dict[str, Any] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        name = _flag_name(word)
        if name is None:
            raise ConfigError(f"unexpected {word!r}: settings are given as --name value")
        _, equals, value = word.partition("=")
        if equals:
            changes[name] = value
        elif words and _flag_name(words[0]) is None:
            changes[name] = words.pop(0)
        else:
            changes[name.removeprefix("no_")] = not name.startswith("no_")
    return changes


def parse_seeds(text: str) -> list[int]:
    """Seeds as `1..5` (both ends included) or `1,2,3`.

    Raises:
        ConfigError: The text is neither, or names a seed twice.
    """
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        seeds = list(range(int(match[1]), int(match[2]) + 1))
    elif re.fullmatch(r"\d+(,\d+)*", text):
        seeds = [int(part) for part in text.split(",")]
    else:
        raise ConfigError(f"seeds must look like 1..5 or 1,2,3, not {text!r}")
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds must name at least one seed, and each once, not {text!r}")
    return seeds


def train_help(algorithms: Sequence[str]) -> str:
    """What `repertory train --help` prints: the algorithms, and how to see their flags."""
    names = "|".join(algorithms)
    return (
        f"usage: repertory train {{{names}}} --env ID [OPTIONS]\n\n"
        "Train an agent. Settings come from the algorithm, then the environment's own preset\n"
        "(or --preset NAME), then --config FILE, then flags.\n\n"
        f"  repertory train {algorithms[0]} --env CartPole-v1\n"
        f"  repertory train {algorithms[0]} --env CartPole-v1 --seeds 1..5 --total-steps 1e5\n"
        f"  repertory train {algorithms[0]} --env CartPole-v1 --print-config\n\n"
        f"`repertory train {algorithms[0]} --help` lists all flags; with --env, the defaults are\n"
        "those that hold for it."
    )


def _algorithm(arguments: Sequence[str], known: Sequence[str]) -> tuple[str, list[str]]:
    """The algorithm's name and what stands behind it."""
    if not arguments:
        raise ConfigError(f"train which algorithm? One of {', '.join(known)}")
    first, *rest = arguments
    if first in _HELP:
        sys.stdout.write(train_help(known) + "\n")
        raise SystemExit(0)
    name = first.replace("-", "_")
    if name not in known:
        raise ConfigError(
            f"unknown algorithm {first!r}{closest_hint(name, known)} (known: {', '.join(known)})"
        )
    if rest and not rest[0].startswith("-"):
        raise ConfigError(f"unexpected {rest[0]!r}; did you mean --env {rest[0]}?")
    return name, rest


def _check_flags(
    arguments: Sequence[str],
    config_class: type[RunConfig],
    all_classes: Mapping[str, type[RunConfig]],
) -> None:
    """Refuse flags that do not exist, by the name that they have here where there is one."""
    hints = typing.get_type_hints(config_class)
    names = [*field_docs(config_class), *_SOURCES]
    negations = {f"no_{name}" for name, hint in hints.items() if hint is bool}
    for word in arguments:
        name = _flag_name(word)
        if name is not None and name not in {*names, *negations, "help"}:
            hint = name_hint(name, names)
            others = [other for other, its in all_classes.items() if name in field_docs(its)]
            if others and "called" not in hint:
                hint = f"; it is a setting of {' and '.join(others)}"
            # Settings are written with underscores in files and with hyphens here.
            hint = re.sub(r"(called |mean )(\w+)", lambda m: m[1] + _flag(m[2]), hint)
            raise ConfigError(f"unknown flag {word.partition('=')[0]}{hint}")


_IDLE: Mapping[str, tuple[str, tuple[Any, ...]]] = MappingProxyType(
    {
        **dict.fromkeys(("actor_cpus", "learner_gpus"), ("runtime", _HERE)),
        "clip_range": ("surrogate", ("gradient",)),
        "core_size": ("core", ("none",)),
        "evaluation_episodes": ("evaluation_steps", (None,)),
        **dict.fromkeys(("rmsprop_decay", "epsilon_inside_root"), ("optimizer", ("adam",))),
        **dict.fromkeys(("replay_capacity", "replay_max_bytes"), ("replay_share", (0.0,))),
    }
)
"""Settings that change nothing while another has one of some values."""


def _refuse_idle(given: Set[str | None], config: RunConfig) -> None:
    """Refuse a flag that would change nothing; below, in a preset or a file, it may stand."""
    for name, (other, values) in _IDLE.items():
        if name in given and (value := getattr(config, other)) in values:
            now = str(value).lower()
            raise ConfigError(f"{_flag(name)} has no effect while {other} is {now}")


def _flag_name(word: str) -> str | None:
    """The setting that a word such as `--total-steps=5` names, or None if it is no flag."""
    if not word.startswith("--"):
        return None
    return word[2:].partition("=")[0].replace("-", "_")


def _flag(name: str) -> str:
    """The flag that sets a field."""
    return "--" + name.replace("_", "-")


def _peek(arguments: Sequence[str], name: str) -> str | None:
    """The value that the flag of a field has among the arguments; the last one counts."""
    value = None
    for index, word in enumerate(arguments):
        if _flag_name(word) == name:
            _, equals, behind = word.partition("=")
            value = behind if equals else next(iter(arguments[index + 1 :]), None)
    return value


def _read_file(path: str | None, algorithm: str) -> dict[str, Any]:
    """The settings of a file, which may say whose they are but must then say it rightly."""
    if path is None:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the settings in {path}: {reason}") from error
    try:
        settings = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path} is {error}") from error
    written_for = settings.pop("algorithm", algorithm)
    if written_for != algorithm:
        raise ConfigError(f"{path} holds settings of {written_for}, not of {algorithm}")
    return settings


def _preset(name: str | None, algorithm: str, env: Any) -> Preset | None:
    """The preset that was named, else the environment's own."""
    if name == "none":
        return None
    if name is not None:
        return presets.by_name(algorithm, name)
    return presets.for_environment(algorithm, env) if isinstance(env, str) else None


def _read_flags(
    arguments: Sequence[str], algorithm: str, defaults: RunConfig, preset: Preset | None
) -> dict[str, Any]:
    """All values by name: given ones as text, the others as they stand in `defaults`.

    tyro reads a container with one dataclass a group, so that its help shows the groups.
    """
    hints = typing.get_type_hints(type(defaults))
    groups: dict[str, list[Any]] = {"Sources": []}
    for name, (metavar, text) in _SOURCES.items():
        if name == "preset":
            text = f"{text} Known: {', '.join(presets.names(algorithm))}."
        field = _flag_field(name, metavar, text, None) if metavar else _switch(name, text)
        groups["Sources"].append(field)
    for name, doc in field_docs(type(defaults)).items():
        if name in _NO_FLAGS:
            continue
        hint, default = hints[name], getattr(defaults, name)
        if hint is bool:
            field = name, Annotated[bool, tyro.conf.arg(help=doc.text)], default
        else:
            several = typing.get_origin(hint) in (tuple, dict)
            field = _flag_field(name, _metavar(name, hint), doc.text, default, several=several)
        groups.setdefault(doc.group, []).append(field)
    container = dataclasses.make_dataclass(
        "TrainFlags",
        [
            (group.lower().replace(" ", "_"), dataclasses.make_dataclass(group, fields))
            for group, fields in groups.items()
        ],
    )
    origin = f"preset {preset.name} ({preset.source})" if preset else f"{algorithm}, no preset"
    parsed: Any = tyro.cli(
        container,
        prog=f"repertory train {algorithm}",
        description=f"Defaults shown: {origin}.",
        args=list(arguments),
        config=(tyro.conf.OmitArgPrefixes,),
    )
    given: dict[str, Any] = {name: getattr(defaults, name) for name in _NO_FLAGS}
    for group in vars(parsed).values():
        given |= vars(group)
    if isinstance(given["env_kwargs"], list):
        given["env_kwargs"] = _pairs(given["env_kwargs"])
    return given


def _flag_field(
    name: str, metavar: str, text: str, default: Any, *, several: bool = False
) -> tuple[str, Any, Any]:
    """A field for `dataclasses.make_dataclass` that tyro reads as words, without converting."""
    spec: PrimitiveConstructorSpec[Any] = PrimitiveConstructorSpec(
        nargs="*" if several else 1,
        metavar=metavar,
        instance_from_str=list if several else lambda words: words[0],
        is_instance=lambda _: True,
        str_from_instance=_shown,
    )
    # Where nothing is the default, the text says what that means; the environment has none.
    shown = "" if name == "env" or default is None or default == {} else None
    argument = tyro.conf.arg(help=text, help_behavior_hint=shown)
    return name, Annotated[Any, spec, argument], dataclasses.field(default_factory=lambda: default)


def _switch(name: str, text: str) -> tuple[str, Any, Any]:
    """A field for a flag without a value that is off unless given."""
    argument = tyro.conf.arg(help=text, help_behavior_hint="")
    return name, Annotated[bool, argument, tyro.conf.FlagCreatePairsOff], False


def _metavar(name: str, hint: Any) -> str:
    """What stands for the value of a flag in its help."""
    options = [o for o in typing.get_args(hint) if o is not type(None)]
    if name == "env":
        return "ID"
    if typing.get_origin(hint) is Literal:
        return "{" + ",".join(options) + "}"
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return _metavar(name, options[0])
    if typing.get_origin(hint) is tuple:
        return f"{_metavar(name, options[0])} ..."
    if typing.get_origin(hint) is dict:
        return "KEY=VALUE ..."
    return {int: "INT", float: "FLOAT", Path: "PATH", bool: "{true,false}"}.get(hint, "NAME")


def _shown(value: Any) -> list[str]:
    """A default as one would type it."""
    if isinstance(value, Mapping):
        return [f"{key}={item}" for key, item in value.items()]
    if isinstance(value, tuple):
        return [str(item) for item in value]
    return [str(value)]


def _pairs(words: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments from `key=value` words; a value is read as YAML."""
    pairs = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"env_kwargs takes key=value pairs, not {word!r}")
        pairs[key] = parse_value(value)
    return pairs
