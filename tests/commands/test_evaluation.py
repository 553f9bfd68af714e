"""Evaluation: whole games, counted fairly, that come to an end."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from repertory.agent import Agent
from repertory.config import ConfigError
from repertory.environments import make_vector, seeds_for
from repertory.environments.base import EnvironmentConfig, EnvironmentFailure
from repertory.evaluation import EVALUATOR, evaluate, play, shares
from repertory.models.base import ModelOutput
from repertory.models.policies import Categorical
from repertory.trajectories import CoreState
from tests.commands.runs import Gappy, LivesVector, make_run, remember_the_cue

ENDLESS = "tests.commands.runs:Endless-v0"
SHORT_OR_LONG = "tests.commands.runs:ShortOrLong-v0"
GAPPY = "tests.commands.runs:Gappy-v0"


def agent_of(folder: Path, env: str, **settings: Any) -> Agent:
    """A fresh agent for an environment."""
    return Agent.load(make_run(folder / "run", env, **settings))


class CountingModel:
    """Counts rows since the last reset in its core state, and plays that number."""

    def initial_core_state(self, num_columns: int) -> CoreState:
        return (torch.zeros(num_columns, 1),)

    def __call__(self, observations: Tensor, core_state: CoreState, resets: Tensor) -> ModelOutput:
        count = torch.where(resets[0, :, None], 0.0, core_state[0])
        logits = torch.nn.functional.one_hot(count[None, :, 0].long(), 20).float().log()
        return ModelOutput(Categorical(logits), torch.zeros_like(count[None, :, 0]), (count + 1,))


class ExpectsCount(gymnasium.Env[NDArray[np.float32], Any]):
    """Pays 1 where the action is the number of env steps before it in this episode."""

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(20)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self._length = int(self.np_random.integers(2, 9))
        self._steps = 0
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        reward = float(action == self._steps)
        self._steps += 1
        return np.ones(1, np.float32), reward, self._steps == self._length, False, {}


def test_core_state_is_threaded_and_reset_only_at_the_start_of_an_episode() -> None:
    environment = make_vector(EnvironmentConfig(id=ExpectsCount), [1, 2, 3])
    played = play(
        CountingModel(),
        environment,
        [4, 4, 4],
        greedy=True,
        generator=torch.Generator(),
        max_episode_steps=100,
    )
    environment.close()
    assert [episode.episode_return for episode in played] == [float(e.length) for e in played]
    assert len({episode.length for episode in played}) > 1


def test_reported_return_is_clipped_shaped_or_per_life() -> None:
    """A game of three lives with rewards 5, 0 and 7 counts once, with 12; the next starts at 0.

    Source: DLR-RM/stable-baselines3#146, #2159, #894/#181 (PR#220); sail-sg/envpool#299
    (PR#53, #348), PR#121.
    """
    played = play(
        CountingModel(),
        LivesVector(),
        [3],
        greedy=True,
        generator=torch.Generator(),
        max_episode_steps=100,
    )
    assert [episode.episode_return for episode in played] == [12.0, 5.0, 4.0]
    assert [episode.length for episode in played] == [3, 2, 1]
    assert [episode.truncated for episode in played] == [False, True, False]


def test_evaluation_never_ends(tmp_path: Path) -> None:
    """In an environment that never ends, the limit ends every game and is said to have done so.

    Source: hill-a/stable-baselines#876; muupan/async-rl#5; takuseno/d3rlpy#209.
    """
    agent = agent_of(tmp_path, ENDLESS, chances=[0.999, 0.001])
    evaluation = evaluate(agent, episodes=2, greedy=True, max_episode_steps=50)
    assert evaluation.lengths == [50, 50]
    assert evaluation.returns == [50.0, 50.0]
    assert evaluation.num_cut == 2


def test_an_environment_that_ignores_the_limit_is_an_error_and_not_for_ever() -> None:
    environment = LivesVector()
    environment.SCRIPT = ((1.0, False, False, False),)  # type: ignore[assignment]
    with pytest.raises(EnvironmentFailure, match="past the limit of 7 env steps"):
        play(
            _Constant(),
            environment,
            [1],
            greedy=True,
            generator=torch.Generator(),
            max_episode_steps=7,
        )


class _Constant(CountingModel):
    def __call__(self, observations: Tensor, core_state: CoreState, resets: Tensor) -> ModelOutput:
        rows = observations.shape[:2]
        return ModelOutput(Categorical(torch.zeros(*rows, 2)), torch.zeros(rows), core_state)


def test_an_environments_own_limit_is_no_cut(tmp_path: Path) -> None:
    agent = agent_of(tmp_path, "repertory/Truncation-v0")
    own = evaluate(agent, episodes=3)
    assert (own.lengths, own.num_cut, own.max_episode_steps) == ([20, 20, 20], 0, 20)
    shorter = evaluate(agent, episodes=3, max_episode_steps=5)
    assert (shorter.lengths, shorter.num_cut) == ([5, 5, 5], 3)
    longer = evaluate(agent, episodes=3, max_episode_steps=500)
    assert (longer.lengths, longer.num_cut) == ([20, 20, 20], 0)


def test_a_cut_that_the_environment_makes_itself_is_no_cut_of_the_evaluation(
    tmp_path: Path,
) -> None:
    agent = agent_of(tmp_path, "tests.commands.runs:EndsItself-v0")
    longer = evaluate(agent, episodes=3, max_episode_steps=50)
    assert (longer.lengths, longer.num_cut) == ([5, 5, 5], 0)
    shorter = evaluate(agent, episodes=3, max_episode_steps=4)
    assert (shorter.lengths, shorter.num_cut) == ([4, 4, 4], 3)


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_an_agent_is_evaluated_by_the_rules_for_bad_numbers_that_it_learned_under(
    core: str, tmp_path: Path
) -> None:
    """Evaluation knew no `not_finite`, and a policy of NaN has no action to draw."""
    agents = {
        rule: agent_of(tmp_path / rule, GAPPY, not_finite=rule, core=core)
        for rule in ("skip", "stop")
    }
    evaluation = evaluate(agents["skip"], episodes=3)
    assert evaluation.returns == [10.0, 10.0, 10.0]
    with pytest.raises(EnvironmentFailure, match="tick 1 of this evaluation: the observation is"):
        evaluate(agents["stop"], episodes=3)


def test_what_plays_forgets_before_and_after_a_number_that_is_not_finite() -> None:
    """As an actor does, whose core begins anew at the row that was left out and after it."""
    seen: list[float] = []

    class Watched(_Constant):
        def __call__(self, *arguments: Any) -> ModelOutput:
            count = CountingModel.__call__(self, *arguments).core_state
            seen.append(count[0].item())
            return super().__call__(*arguments)._replace(core_state=count)

    vector = make_vector(EnvironmentConfig(Gappy), [1])
    play(
        Watched(),
        vector,
        [1],
        greedy=True,
        generator=torch.Generator(),
        max_episode_steps=20,
        not_finite="skip",
    )
    vector.close()
    assert seen == [1, 2, 1, 1, 2, 1, 1, 2, 1, 1]


def test_a_return_that_is_no_number_is_no_score(tmp_path: Path) -> None:
    agent = agent_of(tmp_path, "tests.commands.runs:Priceless-v0", not_finite="skip")
    with pytest.raises(EnvironmentFailure, match="the return of a game is nan"):
        evaluate(agent, episodes=1)


def test_a_limit_of_the_run_holds_in_evaluation(tmp_path: Path) -> None:
    agent = agent_of(tmp_path, ENDLESS, max_episode_steps=9)
    evaluation = evaluate(agent, episodes=2)
    assert (evaluation.lengths, evaluation.num_cut) == ([9, 9], 0)


def test_short_episodes_are_not_counted_more_often(tmp_path: Path) -> None:
    """40 columns, 40 games: the first 40 to finish would be short ones, which pay nothing."""
    evaluation = evaluate(agent_of(tmp_path, SHORT_OR_LONG), episodes=40, num_envs=40)
    assert Counter(episode.column for episode in evaluation.episodes) == dict.fromkeys(range(40), 1)
    assert 0.25 < np.mean(evaluation.returns) < 0.75


@pytest.mark.parametrize(
    ("episodes", "columns", "each"),
    [(8, 3, [3, 3, 2]), (2, 5, [1, 1, 0, 0, 0]), (6, 2, [3, 3]), (1, 1, [1])],
)
def test_every_column_plays_a_share_fixed_beforehand(
    episodes: int, columns: int, each: list[int]
) -> None:
    assert shares(episodes, columns) == each


@pytest.mark.parametrize("num_envs", [1, 3, 8, 11])
def test_exactly_as_many_games_as_asked_for(tmp_path: Path, num_envs: int) -> None:
    evaluation = evaluate(agent_of(tmp_path, SHORT_OR_LONG), episodes=7, num_envs=num_envs)
    assert len(evaluation.episodes) == 7
    counts = Counter(episode.column for episode in evaluation.episodes)
    assert [counts[column] for column in range(num_envs)] == shares(7, num_envs)


def test_eval_and_watch_disagree(tmp_path: Path) -> None:
    """A policy of .6 and .4 plays both arms unless asked to be greedy, and then only the first.

    Source: hill-a/stable-baselines#832.
    """
    agent = agent_of(tmp_path, "tests.commands.runs:TwoArms-v0", chances=[0.6, 0.4])
    drawn = evaluate(agent, episodes=1000, num_envs=50)
    assert drawn.greedy is False
    # Four standard deviations of the share of 1,000 draws.
    assert np.mean(drawn.returns) == pytest.approx(0.6, abs=4 * (0.24 / 1000) ** 0.5)
    greedy = evaluate(agent, episodes=100, greedy=True)
    assert greedy.greedy is True
    assert greedy.returns == [1.0] * 100


def test_the_same_agent_gets_the_same_evaluation_and_another_seed_another(tmp_path: Path) -> None:
    agent = agent_of(tmp_path / "one", "CartPole-v1", seed=1)
    first = evaluate(agent, episodes=5)
    assert evaluate(agent, episodes=5) == first
    other = agent_of(tmp_path / "other", "CartPole-v1", seed=2)
    assert evaluate(other, episodes=5).returns != first.returns


def test_no_game_of_training_is_evaluated() -> None:
    evaluated = set(seeds_for(1, EVALUATOR, 101))
    trained = {seed for actor in range(64) for seed in seeds_for(1, actor, 64)}
    assert len(evaluated) == 101
    assert not evaluated & trained


@pytest.mark.parametrize("name", ["episodes", "num_envs", "max_episode_steps"])
def test_numbers_below_1_are_refused(tmp_path: Path, name: str) -> None:
    agent = agent_of(tmp_path, "CartPole-v1")
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not 0"):
        evaluate(agent, **{name: 0})


def test_a_recurrent_agent_is_evaluated(tmp_path: Path) -> None:
    agent = agent_of(tmp_path, "repertory/Memory-v0", core="gru", core_size=8)
    evaluation = evaluate(agent, episodes=4)
    assert len(evaluation.episodes) == 4


def greedy_return(agent: Agent, environment: Any, observation: Any, *, forgets: bool) -> float:
    """One game played by hand; with `forgets` every step begins with the initial core state."""
    state, total, over = agent.model.initial_core_state(1), 0.0, False
    with torch.no_grad():
        while not over:
            rows = torch.from_numpy(observation)[None, None]
            output = agent.model(rows, state, torch.zeros(1, 1, dtype=torch.bool))
            state = agent.model.initial_core_state(1) if forgets else output.core_state
            observation, reward, terminated, truncated, _ = environment.step(
                int(output.policy.mode())
            )
            total, over = total + float(reward), terminated or truncated
    return total


def test_b32_a_restored_recurrent_agent_is_evaluated_with_its_memory(tmp_path: Path) -> None:
    """eval/watch of a recurrent agent forgets the state.

    It earns what a greedy game by hand earns under the same seed: 1, and by chance half of it where
    the state is dropped. Source: ray-project/ray#9220; huggingface/huggingface_sb3 PR#8.
    """
    agent = agent_of(
        tmp_path, "repertory/Memory-v0", core="lstm", core_size=1, prepare=remember_the_cue
    )
    evaluation = evaluate(agent, episodes=40, greedy=True, num_envs=1)
    by_hand: dict[bool, list[float]] = {False: [], True: []}
    for forgets, returns in by_hand.items():
        environment = gymnasium.make("repertory/Memory-v0")
        seed = seeds_for(agent.config.seed, EVALUATOR, 2)[1]
        for game in range(40):
            observation, _ = environment.reset(seed=seed if game == 0 else None)
            returns.append(greedy_return(agent, environment, observation, forgets=forgets))
        environment.close()
    assert evaluation.returns == by_hand[False] == [1.0] * 40
    assert 0.2 < np.mean(by_hand[True]) < 0.8


class GraphWatch:
    """A model that checks what it gives and notes what the process takes, every 2,500 rows."""

    def __init__(self, model: Any) -> None:
        assert all(parameter.requires_grad for parameter in model.parameters())
        self.model = model
        self.rows = 0
        self.resident: list[int] = []

    def initial_core_state(self, num_columns: int) -> CoreState:
        state: CoreState = self.model.initial_core_state(num_columns)
        return state

    def __call__(self, observations: Tensor, core_state: CoreState, resets: Tensor) -> ModelOutput:
        output: ModelOutput = self.model(observations, core_state, resets)
        self.rows += 1
        if self.rows % 2_500:
            return output
        log_probs = output.policy.log_prob(output.policy.mode())
        for tensor in (log_probs, output.policy.entropy(), output.values, *output.core_state):
            assert tensor.grad_fn is None
            assert not tensor.requires_grad
        self.resident.append(psutil.Process().memory_info().rss)
        return output


@pytest.mark.parametrize("way", ["evaluate", "predict"])
def test_b40_ten_thousand_steps_build_no_graph_and_take_no_memory(tmp_path: Path, way: str) -> None:
    """`volatile=True` became a no-op, so that acting builds graphs and grows.

    Source: ikostrikov/pytorch-a3c#52, #57; ray-project/ray PR#2036; facebookresearch/ELF PR#109;
    yunjey/pytorch-tutorial PR#143.
    """
    agent = agent_of(tmp_path, ENDLESS, core="lstm", core_size=16)
    watch = agent.model = GraphWatch(agent.model)
    if way == "evaluate":
        evaluation = evaluate(agent, episodes=1, max_episode_steps=10_000)
        assert evaluation.lengths == [10_000]
    else:
        state = None
        for _ in range(10_000):
            _, state = agent.predict(np.ones(1, np.float32), state)
    assert len(watch.resident) == 4
    assert watch.resident[-1] < 1.05 * watch.resident[0]


def test_the_record_of_an_evaluation(tmp_path: Path) -> None:
    agent = agent_of(tmp_path, "repertory/Truncation-v0", env_steps=123)
    record = json.loads(json.dumps(evaluate(agent, episodes=2).to_record()))
    assert record == {
        "kind": "eval",
        "env": "repertory/Truncation-v0",
        "protocol": "default",
        "algorithm": "a2c",
        "env_steps": 123,
        "frames": 123,
        "greedy": False,
        "max_episode_steps": 20,
        "episodes": 2,
        "episode_return_mean": 20.0,
        "episode_return_std": 0.0,
        "episode_return_min": 20.0,
        "episode_return_max": 20.0,
        "episode_length_mean": 20.0,
        "episodes_cut": 0,
        "episode_returns": [20.0, 20.0],
        "episode_lengths": [20, 20],
    }


@pytest.mark.atari
def test_atari_games_are_evaluated_whole_and_cut_by_frames(tmp_path: Path) -> None:
    agent = agent_of(tmp_path, "BreakoutNoFrameskip-v4")
    whole = evaluate(agent, episodes=1)
    # Five lives, of which no single one lasts that long without the ball being hit.
    assert whole.lengths[0] > 60
    assert whole.num_cut == 0
    cut = evaluate(agent, episodes=2, max_episode_steps=15)
    assert max(cut.lengths) <= 15
    assert cut.num_cut == 2
