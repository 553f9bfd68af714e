"""What a user is told of a name, an argument or a package that will not do: one line, with help."""

import subprocess
import sys

import gymnasium
import pytest

from repertory.environments import EnvironmentConfig, EnvironmentRefused, describe, make_vector
from repertory.environments.names import closest
from tests.probes import Counter


def refusal(env_id, **settings):
    with pytest.raises(EnvironmentRefused) as caught:
        describe(EnvironmentConfig(env_id, **settings))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("env_id", "meant"),
    [
        ("CartPole-v11", "CartPole-v1"),
        ("Cartpol-v1", "CartPole-v1"),
        ("cartpole-v1", "CartPole-v1"),
        ("CartPole", "CartPole-v1"),
        ("CartPole-v9", "CartPole-v1"),
        ("repertory/Bandits-v0", "repertory/Bandit-v0"),
        ("Repertory/bandit-v0", "repertory/Bandit-v0"),
        ("repertory.environments.toy:Cach-v0", "repertory.environments.toy:repertory/Catch-v0"),
    ],
)
def test_an_unknown_id_is_answered_with_the_closest(env_id, meant):
    message = refusal(env_id)
    assert message == f"no environment is called {env_id!r}; did you mean {meant}?"


def test_a_class_that_is_not_registered_says_what_to_do():
    message = refusal("tests.probes:Counter")
    assert message == (
        "tests.probes:Counter is a class or a function, and no id that is registered with "
        "Gymnasium: register it, or hand it over from Python, env=Counter"
    )


@pytest.mark.atari
@pytest.mark.parametrize(
    ("env_id", "meant"),
    [
        ("ALE/Pongg-v5", "ALE/Pong-v5"),
        ("ale/pong-v5", "ALE/Pong-v5"),
        ("ALE/Pong-v4", "ALE/Pong-v5"),
        ("ALE/pacman-v5", "ALE/Pacman-v5"),
        ("Pong-v5", "ALE/Pong-v5"),
        ("PonggNoFrameskip-v4", "PongNoFrameskip-v4"),
    ],
)
def test_an_unknown_game_is_answered_with_the_closest(env_id, meant):
    message = refusal(env_id)
    assert message == f"no environment is called {env_id!r}; did you mean {meant}?"


def test_nothing_is_suggested_where_nothing_is_near():
    assert refusal("Xyzzyplugh-v3") == "no environment is called 'Xyzzyplugh-v3'"


@pytest.mark.parametrize("env_id", ["bad id!", "", "a:b:c", ":", "/"])
def test_malformed_ids_are_refused_like_any_other(env_id):
    assert env_id in refusal(env_id)


def test_the_closest_name_wins_over_one_of_another_namespace():
    names = ["ALE/Breakout-v5", "MinAtar/Breakout-v1", "BreakoutNoFrameskip-v4"]
    assert closest("MinAtar/Brakout-v1", names) == "MinAtar/Breakout-v1"
    assert closest("ALE/Brakout-v5", names) == "ALE/Breakout-v5"


def test_a_module_that_cannot_be_imported_is_named():
    assert refusal("nowhere:Env-v0") == (
        "nowhere:Env-v0: cannot import nowhere: ModuleNotFoundError: No module named 'nowhere'"
    )


def test_ids_of_a_module_are_found():
    spec = describe(EnvironmentConfig("repertory.environments.toy:Bandit-v0"))
    assert spec.name == "repertory.environments.toy:Bandit-v0"


def test_an_unknown_argument_is_answered_with_the_closest():
    message = refusal("CartPole-v1", kwargs={"sutton_barto": True})
    assert message == (
        "CartPole-v1 takes no argument 'sutton_barto'; did you mean sutton_barto_reward?"
    )
    message = refusal(Counter, kwargs={"x": 1})
    assert message == "tests.probes:Counter takes no argument 'x'; it takes length, end"


def test_known_arguments_reach_the_constructor():
    vector = make_vector(EnvironmentConfig(Counter, {"length": 2}), [0])
    vector.reset()
    ends = [vector.step([0]).terminated[0] for _ in range(2)]
    assert ends == [False, True]
    vector.close()


def test_an_exception_of_the_constructor_is_one_line():
    def broken():
        raise OSError("the level file is missing\nand more\nlines")

    message = refusal(broken)
    assert message.endswith("broken cannot be made: OSError: the level file is missing")


def test_what_is_no_environment_is_refused():
    assert "returned dict, which is no gymnasium.Env" in refusal(dict)


def test_protocols_are_for_games():
    assert refusal("CartPole-v1", protocol="dqn") == (
        "CartPole-v1 has no protocol 'dqn': only Atari games have protocols"
    )


@pytest.mark.parametrize(
    "env_id", ["CartPole-v1", pytest.param("ALE/Pong-v5", marks=pytest.mark.atari)]
)
def test_a_time_limit_has_to_be_positive(env_id):
    assert refusal(env_id, max_episode_steps=0) == "max_episode_steps has to be positive, not 0"


def test_an_id_registered_by_hand_is_used():
    gymnasium.register("TestCounter-v0", entry_point=Counter)
    try:
        assert describe(EnvironmentConfig("TestCounter-v0")).name == "TestCounter-v0"
    finally:
        del gymnasium.registry["TestCounter-v0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_id", "module", "package", "extra"),
    [
        ("ALE/Pong-v5", "ale_py", "ale-py", "atari"),
        ("PongNoFrameskip-v4", "ale_py", "ale-py", "atari"),
        ("MinAtar/Breakout-v1", "minatar", "MinAtar", "minatar"),
        ("LunarLander-v3", "Box2D", "Box2D", "box2d"),
    ],
)
def test_a_missing_package_is_answered_with_the_extra(env_id, module, package, extra):
    # In a process of its own, where the package has not been imported before.
    program = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from repertory.environments import *\n"
        f"try: describe(EnvironmentConfig({env_id!r}))\n"
        "except EnvironmentRefused as refusal: print(refusal)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert result.stdout == (
        f'{env_id} needs {package}, which is not installed: pip install "repertory[{extra}]"\n'
    ), result.stderr


@pytest.mark.slow
def test_without_the_emulator_other_ids_are_still_answered():
    program = (
        "import sys; sys.modules['ale_py'] = None\n"
        "from repertory.environments import *\n"
        "print(describe(EnvironmentConfig('CartPole-v1')).name)\n"
        "try: describe(EnvironmentConfig('Pong-v4'))\n"
        "except EnvironmentRefused as refusal: print(refusal)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert result.stdout.splitlines()[0] == "CartPole-v1", result.stderr
    assert result.stdout.splitlines()[1].startswith("no environment is called 'Pong-v4'")
