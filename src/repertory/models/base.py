"""What the pipeline asks of a model.

A model is a `torch.nn.Module` with the two methods of `Model`. Both acting and learning call the
same `forward`, time-major: acting with one row, learning with all rows of an unroll.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from repertory.trajectories import CoreState


class Policy(Protocol):
    """A distribution over actions for each of `[T, B]` observations."""

    def sample(self, generator: torch.Generator) -> Tensor:
        """Draw actions, [T, B, ...], from `generator` and nothing else."""
        ...

    def mode(self) -> Tensor:
        """The likeliest actions, [T, B, ...]."""
        ...

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log-probabilities of `actions`, [T, B]."""
        ...

    def entropy(self) -> Tensor:
        """Entropies in nats, [T, B]."""
        ...


class ModelOutput(NamedTuple):
    """What a model says of `[T, B]` observations.

    Attributes:
        policy: Distribution over actions, batch shape [T, B].
        values: [T, B]; the critic's estimate of the discounted return.
        core_state: Each [B, ...]; after the last row.
    """

    policy: Policy
    values: Tensor
    core_state: CoreState


class Model(Protocol):
    """A policy and a critic in one module. Any `torch.nn.Module` with these methods will do."""

    def initial_core_state(self, num_columns: int) -> CoreState:
        """The core state at the start of an episode, each [B, ...]; `()` without a core."""
        ...

    def __call__(self, observations: Tensor, core_state: CoreState, resets: Tensor) -> ModelOutput:
        """Run over rows in time order.

        Shapes: T rows, B columns.

        Args:
            observations: [T, B, ...] in the environment's own dtype; images are scaled inside.
            core_state: Each [B, ...]; before row 0.
            resets: [T, B] bool; where the core state is set back to the initial one before the
                row is read.
        """
        ...
