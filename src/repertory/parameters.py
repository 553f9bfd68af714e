"""Versions and snapshots of a model's parameters, and how far behind them data is.

A model's parameters and buffers travel as one flat vector, so that a version is published with one
copy and read whole. A version counts updates: version k has seen k of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def travelling_tensors(model: nn.Module) -> list[Tensor]:
    """What a snapshot holds, in a fixed order: every parameter, then every buffer.

    Raises:
        ValueError: The tensors do not share one floating dtype, so no flat vector can hold them.
    """
    tensors = [*model.parameters(), *model.buffers()]
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point:
        found = ", ".join(sorted(str(dtype) for dtype in dtypes)) or "no parameters at all"
        raise ValueError(f"parameters and buffers must share one floating dtype; found {found}")
    return tensors


def snapshot_size(model: nn.Module) -> int:
    """Numbers in a snapshot of `model`."""
    return sum(tensor.numel() for tensor in travelling_tensors(model))


def flatten(tensors: Sequence[Tensor], out: Tensor) -> None:
    """Copy `tensors` one after the other into the flat vector `out`."""
    with torch.no_grad():
        start = 0
        for tensor in tensors:
            out[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
            start += tensor.numel()


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """The opposite of `flatten`: overwrite `tensors` with the values in `flat`."""
    with torch.no_grad():
        start = 0
        for tensor in tensors:
            tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()


def move_towards(tensors: Sequence[Tensor], others: Sequence[Tensor], tau: float) -> None:
    """Move `tensors` towards `others` in place: `(1 - tau) * tensor + tau * other`.

    Args:
        tensors: Changed.
        others: Read only; the same shapes, on any device.
        tau: In [0, 1]; 1 copies, bit for bit.
    """
    with torch.no_grad():
        if tau == 1.0:
            torch._foreach_copy_(list(tensors), list(others))
        else:
            near = [other.to(tensor) for tensor, other in zip(tensors, others, strict=True)]
            torch._foreach_lerp_(list(tensors), near, tau)


def distance(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Norm of the difference between two sets of parameters, on any devices."""
    with torch.no_grad():
        squares = [
            (tensor - other.to(tensor)).square().sum().item()
            for tensor, other in zip(tensors, others, strict=True)
        ]
    return math.sqrt(math.fsum(squares))


def flat_gradient(model: nn.Module) -> Tensor:
    """One zeroed vector that all gradients of `model` are views of, each laid out as its parameter.

    Gradients then meet, are clipped and are cleared with one operation each.
    """
    parameters = list(model.parameters())
    flat = torch.zeros(
        sum(parameter.numel() for parameter in parameters),
        dtype=parameters[0].dtype,
        device=parameters[0].device,
    )
    start = 0
    for parameter in parameters:
        parameter.grad = flat.as_strided(parameter.shape, parameter.stride(), start)
        start += parameter.numel()
    return flat


def policy_lag(version: int, policy_version: Tensor) -> Tensor:
    """How many updates happened since each column was played.

    Args:
        version: Updates made before the batch is learned from.
        policy_version: [B] int64; see `Trajectory`.

    Returns:
        [B] int64; 0 for data of the very policy that learns from it.
    """
    return version - policy_version
