"""Policies: distributions over actions, and the heads that make them from a network's outputs.

What is here: the categorical policy of a `Discrete` action space, and the choice of a head by
space. What is not here: layers (`networks`), and `torch.distributions`, which checks and
normalises anew at each call; it is the tests' oracle instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
import torch
from torch import Tensor

from repertory.models.base import Policy


class Categorical:
    """A choice among n actions, from unnormalised log-probabilities.

    All arithmetic is in float32 at least, whatever the network computed in. A logit of minus
    infinity forbids its action: it is never drawn and adds nothing to entropy and gradients.
    """

    def __init__(self, logits: Tensor) -> None:
        """Normalise once.

        Args:
            logits: [..., n]; not all minus infinity.
        """
        if logits.dtype != torch.float64:
            logits = logits.float()
        self._log_probs = logits.log_softmax(-1)

    def sample(self, generator: torch.Generator) -> Tensor:
        """Draw actions, int64 [...], from `generator` and nothing else.

        An exponential race: of independent exponential times with the probabilities as rates,
        the i-th is the smallest with exactly the i-th probability. Noise is made where the
        generator lives, so that one on the CPU gives the same draws for a model anywhere.
        """
        log_probs = self._log_probs.detach()
        times = torch.empty(log_probs.shape, dtype=log_probs.dtype, device=generator.device)
        times.exponential_(generator=generator)
        # A time of 0 would have the logarithm minus infinity and let a forbidden action win.
        smallest = torch.finfo(times.dtype).tiny
        log_times = times.clamp_(min=smallest).log_().to(log_probs.device)
        return (log_probs - log_times).argmax(-1)

    def mode(self) -> Tensor:
        """The likeliest actions, int64 [...]; the first of equals."""
        return self._log_probs.argmax(-1)

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log-probabilities of `actions`.

        Args:
            actions: int64 [...]; the shape of the logits without their last axis.

        Returns:
            [...].

        Raises:
            ValueError: The shape does not fit.
        """
        if actions.shape != self._log_probs.shape[:-1]:
            raise ValueError(
                f"expected actions of shape {list(self._log_probs.shape[:-1])}, "
                f"got {list(actions.shape)}"
            )
        return self._log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Entropies in nats, [...], between 0 and log n."""
        # 0 * -inf is NaN, 0 * the lowest finite number is 0; likewise in the gradient.
        finite = self._log_probs.clamp(min=torch.finfo(self._log_probs.dtype).min)
        return -(self._log_probs.exp() * finite).sum(-1)


class PolicyHead(Protocol):
    """Turns the outputs of a model's last layer into a policy."""

    @property
    def num_outputs(self) -> int:
        """How many numbers the last layer gives per observation."""
        ...

    def __call__(self, outputs: Tensor) -> Policy:
        """The policy for outputs [..., num_outputs]."""
        ...


@dataclass(frozen=True)
class CategoricalHead:
    """One logit an action.

    Attributes:
        num_outputs: Number of actions.
    """

    num_outputs: int

    def __call__(self, outputs: Tensor) -> Categorical:
        """The policy with logits `outputs`, [..., num_outputs]."""
        return Categorical(outputs)


def policy_head(action_space: gymnasium.Space[Any]) -> PolicyHead:
    """The head for an action space. Actions count from 0; the environment shifts them.

    Raises:
        ValueError: There is no policy for such a space.
    """
    if isinstance(action_space, gymnasium.spaces.Discrete):
        return CategoricalHead(int(action_space.n))
    raise ValueError(f"no policy for the action space {action_space}: only Discrete is supported")
