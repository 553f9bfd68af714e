"""Going on with a run: nothing starts afresh, nothing doubles back, nothing is silently ignored."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from repertory import checkpoints
from repertory.algorithms import ALGORITHMS
from repertory.algorithms.a2c import A2CConfig
from repertory.algorithms.batched_a2c import BatchedA2CConfig
from repertory.algorithms.impala import IMPALAConfig
from repertory.checkpoints import (
    CheckpointError,
    CheckpointNotFound,
    load,
    save,
    save_step,
)
from repertory.commands import main
from repertory.config import ConfigError, RunConfig, from_yaml
from repertory.runs import Result
from repertory.training import resume, train
from tests.probes import Counter

SETTINGS: dict[str, Any] = {
    "env": "CartPole-v1",
    "runtime": "inline",
    "hidden_sizes": (8,),
    "num_envs": 2,
    "total_steps": 4000,
    "learning_rate": 1e-3,
    "learning_rate_end": 0.0,
    "log_every_steps": 200,
}


def lines(run_dir: Path, kind: str = "progress") -> list[dict[str, Any]]:
    text = (run_dir / "metrics.jsonl").read_text()
    return [record for record in map(json.loads, text.splitlines()) if record["kind"] == kind]


def half(config: RunConfig, at: int = 2000) -> Result:
    """Train to about half of the budget."""
    return train(config, on_record=lambda r: r["kind"] != "progress" or r["env_steps"] < at)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_b88_b89_counters_curves_rates_and_moments_go_on(algorithm: str, tmp_path: Path) -> None:
    """Resume that starts afresh; a learning rate that begins anew.

    Source: DLR-RM/stable-baselines3#1277, #29; hill-a/stable-baselines#692;
    pytorch/pytorch#65342, #60265, #29697; Lightning-AI/pytorch-lightning#4655.
    """
    first = half(ALGORITHMS[algorithm].config(**SETTINGS, run_dir=tmp_path / "run"))
    assert first.reason == "callback"
    before = load(first.checkpoint)
    last = lines(first.run_dir)[-1]
    second = resume(first.run_dir)
    assert second.run_dir == first.run_dir
    assert second.reason == "total_steps"
    assert 4000 <= second.env_steps < 4100
    after = load(second.checkpoint)
    assert after["updates"] > before["updates"] > 100
    # Each optimiser counts its steps beside its moments: they were not begun anew.
    assert {float(s["step"]) for s in after["optimizer"]["state"].values()} == {after["updates"]}
    curve = lines(first.run_dir)
    following = next(line for line in curve if line["env_steps"] > last["env_steps"])
    assert following["learning_rate"] == pytest.approx(
        1e-3 * (1 - first.env_steps / 4000), abs=1e-3 * 400 / 4000
    )
    assert curve[-1]["learning_rate"] < 1e-3 * 100 / 4000
    for key in ("env_steps", "frames", "updates", "wall_seconds"):
        values = [line[key] for line in curve]
        assert values == sorted(set(values)), key
    episodes = [line["episodes"] for line in curve]
    assert episodes == sorted(episodes)
    assert following["episodes"] >= last["episodes"] > 0


def test_games_after_a_resume_are_not_those_of_the_beginning(tmp_path: Path) -> None:
    config = A2CConfig(**SETTINGS, run_dir=tmp_path / "run")
    first = half(config)
    begun = [line["episode_length_mean"] for line in lines(first.run_dir)]
    resume(first.run_dir)
    went_on = [line["episode_length_mean"] for line in lines(first.run_dir)][len(begun) :]
    assert begun[: len(went_on)] != went_on[: len(begun)]


def test_b91_a_changed_setting_is_used_and_told_or_refused(tmp_path: Path) -> None:
    """A new learning rate that the stored schedule overwrites.

    Source: DLR-RM/stable-baselines3#735.
    """
    first = half(A2CConfig(**SETTINGS, run_dir=tmp_path / "run"))
    for changes, said in (
        ({"network": "minatar"}, "network cannot change from auto to minatar"),
        ({"seed": 2}, "seed cannot change from 1 to 2"),
        ({"optimizer": "adam"}, "optimizer cannot change"),
        ({"total_steps": 1000}, "has learned from"),
        ({"gama": 1.0}, "unknown setting 'gama'"),
    ):
        with pytest.raises(ConfigError, match=said):
            resume(first.run_dir, **changes)
    resume(
        first.run_dir, learning_rate="5e-6", learning_rate_end=None, epsilon=1e-3, total_steps=5000
    )
    (event,) = [r for r in lines(first.run_dir, "event") if r["event"] == "resume"]
    assert event["changes"] == {
        "learning_rate": 5e-6,
        "learning_rate_end": None,
        "epsilon": 1e-3,
        "total_steps": 5000,
    }
    last = lines(first.run_dir)[-1]
    assert last["learning_rate"] == 5e-6
    now = from_yaml(A2CConfig, (first.run_dir / "config.yaml").read_text())
    assert (now.learning_rate, now.total_steps) == (5e-6, 5000)
    until = first.run_dir / f"config_until_{event['from_env_steps']}.yaml"
    assert from_yaml(A2CConfig, until.read_text()).learning_rate == 1e-3
    state = load(tmp_path / "run" / "checkpoints" / f"step_{last['env_steps']:012d}.pt")
    assert state["optimizer"]["param_groups"][0]["eps"] == 1e-3
    assert state["optimizer"]["param_groups"][0]["lr"] == 5e-6


def test_other_numbers_of_columns_actors_and_learners_are_allowed(tmp_path: Path) -> None:
    config = BatchedA2CConfig(**SETTINGS, num_actors=2, num_learners=2, run_dir=tmp_path / "run")
    first = half(config)
    second = resume(first.run_dir, num_actors=3, num_learners=1, num_envs=4, sync="trajectory")
    assert second.env_steps >= 4000


def test_impala_with_the_fixed_schedule_goes_on_with_its_versions(tmp_path: Path) -> None:
    settings = {**SETTINGS, "schedule": "fixed", "num_actors": 2, "num_learners": 2}
    first = half(IMPALAConfig(**settings, run_dir=tmp_path / "run"))
    assert resume(first.run_dir).env_steps >= 4000
    assert max(line["policy_lag_max"] for line in lines(first.run_dir)) == 1


def test_b100_no_curve_doubles_back(tmp_path: Path) -> None:
    """Points after the last checkpoint drawn twice, or the axis back at 0.

    Source: hill-a/stable-baselines#1007, #56; tensorflow/tensorboard#3732; wandb/wandb#1997.
    """
    first = half(A2CConfig(**SETTINGS, checkpoint_steps=400, run_dir=tmp_path / "run"))
    # As if the run had been killed after this: its newest checkpoint is gone, its lines are not.
    first.checkpoint.unlink()
    resume(first.run_dir)
    aside = list(first.run_dir.glob("metrics_after_*.jsonl"))
    assert len(aside) == 1
    assert all(json.loads(x)["env_steps"] > 1600 for x in aside[0].read_text().splitlines())
    steps = [line["env_steps"] for line in lines(first.run_dir)]
    assert steps == sorted(set(steps))
    events = EventAccumulator(str(first.run_dir / "tb")).Reload()
    for tag in events.Tags()["scalars"]:
        drawn = [event.step for event in events.Scalars(tag)]
        assert drawn == sorted(set(drawn)), tag
        assert drawn[-1] >= 4000


def test_the_newest_checkpoint_that_can_be_read_is_used_and_the_damaged_one_named(
    tmp_path: Path,
) -> None:
    first = half(A2CConfig(**SETTINGS, checkpoint_steps=400, run_dir=tmp_path / "run"))
    content = first.checkpoint.read_bytes()
    first.checkpoint.write_bytes(content[: len(content) // 2])
    assert resume(first.run_dir).env_steps >= 4000
    (event,) = [r for r in lines(first.run_dir, "event") if r["event"] == "resume"]
    assert f"{first.checkpoint} is damaged" in event["message"]
    assert event["from_env_steps"] < first.env_steps
    for path in (first.run_dir / "checkpoints").glob("step_*.pt"):
        path.write_bytes(b"nothing")
    with pytest.raises(CheckpointError):
        resume(first.run_dir, total_steps=9000)
    with pytest.raises(CheckpointNotFound):
        resume(tmp_path)


def test_the_newest_checkpoints_stay_and_the_best(tmp_path: Path) -> None:
    config = A2CConfig(
        **SETTINGS,
        checkpoint_steps=400,
        keep_checkpoints=2,
        evaluation_steps=400,
        evaluation_episodes=1,
        run_dir=tmp_path / "run",
    )
    result = train(config)
    folder = result.run_dir / "checkpoints"
    steps = sorted(int(path.stem.removeprefix("step_")) for path in folder.glob("step_*.pt"))
    best = int((folder / "best").read_text().strip().removeprefix("step_").removesuffix(".pt"))
    assert result.env_steps in steps
    assert best in steps
    assert len(steps) <= 3


@pytest.mark.timeout(180)
def test_a_run_that_was_killed_goes_on_from_the_command_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    words = "train a3c --env CartPole-v1 --total-steps 100000 --checkpoint-steps 500 --num-envs 2"
    words += f" --run-dir {run_dir}"
    process = subprocess.Popen([sys.executable, "-m", "repertory", *words.split()])
    try:
        deadline = time.monotonic() + 90
        while not list(run_dir.glob("checkpoints/step_*.pt")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert main(["resume", str(run_dir), "--total-steps", "100"]) == 2
    assert "already" in capfd.readouterr().err
    steps = int(max(run_dir.glob("checkpoints/step_*.pt")).stem.removeprefix("step_"))
    assert main(["resume", str(run_dir), "--total-steps", str(steps + 1000)]) == 0
    assert f"going on after {steps:,} env steps" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "there is no run folder nowhere"),
        (["--total-steps", "5"], "resume which run?"),
    ],
)
def test_wrong_use_is_one_line_and_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_written_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    """A folder that vanishes for a while."""
    run_dir = tmp_path / "run"
    moved: list[bool] = []

    def take_away_and_bring_back(record: dict[str, Any]) -> None:
        steps = record.get("env_steps", 0)
        if record["kind"] == "progress" and steps > 500 and not moved:
            (run_dir / "checkpoints").rename(run_dir / "elsewhere")
            moved.append(True)
        if record["kind"] == "progress" and steps > 2500 and len(moved) == 1:
            (run_dir / "elsewhere").rename(run_dir / "checkpoints")
            moved.append(True)

    result = train(
        A2CConfig(**SETTINGS, checkpoint_steps=400, run_dir=run_dir),
        on_record=take_away_and_bring_back,
    )
    assert result.reason == "total_steps"
    failed = [r for r in lines(run_dir, "event") if r["event"] == "checkpoint_failed"]
    assert 2 <= len(failed) <= 6
    assert "cannot write" in failed[0]["message"]
    assert load(result.checkpoint)["env_steps"] >= 4000


def test_an_evaluation_without_a_number_does_not_stand_in_the_way(tmp_path: Path) -> None:
    """A reward that was not finite made `null` of a mean return, and no resume could read it."""
    first = half(A2CConfig(**SETTINGS, run_dir=tmp_path / "run"))
    line = {"kind": "eval", "env_steps": 100, "episode_return_mean": None}
    with (first.run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert resume(first.run_dir).reason == "total_steps"


def test_updates_go_on_from_the_checkpoint_where_it_is_newer_than_the_last_line(
    tmp_path: Path,
) -> None:
    """A checkpoint by the clock lies between two lines; later lines were behind for ever."""
    first = half(A2CConfig(**SETTINGS, run_dir=tmp_path / "run"))
    state = load(first.checkpoint)
    state["progress"]["lines"]["updates"] -= 39
    save(first.checkpoint, state)
    second = resume(first.run_dir)
    assert lines(first.run_dir)[-1]["updates"] == load(second.checkpoint)["updates"]


class Slow(Counter):
    """A hundred env steps a second."""

    def step(self, action: Any) -> Any:
        time.sleep(0.01)
        return super().step(action)


def test_b101_the_pace_after_a_resume_is_that_of_the_session(tmp_path: Path) -> None:
    """The whole run's steps were divided by the session's seconds.

    Source: DLR-RM/stable-baselines3#518 (PR#636);
    Stable-Baselines-Team/stable-baselines3-contrib#161.
    """
    settings = {**SETTINGS, "env": partial(Slow, 10), "total_steps": 100_200, "num_envs": 1}
    config = A2CConfig(**{**settings, "log_every_steps": 20}, run_dir=tmp_path / "run")
    first = half(config, at=100)
    state = load(first.checkpoint)
    state["env_steps"] = 100_000
    save_step(first.run_dir / "checkpoints", state)
    before = state["progress"]["lines"]["wall_seconds"]
    started = time.monotonic()
    resume(first.run_dir, env=settings["env"])
    session = time.monotonic() - started
    curve = [line for line in lines(first.run_dir) if line["env_steps"] > 100_000]
    paces = [line["env_steps_per_second"] for line in curve]
    assert 60 < statistics.median(paces) < 130
    assert max(paces[0], paces[-1]) < 130, "at the beginning too"
    assert before + 1.5 < curve[-1]["wall_seconds"] < before + session


def test_a_run_that_still_goes_on_is_not_gone_on_with(tmp_path: Path) -> None:
    """Two processes in one folder would make one curve of two runs."""
    refused: list[str] = []

    def meanwhile(record: dict[str, Any]) -> bool:
        if record["kind"] == "progress" and not refused:
            with pytest.raises(ConfigError, match=r"still goes on \(pid \d+\)") as caught:
                resume(tmp_path / "run")
            refused.append(str(caught.value))
        return True

    settings = {**SETTINGS, "total_steps": 1000}
    train(A2CConfig(**settings, run_dir=tmp_path / "run"), on_record=meanwhile)
    assert refused
    assert resume(tmp_path / "run", total_steps=1500).env_steps >= 1500


def test_a_best_that_could_not_be_written_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar was raised before the pointer was written, and nothing ever passed it."""
    real, failed = checkpoints.point, []

    def point(folder: Path, name: str, checkpoint: Path) -> None:
        if name == "best" and not failed:
            failed.append(checkpoint)
            raise CheckpointError("the disk is full")
        real(folder, name, checkpoint)

    monkeypatch.setattr(checkpoints, "point", point)
    settings = {**SETTINGS, "env": partial(Counter, 5), "checkpoint_steps": 1000}
    result = train(A2CConfig(**settings, run_dir=tmp_path / "run"))
    assert failed, "all episodes have the same return, so only the first could be a new best"
    assert (result.run_dir / "checkpoints" / "best").is_file()
