"""Whole runs of A3C: many workers, what is told of their lag, and gradients that are too old."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from repertory.algorithms.a3c import A3CConfig
from repertory.checkpoints import load
from repertory.commands.arguments import parse_train
from repertory.training import train
from tests import probes
from tests.leftovers import Leftovers


def progress_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "progress"]


def lags_in(lines: list[dict[str, Any]]) -> Counter[int]:
    """How often each lag was told; each line's mean and maximum have to be those of its own."""
    total: Counter[int] = Counter()
    for line in lines:
        lags = Counter({int(lag): n for lag, n in line["policy_lag_histogram"].items()})
        assert line["policy_lag_max"] == max(lags)
        mean = sum(lag * n for lag, n in lags.items()) / lags.total()
        assert line["policy_lag_mean"] == pytest.approx(mean)
        total += lags
    return total


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_eight_workers_end_in_time_and_leave_nothing_behind(tmp_path: Path) -> None:
    """More of them than most machines have cores; each learns, and each gradient has a lag."""
    before = Leftovers.now()
    finished: list[float] = []

    def look(record: dict[str, Any]) -> None:
        if record["kind"] == "progress" and record["env_steps"] >= 20_000 and not finished:
            finished.append(time.monotonic())

    config = A3CConfig(
        env="CartPole-v1",
        num_workers=8,
        num_envs=2,
        hidden_sizes=(8,),
        total_steps=20_000,
        log_every_steps=2_000,
        run_dir=tmp_path / "run",
    )
    result = train(config, on_record=look)
    assert time.monotonic() - finished[0] < 20.0
    assert result.reason == "total_steps"
    # The others may be in the middle of an unroll when one of them arrives.
    assert 20_000 <= result.env_steps < 20_000 + 8 * 2 * 5
    before.check(descriptors=False)
    lines = progress_of(result.run_dir)
    lags = lags_in(lines)
    assert lags.total() == 2 * lines[-1]["updates"]
    assert load(result.checkpoint)["updates"] == lines[-1]["updates"]
    assert max(lags) > 0


def test_a_limit_for_the_lag_drops_gradients_and_tells_how_many(tmp_path: Path) -> None:
    """Three workers in turn: the third one's gradient is always two updates old.

    Env steps are those that were learned from, so the run is as long as without a limit.
    """
    words = "a3c --env repertory/Bandit-v0 --runtime inline --num-workers 3 --num-envs 2 "
    words += "--unroll-length 4 --total-steps 600 --log-every-steps 60 --max-lag"
    found = {}
    for limit in ("none", "1"):
        (config,) = parse_train([*words.split(), limit, "--run-dir", str(tmp_path / limit)]).configs
        result = train(config)
        lines = progress_of(result.run_dir)
        lags = lags_in(lines)
        updates = lines[-1]["updates"]
        dropped = sum(line.get("gradients_dropped", 0) for line in lines)
        assert lags.total() == 2 * updates
        # An episode is one pull and its reset: four ticks of two columns have four env steps.
        assert result.env_steps == 4 * updates
        assert 600 <= result.env_steps < 600 + 3 * 4
        assert all(line["learning_rate"] == config.learning_rate for line in lines)
        found[limit] = (max(lags), dropped / (updates + dropped))
    assert found["none"] == (2, 0.0)
    assert found["1"] == (1, pytest.approx(1 / 3, abs=0.02))


@pytest.mark.parametrize("runtime", ["inline", pytest.param("processes", marks=pytest.mark.slow)])
def test_episodes_are_cut_after_env_steps_and_not_after_unrolls(
    runtime: Any, tmp_path: Path
) -> None:
    """A limit of 7 and unrolls of 5. What a cut is worth is in `tests/learning`."""
    config = A3CConfig(
        env=probes.Endless,
        max_episode_steps=7,
        runtime=runtime,
        num_envs=2,
        unroll_length=5,
        hidden_sizes=(8,),
        total_steps=1_000,
        run_dir=tmp_path / "run",
    )
    last = progress_of(train(config).run_dir)[-1]
    assert last["episode_length_mean"] == last["episode_return_mean"] == 7.0
    assert last["episodes"] == pytest.approx(1_000 / 7, abs=2 * 2 + 2)
