"""The recurrent core between torso and heads, with episodes that begin inside an unroll.

What is here: an LSTM or GRU that is set back, column by column, wherever a row begins an episode.
What is not here: where those rows are (`Trajectory.resets`), and the state of actors between
unrolls (`actors`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from repertory.trajectories import CoreState


class RecurrentCore(nn.Module):
    """One layer of LSTM or GRU over `[T, B, ...]` features.

    Rows without a reset run through torch's fused kernel together. The sequence is cut only before
    rows in which some column is reset, as DeepMind's IMPALA does tick by tick.

    Parameters start as torch (and Torch7) has them: uniform by the core's width.
    """

    initial_state: Tensor

    def __init__(
        self,
        kind: Literal["lstm", "gru"],
        input_size: int,
        size: int,
        initial_value: float = 0.0,
    ) -> None:
        """Make the core.

        Args:
            kind: `lstm` (states: output and cell) or `gru` (state: output).
            input_size: Width of the features.
            size: Width of the core.
            initial_value: What every entry of every state is at the start of an episode; a
                caller may put other numbers into the buffer `initial_state`, [states, size].

        Raises:
            ValueError: No core of that kind.
        """
        super().__init__()
        self.output_size = size
        kernels: dict[str, type[nn.LSTM] | type[nn.GRU]] = {"lstm": nn.LSTM, "gru": nn.GRU}
        if kind not in kernels:
            raise ValueError(f"unknown recurrent core {kind!r}: lstm or gru")
        self.recurrent = kernels[kind](input_size, size)
        num_states = 2 if kind == "lstm" else 1
        self.register_buffer("initial_state", torch.full((num_states, size), initial_value))

    def initial_core_state(self, num_columns: int) -> CoreState:
        """The state at the start of an episode, each [B, size]; memory of its own."""
        return tuple(state.repeat(num_columns, 1) for state in self.initial_state)

    def forward(
        self, features: Tensor, core_state: CoreState, resets: Tensor
    ) -> tuple[Tensor, CoreState]:
        """Run over rows in time order.

        Args:
            features: [T, B, input_size].
            core_state: Each [B, size]; before row 0.
            resets: [T, B] bool; where the state is set back before the row is read.

        Returns:
            Outputs [T, B, size], and the state after the last row.
        """
        num_rows = features.shape[0]
        starts = [0]
        if num_rows > 1:
            starts += (resets[1:].any(1).nonzero().flatten() + 1).tolist()
        outputs = []
        for start, stop in pairwise([*starts, num_rows]):
            # Selected, not multiplied: what a finished episode left behind may be NaN.
            reset = resets[start].unsqueeze(-1)
            core_state = tuple(
                torch.where(reset, initial, state)
                for initial, state in zip(self.initial_state, core_state, strict=True)
            )
            output, core_state = self._run(features[start:stop], core_state)
            outputs.append(output)
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)), core_state

    def _run(self, features: Tensor, core_state: CoreState) -> tuple[Tensor, CoreState]:
        """Run the fused kernel over rows of which none but the first may follow a reset."""
        layered = tuple(state.unsqueeze(0) for state in core_state)
        final: CoreState
        if isinstance(self.recurrent, nn.LSTM):
            output, final = self.recurrent(features, layered)
        else:
            output, last = self.recurrent(features, layered[0])
            final = (last,)
        # Under autocast the kernel's state is bfloat16; what travels keeps the dtype it came in.
        return output, tuple(
            state.squeeze(0).to(given.dtype) for state, given in zip(final, core_state, strict=True)
        )
