"""Whole runs to which something happens: they go on, or end with a name and a checkpoint."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from repertory import environments
from repertory.algorithms.a2c import A2CConfig
from repertory.algorithms.a3c import A3CConfig
from repertory.algorithms.batched_a2c import BatchedA2CConfig
from repertory.algorithms.impala import IMPALAConfig
from repertory.checkpoints import load, newest_readable
from repertory.config import RunConfig
from repertory.metrics import Record
from repertory.runtimes.base import RoleFailed
from repertory.training import train
from tests import probes
from tests.leftovers import Leftovers

SETTINGS: dict[str, Any] = {
    "env": "CartPole-v1",
    "hidden_sizes": (8,),
    "num_envs": 1,
    "role_timeout_seconds": 5.0,
    "log_every_steps": 50,
}


CAN_MOUNT = (
    sys.platform == "linux"
    and not subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode
)


def records(run_dir: Path) -> list[Record]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def told(run_dir: Path, event: str) -> list[str]:
    """Messages of the events of that name."""
    return [str(r["message"]) for r in records(run_dir) if r.get("event") == event]


def seed_of(index: int, config: RunConfig) -> int:
    """Seed of the first column of an actor or a worker."""
    return environments.seeds_for(config.seed, index, config.num_envs)[0]


def parameters_are_finite(run_dir: Path) -> bool:
    files = list((run_dir / "checkpoints").glob("step_*.pt"))
    return all(bool(p.isfinite().all()) for file in files for p in load(file)["model"].values())


@pytest.mark.parametrize("not_finite", ["stop", "skip"])
@pytest.mark.parametrize(
    ("where", "value"),
    [("reward", math.inf), ("reward", math.nan), ("observation", math.nan), ("reward", 1e38)],
)
def test_b103_one_bad_number_at_step_500_never_reaches_the_parameters(
    where: str, value: float, not_finite: str, tmp_path: Path
) -> None:
    """One bad gradient kills the model silently, and its checkpoints too.

    Source: pytorch/pytorch#46849; facebookresearch/habitat-lab PR#2229;
    cpnota/autonomous-learning-library PR#255.
    """

    env = partial(UnboundedNaN, 500, None, where, value)
    settings = {**SETTINGS, "env": env, "runtime": "inline", "not_finite": not_finite}
    config = A2CConfig(
        **settings, total_steps=1000, checkpoint_steps=250, keep_checkpoints=9, run_dir=tmp_path
    )
    if not_finite == "stop":
        with pytest.raises(RoleFailed, match=r"not finite|is nan|is inf") as caught:
            train(config)
        if value != 1e38:  # that one is a number: only the gradient of it is none
            assert f"UnboundedNaN, column 0, tick 499 of this actor: the {where} is" in str(
                caught.value
            )
    else:
        assert train(config).env_steps >= 1000
        assert told(tmp_path, "refused" if value == 1e38 else "left_out")
    assert len(list((tmp_path / "checkpoints").glob("step_*.pt"))) >= 2
    assert parameters_are_finite(tmp_path)


def test_b103_an_observation_of_1e38_harms_nothing(tmp_path: Path) -> None:
    """Finite numbers of 1e38 overflow the norm of a gradient.

    Source: pytorch/pytorch#46849; cpnota/autonomous-learning-library PR#255.
    """
    env = partial(UnboundedNaN, 500, None, "observation", 1e38)
    settings = {**SETTINGS, "env": env, "runtime": "inline", "not_finite": "skip"}
    assert train(A2CConfig(**settings, total_steps=1000, run_dir=tmp_path)).env_steps >= 1000
    assert parameters_are_finite(tmp_path)


class UnboundedNaN(probes.NaN):
    """With observations that may be any number."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.observation_space = probes.spaces.Box(-math.inf, math.inf, (1,), "float32")


def test_b72_a_hung_environment_of_one_worker_is_named_and_replaced(tmp_path: Path) -> None:
    """Worker hangs and the master waits.

    Source: alex-petrenko/sample-factory#316, #137; PrimeIntellect-ai/prime-rl#3140.
    """
    config = A3CConfig(**SETTINGS, num_workers=2, total_steps=3000, run_dir=tmp_path)
    env = partial(HangsSlowly, 50, seed_of(1, config))
    config = A3CConfig(**{**vars(config), "env": env})
    before = Leftovers.now()
    result = train(config)
    assert result.reason == "total_steps"
    (message,) = told(tmp_path, "replaced")
    assert "worker-1 failed: no sign of life for 5 s" in message
    before.check(descriptors=False)


class HangsSlowly(probes.Hang):
    """Leaves the other worker something to do until the hang is seen."""

    def step(self, action: Any) -> Any:
        time.sleep(0.004)
        return super().step(action)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("how", ["SIGKILL", "exit"])
def test_b73_a_killed_player_is_replaced_and_the_steps_go_on(
    how: str, vectorization: str, tmp_path: Path
) -> None:
    """Worker killed from outside, or ended by `os._exit`.

    Source: openai/gym#3281; ray-project/ray#6862, #5820; Farama-Foundation/HighwayEnv PR#668.

    With `async` it is a process of the environment that ends, and its actor is replaced.
    """
    settings = {**SETTINGS, "vectorization": vectorization}
    config = IMPALAConfig(**settings, num_actors=2, total_steps=1500, run_dir=tmp_path)
    env = partial(Ends, how, seed_of(1, config))
    result = train(IMPALAConfig(**{**vars(config), "env": env}))
    assert result.reason == "total_steps"
    (message,) = told(tmp_path, "replaced")
    said = "killed by SIGKILL" if how == "SIGKILL" else "ended with exit code 3"
    assert "actor-1 failed: " in message
    assert said in message
    assert "pid" in message
    curve = [r for r in records(tmp_path) if r["kind"] == "progress"]
    for key in ("env_steps", "updates", "episodes"):
        assert all(a[key] <= b[key] for a, b in pairwise(curve)), key
    assert load(result.checkpoint)["env_steps"] == result.env_steps


class Ends(probes.Endless):
    """Ends its process in its 20th env step, by a signal or by `os._exit`."""

    def __init__(self, how: str, on_seed: int) -> None:
        super().__init__(20, on_seed)
        self.how = how

    def step(self, action: Any) -> Any:
        time.sleep(0.002)
        return super().step(action)

    def observation(self) -> Any:
        if self.is_due and self.how == "exit":
            os._exit(3)
        if self.is_due:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().observation()


@pytest.mark.parametrize("runtime", ["inline", "processes"])
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_b59_the_column_that_raises_is_named_with_its_step(
    vectorization: str, runtime: str, tmp_path: Path
) -> None:
    """Env exception hidden behind a TypeError.

    Source: Farama-Foundation/Gymnasium#177 (PR#178); openai/gym#1542, PR#1556.
    """
    settings = {**SETTINGS, "num_envs": 3, "runtime": runtime, "vectorization": vectorization}
    config = BatchedA2CConfig(**settings, num_actors=1, total_steps=4000, run_dir=tmp_path)
    second = environments.seeds_for(config.seed, 0, 3)[1]
    config = BatchedA2CConfig(**{**vars(config), "env": partial(probes.Raise, 7, second)})
    before = Leftovers.now()
    started = time.monotonic()
    with pytest.raises(RoleFailed, match=r"column 1, env step 7: ValueError: boom") as caught:
        train(config)
    assert "boom" in caught.value.traceback
    assert time.monotonic() - started < 45  # mostly the start of processes
    del caught  # its frames hold the columns' processes
    before.check(descriptors=False)


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")
def test_b77_descriptors_stay_as_many_under_a_low_limit(tmp_path: Path) -> None:
    """Sending tensors through queues keeps a descriptor for each.

    Source: DeNA/HandyRL#121; pytorch/pytorch#14768; pytorch/FBGEMM#5037.
    """
    words = "train impala --env CartPole-v1 --num-actors 2 --num-envs 1 --hidden-sizes 8 "
    words += f"--total-steps 8000 --log-every-steps 200 --run-dir {tmp_path / 'run'}"
    limits = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))"
    with start(words, limits=limits) as run:
        counts: dict[int, list[int]] = {}
        while run.poll() is None:
            if len(progress_of(tmp_path / "run")) > 2:  # warm
                for process in processes_of(run.pid):
                    with_fds(process, counts)
            time.sleep(0.2)
    assert run.returncode == 0
    assert any(len(seen) > 3 for seen in counts.values())
    for seen in counts.values():
        # A checkpoint that is being written holds one or two for a moment.
        assert min(seen[-3:]) - seen[0] <= 1, counts


@pytest.mark.skipif(os.name != "posix", reason="limits are set as POSIX has them")
def test_b77_a_limit_that_is_too_low_is_named(tmp_path: Path) -> None:
    """A run with more roles than the limit of open files allows.

    Source: DeNA/HandyRL#121; pytorch/pytorch#14768; pytorch/FBGEMM#5037.
    """
    words = "train impala --env CartPole-v1 --num-actors 40 --num-envs 1 --hidden-sizes 8 "
    words += f"--total-steps 1000 --run-dir {tmp_path / 'run'}"
    limits = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
    with start(words, limits=limits) as run:
        _, errors = run.communicate(timeout=50)
    assert run.returncode == 1
    assert "ulimit -n" in errors.splitlines()[-1], errors


@pytest.mark.skipif(not CAN_MOUNT, reason="nothing can be mounted here")
def test_a_shared_memory_that_is_too_small_is_named(tmp_path: Path) -> None:
    """Containers have 64 MB of it unless told otherwise; here it is 64 kB."""
    words = "train impala --env CartPole-v1 --num-actors 2 --unroll-length 500 --hidden-sizes 64"
    process = subprocess.run(
        [
            *("unshare", "--mount", "sh", "-c"),
            'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$0" "$@"',
            *(sys.executable, "-m", "repertory", *words.split()),
            *("--total-steps", "1000", "--run-dir", str(tmp_path / "run")),
        ],
        env=with_path(),
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert process.returncode == 1
    (line,) = process.stderr.splitlines()
    assert "the start of roles failed: unable to allocate shared memory" in line
    assert "--shm-size" in line


def test_b92_a_kill_during_a_save_leaves_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    """Checkpoint cut in half.

    Source: Lightning-AI/pytorch-lightning#688, #19970; PrimeIntellect-ai/prime-rl PR#2992.
    """
    for repeat in range(20):
        folder = tmp_path / str(repeat)
        (folder / "checkpoints").mkdir(parents=True)
    subprocess.run(
        [sys.executable, "-c", _SAVE_AND_KILL, str(tmp_path)],
        check=True,
        timeout=55,
        env=with_path(),
    )
    for repeat in range(20):
        path, state, damaged = newest_readable(tmp_path / str(repeat))
        assert state["model"]["weight"].shape == (300, 300)
        assert state["env_steps"] > 0
        assert not damaged, path


_SAVE_AND_KILL = """
import os, pathlib, random, signal, sys, time
import gymnasium, torch
from repertory.checkpoints import make_state, model_state, save_step
from repertory.environments import EnvironmentConfig, describe

torch.set_num_threads(1)
spec = describe(EnvironmentConfig("CartPole-v1"))
draw = random.Random(1)
model = torch.nn.Linear(300, 300)
for repeat in range(20):
    folder = pathlib.Path(sys.argv[1]) / str(repeat) / "checkpoints"
    pid = os.fork()
    if pid == 0:
        for steps in range(1, 10_000):
            save_step(folder, make_state(model=model_state(model), optimizer={}, env_steps=steps,
                updates=steps, algorithm="a2c", config="", spec=spec))
    while not list(folder.glob("step_*.pt")):
        time.sleep(0.002)
    time.sleep(0.05 * draw.random())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


@pytest.mark.skipif(os.name != "posix", reason="limits are set as POSIX has them")
def test_b92_a_full_disk_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    """Nothing more can be written from some moment on; the agent learns all the same.

    Source: Lightning-AI/pytorch-lightning#688, #19970; optuna/optuna-examples PR#53.
    """
    words = (
        "train a2c --env CartPole-v1 --hidden-sizes 256 256 --total-steps 6000 --runtime inline "
    )
    words += f"--checkpoint-steps 1000 --run-dir {tmp_path / 'run'}"
    # The optimiser's state makes a checkpoint of some 800 kB.
    limits = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000,)*2)"
    with start(words, limits=limits) as run:
        printed, errors = run.communicate(timeout=55)
    assert run.returncode == 1
    assert "the run goes on" in printed
    assert "6,0" in printed, "it went on to its end"
    assert "cannot write" in errors.splitlines()[-1]
    # TensorBoard's own thread may have something to say, of an error that was raised here too.
    own = re.sub(r"Exception in thread .*?(?=\nrepertory: |\Z)", "", errors, flags=re.DOTALL)
    assert "src/repertory" not in own
    assert not list((tmp_path / "run" / "checkpoints").glob(".*.tmp"))


@pytest.mark.skipif(os.name != "posix", reason="processes are forked as POSIX has them")
def test_b83_no_role_is_forked(tmp_path: Path) -> None:
    """CUDA and thread pools do not survive a fork; no role is one of this process.

    Source: neumovelab/myoassist#36; opendilab/DI-engine#816; ShangtongZhang/DeepRL#82.
    """
    settings = {**SETTINGS, "evaluation_steps": 100, "evaluation_episodes": 1}
    config = A3CConfig(**settings, num_workers=2, total_steps=400, run_dir=tmp_path)
    lines: list[list[str]] = []

    def look(record: Record) -> None:
        if record["kind"] == "progress":
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    lines.append(child.cmdline())

    train(config, on_record=look)
    assert lines
    own = psutil.Process().cmdline()
    assert all(line != own and "-c" in line for line in lines if line)


def start(words: str, limits: str = "") -> subprocess.Popen[str]:
    """`repertory` with these words, in a process whose limits are set first."""
    code = (
        f"{limits}\nimport sys\nfrom repertory.commands import main\nsys.exit(main(sys.argv[1:]))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, *words.split()],
        env=with_path(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def with_path() -> dict[str, str]:
    """This process's environment, from which a new interpreter finds the same modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def progress_of(run_dir: Path) -> list[str]:
    """Lines of metrics so far."""
    metrics = run_dir / "metrics.jsonl"
    text = metrics.read_text() if metrics.exists() else ""
    return [line for line in text.splitlines() if '"progress"' in line]


def processes_of(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def with_fds(process: psutil.Process, counts: dict[int, list[int]]) -> None:
    """Note how many descriptors a process has open, if it is still there."""
    try:
        counts.setdefault(process.pid, []).append(process.num_fds())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return
