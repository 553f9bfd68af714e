"""CartPole by the median of five seeds; minutes, so it runs nightly."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from repertory.commands.arguments import parse_train
from repertory.training import train


@pytest.mark.nightly
@pytest.mark.learning
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("algorithm", ["a2c", "batched_a2c"])
def test_the_preset_balances_for_the_median_seed(algorithm: str, tmp_path: Path) -> None:
    """With half of the budget, half of the return that the preset reaches with all of it."""
    words = f"{algorithm} --env CartPole-v1 --total-steps 100000 --runtime inline --seeds 1..5"
    reached = []
    for config in parse_train(words.split()).configs:
        result = train(replace(config, run_dir=tmp_path / str(config.seed)))
        reached.append(result.episode_return_mean or 0.0)
    assert statistics.median(reached) > 200, reached
