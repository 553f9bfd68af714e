"""`make train` and `make test`: what they would do, as make itself says."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from repertory.commands.arguments import parse_train
from tests.architecture.source import REPOSITORY

STAMPS = [".training-ready", ".tests-ready"]


def make(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run make in the checkout, as a person at a shell would."""
    shell_only = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *arguments],
        cwd=REPOSITORY,
        env={**shell_only, "ENV": "/etc/shrc"},
        text=True,
        capture_output=True,
        timeout=30,
        check=check,
    )


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A folder that make takes for an environment which it has set up."""
    (tmp_path / "pyvenv.cfg").touch()
    for stamp in STAMPS:
        (tmp_path / stamp).touch()
    return tmp_path


@pytest.mark.parametrize("env", ["ALE/Pong-v5", "ALE/Breakout-v5", "CartPole-v1", "Acrobot-v1"])
@pytest.mark.parametrize("algorithm", ["a2c", "batched_a2c"])
def test_whatever_is_trained_on_many_cores_the_command_is_accepted(
    env: str, algorithm: str, environment: Path
) -> None:
    variables = (f"VENV={environment}", f"ENV={env}", f"ALGORITHM={algorithm}", "LEARNERS=4")
    command = make("--dry-run", "train", *variables).stdout.replace("\\\n", " ")
    words = command[command.index("repertory train ") :].split()[2:]
    assert parse_train(words).algorithm == algorithm


@pytest.mark.parametrize("target", ["train", "test", "check", "nightly"])
def test_second_call_installs_nothing(target: str, environment: Path) -> None:
    assert "pip install" not in make("--dry-run", target, f"VENV={environment}").stdout


@pytest.mark.parametrize("target", ["train", "test"])
@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed(target: str, changed: str, environment: Path) -> None:
    before = (REPOSITORY / changed).stat().st_mtime - 60
    for path in environment.iterdir():
        os.utime(path, (before, before))
    commands = make("--dry-run", target, f"VENV={environment}").stdout
    assert "pip install" in commands
    assert "-m venv" not in commands


@pytest.mark.parametrize(("target", "extra"), [("train", ".[atari]"), ("test", ".[dev]")])
def test_first_call_makes_the_environment_and_installs_torch_first(
    target: str, extra: str, tmp_path: Path
) -> None:
    commands = make("--dry-run", target, f"VENV={tmp_path / 'new'}").stdout
    steps = ["-m venv", "--constraint constraints.txt torch\n", f"--editable '{extra}'"]
    positions = [commands.find(step) for step in steps]
    assert -1 not in positions
    assert positions == sorted(positions)


def test_training_plays_pong_by_default(environment: Path) -> None:
    command = " ".join(make("--dry-run", "train", f"VENV={environment}").stdout.split())
    assert "train batched_a2c --env ALE/Pong-v5 " in command
    assert "--protocol dqn " in command
    assert "--stop-at-return 18 " in command
    assert "--max-minutes 30" in command


def test_training_takes_environment_algorithm_and_minutes(environment: Path) -> None:
    wanted = ["ENV=CartPole-v1", "ALGORITHM=a2c", "MINUTES=1", "FLAGS=--num-envs 4"]
    command = " ".join(make("--dry-run", "train", f"VENV={environment}", *wanted).stdout.split())
    assert "train a2c --env CartPole-v1 " in command
    assert command.endswith("--max-minutes 1 --num-envs 4")
    assert "--protocol" not in command
    assert "--stop-at-return" not in command


@pytest.mark.parametrize("python", ["", "no-such-python"])
def test_unsuitable_python_is_refused_in_one_line(python: str, tmp_path: Path) -> None:
    refused = make("train", f"VENV={tmp_path / 'new'}", f"PYTHON={python}", check=False)
    assert refused.returncode != 0
    [line] = [line for line in refused.stderr.splitlines() if not line.startswith("make")]
    assert "Python 3.11 or later" in line
    assert not (tmp_path / "new").exists()


def test_python_is_found(tmp_path: Path) -> None:
    commands = make("--dry-run", "train", f"VENV={tmp_path / 'new'}").stdout
    [line] = [line for line in commands.splitlines() if "-m venv" in line]
    assert shutil.which(line.split('"')[1])


def test_unknown_extent_of_a_check_is_refused() -> None:
    refused = subprocess.run(
        ["bash", "scripts/check", "everything"],
        cwd=REPOSITORY,
        text=True,
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert refused.returncode == 2
    assert "everything" in refused.stderr
