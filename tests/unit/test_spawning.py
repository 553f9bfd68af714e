"""Children of a server begin as spawned ones would, and sooner."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import repertory
from repertory.spawning import how_it_ended, prepare_to_start_children, start_child

pytestmark = [
    pytest.mark.xdist_group("processes"),
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere children are spawned"),
]


def call_in_child(function: Callable[[], Any]) -> Any:
    """What a function returns in a child."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = start_child("child", _send_result, theirs, function)
    theirs.close()
    with ours:
        result = ours.recv()
    process.join()
    assert process.exitcode == 0
    return result


def _send_result(pipe: Connection, function: Callable[[], Any]) -> None:
    pipe.send(function())


def _draw() -> float:
    return float(np.random.random())


def _variable() -> str | None:
    return os.environ.get("REPERTORY_TEST")


def _multiply_with_two_threads() -> float:
    torch.set_num_threads(2)
    return float(torch.ones(800, 800).matmul(torch.ones(800, 800)).sum())


def _count(pipe: Connection, *others: Connection) -> None:
    pipe.send(len(others))


def server() -> int:
    """Process id of the server."""
    from multiprocessing import forkserver

    prepare_to_start_children()
    pid: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def test_a_child_is_no_fork_of_a_process_that_has_run_torch() -> None:
    _multiply_with_two_threads()  # here, too
    assert call_in_child(_multiply_with_two_threads) == 800**3
    torch.set_num_threads(1)


def test_children_of_one_server_do_not_draw_the_same() -> None:
    assert call_in_child(_draw) != call_in_child(_draw)


def test_a_child_has_the_variables_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    server()
    monkeypatch.setenv("REPERTORY_TEST", "of now")
    assert call_in_child(_variable) == "of now"
    monkeypatch.delenv("REPERTORY_TEST")
    assert call_in_child(_variable) is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_server_outlives_a_signal_to_everybody(number: signal.Signals) -> None:
    before = server()
    call_in_child(_draw)  # so that it has imported all
    os.kill(before, number)
    time.sleep(0.2)
    call_in_child(_draw)
    assert server() == before


def test_children_of_others_can_be_terminated() -> None:
    """The server is multiprocessing's only one; a program may have children of its own by it."""
    server()
    process = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,))
    process.start()
    time.sleep(0.5)
    process.terminate()
    process.join(10)
    assert process.exitcode == -signal.SIGTERM


def test_children_of_others_do_not_draw_the_same() -> None:
    server()
    forks = multiprocessing.get_context("forkserver")
    drawn = []
    for _ in range(2):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = forks.Process(target=_send_result, args=(theirs, _draw))
        process.start()
        theirs.close()
        with ours:
            drawn.append(ours.recv())
        process.join()
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("number", [248, 249, 250, 251, 252, 300])
def test_more_descriptors_than_the_server_takes(number: int) -> None:
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(number)]
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = start_child("child", _count, theirs, *[end for end, _ in pipes])
    theirs.close()
    assert ours.poll(50)
    assert ours.recv() == number
    process.join()
    for end in [ours, *[end for pair in pipes for end in pair]]:
        end.close()


def test_a_child_whose_server_was_killed_can_be_ended_and_another_one_started() -> None:
    process = start_child("child", time.sleep, 60)
    os.kill(server(), signal.SIGKILL)
    process.join(10)
    assert "server" in how_it_ended(process.exitcode)
    assert process.pid is not None
    child = psutil.Process(process.pid)
    assert child.is_running()
    process.kill()
    psutil.wait_procs([child], timeout=5)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert call_in_child(_variable) is None


def test_what_is_registered_for_the_end_of_a_child_is_run(tmp_path: Path) -> None:
    process = start_child("child", _register, str(tmp_path))
    process.join(50)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"ended"}  # and nothing of a temporary folder that was still open


def _register(folder: str) -> None:
    atexit.register((Path(folder) / "ended").touch)
    _open.append(tempfile.TemporaryDirectory(dir=folder))
    warnings.simplefilter("ignore", ResourceWarning)  # that it was closed at the end


_open: list[Any] = []


def test_what_the_users_own_module_registers_is_run_at_the_end_of_a_child(tmp_path: Path) -> None:
    """A module is imported with the function, before anything of the child's own runs."""
    (tmp_path / "simulator.py").write_text(
        "import atexit, pathlib\n"
        "atexit.register((pathlib.Path(__file__).parent / 'ended').touch)\n"
        "def play(): pass\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import os, pathlib, simulator\n"
        "from repertory.spawning import start_child\n"
        "start_child('child', simulator.play).join()\n"
        f"print((pathlib.Path({str(tmp_path)!r}) / 'ended').exists())\n"
    )
    assert run_alone(code) == "True\n"


def test_what_is_no_text_in_the_path_of_modules_is_skipped() -> None:
    """As Python itself does."""
    code = (
        "import pathlib, sys; sys.path.append(pathlib.Path('elsewhere'))\n"
        "from repertory.spawning import start_child\n"
        "start_child('child', print, 'begun').join()\n"
    )
    assert run_alone(code) == "begun\n"


def run_alone(code: str, **variables: str) -> str:
    """What a script prints that has a server of its own."""
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    return found.stdout


def test_children_import_from_where_their_parent_does(tmp_path: Path) -> None:
    """A script that puts another checkout first must not have its roles run the installed one."""
    copy = tmp_path / "checkout"
    shutil.copytree(Path(repertory.__file__).parent, copy / "repertory")
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(copy)!r})\n"
        "from repertory.spawning import start_child\n"
        "start_child('child', exec, 'import repertory; print(repertory.__file__)').join()\n"
    )
    assert run_alone(code) == f"{copy / 'repertory' / '__init__.py'}\n"


def test_no_room_for_a_socket_is_no_failure(tmp_path: Path) -> None:
    """A path to a socket has 107 bytes; schedulers make longer folders for temporary files."""
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    code = (
        "from repertory.spawning import prepare_to_start_children, start_child\n"
        "prepare_to_start_children()\n"
        "start_child('child', print, 'begun').join()\n"
    )
    assert run_alone(code, TMPDIR=str(folder)) == "begun\n"


def test_a_server_of_somebody_elses_is_left_alone() -> None:
    code = (
        "import multiprocessing\n"
        "from repertory.spawning import start_child\n"
        "process = multiprocessing.get_context('forkserver').Process(target=print)\n"
        "process.start()\n"
        "process.join()\n"
        "print(type(start_child('child', print)).__name__)\n"
    )
    assert run_alone(code).split() == ["SpawnProcess"]


def test_a_killed_parent_leaves_no_socket(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "from repertory.spawning import start_child\n"
        "start_child('child', print).join()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-c", code], env=variables, timeout=50, check=False, capture_output=True
    )
    deadline = time.monotonic() + 10
    # PyTorch makes a folder for its compiler beside it.
    while list(tmp_path.glob("pymp-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not list(tmp_path.glob("pymp-*"))
