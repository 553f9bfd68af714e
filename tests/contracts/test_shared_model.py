"""The shared model of A3C: private gradients, one set of parameters, and what lag means."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from repertory.optimizers import make_optimizer
from repertory.runtimes.base import Runtime, SharedModelWorker
from repertory.runtimes.hogwild import FileLock
from tests.contracts import roles


def make(
    runtime: Runtime,
    num_workers: int,
    *,
    lock: bool = True,
    shared_statistics: bool = True,
    kind: Any = None,
) -> tuple[nn.Module, list[SharedModelWorker]]:
    """A model of zeros and the ends of its workers; SGD unless another optimiser is named."""
    model = roles.model_of(0)
    optimizer: Optimizer = SGD(model.parameters(), lr=1.0)
    if kind is not None:
        optimizer = make_optimizer(
            model.parameters(),
            kind=kind,
            learning_rate=1.0,
            epsilon=0.1,
            rmsprop_decay=0.9,
            epsilon_inside_root=True,
        )
    shared = runtime.shared_model(
        model, optimizer, num_workers, lock=lock, shared_statistics=shared_statistics
    )
    return model, [shared.worker(index) for index in range(num_workers)]


def test_b35_one_workers_update_never_swallows_anothers_under_lock(runtime: Runtime) -> None:
    """Two processes push +1 a thousand times each with rate 1: exactly -2000 remains.

    Source: ikostrikov/pytorch-a3c PR#9; dgriff777/rl_a3c_pytorch#17.
    """
    model, workers = make(runtime, 2)
    for index, worker in enumerate(workers):
        runtime.start(f"worker-{index}", roles.push_ones, 1000, worker)
    lags = runtime.supervise(lambda role, record: None)
    assert {float(v) for p in model.parameters() for v in p.detach().aminmax()} == {-2000.0}
    assert all(len(lags[f"worker-{index}"]) == 1000 for index in range(2))


def test_b35_lock_free_pushes_may_overlap_but_never_break(runtime: Runtime) -> None:
    """Of 2000 pushes at least the longer half survives in every number, and none is applied twice.

    How many survive is measured by `benchmarks/hogwild.py`, not tested. Source as above.
    """
    model, workers = make(runtime, 2, lock=False)
    for index, worker in enumerate(workers):
        runtime.start(f"worker-{index}", roles.push_ones, 1000, worker)
    runtime.supervise(lambda role, record: None)
    for parameter in model.parameters():
        assert torch.isfinite(parameter).all()
        assert parameter.min() >= -2000.0
        assert parameter.max() < -500.0


def test_counters_add_up_and_the_state_says_so(runtime: Runtime) -> None:
    _, workers = make(runtime, 1)
    runtime.start("worker-0", roles.push_known_gradients, [1.0, 2.0, 3.0], workers[0])
    state = runtime.supervise(lambda role, record: None)["worker-0"]
    assert (state["updates"], state["env_steps"]) == (3, 15)
    for tensor in state["model"].values():
        torch.testing.assert_close(tensor, torch.full_like(tensor, -0.6))


@pytest.mark.parametrize("kind", ["rmsprop", "adam"])
@pytest.mark.parametrize("shared", [True, False])
def test_statistics_are_the_workers_together_or_each_ones_own(
    runtime: Runtime, kind: str, shared: bool
) -> None:
    """Two workers push 1 and 1: together they have seen two gradients, alone one each."""
    _, workers = make(runtime, 2, kind=kind, shared_statistics=shared)
    for index, worker in enumerate(workers):
        runtime.start(f"worker-{index}", roles.push_known_gradients, [1.0], worker)
    results = runtime.supervise(lambda role, record: None)
    last = max(results.values(), key=lambda state: state["updates"])
    steps = {float(entry["step"]) for entry in last["optimizer"]["state"].values()}
    assert steps == {2.0 if shared else 1.0}
    if kind == "rmsprop":
        square = last["optimizer"]["state"][0]["square_avg"].max().item()
        assert square == pytest.approx(0.19 if shared else 0.1)


def test_a_stop_ends_pulls_after_the_push_in_progress(runtime: Runtime) -> None:
    _, workers = make(runtime, 2)
    for index, worker in enumerate(workers):
        runtime.start(f"worker-{index}", roles.push_ones, 1_000_000, worker)

    def stop_soon(role: str, record: dict[str, object]) -> None:
        if record["env_steps"] == 20:
            runtime.stop()

    results = runtime.supervise(stop_soon)
    assert 20 <= sum(len(lags) for lags in results.values()) < 100_000


def test_a_killed_worker_never_blocks_the_others(mortal_runtime: Runtime) -> None:
    """The run ends by name within seconds, whatever the dead one held."""
    _, workers = make(mortal_runtime, 2)
    mortal_runtime.start("worker-0", roles.push_ones, 1_000_000, workers[0])
    mortal_runtime.start("worker-1", roles.push_and_die, 50, workers[1])
    with pytest.raises(RuntimeError, match="worker-1 failed: killed by SIGKILL"):
        mortal_runtime.supervise(lambda role, record: None)


def test_the_lock_is_freed_when_its_holder_is_killed(tmp_path: Path) -> None:
    """A semaphore that a killed process held would block all for ever."""
    lock, sign = FileLock(), tmp_path / "held"
    holder = multiprocessing.get_context("spawn").Process(
        target=roles.hold_a_lock, args=(str(sign), lock)
    )
    holder.start()
    try:
        deadline = time.monotonic() + 60
        while not sign.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        patience = [True, True, True]
        with lock.hold(lambda: not patience.pop() if patience else True) as held:
            assert not held
        assert holder.pid is not None
        os.kill(holder.pid, signal.SIGKILL)
        holder.join()
        with lock.hold(lambda: False) as held:
            assert held
    finally:
        holder.kill()
        holder.join()
        lock.close()
