"""How far a run is and how it goes: counted by learners, added up by the parent.

A learner adds its updates to a `Window` and reports the window whenever the run's env steps cross
a multiple of the log interval. Learners that step together cross it at the same update, so the
parent can put their windows together, and the lines of two runs with one seed are equal but for
their seconds. Workers of A3C cross it one after the other; a line is what has come of all of them.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from repertory.losses import Losses, explained_variance
from repertory.metrics import EpisodeWindow
from repertory.objective import Schedule
from repertory.runtimes.base import RoleContext
from repertory.trajectories import Trajectory

STAGES = ("environment", "inference", "learning", "waiting")
"""Where a role's seconds go."""

_OF_LEARNING = (
    *("policy_loss", "value_loss", "entropy", "explained_variance", "gradient_norm"),
    *("learning_rate", "entropy_cost"),
)
_LOW_ENTROPY = 0.01  # share of ln n, below which a policy is called almost deterministic
_PULSE_SECONDS = 1.0
_MAX_REFUSED = 100  # updates in a row, after which nothing good is to be hoped for


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
    """What one learner did between two lines of metrics; sums, so that windows add up."""

    updates: int = 0
    transitions: int = 0
    lags: Counter[int] = field(default_factory=Counter)
    sums: Tensor = field(default_factory=lambda: torch.zeros(7, dtype=torch.float64))
    gradient_norm_sum: float = 0.0
    learning_rate: float = 0.0
    entropy_cost: float = 0.0
    episodes: list[tuple[float, int]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    means: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, losses: Losses, norm: float, schedule: Schedule) -> None:
        """Count one update.

        Args:
            losses: This learner's sums.
            norm: Global norm of the update's gradient before clipping.
            schedule: What was applied.
        """
        self.updates += 1
        self.transitions += int(losses.count)
        terms = torch.stack([losses.policy, losses.value, losses.entropy]).double()
        self.sums += torch.cat([terms, losses.value_moments]).cpu()
        self.gradient_norm_sum += norm
        self.learning_rate, self.entropy_cost = schedule.learning_rate, schedule.entropy_cost

    def add_played(self, batch: Trajectory, lag: Tensor | None) -> None:
        """Count what was played and not seen before: episodes that ended, and its lag.

        Args:
            batch: As it was played; drawn trajectories hold no episodes.
            lag: [columns] int64; updates since each was played, of the fresh ones that were learned
                from. None for what was dropped.
        """
        if lag is not None:
            self.lags.update(lag.tolist())
        # An episode in which a reward was not finite has no return to tell.
        known = torch.isfinite(batch.episode_returns)
        rows, columns = (known & (batch.episode_lengths > 0)).nonzero(as_tuple=True)
        if rows.numel():
            returns = batch.episode_returns[rows, columns].tolist()
            self.episodes.extend(
                zip(returns, batch.episode_lengths[rows, columns].tolist(), strict=True)
            )

    def count(self, name: str, number: int = 1) -> None:
        """Count something that a line tells the total of."""
        if number:
            self.counts[name] += number

    def observe(self, name: str, value: float) -> None:
        """Note a value that a line tells the mean of."""
        total, number = self.means.get(name, (0.0, 0))
        self.means[name] = (total + value, number + 1)

    def to_record(self, rank: int, env_steps: int, seconds_in: dict[str, float]) -> dict[str, Any]:
        """A `window` record for the parent."""
        return {
            "kind": "window",
            "rank": rank,
            "env_steps": env_steps,
            "updates": self.updates,
            "transitions": self.transitions,
            "lags": dict(self.lags),
            "sums": self.sums.tolist(),
            "gradient_norm_sum": self.gradient_norm_sum,
            "learning_rate": self.learning_rate,
            "entropy_cost": self.entropy_cost,
            "episodes": self.episodes,
            "counts": dict(self.counts),
            "means": self.means,
            "seconds_in": seconds_in,
        }


class Account:
    """What one learner tells the parent of itself, and when.

    Attributes:
        window: What happened since the last report.
    """

    def __init__(self, rank: int, log_interval: int, stopwatch: Stopwatch) -> None:
        """Begin at env step 0.

        Args:
            rank: Of the learner; the first one also gives a pulse.
            log_interval: Env steps of the whole run between reports.
            stopwatch: Whose seconds are reported along.
        """
        self.window = Window()
        self._rank = rank
        self._interval = log_interval
        self._stopwatch = stopwatch
        self._due = log_interval
        self._clock: tuple[int, float] | None = None  # env steps and time of the last report
        self._refused = 0  # in a row
        self._why = ""
        self._pulse_due = time.monotonic() + _PULSE_SECONDS

    def go_on(self, env_steps: int) -> None:
        """The next report is due at the next multiple of the interval after `env_steps`."""
        self._due = (env_steps // self._interval + 1) * self._interval

    def report(self, context: RoleContext, env_steps: int, *, finished: bool) -> None:
        """Report the window if the run's env steps have crossed a multiple of the interval.

        The first learner also gives a pulse about once a second, whatever the windows' length.
        """
        # Only after the first update do steps and seconds go together: before it, roles start.
        self._clock = self._clock or (env_steps, time.monotonic())
        if env_steps >= self._due or finished:
            while self._due <= env_steps:
                self._due += self._interval
            self.close(context, env_steps)
        if self._rank == 0 and time.monotonic() >= self._pulse_due:
            self._pulse_due = time.monotonic() + _PULSE_SECONDS
            context.report({"kind": "pulse", "env_steps": env_steps})

    def refuse(self, error: FloatingPointError, *, told: bool = True) -> None:
        """Count an update that was not made because of numbers that are not finite.

        Args:
            error: Which numbers.
            told: Whether it is for this learner to tell; those that step together refuse the same.

        Raises:
            FloatingPointError: It is one too many in a row.
        """
        self._refused += 1
        if self._refused == _MAX_REFUSED:
            raise error
        if told:
            self.window.count("updates_refused")
            self._why = str(error)

    def accept(self) -> None:
        """An update was made."""
        self._refused = 0

    def close(self, context: RoleContext, env_steps: int) -> None:
        """Report the window as it is, unless nothing has happened in it."""
        if self.window.updates or self.window.counts:
            record = self.window.to_record(self._rank, env_steps, self._stopwatch.take())
            now = time.monotonic()
            since_steps, since = self._clock or (env_steps, now)
            context.report({**record, "pace": (env_steps - since_steps, now - since)})
            self._clock = (env_steps, now)
            if refused := self.window.counts["updates_refused"]:
                message = f"{refused} updates refused, the last because {self._why}"
                context.report({"kind": "event", "event": "refused", "message": message})
            self.window = Window()


class Progress:
    """Puts learners' windows together into `progress` records, in the parent."""

    def __init__(
        self,
        *,
        num_learners: int,
        in_step: bool,
        action_repeat: int,
        entropy_max: float | None,
    ) -> None:
        """Start the clock.

        Args:
            num_learners: Whose windows make up a line.
            in_step: Whether they make their updates together, so that a line is one window of
                each. Otherwise a line is all that has come since the last one, once there is
                something of everyone.
            action_repeat: Frames per env step.
            entropy_max: ln n of a discrete policy; None where entropy has no bound, or is 0.
        """
        self._in_step = in_step
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
        if self._in_step:
            return self._line([waiting.popleft() for waiting in self._waiting])
        return self.flush()

    def flush(self) -> dict[str, Any] | None:
        """A line of all windows that still wait; None without any."""
        windows = [window for waiting in self._waiting for window in waiting]
        for waiting in self._waiting:
            waiting.clear()
        return self._line(windows) if windows else None

    def _line(self, windows: list[dict[str, Any]]) -> dict[str, Any]:
        for window in windows:
            for episode_return, length in window["episodes"]:
                self._recent.add(episode_return, length)
            self.add_seconds(window["seconds_in"])
        newest = max(windows, key=lambda window: window["env_steps"])
        # Where all gradients of a window were dropped, nothing was applied.
        applied = max(windows, key=lambda window: (window["updates"] > 0, window["env_steps"]))
        updates = newest["updates"] if self._in_step else sum(w["updates"] for w in windows)
        gradient_norms = sum(window["gradient_norm_sum"] for window in windows)
        self._updates += updates
        learned = sum(window["transitions"] for window in windows)
        transitions = max(1, learned)
        lags = sum((Counter(window["lags"]) for window in windows), Counter())
        sums = torch.tensor([window["sums"] for window in windows], dtype=torch.float64).sum(0)
        policy, value, entropy = (sums[:3] / transitions).tolist()
        now, env_steps = time.monotonic(), newest["env_steps"]
        steps, seconds = newest["pace"]
        if not steps:  # a window of one update, the first
            steps, seconds = env_steps - self._last_steps, now - self._last_time
        line = {
            "kind": "progress",
            "env_steps": env_steps,
            "frames": env_steps * self._action_repeat,
            "updates": self._updates,
            "episodes": self._recent.episodes,
            "wall_seconds": now - self._started,
            "env_steps_per_second": steps / max(seconds, 1e-9),
            "episode_return_mean": self._recent.return_mean,
            "episode_length_mean": self._recent.length_mean,
            "policy_lag_mean": sum(lag * n for lag, n in lags.items()) / max(1, lags.total()),
            "policy_lag_max": max(lags, default=0),
            "policy_lag_histogram": {str(lag): lags[lag] for lag in sorted(lags)},
            "policy_loss": policy,
            "value_loss": value,
            "entropy": entropy,
            "explained_variance": explained_variance(torch.tensor(transitions), sums[3:]),
            "gradient_norm": gradient_norms / max(1, sum(w["updates"] for w in windows)),
            "learning_rate": applied["learning_rate"],
            "entropy_cost": applied["entropy_cost"],
            **_counted(windows),
            "seconds_in": self._seconds_in,
        }
        if not learned:  # all was dropped or refused: there is nothing to tell of learning
            line |= dict.fromkeys(_OF_LEARNING)
        elif self._entropy_max:
            line["entropy_normalised"] = entropy / self._entropy_max
        self._seconds_in = dict.fromkeys(STAGES, 0.0)
        self._last_time, self._last_steps = now, env_steps
        return line

    def state_dict(self) -> dict[str, Any]:
        """What lines of metrics go on from, as plain values."""
        return {
            "recent": [list(episode) for episode in self._recent.recent],
            "episodes": self._recent.episodes,
            "updates": self._updates,
            "wall_seconds": time.monotonic() - self._started,
        }

    def load_state_dict(self, state: Mapping[str, Any], env_steps: int) -> None:
        """Go on where `state_dict` was taken, after so many env steps."""
        self._recent.restore([(r, n) for r, n in state["recent"]], state["episodes"])
        self._updates = state["updates"]
        self._last_time = time.monotonic()
        self._started = self._last_time - state["wall_seconds"]
        self._last_steps = env_steps

    @property
    def recent_return(self) -> float | None:
        """Mean return of the last 100 finished episodes; None before there are so many."""
        return self._recent.return_mean if self._recent.full else None


class EntropyWatch:
    """Tells once when a policy has become almost deterministic."""

    def __init__(self) -> None:
        """Nothing told yet."""
        self._told = False

    def observe(self, record: Mapping[str, Any]) -> str | None:
        """A warning with the likely levers, for the first `progress` record that calls for it.

        A record without `entropy_normalised` (a single action, or no upper bound) never does.
        """
        normalised = record.get("entropy_normalised")
        if self._told or normalised is None or not normalised < _LOW_ENTROPY:
            return None
        self._told = True
        return (
            f"warning: the policy's entropy is {100 * normalised:.2g} % of its maximum at "
            f"{record['env_steps']:,} env steps: it almost always takes the same actions and "
            "explores no more. If the return does not rise, the likely levers are a larger "
            "--entropy-cost, a smaller --learning-rate, and --reward-transform clip or smaller "
            "rewards"
        )


def _counted(windows: list[dict[str, Any]]) -> dict[str, float]:
    """Totals and means of what only some algorithms count."""
    found: dict[str, float] = dict(sum((Counter(w["counts"]) for w in windows), Counter()))
    for name in sorted({name for window in windows for name in window["means"]}):
        pairs = [window["means"][name] for window in windows if name in window["means"]]
        found[name] = sum(total for total, _ in pairs) / sum(number for _, number in pairs)
    return found
