"""Which spaces are supported, where an image has its channels, and which actions are legal.

What is here: pure functions of Gymnasium spaces, shared by every adapter. What is not here:
anything that builds or steps an environment.
"""

from __future__ import annotations

from typing import Any, Literal

import gymnasium
import numpy as np
from numpy.typing import NDArray

from repertory.environments.base import EnvironmentRefused, ImageLayout

_DTYPES = tuple(
    np.dtype(name)
    for name in (
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
    )
)
"""What PyTorch calculates with; it stores wider unsigned integers and little more."""


def require_supported(
    name: str, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
) -> None:
    """Refuse spaces that no model here can be built for.

    Raises:
        EnvironmentRefused: The observations are no `Box` or the actions are not `Discrete`.
    """
    problems = []
    if not isinstance(observation_space, gymnasium.spaces.Box):
        problems.append(f"observations {observation_space}")
    elif observation_space.dtype not in _DTYPES:
        problems.append(f"observations of dtype {observation_space.dtype}")
    if not isinstance(action_space, gymnasium.spaces.Discrete):
        problems.append(f"actions {action_space}")
    if problems:
        raise EnvironmentRefused(
            f"{name} has {' and '.join(problems)}; supported are Box observations of any shape "
            f"({', '.join(str(dtype) for dtype in _DTYPES)}) and Discrete actions"
        )


def image_layout(
    name: str, space: gymnasium.Space[Any], wanted: Literal["auto", "chw", "hwc"]
) -> ImageLayout:
    """Say where the channels of an observation stand.

    What is asked for wins. Otherwise an array of bytes or booleans with three axes is an image, and
    its channels stand on the smaller of the first and the last axis: images are wider and higher
    than they have channels. Nothing is guessed where these two are equal.

    Args:
        name: The environment, for messages.
        space: Space of one column's observation.
        wanted: What the user asked for.

    Returns:
        `chw`, `hwc`, or `none` where the observation is no image.

    Raises:
        EnvironmentRefused: The shape does not tell, or cannot have the layout asked for.
    """
    shape = space.shape or ()
    if wanted != "auto":
        if len(shape) != 3:
            raise EnvironmentRefused(
                f"{name} has observations of shape {shape}, which cannot be {wanted} images: "
                "leave --image-layout at auto"
            )
        return wanted
    if len(shape) != 3 or space.dtype not in (np.dtype(np.uint8), np.dtype(np.bool_)):
        return "none"
    if shape[0] == shape[2]:
        raise EnvironmentRefused(
            f"{name} has images of shape {shape}, and the shape does not tell where their channels "
            "stand: say --image-layout chw or --image-layout hwc"
        )
    return "chw" if shape[0] < shape[2] else "hwc"


def legal_actions(actions: NDArray[Any], num_envs: int, num_actions: int) -> NDArray[np.int64]:
    """Check a row of discrete actions before any environment sees it.

    The check is always on. An illegal action would be an exception in most environments, a silent
    wrap-around in those that index a list, and an endless wait in a native one.

    Args:
        actions: [B], counting from 0.
        num_envs: B.
        num_actions: How many actions there are.

    Returns:
        [B] int64.

    Raises:
        ValueError: Wrong shape, not integers, or out of range; names the column.
    """
    array = np.asarray(actions)
    if array.shape != (num_envs,):
        raise ValueError(f"expected actions of shape ({num_envs},), got {array.shape}")
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"expected integer actions, got {array.dtype}")
    illegal = np.flatnonzero((array < 0) | (array >= num_actions))
    if illegal.size:
        column = int(illegal[0])
        raise ValueError(
            f"action {array[column]} of column {column} is not one of 0..{num_actions - 1}"
        )
    return array.astype(np.int64)
