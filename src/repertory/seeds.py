"""Where every random number of a run comes from: one root, one stream for each purpose.

A stream is named by what it serves (`Stream`) and by indices, and spawned from the run's
`numpy.random.SeedSequence`; neither the number of roles nor the runtime changes it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import numpy as np
import torch


class Stream(IntEnum):
    """What a stream of random numbers serves. A number is part of what a seed means: it stays."""

    PARAMETERS = 0
    ACTIONS = 1
    GLOBALS = 2
    REPLAY = 3
    RESUMED = 4
    REPLACED = 5


def seed_for(root_seed: int, stream: Stream, *indices: int) -> int:
    """A whole number in [0, 2^31) for one purpose of a run.

    Args:
        root_seed: The run's seed.
        stream: What the number is for.
        indices: Which of several, such as (actor, column).
    """
    sequence = np.random.SeedSequence(root_seed, spawn_key=(int(stream), *indices))
    return int(sequence.generate_state(1, np.uint32)[0] >> 1)


def generator_for(root_seed: int, stream: Stream, *indices: int) -> torch.Generator:
    """A generator of its own for one purpose of a run, on the CPU."""
    return torch.Generator().manual_seed(seed_for(root_seed, stream, *indices))


def seed_global_generators(seed: int) -> None:
    """Seed what careless environments draw from: the generators of `random`, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def global_generators() -> tuple[Any, ...]:
    """The states of the generators that `seed_global_generators` seeds."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def restore_global_generators(states: tuple[Any, ...]) -> None:
    """Put back what `global_generators` gave."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@contextmanager
def global_generator(seed: int) -> Iterator[None]:
    """Seed torch's global generator inside the block and leave it untouched outside.

    `torch.nn.init` draws from nothing else.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
