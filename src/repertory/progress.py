"""How far a run is and how it goes: counted by learners, added up by the parent.

A learner adds its updates to a `Window` and reports the window whenever the run's env steps cross
a multiple of the log interval. All learners cross it at the same update, so the parent can put
their windows together, and the lines of two runs with one seed are equal but for their seconds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from repertory.losses import explained_variance
from repertory.metrics import EpisodeWindow
from repertory.trajectories import Trajectory

STAGES = ("environment", "inference", "learning", "waiting")
"""Where a role's seconds go."""


class Stopwatch:
    """Adds up the seconds a role spends in each stage."""

    def __init__(self) -> None:
        """Every stage starts at 0."""
        self._seconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Count the block's seconds under `stage`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[stage] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """The seconds by stage since the last call."""
        taken, self._seconds = self._seconds, dict.fromkeys(STAGES, 0.0)
        return taken


@dataclass
class Window:
    """What one learner did between two lines of metrics; sums, so that learners' windows add up."""

    updates: int = 0
    transitions: int = 0
    columns: int = 0
    lag_sum: int = 0
    lag_max: int = 0
    sums: Tensor = field(default_factory=lambda: torch.zeros(7, dtype=torch.float64))
    gradient_norm_sum: float = 0.0
    learning_rate: float = 0.0
    entropy_cost: float = 0.0
    episodes: list[tuple[float, int]] = field(default_factory=list)

    def add(self, batch: Trajectory, sums: Tensor, lag: Tensor, norm: float) -> None:
        """Count one update.

        Args:
            batch: What was learned from.
            sums: [7]; this learner's sums of policy loss, value loss and entropy, and the critic's
                moments as `losses.explained_variance` takes them.
            lag: [B] int64; updates since each column was played.
            norm: Global norm of the update's gradient before clipping.
        """
        self.updates += 1
        self.transitions += int(batch.valid.sum())
        self.columns += lag.numel()
        self.lag_sum += int(lag.sum())
        self.lag_max = max(self.lag_max, int(lag.max()))
        self.sums += sums
        self.gradient_norm_sum += norm
        rows, columns = batch.episode_lengths.nonzero(as_tuple=True)
        if rows.numel():
            returns = batch.episode_returns[rows, columns].tolist()
            self.episodes.extend(
                zip(returns, batch.episode_lengths[rows, columns].tolist(), strict=True)
            )

    def to_record(self, rank: int, env_steps: int, seconds_in: dict[str, float]) -> dict[str, Any]:
        """A `window` record for the parent."""
        return {
            "kind": "window",
            "rank": rank,
            "env_steps": env_steps,
            "updates": self.updates,
            "transitions": self.transitions,
            "columns": self.columns,
            "lag_sum": self.lag_sum,
            "lag_max": self.lag_max,
            "sums": self.sums.tolist(),
            "gradient_norm_sum": self.gradient_norm_sum,
            "learning_rate": self.learning_rate,
            "entropy_cost": self.entropy_cost,
            "episodes": self.episodes,
            "seconds_in": seconds_in,
        }


class Progress:
    """Puts learners' windows together into `progress` records, in the parent."""

    def __init__(
        self,
        *,
        num_learners: int,
        action_repeat: int,
        entropy_max: float | None,
    ) -> None:
        """Start the clock.

        Args:
            num_learners: Windows that make up a line.
            action_repeat: Frames per env step.
            entropy_max: ln n of a discrete policy; None where entropy has no bound, or is 0.
        """
        self._num_learners = num_learners
        self._action_repeat = action_repeat
        self._entropy_max = entropy_max
        self._waiting: list[deque[dict[str, Any]]] = [deque() for _ in range(num_learners)]
        self._recent = EpisodeWindow()
        self._seconds_in = dict.fromkeys(STAGES, 0.0)
        self._started = self._last_time = time.monotonic()
        self._last_steps = 0
        self._updates = 0

    def add_seconds(self, seconds_in: dict[str, float]) -> None:
        """Count what a role that only plays spent in each stage."""
        for stage, seconds in seconds_in.items():
            self._seconds_in[stage] += seconds

    def add_window(self, window: dict[str, Any]) -> dict[str, Any] | None:
        """Take a learner's window; the finished line once all learners' are there."""
        self._waiting[window["rank"]].append(window)
        if not all(self._waiting):
            return None
        return self._line([waiting.popleft() for waiting in self._waiting])

    def _line(self, windows: list[dict[str, Any]]) -> dict[str, Any]:
        first = windows[0]
        for window in windows:
            for episode_return, length in window["episodes"]:
                self._recent.add(episode_return, length)
            self.add_seconds(window["seconds_in"])
        self._updates += first["updates"]
        transitions = max(1, sum(window["transitions"] for window in windows))
        columns = max(1, sum(window["columns"] for window in windows))
        sums = torch.tensor([window["sums"] for window in windows], dtype=torch.float64).sum(0)
        policy, value, entropy = (sums[:3] / transitions).tolist()
        now, env_steps = time.monotonic(), first["env_steps"]
        line = {
            "kind": "progress",
            "env_steps": env_steps,
            "frames": env_steps * self._action_repeat,
            "updates": self._updates,
            "episodes": self._recent.episodes,
            "wall_seconds": now - self._started,
            "env_steps_per_second": (env_steps - self._last_steps)
            / max(now - self._last_time, 1e-9),
            "episode_return_mean": self._recent.return_mean,
            "episode_length_mean": self._recent.length_mean,
            "policy_lag_mean": sum(window["lag_sum"] for window in windows) / columns,
            "policy_lag_max": max(window["lag_max"] for window in windows),
            "policy_loss": policy,
            "value_loss": value,
            "entropy": entropy,
            "explained_variance": explained_variance(torch.tensor(transitions), sums[3:]),
            "gradient_norm": first["gradient_norm_sum"] / max(1, first["updates"]),
            "learning_rate": first["learning_rate"],
            "entropy_cost": first["entropy_cost"],
            "seconds_in": self._seconds_in,
        }
        if self._entropy_max:
            line["entropy_normalised"] = entropy / self._entropy_max
        self._seconds_in = dict.fromkeys(STAGES, 0.0)
        self._last_time, self._last_steps = now, env_steps
        return line

    @property
    def recent_return(self) -> float | None:
        """Mean return of the last 100 finished episodes; None before there are so many."""
        return self._recent.return_mean if self._recent.full else None
