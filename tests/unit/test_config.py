"""Settings: text and back, names that exist and names known from elsewhere, ranges."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from repertory.algorithms import ALGORITHMS
from repertory.algorithms.a3c import A3CConfig
from repertory.algorithms.batched_a2c import BatchedA2CConfig
from repertory.algorithms.impala import IMPALAConfig
from repertory.config import (
    ConfigError,
    RunConfig,
    field_docs,
    from_dict,
    from_yaml,
    parse_value,
    parse_yaml,
    to_dict,
    to_yaml,
    validate,
)
from repertory.synonyms import NAMES_ELSEWHERE, closest_hint, name_hint

CONFIG_CLASSES = [RunConfig, *(algorithm.config for algorithm in ALGORITHMS.values())]


def make_environment() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1")


@pytest.mark.parametrize("config_class", CONFIG_CLASSES)
def test_printed_defaults_parse_back_to_equality(config_class: type[RunConfig]) -> None:
    config = config_class(env="CartPole-v1")
    assert from_yaml(config_class, to_yaml(config)) == config
    assert from_dict(config_class, to_dict(config)) == config


def test_printed_values_of_every_kind_parse_back_to_equality() -> None:
    config = RunConfig(
        env="module.of.mine:Env-v0",
        env_kwargs={"gravity": 9.8, "sizes": [1, 2], "name": "yes", "deep": {"on": None}},
        protocol="dqn",
        max_episode_steps=7,
        stop_at_return=-200.0,
        hidden_sizes=(32, 16, 8),
        learning_rate=1e-7,
        clip_norm=None,
        normalize_advantages=True,
        run_dir=Path("some where/rün"),
    )
    assert from_yaml(RunConfig, to_yaml(config, "a2c")) == config


@given(
    learning_rate=st.floats(1e-30, 1e30),
    total_steps=st.integers(1, 2**62),
    text=st.text(st.characters(codec="utf-8"), max_size=200),
    sizes=st.lists(st.integers(1, 10**9), max_size=4),
)
def test_printed_random_values_parse_back_to_equality(
    learning_rate: float, total_steps: int, text: str, sizes: list[int]
) -> None:
    config = RunConfig(
        env="CartPole-v1",
        env_kwargs={"text": text},
        total_steps=total_steps,
        learning_rate=learning_rate,
        hidden_sizes=tuple(sizes),
    )
    assert from_yaml(RunConfig, to_yaml(config)) == config


def test_algorithm_stands_first_and_is_skipped_when_read() -> None:
    text = to_yaml(RunConfig(env="CartPole-v1"), "a2c")
    assert text.startswith("algorithm: a2c\n")
    assert parse_yaml(text)["algorithm"] == "a2c"
    assert from_yaml(RunConfig, text) == RunConfig(env="CartPole-v1")


def test_what_yaml_cannot_hold_is_shown() -> None:
    config = RunConfig(
        env=make_environment,
        env_kwargs={
            "size": (3, 4),
            "bound": np.float32(0.5),
            "space": gymnasium.spaces.Discrete(2),
        },
        run_dir=Path("runs/x"),
    )
    shown = to_dict(config)
    assert shown["env"] == f"{__name__}:make_environment"
    assert shown["env_kwargs"] == {"size": [3, 4], "bound": 0.5, "space": "Discrete(2)"}
    assert shown["run_dir"] == "runs/x"
    assert shown["clip_norm"] == 0.5
    assert parse_yaml(to_yaml(config))["env"] == f"{__name__}:make_environment"


def test_a_callable_environment_is_kept() -> None:
    assert from_dict(RunConfig, {"env": make_environment}).env is make_environment


@pytest.mark.parametrize(
    ("name", "given_value", "value"),
    [
        ("total_steps", "1e6", 1_000_000),
        ("total_steps", "10_000_000", 10_000_000),
        ("total_steps", "12345678901234567891", 12345678901234567891),
        ("total_steps", 2e5, 200_000),
        ("learning_rate", 1, 1.0),
        ("learning_rate", "7e-4", 7e-4),
        ("clip_norm", "none", None),
        ("clip_norm", None, None),
        ("core", "none", "none"),
        ("normalize_advantages", "true", True),
        ("hidden_sizes", ["1e2", 32], (100, 32)),
        ("hidden_sizes", [], ()),
        ("run_dir", "runs/x", Path("runs/x")),
    ],
)
def test_values_are_taken_as_text_too(name: str, given_value: object, value: object) -> None:
    taken = getattr(from_dict(RunConfig, {"env": "E", name: given_value}), name)
    assert taken == value
    assert type(taken) is type(value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"total_steps": 2.5}, "total_steps must be a whole number, not 2.5"),
        ({"total_steps": "2M"}, "total_steps must be a whole number, not '2M'"),
        ({"total_steps": "inf"}, "total_steps must be a whole number, not 'inf'"),
        ({"total_steps": True}, "total_steps must be a whole number, not True"),
        ({"total_steps": None}, "total_steps must be a whole number, not None"),
        ({"discount": "high"}, "discount must be a number, not 'high'"),
        ({"discount": True}, "discount must be a number, not True"),
        ({"normalize_advantages": 1}, "normalize_advantages must be true or false, not 1"),
        ({"protocol": 4}, "protocol must be text, not 4"),
        ({"run_dir": 4}, "run_dir must be a path, not 4"),
        ({"hidden_sizes": 64}, "hidden_sizes must be a list of whole numbers, not 64"),
        ({"hidden_sizes": "64"}, "hidden_sizes must be a list of whole numbers, not '64'"),
        ({"env_kwargs": [1]}, "env_kwargs must be a mapping of names to values, not [1]"),
        (
            {"optimizer": "rmsprob"},
            "optimizer must be one of rmsprop, adam, not 'rmsprob'; did you mean rmsprop?",
        ),
        ({"optimizer": 3}, "optimizer must be one of rmsprop, adam, not 3"),
        ({"discont": 1}, "unknown setting 'discont'; did you mean discount?"),
        ({"gamma": 1}, "unknown setting 'gamma'; it is called discount here"),
        ({"xyzzy": 1}, "unknown setting 'xyzzy'"),
        ({3: 1}, "unknown setting 3"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(settings: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(RunConfig, {"env": "E", **settings})
    assert str(caught.value) == message


def test_a_configuration_without_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="no environment given"):
        from_dict(RunConfig, {"seed": 1})


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2", "just words"])
def test_a_file_that_holds_no_settings_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="not a YAML file of settings") as caught:
        parse_yaml(text)
    assert "\n" not in str(caught.value)


def test_an_empty_file_holds_no_settings() -> None:
    assert parse_yaml("# nothing\n") == {}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e6", 1e6),
        ("7e-4", 7e-4),
        ("-2.5E+3", -2500.0),
        ("1_000", 1000),
        ("9.8", 9.8),
        ("[1, 2e3]", [1, 2000.0]),
        ("true", True),
        ("null", None),
        ("fast", "fast"),
        ("1e", "1e"),
        ("e6", "e6"),
        ("[", "["),
        ("", None),
    ],
)
def test_a_value_is_read_as_yaml_with_exponents(text: str, value: object) -> None:
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_yaml_cannot_make_objects() -> None:
    with pytest.raises(ConfigError, match="not a YAML file of settings"):
        parse_yaml("env: !!python/object/apply:os.getcwd []")


@pytest.mark.parametrize(
    ("elsewhere", "ours"),
    [
        ("gamma", "discount"),
        ("ent_coef", "entropy_cost"),
        ("n_steps", "unroll_length"),
        ("n-steps", "unroll_length"),
        ("vf_coef", "value_cost"),
        ("total_timesteps", "total_steps"),
        ("lr", "learning_rate"),
        ("max_grad_norm", "clip_norm"),
    ],
)
def test_names_known_from_elsewhere_lead_to_ours(elsewhere: str, ours: str) -> None:
    assert name_hint(elsewhere, field_docs(RunConfig)) == f"; it is called {ours} here"


def test_names_elsewhere_stand_for_settings_that_exist_and_for_one_each() -> None:
    ours = {name for config_class in CONFIG_CLASSES for name in field_docs(config_class)}
    assert set(NAMES_ELSEWHERE) <= ours
    others = [name for names in NAMES_ELSEWHERE.values() for name in names]
    assert len(others) == len(set(others))
    # What one algorithm has, another may know by another name; within one a name is one or other.
    for config_class in CONFIG_CLASSES:
        own = set(field_docs(config_class)) - {"tau"}  # A3C's own, and pytorch-a3c's lambda
        assert not own & {name for o in own for name in NAMES_ELSEWHERE.get(o, ())}, config_class


def test_a_name_whose_setting_this_algorithm_lacks_leads_nowhere() -> None:
    assert "gae_lambda" not in name_hint("tau", field_docs(RunConfig))
    assert name_hint("tau", ["gae_lambda"]) == "; it is called gae_lambda here"


def test_the_closest_name_is_found_whatever_its_case() -> None:
    assert closest_hint("cartpole-V1", ["CartPole-v1", "Acrobot-v1"]) == (
        "; did you mean CartPole-v1?"
    )
    assert closest_hint("zzz", ["CartPole-v1"]) == ""


@pytest.mark.parametrize("config_class", CONFIG_CLASSES)
def test_every_field_is_documented_and_has_a_group(config_class: type[RunConfig]) -> None:
    docs = field_docs(config_class)
    assert list(docs) == [field.name for field in dataclasses.fields(config_class)]
    assert all(doc.text and doc.group for doc in docs.values())
    assert docs["env"].group == "Environment"
    assert docs["discount"].group == "Learning"
    assert docs["run_dir"].group == "Files"


def test_fields_of_an_algorithm_have_a_group_of_their_own() -> None:
    assert field_docs(ALGORITHMS["a2c"].config)["gae_lambda"].group == "Algorithm"


@pytest.mark.parametrize("config_class", CONFIG_CLASSES)
def test_defaults_are_within_their_ranges(config_class: type[RunConfig]) -> None:
    validate(config_class(env="CartPole-v1"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"total_steps": 0}, "total_steps must be at least 1, not 0"),
        ({"max_episode_steps": 0}, "max_episode_steps must be at least 1, not 0"),
        ({"seed": -1}, "seed must be at least 0 and below 2,147,483,648, not -1"),
        ({"seed": 2**31}, "seed must be at least 0 and below 2,147,483,648, not 2147483648"),
        ({"stop_at_return": math.nan}, "stop_at_return must be finite, not nan"),
        ({"num_actors": 0}, "num_actors must be at least 1, not 0"),
        ({"num_envs": 0}, "num_envs must be at least 1, not 0"),
        ({"num_learners": 0}, "num_learners must be at least 1, not 0"),
        ({"actor_threads": 0}, "actor_threads must be at least 1, not 0"),
        ({"environment_threads": -1}, "environment_threads must be at least 0, not -1"),
        ({"role_timeout_seconds": 0.0}, "role_timeout_seconds must be above 0, not 0.0"),
        ({"hidden_sizes": (64, 0)}, "hidden_sizes must each be at least 1, not 0"),
        ({"unroll_length": 0}, "unroll_length must be at least 1, not 0"),
        ({"discount": 1.01}, "discount must be at least 0 and at most 1, not 1.01"),
        ({"discount": -0.1}, "discount must be at least 0 and at most 1, not -0.1"),
        ({"value_cost": -1.0}, "value_cost must be at least 0, not -1.0"),
        ({"entropy_cost": -1e-9}, "entropy_cost must be at least 0, not -1e-09"),
        ({"entropy_cost": math.inf}, "entropy_cost must be at least 0, not inf"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0, not 0.0"),
        ({"learning_rate_end": -1.0}, "learning_rate_end must be at least 0, not -1.0"),
        ({"rmsprop_decay": 1.0}, "rmsprop_decay must be at least 0 and below 1, not 1.0"),
        ({"epsilon": 0.0}, "epsilon must be above 0, not 0.0"),
        ({"clip_norm": 0.0}, "clip_norm must be above 0, not 0.0"),
        ({"gae_lambda": 1.5}, "gae_lambda must be at least 0 and at most 1, not 1.5"),
        ({"log_every_steps": 0}, "log_every_steps must be at least 1, not 0"),
        (
            {"num_learners": 3, "num_actors": 2},
            "num_learners must be at most num_actors (2), not 3: every learner needs an actor of "
            "its own",
        ),
    ],
)
def test_values_out_of_range_are_refused_in_one_line(
    settings: dict[str, Any], message: str
) -> None:
    config = ALGORITHMS["batched_a2c"].config(env="CartPole-v1", **settings)
    with pytest.raises(ConfigError) as caught:
        validate(config)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "settings",
    [
        {"discount": 0.0},
        {"discount": 1.0},
        {"seed": 0},
        {"seed": 2**31 - 1},
        {"value_cost": 0.0, "entropy_cost": 0.0},
        {"learning_rate_end": 0.0},
        {"clip_norm": None, "stop_at_return": -1e9},
        {"num_learners": 2, "num_actors": 2},
        {"hidden_sizes": ()},
    ],
)
def test_the_ends_of_a_range_belong_to_it(settings: dict[str, Any]) -> None:
    validate(ALGORITHMS["batched_a2c"].config(env="CartPole-v1", **settings))


def test_threads_are_shared_out_of_the_cores_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container with two of 64 cores had 32 emulator threads for each of two players."""
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert RunConfig(env="CartPole-v1").threads_per_player == 2


ONE_TICK: dict[str, Any] = {
    "env": "CartPole-v1",
    "normalize_advantages": True,
    "num_envs": 1,
    "unroll_length": 1,
}


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(**ONE_TICK),
        A3CConfig(**ONE_TICK, num_workers=2),  # each worker's gradient is its own
        IMPALAConfig(**ONE_TICK, num_actors=4, batch_trajectories=1),
    ],
)
def test_one_transition_cannot_be_normalised(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match="a single one becomes 0"):
        validate(config)


@pytest.mark.parametrize(
    "config",
    [
        BatchedA2CConfig(**ONE_TICK, num_actors=2),
        IMPALAConfig(**ONE_TICK, num_actors=1, batch_trajectories=2),
        IMPALAConfig(**ONE_TICK, num_actors=2, num_learners=2),
    ],
)
def test_several_transitions_are_normalised_together(config: RunConfig) -> None:
    validate(config)


@pytest.mark.parametrize("settings", [{"device": "cuda"}, {"learner_gpus": 1.0}])
def test_workers_on_a_cluster_have_no_gpus(settings: dict[str, Any]) -> None:
    """They were hidden from every worker, which failed long after the start."""
    config = A3CConfig(env="CartPole-v1", runtime="ray", **settings)
    with pytest.raises(ConfigError, match="workers of a3c are on CPUs"):
        validate(config)


@pytest.mark.parametrize("settings", [{}, {"replay_share": 0.5, "num_learners": 2}])
def test_replay_is_kept_of_one_learner_that_has_one(settings: dict[str, Any]) -> None:
    config = IMPALAConfig(env="CartPole-v1", checkpoint_replay=True, **settings)
    with pytest.raises(ConfigError, match="checkpoint_replay is of one learner"):
        validate(config)
