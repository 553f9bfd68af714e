"""Learner groups: the same bits for everyone, and one agreed end."""

from __future__ import annotations

import pytest
import torch

from repertory.runtimes.base import Runtime
from tests.contracts import roles


@pytest.mark.parametrize("num_learners", [1, 2, 3])
def test_sums_in_rank_order_with_the_same_bits_for_all(runtime: Runtime, num_learners: int) -> None:
    group = runtime.learner_group(roles.model_of(0), num_learners)
    for rank in range(num_learners):
        runtime.start(f"learner-{rank}", roles.add_up, rank, 5, group.member(rank), 0.003)
    results = runtime.supervise(lambda role, record: None)
    tenths = torch.tensor(0.1)
    for rank in range(1, num_learners):
        tenths = tenths + torch.tensor(0.1 * (rank + 1))
    ones = sum(range(1, num_learners + 1))
    for rank in range(num_learners):
        assert len(results[f"learner-{rank}"]) == 5
        for round_, (vector, counts) in enumerate(results[f"learner-{rank}"]):
            assert vector == [float(ones), float(num_learners * round_), tenths.item()]
            assert counts == (sum(range(num_learners)), num_learners * round_)


def test_other_dtypes_than_the_gradients_keep_their_digits(runtime: Runtime) -> None:
    group = runtime.learner_group(roles.model_of(0), 2)
    for rank in range(2):
        runtime.start(f"learner-{rank}", roles.add_up_doubles, rank, group.member(rank))
    results = runtime.supervise(lambda role, record: None)
    assert results["learner-0"] == results["learner-1"] == [(1.0 + 1e-12) + (1.0 + 2e-12), 6e9]


@pytest.mark.parametrize("num_learners", [1, 3])
def test_all_learners_stop_after_the_same_round(runtime: Runtime, num_learners: int) -> None:
    group = runtime.learner_group(roles.model_of(0), num_learners)
    for rank in range(num_learners):
        runtime.start(f"learner-{rank}", roles.add_up, rank, 100_000, group.member(rank))

    def stop_soon(role: str, record: dict[str, object]) -> None:
        if record["round"] == 20:
            runtime.stop()

    results = runtime.supervise(stop_soon)
    lengths = {len(results[f"learner-{rank}"]) for rank in range(num_learners)}
    assert len(lengths) == 1
    assert 20 <= lengths.pop() < 100_000
