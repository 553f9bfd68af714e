"""Learning from what another policy played: what the correction is good for, in numbers.

Each test runs the learner with IMPALA's own targets, and once more with the behaviour policy's
log-probabilities replaced by the learner's, which is the same without any correction.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from repertory.actors import Actor
from repertory.algorithms import impala
from repertory.algorithms.impala import IMPALAConfig
from repertory.environments import describe
from repertory.learners import Learner
from repertory.objective import Estimates
from repertory.progress import Stopwatch
from repertory.targets import Targets
from tests.alone import Alone
from tests.markov import BEHAVIOUR, DISCOUNT, TARGET, Process, Table, clipped_policy, value_of

pytestmark = pytest.mark.learning

# An epsilon that drowns the root makes plain gradient descent of Adam; see `rate`.
PLAIN_DESCENT: dict[str, Any] = {"optimizer": "adam", "epsilon": 1e6, "clip_norm": None}


def rate(step: float) -> float:
    """The learning rate that makes plain steps of `step` times the gradient."""
    return step * float(PLAIN_DESCENT["epsilon"])


def targets(config: IMPALAConfig, estimates: Estimates, *, corrected: bool) -> Targets:
    """Those of IMPALA, or the same as if the learner's own policy had played."""
    if not corrected:
        own = estimates.target_log_probs.detach()
        estimates = replace(estimates, behaviour_log_probs=own)
    return impala.targets(config, lambda name, value: None, estimates)


def learned_values(*, corrected: bool, rho_clip: float) -> Tensor:
    """What the critic of a fixed policy has learned from what another fixed policy played."""
    config = IMPALAConfig(
        env=Process,
        num_envs=32,
        unroll_length=8,
        discount=DISCOUNT,
        rho_clip=rho_clip,
        entropy_cost=0.0,
        value_cost=1.0,
        learning_rate=rate(1.0),
        learning_rate_end=0.0,
        total_steps=120_000,
        **PLAIN_DESCENT,
    )
    spec = describe(config.environment)
    model = Table(TARGET.log())
    learner = Learner(model, config, Alone(), Stopwatch())
    actor = Actor.create(config, spec, Table(BEHAVIOUR.log()), Stopwatch(), [0])

    def of_the_critic_alone(estimates: Estimates) -> Targets:
        made = targets(config, estimates, corrected=corrected)
        return Targets(made.values, torch.zeros_like(made.advantages))

    while not learner.finished:
        assert learner.update(actor.unroll(0), of_the_critic_alone)
    actor.close()
    assert torch.equal(model.logits, TARGET.log().float()), "the policies were to stay"
    return model.values.detach().double()


@pytest.mark.parametrize(
    ("settings", "policy"),
    [
        ({"corrected": True, "rho_clip": 1000.0}, TARGET),
        ({"corrected": True, "rho_clip": 1.0}, clipped_policy(1.0)),
        ({"corrected": False, "rho_clip": 1000.0}, BEHAVIOUR),
    ],
    ids=["high-clips", "clips-of-1", "no-correction"],
)
def test_the_critic_arrives_at_the_value_of_its_policy_in_closed_form(
    settings: dict[str, Any], policy: Tensor
) -> None:
    """High clips: of the target policy. No correction: of the one that played."""
    assert (TARGET / BEHAVIOUR).max() < 1000.0
    found, expected = learned_values(**settings), value_of(policy)
    distance = (found - expected).abs().max().item()
    others = [
        (found - value_of(other)).abs().max().item()
        for other in (TARGET, clipped_policy(1.0), BEHAVIOUR)
        if other is not policy and not torch.equal(other, policy)
    ]
    assert distance < 0.1, (found, expected)
    assert len(others) == 2
    assert min(others) > 3 * distance, (distance, others)


UPDATES_BEHIND = 16


def reached_in_the_chain(seed: int, *, corrected: bool) -> float:
    """Mean return of the last hundred episodes, played and learned with a lag that is forced."""
    config = IMPALAConfig(
        env="repertory/Chain-v0",
        num_envs=16,
        unroll_length=10,
        discount=1.0,
        entropy_cost=0.05,
        # Sixteen steps of this size change the policy altogether; the critic makes smaller ones.
        learning_rate=rate(100.0),
        value_cost=0.02,
        total_steps=1_000_000,
        seed=seed,
        **PLAIN_DESCENT,
    )
    spec = describe(config.environment)
    start = torch.zeros(*(spec.observation_space.shape or ()), 2)
    model, player = Table(start), Table(start)
    learner = Learner(model, config, Alone(), Stopwatch())
    actor = Actor.create(config, spec, player, Stopwatch(), [0])
    versions: deque[dict[str, Tensor]] = deque(maxlen=UPDATES_BEHIND + 1)
    returns: deque[float] = deque(maxlen=100)
    for update in range(300):
        versions.append({name: value.clone() for name, value in model.state_dict().items()})
        player.load_state_dict(versions[0])
        batch = actor.unroll(max(0, update - UPDATES_BEHIND))
        returns.extend(batch.episode_returns[batch.episode_lengths > 0].tolist())
        assert learner.update(
            batch, lambda estimates: targets(config, estimates, corrected=corrected)
        )
    actor.close()
    assert learner.window.lags[UPDATES_BEHIND] == 16 * (300 - UPDATES_BEHIND)
    return statistics.mean(returns)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_what_is_played_sixteen_updates_behind_is_learned_from_only_with_the_correction() -> None:
    """Walking on looks bad as long as the later places are not learned.

    Without the correction it is unlearned there sixteen times over, however unlikely it has become
    meanwhile, and is never tried again: 0.1, by leaving at once. With it, what has become unlikely
    weighs little: 0.84, the optimum.
    """
    reached = {
        corrected: [reached_in_the_chain(seed, corrected=corrected) for seed in range(1, 6)]
        for corrected in (True, False)
    }
    said = f"mean returns with the correction {reached[True]}, without {reached[False]}"
    assert statistics.median(reached[True]) > 0.7, said
    assert statistics.median(reached[False]) < 0.3, said
