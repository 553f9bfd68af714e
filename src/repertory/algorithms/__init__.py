"""The arrangements: who acts, who learns, and who waits for whom. One file each, read it whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from repertory.algorithms import a2c, a3c, batched_a2c, impala
from repertory.config import RunConfig


class Algorithm(NamedTuple):
    """An algorithm's settings, and the function that starts its roles on a runtime."""

    config: type[RunConfig]
    train: Callable[..., Any]


ALGORITHMS: dict[str, Algorithm] = {
    "a2c": Algorithm(a2c.A2CConfig, a2c.train),
    "batched_a2c": Algorithm(batched_a2c.BatchedA2CConfig, batched_a2c.train),
    "a3c": Algorithm(a3c.A3CConfig, a3c.train),
    "impala": Algorithm(impala.IMPALAConfig, impala.train),
}
"""Every algorithm by its name on the command line."""
