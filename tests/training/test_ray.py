"""Whole runs on a Ray cluster: what reaches other machines, and what becomes of what dies."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from repertory.algorithms.a2c import A2CConfig
from repertory.algorithms.a3c import A3CConfig
from repertory.algorithms.impala import IMPALAConfig
from repertory.checkpoints import load
from repertory.config import ConfigError, RunConfig, validate
from repertory.environments.toy import Bandit
from repertory.runtimes.base import RoleContext, RoleFailed
from repertory.training import train
from repertory.trajectories import TrajectorySpec
from tests.leftovers import Leftovers
from tests.programs import run_program
from tests.ray_clusters import HAS_RAY, shared_address

on_ray = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed (the extra `ray`)"),
]
SMALL: dict[str, Any] = {
    "env": "CartPole-v1",
    "runtime": "ray",
    "actor_cpus": 0.0,
    "num_envs": 2,
    "total_steps": 400,
    "log_every_steps": 100,
}


def role_process(name: str) -> psutil.Process:
    """The process of a role on the shared cluster; other tests have roles of that name too."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if words[-1:] == [name] and "repertory.runtimes.ray_cluster.lines" in words:
                with contextlib.suppress(psutil.NoSuchProcess):
                    above = (word for parent in process.parents() for word in parent.cmdline())
                    if any(shared_address() in word for word in above):
                        return process
        time.sleep(0.1)
    raise AssertionError(f"no process of {name}")


def replacements(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["message"] for line in lines if line.get("event") == "replaced"]


class BreaksElsewhere(Bandit):
    """An environment that its own program can make, and no other."""

    def __init__(self, home: int) -> None:
        super().__init__()
        if os.getpid() != home:
            raise OSError("this machine has no joystick")


def threads_and_variable(context: RoleContext) -> tuple[int, str | None]:
    """How many threads torch has in a role, and what OpenMP and others would read."""
    return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")


class Killer:
    """A callback that kills once a run has come so far, and ends it when it has gone on since."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self.kill = kill
        self.env_steps = 0
        self.killed = False
        self.enough: float | None = None

    def __call__(self, record: dict[str, Any]) -> bool:
        self.env_steps = record.get("env_steps", self.env_steps)
        if self.env_steps >= 100 and not self.killed:
            self.killed = True
            self.kill()
        if record.get("event") == "replaced":
            self.enough = self.env_steps + 1000
        return self.enough is None or self.env_steps < self.enough


class TestRuns:
    pytestmark = on_ray

    @pytest.mark.parametrize("which", ["role", "seat"])
    def test_b108_a_killed_actor_is_replaced_and_the_run_goes_on(
        self, which: str, tmp_path: Path
    ) -> None:
        """Dead actor or node: wait never returns. A role dies alone, or with its Ray actor.

        Source: ray-project/ray#3715, #22349, #21910, #15206.
        """
        config = IMPALAConfig(
            **{**SMALL, "total_steps": 10**7},
            address=shared_address(),
            run_dir=tmp_path / "run",
        )

        def kill() -> None:
            process = role_process("actor-1")
            victim = process if which == "role" else process.parent()
            assert victim is not None
            os.kill(victim.pid, signal.SIGKILL)

        assert train(config, on_record=Killer(kill)).reason == "callback"
        (told,) = replacements(tmp_path / "run")
        said = "killed by SIGKILL (pid " if which == "role" else "its actor is lost"
        assert said in told
        assert "1 of at most 10 replacements" in told

    def test_b108_an_actor_that_cannot_begin_is_heard_in_the_driver(self, tmp_path: Path) -> None:
        """An exception in an actor's constructor; the controller hung. Source as above."""
        config = IMPALAConfig(
            **{**SMALL, "env": BreaksElsewhere, "env_kwargs": {"home": os.getpid()}},
            address=shared_address(),
            run_dir=tmp_path / "run",
        )
        with pytest.raises(RoleFailed, match=r"actor-\d failed: .*no joystick") as caught:
            train(config)
        assert "Traceback" in caught.value.traceback

    def test_b82_threads_are_those_of_the_settings_whatever_ray_makes_of_cpus(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ray sets OMP_NUM_THREADS to 1, or to the number of CPUs that a role is given.

        Source: ray-project/ray#28594, PR#6998, PR#30496, #2419.
        """
        from repertory.runtimes.ray_cluster.runtime import RayRuntime

        found = {}
        for own in (None, "3"):
            if own:
                monkeypatch.setenv("OMP_NUM_THREADS", own)
            else:
                monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
            runtime = RayRuntime(shared_address(), actor_cpus=0.0, learner_cpus=0.0)
            try:
                runtime.start("learner-0", threads_and_variable, threads=2)
                runtime.start("actor-0", threads_and_variable, threads=1)
                found[own] = runtime.supervise(lambda role, record: None)
            finally:
                runtime.close()
        assert found == {own: {"learner-0": (2, own), "actor-0": (1, own)} for own in (None, "3")}

    def test_unrolls_that_would_fill_an_object_store_are_named_before_they_do(self) -> None:
        """Ray writes to disk what does not fit; thirty actors then make as much as one."""
        from repertory.runtimes.ray_cluster.runtime import RayRuntime

        frames = TrajectorySpec(20, 4, (4, 84, 84), torch.uint8, (), torch.int64)
        told: list[dict[str, Any]] = []
        for num_actors in (2, 80):
            runtime = RayRuntime(shared_address(), actor_cpus=0.0, learner_cpus=0.0)
            runtime.trajectory_queue(frames, num_actors, order="arrival")
            runtime.start("learner-0", threads_and_variable)
            try:
                runtime.supervise(lambda role, record: told.append(record))
            finally:
                runtime.close()
        (line,) = told
        assert line["event"] == "crowded"
        assert "may take 380 MB" in line["message"]
        assert "--object-store-memory" in line["message"]

    def test_b110_two_runs_in_one_process_keep_their_own_settings(self, tmp_path: Path) -> None:
        """Module-level globals shared between runs. Source: ray-project/ray PR#59544."""
        before = Leftovers.now()
        address = shared_address()
        found: dict[float, Any] = {}

        def run(config: RunConfig) -> None:
            folder = tmp_path / f"{config.runtime}-{config.learning_rate}"
            state = load(train(replace(config, run_dir=folder)).checkpoint)
            found[config.learning_rate] = state["model"]

        configs = [A2CConfig(**SMALL, learning_rate=rate) for rate in (1e-3, 1e-2)]
        threads = [
            threading.Thread(target=run, args=(replace(config, address=address),))
            for config in configs
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        together = dict(found)
        for config in configs:
            run(replace(config, runtime="inline"))
            alone = found[config.learning_rate]
            for name, tensor in together[config.learning_rate].items():
                assert torch.equal(tensor, alone[name])
        before.check(descriptors=False)

    def test_a3c_learns_with_a_parameter_server_and_counts_every_push_once(
        self, tmp_path: Path
    ) -> None:
        config = A3CConfig(
            **{**SMALL, "num_envs": 8, "total_steps": 24_000, "log_every_steps": 2000},
            address=shared_address(),
            num_workers=2,
            optimizer="adam",
            learning_rate=5e-4,
            run_dir=tmp_path / "run",
        )
        result = train(config)
        state = load(result.checkpoint)
        # A push is of at most 5 ticks by 8 columns, and of less where a column merely reset.
        assert state["env_steps"] == result.env_steps >= 24_000
        assert state["env_steps"] / 40 <= state["updates"] <= state["env_steps"] / 30
        assert result.episode_return_mean is not None
        assert result.episode_return_mean > 40  # a policy of chance comes to 22

    def test_modules_of_the_driver_reach_a_cluster(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "game_of_mine.py").write_text(GAME)
        monkeypatch.syspath_prepend(tmp_path)
        try:
            result = train(
                A2CConfig(
                    **{**SMALL, "env": "game_of_mine:Mine-v0"},
                    address=shared_address(),
                    run_dir=tmp_path / "run",
                )
            )
        finally:
            sys.modules.pop("game_of_mine", None)
        assert result.env_steps >= 400

    def test_a_cluster_of_ones_own_begins_and_ends_with_the_run(self, tmp_path: Path) -> None:
        """`--address local`; modules in the driver's directory are found there as well."""
        (tmp_path / "game_of_mine.py").write_text(GAME)
        code = (
            "import os, sys; sys.path.insert(0, os.getcwd()); from repertory.commands import main;"
            "sys.exit(main('train a2c --env game_of_mine:Mine-v0 --runtime ray --total-steps 400 "
            "--run-dir run'.split()))"
        )
        before = Leftovers.now()
        ended = run_program("-c", code, timeout=300, folder=tmp_path)
        assert ended.returncode == 0, ended.stderr
        before.check(descriptors=False)


GAME = """
import gymnasium
from repertory.environments.toy import Bandit

gymnasium.register("Mine-v0", Bandit)
"""


@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed (the extra `ray`)")
def test_what_is_copied_to_other_machines_is_what_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from repertory.runtimes.ray_cluster.connection import source_of

    (tmp_path / "one_file.py").touch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert source_of("one_file") == [str(tmp_path / "one_file.py")]
    assert source_of("package.games") == [str(tmp_path / "package")]
    for module in ("", "__main__", "gymnasium.envs", "json", "no_such_module"):
        assert source_of(module) == []


def test_an_address_without_a_cluster_is_refused() -> None:
    with pytest.raises(ConfigError, match="address is of a Ray cluster, and runtime is inline"):
        validate(A2CConfig(env="CartPole-v1", address="head:6379"))


def test_a_gpu_of_a_cluster_has_to_be_asked_for() -> None:
    config = A2CConfig(env="CartPole-v1", runtime="ray", device="cuda")
    with pytest.raises(ConfigError, match="needs learner_gpus"):
        validate(config)
    validate(replace(config, learner_gpus=0.5))


def test_without_ray_the_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name == "ray" else found(name, package)

    monkeypatch.setattr("importlib.util.find_spec", find)
    with pytest.raises(ConfigError, match=r"needs Ray.*repertory\[ray\]"):
        train(A2CConfig(**SMALL, run_dir=tmp_path / "run"))
