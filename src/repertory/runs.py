"""A run: what the parent does with what roles report, from the start to the last checkpoint.

What is here: the run itself, its legs, its clock and its signals. What is not here: how
settings become a run, new or gone on with (`training`), what the roles do (`algorithms`), where
they run (`runtimes`), how a terminal shows it (`console`).
"""

from __future__ import annotations

import errno
import math
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from gymnasium.spaces import Discrete

from repertory import checkpoints, environments
from repertory.algorithms import ALGORITHMS
from repertory.config import RunConfig, to_yaml
from repertory.environments.base import EnvironmentSpec
from repertory.evaluator import Evaluator
from repertory.metrics import Record, RunFolder, Sink, start_record
from repertory.progress import EntropyWatch, Progress
from repertory.runtimes.base import RoleFailed, Runtime
from repertory.runtimes.inline import InlineRuntime
from repertory.runtimes.processes import ProcessRuntime
from repertory.step_names import step_path, steps_of

EndReason = Literal[
    "total_steps", "stop_at_return", "max_minutes", "callback", "interrupted", "terminated"
]
Callback = Callable[[Record], bool | None]

_BEST_SECONDS = 30.0  # at least, between states that are saved for being the best so far
_LAST_EVALUATION_SECONDS = 300.0  # for the games with the last checkpoint, all time being over
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


class Run:
    """The parent's part of a run: what it does with what the roles report."""

    def __init__(
        self,
        config: RunConfig,
        algorithm: str,
        spec: EnvironmentSpec,
        folder: RunFolder,
        callback: Callback | None,
    ) -> None:
        self._config = config
        self._algorithm = algorithm
        self._spec = spec
        self._folder = folder
        self._runtime: Runtime = _make_runtime(config)
        self._callback = callback
        self._going_on: Record | None = None
        self._sinks: list[Sink] = []
        self._failing: list[Sink] = []
        self._progress = Progress(
            num_learners=config.num_reporters,
            in_step=config.in_step,
            action_repeat=spec.action_repeat,
            entropy_max=_largest_entropy(spec),
        )
        self._reason: EndReason = "total_steps"
        self._last: Record = {"env_steps": 0, "episode_return_mean": None}
        self._entropy = EntropyWatch()
        self._best = -math.inf
        self._saving_seconds = 0.0
        self._scheduled: Path | None = config.resume_from if config.exact_resume else None
        self._evaluator = Evaluator(config, self._waits_no_more)
        self._due = {"evaluation": math.inf, "checkpoint": math.inf}
        for name in self._due:
            self._due_after(name, 0)
        self._in_a_hurry = False
        self._is_over = False  # what is still told cannot change the reason
        now = time.monotonic()
        self._deadline = now + 60 * config.max_minutes if config.max_minutes else math.inf
        self._next_checkpoint = now + 60 * config.checkpoint_minutes
        self._next_best = now + _BEST_SECONDS

    def go_on(self, event: Record, progress: Mapping[str, Any]) -> None:
        """Continue the curves of a run that was there before.

        Args:
            event: What the run's folder is told of it.
            progress: As the checkpoint holds it.
        """
        self._going_on = event
        if progress:
            lines = {**progress["lines"], "updates": event["from_updates"]}
            self._progress.load_state_dict(lines, event["from_env_steps"])
            # Whatever an evaluator found after the last checkpoint stands in the lines alone.
            found = [line["episode_return_mean"] for line in self._folder.lines("eval")]
            self._best = max([progress["best"], *(mean for mean in found if mean is not None)])
        self._last["env_steps"] = event["from_env_steps"]
        self._last["episode_return_mean"] = self._progress.recent_return
        for name in ("evaluation", "checkpoint"):
            self._due_after(name, event["from_env_steps"])

    def stop(self, reason: EndReason) -> None:
        """End the run after the update in progress; the first reason counts."""
        if self._reason == "total_steps":
            self._reason = reason
        self._in_a_hurry |= reason in _SIGNALS.values()
        self._runtime.stop(hurry=self._in_a_hurry)

    def supervise(self) -> Result:
        """Watch until the roles have ended, then save."""
        try:
            going_on = self._going_on
            after_steps = None if going_on is None else going_on["from_env_steps"]
            self._sinks = self._folder.sinks(after_steps)
            self._tell(start_record(self._config, self._algorithm, self._spec, self._folder))
            if going_on is not None:
                self._tell(going_on)
            state, checkpoint = self._legs()
            self._is_over = True
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
        except Exception as failure:
            self._save_what_is_left()
            message = str(failure)
            if (self._folder.checkpoints / "latest").is_file():
                message += f"\nto go on: repertory resume {shlex.quote(str(self._folder.path))}"
            self._tell({"kind": "event", "event": "failure", "message": message})
            raise
        finally:
            self._evaluator.close()
            for sink in self._sinks:
                with suppress(OSError):
                    sink.close()

    def _save_what_is_left(self) -> None:
        """After a failure, save the newest state that some role could still give."""
        state = _newest_state(self._runtime.results)
        if state is not None and state["updates"]:
            try:
                self._save(state)
            except checkpoints.CheckpointError as error:
                self._tell({"kind": "event", "event": "checkpoint_failed", "message": str(error)})

    def _legs(self) -> tuple[Mapping[str, Any], Path]:
        """Have roles run until the run is over; its last state, and the checkpoint of it.

        With `exact_resume` they end at each scheduled checkpoint and others begin from it, just as
        they would if the run had been stopped there. Without, there is one leg.
        """
        while True:
            state = self._leg()
            steps, every = state["env_steps"], self._config.checkpoint_steps
            over = self._reason != "total_steps"
            last = over or steps >= self._config.total_steps
            # Where a run ends off the grid, a longer one would not have stopped.
            begun = steps_of(self._config.resume_from)
            on_the_grid = every is not None and steps // every > begun // every
            checkpoint = self._save_at_the_end(state, scheduled=not over and on_the_grid)
            if last:
                return state, checkpoint
            self._config = replace(self._config, resume_from=checkpoint)
            self._runtime = _make_runtime(self._config)
            if self._reason != "total_steps":  # a signal has come between the two
                self._runtime.stop(hurry=self._in_a_hurry)

    def _save_at_the_end(self, state: Mapping[str, Any], *, scheduled: bool) -> Path:
        """Save a state that nobody will give again: once more if the folder was gone."""
        try:
            return self._save(state, scheduled=scheduled)
        except checkpoints.CheckpointError:
            self._folder.checkpoints.mkdir(parents=True, exist_ok=True)
            return self._save(state, scheduled=scheduled)

    def _leg(self) -> Mapping[str, Any]:
        """Have roles run until they end by themselves; the newest state that they return."""
        try:
            self._start_roles()
            results = self._runtime.supervise(self._on_record)
        finally:
            self._runtime.close()
        self._take_line(self._progress.flush())
        state = _newest_state(results)
        assert state is not None, "a role that learns returns its state"
        return state

    def _start_roles(self) -> None:
        try:
            ALGORITHMS[self._algorithm].train(self._config, self._spec, self._runtime)
        except (OSError, RuntimeError) as error:
            if (reason := _what_is_lacking(error)) is None:
                raise
            raise RoleFailed("the start of roles", reason) from error

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
                self._take_state(record["state"])
            case "window":
                self._take_line(self._progress.add_window(record))
                due = math.inf if self._evaluator.busy else self._due["evaluation"]
                if record["env_steps"] >= min(self._due["checkpoint"], due):
                    self._runtime.collect_state()
        self._look_at_the_clock()
        self._take_evaluations()

    def _take_state(self, state: Mapping[str, Any]) -> None:
        """Save a state on the way, and have it evaluated if that is due.

        A full disk or a lost folder is told, and the run goes on: it may be there again next time.
        """
        env_steps = state["env_steps"]
        if env_steps >= self._due["checkpoint"]:
            self._due_after("checkpoint", env_steps)
        try:
            checkpoint = self._save(state)
        except checkpoints.CheckpointError as error:
            message = f"no checkpoint after {env_steps:,} env steps: {error}; the run goes on"
            self._tell({"kind": "event", "event": "checkpoint_failed", "message": message})
            return
        if env_steps >= self._due["evaluation"] and not self._evaluator.busy:
            self._due_after("evaluation", env_steps)
            self._evaluator.submit(checkpoint)

    def _due_after(self, name: str, env_steps: int) -> None:
        """Have the next one made at the next multiple of its interval, if it has one."""
        interval = getattr(self._config, f"{name}_steps")
        if name == "checkpoint" and self._config.exact_resume:
            return  # made where a leg ends
        if interval is not None:
            self._due[name] = (env_steps // interval + 1) * interval

    def _evaluate_the_last(self, checkpoint: Path) -> None:
        """Evaluate where the run has ended by itself; somebody who interrupts does not wait."""
        self._deadline = time.monotonic() + _LAST_EVALUATION_SECONDS
        wanted = self._config.evaluation_steps is not None and not self._in_a_hurry
        if wanted and checkpoint != self._evaluator.last:
            self._evaluator.submit(checkpoint)
        while self._evaluator.busy and not self._waits_no_more():
            self._take_evaluations()
            time.sleep(0.05)
        for left in self._evaluator.waiting if not self._in_a_hurry else []:
            message = (
                f"no evaluation of {left.name}: it was not over {_LAST_EVALUATION_SECONDS:g} s "
                f"after the run; ask for fewer evaluation_episodes, or say `repertory eval {left}`"
            )
            self._tell({"kind": "event", "event": "evaluation_failed", "message": message})

    def _waits_no_more(self) -> bool:
        return self._in_a_hurry or time.monotonic() > self._deadline

    def _take_evaluations(self) -> None:
        """Tell what the evaluator has found; the best of it is the run's best."""
        for record in self._evaluator.finished():
            self._tell(record)
            if record["kind"] == "eval" and record["episode_return_mean"] > self._best:
                try:
                    best = Path(record["checkpoint"])
                    checkpoints.point(self._folder.checkpoints, "best", best)
                    self._best = record["episode_return_mean"]
                except checkpoints.CheckpointError as error:
                    event = {"kind": "event", "event": "checkpoint_failed", "message": str(error)}
                    self._tell(event)

    def _take_line(self, line: Record | None) -> None:
        if line is not None:
            self._last = line
            self._tell(line)
            if (warning := self._entropy.observe(line)) is not None:
                self._tell({"kind": "event", "event": "low_entropy", "message": warning})

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
        # By the clock alone, the best of a run that forgets again would never have been saved.
        if reached is not None and reached > self._best_to_beat and now > self._next_best:
            self._next_best = now + max(_BEST_SECONDS, 50 * self._saving_seconds)
            self._runtime.collect_state()

    def _tell(self, record: Record) -> None:
        for sink in self._sinks:
            try:
                sink.write(record)
            except OSError as error:
                # On a full disk the agent still learns, and later there may be room again.
                if sink not in self._failing:
                    self._failing.append(sink)
                    message = f"{type(sink).__name__} cannot write: {error.strerror}"
                    self._call_back({"kind": "event", "event": "sink_failed", "message": message})
        self._call_back(record)

    def _call_back(self, record: Record) -> None:
        if self._callback is not None and self._callback(record) is False and not self._is_over:
            self.stop("callback")

    def _save(self, state: Mapping[str, Any], *, scheduled: bool = False) -> Path:
        """Save a learner's state, as the best too if recent episodes have never been better.

        Where an evaluator runs, its games decide what is best. A checkpoint that the run began from
        is the same state, and stays as it is.
        """
        path = step_path(self._folder.checkpoints, state["env_steps"])
        if path == self._scheduled and path.is_file():
            return path
        reached, best, started = self._progress.recent_return, self._best, time.monotonic()
        if reached is not None and reached > self._best_to_beat:
            best = reached
        whole = checkpoints.make_state(
            model=state["model"],
            optimizer=state["optimizer"],
            env_steps=state["env_steps"],
            updates=state["updates"],
            algorithm=self._algorithm,
            config=to_yaml(replace(self._config, resume_from=None)),
            spec=self._spec,
            progress={"lines": self._progress.state_dict(), "best": best},
            scheduled=scheduled,
        )
        # What else the role keeps stays beside it.
        path = checkpoints.save_step(self._folder.checkpoints, {**state, **whole})
        if best > self._best:
            checkpoints.point(self._folder.checkpoints, "best", path)
            self._best = best
        if scheduled:
            self._scheduled = path
        needed = [*self._evaluator.waiting, *filter(None, [self._scheduled])]
        checkpoints.prune(self._folder.checkpoints, self._config.keep_checkpoints, needed)
        self._saving_seconds = time.monotonic() - started
        return path

    @property
    def _best_to_beat(self) -> float:
        """By recent episodes; where an evaluator runs, only its games can."""
        return self._best if self._config.evaluation_steps is None else math.inf


def _what_is_lacking(error: OSError | RuntimeError) -> str | None:
    """In words, where the system gives roles no more of something; None for other errors."""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:  # pipes to a role, say
        return str(error)
    if "shared memory" in str(error):  # torch has no class of its own for it
        return f"{error}; give the system more shared memory (a container: --shm-size)"
    return None


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
            files=[path for path in [config.resume_from or config.init_from] if path is not None],
        )
    return ProcessRuntime(config.role_timeout_seconds, max_restarts=config.max_restarts)


def _largest_entropy(spec: EnvironmentSpec) -> float | None:
    """Of a policy over the environment's actions, in nats; None where there is no bound."""
    if isinstance(spec.action_space, Discrete):
        return math.log(int(spec.action_space.n))
    return None


@contextmanager
def signals_end(run: Run) -> Iterator[None]:
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
