"""The worker of A3C: what it pushes is the gradient of its own batch, at its own parameters."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from repertory import models
from repertory.actors import Actor
from repertory.algorithms.a3c import A3CConfig, targets
from repertory.console import progress_line
from repertory.environments import describe
from repertory.objective import Objective
from repertory.optimizers import load_in_place, make_optimizer, prepare_state
from repertory.parameters import move_towards, travelling_tensors
from repertory.progress import EntropyWatch, Progress, Stopwatch, Window
from repertory.runtimes.inline import InlineRuntime
from repertory.trajectories import Trajectory
from repertory.workers import Worker
from tests.alone import Line
from tests.probes import Counter

CONFIG = A3CConfig(
    env=partial(Counter, 4, "trunc"),
    num_envs=4,
    unroll_length=6,
    learning_rate=1.0,
    clip_norm=None,
    network="mlp",
    hidden_sizes=(8,),
    total_steps=1_000_000,
)
SPEC = describe(CONFIG.environment)


class Shared:
    """A shared model in this process, and workers at it; no runtime takes turns for them."""

    def __init__(
        self, num_workers: int = 1, config: A3CConfig = CONFIG, dtype: torch.dtype = torch.float32
    ) -> None:
        self.config = config
        self.model = models.create_on_cpu(config, SPEC).to(dtype)
        optimizer = SGD(self.model.parameters(), lr=1.0)
        shared = InlineRuntime().shared_model(
            self.model, optimizer, num_workers, lock=False, shared_statistics=True
        )
        self.ends = [shared.worker(index)._end for index in range(num_workers)]

    def worker(self, index: int = 0, **settings: Any) -> Worker:
        return Worker.create(
            self.config, SPEC, self.ends[index], Stopwatch(), index=index, **settings
        )

    @property
    def parameters(self) -> Tensor:
        return torch.cat([p.detach().flatten().clone() for p in self.model.parameters()])

    def gradient_of(self, batch: Trajectory) -> Tensor:
        """Of a batch at the shared parameters, made with a model of its own."""
        model = models.create_on_cpu(self.config, SPEC)
        move_towards(travelling_tensors(model), travelling_tensors(self.model), 1.0)
        objective = Objective(model, self.config)
        estimates, entropies = objective.estimate(batch)
        made = targets(self.config, estimates)
        losses = objective.differentiate(estimates, entropies, made, self.config.entropy_cost)
        objective.reduce(int(losses.count))
        return objective.gradient.clone()


def play(seed: int = 1, config: A3CConfig = CONFIG, version: int = 0) -> Trajectory:
    config = replace(config, seed=seed)
    actor = Actor.create(config, SPEC, models.create_on_cpu(config, SPEC), Stopwatch(), [0])
    batch = actor.unroll(version).clone()
    batch.rewards += torch.randn(batch.rewards.shape, generator=torch.Generator().manual_seed(seed))
    actor.close()
    return batch


TARGETS = partial(targets, CONFIG)


@pytest.mark.parametrize("rebuilt", [False, True])
def test_b33_every_update_is_minus_its_own_batchs_gradient(rebuilt: bool) -> None:
    """Gradients copied only while the shared ones are empty: trained on the first batch for ever.

    Source: ikostrikov/pytorch-a3c#20, #25, #55, #79, PR#9; dgriff777/rl_a3c_pytorch#25, #17;
    greydanus/baby-a3c#3; mimoralea/gdrl#25.
    """
    shared = Shared()
    worker = shared.worker()
    for seed in (1, 2, 3):
        if rebuilt:
            worker = shared.worker()
        assert worker.pull()
        batch = play(seed)
        before, gradient = shared.parameters, shared.gradient_of(batch)
        assert gradient.norm() > 0
        assert worker.push(batch, TARGETS)
        assert torch.equal(shared.parameters, before - gradient)


def test_b34_gradients_do_not_pile_up_in_the_worker() -> None:
    """`zero_grad` that reached the shared parameters only: norms g, 2g, 3g instead of g, g, g.

    Source: pytorch/pytorch PR#92731; pytorch/examples PR#1172; MorvanZhou/pytorch-A3C#21.
    """
    config = replace(CONFIG, learning_rate=1e-30)
    shared = Shared(config=config)
    worker, batch, norms = shared.worker(), play(), []
    for _ in range(3):
        assert worker.pull()
        assert worker.push(batch, TARGETS)
        norms.append(worker._objective.gradient.norm().item())
    assert norms[0] > 0
    assert norms == [norms[0]] * 3


def test_b35_backward_backward_push_push_loses_nothing() -> None:
    """Gradients that lie in shared memory swallow each other; private ones do not.

    Source: ikostrikov/pytorch-a3c PR#9; dgriff777/rl_a3c_pytorch#17.
    """
    shared = Shared(num_workers=2)
    workers = [shared.worker(index) for index in range(2)]
    batches = [play(1), play(2)]
    before = shared.parameters
    gradients = [shared.gradient_of(batch) for batch in batches]
    for worker in workers:
        assert worker.pull()
    objectives = [worker._objective for worker in workers]
    for objective, batch in zip(objectives, batches, strict=True):
        estimates, entropies = objective.estimate(batch)
        made = targets(CONFIG, estimates)
        losses = objective.differentiate(estimates, entropies, made, CONFIG.entropy_cost)
        objective.reduce(int(losses.count))
    for end, objective in zip(shared.ends, objectives, strict=True):
        assert end.push(objective.gradient, 24, learning_rate=1.0).applied
    assert torch.equal(shared.parameters, before - gradients[0] - gradients[1])


def test_b39_a_gradient_of_another_dtype_is_converted_and_the_worker_stays_as_it_was() -> None:
    """A GPU's gradient assigned to a CPU's parameter, or float32 to float64.

    Source: pytorch/pytorch#2905; ikostrikov/pytorch-a3c#59.
    """
    shared = Shared(dtype=torch.float64)
    worker, batch, before = shared.worker(), play(), shared.parameters
    assert worker.pull()
    gradient = shared.gradient_of(batch)
    assert worker.push(batch, TARGETS)
    assert torch.equal(shared.parameters, before - gradient.double())
    assert {p.dtype for p in worker.model.parameters()} == {torch.float32}
    assert {p.dtype for p in shared.model.parameters()} == {torch.float64}
    assert worker.pull()
    for ours, theirs in zip(worker.model.parameters(), shared.model.parameters(), strict=True):
        assert torch.equal(ours, theirs.float())


@pytest.mark.parametrize("kind", ["rmsprop", "adam"])
@pytest.mark.parametrize("inside", [False, True])
def test_b37_optimiser_state_survives_saving_before_the_first_step(kind: Any, inside: bool) -> None:
    """A state without `step`, with an int for it, or moved out of shared memory by a load.

    Source: philtabor/Youtube-Code-Repository#62; pytorch/pytorch#2647;
    vietnh1009/Super-mario-bros-A3C-pytorch#17.
    """
    parameter = nn.Parameter(torch.ones(3))

    def optimizer() -> torch.optim.Optimizer:
        return make_optimizer(
            [parameter],
            kind=kind,
            learning_rate=0.1,
            epsilon=1e-3,
            rmsprop_decay=0.9,
            epsilon_inside_root=inside,
        )

    ours, empty = optimizer(), optimizer().state_dict()
    prepare_state(ours, Tensor.share_memory_)
    before = {key: tensor.data_ptr() for key, tensor in ours.state[parameter].items()}
    for saved in (empty, ours.state_dict()):
        load_in_place(ours, saved)
        parameter.grad = torch.ones(3)
        ours.step()
        state = ours.state[parameter]
        assert state["step"].numel() == 1
        assert state["step"].item() == 1.0
        assert all(tensor.is_shared() for tensor in state.values())
        assert {key: tensor.data_ptr() for key, tensor in state.items()} == before
        load_in_place(ours, empty)
        assert all(not tensor.any() for tensor in state.values())


def test_a_prepared_state_is_the_state_that_the_first_step_makes() -> None:
    """Steps of a prepared optimiser are those of an untouched one, bit for bit."""
    for kind in ("rmsprop", "adam"):
        ends = []
        for prepare in (False, True):
            parameter = nn.Parameter(torch.linspace(-1, 1, 5))
            optimizer = make_optimizer(
                [parameter],
                kind=kind,  # type: ignore[arg-type]
                learning_rate=0.1,
                epsilon=1e-5,
                rmsprop_decay=0.9,
                epsilon_inside_root=False,
            )
            if prepare:
                prepare_state(optimizer)
            for step in range(3):
                parameter.grad = torch.linspace(0, 1 + step, 5)
                optimizer.step()
            ends.append(parameter.detach().clone())
        assert torch.equal(*ends)


def test_soft_pulls_move_the_copy_towards_the_shared_parameters_and_never_back() -> None:
    """local = (1 - tau) local + tau shared; the first pull copies."""
    shared = Shared(num_workers=2)
    soft, other = shared.worker(0, tau=0.25), shared.worker(1)
    assert soft.pull()
    own = torch.cat([p.detach().flatten() for p in soft.model.parameters()])
    assert torch.equal(own, shared.parameters)
    assert other.pull()
    assert other.push(play(), TARGETS)
    there = shared.parameters
    assert soft.pull()
    now = torch.cat([p.detach().flatten() for p in soft.model.parameters()])
    torch.testing.assert_close(now, 0.75 * own + 0.25 * there)
    assert torch.equal(shared.parameters, there)


def test_lag_counts_updates_by_others_between_pull_and_push() -> None:
    shared = Shared(num_workers=2)
    slow, fast = shared.worker(0), shared.worker(1)
    assert slow.pull()
    for _ in range(3):
        assert fast.pull()
        assert fast.push(play(version=fast.version), TARGETS)
    assert slow.push(play(version=slow.version), TARGETS)
    assert slow._account.window.lags == {3: 4}  # in each of four columns
    assert fast._account.window.lags == {0: 12}


@pytest.mark.parametrize("too_old", ["drop", "recompute"])
def test_a_gradient_that_is_too_old_is_dropped_or_made_anew_and_counted(too_old: Any) -> None:
    shared = Shared(num_workers=2)
    slow, fast = shared.worker(0, max_lag=1, too_old=too_old), shared.worker(1)
    assert slow.pull()
    for _ in range(2):
        assert fast.pull()
        assert fast.push(play(version=fast.version), TARGETS)
    batch = play(2, version=slow.version)
    before, fresh = shared.parameters, shared.gradient_of(batch)
    assert slow.push(batch, TARGETS)
    if too_old == "drop":
        assert torch.equal(shared.parameters, before)
        assert slow._account.window.counts == {"gradients_dropped": 1}
        assert slow._account.window.updates == 0
    else:
        assert torch.equal(shared.parameters, before - fresh)
        assert slow._account.window.counts == {"gradients_recomputed": 1}
        # The gradient is new, the games are not: they were played two updates ago.
        assert slow._account.window.lags == {2: 4}


def test_a_line_tells_the_rates_of_updates_that_were_made() -> None:
    """A worker whose gradients were all dropped applied none, though it has heard of the most."""
    shared = Shared(num_workers=2)
    slow, fast = shared.worker(0, max_lag=1), shared.worker(1)
    line = Line()
    assert slow.pull()
    for _ in range(2):
        assert fast.pull()
        assert fast.push(play(), TARGETS)
    fast.finish(line)
    assert fast.pull()
    assert fast.push(play(), TARGETS)
    assert slow.push(play(), TARGETS)
    slow.finish(line)
    progress = Progress(num_learners=2, in_step=False, action_repeat=1, entropy_max=None)
    assert progress.add_window(line.records[0]) is None
    told = progress.add_window(line.records[1])
    assert told is not None
    assert told["gradients_dropped"] == 1
    assert told["env_steps"] == slow.env_steps > line.records[0]["env_steps"]
    assert (told["learning_rate"], told["entropy_cost"]) == (1.0, 0.01)


def test_a_line_without_an_update_tells_nothing_of_learning() -> None:
    """Zeros in its place looked like a policy without entropy, and were warned of."""
    window = Window()
    window.count("trajectories_dropped", 0)
    assert not window.counts
    window.count("updates_refused")
    progress = Progress(num_learners=1, in_step=True, action_repeat=1, entropy_max=0.7)
    told = progress.add_window({**window.to_record(0, 100, {}), "pace": (0, 0.0)})
    assert told is not None
    assert told["updates_refused"] == 1
    assert told["entropy"] is told["value_loss"] is told["learning_rate"] is None
    assert EntropyWatch().observe(told) is None
    start = {"total_steps": 200, "action_repeat": 1}
    assert "losses policy -, value -" in progress_line(told, start)


def test_schedules_follow_the_env_steps_of_all_workers() -> None:
    config = replace(CONFIG, total_steps=100, learning_rate_end=0.0, entropy_cost_end=0.0)
    shared = Shared(num_workers=2, config=config)
    first, second = shared.worker(0), shared.worker(1)
    assert first.pull()
    assert first.push(play(), TARGETS)
    seen = first.env_steps
    assert second.pull()
    assert second.env_steps == seen > 0
    assert second.push(play(), TARGETS)
    assert second._account.window.learning_rate == pytest.approx(1 - seen / 100)
    assert second._account.window.entropy_cost == pytest.approx(0.01 * (1 - seen / 100))


def test_b103_a_gradient_that_is_not_finite_never_reaches_the_shared_parameters() -> None:
    """One bad gradient kills the model of every worker.

    Source: pytorch/pytorch#46849; facebookresearch/habitat-lab PR#2229.
    """
    shared = Shared()
    worker, batch, before = shared.worker(), play(), shared.parameters
    batch.rewards[0, 0] = math.inf
    assert worker.pull()
    with pytest.raises(FloatingPointError, match="not finite"):
        worker.push(batch, TARGETS)
    assert torch.equal(shared.parameters, before)


def test_b103_a_push_that_is_not_finite_can_be_skipped_and_is_told() -> None:
    """One bad gradient kills the model of every worker.

    Source: pytorch/pytorch#46849; facebookresearch/habitat-lab PR#2229.
    """
    shared = Shared(config=replace(CONFIG, not_finite="skip"))
    worker, batch, before = shared.worker(), play(), shared.parameters
    bad = batch.clone()
    bad.rewards[0, 0] = math.inf
    assert worker.pull()
    assert worker.push(bad, TARGETS)
    assert torch.equal(shared.parameters, before)
    assert worker._account.window.counts == {"updates_refused": 1}
    assert worker.push(batch, TARGETS)
    assert not torch.equal(shared.parameters, before)


class CallsAt(Counter):
    """Calls something in its n-th env step."""

    def __init__(self, step: int, call: Callable[[], None]) -> None:
        super().__init__(1000, "term")
        self.at = step
        self.call = call

    def step(self, action: Any) -> Any:
        stepped = super().step(action)
        if self.steps == self.at:
            self.call()
        return stepped


def test_b21_pushes_of_others_change_nothing_in_the_middle_of_an_unroll() -> None:
    """Weights change in the middle of a rollout: the actor plays with the shared module itself.

    Source: facebookresearch/torchbeast#8; seungeunrho/minimalRL#9.
    """
    shared = Shared()

    def overwrite() -> None:
        with torch.no_grad():
            for parameter in shared.model.parameters():
                parameter.add_(1.0)

    config = replace(CONFIG, env=partial(CallsAt, 10, overwrite), num_envs=1, unroll_length=20)
    worker = shared.worker()
    assert worker.pull()
    pulled = copy.deepcopy(worker.model)
    actor = Actor.create(config, describe(config.environment), worker.model, Stopwatch(), [0])
    batch = actor.unroll(worker.version)
    output = pulled(batch.observations[:-1], (), batch.resets[:-1])
    expected = output.policy.log_prob(batch.actions)
    assert torch.allclose(batch.behaviour_log_probs, expected, atol=1e-6)
    assert worker.pull()
    assert not torch.equal(next(worker.model.parameters()), next(pulled.parameters()))
    actor.close()


def test_b30_gradients_flow_through_time_inside_an_unroll_and_never_across() -> None:
    """A state detached at every step learns no memory; one never detached fails the second time.

    Source: ikostrikov/pytorch-a3c#76, #15; dgriff777/rl_a3c_pytorch#19;
    ikostrikov/pytorch-a2c-ppo-acktr-gail#278.
    """
    config = A3CConfig(
        env="repertory/Memory-v0",
        network="mlp",
        core="lstm",
        core_size=8,
        num_envs=2,
        unroll_length=5,
        learning_rate=0.1,
    )
    spec = describe(config.environment)
    model = models.create_on_cpu(config, spec)
    shared = InlineRuntime().shared_model(
        model, SGD(model.parameters(), lr=0.1), 1, lock=False, shared_statistics=True
    )
    worker = Worker.create(config, spec, shared.worker(0)._end, Stopwatch(), index=0)
    actor = Actor.create(config, spec, worker.model, Stopwatch(), [0])
    for _ in range(3):
        assert worker.pull()
        batch = actor.unroll(worker.version)
        assert all(part.grad_fn is None for part in batch.initial_core_state)
        assert worker.push(batch, partial(targets, config))
    observations = batch.observations[:-1].float().requires_grad_()
    resets = torch.zeros(observations.shape[:2], dtype=torch.bool)
    output = worker.model(observations, batch.initial_core_state, resets)
    output.values[4].sum().backward()
    assert observations.grad is not None
    assert observations.grad[0].abs().sum() > 0
    actor.close()
