"""Seeds of environments, one for every column of every actor of a run.

What is here: the seeds. What is not here: the generators of roles (policies, replay), which are
spawned from the same root under other keys.
"""

from __future__ import annotations

import numpy as np

NUM_SEEDS = 2**31
"""Environments take seeds in [0, 2**31): the range of a C int, as the ALE wants it."""

MAX_COLUMNS = 2**15
"""Columns an actor can have; with `MAX_ACTORS` actors they use up all seeds."""

MAX_ACTORS = NUM_SEEDS // MAX_COLUMNS

_FACTORS = (0x45D9F3B, 0x45D9F3B)
"""Odd, so that a product loses nothing; of the well-known integer hash with shifts of 16."""

_SPAWN_KEY = (0x656E76,)  # "env": what separates these numbers from those of other roles


def seeds_for(root_seed: int, actor: int, num_columns: int) -> list[int]:
    """Seeds for the columns of one actor, the same whenever and wherever they are asked for.

    No two columns of a run share a seed, so no two actors play the same game. Independent draws
    would not do: of 16,384 of them, two coincide in one run out of 17. Instead the run's
    `SeedSequence` draws where in the ring of all seeds the first column stands, and an odd stride
    from each column to the next; an odd stride comes back to a seed only after all 2**31. What
    stands there is mixed one to one, so that an environment that looks at a part of its seed only
    (`seed % 64` for its level, say) finds different ones too.

    Args:
        root_seed: The run's seed, not negative.
        actor: Index of the actor. Whatever else plays, such as an evaluator, takes an index that
            no actor has.
        num_columns: B.

    Returns:
        One int in [0, 2**31) a column. An actor that is given more columns keeps the seeds of those
        it had.

    Raises:
        ValueError: More actors or columns than there are seeds for.
    """
    if not 0 <= actor < MAX_ACTORS:
        raise ValueError(f"actor {actor} is not one of 0..{MAX_ACTORS - 1}")
    if not 0 <= num_columns <= MAX_COLUMNS:
        raise ValueError(f"an actor can have 0..{MAX_COLUMNS} columns, not {num_columns}")
    sequence = np.random.SeedSequence(root_seed, spawn_key=_SPAWN_KEY)
    start, half_stride = (int(word) for word in sequence.generate_state(2, np.uint32))
    stride = 2 * half_stride + 1
    first = actor * MAX_COLUMNS
    places = ((start + stride * (first + column)) % NUM_SEEDS for column in range(num_columns))
    return [_mixed(place) for place in places]


def _mixed(place: int) -> int:
    """A permutation of 0..2**31 - 1 in which every bit depends on all: each step can be undone."""
    for factor in _FACTORS:
        place ^= place >> 16
        place = place * factor % NUM_SEEDS
    return place ^ place >> 16
