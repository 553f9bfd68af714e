"""A run from settings to result: folder, runtime, roles, records, checkpoint.

What is here: everything around the roles that is the same for every algorithm. What is not here:
what the roles do (`algorithms`), where they run (`runtimes`), how a terminal shows it (`console`).
"""

from __future__ import annotations

import importlib.util
import math
import multiprocessing.process
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from gymnasium.spaces import Discrete

from repertory import checkpoints, environments, models
from repertory.algorithms import ALGORITHMS, Algorithm
from repertory.config import (
    ConfigError,
    RunConfig,
    from_dict,
    from_yaml,
    to_dict,
    to_yaml,
    validate,
)
from repertory.environments.base import EnvironmentSpec
from repertory.evaluator import Evaluator
from repertory.metrics import Record, RunFolder, Sink, start_record
from repertory.progress import Progress
from repertory.runtimes.base import RoleFailed, Runtime
from repertory.runtimes.inline import InlineRuntime
from repertory.runtimes.processes import ProcessRuntime

EndReason = Literal[
    "total_steps", "stop_at_return", "max_minutes", "callback", "interrupted", "terminated"
]
Callback = Callable[[Record], bool | None]

_SIGNALS: Mapping[int, EndReason] = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
}


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        run_dir: Its folder.
        checkpoint: The last checkpoint in it.
        reason: Why the run ended.
        env_steps: Env steps learned from.
        episode_return_mean: Mean raw return of the last 100 finished episodes; None without any.
    """

    run_dir: Path
    checkpoint: Path
    reason: EndReason
    env_steps: int
    episode_return_mean: float | None


def train(config: RunConfig, *, on_record: Callback | None = None) -> Result:
    """Train an agent and leave a run folder behind.

    Args:
        config: Settings of one of the algorithms; its type says which.
        on_record: Called with every record (`event`, `progress`, `end`, and about once a second a
            `pulse` with the env steps so far); returning False ends the run after the update in
            progress.

    Returns:
        Where the run lies and how it ended.

    Raises:
        ConfigError: A setting is out of its range, or the run folder cannot be made.
        EnvironmentRefused: The environment does not exist or cannot be used.
        RoleFailed: A role raised, was killed or hung; no role is left.
    """
    _refuse_a_script_without_guard()
    name, _ = _algorithm_of(config)
    config = from_dict(type(config), vars(config))
    validate(config)
    spec = environments.describe(config.environment)
    _refuse_what_roles_could_not_use(config, spec)
    return _supervised(config, name, spec, RunFolder.create(config, name, spec), on_record)


def resume(
    run_dir: Path | str,
    *,
    on_record: Callback | None = None,
    **changes: Any,
) -> Result:
    """Go on with a run, in its folder, from its newest checkpoint that can be read.

    Parameters, optimiser state, env steps, updates, schedules, curves, the best and the seconds go
    on; games begin anew, with other seeds than those the run began with. Lines of metrics beyond
    the checkpoint are set aside in a file of their own.

    Args:
        run_dir: The run's folder.
        on_record: As in `train`.
        changes: Settings that are to be others from now on, by name. What a model or a curve is
            made of cannot change; an environment that is a callable has to be given again.

    Raises:
        ConfigError: A setting may not change or does not exist, or nothing is left to do.
        CheckpointError: There is no checkpoint that can be read.
        EnvironmentRefused: The environment cannot be used any more.
        RoleFailed: As in `train`.
    """
    _refuse_a_script_without_guard()
    folder = RunFolder(Path(run_dir))
    checkpoint, state, damaged = checkpoints.newest_readable(folder.path)
    if state["algorithm"] not in ALGORITHMS:
        raise ConfigError(f"{checkpoint} is of an unknown algorithm, {state['algorithm']!r}")
    before = from_yaml(ALGORITHMS[state["algorithm"]].config, state["config"])
    wanted = from_dict(type(before), {**vars(before), "run_dir": folder.path, **changes})
    changed = _changes(replace(before, run_dir=folder.path), wanted)
    config = replace(wanted, resume_from=checkpoint)
    validate(config)
    if state["env_steps"] >= config.total_steps:
        raise ConfigError(
            f"the run has learned from {state['env_steps']:,} of {config.total_steps:,} env steps "
            "already; total_steps says how far to go on"
        )
    spec = environments.describe(config.environment)
    if checkpoints.spec_text(spec) != state["spec"]:
        raise ConfigError(
            f"{checkpoint} was made for {state['spec']}; {spec.name} now has "
            f"{checkpoints.spec_text(spec)}"
        )
    _refuse_what_roles_could_not_use(config, spec)
    event = {
        "kind": "event",
        "event": "resume",
        "checkpoint": str(checkpoint),
        "from_env_steps": state["env_steps"],
        "lines_set_aside": folder.set_aside_lines_after(state["env_steps"]),
        "changes": changed,
        "message": "; ".join([f"going on after {state['env_steps']:,} env steps", *damaged]),
    }
    return _supervised(
        config, state["algorithm"], spec, folder, on_record, event=event, progress=state["progress"]
    )


def _supervised(
    config: RunConfig,
    name: str,
    spec: EnvironmentSpec,
    folder: RunFolder,
    on_record: Callback | None,
    *,
    event: Record | None = None,
    progress: Mapping[str, Any] | None = None,
) -> Result:
    """Start the roles, and watch over them to the end."""
    runtime = _make_runtime(config)
    try:
        run = _Run(config, name, spec, folder, runtime, on_record)
        if event is not None:
            run.go_on(event, progress or {})
        with _signals(run):
            ALGORITHMS[name].train(config, spec, runtime)
            return run.supervise()
    finally:
        runtime.close()


class _Run:
    """The parent's part of a run: what it does with what the roles report."""

    def __init__(
        self,
        config: RunConfig,
        algorithm: str,
        spec: EnvironmentSpec,
        folder: RunFolder,
        runtime: Runtime,
        callback: Callback | None,
    ) -> None:
        self._config = config
        self._algorithm = algorithm
        self._spec = spec
        self._folder = folder
        self._runtime = runtime
        self._callback = callback
        self._going_on: Record | None = None
        self._sinks: list[Sink] = []
        self._progress = Progress(
            num_learners=config.num_reporters,
            in_step=config.in_step,
            action_repeat=spec.action_repeat,
            entropy_max=_largest_entropy(spec),
        )
        self._reason: EndReason = "total_steps"
        self._last: Record = {"env_steps": 0, "episode_return_mean": None}
        self._best = -math.inf
        self._evaluator = Evaluator(config)
        self._due = {"evaluation": math.inf, "checkpoint": math.inf}
        for name in self._due:
            self._due_after(name, 0)
        self._in_a_hurry = False
        now = time.monotonic()
        self._deadline = now + 60 * config.max_minutes if config.max_minutes else math.inf
        self._next_checkpoint = now + 60 * config.checkpoint_minutes

    def go_on(self, event: Record, progress: Mapping[str, Any]) -> None:
        """Continue the curves of a run that was there before.

        Args:
            event: What the run's folder is told of it.
            progress: As the checkpoint holds it.
        """
        self._going_on = event
        if progress:
            self._progress.load_state_dict(progress["lines"], event["from_env_steps"])
            self._best = progress["best"]
        self._last["env_steps"] = event["from_env_steps"]
        self._last["episode_return_mean"] = self._progress.recent_return
        for name in ("evaluation", "checkpoint"):
            self._due_after(name, event["from_env_steps"])

    def stop(self, reason: EndReason) -> None:
        """End the run after the update in progress; the first reason counts."""
        if self._reason == "total_steps":
            self._reason = reason
        self._in_a_hurry |= reason in _SIGNALS.values()
        self._runtime.stop()

    def supervise(self) -> Result:
        """Watch until the roles have ended, then save."""
        try:
            going_on = self._going_on
            after_steps = None if going_on is None else going_on["from_env_steps"]
            self._sinks = self._folder.sinks(after_steps)
            self._tell(start_record(self._config, self._algorithm, self._spec, self._folder))
            if going_on is not None:
                self._tell(going_on)
            results = self._runtime.supervise(self._on_record)
            self._take_line(self._progress.flush())
            state = _newest_state(results)
            assert state is not None, "a role that learns returns its state"
            checkpoint = self._save(state)
            self._evaluate_the_last(checkpoint)
            self._tell(
                {
                    "kind": "end",
                    "reason": self._reason,
                    "checkpoint": str(checkpoint),
                    **{k: v for k, v in self._last.items() if k not in ("kind", "seconds_in")},
                }
            )
            return Result(
                self._folder.path,
                checkpoint,
                self._reason,
                state["env_steps"],
                self._last["episode_return_mean"],
            )
        except RoleFailed as failure:
            state = _newest_state(failure.results)
            if state is not None:
                self._save(state)
            self._tell({"kind": "event", "event": "failure", "message": str(failure)})
            raise
        finally:
            self._evaluator.close()
            for sink in self._sinks:
                sink.close()

    def _on_record(self, role: str, record: Record) -> None:
        """Take a role's record: windows become lines, seconds are added up, states are saved."""
        match record["kind"]:
            case "seconds":
                self._progress.add_seconds(record["seconds_in"])
            case "pulse":
                self._call_back(record)
            case "event":
                self._tell(record)
            case "state":
                checkpoint = self._save(record["state"])
                env_steps = record["state"]["env_steps"]
                if env_steps >= self._due["checkpoint"]:
                    self._due_after("checkpoint", env_steps)
                if env_steps >= self._due["evaluation"] and not self._evaluator.busy:
                    self._due_after("evaluation", env_steps)
                    self._evaluator.submit(checkpoint)
            case "window":
                self._take_line(self._progress.add_window(record))
                due = math.inf if self._evaluator.busy else self._due["evaluation"]
                if record["env_steps"] >= min(self._due["checkpoint"], due):
                    self._runtime.collect_state()
        self._look_at_the_clock()
        self._take_evaluations()

    def _due_after(self, name: str, env_steps: int) -> None:
        """Have the next one made at the next multiple of its interval, if it has one."""
        interval = getattr(self._config, f"{name}_steps")
        if interval is not None:
            self._due[name] = (env_steps // interval + 1) * interval

    def _evaluate_the_last(self, checkpoint: Path) -> None:
        """Evaluate where the run has ended by itself; somebody who interrupts does not wait."""
        if self._config.evaluation_steps is not None and not self._in_a_hurry:
            self._evaluator.submit(checkpoint)
        while self._evaluator.busy and not self._in_a_hurry:
            self._take_evaluations()
            time.sleep(0.05)

    def _take_evaluations(self) -> None:
        """Tell what the evaluator has found; the best of it is the run's best."""
        for record in self._evaluator.finished():
            self._tell(record)
            if record["kind"] == "eval" and record["episode_return_mean"] > self._best:
                self._best = record["episode_return_mean"]
                checkpoints.point(self._folder.checkpoints, "best", Path(record["checkpoint"]))

    def _take_line(self, line: Record | None) -> None:
        if line is not None:
            self._last = line
            self._tell(line)

    def _look_at_the_clock(self) -> None:
        """End the run, or have its state saved, where it is time."""
        goal, reached = self._config.stop_at_return, self._progress.recent_return
        if goal is not None and reached is not None and reached >= goal:
            self.stop("stop_at_return")
        now = time.monotonic()
        if now > self._deadline:
            self.stop("max_minutes")
        if now > self._next_checkpoint:
            self._next_checkpoint = now + 60 * self._config.checkpoint_minutes
            self._runtime.collect_state()

    def _tell(self, record: Record) -> None:
        for sink in self._sinks:
            sink.write(record)
        self._call_back(record)

    def _call_back(self, record: Record) -> None:
        if self._callback is not None and self._callback(record) is False:
            self.stop("callback")

    def _save(self, state: Mapping[str, Any]) -> Path:
        """Save a learner's state, as the best too if recent episodes have never been better.

        Where an evaluator runs, its games decide what is best.
        """
        path = checkpoints.save_step(
            self._folder.checkpoints,
            checkpoints.make_state(
                model=state["model"],
                optimizer=state["optimizer"],
                env_steps=state["env_steps"],
                updates=state["updates"],
                algorithm=self._algorithm,
                config=to_yaml(replace(self._config, resume_from=None)),
                spec=self._spec,
                progress={"lines": self._progress.state_dict(), "best": self._best},
            ),
        )
        reached = self._progress.recent_return
        evaluated = self._config.evaluation_steps is not None
        if not evaluated and reached is not None and reached > self._best:
            self._best = reached
            checkpoints.point(self._folder.checkpoints, "best", path)
        checkpoints.prune(
            self._folder.checkpoints, self._config.keep_checkpoints, self._evaluator.waiting
        )
        return path


def _algorithm_of(config: RunConfig) -> tuple[str, Algorithm]:
    for name, algorithm in ALGORITHMS.items():
        if type(config) is algorithm.config:
            return name, algorithm
    known = ", ".join(algorithm.config.__name__ for algorithm in ALGORITHMS.values())
    raise ConfigError(f"{type(config).__name__} is no algorithm's settings (known: {known})")


_NEVER_CHANGES = (
    *("env", "env_kwargs", "protocol", "image_layout", "max_episode_steps", "seed", "network"),
    *("hidden_sizes", "core", "core_size", "standardize_images", "optimizer", "run_dir"),
    *("init_from", "resume_from"),
)
"""What a run's model and curve are made of; another value would be another run."""


def _changes(before: RunConfig, after: RunConfig) -> dict[str, Any]:
    """The settings that differ, with their new values.

    Raises:
        ConfigError: One of them cannot change within a run.
    """
    old, new = to_dict(before), to_dict(after)
    changed = {name: value for name, value in new.items() if value != old[name]}
    for name in changed.keys() & _NEVER_CHANGES:
        raise ConfigError(
            f"{name} cannot change from {old[name]} to {new[name]} in a run that goes on; start a "
            "new one (init_from takes over the parameters)"
        )
    return changed


def _refuse_what_roles_could_not_use(config: RunConfig, spec: EnvironmentSpec) -> None:
    """Find out here, in one line, what would fail in a role, with a traceback."""
    if config.runtime == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            'runtime=ray needs Ray, which is not installed: pip install "repertory[ray]"'
        )
    # On a cluster the GPU is another machine's.
    if config.device == "cuda" and config.runtime != "ray" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but this machine has no GPU that PyTorch can use")
    try:
        models.create_on_cpu(config, spec)
    except (ValueError, checkpoints.CheckpointError) as error:
        raise ConfigError(str(error)) from error
    if config.runtime != "inline" and callable(config.env):
        try:
            pickle.dumps(config.env)
        except Exception as error:
            raise ConfigError(
                "env cannot travel to another process: define it at the top level of a module, "
                'or use runtime="inline"'
            ) from error


def _newest_state(results: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Of the states that roles returned, the one that has seen the most updates."""
    states = [result for result in results.values() if result is not None]
    return max(states, key=lambda state: int(state["updates"]), default=None)


def _make_runtime(config: RunConfig) -> Runtime:
    if config.runtime == "inline":
        return InlineRuntime()
    if config.runtime == "ray":
        # Imported late: Ray is optional, and takes its time.
        from repertory.runtimes.ray_cluster.connection import source_of
        from repertory.runtimes.ray_cluster.runtime import RayRuntime

        name = environments.describe(config.environment).name
        return RayRuntime(
            config.address,
            config.role_timeout_seconds,
            max_restarts=config.max_restarts,
            actor_cpus=config.actor_cpus,
            learner_gpus=config.learner_gpus,
            modules=source_of(name.rpartition(":")[0]),
        )
    return ProcessRuntime(config.role_timeout_seconds, max_restarts=config.max_restarts)


def _largest_entropy(spec: EnvironmentSpec) -> float | None:
    """Of a policy over the environment's actions, in nats; None where there is no bound."""
    if isinstance(spec.action_space, Discrete):
        return math.log(int(spec.action_space.n))
    return None


@contextmanager
def _signals(run: _Run) -> Iterator[None]:
    """While the block runs, SIGINT and SIGTERM end the run in good order, however often they come.

    Only a main thread can have handlers; elsewhere signals stay whoever's they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        run.stop(_SIGNALS[number])

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _refuse_a_script_without_guard() -> None:
    """A spawned role imports the script that started it; unguarded, it would train all over."""
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise SystemExit(
            "repertory: this script trains when it is imported, as each new process does; put the "
            'call under `if __name__ == "__main__":`, or use runtime="inline"'
        )
