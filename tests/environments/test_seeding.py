"""Seeds: distinct in a run, and the same whenever they are asked for."""

import numpy as np
import pytest

from repertory.environments import EnvironmentConfig, make_vector, seeds_for
from repertory.environments.seeding import MAX_ACTORS, MAX_COLUMNS, NUM_SEEDS, _mixed


def test_no_two_columns_of_a_run_share_a_seed():
    for root_seed in (0, 1, 12345):
        seeds = [seed for actor in range(256) for seed in seeds_for(root_seed, actor, 64)]
        assert len(set(seeds)) == 256 * 64
        assert min(seeds) >= 0
        assert max(seeds) < 2**31


def test_the_most_columns_of_the_last_actors_share_no_seed():
    last = seeds_for(7, MAX_ACTORS - 1, MAX_COLUMNS)
    before = seeds_for(7, MAX_ACTORS - 2, MAX_COLUMNS)
    assert len({*last, *before}) == 2 * MAX_COLUMNS


def test_seeds_are_what_they_were_in_earlier_versions():
    assert seeds_for(1, 0, 3) == [252158557, 369680723, 580375554]
    assert seeds_for(1, 1, 2) == [1139245761, 39292353]


def test_a_part_of_the_seed_differs_between_columns_and_actors_too():
    """Levels chosen by `seed % 64` were the same for every actor when seeds stood in a ring."""
    for root in range(5):
        across = {seeds_for(root, actor, 1)[0] % 64 for actor in range(64)}
        along = {seed % 64 for seed in seeds_for(root, 0, 64)}
        assert min(len(across), len(along)) > 30  # 40 are to be expected of draws


def test_seeds_are_mixed_one_to_one():
    """So that no two columns meet: each step of the mixing can be undone."""
    drawn = np.random.default_rng(0).integers(0, NUM_SEEDS, 20_000).tolist()
    places = {*drawn, *range(20_000), *range(NUM_SEEDS - 20_000, NUM_SEEDS)}
    assert len({_mixed(place) for place in places}) == len(places)


def test_more_columns_keep_the_seeds_of_those_there_were():
    assert seeds_for(3, 2, 8)[:4] == seeds_for(3, 2, 4)


def test_another_root_gives_other_seeds():
    assert not set(seeds_for(1, 0, 64)) & set(seeds_for(2, 0, 64))


@pytest.mark.parametrize(
    ("actor", "num_columns"), [(-1, 1), (MAX_ACTORS, 1), (0, -1), (0, MAX_COLUMNS + 1)]
)
def test_more_actors_or_columns_than_seeds_are_refused(actor, num_columns):
    with pytest.raises(ValueError, match="not"):
        seeds_for(1, actor, num_columns)


def test_two_actors_never_play_the_same_game():
    """Source: hill-a/stable-baselines#79, DLR-RM/stable-baselines3#2097 (seed + index overlaps)."""
    first = []
    for actor in range(3):
        vector = make_vector(EnvironmentConfig("CartPole-v1"), seeds_for(1, actor, 4))
        first.append(vector.reset())
        vector.close()
    assert len(np.unique(np.concatenate(first), axis=0)) == 12


@pytest.mark.parametrize("seeds", [[], [-1], [2**31], [0, 2**31]])
def test_seeds_out_of_range_are_refused(seeds):
    with pytest.raises(ValueError, match="each in"):
        make_vector(EnvironmentConfig("CartPole-v1"), seeds)
