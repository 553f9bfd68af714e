"""The learner: one step of the optimiser, exactly as the pieces it is made of say."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from repertory.actors import Actor
from repertory.algorithms.a2c import A2CConfig, targets
from repertory.environments import describe
from repertory.learners import Learner
from repertory.progress import Stopwatch
from repertory.runtimes.inline import InlineRuntime
from repertory.runtimes.last_words import OutOfTime
from repertory.trajectories import Trajectory, split, stack
from tests.alone import Alone, Line
from tests.probes import Counter

CONFIG = A2CConfig(
    env=partial(Counter, 4, "trunc"),
    num_envs=4,
    unroll_length=6,
    optimizer="rmsprop",
    learning_rate=1e-2,
    clip_norm=None,
    network="mlp",
    hidden_sizes=(8,),
    total_steps=1000,
)


def make(config: A2CConfig = CONFIG, group: Any = None) -> Learner:
    return Learner.create(config, describe(config.environment), group or Alone(), Stopwatch())


def play(config: A2CConfig = CONFIG) -> Trajectory:
    learner = make(config)
    environment = describe(config.environment)
    actor = Actor.create(config, environment, learner.model, Stopwatch(), [0])
    batch = actor.unroll(0).clone()
    actor.close()
    return batch


def parameters(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in learner.model.parameters()])


def learn_once(context: Any, config: A2CConfig, batch: Trajectory, group: Any) -> torch.Tensor:
    """A role that makes one update; the parameters after it."""
    learner = make(config, group)
    assert learner.update(batch, partial(targets, config))
    return parameters(learner)


def test_an_update_moves_parameters_and_counts_valid_transitions_only() -> None:
    learner, batch = make(), play()
    before = parameters(learner)
    assert learner.update(batch, partial(targets, CONFIG))
    assert not torch.equal(parameters(learner), before)
    assert learner.version == 1
    assert learner.env_steps == int(batch.valid.sum()) < batch.valid.numel()


def test_garbage_in_invalid_rows_changes_nothing() -> None:
    clean = play()
    dirty = clean.clone()
    reset_ticks = ~clean.valid
    assert reset_ticks.any()
    for name in ("rewards", "behaviour_log_probs"):
        getattr(dirty, name)[reset_ticks] = math.nan
    dirty.actions[reset_ticks] = 1 - clean.actions[reset_ticks]
    dirty.terminated[reset_ticks] = True
    left, right = make(), make()
    left.update(clean, partial(targets, CONFIG))
    right.update(dirty, partial(targets, CONFIG))
    assert torch.equal(parameters(left), parameters(right))


def test_an_update_that_is_cut_short_leaves_no_state_to_be_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner, batch = make(), play()
    assert learner.update(batch, partial(targets, CONFIG))
    assert learner.state_dict()["updates"] == 1

    def step() -> None:
        raise OutOfTime

    monkeypatch.setattr(learner._optimizer, "step", step)
    with pytest.raises(OutOfTime):
        learner.update(batch, partial(targets, CONFIG))
    with pytest.raises(RuntimeError, match="an update is half made"):
        learner.state_dict()


@pytest.mark.parametrize("normalize", [False, True])
def test_two_learners_on_halves_are_one_on_the_whole(normalize: bool) -> None:
    """Also where the halves have unequal numbers of valid rows."""
    config = replace(CONFIG, normalize_advantages=normalize, epsilon=0.01)
    batch = play(config)
    batch.valid[3:, 0] = False  # as if column 0 reset there
    whole = make(config)
    whole.update(batch, partial(targets, config))
    runtime = InlineRuntime()
    group = runtime.learner_group(make(config).model, 2)
    for rank, half in enumerate(split(batch, [1, 3])):
        runtime.start(f"learner-{rank}", learn_once, config, half, group.member(rank))
    results = runtime.supervise(lambda role, record: None)
    assert torch.equal(results["learner-0"], results["learner-1"])
    torch.testing.assert_close(results["learner-0"], parameters(whole), rtol=0, atol=1e-6)


def test_b19_more_of_the_same_data_is_the_same_update() -> None:
    """Entropy summed for one algorithm, averaged for another. Source: ray-project/ray PR#34779."""
    batch = play()
    once, fourfold = make(), make()
    once.update(batch, partial(targets, CONFIG))
    fourfold.update(stack([batch] * 4), partial(targets, CONFIG))
    torch.testing.assert_close(parameters(once), parameters(fourfold), rtol=0, atol=1e-6)


def test_a_sum_is_a_mean_times_the_count() -> None:
    config = replace(CONFIG, optimizer="adam", epsilon=1e6, learning_rate=1.0)
    batch = play(config)
    mean, total = make(config), make(replace(config, loss_reduction="sum"))
    before = parameters(mean)
    mean.update(batch, partial(targets, config))
    total.update(batch, partial(targets, config))
    # With an epsilon that drowns the root, Adam's step is proportional to the gradient.
    ratio = (parameters(total) - before) / (parameters(mean) - before)
    count = int(batch.valid.sum())
    assert ratio.nanmedian().item() == pytest.approx(count, rel=0.01)


def test_clipping_bounds_the_step_and_reports_the_norm_before() -> None:
    config = replace(CONFIG, optimizer="adam", epsilon=1e6, learning_rate=1e6, clip_norm=1e-3)
    learner, batch, line = make(config), play(config), Line()
    before = parameters(learner)
    learner.update(batch, partial(targets, config))
    moved = (parameters(learner) - before).norm().item()
    assert moved == pytest.approx(1e-3, rel=0.02)  # lr / epsilon is 1: the step is the gradient
    learner.finish(line)
    assert line.records[-1]["gradient_norm_sum"] > 1e-3


def test_schedules_are_applied_as_logged() -> None:
    config = replace(
        CONFIG,
        total_steps=100,
        learning_rate_end=0.0,
        entropy_cost=0.1,
        entropy_cost_end=0.0,
        log_every_steps=1,
    )
    learner, batch, line = make(config), play(config), Line()
    applied = []
    while not learner.finished:
        fraction = learner.env_steps / 100
        learner.update(batch, partial(targets, config))
        applied.append(learner._optimizer.param_groups[0]["lr"])
        learner.report(line)
        assert line.records[-1]["learning_rate"] == applied[-1]
        assert applied[-1] == pytest.approx(1e-2 * (1 - fraction))
        assert line.records[-1]["entropy_cost"] == pytest.approx(0.1 * (1 - fraction))
    assert len(set(applied)) == len(applied) > 2


def test_b103_a_gradient_that_is_not_finite_leaves_the_parameters_alone() -> None:
    """One bad gradient kills the model silently.

    Source: pytorch/pytorch#46849; facebookresearch/habitat-lab PR#2229.
    """
    for bad in (math.inf, math.nan):
        learner, batch = make(), play()
        before = parameters(learner)
        batch.rewards[0, 0] = bad
        with pytest.raises(FloatingPointError, match="update 0 has a gradient that is not finite"):
            learner.update(batch, partial(targets, CONFIG))
        assert torch.equal(parameters(learner), before)


def test_b103_an_update_that_is_not_finite_can_be_skipped_and_is_told() -> None:
    """One bad gradient kills the model silently.

    Source: pytorch/pytorch#46849; facebookresearch/habitat-lab PR#2229.
    """
    config = replace(CONFIG, not_finite="skip", log_every_steps=1)
    learner, good, line = make(config), play(config), Line()
    bad = good.clone()
    bad.rewards[0, 0] = math.nan
    before = parameters(learner)
    assert learner.update(bad, partial(targets, config))
    assert torch.equal(parameters(learner), before)
    assert (learner.updates, learner.env_steps) == (0, 0)
    assert learner.update(good, partial(targets, config))
    assert not torch.equal(parameters(learner), before)
    learner.report(line)
    window, event = line.records
    assert window["counts"] == {"updates_refused": 1}
    assert event["event"] == "refused"
    assert "update 0 has a gradient that is not finite" in event["message"]
    for _ in range(99):
        assert learner.update(bad, partial(targets, config))
    with pytest.raises(FloatingPointError, match="not finite"):
        learner.update(bad, partial(targets, config))


def test_the_last_row_bootstraps_without_a_graph() -> None:
    """No gradient flows into targets: the critic's last value is a constant."""
    learner, batch = make(), play()
    estimates, _ = learner._objective.estimate(batch)
    made = targets(CONFIG, estimates)
    assert not made.values.requires_grad
    assert not made.advantages.requires_grad


def test_windows_come_at_multiples_of_the_log_interval() -> None:
    config = replace(CONFIG, log_every_steps=50, total_steps=210)
    learner, batch, line = make(config), play(config), Line()
    while not learner.finished:
        learner.update(batch, partial(targets, config))
        learner.report(line)
    learner.finish(line)
    windows = [record for record in line.records if record["kind"] == "window"]
    steps = [window["env_steps"] for window in windows]
    assert steps == sorted(set(steps))
    assert [step // 50 for step in steps[:-1]] == [1, 2, 3, 4]
    assert sum(window["transitions"] for window in windows) == learner.env_steps
