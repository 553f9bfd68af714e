"""The same parameters, bit for bit, wherever the roles of a synchronous algorithm run.

Gradients of convolutions and of recurrent cores are what differs between numbers of threads, so it
is they that are compared, not a small MLP.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from repertory.algorithms.a2c import A2CConfig
from repertory.algorithms.a3c import A3CConfig
from repertory.algorithms.batched_a2c import BatchedA2CConfig
from repertory.algorithms.impala import IMPALAConfig
from repertory.checkpoints import load
from repertory.config import RunConfig
from repertory.runs import Result
from repertory.training import train
from tests.ray_clusters import HAS_RAY, shared_address

PIXELS = {
    "env": "ALE/Breakout-v5",
    "protocol": "dqn",
    "network": "a3c",
    "num_envs": 2,
    "unroll_length": 4,
    "reward_transform": "clip",
    "total_steps": 100,
    "log_every_steps": 20,
}
MEMORY = {
    "env": "repertory/Memory-v0",
    "network": "mlp",
    "core": "lstm",
    "core_size": 32,
    "last_inputs": True,
    "num_envs": 3,
    "unroll_length": 7,
    "total_steps": 300,
    "log_every_steps": 50,
}


def run(config: RunConfig, folder: Path, runtime: str) -> tuple[dict[str, Any], list[Any]]:
    address = shared_address() if runtime == "ray" else "local"
    result: Result = train(
        replace(config, runtime=runtime, address=address, actor_cpus=0.0, run_dir=folder / runtime)
    )
    lines = [json.loads(x) for x in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for timing in ("wall_seconds", "env_steps_per_second", "seconds_in"):
            line.pop(timing, None)
    return load(result.checkpoint), [line for line in lines if line["kind"] == "progress"]


def assert_same(left: Any, right: Any) -> None:
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    else:
        assert left == right


def assert_same_everywhere(config: RunConfig, folder: Path, runtime: str = "processes") -> None:
    inline, lines = run(config, folder, "inline")
    others, other_lines = run(config, folder, runtime)
    for key in ("model", "optimizer", "env_steps", "updates"):
        assert_same(inline[key], others[key])
    assert lines == other_lines
    assert len(lines) > 3


@pytest.mark.parametrize("settings", [PIXELS, MEMORY], ids=["convolutions", "lstm"])
def test_a2c(settings: dict[str, Any], tmp_path: Path) -> None:
    assert_same_everywhere(A2CConfig(**settings), tmp_path)


@pytest.mark.parametrize("num_learners", [1, 2, 3])
@pytest.mark.parametrize("sync", ["step", "trajectory"])
@pytest.mark.parametrize("settings", [PIXELS, MEMORY], ids=["convolutions", "lstm"])
def test_batched_a2c(
    settings: dict[str, Any], sync: Any, num_learners: int, tmp_path: Path
) -> None:
    config = BatchedA2CConfig(**settings, num_actors=3, num_learners=num_learners, sync=sync)
    assert_same_everywhere(config, tmp_path)


@pytest.mark.parametrize("num_learners", [1, 2, 3])
@pytest.mark.parametrize("settings", [PIXELS, MEMORY], ids=["convolutions", "lstm"])
def test_impala_with_the_fixed_schedule(
    settings: dict[str, Any], num_learners: int, tmp_path: Path
) -> None:
    """Replay and several passes draw and learn the same, and so does who fetches ahead."""
    config = IMPALAConfig(
        **settings,
        num_actors=3,
        num_learners=num_learners,
        schedule="fixed",
        replay_share=0.5,
        replay_capacity=50,
        passes=2,
        surrogate="clip" if num_learners == 2 else "gradient",
        prefetch=num_learners > 1,
    )
    assert_same_everywhere(config, tmp_path)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed (the extra `ray`)")
@pytest.mark.parametrize(
    "config",
    [
        A2CConfig(**MEMORY),
        BatchedA2CConfig(**MEMORY, num_actors=3, num_learners=2, sync="step"),
        BatchedA2CConfig(**PIXELS, num_actors=3, num_learners=2, sync="trajectory"),
        IMPALAConfig(**MEMORY, num_actors=3, num_learners=2, schedule="fixed", replay_share=0.5),
    ],
    ids=["a2c", "batched_a2c-step", "batched_a2c-trajectory-convolutions", "impala"],
)
def test_a_cluster_gives_the_same_bits(config: RunConfig, tmp_path: Path) -> None:
    """Trajectories, parameters and gradients that travel through Ray arrive as they were."""
    assert_same_everywhere(config, tmp_path, "ray")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed (the extra `ray`)")
def test_a3c_with_one_worker_is_a2c_on_a_cluster_too(tmp_path: Path) -> None:
    a2c, lines = run(A2CConfig(**MEMORY), tmp_path / "a2c", "inline")
    a3c, other_lines = run(A3CConfig(**MEMORY, num_workers=1), tmp_path / "a3c", "ray")
    for key in ("model", "env_steps", "updates"):
        assert_same(a2c[key], a3c[key])
    assert_same(a2c["optimizer"]["state"], a3c["optimizer"]["state"])
    assert lines == other_lines


def test_the_fixed_schedule_plays_trajectory_k_with_version_k_minus_1(tmp_path: Path) -> None:
    config = IMPALAConfig(**MEMORY, num_actors=2, schedule="fixed")
    _, lines = run(config, tmp_path, "inline")
    lags: dict[str, int] = {}
    for line in lines:
        for lag, number in line["policy_lag_histogram"].items():
            lags[lag] = lags.get(lag, 0) + number
    # Update 0 takes trajectories of version 0, and so does update 1: lag 0 once, then always 1.
    assert lags.pop("0") == 2 * MEMORY["num_envs"]
    assert set(lags) == {"1"}


@pytest.mark.parametrize("settings", [PIXELS, MEMORY], ids=["convolutions", "lstm"])
def test_a3c_with_one_worker_is_a2c(settings: dict[str, Any], tmp_path: Path) -> None:
    """The same parameters and statistics, wherever the worker runs: its lag is always 0."""
    a2c, lines = run(A2CConfig(**settings), tmp_path / "a2c", "inline")
    for runtime in ("inline", "processes"):
        a3c, other_lines = run(
            A3CConfig(**settings, num_workers=1), tmp_path / "a3c" / runtime, runtime
        )
        for key in ("model", "env_steps", "updates"):
            assert_same(a2c[key], a3c[key])
        assert_same(a2c["optimizer"]["state"], a3c["optimizer"]["state"])
        assert lines == other_lines


def test_a3c_inline_with_several_workers_is_the_same_run_twice(tmp_path: Path) -> None:
    """Workers take turns in a fixed order: each gradient is as old as the others are many."""
    config = A3CConfig(**MEMORY, num_workers=3, sync="soft", tau=0.5)
    first, lines = run(config, tmp_path / "first", "inline")
    second, other_lines = run(config, tmp_path / "second", "inline")
    assert_same(first["model"], second["model"])
    assert lines == other_lines
    assert max(line["policy_lag_max"] for line in lines) == 2


def test_b87_the_same_seed_twice_is_the_same_run(tmp_path: Path) -> None:
    """Run-to-run differences. Source: DLR-RM/stable-baselines3#1921, #2097."""
    config = A2CConfig(env="CartPole-v1", num_envs=4, total_steps=2000, log_every_steps=200)
    first, lines = run(config, tmp_path / "first", "inline")
    second, other_lines = run(config, tmp_path / "second", "inline")
    assert_same(first["model"], second["model"])
    assert lines == other_lines
    third, _ = run(replace(config, seed=2), tmp_path / "third", "inline")
    assert any(not torch.equal(first["model"][k], third["model"][k]) for k in first["model"])


def test_batched_a2c_of_one_learner_is_a2c(tmp_path: Path) -> None:
    """With one actor and one learner the two arrangements are the same arithmetic."""
    a2c, _ = run(A2CConfig(**MEMORY), tmp_path / "a2c", "inline")
    for sync in ("step", "trajectory"):
        config = BatchedA2CConfig(**MEMORY, sync=sync)  # type: ignore[arg-type]
        batched, _ = run(config, tmp_path / sync, "inline")
        assert_same(a2c["model"], batched["model"])


def test_more_learners_on_the_same_columns_agree_to_rounding(tmp_path: Path) -> None:
    """Actions differ with the number of learners only in `step`; `trajectory` keeps the actors."""
    config = BatchedA2CConfig(
        **{**MEMORY, "total_steps": 200}, num_actors=4, sync="trajectory", epsilon=0.01
    )
    one, _ = run(config, tmp_path / "one", "inline")
    for num_learners in (2, 4):
        several, _ = run(
            replace(config, num_learners=num_learners), tmp_path / str(num_learners), "inline"
        )
        for name, tensor in one["model"].items():
            torch.testing.assert_close(tensor, several["model"][name], rtol=0, atol=1e-5)
