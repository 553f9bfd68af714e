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

PATIENCE_SECONDS = 6.0


def _impatient() -> Runtime:
    """Processes that wait for one another no longer than that.

    By itself the patience is as long as the others may take to start, and a start takes as long as
    the machine is busy: neither is what a test can wait for.
    """
    made = ProcessRuntime(role_timeout_seconds=5.0)
    made._patience = PATIENCE_SECONDS
    return made


CAN_WAIT: dict[str, Callable[[], Runtime]] = {"processes": _impatient}
"""Runtimes whose roles wait for each other, with little patience; `inline` sees at once that no
role can proceed."""


@pytest.fixture(params=list(RUNTIMES))
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """A fresh runtime of each kind; afterwards nothing of it may be left."""
    yield from _fresh(RUNTIMES[request.param])


@pytest.fixture(params=list(CAN_DIE))
def mortal_runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """A fresh runtime of each kind whose roles can die alone."""
    yield from _fresh(CAN_DIE[request.param])


@pytest.fixture(params=list(CAN_WAIT))
def impatient_runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """A fresh runtime of each kind whose roles wait for `PATIENCE_SECONDS` at most."""
    yield from _fresh(CAN_WAIT[request.param])


def _fresh(make: Callable[[], Runtime]) -> Iterator[Runtime]:
    before = Leftovers.now()
    made = make()
    yield made
    made.close()
    before.check(descriptors=False)
