"""The examples run as they stand, and end as they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import REPOSITORY

EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))
LONGEST = 60


def test_there_are_three_and_they_are_short() -> None:
    assert len(EXAMPLES) == 3
    assert all(len(path.read_text().splitlines()) <= LONGEST for path in EXAMPLES)


@pytest.mark.nightly
@pytest.mark.learning
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_learns(path: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=800,
    )
    said = r"(?:one episode: |mean return |mean return of 20 episodes: )(-?\d[\d.]*)"
    numbers = re.findall(said, done.stdout)
    reached = float(numbers[-1])
    assert reached > (0.8 if path.stem == "own_environment" else 100), done.stdout
