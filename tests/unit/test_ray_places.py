"""Places of the Ray runtime, without Ray: what calls that overtake, stop or leave come to."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Coroutine
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from repertory.runtimes.ray_cluster import wire
from repertory.runtimes.ray_cluster.lines import as_bytes
from repertory.runtimes.ray_cluster.places import GroupPlace, QueuePlace, StorePlace
from repertory.runtimes.ray_cluster.served import ServedModel


def run(verb: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(verb, 5))


def test_a_lane_keeps_its_writers_order_when_calls_overtake() -> None:
    async def play() -> None:
        queue = QueuePlace(1, "actor")
        puts = [asyncio.create_task(queue.put(0, 0, serial, serial)) for serial in (2, 0, 1)]
        assert [await queue.take(1) for _ in range(3)] == [[0], [1], [2]]
        assert await asyncio.gather(*puts) == [True] * 3

    run(play())


def test_a_new_seats_trajectories_follow_those_of_the_lost_one() -> None:
    async def play() -> None:
        queue = QueuePlace(1, "arrival")
        puts = [asyncio.create_task(queue.put(0, *when)) for when in [(0, 0, "old"), (1, 0, "new")]]
        # The old seat's second call was still on its way when the new seat came.
        await asyncio.sleep(0)
        late = asyncio.create_task(queue.put(0, 0, 1, "late"))
        assert await queue.take(2) == ["old", "new"]
        assert await asyncio.gather(*puts, late) == [True, True, False]

    run(play())


def test_closing_a_queue_answers_whoever_waits() -> None:
    async def play() -> None:
        queue = QueuePlace(2, "actor")
        put = asyncio.create_task(queue.put(0, 0, 0, "a"))
        early = asyncio.create_task(queue.put(1, 0, 1, "out of turn"))
        take = asyncio.create_task(queue.take(2))
        await asyncio.sleep(0)
        await queue.close()
        assert (await put, await early, await take) == (False, False, None)
        assert await queue.put(0, 0, 1, "b") is False

    run(play())


def test_a_store_gives_the_newest_or_one_of_two_and_spares_what_is_known() -> None:
    async def play() -> None:
        store = StorePlace()
        waiting = asyncio.create_task(store.refresh(2, -1))
        for version in range(3):
            await store.publish(version, [f"v{version}"])
        assert await waiting == (2, ["v2"])
        assert await store.refresh(None, 1) == (2, ["v2"])
        assert await store.refresh(None, 2) == (2, [])
        assert await store.refresh(1, -1) == (1, ["v1"])
        with pytest.raises(ValueError, match="version 0 is gone; the newest is 2"):
            await store.refresh(0, -1)
        await store.close()
        assert await store.refresh(None, -1) is None

    run(play())


@pytest.mark.parametrize(("stops", "goes_on"), [((False, True), True), ((True, False), False)])
def test_only_the_first_learners_word_stops_a_group(
    stops: tuple[bool, bool], goes_on: bool
) -> None:
    async def play() -> None:
        group = GroupPlace(2)
        sums = [group.sum(rank, stops[rank], (rank, 5), f"part {rank}") for rank in (1, 0)]
        summed = await asyncio.gather(*sums)
        assert summed == [([1, 10], ["part 0", "part 1"]) if goes_on else None] * 2

    run(play())


def test_who_leaves_a_group_ends_the_round_for_all() -> None:
    async def play() -> None:
        group = GroupPlace(3)
        waiting = [asyncio.create_task(group.sum(rank, False, (), rank)) for rank in (0, 1)]
        await asyncio.sleep(0)
        await group.leave()
        await group.leave()
        assert await asyncio.gather(*waiting) == [None, None]
        assert await group.sum(2, False, (), 2) is None

    run(play())


def test_messages_arrive_with_their_buffers() -> None:
    ours, theirs = Pipe(duplex=True)
    sent = [np.arange(7, dtype=np.uint8), np.zeros(0, np.uint8)]
    wire.send(ours, "answer", 3, {"a": (1, None)}, buffers=sent)
    header, buffers = wire.receive(theirs)
    assert header == ("answer", 3, {"a": (1, None)})
    assert [buffer.tolist() for buffer in buffers] == [[0, 1, 2, 3, 4, 5, 6], []]
    buffers[0][0] = 1  # in memory of its own
    ours.close()
    with pytest.raises(EOFError):
        wire.receive(theirs)
    theirs.close()


def test_a_served_model_counts_lag_and_drops_what_is_too_old() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    served = ServedModel(pickle.dumps((model, SGD(model.parameters(), 1.0))), 2, True, (3, 30), 1)
    ones = as_bytes(torch.ones(2))
    ones.setflags(write=False)  # as they come from the object store
    for index in range(2):
        assert served.pull(index)[:2] == (3, 30)
    assert served.push(0, 5, 0.5, None, ones) == (True, 0, 35)
    assert served.push(1, 5, 0.5, 0, ones) == (False, 1, 35)
    assert served.push(1, 5, 0.5, 1, ones) == (True, 1, 40)
    assert served.parameters().view(np.float32).tolist() == [-1.0, -1.0]
    state = pickle.loads(served.state(0).tobytes())
    assert (state["updates"], state["env_steps"]) == (5, 40)
