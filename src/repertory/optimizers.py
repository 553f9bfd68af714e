"""Stochastic optimisers and the linear schedule.

What is here: RMSprop with epsilon inside the root, the choice between it and torch's own
optimisers, and linear annealing. What is not here: gradient clipping (`learners`) and the sharing
of optimiser state between processes (`runtimes`). All state is in tensors under torch's own keys,
so it can be put into shared memory and into checkpoints like that of any torch optimiser.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer


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
