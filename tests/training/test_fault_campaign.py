"""A short form of the campaign of `benchmarks/faults.py`: faults drawn at random, real runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "faults.py"


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.xdist_group("campaign")  # it looks at nothing that tests beside it do
@pytest.mark.timeout(280)
@pytest.mark.skipif(not CAMPAIGN.exists(), reason="the benchmarks are not in this folder")
@pytest.mark.skipif(sys.platform != "linux", reason="limits and signals as Linux has them")
@pytest.mark.parametrize("seed", range(5))
def test_runs_survive_or_go_on_whatever_is_done_to_them(seed: int, tmp_path: Path) -> None:
    output = tmp_path / "faults.json"
    words = ["--count", "4", "--seed", str(seed), "--ray-share", "0", "--output", str(output)]
    subprocess.run([sys.executable, str(CAMPAIGN), *words], check=True, timeout=270)
    cases = json.loads(output.read_text())["cases"]
    assert len(cases) == 4
    for case in cases:
        assert case["outcome"] != "failed", case
        # Files in shared memory may be those of other tests that run beside this one.
        assert not [name for name in case["leftovers"] if name.startswith("process")], case
