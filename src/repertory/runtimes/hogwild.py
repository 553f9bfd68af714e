"""One set of parameters in shared memory that every worker steps by itself: lock-free, or locked.

Workers read and write the same numbers at the same time. That is the algorithm (Mnih et al. 2016,
section 4; Recht et al. 2011, "Hogwild"), not an accident: each number is whole, and a step that
another one overwrites is lost in that number alone. With `lock` one worker at a time pulls or
pushes, and nothing is lost.

Gradients are never shared. Each worker copies its own into its own buffer, and hands that to a
stock optimiser whose parameters and state lie in shared memory, so the order "backward, backward,
push, push" loses nothing.

What is here: the shared model of the `processes` runtime, which `inline` uses too, and its lock.
What is not here: when to pull and push (`algorithms.a3c`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from repertory.checkpoints import check_plain, model_state
from repertory.optimizers import prepare_state, with_own_state
from repertory.parameters import distance, flat_gradient, move_towards, travelling_tensors
from repertory.runtimes.base import Pull, Push
from repertory.runtimes.shared_memory import Endpoint, shared_zeros

_LOCK_POLL_SECONDS = 0.0005


class Lock(Protocol):
    """What makes pulls and pushes take turns."""

    def hold(self, give_up: Callable[[], bool]) -> contextlib.AbstractContextManager[bool]:
        """Hold it for a block; the block gets False where `give_up()` came first."""
        ...


class NoLock:
    """Nobody waits for anybody."""

    @contextlib.contextmanager
    def hold(self, give_up: Callable[[], bool]) -> Iterator[bool]:
        """At once."""
        yield True


class FileLock:
    """A lock between processes that the kernel frees when its holder dies, however it dies.

    POSIX record locks belong to a process, so processes that inherited one open file exclude each
    other; `flock` would not do, as it belongs to the open file. The file has no name and leaves
    nothing behind.
    """

    def __init__(self) -> None:
        """Open the file."""
        with tempfile.TemporaryFile() as file:
            self._descriptor = os.dup(file.fileno())

    @contextlib.contextmanager
    def hold(self, give_up: Callable[[], bool]) -> Iterator[bool]:
        """Wait in short spells, asking `give_up()` between them."""
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if give_up():
                    yield False
                    return
                time.sleep(_LOCK_POLL_SECONDS)
        try:
            yield True
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close this process's end. Harmless when called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __getstate__(self) -> object:
        """Travel to a process that is being started."""
        return reduction.DupFd(self._descriptor)

    def __setstate__(self, descriptor: Any) -> None:
        """Arrive there."""
        self._descriptor = descriptor.detach()


class HogwildWorker(Endpoint):
    """A worker's end; see `SharedModelWorker`."""

    def __init__(
        self, index: int, model: nn.Module, optimizer: Optimizer, counters: Tensor, lock: Lock
    ) -> None:
        """Take what all workers share.

        Args:
            index: Of the worker.
            model: With parameters that all workers see.
            optimizer: Of those parameters; its state may be this worker's own.
            counters: [workers, 2] int64; updates and env steps. Each row has one writer.
            lock: Held during every pull and push.
        """
        self._index = index
        self._model = model
        self._optimizer = optimizer
        self._counters = counters
        self._lock = lock
        self._gradient: Tensor | None = None
        self._pulled = 0

    def pull(self, model: nn.Module, tau: float = 1.0) -> Pull | None:
        """See `SharedModelWorker`."""
        if self.context.stopping or self._given_up():
            return None
        with self._lock.hold(self._given_up) as held:
            if not held:
                return None
            _, env_steps = self.note_version()
            own, shared = travelling_tensors(model), travelling_tensors(self._model)
            move_towards(own, shared, tau)
            left = 0.0 if tau == 1.0 else distance(own, shared)
        return Pull(self._pulled, env_steps, left)

    def note_version(self) -> tuple[int, int]:
        """Updates and env steps so far; a later push is as old as what has come since."""
        self._pulled, env_steps = self._totals()
        return self._pulled, env_steps

    def push(
        self,
        gradient: Tensor,
        env_steps: int,
        *,
        learning_rate: float,
        max_lag: int | None = None,
    ) -> Push | None:
        """See `SharedModelWorker`."""
        if self._given_up():
            return None
        if self._gradient is None:
            self._gradient = flat_gradient(self._model)
        self._gradient.copy_(gradient)  # also where it comes from another device or dtype
        with self._lock.hold(self._given_up) as held:
            if not held:
                return None
            version, seen = self._totals()
            lag = version - self._pulled
            if max_lag is not None and lag > max_lag:
                return Push(applied=False, lag=lag, env_steps=seen)
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
            self._counters[self._index] += torch.tensor([1, env_steps])
        return Push(applied=True, lag=lag, env_steps=seen + env_steps)

    def state_dict(self) -> dict[str, Any]:
        """See `SharedModelWorker`; without a lock, as torn as any worker would see it."""
        with self._lock.hold(self._given_up):
            updates, env_steps = self._totals()
            state: dict[str, Any] = check_plain(
                {
                    "model": model_state(self._model),
                    "optimizer": self._optimizer.state_dict(),
                    "env_steps": env_steps,
                    "updates": updates,
                }
            )
            return state

    def _totals(self) -> tuple[int, int]:
        """Updates and env steps of all workers together."""
        updates, env_steps = self._counters.sum(0).tolist()
        return updates, env_steps

    def _given_up(self) -> bool:
        """Give a sign of life; whether nothing is worth waiting for any more."""
        self.context.beat()
        return self.context.aborted


class SharedParameters:
    """The `SharedModel` of one machine."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        num_workers: int,
        lock: Lock,
        *,
        shared_statistics: bool,
        counted: tuple[int, int],
        place: Callable[[Tensor], Tensor],
    ) -> None:
        """Put parameters and optimiser state where all workers see them.

        Args:
            model: The initial parameters; moved in place.
            optimizer: Of `model`'s parameters.
            num_workers: How many ends there will be.
            lock: Held during every pull and push.
            shared_statistics: One optimiser state for all, or one for each worker.
            counted: Updates and env steps so far, where a run goes on.
            place: Puts a tensor where all workers see it, and returns it.
        """
        for tensor in travelling_tensors(model):
            place(tensor.data)
        prepare_state(optimizer, place)
        self._model = model
        self._optimizer = optimizer
        self._shared_statistics = shared_statistics
        self._lock = lock
        self._counters = shared_zeros(num_workers, 2, dtype=torch.int64)
        self._counters[0] = torch.tensor(counted)

    def worker(self, index: int) -> HogwildWorker:
        """See `SharedModel`."""
        optimizer = self._optimizer
        if not self._shared_statistics:
            optimizer = with_own_state(optimizer)
        return HogwildWorker(index, self._model, optimizer, self._counters, self._lock)
