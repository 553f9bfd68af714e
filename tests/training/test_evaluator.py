"""The evaluator beside the training: whole games of checkpoints, the best of them, and an end."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from repertory.algorithms import ALGORITHMS
from repertory.algorithms.a2c import A2CConfig
from repertory.checkpoints import load, resolve
from repertory.config import RunConfig
from repertory.evaluator import Evaluator
from repertory.training import train
from tests import probes

SETTINGS: dict[str, Any] = {
    "env": "CartPole-v1",
    "hidden_sizes": (8,),
    "num_envs": 2,
    "total_steps": 600,
    "log_every_steps": 50,
    "evaluation_steps": 200,
    "evaluation_episodes": 3,
    "keep_checkpoints": 100,
}


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def check(config: RunConfig) -> list[dict[str, Any]]:
    """Train; what was evaluated is in the folder, and `best` is the best of it."""
    result = train(config)
    evaluated = records(result.run_dir, "eval")
    for record in evaluated:
        assert record["episodes"] == 3
        assert load(Path(record["checkpoint"]))["env_steps"] == record["env_steps"]
    best = max(evaluated, key=lambda record: record["episode_return_mean"])
    assert resolve(result.run_dir / "checkpoints" / "best") == Path(best["checkpoint"])
    assert evaluated[-1]["env_steps"] == result.env_steps
    return evaluated


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_has_it(algorithm: str, tmp_path: Path) -> None:
    config = ALGORITHMS[algorithm].config(
        **SETTINGS, runtime="inline", run_dir=tmp_path / algorithm
    )
    evaluated = check(config)
    assert [record["env_steps"] // 200 for record in evaluated] == [1, 2, 3, 3][: len(evaluated)]
    assert len(evaluated) >= 3


def test_on_inline_two_runs_evaluate_the_same(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        result = train(A2CConfig(**SETTINGS, runtime="inline", run_dir=tmp_path / name))
        found.append(
            [(r["env_steps"], r["episode_returns"]) for r in records(result.run_dir, "eval")]
        )
    assert found[0] == found[1]


def test_beside_processes_it_is_one_more_and_leaves_with_them(tmp_path: Path) -> None:
    settings = SETTINGS | {"total_steps": 30_000, "evaluation_steps": 3_000}
    assert len(check(A2CConfig(**settings, runtime="processes", run_dir=tmp_path / "run"))) >= 2


class Fine(gymnasium.Env[Any, Any]):
    """Five steps an episode."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.step_index = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.step_index += 1
        return np.zeros(1, np.float32), 1.0, self.step_index == 5, False, {}


class Slow(Fine):
    """Takes its time: a minute a game."""

    def step(self, action: Any) -> Any:
        time.sleep(0.02)
        self.step_index += 1
        return np.zeros(1, np.float32), 1.0, self.step_index == 3000, False, {}


def test_an_environment_that_is_a_callable_comes_along(tmp_path: Path) -> None:
    settings = SETTINGS | {"env": Fine}
    evaluated = check(A2CConfig(**settings, runtime="processes", run_dir=tmp_path / "run"))
    assert evaluated[0]["episode_return_mean"] == 5.0


def test_a_failure_is_told_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no room")

    monkeypatch.setattr("repertory.evaluator.evaluate", fail)
    result = train(A2CConfig(**SETTINGS, runtime="inline", run_dir=tmp_path / "run"))
    assert result.reason == "total_steps"
    messages = [record.get("message", "") for record in records(result.run_dir, "event")]
    assert any("failed: OSError: no room" in message for message in messages)


@pytest.mark.timeout(120)
def test_an_interrupt_does_not_wait_for_games(tmp_path: Path) -> None:
    settings = SETTINGS | {"env": Slow, "total_steps": 1_000_000, "evaluation_steps": 20}
    seen: list[float] = []

    def interrupt(record: dict[str, Any]) -> None:
        if record["kind"] == "progress" and not seen:
            seen.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    assert threading.current_thread() is threading.main_thread()
    settings["log_every_steps"] = 40
    result = train(
        A2CConfig(**settings, runtime="processes", run_dir=tmp_path / "run"), on_record=interrupt
    )
    assert result.reason == "interrupted"
    assert time.monotonic() - seen[0] < 10


def test_a_checkpoint_that_died_with_its_evaluator_is_told_and_the_next_one_played(
    tmp_path: Path,
) -> None:
    """The answer for the second was taken for the first, and the run waited for half an hour."""
    settings = {**SETTINGS, "evaluation_steps": None, "runtime": "processes"}
    config = A2CConfig(**settings, run_dir=tmp_path / "run")
    checkpoint = train(config).checkpoint
    evaluator = Evaluator(config, lambda: False)
    evaluator.submit(checkpoint)
    process = evaluator._process
    assert process is not None
    process.kill()
    process.join()
    evaluator.submit(checkpoint)
    found: list[dict[str, Any]] = []
    deadline = time.monotonic() + 60
    while evaluator.busy and time.monotonic() < deadline:
        found += evaluator.finished()
        time.sleep(0.05)
    evaluator.close()
    assert [record["kind"] for record in found] == ["event", "eval"]


@pytest.mark.parametrize("runtime", ["inline", "processes"])
def test_b69_nobody_waits_for_an_endless_game_when_the_time_is_over(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation that never ends holds up everything; that it was given up is told.

    Source: hill-a/stable-baselines#876; muupan/async-rl#5; takuseno/d3rlpy#209.
    """
    monkeypatch.setattr("repertory.runs._LAST_EVALUATION_SECONDS", 1.0)
    never_ends = partial(probes.Constant, gymnasium.spaces.Box(0, 1, (2,)), np.zeros(2))
    settings = {**SETTINGS, "env": never_ends, "runtime": runtime, "total_steps": 10**7}
    config = A2CConfig(**{**settings, "max_minutes": 0.05}, run_dir=tmp_path / "run")
    started = time.monotonic()
    result = train(config)
    assert time.monotonic() - started < 20
    assert result.reason == "max_minutes"
    (event, *_) = [
        record for record in records(result.run_dir, "event") if "evaluation" in record["event"]
    ]
    assert ("given up" if runtime == "inline" else "fewer evaluation_episodes") in event["message"]


def test_what_is_told_after_the_last_update_cannot_change_why_the_run_ended(
    tmp_path: Path,
) -> None:
    config = A2CConfig(**{**SETTINGS, "runtime": "inline"}, run_dir=tmp_path / "run")
    result = train(config, on_record=lambda record: record["kind"] != "end")
    assert result.reason == "total_steps"
