"""The trajectory type: stacking, splitting, and frames kept once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from repertory.environments import EnvironmentConfig, make_vector
from repertory.runtimes.shared_memory import shared_zeros
from repertory.trajectories import (
    Allocate,
    Trajectory,
    TrajectorySlots,
    TrajectorySpec,
    pack_frames,
    slot_bytes,
    split,
    stack,
    unpack_frames,
)

SPEC = TrajectorySpec(
    unroll_length=4,
    num_columns=3,
    observation_shape=(2, 5),
    observation_dtype=torch.uint8,
    action_shape=(),
    action_dtype=torch.int64,
    core_state_shapes=((6,), (6,)),
)


def random_trajectory(spec: TrajectorySpec, seed: int) -> Trajectory:
    generator = torch.Generator().manual_seed(seed)
    trajectory = spec.allocate()
    for tensor in trajectory.to_fields().values():
        drawn = torch.randint(
            0, 2 if tensor.dtype == torch.bool else 200, tensor.shape, generator=generator
        )
        tensor.copy_(drawn)
    return trajectory


def assert_equal(left: Trajectory, right: Trajectory) -> None:
    expected = right.to_fields()
    for name, tensor in left.to_fields().items():
        assert torch.equal(tensor, expected[name]), name


def test_stack_and_split_are_opposites() -> None:
    parts = [random_trajectory(SPEC, seed) for seed in range(3)]
    batch = stack(parts)
    assert batch.num_columns == 9
    assert batch.initial_core_state[0].shape == (9, 6)
    for part, again in zip(parts, split(batch, [3, 3, 3]), strict=True):
        assert_equal(part, again)


def test_split_pieces_are_views_that_write_through() -> None:
    batch = SPEC.with_columns(6).allocate()
    part = random_trajectory(SPEC, 1)
    split(batch, [3, 3])[1].copy_(part)
    assert_equal(split(batch, [3, 3])[1], part)
    assert not split(batch, [3, 3])[0].observations.any()


def test_stacking_nothing_or_different_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        stack([])
    longer = TrajectorySpec(**{**vars(SPEC), "unroll_length": 5})
    with pytest.raises(ValueError, match=r"different lengths: \[4, 5\]"):
        stack([SPEC.allocate(), longer.allocate()])


def test_splitting_into_other_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="do not add up to 3"):
        split(SPEC.allocate(), [2, 2])


def test_resets_follow_the_ticks_that_merely_reset() -> None:
    trajectory = SPEC.allocate()
    trajectory.valid.fill_(True)
    trajectory.valid[1, 2] = False
    expected = torch.zeros(5, 3, dtype=torch.bool)
    expected[2, 2] = True
    assert torch.equal(trajectory.resets, expected)


@pytest.mark.parametrize("allocate", [torch.zeros, shared_zeros])
def test_a_slot_gives_back_what_was_written(allocate: Allocate) -> None:
    slots = TrajectorySlots(SPEC, 2, allocate)
    parts = [random_trajectory(SPEC, seed) for seed in (5, 6)]
    for slot, part in enumerate(parts):
        slots.write(slot, part)
    for slot, part in enumerate(parts):
        out = SPEC.allocate()
        slots.read(slot, out)
        assert_equal(out, part)
    assert slots.nbytes == 2 * slot_bytes(SPEC)


def test_views_of_several_slots_are_those_of_each() -> None:
    slots = TrajectorySlots(SPEC, 3, torch.zeros)
    for slot in range(3):
        slots.write(slot, random_trajectory(SPEC, slot))
    several = slots.views(slice(1, 3))
    for slot in (1, 2):
        for name, view in slots.views(slot).items():
            assert torch.equal(several[name][slot - 1], view), name
    several["rewards"][0].fill_(7.0)
    assert (slots.views(1)["rewards"] == 7.0).all()


def test_packed_frames_hold_each_frame_once() -> None:
    observations = torch.stack([torch.arange(t, t + 4).float() for t in range(6)])
    packed = pack_frames(observations[:, None, :, None], 4)
    assert packed[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_packed_frames_of_a_real_game_come_back_bit_for_bit() -> None:
    """Over game ends, so that the emulator's zero padding after a reset is met as well."""
    seeds, rows = [3, 4], 700
    environment = make_vector(EnvironmentConfig("ALE/Breakout-v5", protocol="dqn"), seeds)
    generator = np.random.default_rng(0)
    observations, valid = [environment.reset()], []
    for _ in range(rows):
        tick = environment.step(generator.integers(0, 4, len(seeds)))
        observations.append(tick.observations)
        valid.append(tick.valid)
    environment.close()
    whole = torch.from_numpy(np.stack(observations))
    resets = torch.cat([torch.zeros(1, 2, dtype=torch.bool), ~torch.from_numpy(np.stack(valid))])
    assert resets.sum() >= 2, "no game ended: the test shows nothing"
    for start in range(0, rows - 20, 10):  # windows that cut episodes everywhere
        window = slice(start, start + 21)
        row_resets = resets[window].clone()
        row_resets[0] = False
        out = torch.empty_like(whole[window])
        unpack_frames(pack_frames(whole[window], 4), row_resets, out)
        assert torch.equal(out, whole[window])


def test_slots_of_stacked_frames_are_nearly_four_times_smaller() -> None:
    stacked = TrajectorySpec(
        unroll_length=20,
        num_columns=1,
        observation_shape=(4, 84, 84),
        observation_dtype=torch.uint8,
        action_shape=(),
        action_dtype=torch.int64,
        frame_stack=4,
    )
    plain = TrajectorySpec(**{**vars(stacked), "frame_stack": 1})
    ratio = slot_bytes(plain) / slot_bytes(stacked)
    assert ratio == pytest.approx(84 / 24, rel=0.01)


def test_a_column_of_which_nothing_is_valid_resets_nothing() -> None:
    """A trajectory that came too late cut the core's pass into single rows for all others."""
    batch = TrajectorySpec(3, 2, (1,), torch.float32, (), torch.int64).allocate()
    batch.valid[:] = torch.tensor([[True, False], [False, False], [True, False]])
    assert batch.resets.tolist() == [[False, False], [False, False], [True, False], [False, False]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_memory_reaches_a_gpu_whole() -> None:
    pinned = SPEC.allocate(pinned=True)
    pinned.copy_(random_trajectory(SPEC, 0))
    there = pinned.to(torch.device("cuda", 0))
    for name, tensor in there.to_fields().items():
        assert torch.equal(tensor.cpu(), pinned.to_fields()[name]), name
