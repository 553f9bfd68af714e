"""One suite for every runtime: a new runtime adds a line here and passes unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from repertory.runtimes.base import Runtime
from repertory.runtimes.inline import InlineRuntime
from repertory.runtimes.processes import ProcessRuntime
from tests.leftovers import Leftovers

RUNTIMES: dict[str, Callable[[], Runtime]] = {
    "inline": InlineRuntime,
    "processes": ProcessRuntime,
}
CAN_DIE: dict[str, Callable[[], Runtime]] = {
    "processes": lambda: ProcessRuntime(role_timeout_seconds=5.0, max_restarts=2),
}
"""Runtimes whose roles can be killed or hang apart from the parent; `inline` has no such roles."""


@pytest.fixture(params=list(RUNTIMES))
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """A fresh runtime of each kind; afterwards nothing of it may be left."""
    yield from _fresh(RUNTIMES[request.param])


@pytest.fixture(params=list(CAN_DIE))
def mortal_runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """A fresh runtime of each kind whose roles can die alone."""
    yield from _fresh(CAN_DIE[request.param])


def _fresh(make: Callable[[], Runtime]) -> Iterator[Runtime]:
    before = Leftovers.now()
    made = make()
    yield made
    made.close()
    before.check(descriptors=False)
