"""The evaluator: plays whole games with a run's checkpoints while training goes on.

It is not part of any algorithm. The parent has a checkpoint written, as it does anyway, and hands
its path over; so what was evaluated can be loaded again, and `best` is a file and not a memory.
Games are the evaluator's own (`evaluation.EVALUATOR`), whole, and counted beforehand. Where roles
are processes the evaluator is one more beside them; where all is one process it plays at once.

What is here: that process, and what came back from it. What is not here: the games (`evaluation`),
and when to evaluate (`training`).
"""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from repertory.agent import Agent
from repertory.config import RunConfig
from repertory.evaluation import evaluate
from repertory.metrics import Record
from repertory.spawning import start_child

Env = str | Callable[..., Any]

_GRACE_SECONDS = 2.0
_PATIENCE_SECONDS = 1800.0  # for one evaluation; a hung environment shall not keep a run alive
_TOO_LONG = f"given up after {_PATIENCE_SECONDS:g} s; ask for fewer evaluation_episodes"


class Evaluator:
    """Takes checkpoints and gives `eval` records; in a process of its own, or at once.

    Attributes:
        waiting: Checkpoints that were handed over and have not come back, oldest first.
        last: The one that was handed over last.
    """

    def __init__(self, config: RunConfig, give_up: Callable[[], bool]) -> None:
        """Nothing is started before the first checkpoint comes.

        Args:
            config: Of the run.
            give_up: Whether the run waits for no game any more; asked where it is its own process
                that plays, which the others do not hold up.
        """
        self._give_up = give_up
        self._episodes = config.evaluation_episodes
        # A checkpoint holds no code: an environment that is a callable has to come along.
        self._env = config.env if callable(config.env) else None
        self._apart = config.runtime != "inline"
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._records: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self.waiting: list[Path] = []
        self.last: Path | None = None
        self._handed_over = 0.0

    @property
    def busy(self) -> bool:
        """Whether a checkpoint that was handed over has not come back."""
        return bool(self.waiting)

    def submit(self, checkpoint: Path) -> None:
        """Have a checkpoint evaluated, after those that still wait."""
        self.waiting.append(checkpoint)
        self.last = checkpoint
        self._handed_over = time.monotonic()
        if not self._apart:
            self._records.put(_evaluate(checkpoint, self._episodes, self._env, self._give_up))
            return
        if self._process is not None and self._pipe is not None and not self._process.is_alive():
            owed = len(self.waiting) - 1
            self._receive(self._pipe, of=owed)
            self._end()
            for lost in self.waiting[self._records.qsize() : owed]:
                self._records.put(_failed(lost, "the evaluator has ended"))
        if self._process is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send(checkpoint)
        except OSError:
            self._records.put(_failed(checkpoint, "the evaluator has ended"))

    def finished(self) -> list[Record]:
        """What has come back since the last call: `eval` records, or `event`s of failures."""
        if self._pipe is not None:
            self._receive(self._pipe, of=len(self.waiting))
            if self.busy and time.monotonic() - self._handed_over > _PATIENCE_SECONDS:
                self._end()
                for checkpoint in self.waiting[self._records.qsize() :]:
                    self._records.put(_failed(checkpoint, _TOO_LONG))
        found = []
        while not self._records.empty():
            found.append(self._records.get())
        del self.waiting[: len(found)]
        return found

    def close(self) -> None:
        """End the process, in the middle of a game too. Harmless when called twice."""
        self._end()

    def _end(self) -> None:
        if self._process is None or self._pipe is None:
            return
        self._pipe.close()
        self._process.join(_GRACE_SECONDS if not self.busy else 0.0)
        self._process.kill()  # it may be out of sight and alive
        self._process.join()
        self._process.close()
        self._process = self._pipe = None

    def _start(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = start_child("evaluator", _serve, theirs, self._episodes, self._env)
        theirs.close()

    def _receive(self, pipe: Connection, of: int) -> None:
        """Take what lies in the pipe; its end stands for all that was to come of so many."""
        try:
            while pipe.poll():
                self._records.put(pipe.recv())
        except (EOFError, OSError):
            for _ in range(of - self._records.qsize()):
                self._records.put(_failed(None, "the evaluator died"))


def _serve(pipe: Connection, episodes: int, env: Env | None) -> None:
    """The process: checkpoints in, records out, until the other end is closed."""
    torch.set_num_threads(1)
    while True:
        try:
            checkpoint = pipe.recv()
            pipe.send(_evaluate(checkpoint, episodes, env))
        except (EOFError, OSError):
            return


def _evaluate(
    checkpoint: Path, episodes: int, env: Env | None, give_up: Callable[[], bool] = lambda: False
) -> Record:
    """An `eval` record, or the `event` that stands for a failure: training goes on without it."""
    try:
        agent = Agent.load(checkpoint, env=env)
        record = evaluate(agent, episodes=episodes, give_up=give_up).to_record()
    except Exception as error:
        return _failed(checkpoint, f"{type(error).__name__}: {error}")
    return {**record, "checkpoint": str(checkpoint)}


def _failed(checkpoint: Path | None, reason: str) -> Record:
    name = "" if checkpoint is None else f" of {checkpoint.name}"
    return {
        "kind": "event",
        "event": "evaluation_failed",
        "message": f"the evaluation{name} failed: {reason}",
    }
