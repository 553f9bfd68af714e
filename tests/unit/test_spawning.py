"""Children of a server begin as spawned ones would, and sooner."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

from repertory.spawning import prepare_to_start_children, start_child

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


def test_more_descriptors_than_the_server_takes() -> None:
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(300)]
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = start_child("child", _count, theirs, *[end for end, _ in pipes])
    assert ours.poll(50)
    assert ours.recv() == 300
    process.join()
    for end in [ours, theirs, *[end for pair in pipes for end in pair]]:
        end.close()
