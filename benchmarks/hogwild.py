"""What lock-free pushes of A3C lose: how many of them survive, and how fast they are.

Processes push gradients of ones with rate 1 into shared zeros, all at once and as fast as they
can, so that a number that has kept every push is minus their count. Nothing is played or learned
in between: real workers push seldom, and lose less. With the lock nothing may be lost; it is here
for its speed.

    python benchmarks/hogwild.py --workers 2 4
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
import tyro
from torch import Tensor, nn
from torch.optim import SGD

from repertory.environments.base import EnvironmentSpec
from repertory.models.networks import build_model
from repertory.runtimes.base import RoleContext, SharedModelWorker
from repertory.runtimes.processes import ProcessRuntime
from repertory.runtimes.shared_memory import shared_zeros
from reports import RESULTS, origin, say, write


@dataclass
class Arguments:
    """What to measure."""

    workers: tuple[int, ...] = (2, 4)
    """Numbers of processes that push at once."""
    pushes: int = 20_000
    """Pushes of each process into a single number."""
    network_pushes: int = 1_000
    """Pushes of each process into as many numbers as A3C's network has."""
    output: Path = RESULTS / "hogwild.json"
    """JSON file; written after every case."""


def main() -> None:
    """Measure and write down."""
    arguments = tyro.cli(Arguments, description=__doc__)
    # Of the machine before the measurement: what else runs decides who interrupts whom.
    header = {**origin(__file__), "load_average": os.getloadavg()[0]}
    cases = []
    for size, pushes in ((1, arguments.pushes), (network_size(), arguments.network_pushes)):
        for num_workers in arguments.workers:
            for lock in (False, True):
                cases.append(measure(size, pushes, num_workers, lock=lock))
                say(summary(cases[-1]))
                write(arguments.output, {**header, "cases": cases})


def network_size() -> int:
    """Parameters of A3C's network for an Atari game with six actions."""
    spec = EnvironmentSpec(
        name="pictures",
        protocol="none",
        observation_space=gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8),
        action_space=gymnasium.spaces.Discrete(6),
        image_layout="chw",
    )
    return sum(parameter.numel() for parameter in build_model(spec, network="a3c").parameters())


class Numbers(nn.Module):
    """Zeros to push into."""

    def __init__(self, size: int) -> None:
        """Make `size` of them."""
        super().__init__()
        self.numbers = nn.Parameter(torch.zeros(size))


def measure(size: int, pushes: int, num_workers: int, *, lock: bool) -> dict[str, Any]:
    """Have processes push; what is left of it."""
    runtime, model = ProcessRuntime(), Numbers(size)
    shared = runtime.shared_model(
        model, SGD(model.parameters(), lr=1.0), num_workers, lock=lock, shared_statistics=True
    )
    ready = shared_zeros(num_workers, dtype=torch.bool)
    for index in range(num_workers):
        runtime.start(
            f"worker-{index}", push_ones, index, size, pushes, ready, shared.worker(index)
        )
    times = runtime.supervise(lambda role, record: None).values()
    seconds = max(end for _, end in times) - min(start for start, _ in times)
    survived = -model.numbers.detach().double() / (num_workers * pushes)
    return {
        "numbers": size,
        "workers": num_workers,
        "lock": lock,
        "pushes_of_each": pushes,
        "survived_mean": survived.mean().item(),
        "survived_min": survived.min().item(),
        "survived_max": survived.max().item(),
        "pushes_per_second": num_workers * pushes / seconds,
        "seconds": seconds,
    }


def push_ones(
    context: RoleContext,
    index: int,
    size: int,
    pushes: int,
    ready: Tensor,
    worker: SharedModelWorker,
) -> tuple[float, float]:
    """Push so often, once all are there; when the first push began and the last one ended."""
    ones = torch.ones(size)
    # The first push makes room for the gradient; it changes nothing.
    assert worker.push(torch.zeros(size), 0, learning_rate=1.0) is not None
    ready[index] = True
    while not ready.all():
        context.report({"kind": "waiting"})
        time.sleep(0.001)
    start = time.monotonic()
    for _ in range(pushes):
        assert worker.push(ones, 1, learning_rate=1.0) is not None
    return start, time.monotonic()


def summary(case: dict[str, Any]) -> str:
    """One line a case."""
    return (
        f"{case['numbers']:,} numbers, {case['workers']} workers, "
        f"{'lock' if case['lock'] else 'lock-free'}: {case['survived_mean']:.3%} of the pushes "
        f"survive (at least {case['survived_min']:.3%} in every number), "
        f"{case['pushes_per_second']:,.0f} pushes/s"
    )


if __name__ == "__main__":
    main()
