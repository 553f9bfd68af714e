"""What IMPALA does with what has come: dropping, replay, passes, and the surrogate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from repertory import models
from repertory.actors import Actor
from repertory.algorithms.impala import (
    IMPALAConfig,
    learn_from,
    make_replay,
    targets,
    with_drawn,
)
from repertory.config import ConfigError
from repertory.environments import describe
from repertory.learners import Learner
from repertory.progress import Stopwatch
from repertory.replay import Replay
from repertory.training import train
from repertory.trajectories import Trajectory, split
from tests.alone import Alone, Line
from tests.probes import Counter

CONFIG = IMPALAConfig(
    env=partial(Counter, 4, "trunc"),
    num_envs=4,
    unroll_length=6,
    optimizer="rmsprop",
    learning_rate=1e-2,
    clip_norm=None,
    network="mlp",
    hidden_sizes=(8,),
    total_steps=1_000_000,
)
SPEC = describe(CONFIG.environment)


def make(config: IMPALAConfig = CONFIG, version: int = 0) -> Learner:
    learner = Learner.create(config, SPEC, Alone(), Stopwatch())
    learner.version = version
    return learner


def make_kept(config: IMPALAConfig, learner: Learner) -> Replay:
    replay = make_replay(Line(), 0, config, SPEC, learner)
    assert replay is not None
    return replay


def play(versions: Sequence[int] = (0, 0, 0, 0), seed: int = 1) -> Trajectory:
    """An unroll in which a column has one whole episode; with rewards that differ."""
    config = replace(CONFIG, num_envs=len(versions), seed=seed)
    actor = Actor.create(config, SPEC, models.create_on_cpu(CONFIG, SPEC), Stopwatch(), [0])
    batch = actor.unroll(0).clone()
    actor.close()
    batch.rewards += torch.randn(batch.rewards.shape, generator=torch.Generator().manual_seed(seed))
    batch.policy_version.copy_(torch.tensor(versions))
    return batch


def parameters(learner: Learner) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in learner.model.parameters()])


def steps_taken(learner: Learner) -> set[float]:
    """How often the optimiser has stepped, as its own state has it."""
    state = learner.state_dict()["optimizer"]["state"]
    return {float(entry["step"]) for entry in state.values()}


# ---------------------------------------------------------------------------------------------
# Dropping
# ---------------------------------------------------------------------------------------------


def test_a_trajectory_that_is_too_old_changes_nothing_and_is_counted() -> None:
    config = replace(CONFIG, max_lag=2)
    ends = []
    for garbage in (0.0, math.nan):
        learner, batch = make(config, version=5), play([5, 3, 2, 0])
        young_steps = int(batch.valid[:, :2].sum())
        for field in ("rewards", "behaviour_log_probs"):
            getattr(batch, field)[:, 2:] = garbage
        assert learn_from(batch, None, config, learner)
        ends.append(parameters(learner))
        assert learner.window.counts == {"trajectories_dropped": 2}
        assert learner.env_steps == learner.window.transitions == young_steps
        assert learner.version == 6
        assert len(learner.window.episodes) == 4  # it was played all the same
    assert torch.equal(*ends)
    young = make(config, version=5)
    learn_from(split(play([5, 3, 2, 0]), [2, 2])[0], None, config, young)
    torch.testing.assert_close(ends[0], parameters(young), rtol=0, atol=1e-6)


def test_the_lag_that_is_told_is_of_what_was_learned_from() -> None:
    config = replace(CONFIG, max_lag=2)
    learner = make(config, version=5)
    learn_from(play([5, 3, 2, 0]), None, config, learner)
    assert learner.window.lags == {0: 1, 2: 1}


def test_where_all_is_too_old_there_is_no_update_and_no_version() -> None:
    config = replace(CONFIG, max_lag=2)
    learner = make(config, version=9)
    before = parameters(learner)
    assert learn_from(play(), None, config, learner)
    assert torch.equal(parameters(learner), before)
    assert (learner.version, learner.env_steps, learner.window.updates) == (9, 0, 0)
    assert steps_taken(learner) == set()
    assert learner.window.counts == {"trajectories_dropped": 4}
    assert not learner.window.lags
    assert not learner.window.means, "no ratio was seen, so there is none to tell"


def test_what_was_dropped_is_not_kept_for_replay() -> None:
    """It would come back as a column without a single transition."""
    config = replace(CONFIG, max_lag=2, replay_share=0.5)
    learner = make(config, version=5)
    replay = make_kept(config, learner)
    learn_from(play([5, 3, 2, 0]), replay, config, learner)
    assert len(replay) == 2
    assert set(replay.draw(50).policy_version.tolist()) == {5, 3}


# ---------------------------------------------------------------------------------------------
# Replay
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "drawn"), [(0.25, 1), (0.5, 4), (0.75, 12)])
def test_the_share_of_a_batch_that_is_drawn_and_its_age(share: float, drawn: int) -> None:
    """Of four fresh columns and what is drawn beside them, `share` is drawn, of older versions."""
    config = replace(CONFIG, replay_share=share)
    learner = make(config)
    replay = make_kept(config, learner)
    alone = with_drawn(play(), replay, config, learner)
    assert alone.num_columns == 4
    assert not learner.window.means, "nothing was drawn, so there is nothing to tell"
    replay.add(play([0, 0, 0, 0]))
    replay.add(play([4, 4, 4, 4]))
    learner.version = 6
    fresh = play([6, 6, 5, 5])
    batch = with_drawn(fresh, replay, config, learner)
    assert batch.num_columns == 4 + drawn
    mine, theirs = split(batch, [4, drawn])
    for name, tensor in fresh.to_fields().items():
        assert torch.equal(mine.to_fields()[name], tensor)
    assert set(theirs.policy_version.tolist()) <= {0, 4}
    ages = [6 - version for version in theirs.policy_version.tolist()]
    assert learner.window.means["replay_age"] == (pytest.approx(sum(ages) / drawn), 1)
    assert learner.window.means["replay_ratio"] == (drawn / 4, 1)


def test_what_is_drawn_was_learned_from_before_and_counts_nothing_but_in_the_gradient() -> None:
    """Episodes, env steps and lags are those of the fresh columns, each once."""
    config = replace(CONFIG, replay_share=0.5, passes=2)
    learner, fresh_steps = make(config), 0
    replay = make_kept(config, learner)
    for update in range(5):
        batch = play([update] * 4, seed=1 + update)
        fresh_steps += int(batch.valid.sum())
        assert learn_from(batch, replay, config, learner)
        assert len(replay) == 4 * (update + 1)
    assert learner.env_steps == fresh_steps
    assert len(learner.window.episodes) == 5 * 4
    assert learner.window.lags == {0: 5 * 4}
    # In the first update there was nothing to draw; all unrolls have as many transitions.
    assert learner.window.transitions == 2 * (fresh_steps + fresh_steps * 4 // 5)
    ages, number = learner.window.means["replay_age"]
    assert number == 4
    # Counted in updates, of which a batch makes as many as it has passes.
    assert 2 * 4 <= ages <= 2 * (1 + 2 + 3 + 4)


@pytest.mark.parametrize(("share", "updates", "drawn"), [(0.05, 19, 4), (0.1, 9, 4), (0.4, 3, 8)])
def test_a_share_that_is_no_whole_number_of_columns_is_right_on_average(
    share: float, updates: int, drawn: int
) -> None:
    """One column at least was drawn for each batch, so that 5 % of four columns were 20 %."""
    config = replace(CONFIG, replay_share=share)
    learner = make(config)
    replay = make_kept(config, learner)
    replay.add(play())
    columns = 0
    for update in range(updates):
        learner.version = update
        columns += with_drawn(play(), replay, config, learner).num_columns
    assert columns - 4 * updates == drawn
    assert drawn / columns == pytest.approx(share)
    told, number = learner.window.means["replay_ratio"]
    assert (number, told) == (updates, pytest.approx(drawn / 4))


def test_a_replay_without_room_for_a_single_trajectory_is_refused_in_words(tmp_path: Path) -> None:
    config = replace(
        CONFIG, replay_share=0.5, replay_max_bytes=10, runtime="inline", run_dir=tmp_path / "run"
    )
    with pytest.raises(ConfigError, match=r"replay_max_bytes must be at least \d+: a column's"):
        train(config)


def test_replay_changes_the_update() -> None:
    """So that the tests above cannot pass with a batch that never grew."""
    ends = []
    for share in (0.0, 0.5):
        config = replace(CONFIG, replay_share=share)
        learner = make(config)
        replay = make_kept(config, learner) if share else None
        for update in range(2):
            learn_from(play([update] * 4, seed=1 + update), replay, config, learner)
        ends.append(parameters(learner))
    assert not torch.equal(*ends)


# ---------------------------------------------------------------------------------------------
# Passes and the surrogate
# ---------------------------------------------------------------------------------------------


def test_three_passes_make_three_updates_and_one_version() -> None:
    config = replace(CONFIG, passes=3)
    learner, batch = make(config), play()
    assert learn_from(batch, None, config, learner)
    assert learner.version == 1
    assert steps_taken(learner) == {3.0}
    assert learner.window.updates == 3
    assert learner.env_steps == int(batch.valid.sum())
    assert learner.window.lags == {0: 4}
    assert len(learner.window.episodes) == 4
    again = make()
    for _ in range(3):
        learn_from(play(), None, CONFIG, again)
    assert torch.equal(parameters(learner), parameters(again))


def test_a_checkpoint_counts_updates_as_the_metrics_do() -> None:
    config = replace(CONFIG, passes=3)
    learner, line = make(config), Line()
    for version in range(2):
        learn_from(play([version] * 4), None, config, learner)
    state = learner.finish(line)
    assert state["updates"] == line.records[-1]["updates"] == 6


def test_the_clipped_surrogate_starts_as_the_plain_gradient_and_parts_from_it() -> None:
    """With ratio 1 their first updates are the same bits; the second has other ratios."""
    ends: dict[int, list[Tensor]] = {1: [], 2: []}
    for passes, parameters_after in ends.items():
        for surrogate in ("gradient", "clip"):
            config = replace(CONFIG, passes=passes, surrogate=surrogate)  # type: ignore[arg-type]
            learner, batch = make(config), play()
            estimates, _ = learner._objective.estimate(batch)
            # Acting and learning may differ in the last digit; here the ratios are to be 1.
            batch.behaviour_log_probs.copy_(estimates.target_log_probs.detach())
            learn_from(batch, None, config, learner)
            parameters_after.append(parameters(learner))
    assert torch.equal(*ends[1])
    assert not torch.equal(*ends[2])


def test_advantages_under_the_surrogate_are_without_their_weight() -> None:
    """The surrogate multiplies by the ratio itself; the value targets are the same."""
    batch = play()
    batch.behaviour_log_probs += torch.randn(
        batch.behaviour_log_probs.shape, generator=torch.Generator().manual_seed(3)
    )
    estimates, _ = make()._objective.estimate(batch)
    observed: dict[str, float] = {}
    observe: Any = observed.__setitem__
    weighted = targets(CONFIG, observe, estimates)
    plain = targets(replace(CONFIG, surrogate="clip"), observe, estimates)
    rho = (estimates.target_log_probs - estimates.behaviour_log_probs).exp().clamp(max=1.0)
    torch.testing.assert_close(weighted.advantages, rho.detach() * plain.advantages)
    assert not torch.allclose(weighted.advantages, plain.advantages)
    assert torch.equal(weighted.values, plain.values)
    assert 0.0 < observed["rho_clipped_share"] < 1.0
    assert 0.0 < observed["effective_sample_share"] < 1.0
