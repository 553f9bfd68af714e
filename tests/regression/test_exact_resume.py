"""A run that was stopped, or killed, and resumed is the run that was never stopped: same bits."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from repertory.algorithms.a2c import A2CConfig
from repertory.algorithms.a3c import A3CConfig
from repertory.algorithms.batched_a2c import BatchedA2CConfig
from repertory.algorithms.impala import IMPALAConfig
from repertory.checkpoints import latest, load
from repertory.config import ConfigError, RunConfig
from repertory.training import resume, train
from tests.regression.test_same_bits import assert_same

SETTINGS: dict[str, Any] = {
    "env": "repertory/Memory-v0",
    "network": "mlp",
    "core": "lstm",
    "core_size": 16,
    "num_envs": 3,
    "unroll_length": 7,
    "total_steps": 1500,
    "learning_rate_end": 0.0,
    "log_every_steps": 100,
    "checkpoint_steps": 400,
    "exact_resume": True,
}
ARRANGEMENTS = {
    "a2c": lambda: A2CConfig(**SETTINGS),
    "batched_a2c-step": lambda: BatchedA2CConfig(
        **SETTINGS, runtime="inline", num_actors=2, num_learners=2
    ),
    "batched_a2c-trajectory": lambda: BatchedA2CConfig(
        **SETTINGS, runtime="inline", num_actors=3, num_learners=2, sync="trajectory"
    ),
    "a3c": lambda: A3CConfig(**SETTINGS, runtime="inline", num_workers=2),
    "impala": lambda: IMPALAConfig(
        **SETTINGS,
        runtime="inline",
        num_actors=2,
        schedule="fixed",
        replay_share=0.5,
        replay_capacity=30,
        checkpoint_replay=True,
        passes=2,
    ),
}


def found(run_dir: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The last state, and the lines of metrics but for their seconds."""
    state = load(latest(run_dir))
    lines = [json.loads(x) for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for timing in ("wall_seconds", "env_steps_per_second", "seconds_in"):
            line.pop(timing, None)
    return state, [line for line in lines if line["kind"] == "progress"]


def assert_same_run(one: Path, other: Path) -> None:
    left, lines = found(one)
    right, other_lines = found(other)
    for key in ("model", "optimizer", "env_steps", "updates"):
        assert_same(left[key], right[key])
    assert lines == other_lines
    assert len(lines) > 10


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_b88_stopped_and_resumed_is_the_uninterrupted_run(arrangement: str, tmp_path: Path) -> None:
    """Weights, moments, counters and curves after a resume.

    Source: DLR-RM/stable-baselines3#1277, #29; hill-a/stable-baselines#692.
    """
    config: RunConfig = ARRANGEMENTS[arrangement]()
    whole = train(replace(config, run_dir=tmp_path / "whole"))
    at = random.Random(arrangement).randrange(500, 1400)
    parts = train(
        replace(config, run_dir=tmp_path / "parts"),
        on_record=lambda r: r["kind"] != "progress" or r["env_steps"] < at,
    )
    assert parts.reason == "callback"
    resume(parts.run_dir)
    assert_same_run(whole.run_dir, parts.run_dir)


def test_a_run_without_the_setting_is_another_one(tmp_path: Path) -> None:
    """So that the equality above does not come from environments without chance."""
    config = A2CConfig(**SETTINGS)
    exact, _ = found(train(replace(config, run_dir=tmp_path / "exact")).run_dir)
    plain, _ = found(train(replace(config, exact_resume=False, run_dir=tmp_path / "plain")).run_dir)
    assert any(not exact["model"][k].equal(plain["model"][k]) for k in exact["model"])


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "arrangement",
    [
        "a2c --core lstm --last-inputs --runtime inline",
        "batched_a2c --core gru --num-actors 2 --sync trajectory",
        "a3c --core lstm --num-workers 2 --runtime inline",
        "impala --core lstm --num-actors 2 --schedule fixed --replay-share 0.5 "
        "--replay-capacity 30 --runtime inline",
    ],
    ids=["a2c", "batched_a2c", "a3c", "impala"],
)
def test_killed_at_a_random_moment_and_resumed_is_the_uninterrupted_run(
    arrangement: str, tmp_path: Path
) -> None:
    words = f"train {arrangement} --env repertory/Memory-v0 --network mlp --core-size 16"
    words += " --num-envs 3 --total-steps 4000 --checkpoint-steps 1000 --exact-resume"
    words += " --log-every-steps 100"
    program = [sys.executable, "-m", "repertory"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    subprocess.run([*program, *words.split(), "--run-dir", str(whole)], check=True, timeout=120)
    process = subprocess.Popen([*program, *words.split(), "--run-dir", str(parts)])
    deadline = time.monotonic() + 60
    metrics, at = parts / "metrics.jsonl", random.randrange(11, 30)
    while not metrics.exists() or metrics.read_text().count('"progress"') < at:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it had ended before"
    resume(parts)
    assert_same_run(whole, parts)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (A2CConfig(env="CartPole-v1", exact_resume=True), "exact_resume needs checkpoint_steps"),
        (
            A3CConfig(env="CartPole-v1", exact_resume=True, checkpoint_steps=9),
            "exact_resume needs runtime=inline",
        ),
        (
            IMPALAConfig(env="CartPole-v1", exact_resume=True, checkpoint_steps=9),
            "exact_resume needs schedule=fixed",
        ),
    ],
)
def test_what_can_never_be_exact_is_refused(config: RunConfig, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        train(replace(config, run_dir=tmp_path / "run"))
