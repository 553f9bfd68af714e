"""What a policy gets of the numbers that an environment returns, some of which may not be finite.

With `not_finite="stop"` such a number ends the run. With "skip" its transition is left out, zeros
stand in for the observation, and a core forgets what was before. Whoever plays, to learn or to be
measured, takes in numbers through here, so that an agent is judged by the rules it learned under.

What is here: the look at numbers, and the count of what was left out. What is not here: numbers
that a learner makes of them (`losses`, `learners`).
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from repertory.config import NotFinite
from repertory.metrics import Record

_REPORT_SECONDS = 1.0
_UNROLLS_WITHOUT_NUMBERS = 10  # in a row, after which nothing good is to be hoped for


class Senses:
    """One player's look at what its columns return."""

    def __init__(self, environment: str, player: str, not_finite: NotFinite, first: Tensor) -> None:
        """Take in the first observations; those that are not finite become zeros.

        Args:
            environment: Its name, for messages.
            player: Whose ticks are counted, for messages.
            not_finite: What becomes of numbers that are not finite.
            first: [B, ...] observations after the reset, changed in place.

        Raises:
            FloatingPointError: One is not finite, with `not_finite="stop"`.
        """
        self._environment = environment
        self._player = player
        self._stops = not_finite == "stop"
        self._ticks = 0
        self._made_up = not_finite_in(first)  # columns that stand on no real observation
        bad = self._describe("first observation", first, self._made_up)
        self._stop_at(bad)
        _make_zero(first, self._made_up)
        self._left_out = _LeftOut(bad or "")

    def take_in(
        self, observations: Tensor, rewards: Tensor, terminated: Tensor, valid: Tensor
    ) -> Tensor:
        """Look at what a tick has brought, and put zeros where it is not finite.

        An observation behind a termination is nobody's: its value counts for nothing, so the
        transition stays whatever it holds (Mnih et al. 2016, algorithm S3: R is 0 there).

        Args:
            observations: [B, ...] after the tick, changed in place.
            rewards: [B], changed in place.
            terminated: [B] bool.
            valid: [B] bool; False where the tick merely reset.

        Returns:
            [B] bool: transitions that are to be left out.

        Raises:
            FloatingPointError: A number is not finite, with `not_finite="stop"`.
        """
        of_rewards, of_observations = not_finite_in(rewards), not_finite_in(observations)
        if not (of_rewards | of_observations | self._made_up).any():
            self._ticks += 1
            return of_rewards
        bad = self._describe("reward", rewards, of_rewards) or self._describe(
            "observation", observations, of_observations & ~terminated
        )
        self._stop_at(bad)
        self._ticks += 1
        out = (of_rewards | (of_observations & ~terminated) | self._made_up) & valid
        _make_zero(rewards, of_rewards)
        _make_zero(observations, of_observations)
        self._made_up = of_observations
        self._left_out.add(int(out.sum()), bad)
        return out

    def require_finite(self, name: str, values: Tensor) -> None:
        """Refuse what no setting excuses.

        Raises:
            FloatingPointError: One of `values` [B] is not finite.
        """
        bad = self._describe(name, values, not_finite_in(values))
        if bad is not None:
            raise FloatingPointError(bad)

    def end_unroll(self, *, something_left: bool) -> None:
        """Look back on an unroll, in which there was something to learn from, or not.

        Raises:
            FloatingPointError: There has been nothing else for several unrolls.
        """
        self._left_out.end_unroll(something_left=something_left)

    def take(self) -> Record | None:
        """An event for the parent, about once a second; None if there is nothing new."""
        return self._left_out.take()

    def _stop_at(self, bad: str | None) -> None:
        if bad is not None and self._stops:
            raise FloatingPointError(f"{bad} (not_finite=skip would leave such transitions out)")

    def _describe(self, name: str, values: Tensor, bad: Tensor) -> str | None:
        """Which of `values` [B, ...] is not finite, and where; None if none of `bad` [B] is."""
        if not bad.any():
            return None
        column = int(bad.nonzero()[0])
        found = values[column].flatten()
        return (
            f"{self._environment}, column {column}, tick {self._ticks} of {self._player}: "
            f"the {name} is {found[~torch.isfinite(found)][0].item()}"
        )


class _LeftOut:
    """Transitions that were left out because a number in them was not finite."""

    def __init__(self, newest: str) -> None:
        """None so far; `newest` says which number was met last, if any."""
        self._now = self._untold = self._unrolls = 0
        self._newest = newest
        self._told = -_REPORT_SECONDS

    def add(self, number: int, what: str | None) -> None:
        """Count some; `what` says which number it was, None where it was an earlier one."""
        self._now += number
        self._newest = what or self._newest

    def end_unroll(self, *, something_left: bool) -> None:
        """Look back on an unroll, in which there was something to learn from, or not.

        Raises:
            FloatingPointError: There has been nothing else for several unrolls.
        """
        self._unrolls = self._unrolls + 1 if self._now and not something_left else 0
        self._untold += self._now
        self._now = 0
        if self._unrolls == _UNROLLS_WITHOUT_NUMBERS:
            raise FloatingPointError(f"{self._newest}; so it has been for {self._unrolls} unrolls")

    def take(self) -> Record | None:
        """An event for the parent, about once a second; None if there is nothing new."""
        if not self._untold or time.monotonic() - self._told < _REPORT_SECONDS:
            return None
        self._told = time.monotonic()
        message = f"{self._newest}; {self._untold} transitions left out since the last such line"
        self._untold = 0
        return {"kind": "event", "event": "left_out", "message": message}


def not_finite_in(values: Tensor) -> Tensor:
    """[B] bool: in which columns of `values` [B, ...] some number is not finite."""
    if not values.is_floating_point():
        return torch.zeros(len(values), dtype=torch.bool)
    return ~torch.isfinite(values.reshape(len(values), -1)).all(1)


def _make_zero(values: Tensor, columns: Tensor) -> None:
    if columns.any():
        values[columns] = 0
