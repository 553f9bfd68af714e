"""Faults drawn at random against real runs, and what came of each.

Every case is a run of `repertory train` in processes of its own. Once it has a checkpoint,
something is done to it; then it either goes on to its end by itself (survived), or ends, and
`repertory resume` brings it to its end (recovered). Anything else is a failure, and so is whatever
is left behind. Some faults stand before the start: a run in too small a shared memory or with too
few descriptors has to work, or to say in one line what is wrong.

    python benchmarks/faults.py --count 200 --seed 1
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import tyro

from reports import origin

Fault = Callable[[psutil.Process, Path, random.Random], None]

START_SECONDS = 120.0
END_SECONDS = 150.0
PROGRAM = [sys.executable, "-m", "repertory"]
ARRANGEMENTS = {
    "a2c": "a2c --num-envs 4",
    "batched_a2c-step": "batched_a2c --num-actors 2 --num-learners 2 --num-envs 2",
    "batched_a2c-trajectory": "batched_a2c --num-actors 2 --sync trajectory --num-envs 2",
    "a3c": "a3c --num-workers 2 --num-envs 2",
    "a3c-lock": "a3c --num-workers 2 --num-envs 2 --lock",
    "impala": "impala --num-actors 2 --num-envs 2",
    "impala-two-learners": "impala --num-actors 2 --num-learners 2 --num-envs 2",
    "impala-replay": "impala --num-actors 2 --num-envs 2 --replay-share 0.5 --replay-capacity 200",
    "inline-a2c": "a2c --num-envs 4 --runtime inline",
}
RAY = ("batched_a2c-step", "a3c", "impala", "impala-two-learners")
ENVIRONMENTS = {
    "CartPole-v1": "--env faulty:Faulty-v0 --total-steps 12000 --checkpoint-steps 1500",
    "ALE/Pong-v5": "--env ALE/Pong-v5 --total-steps 6000 --checkpoint-steps 1000 --network a3c",
}


@dataclass
class Arguments:
    """What to draw."""

    count: int = 40
    """Cases."""
    seed: int = 1
    """Of the draws."""
    atari_share: float = 0.25
    """Share of the cases that play an Atari game."""
    ray_share: float = 0.1
    """Share of the cases that run on a Ray cluster of their own."""
    output: Path = Path(__file__).parent / "results" / "faults.json"
    """JSON file."""


@dataclass
class Case:
    """One run, what was done to it, and what came of it.

    Attributes:
        arrangement: Algorithm and its roles.
        env: Environment id.
        runtime: `processes`, `inline` or `ray`.
        fault: What was done.
        outcome: `survived`, `recovered`, `refused` (before anything was learned, with a line that
            says why), or `failed`.
        exit_code: Of the run to which it was done.
        seconds_to_end: From the fault to the end of that run.
        lost_steps: Env steps between the last line of metrics and the checkpoint gone on from.
        leftovers: What was still there five seconds after the end.
        message: The last line of stderr.
    """

    arrangement: str
    env: str
    runtime: str
    fault: str
    outcome: str = "failed"
    exit_code: int | None = None
    seconds_to_end: float = 0.0
    lost_steps: int = 0
    leftovers: list[str] | None = None
    message: str = ""


def roles_of(run: psutil.Process) -> list[psutil.Process]:
    """The processes of a run's roles; not multiprocessing's own helpers, and none of Ray's."""
    found = []
    for child in run.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(child.cmdline())
            # A role is a fork of the server that makes roles, which is a child of the run itself.
            made_by_server = "multiprocessing.forkserver" in line and child.ppid() != run.pid
            if made_by_server or "spawn_main" in line or "ray_cluster.lines" in line:
                found.append(child)
    return found


def kill_a_role(run: psutil.Process, folder: Path, draw: random.Random) -> None:
    """SIGKILL to one of the run's processes but the parent."""
    draw.choice(roles_of(run)).send_signal(signal.SIGKILL)


def stop_a_role(run: psutil.Process, folder: Path, draw: random.Random) -> None:
    """SIGSTOP to one of them: it is there and does nothing."""
    draw.choice(roles_of(run)).send_signal(signal.SIGSTOP)


def kill_the_parent(run: psutil.Process, folder: Path, draw: random.Random) -> None:
    """SIGKILL to the process that watches over the others."""
    run.send_signal(signal.SIGKILL)


def interrupt(run: psutil.Process, folder: Path, draw: random.Random) -> None:
    """SIGINT to the whole group, as Ctrl-C does."""
    os.killpg(run.pid, signal.SIGINT)


def terminate_twice(run: psutil.Process, folder: Path, draw: random.Random) -> None:
    """SIGTERM, and again a moment later."""
    run.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    if run.is_running():
        run.send_signal(signal.SIGTERM)


def cut_the_newest_checkpoint(run: psutil.Process, folder: Path, draw: random.Random) -> None:
    """SIGKILL to the parent, and half of its newest checkpoint is gone."""
    run.send_signal(signal.SIGKILL)
    # Not waited for here: whoever waits for it first takes its exit code.
    wait_until(lambda: run.status() == psutil.STATUS_ZOMBIE, 10.0)
    newest = max(folder.glob("checkpoints/step_*.pt"))
    content = newest.read_bytes()
    newest.write_bytes(content[: len(content) // 2])


def take_the_folder_away(run: psutil.Process, folder: Path, draw: random.Random) -> None:
    """Nobody may write into the folder of checkpoints for a while."""
    checkpoints = folder / "checkpoints"
    checkpoints.rename(folder / "elsewhere")
    time.sleep(1.0)
    if not checkpoints.exists():
        (folder / "elsewhere").rename(checkpoints)


def in_the_environment(what: str) -> Fault:
    """Have some column do it at its next look; see `faulty`."""

    def tell(run: psutil.Process, folder: Path, draw: random.Random) -> None:
        (folder.parent / "words").write_text(what)
        (folder.parent / "words").rename(folder.parent / "fault")

    return tell


def fill_the_disk(run: psutil.Process, folder: Path, draw: random.Random) -> None:
    """No file of the parent can grow for a while."""
    before = run.rlimit(psutil.RLIMIT_FSIZE)
    run.rlimit(psutil.RLIMIT_FSIZE, (1, before[1]))
    time.sleep(2.0)
    with contextlib.suppress(psutil.NoSuchProcess):
        run.rlimit(psutil.RLIMIT_FSIZE, before)


def open_no_more_files(run: psutil.Process, folder: Path, draw: random.Random) -> None:
    """No process of the run can open another file from now on; one of its roles is killed."""
    for process in (run, *roles_of(run)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds(), process.num_fds()))
    kill_a_role(run, folder, draw)


def nothing(run: psutil.Process, folder: Path, draw: random.Random) -> None:
    """The fault was there before the start."""


FAULTS: dict[str, Fault] = {
    "environment raises": in_the_environment("raise"),
    "environment hangs": in_the_environment("hang"),
    "environment exits": in_the_environment("exit"),
    "reward is NaN": in_the_environment("nan reward"),
    "observation is NaN": in_the_environment("nan observation"),
    "disk full": fill_the_disk,
    "no more files": open_no_more_files,
    "few descriptors": nothing,
    "small shared memory": nothing,
    "role killed": kill_a_role,
    "role stopped": stop_a_role,
    "parent killed": kill_the_parent,
    "interrupted": interrupt,
    "terminated twice": terminate_twice,
    "checkpoint cut": cut_the_newest_checkpoint,
    "folder away": take_the_folder_away,
}


BEFORE_THE_START = {
    "few descriptors": ["prlimit", "--nofile=40"],
    "small shared memory": [
        *("unshare", "--mount", "sh", "-c"),
        'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$0" "$@"',
    ],
}
"""Words before the command."""
CAN_MOUNT = subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
EXPECTED = {
    "environment raises": {1},
    "environment hangs": {1},
    "environment exits": {1, 3},  # inline, it is the run itself that exits
    "reward is NaN": {1},
    "observation is NaN": {1},
    "disk full": {1},
    "no more files": {1},
    "few descriptors": {1},
    "small shared memory": {1},
    "role killed": {1},
    "role stopped": {1},
    "parent killed": {-9},
    "interrupted": {130},
    "terminated twice": {143},
    "checkpoint cut": {-9},
    "folder away": set[int](),
}
"""Exit codes other than 0 that are right after a fault."""


def main() -> None:
    """Draw the cases, one after another, and write down what came of them."""
    arguments = tyro.cli(Arguments, description=__doc__)
    draw = random.Random(arguments.seed)
    cases = []
    for number in range(arguments.count):
        case = draw_a_case(arguments, draw)
        with tempfile.TemporaryDirectory() as folder:
            before = {child.pid for child in psutil.Process().children(recursive=True)}
            try:
                play(case, Path(folder) / "run", draw)
            except subprocess.TimeoutExpired as error:  # its words name places on this machine
                case.message = f"{error.cmd[3]} had not ended after {error.timeout:g} s"
            except Exception as error:
                case.message = f"{type(error).__name__}: {error}"
            for child in psutil.Process().children(recursive=True):
                if child.pid not in before:  # of a case that failed; the next one starts clean
                    child.kill()
        case.message = re.sub(r"/\S*/", "", case.message)  # of paths, the last part
        cases.append(case)
        sys.stdout.write(f"{number + 1}: {case}\n")
        sys.stdout.flush()
        write(arguments, cases)


def draw_a_case(arguments: Arguments, draw: random.Random) -> Case:
    """What is run, and what is done to it; only what can be done there."""
    ray = draw.random() < arguments.ray_share
    arrangement = draw.choice(RAY if ray else list(ARRANGEMENTS))
    inline = arrangement.startswith("inline")
    atari = draw.random() < arguments.atari_share
    faults = [
        name
        for name in FAULTS
        # Atari's emulator is not ours to break; without roles none can be lost; and a cluster's
        # processes need more than a limit leaves.
        if (name != "small shared memory" or CAN_MOUNT)
        and not (atari and ("environment" in name or "NaN" in name))
        and not (inline and ("role" in name or name in ("environment hangs", "no more files")))
        and not (ray and name in ("no more files", *BEFORE_THE_START))
    ]
    return Case(
        arrangement,
        "ALE/Pong-v5" if atari else "CartPole-v1",
        "ray" if ray else "inline" if inline else "processes",
        draw.choice(faults),
    )


def play(case: Case, folder: Path, draw: random.Random) -> None:
    """Start a run, do it, wait for its end, go on with it if that is needed, and look around."""
    words = f"train {ARRANGEMENTS[case.arrangement]} {ENVIRONMENTS[case.env]}"
    words += f" --role-timeout-seconds 10 --run-dir {folder}"
    words += " --runtime ray" if case.runtime == "ray" else ""
    shared_before = shared_files()
    with (folder.parent / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [*BEFORE_THE_START.get(case.fault, []), *PROGRAM, *words.split()],
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
            env=environment(folder),
        )
    run = psutil.Process(process.pid)
    # What cuts the newest leaves one to go on from.
    enough = 2 if case.fault == "checkpoint cut" else 1
    wait_until(
        lambda: (
            len(list(folder.glob("checkpoints/step_*.pt"))) >= enough or process.poll() is not None
        ),
        START_SECONDS,
    )
    if process.poll() == 1 and case.fault in BEFORE_THE_START:
        said = (folder.parent / "stderr").read_text().splitlines()
        case.exit_code, case.message = 1, " | ".join(said[-3:])
        # A role's traceback may stand above; the last line has to be ours.
        case.outcome = "refused" if said[-1].startswith("repertory: ") else "failed"
        case.leftovers = sorted(shared_files() - shared_before)
        return
    roles = run.children(recursive=True)
    time.sleep(draw.random())
    begun = time.monotonic()
    FAULTS[case.fault](run, folder, draw)
    case.exit_code = process.wait(END_SECONDS)
    case.seconds_to_end = round(time.monotonic() - begun, 1)
    lines = (folder.parent / "stderr").read_text().splitlines()
    case.message = lines[-1] if lines else ""
    if case.exit_code == 0:
        case.outcome = "survived"
    elif case.exit_code not in EXPECTED[case.fault]:
        raise RuntimeError(f"exit code {case.exit_code}: {case.message}")
    else:
        told = last_env_steps(folder)
        resumed = subprocess.run(
            [*PROGRAM, "resume", str(folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=END_SECONDS,
            env=environment(folder),
        )
        # What came last may have been the whole of it, with nothing left to do.
        nothing_left = resumed.returncode == 2 and "env steps already" in resumed.stderr
        if resumed.returncode and not nothing_left:
            raise RuntimeError(f"resume ended with {resumed.returncode}: {resumed.stderr[-500:]}")
        case.outcome = "recovered"
        if not nothing_left:
            case.lost_steps = max(0, told - went_on_from(folder))
    # Ray's own daemons outlive a killed driver for a while.
    deadline = time.monotonic() + (60.0 if case.runtime == "ray" else 5.0)
    while left := leftovers(roles, shared_before):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    case.leftovers = left


def environment(folder: Path) -> dict[str, str]:
    """Variables of a run: `faulty` is found, and where it looks."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
        "FAULT_FOLDER": str(folder.parent),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def leftovers(roles: list[psutil.Process], shared_before: set[str]) -> list[str]:
    """Processes of the run and files in shared memory that are still there."""
    alive = [f"process {role.pid}" for role in roles if role.is_running()]
    return alive + sorted(shared_files() - shared_before)


def shared_files() -> set[str]:
    """Names in the folder of shared memory, where the system has one."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def last_env_steps(folder: Path) -> int:
    """Env steps of the last whole line of metrics."""
    steps = 0
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        try:
            steps = json.loads(line).get("env_steps", steps)
        except ValueError:
            continue
    return steps


def went_on_from(folder: Path) -> int:
    """Env steps of the checkpoint that the last resume began with."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return int([r["from_env_steps"] for r in lines if r.get("event") == "resume"][-1])


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    """Wait for something, but not for ever."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"what was waited for has not come in {seconds:g} s")
        time.sleep(0.05)


def write(arguments: Arguments, cases: list[Case]) -> None:
    """The result as it stands."""
    result = {
        **origin(__file__),
        "outcomes": dict(Counter(case.outcome for case in cases)),
        "left_something": sum(bool(case.leftovers) for case in cases),
        "cases": [asdict(case) for case in cases],
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
