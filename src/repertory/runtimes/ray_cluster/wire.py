"""Messages between a role and its seat: a pickled header of plain values, then raw buffers.

Neither Ray nor torch is imported here: a seat needs no torch, and a role no Ray.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
"""Memory as it travels: one axis of bytes."""


def send(connection: Connection, *header: Any, buffers: Sequence[Bytes] = ()) -> None:
    """Send a message: plain values, and buffers of bytes.

    Raises:
        OSError: The other side is gone.
    """
    connection.send_bytes(pickle.dumps((header, [buffer.nbytes for buffer in buffers])))
    for buffer in buffers:
        connection.send_bytes(buffer.data)


def receive(connection: Connection) -> tuple[tuple[Any, ...], list[Bytes]]:
    """Wait for a message; its buffers lie in memory of their own.

    Raises:
        EOFError: The other side is gone.
        OSError: The same, in the middle of a message.
    """
    header, sizes = pickle.loads(connection.recv_bytes())
    buffers = [np.empty(size, np.uint8) for size in sizes]
    for buffer in buffers:
        connection.recv_bytes_into(buffer.data)
    return header, buffers
