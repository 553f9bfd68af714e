"""What a run leaves behind: records, where they go, and the folder that holds it all.

A record is a plain mapping with a `kind`: `progress` (how far, how well, how fast), `eval` (whole
games under fixed rules), `event` (something happened), `end` (the last one). `metrics.jsonl` holds
all of them and is the truth; TensorBoard shows the numbers among them.

What is here: sinks for records, the record that opens a run, the window of recent episodes and the
run folder. What is not here: the counting behind a `progress` record, and the terminal (`console`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import numpy as np

from repertory.config import ConfigError, RunConfig, num_cores, to_yaml
from repertory.environments.base import EnvironmentSpec

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Record = dict[str, Any]
"""One thing to tell about a run: plain values, with a `kind`."""

RECENT_EPISODES = 100
"""Finished episodes behind `episode_return_mean` and `episode_length_mean`."""

_TENSORBOARD_TAGS: Mapping[str, str] = MappingProxyType(
    {
        # CleanRL's names, which dashboards of the field are made for.
        "episode_return_mean": "charts/episodic_return",
        "episode_length_mean": "charts/episodic_length",
        "env_steps_per_second": "charts/SPS",
        "learning_rate": "charts/learning_rate",
        "policy_loss": "losses/policy_loss",
        "value_loss": "losses/value_loss",
        "entropy": "losses/entropy",
        "explained_variance": "losses/explained_variance",
        # What they have no name for.
        "entropy_normalised": "losses/entropy_normalised",
        "entropy_cost": "charts/entropy_cost",
        "gradient_norm": "losses/gradient_norm",
        "policy_lag_mean": "lag/mean",
        "policy_lag_max": "lag/max",
        "frames": "charts/frames",
        "episodes": "charts/episodes",
        "updates": "charts/updates",
        "wall_seconds": "time/wall_seconds",
        "rho_clipped_share": "importance/rho_clipped_share",
        "trace_clipped_share": "importance/trace_clipped_share",
        "effective_sample_share": "importance/effective_sample_share",
        "replay_age": "replay/age",
        "replay_ratio": "replay/ratio",
        "trajectories_dropped": "lag/trajectories_dropped",
        "gradients_dropped": "lag/gradients_dropped",
        "gradients_recomputed": "lag/gradients_recomputed",
        "parameter_distance": "lag/parameter_distance",
        "updates_refused": "losses/updates_refused",
    }
)
_TENSORBOARD_GROUPS: Mapping[str, str] = MappingProxyType({"seconds_in": "time"})
"""Maps inside a record, by the group that their entries are shown under."""


class Sink(Protocol):
    """Somewhere records go."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """Write what is still held back. Harmless when called twice."""
        ...


class JsonlSink:
    """A file with one JSON object a line, each written out at once, so that a kill loses none."""

    def __init__(self, path: Path) -> None:
        """Open the file, to write behind what it holds."""
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line. NaN and infinities, which JSON does not know, become null."""
        self._file.write(json.dumps(_jsonable(record), allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardSink:
    """Scalars over env steps, under the names that users of other libraries know.

    TensorBoard is imported with the first record, because that takes a second; where it is not
    installed, one warning says so and the run goes on.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        """Remember where event files go; nothing is written yet.

        Args:
            folder: Of the event files.
            purge_step: First step of which older event files may hold points to forget.
        """
        self._folder = folder
        self._purge_step = purge_step
        self._writer: SummaryWriter | None = None
        self._missing = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Show the numbers of a `progress` or `eval` record; others have none to show."""
        if record["kind"] not in ("progress", "eval") or not self._open():
            return
        assert self._writer is not None
        for tag, value in _scalars(record):
            self._writer.add_scalar(tag, value, record["env_steps"])

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> bool:
        """Whether there is a writer, made on first use."""
        if self._writer is None and not self._missing:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                self._missing = True
                warnings.warn(
                    "TensorBoard is not installed, so that there is no tb/ in the run folder; "
                    "metrics.jsonl has every number",
                    stacklevel=3,
                )
                return False
            # Seconds between flushes: a run that is watched should not look two minutes old.
            self._writer = SummaryWriter(
                str(self._folder), purge_step=self._purge_step, flush_secs=10
            )
        return not self._missing


class EpisodeWindow:
    """The last episodes that finished, and how many there were in all."""

    def __init__(self, size: int = RECENT_EPISODES) -> None:
        """Start without episodes."""
        self._recent: deque[tuple[float, int]] = deque(maxlen=size)
        self.episodes = 0

    def add(self, episode_return: float, length: int) -> None:
        """Count a whole episode: its raw, undiscounted return and its length in env steps."""
        self._recent.append((episode_return, length))
        self.episodes += 1

    @property
    def recent(self) -> list[tuple[float, int]]:
        """Return and length of the episodes in the window, oldest first."""
        return list(self._recent)

    def restore(self, recent: Iterable[tuple[float, int]], episodes: int) -> None:
        """Go on with these episodes in the window, and so many in all."""
        self._recent.clear()
        self._recent.extend(recent)
        self.episodes = episodes

    @property
    def full(self) -> bool:
        """Whether the means are over as many episodes as the window holds."""
        return len(self._recent) == self._recent.maxlen

    @property
    def return_mean(self) -> float | None:
        """Mean return of the episodes in the window; None before the first."""
        return self._mean(0)

    @property
    def length_mean(self) -> float | None:
        """Mean length in env steps of the episodes in the window; None before the first."""
        return self._mean(1)

    def _mean(self, index: int) -> float | None:
        if not self._recent:
            return None
        return math.fsum(episode[index] for episode in self._recent) / len(self._recent)


def start_record(
    config: RunConfig, algorithm: str, spec: EnvironmentSpec, folder: RunFolder
) -> Record:
    """The event that opens a run, with what a reader needs to understand the rest."""
    return {
        "kind": "event",
        "event": "start",
        "algorithm": algorithm,
        "env": spec.name,
        "protocol": spec.protocol,
        "network": config.network,
        "seed": config.seed,
        "total_steps": config.total_steps,
        "action_repeat": spec.action_repeat,
        "repeat_action_probability": spec.repeat_action_probability,
        "run_dir": str(folder.path),
    }


@dataclass(frozen=True)
class RunFolder:
    """Where everything of one run lies.

    Attributes:
        path: The folder itself.
    """

    path: Path

    @classmethod
    def create(
        cls,
        config: RunConfig,
        algorithm: str,
        spec: EnvironmentSpec,
        root: Path | str = "runs",
    ) -> RunFolder:
        """Make the folder and write down what is run, by which program and on which machine.

        Args:
            config: Settings of the run; its `run_dir`, if any, is the folder.
            algorithm: Name of the algorithm.
            spec: Of the environment.
            root: Where a folder is made that `run_dir` does not name, called
                `{env}__{algorithm}__{seed}__{time}`.

        Raises:
            ConfigError: The folder already holds something, or cannot be made.
        """
        try:
            if config.run_dir is not None:
                path = _claim(Path(config.run_dir))
            else:
                name = f"{_file_name(spec.name)}__{algorithm}__{config.seed}"
                path = _claim_new(Path(root), f"{name}__{time.strftime('%Y%m%d-%H%M%S')}")
            folder = cls(path)
            folder.checkpoints.mkdir()
            folder.evaluations.mkdir()
        except OSError as error:
            raise ConfigError(
                f"cannot make the run folder {config.run_dir or root}: {error.strerror}"
            ) from error
        folder.config_file.write_text(to_yaml(config, algorithm), encoding="utf-8")
        (path / "command.txt").write_text(command() + "\n", encoding="utf-8")
        meta = {
            "algorithm": algorithm,
            "environment": {
                "name": spec.name,
                "protocol": spec.protocol,
                "observation_space": str(spec.observation_space),
                "action_space": str(spec.action_space),
                "action_repeat": spec.action_repeat,
                "repeat_action_probability": spec.repeat_action_probability,
            },
            **origin(),
        }
        text = json.dumps(_jsonable(meta), indent=2, ensure_ascii=False)
        (path / "meta.json").write_text(text + "\n", encoding="utf-8")
        return folder

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Have the folder for this process alone, as long as the block or the process lives.

        Raises:
            ConfigError: Another process trains in it.
        """
        with (self.path / "lock").open("a+", encoding="utf-8") as file:
            try:
                lock(file)
            except BlockingIOError as error:
                file.seek(0)
                who = file.read().strip() or "unknown"
                raise ConfigError(f"the run {self.path} still goes on (pid {who})") from error
            with contextlib.suppress(OSError):  # a full disk, say
                file.truncate(0)
                file.write(f"{os.getpid()}\n")
                file.flush()
            yield

    @property
    def config_file(self) -> Path:
        """The settings, as `--config` takes them."""
        return self.path / "config.yaml"

    def change_config(self, config: RunConfig, algorithm: str, env_steps: int) -> None:
        """Write down settings that hold from now on; those until here stay in another file."""
        text, kept = to_yaml(config, algorithm), self.path / f"config_until_{env_steps}.yaml"
        if self.config_file.exists():
            if self.config_file.read_text(encoding="utf-8") == text:
                return
            if not kept.exists():
                self.config_file.rename(kept)
        self.config_file.write_text(text, encoding="utf-8")

    @property
    def metrics_file(self) -> Path:
        """Every record."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.path / "tb"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints; see `checkpoints`."""
        return self.path / "checkpoints"

    @property
    def evaluations(self) -> Path:
        """Reports of `repertory eval`."""
        return self.path / "eval"

    def sinks(self, after_steps: int | None = None) -> list[Sink]:
        """Open the sinks that every run has.

        Args:
            after_steps: Env steps that a run goes on from; None for one that begins. TensorBoard
                forgets points beyond.
        """
        purge_step = None if after_steps is None else after_steps + 1
        return [JsonlSink(self.metrics_file), TensorBoardSink(self.tensorboard, purge_step)]

    def lines(self, kind: str) -> list[Record]:
        """The whole lines of metrics of one kind."""
        found = []
        for line in self._text_lines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                found += [record] if record["kind"] == kind else []
        return found

    def _text_lines(self) -> list[str]:
        if not self.metrics_file.exists():
            return []
        return self.metrics_file.read_text(encoding="utf-8").splitlines(keepends=True)

    def set_aside_lines_after(self, env_steps: int) -> int:
        """Move lines of metrics that lie beyond a checkpoint into a file of their own.

        A run that goes on from the checkpoint makes these env steps again, and a curve must not
        double back. Nothing is deleted.

        Returns:
            How many lines were moved.
        """
        lines = self._text_lines()
        kept: list[str] = []
        beyond: list[str] = []
        for line in lines:
            (beyond if _steps_in(line) > env_steps else kept).append(line)
        if beyond:
            aside = self.path / f"metrics_after_{env_steps}.jsonl"
            with aside.open("a", encoding="utf-8") as file:
                file.writelines(beyond)
            temporary = self.metrics_file.with_suffix(".tmp")
            temporary.write_text("".join(kept), encoding="utf-8")
            os.replace(temporary, self.metrics_file)
        return len(beyond)


def lock(file: TextIO) -> None:
    """Lock a file for this process, until it is closed; where the system can.

    Raises:
        BlockingIOError: Another process has it.
    """
    try:
        import fcntl
    except ImportError:
        return  # Windows
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return  # a file system without locks


def command() -> str:
    """The command line that this program was started with."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def origin() -> dict[str, Any]:
    """When, by which program and on which machine a number came to be."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "git": git_state(),
        "machine": machine(),
    }


def versions() -> dict[str, str]:
    """Versions of what decides a run's numbers; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in ("repertory", "torch", "numpy", "gymnasium", "ale-py", "minatar", "ray"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _steps_in(line: str) -> int:
    """Env steps that a line of metrics tells of, 0 for none; more than any run's if it is cut."""
    try:
        record = json.loads(line)
    except ValueError:
        return sys.maxsize
    return int(record.get("env_steps", 0)) if record["kind"] in ("progress", "eval") else 0


def _scalars(record: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """Tag and value of every number that TensorBoard shows of a record."""
    evaluated = record["kind"] == "eval"
    for key, value in record.items():
        if key in _TENSORBOARD_GROUPS:
            for name, item in value.items():
                yield f"{_TENSORBOARD_GROUPS[key]}/{name}", item
        elif key in _TENSORBOARD_TAGS and value is not None:
            tag = _TENSORBOARD_TAGS[key]
            yield f"eval/{tag.rpartition('/')[2]}" if evaluated else tag, value


def _jsonable(value: Any) -> Any:
    """`value` with null for numbers that JSON cannot hold, and none of numpy's."""
    if isinstance(value, Mapping):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _file_name(name: str) -> str:
    """`ALE/Pong-v5` as a name that every file system takes: `ALE_Pong-v5`."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)


def _claim(path: Path) -> Path:
    """Make a folder that the user named, or take it if it is empty."""
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise ConfigError(f"the run folder {path} already holds files; name another with run_dir")
    return path


def _claim_new(root: Path, name: str) -> Path:
    """Make a folder that nobody else has, numbered if several runs start in one second."""
    root.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def git_state() -> dict[str, Any] | None:
    """Commit of the folder this was started in and whether files differ; None outside git."""

    def git(*words: str) -> str:
        result = subprocess.run(
            ["git", *words], capture_output=True, text=True, timeout=5, check=True
        )
        return result.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def machine() -> dict[str, Any]:
    """The hardware, without names of machine or user, so that a folder can be shown to others."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "num_cores": num_cores(),
        "gpus": _gpus(),
    }


def _processor() -> str:
    """Name of the processor, as Linux tells it, else as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _gpus() -> list[str]:
    """Names of the GPUs, from NVIDIA's own tool: asking torch would take memory on each of them."""
    try:
        result = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return result.stdout.split("\n")[:-1]
