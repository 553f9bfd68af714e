"""The one data type that travels: what an actor played, laid out so that ends need no care.

Time-major, `T` ticks by `B` columns. Row t of every `[T, B]` tensor describes the transition that
leads from observation t to observation t + 1, so `observations` has one row more than the rest.

What is here: the type, its allocation, stacking by columns and splitting, the packing of stacked
frames, and slots that many trajectories are kept in. What is not here: whose memory slots are in
and who may use them (`replay`, `runtimes.shared_memory`), targets and losses (`targets`, `losses`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

CoreState = tuple[Tensor, ...]
"""What a recurrent core carries from tick to tick; each tensor `[B, ...]`, empty without a core."""

_ALIGNMENT = 64  # bytes; a cache line, and more than any dtype needs


@dataclass(frozen=True)
class TrajectorySpec:
    """Shapes and dtypes of a trajectory, enough to allocate one anywhere.

    Attributes:
        unroll_length: T, ticks.
        num_columns: B.
        observation_shape: Shape of one observation.
        observation_dtype: The environment's dtype.
        action_shape: Shape of one action; `()` for a discrete one.
        action_dtype: dtype of an action.
        core_state_shapes: Shape of each core state tensor without its column axis.
        frame_stack: Single frames along the observation's first axis; 1 where not stacked.
    """

    unroll_length: int
    num_columns: int
    observation_shape: tuple[int, ...]
    observation_dtype: torch.dtype
    action_shape: tuple[int, ...]
    action_dtype: torch.dtype
    core_state_shapes: tuple[tuple[int, ...], ...] = ()
    frame_stack: int = 1

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype by field; `initial_core_state` appears as `initial_core_state.0`, ..."""
        rows = (self.unroll_length, self.num_columns)
        fields = {
            "observations": (
                (rows[0] + 1, rows[1], *self.observation_shape),
                self.observation_dtype,
            ),
            "actions": ((*rows, *self.action_shape), self.action_dtype),
            "rewards": (rows, torch.float32),
            "terminated": (rows, torch.bool),
            "truncated": (rows, torch.bool),
            "valid": (rows, torch.bool),
            "behaviour_log_probs": (rows, torch.float32),
            "policy_version": (rows[1:], torch.int64),
            "episode_returns": (rows, torch.float64),
            "episode_lengths": (rows, torch.int64),
        }
        for index, shape in enumerate(self.core_state_shapes):
            fields[f"initial_core_state.{index}"] = ((rows[1], *shape), torch.float32)
        return fields

    def with_columns(self, num_columns: int) -> TrajectorySpec:
        """The same spec for another number of columns."""
        return dataclasses.replace(self, num_columns=num_columns)

    def allocate(self, *, pinned: bool = False) -> Trajectory:
        """A zeroed trajectory of this spec, in ordinary or in pinned memory."""
        return Trajectory.from_fields(
            {
                name: torch.zeros(shape, dtype=dtype, pin_memory=pinned)
                for name, (shape, dtype) in self.fields().items()
            }
        )


@dataclass
class Trajectory:
    """An unroll of T ticks by B columns, or several of them side by side (a batch).

    Attributes:
        observations: [T+1, B, ...] in the environment's dtype; row t+1 follows action t. Where an
            episode ends at t, row t+1 is the true final observation.
        actions: [T, B, ...] as the policy drew them, before clipping or shifting to the space.
        rewards: [T, B] float32, raw.
        terminated: [T, B] bool.
        truncated: [T, B] bool; never true together with `terminated`.
        valid: [T, B] bool; False on ticks that merely reset.
        behaviour_log_probs: [T, B]; of the action taken, by the policy that took it.
        policy_version: [B] int64; the version that played the whole unroll.
        episode_returns: [T, B] float64; see `Tick`.
        episode_lengths: [T, B] int64; see `Tick`.
        initial_core_state: each [B, ...]; before row 0, already reset where row 0 is the first
            observation of an episode.
    """

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    behaviour_log_probs: Tensor
    policy_version: Tensor
    episode_returns: Tensor
    episode_lengths: Tensor
    initial_core_state: CoreState = ()

    @property
    def unroll_length(self) -> int:
        """T."""
        return self.rewards.shape[0]

    @property
    def num_columns(self) -> int:
        """B."""
        return self.rewards.shape[1]

    @property
    def resets(self) -> Tensor:
        """[T+1, B] bool; True where the core state is reset before that row is read.

        Row t+1 is an episode's first observation exactly where tick t merely reset. Row 0 is never
        marked: `initial_core_state` is already reset where it has to be. Nor is a column of which
        nothing is valid, one that came too late, say: a core would read it row by row for nothing.
        """
        first = torch.zeros_like(self.valid[:1])
        return torch.cat([first, ~self.valid & self.valid.any(0)])

    def to_fields(self) -> dict[str, Tensor]:
        """The tensors by name, as `TrajectorySpec.fields` names them."""
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "initial_core_state"
        }
        for index, tensor in enumerate(self.initial_core_state):
            fields[f"initial_core_state.{index}"] = tensor
        return fields

    @classmethod
    def from_fields(cls, fields: dict[str, Tensor]) -> Trajectory:
        """The opposite of `to_fields`; the tensors are kept, not copied."""
        plain = {name: tensor for name, tensor in fields.items() if "." not in name}
        core = tuple(fields[name] for name in sorted(fields) if "." in name)
        return cls(**plain, initial_core_state=core)

    def copy_(self, other: Trajectory) -> None:
        """Overwrite this trajectory's memory with `other`'s values."""
        source = other.to_fields()
        for name, tensor in self.to_fields().items():
            tensor.copy_(source[name])

    def to(self, device: torch.device) -> Trajectory:
        """The same trajectory on `device`; itself where it is there already.

        From pinned memory the copy may still be under way: what is queued on the device after it
        sees it whole, and the memory may be overwritten once a result of that has been read.
        """
        if self.rewards.device == device:
            return self
        fields = self.to_fields().items()
        return Trajectory.from_fields(
            {name: tensor.to(device, non_blocking=tensor.is_pinned()) for name, tensor in fields}
        )

    def clone(self) -> Trajectory:
        """A copy in memory of its own."""
        return Trajectory.from_fields({k: v.clone() for k, v in self.to_fields().items()})


def _column_axis(name: str) -> int:
    """Which axis counts columns: the first where there is no time axis, else the second."""
    return 0 if name == "policy_version" or name.startswith("initial_core_state") else 1


def stack(trajectories: Sequence[Trajectory]) -> Trajectory:
    """Put trajectories of one length side by side, columns in the order given.

    Raises:
        ValueError: Nothing to stack, or the unroll lengths differ.
    """
    if not trajectories:
        raise ValueError("cannot stack an empty sequence of trajectories")
    lengths = {trajectory.unroll_length for trajectory in trajectories}
    if len(lengths) > 1:
        raise ValueError(f"cannot stack trajectories of different lengths: {sorted(lengths)}")
    if len(trajectories) == 1:
        return trajectories[0]
    parts = [trajectory.to_fields() for trajectory in trajectories]
    return Trajectory.from_fields(
        {name: torch.cat([part[name] for part in parts], _column_axis(name)) for name in parts[0]}
    )


def split(trajectory: Trajectory, sizes: Sequence[int]) -> list[Trajectory]:
    """Cut a batch into trajectories of `sizes` columns each; the opposite of `stack`.

    Raises:
        ValueError: The sizes do not add up to the number of columns.
    """
    if sum(sizes) != trajectory.num_columns:
        raise ValueError(f"sizes {list(sizes)} do not add up to {trajectory.num_columns} columns")
    pieces = {
        name: tensor.split(list(sizes), _column_axis(name))
        for name, tensor in trajectory.to_fields().items()
    }
    return [
        Trajectory.from_fields({name: piece[index] for name, piece in pieces.items()})
        for index in range(len(sizes))
    ]


def pack_frames(observations: Tensor, frame_stack: int) -> Tensor:
    """Keep each frame of stacked observations once.

    Args:
        observations: [T+1, B, K, ...]; K frames a stack, the newest last.
        frame_stack: K.

    Returns:
        [T+K, B, ...]; the K frames of row 0, then the newest frame of each later row.
    """
    first = observations[0].movedim(1, 0)
    return torch.cat([first, observations[1:, :, frame_stack - 1]])


def unpack_frames(frames: Tensor, resets: Tensor, out: Tensor) -> None:
    """The opposite of `pack_frames`.

    An episode's first stack is zeros under one frame, as the emulator's own vector environment
    makes it, so frames from before a reset are left out of every stack after it.

    Args:
        frames: [T+K, B, ...].
        resets: [T+1, B] bool; see `Trajectory.resets`.
        out: [T+1, B, K, ...]; overwritten.
    """
    rows, depth = out.shape[0], out.shape[2]
    for plane in range(depth):
        out[:, :, plane].copy_(frames[plane : plane + rows])
    if not resets.any():
        return
    for row, column in resets.nonzero().tolist():
        # Row `row` shows its newest frame only, the next row two, ... until a stack is full again.
        for age in range(min(depth - 1, rows - row)):
            out[row + age, column, : depth - 1 - age].zero_()


class Allocate(Protocol):
    """How memory for slots is made: zeroed, and shared or ordinary, as the caller needs it."""

    def __call__(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A zeroed tensor."""
        ...


class TrajectorySlots:
    """Room for a number of trajectories in one slab; frames of a stack are kept once."""

    def __init__(self, spec: TrajectorySpec, num_slots: int, allocate: Allocate) -> None:
        """Allocate the slab.

        Args:
            spec: Of the trajectories.
            num_slots: How many of them.
            allocate: Makes the slab, `[num_slots, slot_bytes(spec)]` uint8.
        """
        self.spec = spec
        self._layout, size = _layout(spec)
        self._slab = allocate(num_slots, size, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Size of the slab in bytes."""
        return self._slab.numel()

    def memory(self, slot: int) -> Tensor:
        """[slot_bytes(spec)] uint8; a slot as it may travel between slabs of one spec."""
        return self._slab[slot]

    def write(self, slot: int, trajectory: Trajectory) -> None:
        """Copy a trajectory into a slot."""
        fields = trajectory.to_fields()
        if self.spec.frame_stack > 1:
            fields["frames"] = pack_frames(fields.pop("observations"), self.spec.frame_stack)
        for name, view in self.views(slot).items():
            view.copy_(fields[name])

    def read(self, slot: int, out: Trajectory) -> None:
        """Copy a slot into `out`, stacks restored."""
        views = self.views(slot)
        for name, tensor in out.to_fields().items():
            if name in views:
                tensor.copy_(views[name])
        if self.spec.frame_stack > 1:
            unpack_frames(views["frames"], out.resets, out.observations)

    def views(self, slots: int | slice) -> dict[str, Tensor]:
        """What one slot or several hold, by field; writing to it writes to the slots.

        The fields are those of `TrajectorySpec.fields`, with `frames` as `pack_frames` makes them
        in place of stacked `observations`. A slice gives each a first axis that counts slots.
        """
        memory = self._slab[slots]
        return {
            name: memory[..., start : start + math.prod(shape) * dtype.itemsize]
            .view(dtype)
            .unflatten(-1, shape)
            for name, (start, shape, dtype) in self._layout.items()
        }


def slot_bytes(spec: TrajectorySpec) -> int:
    """Bytes that a trajectory takes in `TrajectorySlots`."""
    return _layout(spec)[1]


def _layout(
    spec: TrajectorySpec,
) -> tuple[dict[str, tuple[int, tuple[int, ...], torch.dtype]], int]:
    """Where in a slot each field begins, with its shape and dtype; and the slot's size in bytes."""
    fields = spec.fields()
    if spec.frame_stack > 1:
        (rows, columns, depth, *frame), dtype = fields.pop("observations")
        fields["frames"] = ((rows - 1 + depth, columns, *frame), dtype)
    layout, offset = {}, 0
    for name, (shape, dtype) in fields.items():
        layout[name] = (offset, shape, dtype)
        size = math.prod(shape) * dtype.itemsize
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return layout, offset
