"""One suite for every runtime: a new runtime adds a line here and passes unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from repertory.runtimes.base import Runtime
from repertory.runtimes.inline import InlineRuntime
from repertory.runtimes.processes import ProcessRuntime
from tests.leftovers import Leftovers
from tests.ray_clusters import HAS_RAY, shared_address

RUNTIMES: dict[str, Callable[[], Runtime]] = {
    "inline": InlineRuntime,
    "processes": ProcessRuntime,
    "ray": lambda: _on_ray(),
}
CAN_DIE: dict[str, Callable[[], Runtime]] = {
    "processes": lambda: ProcessRuntime(role_timeout_seconds=5.0, max_restarts=2),
    "ray": lambda: _on_ray(role_timeout_seconds=5.0, max_restarts=2),
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


def _on_ray(**settings: float) -> Runtime:
    if not HAS_RAY:
        pytest.skip("Ray is not installed (the extra `ray`)")
    from repertory.runtimes.ray_cluster.runtime import RayRuntime

    return RayRuntime(shared_address(), actor_cpus=0.0, learner_cpus=0.0, **settings)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs on Ray; the items are those of all folders."""
    for item in items:
        words = item.name.rpartition("[")[2].rstrip("]").split("-")
        if item.path.parent == Path(__file__).parent and "ray" in words:
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(180))
            # The shared model there is the same class; two tests show that it is reached.
            shown = ("test_b35_one_workers", "test_a_killed_worker")
            if item.path.stem == "test_shared_model" and not item.name.startswith(shown):
                item.add_marker(pytest.mark.nightly)


def _fresh(make: Callable[[], Runtime]) -> Iterator[Runtime]:
    before = Leftovers.now()
    made = make()
    yield made
    made.close()
    before.check(descriptors=False)
