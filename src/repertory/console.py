"""What a terminal shows of a run: a live view where there is one, plain lines elsewhere.

Both are fed the records of `metrics`, in order, and keep nothing else. What is here: the two views
and the last lines. What is not here: any counting.
"""

from __future__ import annotations

import itertools
import math
import os
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from repertory.metrics import RECENT_EPISODES

_PLAIN_SECONDS = 5.0
_CURVE_WIDTH = 48
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-=*#"


class Console(ABC):
    """Shows one run; a context manager, so that the terminal is left as it was found."""

    def __init__(self, preset: str | None) -> None:
        """Remember the preset's name for the header."""
        self._preset = preset
        self._start: Mapping[str, Any] = {}
        self._silent = False

    def on_record(self, record: Mapping[str, Any]) -> None:
        """Show what the record is worth. A run's first record is its `start` event.

        Where nobody reads any more (`repertory train ... | head`), the run goes on in silence.
        """
        if self._silent:
            return
        try:
            self._show(record)
        except OSError:
            self._silent = True

    def _show(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "progress":
            self._progress(record)
        elif record["kind"] == "pulse":
            self._pulse(record["env_steps"])
        elif record["kind"] == "eval":
            self._say(evaluation_line(record))
        elif record["kind"] == "end":
            self._say(closing_lines(record, self._start))
        elif record.get("event") == "start":
            self._start = dict(record)
            self._say(header(record, self._preset))
        elif "message" in record:
            self._say(str(record["message"]))

    @abstractmethod
    def __enter__(self) -> Self:
        """Take the terminal."""

    @abstractmethod
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the terminal back."""

    @abstractmethod
    def _say(self, text: str) -> None:
        """Write lines that stay."""

    @abstractmethod
    def _progress(self, record: Mapping[str, Any]) -> None:
        """Show how far the run is."""

    @abstractmethod
    def _pulse(self, env_steps: int) -> None:
        """Show that the run goes on, where `progress` records are far apart."""


def make_console(stream: TextIO, preset: str | None = None) -> Console:
    """The live view if `stream` is a terminal that can move its cursor, plain lines if not.

    Args:
        stream: Where to write.
        preset: Name of the preset that lies under the settings, for the header.
    """
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        return LiveConsole(RichConsole(file=stream), preset)
    return PlainConsole(stream, preset)


class PlainConsole(Console):
    """One line for a `progress` record, at most one every five seconds."""

    def __init__(
        self,
        stream: TextIO,
        preset: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Write to `stream`; `clock` tells seconds."""
        super().__init__(preset)
        self._stream = stream
        self._clock = clock
        self._last_line = -math.inf
        self._untold: Mapping[str, Any] | None = None

    def __enter__(self) -> Self:
        """Nothing to take."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing to give back."""

    def _progress(self, record: Mapping[str, Any]) -> None:
        self._untold = record
        self._tell(record["env_steps"])

    def _pulse(self, env_steps: int) -> None:
        self._tell(env_steps)

    def _tell(self, env_steps: int) -> None:
        """Where a line is due: the newest record that has not been shown, else the bare count."""
        now = self._clock()
        if now - self._last_line < _PLAIN_SECONDS:
            return
        self._last_line = now
        if self._untold is None:
            self._say(f"{env_steps:,} of {self._start['total_steps']:,} env steps")
        else:
            self._say(progress_line(self._untold, self._start))
            self._untold = None

    def _say(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class LiveConsole(Console):
    """A table that is redrawn in place with every `progress` record."""

    def __init__(self, console: RichConsole, preset: str | None = None) -> None:
        """Draw on `console`."""
        super().__init__(preset)
        self._console = console
        self._returns: list[float] = []
        self._last: Mapping[str, Any] | None = None
        # Redrawn here and by no thread: nothing changes between two records.
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> Self:
        """Take over the end of the terminal."""
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the terminal back, with the last table left standing."""
        self._live.stop()

    def _progress(self, record: Mapping[str, Any]) -> None:
        if record["episode_return_mean"] is not None:
            self._returns.append(record["episode_return_mean"])
        self._last = record
        self._live.update(self._table(record), refresh=True)

    def _pulse(self, env_steps: int) -> None:
        if self._last is None:
            shown: Group | Text = Text(f"{env_steps:,} env steps; no whole line of metrics yet")
        else:
            shown = self._table({**self._last, "env_steps": env_steps})
        self._live.update(shown, refresh=True)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _table(self, record: Mapping[str, Any]) -> Group:
        utf8 = self._console.encoding.startswith("utf")
        curve = sparkline(self._returns, _CURVE_WIDTH, _BLOCKS if utf8 else _ASCII_BLOCKS)
        total = self._start["total_steps"]
        progress = Table.grid(padding=(0, 2))
        bar = ProgressBar(
            total=total, completed=min(record["env_steps"], total), width=_CURVE_WIDTH
        )
        progress.add_row(bar, Text(f"{_percent(record, self._start)}, {_time_left(record, total)}"))

        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        table.add_column()
        for name, value in (
            ("return", f"{_number(record['episode_return_mean'])}  {curve}"),
            ("episodes", f"{record['episodes']:,}"),
            ("env steps", f"{record['env_steps']:,} of {total:,}{_frames(record, self._start)}"),
            ("speed", f"{record['env_steps_per_second']:,.0f} env steps/s"),
            ("policy lag", _lag(record)),
            ("losses", _losses(record)),
            ("entropy", _entropy(record)),
            ("seconds", _stages(record)),
        ):
            table.add_row(name, Text(value))
        return Group(table, progress)


def header(start: Mapping[str, Any], preset: str | None) -> str:
    """What is trained, by which rules and where it goes.

    Args:
        start: The record of `metrics.start_record`.
        preset: Name of the preset, or `none`; None where nobody chose one, as in a resume.
    """
    rules = f"protocol {start['protocol']}"
    if start["action_repeat"] > 1:
        rules += f": {start['action_repeat']} frames a step, each sticky with probability "
        rules += f"{start['repeat_action_probability']:g}"
    chosen = "" if preset is None else f"preset {preset}, "
    return (
        f"{start['algorithm']} on {start['env']} ({rules}), "
        f"{chosen}network {start['network']}, seed {start['seed']}\n"
        f"run folder {start['run_dir']}"
    )


def progress_line(record: Mapping[str, Any], start: Mapping[str, Any]) -> str:
    """A `progress` record on one line."""
    return "  ".join(
        (
            f"{record['env_steps']:,} of {start['total_steps']:,} env steps"
            f"{_frames(record, start)}",
            _percent(record, start),
            f"return {_number(record['episode_return_mean'])}",
            f"{record['episodes']:,} episodes",
            f"{record['env_steps_per_second']:,.0f} env steps/s",
            f"lag {_lag(record)}",
            f"losses {_losses(record)}",
            f"entropy {_entropy(record)}",
        )
    )


def evaluation_line(record: Mapping[str, Any]) -> str:
    """An `eval` record on one line."""
    return (
        f"evaluation after {record['env_steps']:,} env steps: "
        f"mean return {_number(record['episode_return_mean'])} "
        f"({_number(record['episode_return_min'])} to {_number(record['episode_return_max'])}) "
        f"of {record['episodes']} whole episodes"
    )


def closing_lines(end: Mapping[str, Any], start: Mapping[str, Any]) -> str:
    """How a run ended, where it lies, and what to type next."""
    run_dir, episodes = start["run_dir"], end.get("episodes", 0)
    lines = [f"run folder: {run_dir}", f"to evaluate it: repertory eval {shlex.quote(run_dir)}"]
    if end["env_steps"] < start["total_steps"]:
        lines.append(f"to go on with it: repertory resume {shlex.quote(run_dir)}")
    if not episodes:
        ended = f"no episode was finished, after {end['env_steps']:,} env steps"
    else:
        ended = (
            f"mean return {_number(end['episode_return_mean'])} over the last "
            f"{min(episodes, RECENT_EPISODES)} of {episodes:,} episodes, after "
            f"{end['env_steps']:,} env steps{_frames(end, start)} "
            f"in {_duration(end['wall_seconds'])}"
        )
    return "\n".join([f"{ended} ({end['reason']})", *lines])


def sparkline(values: list[float], width: int, blocks: str = _BLOCKS) -> str:
    """A curve as one line of text: at most `width` means of equally many values each.

    Args:
        values: Finite numbers, oldest first.
        width: Largest number of characters.
        blocks: Characters from low to high.
    """
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if low == high:
        return blocks[0] * count
    top = len(blocks) - 1
    return "".join(blocks[round((mean - low) / (high - low) * top)] for mean in means)


def _number(value: float | None) -> str:
    """A return or a loss, with as many digits as are worth reading."""
    if value is None:
        return "-"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _frames(record: Mapping[str, Any], start: Mapping[str, Any]) -> str:
    """The emulator's frames, where a frame is not an env step."""
    return f" ({record['frames']:,} frames)" if start["action_repeat"] != 1 else ""


def _percent(record: Mapping[str, Any], start: Mapping[str, Any]) -> str:
    return f"{100 * record['env_steps'] / start['total_steps']:.0f} %"


def _time_left(record: Mapping[str, Any], total: int) -> str:
    """Time to the last step at the speed of the whole run so far."""
    steps = record["env_steps"]
    if not steps:
        return "time left unknown"
    return f"{_duration(record['wall_seconds'] * max(0, total - steps) / steps)} left"


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds, without leading zeros of the larger ones."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _lag(record: Mapping[str, Any]) -> str:
    mean, largest = record["policy_lag_mean"], record["policy_lag_max"]
    return f"{_number(mean)} mean, {_number(largest)} max"


def _losses(record: Mapping[str, Any]) -> str:
    return f"policy {_number(record['policy_loss'])}, value {_number(record['value_loss'])}"


def _entropy(record: Mapping[str, Any]) -> str:
    share = record.get("entropy_normalised")
    of_maximum = f" ({100 * share:.0f} % of maximum)" if share is not None else ""
    return f"{_number(record['entropy'])}{of_maximum}"


def _stages(record: Mapping[str, Any]) -> str:
    """Where time went since the last record, in per cent of what all roles spent."""
    seconds = record["seconds_in"]
    whole = sum(seconds.values())
    if not whole:
        return "-"
    return ", ".join(f"{stage} {100 * part / whole:.0f} %" for stage, part in seconds.items())
