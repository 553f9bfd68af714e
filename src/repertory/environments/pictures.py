"""The small picture that the widely used PyTorch A3C program shows of a game, and its moments.

What is here: from a game's screen to the observation of the protocol `a3c42`, one frame of 42 by 42
that is shifted and scaled by running moments. What is not here: the game, and the halving of its
screen, which the emulator does (`atari`).

The program (ikostrikov/pytorch-a3c, `envs.py`, 2017) cuts the square court out of the screen, 160
by 160, resizes it bilinearly to 80 by 80 and then to 42 by 42, takes the mean over colours, divides
by 255 and normalises. At exactly half the size bilinear is the mean of four pixels, rounded to
bytes; this is also what the emulator makes of a whole screen of which it is asked half the height
and width. So the first step is the emulator's, and the court is cut out after it.

What differs from the program: grey is the emulator's luminance, where the program takes the mean
of red, green and blue. In Pong the paddles stand out by 61 and 60 of 255 instead of 61 and 46, the
ball by 149 instead of 158. Colours would make the emulator a quarter slower. And the second resize
is not rounded to bytes.

Nothing here goes through a matrix product. Each pixel is a mean of two by two others, and NumPy's
product would start threads of its own, a pool in each process, that have to wait for each other
on cores that games and networks keep busy. It also makes a column's bits independent of how many
columns there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

SIDE = 42
"""Height and width of a picture."""

SHAPE = (1, SIDE, SIDE)
"""Shape of an observation."""

_COURT = (34 / 210, 194 / 210)
"""Where the court begins and ends, as shares of the screen's height."""

_DECAY = 0.9999
"""What stays of the running moments at each observation."""

_EPSILON = 1e-8
"""Added to the deviation before it divides."""


class SmallPictures:
    """Makes the observations of B columns from their screens.

    Screens of another height than the usual 210 lines lose the same share of them above and below.

    Args:
        num_columns: B.
        height: Height of a halved screen, in pixels; 105 in nearly all games.
        width: Width of a halved screen.
    """

    def __init__(self, num_columns: int, height: int, width: int) -> None:
        top, bottom = (round(share * height) for share in _COURT)
        self._court = slice(top, bottom)
        self._rows = _Resize(bottom - top)
        self._columns = _Resize(width)
        self._moments = RunningMoments(num_columns)

    def restart(self) -> None:
        """Forget the moments: all columns begin afresh."""
        self._moments.restart()

    def observe(self, screens: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Observations [B, 1, 42, 42] of halved grey screens [B, 1, height, width].

        Every call counts in the moments, the one that brings the first screen of a game too.
        """
        return self._moments.normalize(self.shrink(screens))

    def shrink(self, screens: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Cut, resize and scale to [0, 1], without the moments; shapes as in `observe`."""
        rows = self._rows(screens[:, :, self._court], axis=2)
        pictures = self._columns(rows, axis=3)
        pictures /= np.float32(255.0)
        return pictures


class RunningMoments:
    """Mean and deviation of a column's pixels, averaged over its observations so far.

    Each column has one mean and one deviation over all pixels. They start at 0 and move by a
    ten-thousandth of the way to those of every new picture; dividing by 1 - 0.9999^n takes back
    that they started at 0. They go on from game to game: it is a column's history, not a game's.

    Args:
        num_columns: B.
    """

    def __init__(self, num_columns: int) -> None:
        self._num_columns = num_columns
        self.restart()

    def restart(self) -> None:
        """Begin as if nothing had been seen."""
        self._num_seen = 0
        self._mean = np.zeros(self._num_columns)
        self._deviation = np.zeros(self._num_columns)

    def normalize(self, pictures: NDArray[np.float32]) -> NDArray[np.float32]:
        """Count pictures [B, ...], one a column, and return them shifted and scaled."""
        pixels = pictures.reshape(self._num_columns, -1)
        means = pixels.mean(1)
        deviations = np.sqrt(np.square(pixels - means[:, None]).mean(1))
        self._num_seen += 1
        self._mean = self._mean * _DECAY + means * (1.0 - _DECAY)
        self._deviation = self._deviation * _DECAY + deviations * (1.0 - _DECAY)
        seen = 1.0 - _DECAY**self._num_seen
        shift = (self._mean / seen).astype(np.float32)
        scale = (self._deviation / seen + _EPSILON).astype(np.float32)
        normalized = pixels - shift[:, None]
        normalized /= scale[:, None]
        return normalized.reshape(pictures.shape)


class _Resize:
    """Bilinear resizing of one axis to `SIDE`, without smoothing beforehand.

    Pixels are areas and lie at their centres, as OpenCV's INTER_LINEAR has it: the centre of pixel
    d falls on (d + 1/2) * size / SIDE - 1/2 of the source. The two source pixels beside that place
    share it.
    """

    def __init__(self, size: int) -> None:
        places = (np.arange(SIDE) + 0.5) * (size / SIDE) - 0.5
        # At an edge both neighbours are the outermost pixel.
        places = places.clip(0, size - 1)
        self._lower = np.floor(places).astype(np.intp)
        self._upper = np.minimum(self._lower + 1, size - 1)
        self._share = (places - self._lower).astype(np.float32)

    def __call__(self, images: NDArray[Any], axis: int) -> NDArray[np.float32]:
        """Resize one axis of images [B, 1, H, W], bytes or float32."""
        share = self._share if axis == 3 else self._share[:, None]
        resized: NDArray[np.float32] = images.take(self._lower, axis).astype(np.float32, copy=False)
        difference = images.take(self._upper, axis).astype(np.float32, copy=False)
        # In place: with many columns fresh memory costs more than the arithmetic.
        difference -= resized
        difference *= share
        resized += difference
        return resized
