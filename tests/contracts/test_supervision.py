"""Supervision: results and failures reach the parent in seconds, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from repertory.runtimes.base import RoleFailed, Runtime
from repertory.runtimes.processes import ProcessRuntime
from tests.contracts import roles
from tests.contracts.conftest import RUNTIMES
from tests.leftovers import Leftovers


def test_results_records_and_threads(runtime: Runtime) -> None:
    runtime.start("one", roles.threads_here, threads=1)
    runtime.start("two", roles.threads_here, threads=2)
    assert runtime.supervise(lambda role, record: None) == {"one": 1, "two": 2}


def test_records_arrive_in_order(runtime: Runtime) -> None:
    queue = runtime.trajectory_queue(roles.SPEC, 1, order="actor")
    runtime.start("actor-0", roles.produce, 0, 50, queue.writer(0))
    runtime.start("learner-0", roles.consume, 1, 50, queue.reader())
    seen: list[object] = []

    def watch(role: str, record: dict[str, object]) -> None:
        if role == "actor-0":
            seen.append(record["index"])

    runtime.supervise(watch)
    assert seen == list(range(50))


def test_state_is_collected_at_a_safe_point_when_asked(runtime: Runtime) -> None:
    runtime.start("learner-0", roles.give_state, 20)
    states: list[dict[str, object]] = []

    def watch(role: str, record: dict[str, object]) -> None:
        if record["kind"] == "state":
            states.append(record)
        elif record["round"] == 3:
            runtime.collect_state()

    assert runtime.supervise(watch) == {"learner-0": 1}
    assert len(states) == 1
    assert states[0]["state"]["tensor"].tolist() == [0, 1, 2]  # type: ignore[index]


def test_b74_a_role_that_raises_ends_the_run_with_its_traceback(runtime: Runtime) -> None:
    """Exception in a learner thread or actor process not seen.

    Source: jerrodparker20/adaptive-transformers-in-rl#13; ray-project/ray#36801.
    """
    queue = runtime.trajectory_queue(roles.SPEC, 1, order="actor")
    runtime.start("learner-0", roles.consume, 1, 1, queue.reader())  # would wait for ever
    runtime.start("actor-0", roles.raise_after, 0.1, "boom 42")
    with pytest.raises(RoleFailed, match=r"actor-0 failed: ValueError: boom 42") as caught:
        runtime.supervise(lambda role, record: None)
    assert "raise_after" in caught.value.traceback
    assert caught.value.__notes__ == [caught.value.traceback], "shown where Python shows it"


@pytest.mark.parametrize(
    ("how", "said"), [("SIGKILL", "killed by SIGKILL"), ("exit", "exit code 3")]
)
def test_b73_a_killed_role_is_named_with_pid_and_signal(
    mortal_runtime: Runtime, how: str, said: str
) -> None:
    """Worker killed from outside, or ended by `os._exit`.

    Source: openai/gym#3281; ray-project/ray#6862, #5820; Farama-Foundation/HighwayEnv PR#668.
    """
    queue = mortal_runtime.trajectory_queue(roles.SPEC, 1, order="actor")
    mortal_runtime.start("learner-0", roles.consume, 1, 1, queue.reader())
    mortal_runtime.start("actor-0", roles.die_after, 0.1, how)
    started: list[float] = []

    def watch(role: str, record: dict[str, object]) -> None:
        started.append(time.monotonic())

    with pytest.raises(RoleFailed, match=rf"actor-0 failed: .*{said}.*pid \d+"):
        mortal_runtime.supervise(watch)
    assert time.monotonic() - started[0] < 15


@pytest.mark.parametrize("how", ["SIGKILL", "hang"])
def test_b73_a_learner_lost_while_the_run_stops_is_named(mortal_runtime: Runtime, how: str) -> None:
    """A stop must not hide that the state it should save is gone.

    Source: openai/gym#3281; ray-project/ray#6862.
    """
    if how == "hang":
        mortal_runtime.start("learner-0", roles.hang)
    else:
        mortal_runtime.start("learner-0", roles.die_after, 0.5, how)
    started: list[float] = []

    def stop(role: str, record: dict[str, object]) -> None:
        started.append(time.monotonic())
        mortal_runtime.stop()

    with pytest.raises(RoleFailed, match="learner-0 failed: "):
        mortal_runtime.supervise(stop)
    assert time.monotonic() - started[0] < 15


def test_b73_a_killed_role_is_seen_though_a_child_of_its_own_lives_on(
    mortal_runtime: Runtime,
) -> None:
    """A worker's end was seen only as the end of its line, which its forked child held open.

    Source: openai/gym#3281; ray-project/ray#6862.
    """
    mortal_runtime.start("actor-0", roles.fork_and_die, 0.1)
    forked: list[int] = []
    started = time.monotonic()

    def watch(role: str, record: dict[str, object]) -> None:
        forked.append(int(str(record["forked"])))

    try:
        with pytest.raises(RoleFailed, match=r"actor-0 failed: killed by SIGKILL \(pid \d+\)"):
            mortal_runtime.supervise(watch)
    finally:
        for pid in forked:
            os.kill(pid, signal.SIGKILL)
    assert time.monotonic() - started < 40


def test_a_program_that_a_role_has_started_hears_a_request_to_end(mortal_runtime: Runtime) -> None:
    """What a process ignores, programs that it starts ignore too: their `terminate` did nothing."""
    mortal_runtime.start("actor-0", roles.terminate_a_program)
    results = mortal_runtime.supervise(lambda role, record: None)
    assert results == {"actor-0": -signal.SIGTERM}


def test_a_stop_leaves_roles_the_time_of_an_update_unless_somebody_waits() -> None:
    """A slow environment's last unroll was cut, and its state lost, where nobody was in a hurry."""
    for hurry in (False, True):
        runtime = ProcessRuntime(role_timeout_seconds=60.0)
        runtime.start("learner-0", roles.end_late, 12.0, "state")
        asked: list[float] = []

        def stop(
            role: str,
            record: dict[str, object],
            runtime: Runtime = runtime,
            hurry: bool = hurry,
            asked: list[float] = asked,
        ) -> None:
            asked.append(time.monotonic())
            runtime.stop(hurry=hurry)

        if hurry:
            with pytest.raises(RoleFailed, match="learner-0 failed: it was asked to stop"):
                runtime.supervise(stop)
            assert time.monotonic() - asked[0] < 10.0
        else:
            assert runtime.supervise(stop) == {"learner-0": "state"}


def test_a_role_that_is_late_hands_over_the_state_that_it_last_offered(runtime: Runtime) -> None:
    """A learner that plays, in an unroll that took longer than somebody waits, lost all of it."""
    runtime.start("learner-0", roles.offer_and_sleep, 12.0)
    asked: list[float] = []

    def stop(role: str, record: dict[str, object]) -> None:
        asked.append(time.monotonic())
        runtime.stop(hurry=True)

    assert runtime.supervise(stop) == {"learner-0": {"updates": 7}}
    assert time.monotonic() - asked[0] < 11.0


def test_a_role_that_is_late_and_has_no_whole_state_is_named(runtime: Runtime) -> None:
    runtime.start("learner-0", partial(roles.offer_and_sleep, whole=False), 12.0)
    with pytest.raises(RoleFailed, match="learner-0 failed: it was asked to stop and did not end"):
        runtime.supervise(lambda role, record: runtime.stop(hurry=True))


def test_a_state_that_cannot_be_collected_does_not_hide_the_failure(runtime: Runtime) -> None:
    runtime.start("learner-0", roles.offer_and_raise, "boom")
    with pytest.raises(RoleFailed, match="learner-0 failed: ValueError: boom"):
        runtime.supervise(lambda role, record: None)


def test_a_late_actor_does_not_spoil_a_stop_that_has_its_state() -> None:
    runtime = ProcessRuntime()
    runtime.start("learner-0", roles.end_late, 0.5, "state")
    runtime.start("actor-0", roles.hang)
    results = runtime.supervise(lambda role, record: runtime.stop(hurry=True))
    assert results == {"learner-0": "state"}


def test_a_replacement_that_cannot_be_started_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = ProcessRuntime(max_restarts=1)
    runtime.start("learner-0", roles.end_late, 2.0, "state")
    runtime.start("actor-0", roles.die_after, 0.1, "SIGKILL", replaceable=True)

    def launch(*arguments: object, **settings: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(runtime, "_launch", launch)
    with pytest.raises(RoleFailed, match=r"SIGKILL.*another one cannot be.*ulimit -n") as caught:
        runtime.supervise(lambda role, record: None)
    assert caught.value.results == {"learner-0": "state"}


def test_b72_a_role_that_hangs_is_named_within_its_time(mortal_runtime: Runtime) -> None:
    """Worker hangs and the master waits.

    Source: alex-petrenko/sample-factory#316, #137; PrimeIntellect-ai/prime-rl#3140.
    """
    mortal_runtime.start("actor-0", roles.hang)
    started: list[float] = []
    with pytest.raises(RoleFailed, match="actor-0 failed: no sign of life for 5 s"):
        mortal_runtime.supervise(lambda role, record: started.append(time.monotonic()))
    assert time.monotonic() - started[0] < 12


def test_b72_a_slow_start_is_no_failure(mortal_runtime: Runtime) -> None:
    """A slow constructor was taken for a dead worker; source: alex-petrenko/sample-factory#137."""
    mortal_runtime.start("actor-0", roles.start_slowly, 6.0)
    assert mortal_runtime.supervise(lambda role, record: None) == {"actor-0": "started"}


def test_b72_a_role_that_never_starts_is_named_with_the_time_it_had() -> None:
    """A start is given longer than a silence; source: alex-petrenko/sample-factory#137."""
    runtime = ProcessRuntime(role_timeout_seconds=0.2, start_seconds=0.5)
    runtime.start("actor-0", roles.start_slowly, 60.0)
    with pytest.raises(RoleFailed, match=r"actor-0 failed: no sign of life for 0\.5 s"):
        runtime.supervise(lambda role, record: None)


def test_waiting_is_a_sign_of_life(mortal_runtime: Runtime) -> None:
    """The learner waits for eight seconds where it may be silent for five."""
    queue = mortal_runtime.trajectory_queue(roles.SPEC, 2, order="actor")
    mortal_runtime.start("learner-0", roles.consume, 2, 1, queue.reader())
    mortal_runtime.start("actor-0", roles.produce, 0, 1, queue.writer(0))
    mortal_runtime.start("actor-1", roles.produce_late, 8.0, queue.writer(1))
    results = mortal_runtime.supervise(lambda role, record: None)
    assert results["learner-0"] == [[0, 0, 100, 100]]


@pytest.mark.parametrize("make", RUNTIMES.values(), ids=list(RUNTIMES))
def test_no_descriptor_is_left_after_a_run(make: Callable[[], Runtime]) -> None:
    def run_once() -> None:
        runtime = make()
        queue = runtime.trajectory_queue(roles.SPEC, 1, order="actor")
        group = runtime.learner_group(roles.model_of(0), 2)
        store = runtime.parameter_store(roles.model_of(0), num_readers=1)
        runtime.start("learner-0", roles.consume, 1, 2, queue.reader())
        runtime.start("actor-0", roles.produce, 0, 2, queue.writer(0))
        del group, store
        runtime.supervise(lambda role, record: None)

    run_once()
    before = Leftovers.now()
    run_once()
    before.check()


def test_closing_a_runtime_that_was_never_supervised(mortal_runtime: Runtime) -> None:
    queue = mortal_runtime.trajectory_queue(roles.SPEC, 1, order="actor")
    mortal_runtime.start("learner-0", roles.consume, 1, 1, queue.reader())
    mortal_runtime.start("actor-0", roles.hang)
    mortal_runtime.close()


def test_children_end_soon_after_the_parent_is_killed(tmp_path: Path) -> None:
    script = Path(__file__).with_name("parent_to_kill.py")
    shared = Path("/dev/shm")
    before = set(shared.iterdir()) if shared.is_dir() else set()
    with subprocess.Popen(
        [sys.executable, "-m", f"tests.contracts.{script.stem}"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=script.parents[2],
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "running\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) >= 2
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive
    after = set(shared.iterdir()) if shared.is_dir() else set()
    assert not after - before


@pytest.mark.parametrize("how", ["SIGKILL", "hang"])
def test_b72_a_dead_or_hung_actor_is_replaced_and_told(
    mortal_runtime: Runtime, tmp_path: Path, how: str
) -> None:
    """A worker dies and the master waits; slots that it held are not lost.

    Source: openai/gym#3281; ray-project/ray#6862.
    """
    queue = mortal_runtime.trajectory_queue(roles.SPEC, 1, order="actor", capacity=1)
    mortal_runtime.start("learner-0", roles.consume, 1, 10, queue.reader())
    mortal_runtime.start(
        "actor-0",
        roles.produce_and_die,
        str(tmp_path),
        1 if how == "hang" else 2,
        how,
        10,
        queue.writer(0),
        replaceable=True,
    )
    told: list[str] = []

    def watch(role: str, record: dict[str, object]) -> None:
        if record.get("event") == "replaced":
            told.append(str(record["message"]))

    results = mortal_runtime.supervise(watch)
    assert results["learner-0"] == [[float(index)] * 2 for index in range(10)]
    said = "no sign of life" if how == "hang" else "killed by SIGKILL"
    assert told
    assert all("actor-0 failed" in line and said in line and "pid" in line for line in told)


def test_replacements_have_an_end(mortal_runtime: Runtime, tmp_path: Path) -> None:
    queue = mortal_runtime.trajectory_queue(roles.SPEC, 1, order="actor")
    mortal_runtime.start("learner-0", roles.consume, 1, 10, queue.reader())
    mortal_runtime.start(
        "actor-0",
        roles.produce_and_die,
        str(tmp_path),
        99,
        "SIGKILL",
        10,
        queue.writer(0),
        replaceable=True,
    )
    with pytest.raises(RoleFailed, match="after 2 replacements in this run") as caught:
        mortal_runtime.supervise(lambda role, record: None)
    assert caught.value.results["learner-0"] == []
