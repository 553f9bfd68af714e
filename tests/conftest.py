"""What holds for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

_WITH_PROCESSES = ("contracts", "regression", "commands", "packaging", "training")
"""Folders whose tests start processes: together they stay on one worker, apart from each other."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests that start processes from running beside one another: they would be slow, and
    each would see what another has not yet cleaned up."""
    root = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(root).parts[0]
        if folder in _WITH_PROCESSES or item.path.name == "test_processes.py":
            item.add_marker(pytest.mark.xdist_group("processes"))
