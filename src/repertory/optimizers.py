"""Stochastic optimisers and the linear schedule.

What is here: RMSprop with epsilon inside the root, the choice between it and torch's own
optimisers, state that exists before the first step and stays where it is, and linear annealing.
What is not here: gradient clipping (`objective`) and which processes share a state (`runtimes`).
All state is in tensors under torch's own keys, so it can be put into shared memory and into
checkpoints like that of any torch optimiser.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from repertory.config import RunConfig


class InsideRootRMSprop(Optimizer):
    """RMSprop as A3C and TensorFlow have it: epsilon is added before the root.

    `square_avg = decay * square_avg + (1 - decay) * gradient**2`, then
    `parameter -= lr * gradient / sqrt(square_avg + epsilon)`. `torch.optim.RMSprop` divides by
    `sqrt(square_avg) + epsilon`; a published epsilon is not the same number in the other form
    (0.1 inside the root is about 0.32 outside it where gradients are small).

    `square_avg` starts at 0, as A3C has it; TensorFlow starts it at 1. State per parameter, as in
    torch: `step`, a scalar tensor, and `square_avg`, of the parameter's shape.

    Reference:
        Mnih et al. 2016, section 4 (equations 8 and 9), non-centred and without momentum.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, alpha: float = 0.99, eps: float = 0.1
    ) -> None:
        """Prepare for `params`.

        Args:
            params: Parameters to optimise.
            lr: Step size, at least 0.
            alpha: Decay of the mean square, in [0, 1] (torch's name for it).
            eps: Added to the mean square before the root, at least 0.

        Raises:
            ValueError: A setting is out of its range.
        """
        if not lr >= 0.0:
            raise ValueError(f"lr must not be negative, got {lr}")
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"alpha must lie in [0, 1], got {alpha}")
        if not eps >= 0.0:
            raise ValueError(f"eps must not be negative, got {eps}")
        super().__init__(params, {"lr": lr, "alpha": alpha, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply the gradients in `.grad`; parameters without one are left as they are.

        Args:
            closure: Only None; there is nothing to evaluate again.
        """
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            for parameter in parameters:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["square_avg"] = torch.zeros_like(parameter)
            gradients = [p.grad for p in parameters]
            squares = [self.state[p]["square_avg"] for p in parameters]
            torch._foreach_add_([self.state[p]["step"] for p in parameters], 1.0)
            torch._foreach_mul_(squares, group["alpha"])
            torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - group["alpha"])
            roots = torch._foreach_add(squares, group["eps"])
            torch._foreach_sqrt_(roots)
            torch._foreach_addcdiv_(parameters, gradients, roots, value=-group["lr"])


def make_optimizer(
    parameters: Iterable[Tensor],
    *,
    kind: Literal["rmsprop", "adam"],
    learning_rate: float,
    epsilon: float,
    rmsprop_decay: float,
    epsilon_inside_root: bool,
) -> Optimizer:
    """The optimiser that a configuration asks for.

    Args:
        parameters: What it will change.
        kind: `rmsprop` or `adam`.
        learning_rate: Step size at the first update.
        epsilon: Keeps the division finite.
        rmsprop_decay: Decay of RMSprop's mean square; Adam ignores it.
        epsilon_inside_root: RMSprop only: before the root (A3C, TensorFlow) or after it (torch).

    Returns:
        An optimiser whose whole state is in tensors.

    Raises:
        ValueError: Unknown kind, or a setting out of its range.
    """
    match kind:
        case "adam":
            return torch.optim.Adam(parameters, lr=learning_rate, eps=epsilon, foreach=True)
        case "rmsprop" if epsilon_inside_root:
            return InsideRootRMSprop(parameters, lr=learning_rate, alpha=rmsprop_decay, eps=epsilon)
        case "rmsprop":
            return torch.optim.RMSprop(
                parameters, lr=learning_rate, alpha=rmsprop_decay, eps=epsilon, foreach=True
            )
        case _:
            raise ValueError(f"unknown optimizer {kind!r}: rmsprop or adam")


def optimizer_for(config: RunConfig, parameters: Iterable[Tensor]) -> Optimizer:
    """The optimiser of a run; see `make_optimizer`."""
    return make_optimizer(
        parameters,
        kind=config.optimizer,
        learning_rate=config.learning_rate,
        epsilon=config.epsilon,
        rmsprop_decay=config.rmsprop_decay,
        epsilon_inside_root=config.epsilon_inside_root,
    )


def prepare_state(
    optimizer: Optimizer, place: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> None:
    """Give an optimiser the state that it would make at its first step, before that step.

    The state is what torch itself makes on a copy, set to zero, which is where every optimiser
    here starts; so nothing is assumed of its layout. State that is there already is kept.

    Args:
        optimizer: Changed in place; its parameters are left alone.
        place: Puts each tensor of the state where it is to stay, such as shared memory.
    """
    rehearsal = copy.deepcopy(optimizer)
    for parameter in _parameters(rehearsal):
        parameter.grad = torch.zeros_like(parameter)
    rehearsal.step()
    for own, copied in zip(_parameters(optimizer), _parameters(rehearsal), strict=True):
        made = optimizer.state[own] or {
            key: torch.zeros_like(value) for key, value in rehearsal.state[copied].items()
        }
        optimizer.state[own] = {key: place(value) for key, value in made.items()}


def load_in_place(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Overwrite a prepared optimiser's state with another's, without moving any tensor.

    `Optimizer.load_state_dict` makes new tensors, which other processes would not see, and an
    empty state (saved before the first step) would have it make private ones at the next step.

    Args:
        optimizer: Prepared by `prepare_state`.
        state: What `state_dict` returned for an optimiser of the same kind and parameters; an
            empty one is the state before the first step.
    """
    loaded = state["state"]
    for index, parameter in enumerate(_parameters(optimizer)):
        for key, tensor in optimizer.state[parameter].items():
            tensor.copy_(torch.as_tensor(loaded[index][key]) if index in loaded else 0.0)


def with_own_state(optimizer: Optimizer) -> Optimizer:
    """An optimiser of the same parameters, with a copy of the state for itself."""
    other = copy.copy(optimizer)
    other.param_groups = [dict(group) for group in optimizer.param_groups]
    other.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        other.state[parameter] = {key: value.clone() for key, value in state.items()}
    return other


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def linear(start: float, end: float | None, fraction: float) -> float:
    """A value on its way from `start` to `end`.

    Args:
        start: Value at the beginning.
        end: Value at the end; None leaves it at `start`.
        fraction: Share of the run that is done; what exceeds [0, 1] counts as its border.

    Returns:
        The value now.

    Example:
        >>> linear(1.0, 0.0, 0.25)
        0.75
    """
    if end is None:
        return start
    return start + (end - start) * min(max(fraction, 0.0), 1.0)
