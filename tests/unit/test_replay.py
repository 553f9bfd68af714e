"""Replay: what is kept and for how long, what is drawn, and that nothing is changed on the way."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from repertory import checkpoints
from repertory.replay import Replay, memory_needed
from repertory.trajectories import Trajectory, TrajectorySpec, split

SPEC = TrajectorySpec(
    unroll_length=4,
    num_columns=2,
    observation_shape=(3,),
    observation_dtype=torch.float32,
    action_shape=(2,),
    action_dtype=torch.float32,
    core_state_shapes=((6,), (5,)),
)
FRAMES = TrajectorySpec(
    unroll_length=9,
    num_columns=1,
    observation_shape=(4, 5, 3),
    observation_dtype=torch.uint8,
    action_shape=(),
    action_dtype=torch.int64,
    frame_stack=4,
)
STATISTICS = ("episode_returns", "episode_lengths")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_batch(versions: list[int], spec: TrajectorySpec = SPEC) -> Trajectory:
    """Random numbers in every field, a column for each version."""
    batch = spec.with_columns(len(versions)).allocate()
    for tensor in batch.to_fields().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator(versions[0])))
        else:
            high = 2 if tensor.dtype == torch.bool else 200
            tensor.copy_(torch.randint(high, tensor.shape, generator=generator(versions[0])))
    batch.policy_version.copy_(torch.tensor(versions))
    return batch


def filled(capacity: int, number: int, seed: int = 0) -> Replay:
    """A replay that trajectories of versions 0, 1, ... were added to."""
    replay = Replay(SPEC, capacity, None, generator(seed))
    for version in range(number):
        replay.add(random_batch([version]))
    return replay


def versions_in(replay: Replay) -> set[int]:
    """The versions that turn up in very many draws."""
    return set(replay.draw(60 * len(replay)).policy_version.tolist())


def assert_same(left: Trajectory, right: Trajectory) -> None:
    expected = right.to_fields()
    for name, tensor in left.to_fields().items():
        assert torch.equal(tensor, expected[name]), name


def test_the_oldest_makes_room_for_the_newest() -> None:
    replay = Replay(SPEC, 5, None, generator())
    kept: deque[int] = deque(maxlen=5)
    sizes = itertools.cycle([1, 3, 2, 7])  # also one of more columns than there is room for
    for first in range(0, 80, 10):
        versions = [first + i for i in range(next(sizes))]
        replay.add(random_batch(versions))
        kept.extend(versions)
        assert len(replay) == len(kept)
        assert replay.is_full == (len(kept) == 5)
        assert versions_in(replay) == set(kept)


def test_bytes_bound_the_capacity() -> None:
    one = memory_needed(SPEC, 1)
    for max_bytes, capacity in [(3 * one - 1, 2), (3 * one, 3), (10**12, 100), (None, 100)]:
        replay = Replay(SPEC, 100, max_bytes, generator())
        assert replay.capacity == capacity
        assert max_bytes is None or replay.nbytes <= max_bytes


@pytest.mark.parametrize(("capacity", "max_bytes"), [(0, None), (-1, None), (10, 100), (0, 10**9)])
def test_no_room_for_a_trajectory_is_refused(capacity: int, max_bytes: int | None) -> None:
    with pytest.raises(ValueError, match=f"takes {memory_needed(SPEC, 1):,} bytes"):
        Replay(SPEC, capacity, max_bytes, generator())


@pytest.mark.parametrize("spec", [SPEC, FRAMES])
def test_memory_needed_is_what_is_allocated(spec: TrajectorySpec) -> None:
    replay = Replay(spec, 7, None, generator())
    assert memory_needed(spec, 7) == replay.nbytes == replay._slots._slab.untyped_storage().nbytes()
    assert memory_needed(spec.with_columns(9), 7) == replay.nbytes


def test_ten_thousand_pong_trajectories_take_what_their_frames_take() -> None:
    """As Espeholt et al. 2018 keep them: 1.6 GB, not 5.9 GB."""
    spec = dataclasses.replace(FRAMES, unroll_length=20, observation_shape=(4, 84, 84))
    frames = 10_000 * 24 * 84 * 84
    assert frames < memory_needed(spec, 10_000) < 1.02 * frames


def test_memory_is_taken_only_as_trajectories_arrive() -> None:
    spec = dataclasses.replace(SPEC, observation_shape=(50_000,))
    process = psutil.Process()
    before = process.memory_info().rss
    replay = Replay(spec, 2_000, None, generator())
    replay.add(random_batch([1, 2], spec))
    assert replay.nbytes > 1e9
    assert process.memory_info().rss - before < 1e8


def test_draws_are_uniform() -> None:
    """Pearson's statistic lies below its 99.9th percentile, for single draws and for batches."""
    replay = filled(20, 33)
    for count, rounds in [(1, 4000), (50, 80)]:
        drawn = torch.cat([replay.draw(count).policy_version.clone() for _ in range(rounds)])
        found = torch.bincount(drawn, minlength=33)
        assert not found[:13].any()
        expected = count * rounds / 20
        assert ((found[13:] - expected) ** 2 / expected).sum() < 43.8  # 19 degrees of freedom


def test_neighbours_in_a_batch_are_independent() -> None:
    """With replacement: all pairs turn up equally often, a trajectory beside itself too."""
    replay = filled(5, 5)
    found = torch.zeros(5, 5)
    for _ in range(2500):
        first, second = replay.draw(2).policy_version.tolist()
        found[first, second] += 1
    assert ((found - 100) ** 2 / 100).sum() < 51.2  # 24 degrees of freedom


def test_all_but_statistics_comes_back_as_it_was_added() -> None:
    replay = Replay(SPEC, 8, None, generator())
    batches = [random_batch([3 * i, 3 * i + 1, 3 * i + 2]) for i in range(2)]
    for batch in batches:
        replay.add(batch)
    added = [column for batch in batches for column in split(batch, [1, 1, 1])]
    drawn = replay.draw(40)
    assert drawn.initial_core_state[1].shape == (40, 5)
    for column in split(drawn, [1] * 40):
        fields = column.to_fields()
        for name, expected in added[int(column.policy_version)].to_fields().items():
            if name not in STATISTICS:
                assert torch.equal(fields[name], expected), name


def test_an_episode_is_counted_once() -> None:
    """What ended in a trajectory was counted when it was played, so a draw shows no end."""
    batch = random_batch([0])
    batch.episode_lengths.fill_(7)
    batch.episode_returns.fill_(-21.0)
    replay = Replay(SPEC, 1, None, generator())
    replay.add(batch)
    for count in (3, 3, 2):
        drawn = replay.draw(count)
        assert not drawn.episode_lengths.any()
        assert not drawn.episode_returns.any()
        assert drawn.episode_lengths.shape == (SPEC.unroll_length, count)
    assert batch.episode_lengths.all(), "the batch itself is another's and stays as it is"


def test_what_is_added_is_copied() -> None:
    batch = random_batch([4])
    replay = Replay(SPEC, 2, None, generator())
    replay.add(batch)
    for tensor in batch.to_fields().values():
        tensor.zero_()
    assert replay.draw(1).policy_version.item() == 4
    assert replay.draw(1).observations.any()


def test_a_draw_overwrites_the_one_before() -> None:
    replay = filled(9, 9)
    first = replay.draw(4)
    assert replay.draw(4) is first
    assert replay.draw(5) is not first


def played_frames(columns: int) -> tuple[Tensor, Tensor]:
    """Stacked frames and valid ticks of two unrolls on end, as the emulator's adapter makes them.

    Column b has a game end at tick b, so that ends lie on every row; each first stack of a game is
    zeros under one frame.
    """
    ticks = 2 * FRAMES.unroll_length
    frames = torch.randint(
        1, 256, (ticks + 1, columns, *FRAMES.observation_shape[1:]), generator=generator()
    )
    stacks = torch.zeros(ticks + 1, columns, *FRAMES.observation_shape, dtype=torch.uint8)
    valid = torch.ones(ticks, columns, dtype=torch.bool)
    for column in range(columns):
        valid[column, column] = False
        for row in range(ticks + 1):
            if row and valid[row - 1, column]:
                stacks[row, column, :-1] = stacks[row - 1, column, 1:]
            stacks[row, column, -1] = frames[row, column]
    return stacks, valid


def test_stacked_frames_come_back_bit_for_bit_across_ends_of_episodes() -> None:
    ticks = FRAMES.unroll_length
    stacks, valid = played_frames(2 * ticks)
    replay = Replay(FRAMES, 100, None, generator())
    for version, start in enumerate((0, ticks)):
        batch = FRAMES.with_columns(2 * ticks).allocate()
        batch.observations.copy_(stacks[start : start + ticks + 1])
        batch.valid.copy_(valid[start : start + ticks])
        batch.policy_version.copy_(2 * ticks * version + torch.arange(2 * ticks))
        replay.add(batch)
    seen = set()
    for _ in range(5):
        drawn = replay.draw(100)
        for column, mark in zip(
            split(drawn, [1] * 100), drawn.policy_version.tolist(), strict=True
        ):
            start, index = ticks * (mark // (2 * ticks)), mark % (2 * ticks)
            expected = stacks[start : start + ticks + 1, index]
            assert torch.equal(column.observations[:, 0], expected), mark
            seen.add(mark)
    assert len(seen) == 4 * ticks


@pytest.mark.parametrize("number", [3, 6, 20])
def test_a_state_continues_with_the_same_draws(number: int, tmp_path: Path) -> None:
    """Through a checkpoint's file, with a generator that had another state; empty slots and all."""
    first = filled(6, number)
    first.draw(11)
    torch.save(checkpoints.check_plain(first.state_dict()), tmp_path / "state.pt")
    second = filled(6, 2, seed=99)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert len(second) == len(first) == min(6, number)
    for version in range(100, 112):
        assert_same(first.draw(5), second.draw(5))
        for replay in (first, second):
            replay.add(random_batch([version]))
        assert versions_in(first) == versions_in(second)
    states = [replay.state_dict() for replay in (first, second)]
    assert torch.equal(states[0]["generator"], states[1]["generator"])


def test_the_state_of_an_empty_replay_is_loaded_too() -> None:
    empty, other = Replay(SPEC, 3, None, generator(5)), filled(3, 4)
    other.load_state_dict(empty.state_dict())
    assert len(other) == 0
    for replay in (empty, other):
        replay.add(random_batch([1, 2, 3]))
    assert_same(other.draw(4), empty.draw(4))


@pytest.mark.parametrize(("capacity", "kept"), [(2, {8, 9}), (4, {6, 7, 8, 9}), (9, {6, 7, 8, 9})])
def test_another_capacity_takes_the_newest(capacity: int, kept: set[int]) -> None:
    replay = Replay(SPEC, capacity, None, generator(1))
    replay.load_state_dict(filled(4, 10).state_dict())
    assert versions_in(replay) == kept
    replay.add(random_batch([20]))
    assert versions_in(replay) == {*(kept if capacity == 9 else kept - {min(kept)}), 20}


def test_a_state_of_another_spec_is_refused_and_changes_nothing() -> None:
    replay = filled(4, 4)
    wider = dataclasses.replace(SPEC, observation_shape=(4,))
    for other in (wider, dataclasses.replace(SPEC, core_state_shapes=()), FRAMES):
        with pytest.raises(ValueError, match="another spec"):
            replay.load_state_dict(Replay(other, 4, None, generator()).state_dict())
    assert versions_in(replay) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "changed",
    [
        {"unroll_length": 1},  # would broadcast
        {"observation_shape": (1,)},
        {"observation_dtype": torch.float64},  # would be rounded
        {"core_state_shapes": ((6,),)},  # would leave another's state in the slot
        {"core_state_shapes": ((6,), (5,), (5,))},
    ],
)
def test_a_batch_of_another_spec_is_refused_and_not_added(changed: dict[str, object]) -> None:
    replay = filled(4, 2)
    with pytest.raises(ValueError, match="another spec"):
        replay.add(random_batch([7], dataclasses.replace(SPEC, **changed)))
    assert len(replay) == 2


def test_drawing_from_nothing_says_so() -> None:
    with pytest.raises(LookupError, match="no trajectory was added yet"):
        Replay(SPEC, 4, None, generator()).draw(1)


@pytest.mark.parametrize("count", [0, -1])
def test_drawing_no_trajectories_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"cannot draw {count}"):
        filled(4, 2).draw(count)
