"""Long runs hold what they need and no more: memory, tensors and descriptors stay as they are."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from repertory.algorithms.impala import IMPALAConfig
from repertory.training import train
from tests.probes import Counter


@dataclass
class Look:
    """What every process of a run held at one moment; by pid, this process among them."""

    env_steps: int
    resident: dict[int, int]
    descriptors: dict[int, int]
    tensors: int

    @classmethod
    def now(cls, env_steps: int) -> Look:
        gc.collect()
        me = psutil.Process()
        processes = {me.pid: me, **{child.pid: child for child in me.children(recursive=True)}}
        return cls(
            env_steps=env_steps,
            resident={pid: process.memory_info().rss for pid, process in processes.items()},
            descriptors={pid: process.num_fds() for pid, process in processes.items()},
            tensors=sum(type(thing) is torch.Tensor for thing in gc.get_objects()),
        )


def looks_at(config: IMPALAConfig) -> tuple[Look, Look]:
    """Look at a run after a tenth of it and at four tenths, and end it: all roles are there."""
    looks: list[Look] = []
    due = [config.total_steps // 10, config.total_steps * 4 // 10]

    def look(record: dict[str, Any]) -> bool:
        if record["kind"] == "progress" and due and record["env_steps"] >= due[0]:
            due.pop(0)
            looks.append(Look.now(record["env_steps"]))
        return bool(due)

    train(config, on_record=look)
    early, late = looks
    assert late.env_steps > 3 * early.env_steps
    return early, late


@pytest.mark.parametrize(
    "unrolls",
    [
        pytest.param(2_000, marks=[pytest.mark.slow, pytest.mark.timeout(240)]),
        pytest.param(20_000, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)]),
    ],
)
@pytest.mark.parametrize("runtime", ["inline", "processes"])
def test_b24_a_long_run_takes_no_more_memory_than_a_short_one(
    runtime: Any, unrolls: int, tmp_path: Path
) -> None:
    """IMPALA runs out of memory after very long training. Source: ray-project/ray#23769.

    A trivial environment and a tiny learner, with replay that is full before the first look.
    """
    config = IMPALAConfig(
        env=partial(Counter, 3),
        runtime=runtime,
        num_actors=2,
        num_envs=1,
        unroll_length=4,  # an episode of three and its reset: three env steps
        batch_trajectories=4,
        hidden_sizes=(4,),
        replay_share=0.5,
        replay_capacity=100,
        total_steps=6 * unrolls,  # twice what is looked at
        log_every_steps=3 * unrolls // 40,
        checkpoint_minutes=60.0,
        run_dir=tmp_path / "run",
    )
    early, late = looks_at(config)
    assert early.resident.keys() == late.resident.keys()
    # This process, and where roles have processes of their own three more (the resource tracker
    # of multiprocessing is not one of them).
    assert len(early.resident) >= (1 if runtime == "inline" else 4)
    growth = {pid: late.resident[pid] / rss - 1 for pid, rss in early.resident.items()}
    assert max(growth.values()) < 0.05, growth
    assert late.descriptors == early.descriptors
    # Lines of metrics hold a few, and a state on its way to a file some twenty-five; unrolls that
    # were kept would be hundreds.
    assert late.tensors <= early.tensors + 60
