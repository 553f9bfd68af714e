"""The commands as a person meets them: words in, lines and an exit code out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import psutil
import pytest
import yaml

from repertory.algorithms import ALGORITHMS
from repertory.checkpoints import latest, load
from repertory.commands import COMMANDS, main
from repertory.config import from_yaml
from tests.commands.runs import Endless, Result, make_run
from tests.leftovers import Leftovers
from tests.programs import run_program


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command starts in a folder with nothing in it."""
    monkeypatch.chdir(tmp_path)


class Broken(Endless):
    """Raises at the third env step."""

    def reset(self, **settings: Any) -> Any:
        self._steps = 0
        return super().reset(**settings)

    def step(self, action: Any) -> Result:
        self._steps += 1
        if self._steps == 3:
            raise RuntimeError("the emulator\nis on fire")
        return super().step(action)


gymnasium.register(id="Broken-v0", entry_point=Broken)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    captured = capsys.readouterr()
    assert all(name in captured.out for name in COMMANDS)
    assert captured.err == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("repertory ")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"usage: repertory {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian a2c", "unknown command 'trian'; did you mean train? (known: "),
        ("--verison", "unknown command '--verison'"),
        ("train", "train which algorithm?"),
        ("train a2d --env CartPole-v1", "did you mean a2c?"),
        ("train a2c", "no environment given"),
        ("train a2c --env CartPol-v1", "did you mean CartPole-v1?"),
        ("train a2c --env CartPole-v1 --gamma 1", "it is called --discount here"),
        ("train a2c --env CartPole-v1 --total-steps 1.5", "must be a whole number"),
        ("train a2c --env CartPole-v1 --total-steps 0", "must be at least 1"),
        ("train a2c --env CartPole-v1 --core lstn", "did you mean lstm?"),
        ("train a2c --env CartPole-v1 --env-kwargs colour=red", "colour"),
        ("train a2c --env CartPole-v1 --init-from no.pt", "init_from: there is no no.pt"),
        ("train a2c --env CartPol-v1 --print-config", "did you mean CartPole-v1?"),
        ("eval nowhere", "there is no run and no checkpoint nowhere"),
        ("eval .", "holds no checkpoint"),
    ],
)
def test_wrong_use_gets_one_line_and_code_2_before_anything_starts(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("repertory: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("words", ["eval x --episode 3", "eval", "eval x --episodes many"])
def test_wrong_flags_of_eval_get_code_2(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert "repertory eval --help" in capsys.readouterr().err


def test_numbers_that_no_evaluation_can_use_get_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("run"), "CartPole-v1")
    assert main(["eval", "run", "--episodes", "0"]) == 2
    assert capsys.readouterr().err == "repertory: episodes must be at least 1, not 0\n"


def test_printed_settings_can_be_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "a2c", "--env", "CartPole-v1", "--seed", "5", "--print-config"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# preset cartpole: ")
    assert yaml.safe_load(printed)["algorithm"] == "a2c"
    assert from_yaml(ALGORITHMS["a2c"].config, printed).seed == 5
    Path("settings.yaml").write_text(printed)
    assert main(["train", "a2c", "--config", "settings.yaml", "--print-config"]) == 0
    assert capsys.readouterr().out == printed
    assert [path.name for path in Path().iterdir()] == ["settings.yaml"]


def test_help_and_wrong_words_do_not_wait_for_torch() -> None:
    program = (
        "import sys; from repertory.commands import main\n"
        "assert [main([word]) for word in ('--help', '--version', 'trian')] == [0, 0, 2]\n"
        "assert main(['eval', 'nowhere']) == 2\n"
        "heavy = {'torch', 'gymnasium.envs', 'tensorboard', 'rich'} & set(sys.modules)\n"
        "assert 'torch' not in heavy and 'tensorboard' not in heavy, heavy"
    )
    finished = run_program("-c", program)
    assert finished.returncode == 0, finished.stderr


def test_python_m_repertory_is_repertory() -> None:
    finished = run_program("-m", "repertory", "trian")
    assert finished.returncode == 2
    assert finished.stderr.startswith("repertory: unknown command 'trian'")


def test_whoever_stops_reading_gets_no_traceback() -> None:
    finished = run_program(
        "-c",
        "import os, sys; from repertory.commands import main\n"
        "reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1)\n"
        "sys.exit(main(['train', 'a2c', '--help']))",
    )
    assert finished.returncode == 1
    assert finished.stderr == ""


def test_train_then_eval(capsys: pytest.CaptureFixture[str]) -> None:
    words = "train a2c --env repertory/Bandit-v0 --runtime inline --total-steps 400 --run-dir run"
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("a2c on repertory/Bandit-v0 (protocol default), preset none, ")
    assert printed.rstrip().endswith("to evaluate it: repertory eval run")
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert records[0]["event"] == "start"
    assert records[-1]["kind"] == "end"
    steps = load(latest(Path("run")))["env_steps"]
    assert records[-1]["env_steps"] == steps >= 400
    assert {path.name for path in Path("run").iterdir()} >= {
        *("config.yaml", "command.txt", "meta.json", "metrics.jsonl", "tb", "checkpoints", "eval"),
    }

    assert main(["eval", "run", "--episodes", "6"]) == 0
    header, checkpoint, returns, lengths, written = capsys.readouterr().out.splitlines()
    assert header == (
        "a2c on repertory/Bandit-v0 (protocol default), stochastic actions, 6 episodes"
    )
    assert checkpoint == (
        f"checkpoint run/checkpoints/step_{steps:012d}.pt, after {steps:,} env steps"
    )
    assert returns.split()[0::2][:1] == ["return"]
    assert lengths == "length  mean 1.0 env steps"
    file = Path(written.removeprefix("written to "))
    assert file == Path(f"run/eval/step_{steps:012d}_stochastic_6.json")
    record = json.loads(file.read_text())
    assert record["kind"] == "eval"
    assert len(record["episode_returns"]) == 6
    assert record["checkpoint"] == f"step_{steps:012d}.pt"
    assert record.keys() >= {"command", "versions", "git", "machine"}
    assert returns == (
        f"return  mean {record['episode_return_mean']:.2f}  std {record['episode_return_std']:.2f}"
        f"  min {record['episode_return_min']:.2f}  max {record['episode_return_max']:.2f}"
    )


def test_a_second_run_into_the_same_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("run"), "CartPole-v1")
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    words = "train a2c --env CartPole-v1 --runtime inline --total-steps 10 --run-dir run"
    assert main(words.split()) == 2
    assert "already holds files" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")} == before


def test_several_seeds_are_several_runs() -> None:
    words = "train a2c --env repertory/Bandit-v0 --runtime inline --total-steps 50 --seeds 3,1"
    assert main(words.split()) == 0
    runs = sorted(Path("runs").iterdir())
    assert [path.name.split("__")[:3] for path in runs] == [
        ["repertory_Bandit-v0", "a2c", "1"],
        ["repertory_Bandit-v0", "a2c", "3"],
    ]
    assert [yaml.safe_load((run / "config.yaml").read_text())["seed"] for run in runs] == [1, 3]


def test_a_failed_run_gets_code_1_with_the_cause_last(capsys: pytest.CaptureFixture[str]) -> None:
    words = "train a2c --runtime inline --run-dir run --env"
    assert main([*words.split(), "tests.commands.test_main:Broken-v0"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("repertory: ")
    assert "the emulator is on fire" in last
    assert "Broken-v0" in last


def test_evaluation_never_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """Games that nothing ends are cut, said to be cut, and no failure.

    Source: hill-a/stable-baselines#876; muupan/async-rl#5; takuseno/d3rlpy#209.
    """
    make_run(Path("run"), "tests.commands.runs:Endless-v0")
    words = ["eval", "run", "--episodes", "2", "--max-episode-steps", "30", "--greedy"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "2 of 2 episodes truncated by eval limit (30 env steps)" in printed
    assert "mean 30.0 env steps" in printed


def test_eval_and_watch_disagree(capsys: pytest.CaptureFixture[str]) -> None:
    """Which actions were played stands in the header, and drawn ones are the default.

    Source: hill-a/stable-baselines#832.
    """
    make_run(Path("run"), "tests.commands.runs:TwoArms-v0", chances=[0.6, 0.4])
    assert main(["eval", "run", "--episodes", "300"]) == 0
    drawn = capsys.readouterr().out
    assert "stochastic actions" in drawn.splitlines()[0]
    record = json.loads(next(Path("run/eval").glob("*_stochastic_300.json")).read_text())
    assert 0.45 < record["episode_return_mean"] < 0.75
    assert main(["eval", "run", "--episodes", "300", "--greedy"]) == 0
    assert "greedy actions" in capsys.readouterr().out.splitlines()[0]
    record = json.loads(next(Path("run/eval").glob("*_greedy_300.json")).read_text())
    assert record["episode_return_mean"] == 1.0


def test_a_checkpoint_outside_a_run_is_evaluated_without_a_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_run(Path("run"), "CartPole-v1")
    latest(Path("run")).rename("mine.pt")
    assert main(["eval", "mine.pt", "--episodes", "2"]) == 0
    assert "written to" not in capsys.readouterr().out
    assert list(Path("run/eval").iterdir()) == []


def test_a_damaged_checkpoint_gets_one_line_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.pt").write_bytes(b"not a checkpoint")
    assert main(["eval", "mine.pt"]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("repertory: mine.pt ")


@pytest.mark.skipif(os.name != "posix", reason="signals are sent as POSIX has them")
@pytest.mark.parametrize("runtime", ["inline", "processes"])
@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("INT to the group", 130),
        ("INT to the parent", 130),
        ("INT twice", 130),
        ("INT while it saves", 130),
        ("TERM to the group", 143),
        ("TERM to the parent", 143),
    ],
)
def test_b76_a_signal_ends_a_run_with_a_checkpoint_and_the_code_of_shells(
    how: str, code: int, runtime: str
) -> None:
    """Ctrl-C: stack traces of all, sleeping children left behind.

    Source: openai/gym#1543, #1544; rlworkgroup/garage#120; germain-hug/Deep-RL-Keras#9;
    ray-project/ray#3187.
    """
    before = Leftovers.now()
    algorithm = "a2c" if runtime == "inline" else "a3c"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "repertory", "train", algorithm, "--env", "CartPole-v1"),
            *("--total-steps", "1e8", "--runtime", runtime, "--run-dir", "run"),
            *("--log-every-steps", "500", "--checkpoint-steps"),
            "500" if how == "INT while it saves" else "1e8",  # then it does little else
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        metrics = Path("run/metrics.jsonl")
        deadline = time.monotonic() + 40
        while not (metrics.exists() and '"progress"' in metrics.read_text()):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        number = signal.SIGTERM if how.startswith("TERM") else signal.SIGINT
        send = os.killpg if how.endswith("group") else os.kill
        send(process.pid, number)
        if how.endswith("twice"):
            time.sleep(0.2)
            os.kill(process.pid, number)
        printed, errors = process.communicate(timeout=10)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == code, errors
    assert len(errors.splitlines()) <= 1, errors
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    before.check()
    assert "to evaluate it: repertory eval run" in printed
    assert load(latest(Path("run")))["env_steps"] > 0
