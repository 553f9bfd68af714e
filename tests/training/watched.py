"""Roles of a real run that tell what they do with what they share, and when.

A watched runtime starts every role with its ends wrapped; nothing is done differently. Times are of
the machine's one monotonic clock, so that those of two processes can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import nn

from repertory.metrics import Record
from repertory.runtimes.base import RoleContext, Runtime
from repertory.runtimes.processes import ProcessRuntime
from repertory.trajectories import Trajectory


class WatchedRuntime:
    """The `processes` runtime, whose roles report `refreshed`, `put`, `took` and `published`."""

    def __init__(self) -> None:
        self._runtime: Runtime = ProcessRuntime()
        self.records: dict[str, list[Record]] = {}
        """What each role has reported, in its order."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def start(self, name: str, role: Callable[..., Any], *arguments: Any, **settings: Any) -> None:
        self.records[name] = []
        self._runtime.start(name, _watch, role, *arguments, **settings)

    def run(self) -> dict[str, Any]:
        """Supervise to the end; the roles' results."""
        try:
            return self._runtime.supervise(lambda role, record: self.records[role].append(record))
        finally:
            self._runtime.close()

    def of(self, role: str, kind: str) -> list[Record]:
        """What a role has reported of one kind."""
        return [record for record in self.records[role] if record["kind"] == kind]


def _watch(context: RoleContext, role: Callable[..., Any], *arguments: Any) -> Any:
    """A role, with its ends wrapped."""
    wrapped = []
    for argument in arguments:
        for verb, wrapper in _WRAPPERS.items():
            if hasattr(argument, verb):
                argument = wrapper(context, argument)
                break
        wrapped.append(argument)
    return role(context, *wrapped)


class _Wrapper:
    def __init__(self, context: RoleContext, end: Any) -> None:
        self._context = context
        self._end = end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)

    def _tell(self, kind: str, began: float, **more: Any) -> None:
        ended = time.monotonic()
        self._context.report({"kind": kind, "began": began, "ended": ended, **more})


class _ParameterReader(_Wrapper):
    def refresh(self, model: nn.Module, version: int | None = None) -> int | None:
        began = time.monotonic()
        found: int | None = self._end.refresh(model, version)
        if found is not None:
            self._tell("refreshed", began, version=found)
        return found


class _ParameterWriter(_Wrapper):
    def publish(self, model: nn.Module, version: int) -> None:
        began = time.monotonic()
        self._end.publish(model, version)
        self._tell("published", began, version=version)


class _TrajectoryWriter(_Wrapper):
    def put(self, trajectory: Trajectory) -> bool:
        self._tell("put", time.monotonic(), **_what(trajectory))
        went: bool = self._end.put(trajectory)
        return went


class _TrajectoryReader(_Wrapper):
    def take(self, count: int) -> Trajectory | None:
        began = time.monotonic()
        batch: Trajectory | None = self._end.take(count)
        if batch is not None:
            self._tell("took", began, **_what(batch))
        return batch


_WRAPPERS: dict[str, type[_Wrapper]] = {
    "take": _TrajectoryReader,
    "put": _TrajectoryWriter,
    "publish": _ParameterWriter,
    "refresh": _ParameterReader,
}


def _what(trajectory: Trajectory) -> dict[str, Any]:
    """Which trajectory: the version and the first observation of each column."""
    return {
        "versions": trajectory.policy_version.tolist(),
        "first": trajectory.observations[0].tolist(),
    }
