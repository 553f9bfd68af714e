"""Replay: trajectories that were learned from once are kept, to be drawn and learned from again.

The oldest is overwritten first and every draw is uniform, after Espeholt et al. 2018, section 5.2.2
(there 10,000 trajectories, and half of each batch); draws are with replacement. A drawn trajectory
is as it was played: its log-probabilities are those of the policy that played it, which is what
V-trace needs to correct for that policy's age.

What is here: the memory, what it costs, and drawing from it. What is not here: which share of a
batch is drawn (the algorithm's choice), and correction for old policies (`targets`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from repertory.trajectories import Trajectory, TrajectorySlots, TrajectorySpec, slot_bytes, split


def memory_needed(spec: TrajectorySpec, capacity: int) -> int:
    """Bytes that a replay of `capacity` trajectories takes when it is full.

    Args:
        spec: Of what is added; a trajectory is one column of it, whatever its number of columns.
        capacity: Trajectories.
    """
    return capacity * slot_bytes(spec.with_columns(1))


class Replay:
    """A bounded memory of single columns, first in, first out, that batches are drawn from.

    Memory is reserved at once and taken by the operating system page by page as trajectories
    arrive, so that one that never fills never costs what it could.

    Attributes:
        capacity: Trajectories it holds at most, after `max_bytes` has bounded them.
    """

    def __init__(
        self,
        spec: TrajectorySpec,
        capacity: int,
        max_bytes: int | None,
        generator: torch.Generator,
    ) -> None:
        """Make an empty memory.

        Args:
            spec: Of what is added; a trajectory is one column of it, whatever its number of
                columns.
            capacity: Trajectories to hold at most.
            max_bytes: Bytes to take at most, which may leave room for fewer; None for no such
                bound. The batch that `draw` returns is not counted.
            generator: What draws are made with; nothing else may use it.

        Raises:
            ValueError: There is no room for a single trajectory.
        """
        self._spec = spec.with_columns(1)
        if max_bytes is not None:
            capacity = min(capacity, max_bytes // memory_needed(spec, 1))
        if capacity < 1:
            bound = "" if max_bytes is None else f" in {max_bytes:,} bytes"
            raise ValueError(
                f"a replay needs room for one trajectory at least, which takes "
                f"{memory_needed(spec, 1):,} bytes; got room for {capacity}{bound}"
            )
        self.capacity = capacity
        self._slots = TrajectorySlots(self._spec, capacity, _untouched_zeros)
        self._generator = generator
        self._num_kept = 0
        self._next = 0  # the slot that is written next; the oldest trajectory's once all are full
        self._batch: Trajectory | None = None

    def __len__(self) -> int:
        """Trajectories that it holds now."""
        return self._num_kept

    @property
    def is_full(self) -> bool:
        """Whether the next trajectory takes the place of the oldest."""
        return self._num_kept == self.capacity

    @property
    def nbytes(self) -> int:
        """Bytes that it takes when it is full."""
        return self._slots.nbytes

    def add(self, batch: Trajectory) -> None:
        """Keep a copy of each column of a batch, in their order, as a trajectory of its own.

        Raises:
            ValueError: A field's shape or dtype is not the replay's; nothing was added.
        """
        columns = batch.num_columns
        _require_fields(self._spec.with_columns(columns).fields(), batch.to_fields())
        for column in split(batch, [1] * columns):
            self._slots.write(self._next, column)
            self._next = (self._next + 1) % self.capacity
            self._num_kept = min(self._num_kept + 1, self.capacity)

    def draw(self, count: int) -> Trajectory:
        """Draw trajectories uniformly and with replacement.

        Episodes that ended in them were counted when they were played, so `episode_returns` and
        `episode_lengths` come back as zeros; all else comes back as it was added.

        Args:
            count: How many, at least 1.

        Returns:
            A batch of `count` columns. The next draw overwrites it: copy what has to last.

        Raises:
            ValueError: `count` is less than 1.
            LookupError: Nothing has been added yet.
        """
        if count < 1:
            raise ValueError(f"cannot draw {count} trajectories: at least one makes a batch")
        if not self._num_kept:
            raise LookupError("cannot draw from an empty replay: no trajectory was added yet")
        if self._batch is None or self._batch.num_columns != count:
            self._batch = self._spec.with_columns(count).allocate()
        # By age, so that draws do not depend on where in memory a trajectory lies.
        ages = torch.randint(self._num_kept, (count,), generator=self._generator).tolist()
        for age, column in zip(ages, split(self._batch, [1] * count), strict=True):
            self._slots.read((self._oldest + age) % self.capacity, column)
        self._batch.episode_returns.zero_()
        self._batch.episode_lengths.zero_()
        return self._batch

    def state_dict(self) -> dict[str, Any]:
        """All that later draws depend on, as tensors and plain values for a checkpoint.

        Trajectories stand under the names of their fields, `[len, ...]` each, with frames of a
        stack kept once. These are the live tensors, not copies.
        """
        return {
            "trajectories": self._slots.views(slice(0, self._num_kept)),
            "oldest": self._oldest,
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken: the same trajectories, the same draws.

        A replay of another capacity takes as many of the newest as it has room for.

        Raises:
            ValueError: The state holds trajectories of another spec; nothing was changed.
        """
        fields: Mapping[str, Tensor] = state["trajectories"]
        total, oldest = len(fields["rewards"]), int(state["oldest"])
        own = self._slots.views(slice(0, self.capacity))
        _require_fields(
            {name: ((total, *view.shape[1:]), view.dtype) for name, view in own.items()}, fields
        )
        self._num_kept = min(total, self.capacity)
        self._next = self._num_kept % self.capacity
        for name, view in own.items():
            # Slot by slot: a reordered copy of a whole field could be gigabytes.
            for slot in range(self._num_kept):
                age = total - self._num_kept + slot
                view[slot].copy_(fields[name][(oldest + age) % total])
        self._generator.set_state(state["generator"])

    @property
    def _oldest(self) -> int:
        """The slot of the oldest trajectory."""
        return (self._next - self._num_kept) % self.capacity


def _untouched_zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """Zeros whose memory the operating system makes when they are first written.

    `torch.zeros` writes them all.
    """
    zeros = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(zeros).view(dtype).view(shape)


def _require_fields(
    expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]], fields: Mapping[str, Tensor]
) -> None:
    """Refuse fields that copying would broadcast, convert or leave out."""
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in fields.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"a trajectory of another spec: {name} is {found.get(name, 'missing')}, "
                f"expected {expected.get(name, 'no such field')}"
            )
