"""`Agent`: from a checkpoint to actions, with the meaning that users of other libraries know."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from repertory.agent import Agent
from repertory.checkpoints import CheckpointError, CheckpointNotFound, latest, load, save
from repertory.config import parse_yaml
from repertory.environments.base import EnvironmentRefused
from tests.commands.runs import TwoArms, make_run

CARTPOLE = np.array([0.1, -0.2, 0.3, -0.4], np.float32)


def test_an_agent_is_loaded_from_a_run_or_a_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "CartPole-v1", env_steps=77)
    for path in (run, str(run), latest(run), run / "checkpoints" / "latest"):
        agent = Agent.load(path)
        assert (agent.algorithm, agent.env_steps, agent.spec.name) == ("a2c", 77, "CartPole-v1")
        saved = load(latest(run))["model"]
        model = agent.model
        assert isinstance(model, torch.nn.Module)
        assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())


def test_predict_takes_one_observation_or_a_batch(tmp_path: Path) -> None:
    agent = Agent.load(make_run(tmp_path / "run", "CartPole-v1"))
    action, state = agent.predict(CARTPOLE, deterministic=True)
    assert np.shape(action) == ()
    assert state is None
    batch = np.stack([CARTPOLE, -CARTPOLE, 2 * CARTPOLE])
    actions, state = agent.predict(batch, deterministic=True)
    assert actions.shape == (3,)
    assert state is None
    assert actions[0] == action
    one_of_one, _ = agent.predict(CARTPOLE[None], deterministic=True)
    assert one_of_one.shape == (1,)


@pytest.mark.atari
def test_agent_at_play_of_the_readme(tmp_path: Path) -> None:
    """The second example, shortened: it takes a run's folder and ends with the game."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    _, example = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    run = make_run(tmp_path / "run", "ALE/Pong-v5", protocol="dqn", max_episode_steps=20)
    written = '"runs/ALE_Pong-v5__batched_a2c__1__..."'
    assert written in example
    made: dict[str, Any] = {}
    exec(example.replace(written, repr(str(run))), made)
    assert len(made["pictures"]) == 21
    assert made["pictures"][0].shape == (210, 160, 3)


def test_what_predict_returns_is_what_an_environment_takes(tmp_path: Path) -> None:
    agent = Agent.load(make_run(tmp_path / "run", "tests.commands.runs:TwoArms-v0"), seed=1)
    environment = TwoArms()
    observation, _ = environment.reset(seed=0)
    seen = set()
    for _ in range(50):
        action, _ = agent.predict(observation)
        assert environment.action_space.contains(action)
        environment.step(action)
        seen.add(int(action))
    assert seen == {10, 11}


def test_actions_are_drawn_unless_deterministic(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "CartPole-v1", chances=[0.6, 0.4])
    agent = Agent.load(run, seed=3)
    many = np.tile(CARTPOLE, (1000, 1))
    drawn, _ = agent.predict(many)
    assert np.mean(drawn == 0) == pytest.approx(0.6, abs=4 * (0.24 / 1000) ** 0.5)
    likeliest, _ = agent.predict(many, deterministic=True)
    assert not likeliest.any()


def test_a_seed_makes_draws_repeatable_and_none_makes_them_new(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "CartPole-v1")
    many = np.tile(CARTPOLE, (64, 1))
    first, again, other, new = (
        Agent.load(run, seed=seed).predict(many)[0] for seed in (1, 1, 2, None)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, new)


def test_torchs_global_generator_is_left_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "CartPole-v1")
    before = torch.random.get_rng_state()
    Agent.load(run, seed=1).predict(CARTPOLE)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_core_state_is_kept_between_calls_and_dropped_at_the_start_of_an_episode(
    tmp_path: Path,
) -> None:
    agent = Agent.load(make_run(tmp_path / "run", "CartPole-v1", core="lstm", core_size=8))
    _, fresh = agent.predict(CARTPOLE)
    assert fresh is not None
    assert [part.shape for part in fresh] == [(1, 8), (1, 8)]
    kept = [part.copy() for part in fresh]
    _, second = agent.predict(CARTPOLE, state=fresh)
    _, restarted = agent.predict(CARTPOLE, state=fresh, episode_start=True)
    assert second is not None
    assert restarted is not None
    assert all(np.array_equal(one, other) for one, other in zip(fresh, kept, strict=True))
    assert not np.allclose(second[0], fresh[0])
    assert np.allclose(restarted[0], fresh[0])


def test_each_of_a_batch_has_a_state_and_a_start_of_its_own(tmp_path: Path) -> None:
    agent = Agent.load(make_run(tmp_path / "run", "CartPole-v1", core="gru", core_size=8))
    batch = np.stack([CARTPOLE, CARTPOLE])
    _, fresh = agent.predict(batch)
    _, after = agent.predict(batch, state=fresh, episode_start=np.array([False, True]))
    assert fresh is not None
    assert after is not None
    assert not np.allclose(after[0][0], fresh[0][0])
    assert np.allclose(after[0][1], fresh[0][1])


@pytest.mark.parametrize(
    "observation", [np.zeros(3, np.float32), np.zeros((2, 3)), np.zeros((1, 2, 4)), 0.0]
)
def test_an_observation_of_another_shape_is_refused(tmp_path: Path, observation: Any) -> None:
    agent = Agent.load(make_run(tmp_path / "run", "CartPole-v1"))
    with pytest.raises(ValueError, match=r"expected an observation \(4,\) or a batch of them"):
        agent.predict(observation)


def test_a_state_of_another_batch_size_is_refused(tmp_path: Path) -> None:
    agent = Agent.load(make_run(tmp_path / "run", "CartPole-v1", core="gru", core_size=8))
    _, state = agent.predict(CARTPOLE)
    with pytest.raises(ValueError, match="not one for 2 observations"):
        agent.predict(np.stack([CARTPOLE, CARTPOLE]), state=state)
    plain = Agent.load(make_run(tmp_path / "plain", "CartPole-v1"))
    with pytest.raises(ValueError, match="not one for 1 observations"):
        plain.predict(CARTPOLE, state=state)


def test_lists_and_other_floats_will_do_but_never_floats_for_bytes(tmp_path: Path) -> None:
    agent = Agent.load(make_run(tmp_path / "run", "CartPole-v1"))
    expected, _ = agent.predict(CARTPOLE, deterministic=True)
    for same in (CARTPOLE.tolist(), CARTPOLE.astype(np.float64), CARTPOLE.astype(">f4")):
        assert agent.predict(same, deterministic=True)[0] == expected
    pictures = Agent.load(make_run(tmp_path / "pictures", "repertory/Catch-v0"))
    assert pictures.spec.observation_space.dtype == np.uint8
    with pytest.raises(TypeError, match="Cannot cast"):
        pictures.predict(np.zeros(pictures.spec.observation_space.shape, np.float32))


def test_a_read_only_observation_will_do_and_is_left_alone(tmp_path: Path) -> None:
    agent = Agent.load(make_run(tmp_path / "run", "CartPole-v1"))
    observation = CARTPOLE.copy()
    observation.flags.writeable = False
    agent.predict(observation)
    assert np.array_equal(observation, CARTPOLE)


def test_an_observation_that_is_not_finite_is_refused_or_replaced_as_in_training(
    tmp_path: Path,
) -> None:
    seen = np.array([0.1, math.nan, 0.0, 0.0], np.float32)
    with pytest.raises(ValueError, match="holds a number that is not finite"):
        Agent.load(make_run(tmp_path / "stop", "CartPole-v1")).predict(seen)
    run = make_run(tmp_path / "skip", "CartPole-v1", not_finite="skip", core="lstm", core_size=4)
    agent = Agent.load(run)
    _, fresh = agent.predict(CARTPOLE)
    _, state = agent.predict(seen, fresh)
    assert math.isnan(seen[1]), "what is handed over is left alone"
    assert state is not None
    assert not any(part.any() for part in state), "nothing is kept of what was made up"


def test_a_checkpoint_does_not_fit_another_environment(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "CartPole-v1")
    with pytest.raises(CheckpointError, match=r"was made for .*Acrobot-v1 now has") as caught:
        Agent.load(run, env="Acrobot-v1")
    assert "\n" not in str(caught.value)


def test_the_environment_may_be_given_as_a_callable(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "CartPole-v1")
    agent = Agent.load(run, env=lambda: gymnasium.make("CartPole-v1"))
    assert agent.predict(CARTPOLE)[0] in (0, 1)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("algorithm", "dqn", "is of an unknown algorithm, 'dqn'"),
        ("config", "env: CartPole-v1\ncolour: red\n", "unknown setting 'colour'"),
        ("config", "env: [", "holds settings that cannot be read"),
    ],
)
def test_a_checkpoint_with_odd_contents_is_refused_in_one_line(
    tmp_path: Path, key: str, value: str, message: str
) -> None:
    file = latest(make_run(tmp_path / "run", "CartPole-v1"))
    save(file, {**load(file), key: value})
    with pytest.raises(CheckpointError) as caught:
        Agent.load(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_environment_that_is_gone_is_refused(tmp_path: Path) -> None:
    file = latest(make_run(tmp_path / "run", "CartPole-v1"))
    state = load(file)
    assert parse_yaml(state["config"])["env"] == "CartPole-v1"
    save(file, {**state, "config": state["config"].replace("CartPole-v1", "CartPole-v7")})
    with pytest.raises(EnvironmentRefused):
        Agent.load(file)


def test_there_is_no_agent_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        Agent.load(tmp_path / "nowhere")
