"""Train A2C on CartPole in this process, then play with the agent.

python examples/train_cartpole.py
"""

from __future__ import annotations

import gymnasium

import repertory


def main() -> None:
    """Train for a minute or two, and play one episode with the likeliest actions."""
    config = repertory.A2CConfig(
        env="CartPole-v1",
        total_steps=200_000,
        stop_at_return=475.0,
        num_envs=8,
        learning_rate=2e-3,
        learning_rate_end=0.0,
        value_cost=1.0,
        entropy_cost=0.0,
    )

    def show(record: dict[str, object]) -> None:
        if record["kind"] == "progress":
            print(record["env_steps"], record["episode_return_mean"])

    result = repertory.train(config, on_record=show)
    agent = repertory.Agent.load(result.checkpoint)

    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=0)
    episode_return, over = 0.0, False
    while not over:
        action, _ = agent.predict(observation, deterministic=True)
        observation, reward, terminated, truncated, _ = env.step(action)
        episode_return += float(reward)
        over = terminated or truncated
    print(f"one episode: {episode_return:g}; the run lies in {result.run_dir}")


if __name__ == "__main__":
    main()
