"""Stop a run half-way, go on with it, and evaluate what came of it.

python examples/resume_and_evaluate.py
"""

from __future__ import annotations

import repertory


def main() -> None:
    """Train A3C on CartPole in two sittings."""
    config = repertory.A3CConfig(
        env="CartPole-v1",
        num_workers=2,
        num_envs=4,
        total_steps=100_000,
        learning_rate=2e-3,
        learning_rate_end=0.0,
        value_cost=1.0,
        entropy_cost=0.0,
    )
    # Returning False ends the run after the update in progress, with a checkpoint.
    first = repertory.train(config, on_record=lambda record: record.get("env_steps", 0) < 50_000)
    print(f"stopped after {first.env_steps:,} env steps ({first.reason})")

    second = repertory.resume(first.run_dir)
    print(f"ended after {second.env_steps:,} env steps ({second.reason})")

    evaluation = repertory.evaluate(repertory.Agent.load(second.run_dir), episodes=20)
    print(f"mean return of 20 episodes: {evaluation.to_record()['episode_return_mean']}")


if __name__ == "__main__":
    main()
