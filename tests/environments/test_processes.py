"""Columns in spawned processes: the same games, and what comes out when a process fails."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import gymnasium
import numpy as np
import pytest

from repertory.environments import EnvironmentConfig, EnvironmentFailure, make_vector, seeds_for
from tests.probes import Actions, Alias, Counter, Die, Draws, Hang, Raise, SeedCounter, ShapeShift

pytestmark = pytest.mark.slow  # a process takes a second to start


def in_processes(source, seeds, **kwargs):
    return make_vector(EnvironmentConfig(source, kwargs, vectorization="async"), seeds)


def assert_no_process_left():
    deadline = time.monotonic() + 5
    while multiprocessing.active_children():
        assert time.monotonic() < deadline, multiprocessing.active_children()
        time.sleep(0.01)


def test_columns_play_as_they_do_in_one_process():
    generator = np.random.default_rng(0)
    apart = in_processes("CartPole-v1", [3, 4])
    together = make_vector(EnvironmentConfig("CartPole-v1"), [3, 4])
    np.testing.assert_array_equal(apart.reset(), together.reset())
    for _ in range(150):
        actions = generator.integers(0, 2, 2)
        one, other = apart.step(actions), together.step(actions)
        for name, value in vars(other).items():
            np.testing.assert_array_equal(getattr(one, name), value, err_msg=name)
            assert getattr(one, name).dtype == value.dtype
    together.close()
    apart.close()
    apart.close()
    assert_no_process_left()


def test_b50_a_buffer_used_again_does_no_harm():
    """Source: openai/baselines PR#418, thu-ml/tianshou#1281; lambdas travel, too."""
    vector = in_processes(lambda: Alias(), [3])
    rows, valid = [vector.reset()], []
    for _ in range(6):
        tick = vector.step(np.array([0]))
        rows.append(tick.observations)
        valid.append(bool(tick.valid[0]))
    assert [row[0, 0] for row in rows] == [0, 1, 2, 3, 0, 1, 2]
    assert valid == [True, True, True, False, True, True]
    vector.close()


def test_b41_actions_are_shifted_where_the_environment_runs():
    """Source: DLR-RM/stable-baselines3#913, ray-project/ray#42196."""
    vector = in_processes(Actions, [0], action_space=gymnasium.spaces.Discrete(3, start=-1))
    vector.reset()
    assert [vector.step(np.array([a])).observations[0, 0] for a in range(3)] == [-1, 0, 1]
    vector.close()


def test_an_id_that_only_this_process_has_registered():
    gymnasium.register("TestSpawned-v0", entry_point=Counter, kwargs={"length": 2})
    try:
        vector = in_processes("TestSpawned-v0", [0])
    finally:
        del gymnasium.registry["TestSpawned-v0"]
    vector.reset()
    assert [vector.step(np.array([0])).terminated[0] for _ in range(2)] == [False, True]
    vector.close()


def test_b59_an_exception_keeps_message_traceback_column_and_step():
    """Source: Farama-Foundation/Gymnasium#177, PR#178; openai/gym#1542, PR#1556."""
    vector = in_processes(Raise, [10, 11, 12], at=7, on_seed=11)
    vector.reset()
    for _ in range(6):
        vector.step(np.zeros(3, np.int64))
    begin = time.monotonic()
    with pytest.raises(EnvironmentFailure) as caught:
        vector.step(np.zeros(3, np.int64))
    assert time.monotonic() - begin < 5
    message = str(caught.value)
    assert message.startswith(
        "environment tests.probes:Raise, column 1, env step 7: ValueError: boom\n"
    )
    assert 'raise ValueError("boom")' in message
    assert "Traceback" in message
    assert_no_process_left()
    vector.close()


def test_b54_an_observation_of_another_shape_names_column_and_step():
    """Source: hill-a/stable-baselines#1062, hill-a/stable-baselines#283."""
    vector = in_processes(ShapeShift, [7, 8], at=2, on_seed=8)
    vector.reset()
    vector.step(np.zeros(2, np.int64))
    with pytest.raises(EnvironmentFailure) as caught:
        vector.step(np.zeros(2, np.int64))
    assert str(caught.value) == (
        "environment tests.probes:ShapeShift, column 1, env step 2: "
        "expected an observation of shape (4,), got (5,)"
    )
    assert_no_process_left()


def test_a_process_that_dies_is_named_and_leaves_none_behind():
    vector = in_processes(Die, [10, 11], at=3, on_seed=11)
    vector.reset()
    vector.step(np.zeros(2, np.int64))
    vector.step(np.zeros(2, np.int64))
    with pytest.raises(
        EnvironmentFailure,
        match="probes:Die, column 1, env step 3: its process: killed by SIGKILL",
    ):
        vector.step(np.zeros(2, np.int64))
    assert_no_process_left()
    vector.close()


def test_a_process_that_dies_is_named_even_where_requests_to_end_are_ignored():
    """As they are in every role: the other columns' processes inherit it."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        vector = in_processes(Die, [10, 11], at=1, on_seed=11)
        vector.reset()
        with pytest.raises(
            EnvironmentFailure, match=r"column 1, env step 1: .* SIGKILL \(pid \d+\)"
        ):
            vector.step(np.zeros(2, np.int64))
        assert_no_process_left()
        vector.close()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_interrupt_during_a_tick_leaves_no_process_behind():
    """One column hangs; a close that waited for its answer would hang as well."""
    vector = in_processes(Hang, [10, 11], at=1, on_seed=11)
    vector.reset()
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    # What a shell starts in the background ignores it, and so do its tests.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            vector.step(np.zeros(2, np.int64))
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert_no_process_left()
    vector.close()


def draws(vector):
    rows = [vector.reset()]
    actions = np.zeros(vector.num_envs, np.int64)
    return np.stack([*rows, *(vector.step(actions).observations for _ in range(4))])


def test_b84_processes_draw_different_numbers_and_the_same_ones_again():
    """Source: hill-a/stable-baselines#79, #1120; numpy/numpy#9650."""
    runs = []
    for _ in range(2):
        vector = in_processes(Draws, seeds_for(1, 0, 4))
        runs.append(draws(vector)[..., :3])
        vector.close()
    # Five draws of three kinds in four columns: all different.
    assert runs[0].shape == (5, 4, 3)
    assert len(np.unique(runs[0])) == runs[0].size
    np.testing.assert_array_equal(runs[0], runs[1])


def test_b84_torch_draws_different_numbers_and_the_same_ones_again():
    """Source: pytorch/pytorch#5059. Two columns only: to import torch takes seconds."""
    vector = in_processes(Draws, seeds_for(1, 0, 2), with_torch=True)
    first = draws(vector)[..., 3]
    assert len(np.unique(first)) == first.size
    np.testing.assert_array_equal(draws(vector)[..., 3], first)
    vector.close()


def test_the_generators_and_the_interrupt_of_this_process_are_left_alone():
    """The vector environment builds one environment here, only to see its spaces."""
    handler = signal.getsignal(signal.SIGINT)
    np.random.seed(1)
    expected = np.random.random()
    np.random.seed(1)
    vector = in_processes(SeedCounter, [3])
    vector.reset()
    assert np.random.random() == expected
    assert signal.getsignal(signal.SIGINT) is handler
    # Ctrl-C goes to the whole group; the column is still there to be closed.
    for child in multiprocessing.active_children():
        os.kill(child.pid, signal.SIGINT)
    np.testing.assert_array_equal(vector.step(np.array([0])).observations, [[1]])
    vector.close()


def test_processes_end_when_their_parent_is_killed():
    program = (
        "import multiprocessing, time\n"
        "from repertory.environments import *\n"
        "if __name__ == '__main__':\n"
        "    config = EnvironmentConfig('CartPole-v1', vectorization='async')\n"
        "    vector = make_vector(config, [1, 2])\n"
        "    vector.reset()\n"
        "    print(*(child.pid for child in multiprocessing.active_children()), flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with parent:
        children = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(children) == 2
    deadline = time.monotonic() + 5
    while any(_is_running(pid) for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return sys.platform != "linux"
