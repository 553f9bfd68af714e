"""What holds for all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_WITH_PROCESSES = ("contracts", "regression", "commands", "packaging", "training")
"""Folders whose tests start processes: together they stay on one worker, apart from each other."""


# Workers share the cores, and threads of small passes that wait for one another make them many
# times slower. Roles set their own number.
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests that start processes from running beside one another: they would be slow, and
    each would see what another has not yet cleaned up."""
    root = Path(__file__).parent
    for item in items:
        if item.get_closest_marker("xdist_group"):
            continue
        folder = item.path.relative_to(root).parts[0]
        if folder in _WITH_PROCESSES or item.path.name == "test_processes.py":
            item.add_marker(pytest.mark.xdist_group("processes"))


@pytest.fixture(autouse=True)
def _signals_are_left_as_they_were() -> Iterator[None]:
    """A test that leaves SIGINT unheard would hang another, with nothing to tell which it was."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    after = {number: signal.getsignal(number) for number in handlers}
    mask_after = signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert (after, mask_after) == (handlers, mask)
