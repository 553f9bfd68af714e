"""Learner groups: the same bits for everyone, and one agreed end."""

from __future__ import annotations

import time

import pytest
import torch

from repertory.runtimes.base import RoleFailed, Runtime
from tests.contracts import roles
from tests.contracts.conftest import PATIENCE_SECONDS


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


@pytest.mark.parametrize("batches", [(3, 2), (2, 3), (3, 2, 4), (1, 5, 5)])
def test_b106_a_learner_that_leaves_ends_the_others_after_as_many_sums(
    runtime: Runtime, batches: tuple[int, ...]
) -> None:
    """A learner without data blocks the others: three batches for one, two for the other.

    Source: ray-project/ray PR#66030; ray-project/ray#63819.
    """
    group = runtime.learner_group(roles.model_of(0), len(batches))
    for rank, number in enumerate(batches):
        runtime.start(f"learner-{rank}", roles.sum_and_leave, number, group.member(rank))
    results = runtime.supervise(lambda role, record: None)
    assert [results[f"learner-{rank}"] for rank in range(len(batches))] == (
        [min(batches)] * len(batches)
    )


@pytest.mark.slow
def test_b106_whoever_waits_for_somebody_who_is_only_there_is_named_in_time(
    impatient_runtime: Runtime,
) -> None:
    """A learner without data blocks the others: the actor feeds only the first learner.

    Source: ray-project/ray PR#66030; ray-project/ray#63819.
    """
    runtime, heard = impatient_runtime, dict[str, float]()
    group = runtime.learner_group(roles.model_of(0), 2)
    for rank in range(2):
        queue = runtime.trajectory_queue(roles.SPEC, 1, order="actor")
        runtime.start(f"learner-{rank}", roles.take_and_sum, 3, queue.reader(), group.member(rank))
        if rank == 0:
            runtime.start("actor-0", roles.produce, 0, 3, queue.writer(0))
    runtime.start("actor-1", roles.only_be_there, 60.0)

    def watch(role: str, record: dict[str, object]) -> None:
        heard[role] = time.monotonic()

    said = rf"(learner-\d) failed: TimeoutError: \1 has waited {PATIENCE_SECONDS:g} s for others"
    with pytest.raises(RoleFailed, match=said) as caught:
        runtime.supervise(watch)
    # It waits twice for a batch: for the trajectory, and for the other learner's sum.
    assert time.monotonic() - heard[caught.value.role] < 2 * PATIENCE_SECONDS + 8.0
