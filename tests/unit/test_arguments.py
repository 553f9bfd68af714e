"""The command line of `train`, as far as settings: order of layers, flags, seeds, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from repertory.algorithms import ALGORITHMS
from repertory.commands.arguments import parse_seeds, parse_train
from repertory.config import ConfigError, RunConfig, from_dict, parse_yaml, to_yaml, validate
from repertory.presets import PRESETS, by_name, for_environment


def only(*words: str) -> RunConfig:
    """The configuration of a command line that asks for one run."""
    (config,) = parse_train(words).configs
    return config


def test_defaults_are_the_algorithms_own_where_no_preset_applies() -> None:
    parsed = parse_train(["a2c", "--env", "Acrobot-v1"])
    assert parsed.preset is None
    assert parsed.algorithm == "a2c"
    assert parsed.configs == (ALGORITHMS["a2c"].config(env="Acrobot-v1", runtime="processes"),)


def test_the_environments_own_preset_applies_and_is_named() -> None:
    parsed = parse_train(["batched_a2c", "--env", "MinAtar/Breakout-v1"])
    assert parsed.preset == by_name("batched_a2c", "minatar")
    assert parsed.configs[0].network == "minatar"


def test_layers_lie_over_each_other_in_order(tmp_path: Path) -> None:
    preset = by_name("a2c", "cartpole").settings
    file = tmp_path / "settings.yaml"
    file.write_text("unroll_length: 9\nlearning_rate: 3e-4\n")
    words = ["a2c", "--env", "CartPole-v1", "--config", str(file), "--learning-rate", "1e-5"]
    config = only(*words)
    assert config.learning_rate == 1e-5  # flag over file
    assert config.unroll_length == 9  # file over preset
    assert config.total_steps == preset["total_steps"] != RunConfig(env="E").total_steps
    assert config.core_size == RunConfig(env="E").core_size


def test_preset_by_name_and_none() -> None:
    assert parse_train(["a2c", "--env", "Acrobot-v1", "--preset", "cartpole"]).preset == by_name(
        "a2c", "cartpole"
    )
    assert only("a2c", "--env", "CartPole-v1", "--preset=none") == ALGORITHMS["a2c"].config(
        env="CartPole-v1", runtime="processes"
    )


def test_the_file_may_name_the_environment_and_decide_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("env: CartPole-v1\n")
    parsed = parse_train(["a2c", "--config", str(file)])
    assert parsed.preset == by_name("a2c", "cartpole")
    assert parsed.configs[0].env == "CartPole-v1"


def test_printed_settings_are_a_file_of_the_same_settings(tmp_path: Path) -> None:
    words = ["a2c", "--env", "CartPole-v1", "--seed", "7", "--env-kwargs", "a=1", "b=x"]
    config = only(*words)
    file = tmp_path / "settings.yaml"
    file.write_text(to_yaml(config, "a2c"))
    assert only("a2c", "--config", str(file)) == config


def test_a_setting_without_effect_may_stand_in_a_preset_or_a_file(tmp_path: Path) -> None:
    """So that a flag can switch off what they switch on, as here the replay."""
    file = tmp_path / "settings.yaml"
    file.write_text("replay_share: 0.5\nreplay_capacity: 9\n")
    words = ["impala", "--env", "E", "--config", str(file)]
    assert parse_train([*words, "--replay-share", "0"]).configs[0].replay_share == 0  # type: ignore[attr-defined]
    assert parse_train([*words, "--replay-capacity", "7"]).configs[0].replay_capacity == 7  # type: ignore[attr-defined]


def test_a_file_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    for text in ("env: [", "just words"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"settings\.yaml is not a YAML file of settings"):
            parse_train(["a2c", "--config", str(file)])


def test_a_file_of_another_algorithm_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("algorithm: batched_a2c\nenv: CartPole-v1\n")
    with pytest.raises(ConfigError, match="holds settings of batched_a2c, not of a2c"):
        parse_train(["a2c", "--config", str(file)])


@pytest.mark.parametrize("spelling", ["--total-steps", "--total_steps"])
@pytest.mark.parametrize(
    ("text", "value"), [("1e6", 1_000_000), ("10_000_000", 10_000_000), ("5", 5)]
)
def test_counts_and_both_spellings(spelling: str, text: str, value: int) -> None:
    assert only("a2c", "--env", "CartPole-v1", spelling, text).total_steps == value
    assert only("a2c", "--env", "CartPole-v1", f"{spelling}={text}").total_steps == value


def test_an_algorithms_name_may_have_a_hyphen() -> None:
    assert parse_train(["batched-a2c", "--env", "CartPole-v1"]).algorithm == "batched_a2c"


def test_values_of_every_kind() -> None:
    config = only(
        *(
            "a2c",
            "--env",
            "CartPole-v1",
            "--stop-at-return",
            "-200.5",
            "--hidden-sizes",
            "32",
            "16",
        ),
        *("--clip-norm", "none", "--epsilon-inside-root", "--core", "gru", "--run-dir", "a b"),
        *("--env-kwargs", "gravity=1e-3", "name=x=y", "sizes=[1, 2]", "empty="),
    )
    assert config.stop_at_return == -200.5
    assert config.hidden_sizes == (32, 16)
    assert config.clip_norm is None
    assert config.epsilon_inside_root is True
    assert config.core == "gru"
    assert config.run_dir == Path("a b")
    assert config.env_kwargs == {"gravity": 1e-3, "name": "x=y", "sizes": [1, 2], "empty": None}


def test_a_flag_that_is_on_can_be_switched_off() -> None:
    words = ["a2c", "--env", "Acrobot-v1", "--epsilon-inside-root"]
    assert only(*words).epsilon_inside_root is True
    assert only(*words, "--no-epsilon-inside-root").epsilon_inside_root is False


def test_the_last_of_repeated_flags_counts() -> None:
    config = only("a2c", "--env", "Acrobot-v1", "--seed", "3", "--seed", "4", "--env=CartPole-v1")
    assert (config.seed, config.env) == (4, "CartPole-v1")
    assert config.total_steps == by_name("a2c", "cartpole").settings["total_steps"]


@pytest.mark.parametrize(
    ("text", "seeds"), [("1..5", [1, 2, 3, 4, 5]), ("7", [7]), ("3,1,2", [3, 1, 2]), ("4..4", [4])]
)
def test_seeds(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds
    configs = parse_train(["a2c", "--env", "CartPole-v1", "--seeds", text]).configs
    assert [config.seed for config in configs] == seeds


@pytest.mark.parametrize("text", ["", "1..", "a", "1;2", "5..1", "1,1", "-1..2", "1,,2", "1...3"])
def test_wrong_seeds_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="seeds must"):
        parse_seeds(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "train which algorithm? One of a2c, batched_a2c"),
        (["a2d", "--env", "E"], "unknown algorithm 'a2d'; did you mean a2c? (known: "),
        (["a2c"], "no environment given: --env names one, such as --env CartPole-v1"),
        (["a2c", "CartPole-v1"], "unexpected 'CartPole-v1'; did you mean --env CartPole-v1?"),
        (["a2c", "--gamma", "1"], "unknown flag --gamma; it is called --discount here"),
        (["a2c", "--n_steps=5"], "unknown flag --n_steps; it is called --unroll-length here"),
        (["a2c", "--total-step", "1"], "unknown flag --total-step; did you mean --total-steps?"),
        (["a2c", "--no-discount"], "unknown flag --no-discount; did you mean --discount?"),
        (["a2c", "--sync", "step"], "unknown flag --sync"),
        (["a2c", "--env", "E", "--preset", "cartpol"], "a2c has no preset 'cartpol'; did you mean"),
        (["a2c", "--env", "E", "--config", "no.yaml"], "cannot read the settings in no.yaml: "),
        (["a2c", "--env", "E", "--total-steps", "2M"], "total_steps must be a whole number"),
        (["a2c", "--env", "E", "--optimizer", "adm"], "did you mean adam?"),
        (["a2c", "--env", "E", "--discount", "1.5"], "discount must be at least 0 and at most 1"),
        (["a2c", "--env", "E", "--env-kwargs", "a"], "env_kwargs takes key=value pairs, not 'a'"),
        (["a2c", "--env", "E", "--env-kwargs", "=1"], "env_kwargs takes key=value pairs"),
        (["a2c", "--env", "E", "--seed", "1", "--seeds", "1..2"], "give either --seed or --seeds"),
        (["a2c", "--env", "E", "--seeds", "1..2", "--run-dir", "x"], "leave it out with --seeds"),
        (["a2c", "--env", "E", "--seeds", "2147483648"], "seed must be at least 0 and below"),
        (["a2c", "--env", "E", "--core-size", "9"], "--core-size has no effect while core is none"),
        (["a2c", "--env", "E", "--actor-cpus=2"], "no effect while runtime is processes"),
        (["a2c", "--env", "E", "--optimizer=adam", "--rmsprop-decay=.9"], "optimizer is adam"),
        (["impala", "--env", "E", "--clip-range=0.1"], "while surrogate is gradient"),
        (["impala", "--env", "E", "--replay_capacity=9"], "no effect while replay_share is 0.0"),
        (["impala", "--env", "E", "--queue-capacity", "5000"], "at most 4,096 unrolls of an actor"),
        (["impala", "--env", "E", "--batch-trajectories", "1e6"], "at most 4,096 unrolls"),
    ],
)
def test_wrong_use_is_refused_in_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_train(words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("words", [["--env"], ["--env", "E", "stray"], ["--env", "E", "--seed"]])
def test_a_flag_without_value_and_a_stray_word_end_with_code_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, ConfigError)) as caught:
        parse_train(["a2c", *words])
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == 2
        assert "For full helptext" in capsys.readouterr().err


def test_help_shows_every_flag_under_its_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as caught:
        parse_train(["a2c", "--env", "CartPole-v1", "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for flag in ("--total-steps", "--preset", "--print-config", "--gae-lambda", "--run-dir"):
        assert flag in shown
    places = [
        shown.index(f" {group} options ")
        for group in ("sources", "environment", "extent", "who-and-where", "model", "learning")
    ]
    assert places == sorted(places)
    assert (
        shown.index("environment options") < shown.index("--env-kwargs") < shown.index(" extent ")
    )
    assert "preset cartpole" in shown
    assert "(default: 500000)" in shown


def test_help_without_algorithm_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_train(["--help"])
    assert caught.value.code == 0
    assert "usage: repertory train {a2c|batched_a2c" in capsys.readouterr().out


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: f"{preset.algorithm}-{preset.name}")
def test_presets_hold_settings_that_exist_and_may_be_used(preset: object) -> None:
    (found,) = [each for each in PRESETS if each is preset]
    config = from_dict(ALGORITHMS[found.algorithm].config, {"env": "CartPole-v1", **found.settings})
    validate(config)
    assert found.source


def test_no_preset_changes_what_an_agent_is_judged_by() -> None:
    for preset in PRESETS:
        assert not {"env", "protocol", "seed", "max_episode_steps", "env_kwargs"} & set(
            preset.settings
        )


def test_preset_names_are_unique_for_an_algorithm() -> None:
    names = [(preset.algorithm, preset.name) for preset in PRESETS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("algorithm", ["a2c", "batched_a2c"])
@pytest.mark.parametrize(
    ("env", "name"),
    [
        ("CartPole-v1", "cartpole"),
        ("LunarLander-v3", "lunarlander"),
        ("MinAtar/SpaceInvaders-v0", "minatar"),
        ("ALE/Pong-v5", "pong"),
        ("PongNoFrameskip-v4", "pong"),
        ("ALE/Breakout-v5", "atari"),
        ("BreakoutNoFrameskip-v4", "atari"),
    ],
)
def test_the_preset_of_an_environment(algorithm: str, env: str, name: str) -> None:
    assert for_environment(algorithm, env) == by_name(algorithm, name)


def test_environments_without_preset_have_none() -> None:
    assert for_environment("a2c", "Acrobot-v1") is None
    assert for_environment("a2c", "cartpole-v1") is None


def test_print_config_is_only_a_switch() -> None:
    assert parse_train(["a2c", "--env", "CartPole-v1", "--print-config"]).print_config is True
    assert parse_train(["a2c", "--env", "CartPole-v1"]).print_config is False
    assert "print_config" not in parse_yaml(to_yaml(only("a2c", "--env", "CartPole-v1")))
