"""Whole runs of IMPALA: who plays with which version, how old data is, and what is counted."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from repertory.algorithms import impala
from repertory.algorithms.impala import IMPALAConfig
from repertory.checkpoints import load
from repertory.environments import describe, seeds_for
from repertory.training import resume, train
from tests import probes
from tests.training.watched import WatchedRuntime


def progress_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "progress"]


SLOW = 3
"""The actor that takes ten times as long as the others."""


def paced(num_actors: int, **settings: Any) -> IMPALAConfig:
    """Actors of one column whose env steps take 10 ms, and those of the slow one 100 ms."""
    pauses = {
        seeds_for(1, actor, 1)[0]: 0.1 if actor == SLOW else 0.01 for actor in range(num_actors)
    }
    return IMPALAConfig(
        env=partial(probes.Pace, pauses),
        seed=1,
        num_actors=num_actors,
        num_envs=1,
        unroll_length=5,
        hidden_sizes=(8,),
        batch_trajectories=1,
        **settings,
    )


def newest(published: list[dict[str, Any]], moment: float, when: str) -> int:
    """The newest version whose publication had `began` or `ended` by then; -1 without any."""
    return max((one["version"] for one in published if one[when] <= moment), default=-1)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_b22_every_unroll_starts_with_the_newest_version_however_slow_its_actor() -> None:
    """Only some actors get new weights. Source: ray-project/ray PR#48314.

    Four actors, one of them ten times slower, and an update a trajectory.
    """
    config = paced(4, total_steps=1500, log_every_steps=100)
    runtime = WatchedRuntime()
    impala.train(config, describe(config.environment), runtime)
    runtime.run()

    published = runtime.of("learner-0", "published")
    assert [one["version"] for one in published] == list(range(len(published)))
    played: dict[tuple[int, int], dict[str, Any]] = {}
    for actor in range(4):
        refreshed, puts = (runtime.of(f"actor-{actor}", kind) for kind in ("refreshed", "put"))
        for unroll, (took, put) in enumerate(zip(refreshed, puts, strict=False)):
            assert put["versions"] == [took["version"]]
            assert newest(published, took["began"], "ended") <= took["version"]
            assert took["version"] <= newest(published, took["ended"], "began")
            played[actor, unroll * config.unroll_length] = put
        versions = [one["version"] for one in refreshed]
        assert len(versions) > 5
        assert versions == sorted(versions)
        assert versions.count(0) < len(versions) / 2, "an actor keeps the first version"

    lags: dict[int, list[int]] = {actor: [] for actor in range(4)}
    version = 0
    for record in runtime.records["learner-0"]:
        if record["kind"] == "published":
            version = record["version"]
        elif record["kind"] == "took":
            ((steps, place),), (played_with,) = record["first"], record["versions"]
            put = played[int(place), int(steps)]
            lag = version - played_with
            lags[int(place)].append(lag)
            meanwhile = newest(published, put["began"], "began") - played_with
            assert 0 <= lag <= meanwhile + 4 * config.queue_capacity + 1
    told = sum(
        (Counter(window["lags"]) for window in runtime.of("learner-0", "window")), Counter[int]()
    )
    assert told == Counter(lag for of_one in lags.values() for lag in of_one)
    # No constant bounds the slow one's: about thirty updates are made while it plays.
    means = {actor: statistics.mean(of_one) for actor, of_one in lags.items()}
    assert means[SLOW] > 2 * max(mean for actor, mean in means.items() if actor != SLOW), means


@pytest.mark.timeout(180)
@pytest.mark.parametrize("runtime", ["inline", pytest.param("processes", marks=pytest.mark.slow)])
def test_b25_as_many_updates_whatever_the_number_of_actors(runtime: Any, tmp_path: Path) -> None:
    """More workers, worse learning. Source: ray-project/ray#17490.

    The same env steps in batches of the same size, by one actor and by two; what is left to explain
    a difference is the lag, and is told.
    """
    found = {}
    for num_actors in (1, 2):
        config = IMPALAConfig(
            env="CartPole-v1",
            runtime=runtime,
            num_actors=num_actors,
            num_envs=4,
            unroll_length=20,
            batch_trajectories=2,
            total_steps=8_000,
            log_every_steps=1_000,
            learning_rate=2e-3,
            run_dir=tmp_path / str(num_actors),
        )
        result = train(config)
        lines = progress_of(result.run_dir)
        lags: Counter[int] = Counter()
        for line in lines:
            lags.update({int(lag): n for lag, n in line["policy_lag_histogram"].items()})
            assert line["policy_lag_max"] == max(map(int, line["policy_lag_histogram"]))
        updates = lines[-1]["updates"]
        # Of each update's eight columns, whatever the number of actors.
        assert lags.total() == 8 * updates
        mean = sum(lag * n for lag, n in lags.items()) / lags.total()
        # The batches that fit into the queue, the one that is learned from, and one being played.
        assert mean <= num_actors * config.queue_capacity / 2 + 2
        found[num_actors] = (updates, mean, result.episode_return_mean)
        assert load(result.checkpoint)["updates"] == updates
    assert abs(found[1][0] - found[2][0]) <= 1, f"updates, mean lag, return: {found}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("actor_device", ["cpu", "auto"])
def test_learners_and_actors_on_a_gpu_learn_from_all_that_is_played(
    actor_device: Any, tmp_path: Path
) -> None:
    config = IMPALAConfig(
        env="CartPole-v1",
        hidden_sizes=(8,),
        core="lstm",
        num_actors=2,
        device="cuda",
        actor_device=actor_device,
        passes=2,
        replay_share=0.5,
        total_steps=2000,
        run_dir=tmp_path / "run",
    )
    result = train(config)
    assert result.env_steps >= 2000
    assert load(result.checkpoint)["updates"] > 0


def test_replay_that_is_kept_in_checkpoints_goes_on_and_otherwise_begins_empty(
    tmp_path: Path,
) -> None:
    for kept in (False, True):
        config = IMPALAConfig(
            env="CartPole-v1",
            runtime="inline",
            hidden_sizes=(8,),
            replay_share=0.5,
            replay_capacity=20,
            checkpoint_replay=kept,
            total_steps=500,
            run_dir=tmp_path / f"run-{kept}",
        )
        first = train(config)
        assert ("replay" in load(first.checkpoint)) == kept
        resume(first.run_dir, total_steps=1000)
        lines = (first.run_dir / "metrics.jsonl").read_text().splitlines()
        told = [r["message"] for r in map(json.loads, lines) if r.get("event") == "replay"]
        assert [("in every checkpoint" in message) for message in told] == [kept, kept]
        assert told[1].endswith("; it goes on with 20") == kept
        resume(first.run_dir, total_steps=1500, unroll_length=9)
        lines = (first.run_dir / "metrics.jsonl").read_text().splitlines()
        told = [r["message"] for r in map(json.loads, lines) if r.get("event") == "replay"]
        assert ("it begins empty: " in told[2]) == kept


def test_replay_is_told_of_and_counts_no_env_step_and_no_episode(tmp_path: Path) -> None:
    """Every whole episode has four env steps, so the counts have to agree."""
    config = IMPALAConfig(
        env=partial(probes.Counter, 4),
        runtime="inline",
        num_envs=2,
        hidden_sizes=(8,),
        replay_share=0.5,
        replay_capacity=20,
        total_steps=2_000,
        log_every_steps=200,
        run_dir=tmp_path / "run",
    )
    result = train(config)
    lines = progress_of(result.run_dir)
    assert result.env_steps < 2_000 + 2 * 2 * 5
    assert lines[-1]["episodes"] == pytest.approx(result.env_steps / 4, abs=2 * 2)
    columns = sum(sum(line["policy_lag_histogram"].values()) for line in lines)
    assert columns == 2 * 2 * lines[-1]["updates"]
    for line in lines[1:]:
        assert line["replay_ratio"] == 1.0
        # The last five batches of four columns were learned from three updates ago on average.
        assert line["replay_age"] == pytest.approx(line["policy_lag_mean"] + 3.0, abs=0.5)
    events = map(json.loads, (result.run_dir / "metrics.jsonl").read_text().splitlines())
    messages = [event.get("message", "") for event in events if event["kind"] == "event"]
    assert any("replay of learner 0: 20 trajectories" in message for message in messages)
