"""Whole runs through `train`: how they end, what they leave, and what goes wrong in good order."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import torch

from repertory import A2CConfig, BatchedA2CConfig, runs, train
from repertory.algorithms.impala import IMPALAConfig
from repertory.checkpoints import load, resolve
from repertory.config import ConfigError
from repertory.console import PlainConsole
from repertory.environments.toy import Bandit
from repertory.progress import Progress
from repertory.runtimes.base import RoleFailed
from tests.leftovers import Leftovers
from tests.probes import Counter, Raise

SMALL: dict[str, Any] = {
    "env": partial(Counter, 4),
    "num_envs": 2,
    "hidden_sizes": (8,),
    "runtime": "inline",
}


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_ends_at_its_env_steps_and_all_files_agree(tmp_path: Path) -> None:
    result = train(A2CConfig(**SMALL, total_steps=1000, run_dir=tmp_path / "run"))
    lines = lines_of(result.run_dir)
    assert result.reason == "total_steps"
    assert 1000 <= result.env_steps < 1000 + 10
    progress = [line for line in lines if line["kind"] == "progress"]
    assert progress[-1]["env_steps"] == result.env_steps == lines[-1]["env_steps"]
    assert load(result.checkpoint)["env_steps"] == result.env_steps
    assert result.checkpoint.name == f"step_{result.env_steps:012d}.pt"
    for line in progress:  # every whole episode has 4 env steps and pays 4; resets count nowhere
        assert line["episode_length_mean"] == line["episode_return_mean"] == 4
    assert progress[-1]["episodes"] == pytest.approx(result.env_steps / 4, abs=2)


def test_b65_budget_steps_and_frames_of_a_game(tmp_path: Path) -> None:
    """Budget counted x4.

    Source: DLR-RM/rl-baselines3-zoo#367; ray-project/ray#4328; openai/baselines#397.
    """
    result = train(
        A2CConfig(
            env="ALE/Pong-v5",
            num_envs=4,
            unroll_length=5,
            total_steps=1000,
            runtime="inline",
            run_dir=tmp_path / "run",
        )
    )
    last = lines_of(result.run_dir)[-1]
    assert 1000 <= last["env_steps"] < 1000 + 20
    assert last["frames"] == 4 * last["env_steps"]
    assert load(result.checkpoint)["env_steps"] == last["env_steps"]


def test_stop_at_return_waits_for_a_hundred_episodes(tmp_path: Path) -> None:
    config = A2CConfig(
        **SMALL, total_steps=10_000, stop_at_return=3.0, log_every_steps=50, run_dir=tmp_path / "r"
    )
    result = train(config)
    assert result.reason == "stop_at_return"
    assert 400 <= result.env_steps < 500  # 100 episodes of 4, and what was under way


def test_max_minutes_and_callbacks_end_a_run(tmp_path: Path) -> None:
    timed = A2CConfig(**SMALL, total_steps=10**9, max_minutes=0.02, run_dir=tmp_path / "timed")
    assert train(timed).reason == "max_minutes"

    seen: list[str] = []

    def three_lines(record: dict[str, Any]) -> bool:
        seen.append(record["kind"])
        return seen.count("progress") < 3

    config = A2CConfig(**SMALL, total_steps=10**6, log_every_steps=100, run_dir=tmp_path / "called")
    result = train(config, on_record=three_lines)
    assert result.reason == "callback"
    assert seen.count("progress") <= 4
    assert seen[-1] == "end"


def test_checkpoints_in_between_and_the_best(tmp_path: Path) -> None:
    config = BatchedA2CConfig(
        **SMALL, total_steps=10**9, max_minutes=0.08, checkpoint_minutes=0.01, log_every_steps=100,
        run_dir=tmp_path / "run",
    )  # fmt: skip
    folder = train(config).run_dir / "checkpoints"
    files = sorted(folder.glob("step_*.pt"))
    assert len(files) > 2
    assert resolve(folder / "latest") == files[-1]
    assert resolve(folder / "best") in files
    for file in files:
        assert load(file)["updates"] > 0


def test_a_best_between_two_checkpoints_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock alone the best of a run that learns and forgets was never saved."""
    monkeypatch.setattr(runs, "_BEST_SECONDS", 0.0)
    config = A2CConfig(
        env="CartPole-v1", runtime="inline", total_steps=30_000, learning_rate=2e-3,
        run_dir=tmp_path / "run",
    )  # fmt: skip
    folder = train(config).run_dir
    lines = [line for line in lines_of(folder) if line["kind"] == "progress"]
    reached = max(line["episode_return_mean"] for line in lines if line["episodes"] >= 100)
    saved = load(resolve(folder / "checkpoints" / "best"))["progress"]["best"]
    assert saved == pytest.approx(reached, rel=0.15)
    assert len(list((folder / "checkpoints").glob("step_*.pt"))) > 1, "not that of the end alone"


def test_a_policy_without_entropy_is_an_event(tmp_path: Path) -> None:
    config = A2CConfig(
        env="repertory/Bandit-v0", runtime="inline", total_steps=20_000, learning_rate=0.05,
        entropy_cost=0.0, run_dir=tmp_path / "run",
    )  # fmt: skip
    lines = lines_of(train(config).run_dir)
    (event,) = [line for line in lines if line.get("event") == "low_entropy"]
    assert event["message"].startswith("warning: the policy's entropy is")


def test_init_from_takes_parameters_and_starts_counting_anew(tmp_path: Path) -> None:
    first = train(A2CConfig(**SMALL, total_steps=300, run_dir=tmp_path / "first"))
    config = A2CConfig(
        **SMALL, total_steps=1, learning_rate=1e-12, seed=9, init_from=first.run_dir,
        run_dir=tmp_path / "second",
    )  # fmt: skip
    second = train(config)
    before, after = load(first.checkpoint)["model"], load(second.checkpoint)["model"]
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor)
    assert second.env_steps < 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"discount": 2.0}, "discount must be at least 0 and at most 1, not 2"),
        ({"network": "nature"}, "network 'nature' needs images"),
        ({"optimizer": "sgd"}, "optimizer must be one of rmsprop, adam, not 'sgd'"),
        ({"runtime": "inlne"}, "runtime must be one of .*did you mean inline"),
        ({"env": lambda: Counter(3), "runtime": "processes"}, "env cannot travel to another"),
        ({"init_from": "nowhere"}, "there is no run and no checkpoint nowhere"),
    ],
)
def test_wrong_settings_are_refused_in_one_line_before_a_folder_is_made(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(A2CConfig(**{**SMALL, **settings}, run_dir=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_whole_numbers_may_come_as_text(tmp_path: Path) -> None:
    config = A2CConfig(**SMALL, total_steps="1e2", run_dir=str(tmp_path / "run"))  # type: ignore[arg-type]
    assert 100 <= train(config).env_steps < 110


def test_an_error_of_the_callback_is_its_own_on_every_runtime(tmp_path: Path) -> None:
    def broken(record: dict[str, Any]) -> None:
        if record["kind"] == "progress":
            raise KeyError("mine")

    for runtime in ("inline", "processes"):
        settings = {**SMALL, "runtime": runtime}
        with pytest.raises(KeyError, match="mine"):
            train(
                A2CConfig(**settings, total_steps=10**6, run_dir=tmp_path / runtime),
                on_record=broken,
            )


def test_the_callers_global_generators_are_left_alone(tmp_path: Path) -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = (random.random(), float(np.random.random()), float(torch.rand(())))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    train(A2CConfig(**SMALL, total_steps=50, run_dir=tmp_path / "run"))
    assert (random.random(), float(np.random.random()), float(torch.rand(()))) == expected


class Reader(io.StringIO):
    """A stream whose reader leaves after the first line."""

    def write(self, text: str) -> int:
        if self.getvalue():
            raise BrokenPipeError
        return super().write(text)


def test_a_run_goes_on_when_nobody_reads_its_console_any_more(tmp_path: Path) -> None:
    with PlainConsole(Reader()) as console:
        config = A2CConfig(**SMALL, total_steps=200, run_dir=tmp_path / "run")
        assert train(config, on_record=console.on_record).reason == "total_steps"


@pytest.mark.parametrize("runtime", ["inline", "processes"])
def test_b59_an_environment_that_raises_stops_the_run_with_its_own_words(
    runtime: Any, tmp_path: Path
) -> None:
    """Env exception hidden behind a TypeError.

    Source: Farama-Foundation/Gymnasium#177; openai/gym#1542, PR#1556.
    """
    before = Leftovers.now()
    settings = {**SMALL, "env": partial(Raise, 7), "runtime": runtime, "num_envs": 3}
    config = BatchedA2CConfig(**settings, num_actors=2, sync="trajectory", run_dir=tmp_path / "run")
    with pytest.raises(
        RoleFailed, match=r"actor-\d failed: EnvironmentFailure: .*step 7"
    ) as caught:
        train(config)
    assert "boom" in str(caught.value)
    assert "Traceback" in caught.value.traceback
    last = lines_of(tmp_path / "run")[-1]
    assert (last["kind"], last["event"]) == ("event", "failure")
    assert "boom" in last["message"]
    # The learner, which is well, hands over what it has when it sees that the run is over.
    saved = list((tmp_path / "run" / "checkpoints").glob("step_*.pt"))
    assert len(saved) == 1
    before.check(descriptors=False)


class FiveRewards(Counter):
    """Episodes of five env steps with rewards that a transform changes; they add up to -4.19."""

    REWARDS = (-7.0, -0.2, 0.0, 0.01, 3.0)

    def reward(self) -> float:
        return self.REWARDS[self.steps - 1]


@pytest.mark.parametrize("transform", ["none", "clip", "sign", "asymmetric"])
def test_b55_the_reported_return_is_raw_whatever_the_learner_sees(
    transform: Any, tmp_path: Path
) -> None:
    """Reward 'clipping' that bins or does nothing.

    Source: DLR-RM/stable-baselines3#271; pytorch/rl#1777; gsurma/atari#14.
    """
    settings = {**SMALL, "env": partial(FiveRewards, 5)}
    config = A2CConfig(
        **settings, reward_transform=transform, total_steps=100, run_dir=tmp_path / "run"
    )
    assert train(config).episode_return_mean == pytest.approx(-4.19)


class RichBandit(Bandit):
    """A bandit that pays ten thousand."""

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, 1e4 * reward, *rest


def test_b16_a_collapse_of_entropy_is_told_with_the_likely_levers(tmp_path: Path) -> None:
    """Entropy collapses to zero and nobody is told.

    Source: Unity-Technologies/ml-agents#281; openai/baselines#237.
    """
    told = io.StringIO()
    settings = {**SMALL, "env": RichBandit, "num_envs": 8}
    config = A2CConfig(
        **settings,
        entropy_cost=0.0,
        learning_rate=1e-2,
        clip_norm=None,
        total_steps=200 * 20,
        log_every_steps=200,
        run_dir=tmp_path / "run",
    )
    with PlainConsole(told) as console:
        train(config, on_record=console.on_record)
    progress = [line for line in lines_of(tmp_path / "run") if line["kind"] == "progress"]
    assert progress[-1]["entropy_normalised"] < 0.01
    assert all(line["policy_loss"] is not None for line in progress)  # null stands for NaN
    assert told.getvalue().count("warning: ") == 1
    assert "entropy_cost" in told.getvalue().replace("-", "_")


def test_b80_roles_start_after_torch_has_used_its_thread_pool(tmp_path: Path) -> None:
    """Fork after torch has used its thread pool: the child hangs.

    Source: pytorch/pytorch#17199, #2245, #41197, #89693, #48382, #50669.
    """
    _ = torch.randn(1000, 1000) @ torch.randn(1000, 1000)
    layer = torch.nn.Linear(1000, 1000)
    layer.load_state_dict(layer.state_dict())
    settings = {**SMALL, "runtime": "processes"}
    result = train(BatchedA2CConfig(**settings, total_steps=200, run_dir=tmp_path / "run"))
    assert result.env_steps >= 200


class ThreadCount(Counter):
    """Says in its reward how many threads its process has, of torch's and of the system's."""

    def reward(self) -> float:
        return 1000.0 * torch.get_num_threads() + psutil.Process().num_threads()


def test_b81_a_role_has_the_threads_it_was_given(tmp_path: Path) -> None:
    """Thread oversubscription.

    Source: ikostrikov/pytorch-a3c#33, #3; Khrylx/PyTorch-RL#27.
    """
    for threads in (1, 2):
        config = BatchedA2CConfig(
            env=partial(ThreadCount, 1),
            num_envs=1,
            hidden_sizes=(8,),
            total_steps=400,
            num_actors=4,
            sync="trajectory",
            actor_threads=threads,
            run_dir=tmp_path / str(threads),
        )
        torch_threads, in_all = divmod(train(config).episode_return_mean or 0.0, 1000.0)
        assert torch_threads == threads
        assert in_all <= threads + 4  # the main one, the one that watches the parent, and few more


class GlobalDraws(gymnasium.Env[Any, Any]):
    """Pays what it draws: from the process's global generators and from its own, in turn."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    episode = -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode += 1
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        sources = (
            lambda: float(np.random.random()),
            lambda: float(self.np_random.random()),
            random.random,
            lambda: float(torch.rand(())),
        )
        drawn = sources[self.episode % len(sources)]()
        return np.zeros(1, np.float32), drawn, True, False, {}


def test_b84_no_two_actors_play_the_same_game(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers play the same game.

    Source: hill-a/stable-baselines#79, #1120; numpy/numpy#9650; pytorch/pytorch#5059.
    """
    found: list[float] = []
    original = Progress.add_window

    def keep(self: Progress, window: dict[str, Any]) -> Any:
        found.extend(episode[0] for episode in window["episodes"])
        return original(self, window)

    monkeypatch.setattr(Progress, "add_window", keep)

    def draws(name: str) -> list[float]:
        found.clear()
        train(
            BatchedA2CConfig(
                env=GlobalDraws,
                num_envs=1,
                num_actors=4,
                sync="trajectory",
                hidden_sizes=(8,),
                unroll_length=8,  # an episode and its reset are two ticks: four draws an actor
                total_steps=1,
                run_dir=tmp_path / name,
            )
        )
        return list(found)

    first = draws("first")
    assert len(first) == len(set(first)) == 16
    assert draws("second") == first


def test_a_script_without_a_main_guard_gets_one_clear_line(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "import repertory\n"
        "config = repertory.BatchedA2CConfig(env='CartPole-v1', total_steps=100, run_dir='run')\n"
        "repertory.train(config)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode != 0
    assert 'put the call under `if __name__ == "__main__":`' in done.stderr


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    def run(name: str) -> None:
        settings = {**SMALL, "runtime": "processes"}
        train(
            BatchedA2CConfig(
                **settings,
                num_actors=2,
                num_learners=2,
                sync="trajectory",
                total_steps=100,
                run_dir=tmp_path / name,
            )
        )

    run("first")
    before = Leftovers.now()
    run("second")
    before.check()


@pytest.mark.parametrize("algorithm", ["batched_a2c", "impala"])
def test_a_batch_of_nothing_but_resets_does_not_stop_a_schedule(
    algorithm: str, tmp_path: Path
) -> None:
    """Episodes of one step and unrolls of one tick: every second batch holds no transition."""
    settings: dict[str, Any] = {
        "env": "repertory/Bandit-v0",
        "runtime": "inline",
        "num_actors": 2,
        "num_envs": 2,
        "unroll_length": 1,
        "total_steps": 40,
        "run_dir": tmp_path / "run",
    }
    if algorithm == "impala":
        result = train(IMPALAConfig(**settings, schedule="fixed"))
    else:
        result = train(BatchedA2CConfig(**settings, sync="trajectory"))
    assert result.env_steps == 40
