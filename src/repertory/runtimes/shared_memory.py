"""Memory and messages between processes: slabs with slots in them, and one-way channels.

Data stays where it is: a slab is one shared allocation, mapped by every process that holds it and
unlinked from the file system from the start, so that no kill leaves a file behind. What travels is
a few whole numbers through a pipe with one writer and one reader. No lock is shared by two
processes: one killed while holding it would block the others for ever.
"""

from __future__ import annotations

import math
import os
import struct
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

import torch
from torch import Tensor

from repertory.trajectories import Trajectory, TrajectorySpec, pack_frames, unpack_frames

_ALIGNMENT = 64  # bytes; a cache line, and more than any dtype needs


class Channel:
    """A one-way pipe for whole numbers: one process sends, one receives.

    A message is far below the size that pipes write in one piece, so a sender that is killed
    leaves either a whole message or none.
    """

    def __init__(self, width: int) -> None:
        """Make a channel whose messages are `width` whole numbers each."""
        self._format = f"{width}q"
        self.receiving: Connection
        self._sending: Connection
        self.receiving, self._sending = Pipe(duplex=False)
        os.set_blocking(self._sending.fileno(), False)

    def send(self, *numbers: int) -> None:
        """Send a message.

        Raises:
            BlockingIOError: Tens of thousands of bytes lie unread; nothing was sent.
        """
        os.write(self._sending.fileno(), struct.pack(self._format, *numbers))

    def receive(self) -> tuple[int, ...]:
        """Read one message that is known to be there."""
        size = struct.calcsize(self._format)
        return struct.unpack(self._format, os.read(self.receiving.fileno(), size))

    def pending(self) -> bool:
        """Whether a message lies unread."""
        return bool(wait([self.receiving], 0))

    def close(self) -> None:
        """Close this process's ends."""
        self.receiving.close()
        self._sending.close()


def shared_zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """A zeroed tensor in shared memory."""
    return torch.zeros(*shape, dtype=dtype).share_memory_()


class TrajectorySlots:
    """Room for a number of trajectories in one slab; frames of a stack are kept once."""

    def __init__(self, spec: TrajectorySpec, num_slots: int) -> None:
        """Allocate the slab."""
        self.spec = spec
        self._layout: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        offset = 0
        for name, (shape, dtype) in self._slot_fields().items():
            self._layout[name] = (offset, shape, dtype)
            size = math.prod(shape) * dtype.itemsize
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._slab = shared_zeros(num_slots, offset, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Size of the slab in bytes."""
        return self._slab.numel()

    def write(self, slot: int, trajectory: Trajectory) -> None:
        """Copy a trajectory into a slot."""
        fields = trajectory.to_fields()
        if self.spec.frame_stack > 1:
            fields["frames"] = pack_frames(fields.pop("observations"), self.spec.frame_stack)
        for name, view in self._views(slot).items():
            view.copy_(fields[name])

    def read(self, slot: int, out: Trajectory) -> None:
        """Copy a slot into `out`, stacks restored."""
        views = self._views(slot)
        for name, tensor in out.to_fields().items():
            if name in views:
                tensor.copy_(views[name])
        if self.spec.frame_stack > 1:
            unpack_frames(views["frames"], out.resets, out.observations)

    def _slot_fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        fields = self.spec.fields()
        if self.spec.frame_stack > 1:
            (rows, columns, depth, *frame), dtype = fields.pop("observations")
            fields["frames"] = ((rows - 1 + depth, columns, *frame), dtype)
        return fields

    def _views(self, slot: int) -> dict[str, Tensor]:
        memory = self._slab[slot]
        return {
            name: memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (start, shape, dtype) in self._layout.items()
        }

