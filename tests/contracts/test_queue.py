"""Trajectory queues: order, bound, close, nothing lost and nothing mixed."""

from __future__ import annotations

import time
from typing import Any

import pytest

from repertory.runtimes.base import Runtime
from repertory.runtimes.shared_memory import Channel, SharedQueue, arrived_on
from tests.contracts import roles


@pytest.mark.parametrize("prefetch", [False, True])
def test_order_actor_takes_one_from_each_by_index(runtime: Runtime, prefetch: bool) -> None:
    queue = runtime.trajectory_queue(roles.SPEC, 3, order="actor")
    runtime.start("learner-0", roles.consume, 3, 4, queue.reader(prefetch=prefetch))
    for actor in (2, 0, 1):  # started in another order than they are taken
        runtime.start(f"actor-{actor}", roles.produce, actor, 4, queue.writer(actor), 0.01 * actor)
    results = runtime.supervise(lambda role, record: None)
    expected = [[i, i, 100 + i, 100 + i, 200 + i, 200 + i] for i in range(4)]
    assert results["learner-0"] == expected


@pytest.mark.parametrize("prefetch", [False, True])
def test_order_arrival_keeps_each_actors_own_order_and_loses_nothing(
    runtime: Runtime, prefetch: bool
) -> None:
    queue = runtime.trajectory_queue(roles.SPEC, 2, order="arrival", capacity=3)
    runtime.start("learner-0", roles.consume, 2, 10, queue.reader(prefetch=prefetch), 0.01)
    runtime.start("actor-0", roles.produce, 0, 10, queue.writer(0), 0.002)
    runtime.start("actor-1", roles.produce, 1, 10, queue.writer(1))
    results = runtime.supervise(lambda role, record: None)
    marks = [mark for batch in results["learner-0"] for mark in batch[::2]]
    assert sorted(marks) == [*range(10), *range(100, 110)]
    for actor in range(2):
        own = [mark for mark in marks if mark // 100 == actor]
        assert own == sorted(own)


def test_a_slow_learner_holds_actors_back_at_the_bound(runtime: Runtime) -> None:
    queue = runtime.trajectory_queue(roles.SPEC, 1, order="actor", capacity=2)
    runtime.start("learner-0", roles.consume, 1, 5, queue.reader(), 0.15)
    runtime.start("actor-0", roles.produce, 0, 5, queue.writer(0))
    ahead: list[int] = []
    counts = {"putting": 0, "taken": 0}

    def watch(role: str, record: dict[str, object]) -> None:
        if record["kind"] in counts:
            counts[str(record["kind"])] += 1
        ahead.append(counts["putting"] - counts["taken"])

    results = runtime.supervise(watch)
    assert [batch[0] for batch in results["learner-0"]] == [0, 1, 2, 3, 4]
    # Two in the slots, one that waits to be put, and one taken of which no word has come yet.
    assert max(ahead) <= 4


def test_closing_by_the_learner_ends_the_actors(runtime: Runtime) -> None:
    queue = runtime.trajectory_queue(roles.SPEC, 2, order="actor")
    runtime.start("learner-0", roles.consume, 2, 3, queue.reader())
    for actor in range(2):
        runtime.start(f"actor-{actor}", roles.produce, actor, 1000, queue.writer(actor))
    results = runtime.supervise(lambda role, record: None)
    assert len(results["learner-0"]) == 3
    for actor in range(2):
        assert 3 <= results[f"actor-{actor}"] <= 3 + 2  # two more fit into the slots before


def test_order_actor_refuses_any_other_count(runtime: Runtime) -> None:
    queue = runtime.trajectory_queue(roles.SPEC, 2, order="actor")
    runtime.start("learner-0", roles.consume, 1, 1, queue.reader())
    with pytest.raises(RuntimeError, match="takes one from each of 2 actors"):
        runtime.supervise(lambda role, record: None)


class Alone:
    """A role that holds both ends of a queue, and waits for what its own threads do."""

    stopping = aborted = False

    def beat(self) -> None:
        pass

    def wait_for(self, channels: list[Channel]) -> list[Channel]:
        deadline = time.monotonic() + 5.0
        while not (ready := arrived_on(channels)) and time.monotonic() < deadline:
            time.sleep(0.001)
        return ready


def test_the_next_batch_leaves_the_queue_while_the_learner_has_one() -> None:
    queue = SharedQueue([], roles.SPEC, 1, "arrival", capacity=2)
    writer, reader = queue.writer(0), queue.reader(prefetch=True)
    writer.attach(Alone())
    reader.attach(Alone())
    for mark in range(2):
        assert writer.put(roles.marked(mark))
    learned_from = reader.take(1)
    for mark in (2, 3):  # both slots are free again, though one batch was taken
        assert writer.put(roles.marked(mark))
    assert learned_from is not None
    assert roles.mark_of(learned_from) == [0, 0]
    for mark in range(1, 4):
        batch = reader.take(1)
        assert batch is not None
        assert roles.mark_of(batch) == [mark, mark]
    with pytest.raises(ValueError, match="every take is of the same count"):
        take_two_after_one(writer, reader)


def take_two_after_one(writer: Any, reader: Any) -> None:
    """Two trajectories are there; the second is fetched alone, and asked for as half of two."""
    for mark in range(2):
        writer.put(roles.marked(mark))
    reader.take(1)
    reader.take(2)
