"""What the pipeline asks of a model.

A model is a `torch.nn.Module` with the two methods of `Model`. Both acting and learning call the
same `forward`, time-major: acting with one row, learning with all rows of an unroll. One that also
`Remembers` is told what was done and what came of it.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

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


@runtime_checkable
class Remembers(Protocol):
    """A model whose core is given the last action and the last reward beside the features.

    They are part of its core state: the last one, [B, ...], as `remember` makes it.
    """

    def remember(self, core_state: CoreState, actions: Tensor, rewards: Tensor) -> CoreState:
        """The core state for the row after a step.

        Args:
            core_state: Each [B, ...]; of the step's observation.
            actions: [B]; what was done.
            rewards: [B]; what came of it, raw.
        """
        ...

    def run(
        self,
        observations: Tensor,
        core_state: CoreState,
        resets: Tensor,
        actions: Tensor,
        rewards: Tensor,
    ) -> ModelOutput:
        """As `Model`'s call, where what lies between the rows is known.

        Args:
            observations: [T, B, ...].
            core_state: Each [B, ...]; before row 0.
            resets: [T, B] bool.
            actions: [T, B]; in each row, of which the last only enters the core state.
            rewards: [T, B]; raw, after each row.
        """
        ...


def remember(model: object, core_state: CoreState, actions: Tensor, rewards: Tensor) -> CoreState:
    """Tell a model what was done and what came of it, if it remembers such things."""
    if isinstance(model, Remembers):
        return model.remember(core_state, actions, rewards)
    return core_state


def reset_core_state(model: Model, core_state: CoreState, resets: Tensor) -> CoreState:
    """Put the core state back to its initial value in the columns where `resets` [B] is true."""
    if not core_state or not resets.any():
        return core_state
    initial = model.initial_core_state(resets.shape[0])
    return tuple(
        torch.where(resets.to(now.device).view(-1, *[1] * (now.dim() - 1)), start, now)
        for start, now in zip(initial, core_state, strict=True)
    )
