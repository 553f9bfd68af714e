"""A random process of four states and two actions, two policies for it, and what they are worth.

The value of a policy is the solution of a linear system, which needs nothing of the package.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from repertory.models.base import ModelOutput
from repertory.models.policies import Categorical
from repertory.trajectories import CoreState

STATES, ACTIONS, DISCOUNT = 4, 2, 0.9
END = STATES
"""What follows a termination; no state of the process."""

GENERATOR = torch.Generator().manual_seed(1)


def random(*shape: int) -> Tensor:
    return torch.rand(shape, generator=GENERATOR, dtype=torch.float64)


# Where (state, action) leads; the last place is the end.
MOVE = (3.0 * random(STATES, ACTIONS, STATES + 1)).softmax(-1)
REWARD = 4.0 * random(STATES, ACTIONS) - 2.0
TARGET = (5.0 * random(STATES, ACTIONS)).softmax(-1)
BEHAVIOUR = (5.0 * random(STATES, ACTIONS)).softmax(-1)


def value_of(policy: Tensor) -> Tensor:
    """[STATES]; the discounted return of a policy: the solution of V = r + discount P V."""
    move = torch.einsum("sa,san->sn", policy, MOVE[..., :STATES])
    gain = (policy * REWARD).sum(-1)
    return torch.linalg.solve(torch.eye(STATES, dtype=torch.float64) - DISCOUNT * move, gain)


def clipped_policy(rho_clip: float) -> Tensor:
    """The policy whose value V-trace learns, [STATES, ACTIONS]; see `targets.vtrace`."""
    least = TARGET if math.isinf(rho_clip) else torch.minimum(rho_clip * BEHAVIOUR, TARGET)
    return least / least.sum(-1, keepdim=True)


class Process(gymnasium.Env[Any, Any]):
    """The process to play; the observation marks the state, and episodes start in any of them."""

    observation_space = spaces.Box(0.0, 1.0, (STATES,), np.float32)
    action_space = spaces.Discrete(ACTIONS)

    def __init__(self) -> None:
        self.state = 0

    def observation(self) -> Any:
        return (np.arange(STATES) == self.state).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.state = int(self.np_random.integers(STATES))
        return self.observation(), {}

    def step(self, action: Any) -> Any:
        reward = REWARD[self.state, action].item()
        chances = MOVE[self.state, action].numpy()
        self.state = int(np.searchsorted(chances.cumsum(), self.np_random.random()))
        self.state = min(self.state, END)  # the chances may add up to a little less than 1
        return self.observation(), reward, self.state == END, False, {}


class Table(nn.Module):
    """A policy and a critic that hold a row for each place an observation may mark."""

    def __init__(self, logits: Tensor) -> None:
        """Start with these logits, [places, actions], and with values of 0."""
        super().__init__()
        self.logits = nn.Parameter(logits.float().clone())
        self.values = nn.Parameter(torch.zeros(len(logits)))

    def initial_core_state(self, num_columns: int) -> CoreState:
        return ()

    def forward(self, observations: Tensor, core_state: CoreState, resets: Tensor) -> ModelOutput:
        return ModelOutput(Categorical(observations @ self.logits), observations @ self.values, ())
