"""Shared parameters of A3C that one process steps on behalf of all workers, one after the other.

They are the same that workers on one machine step by themselves. What is here: verbs that take and
give bytes. What is not here: the Ray actor that calls them (`servers`), and a worker's own copy
(`ends.ModelWorker`). Nothing here needs Ray.
"""

from __future__ import annotations

import pickle

import numpy as np
import torch

from repertory.parameters import flatten, snapshot_size, travelling_tensors
from repertory.runtimes.hogwild import NoLock, SharedParameters
from repertory.runtimes.ray_cluster.wire import Bytes
from repertory.runtimes.shared_memory import Channel


class ServedModel:
    """See the module."""

    def __init__(
        self,
        packed: bytes,
        num_workers: int,
        shared_statistics: bool,
        counted: tuple[int, int],
        threads: int,
    ) -> None:
        """Begin with given parameters.

        Args:
            packed: The model and its optimiser, pickled together.
            num_workers: How many ends there will be.
            shared_statistics: One optimiser state for all workers, or one for each.
            counted: Updates and env steps so far, where a run goes on.
            threads: Of torch.
        """
        torch.set_num_threads(threads)
        self._model, optimizer = pickle.loads(packed)
        self._dtype = travelling_tensors(self._model)[0].dtype
        shared = SharedParameters(
            self._model,
            optimizer,
            num_workers,
            NoLock(),
            shared_statistics=shared_statistics,
            counted=counted,
            place=lambda tensor: tensor,
        )
        self._workers = [shared.worker(index) for index in range(num_workers)]
        for worker in self._workers:
            worker.attach(_Presence())

    def pull(self, index: int) -> tuple[int, int, Bytes]:
        """Updates, env steps and the parameters, for one worker."""
        return *self._workers[index].note_version(), self.parameters()

    def push(
        self,
        index: int,
        env_steps: int,
        learning_rate: float,
        max_lag: int | None,
        data: Bytes,
    ) -> tuple[bool, int, int]:
        """Make a step with one worker's gradient, unless it is too old."""
        gradient = torch.from_numpy(np.array(data)).view(self._dtype)
        pushed = self._workers[index].push(
            gradient, env_steps, learning_rate=learning_rate, max_lag=max_lag
        )
        assert pushed is not None
        return pushed.applied, pushed.lag, pushed.env_steps

    def state(self, index: int) -> Bytes:
        """The whole state, pickled."""
        return np.frombuffer(pickle.dumps(self._workers[index].state_dict()), np.uint8)

    def parameters(self) -> Bytes:
        """The parameters as one flat vector."""
        flat = torch.empty(snapshot_size(self._model), dtype=self._dtype)
        flatten(travelling_tensors(self._model), flat)
        memory: Bytes = flat.view(torch.uint8).numpy()
        return memory

    def live(self) -> None:
        """Answer, and so give a sign of life."""


class _Presence:
    """What ends that are made for processes ask of their role; here none of them waits."""

    stopping = False
    aborted = False

    def beat(self) -> None:
        """Nobody counts them."""

    def wait_for(self, channels: list[Channel]) -> list[Channel]:
        return []
