"""How near training comes to the limit of this machine, in env steps per second.

The limit is a bare loop of environment, forward pass, and forward and backward pass, and nothing
else, in as many processes as there are cores at once, with the run's own network, precision and
memory format. Each has its share of the run's columns, for playing and for learning alike; where an
algorithm learns from larger batches than that (IMPALA's learner from those of all its actors), the
limit's passes are a little dearer than the run's. Rounds of the limit alternate with rounds of the
run, so that both meet the same moods of the machine; what counts is the median of each and the
median of their ratios.

    python benchmarks/throughput.py --env ALE/Pong-v5 --protocol dqn
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from repertory import environments, models
from repertory.algorithms.batched_a2c import BatchedA2CConfig
from repertory.commands.arguments import parse_train
from repertory.config import RunConfig, num_cores, to_dict
from repertory.progress import STAGES
from repertory.training import train
from reports import RESULTS, as_words, origin, say, write


@dataclass
class Arguments:
    """What to measure."""

    env: str = "ALE/Pong-v5"
    """Environment id."""
    algorithm: Literal["a2c", "batched_a2c", "a3c", "impala"] = "batched_a2c"
    """Algorithm whose run is measured."""
    protocol: str | None = "dqn"
    """Rules of an Atari game."""
    flags: list[str] = field(default_factory=list)
    """More flags of `repertory train`, without dashes: `network=a3c`, `epsilon-inside-root`."""
    rounds: int = 5
    """Rounds of limit and run."""
    seconds: float = 20.0
    """Seconds a round takes, start-up apart."""
    output: Path | None = None
    """JSON file; by default `benchmarks/results/throughput__....json`."""


def main() -> None:
    """Measure and write down."""
    arguments = tyro.cli(Arguments, description=__doc__)
    config = read_config(arguments)
    rounds = []
    for number in range(arguments.rounds):
        limit = measure_limit(config, arguments.seconds)
        steps_per_second, seconds_in = measure_run(config, arguments.seconds)
        ratio = steps_per_second / limit
        rounds.append(
            {"limit": limit, "run": steps_per_second, "ratio": ratio, "seconds_in": seconds_in}
        )
        say(f"round {number + 1}: limit {limit:,.0f}, run {steps_per_second:,.0f}, {ratio:.1%}")
    medians = {
        key: statistics.median(one[key] for one in rounds) for key in ("limit", "run", "ratio")
    }
    stages = {
        stage: statistics.median(one["seconds_in"][stage] for one in rounds) for stage in STAGES
    }
    say(
        f"median: limit {medians['limit']:,.0f}, run {medians['run']:,.0f} env steps/s, "
        f"ratio {medians['ratio']:.1%}"
    )
    say("microseconds of one role per env step of its own:")
    for stage, microseconds in stages.items():
        say(f"  {stage:<12} {microseconds:7.1f}")
    output = arguments.output or default_output(config, arguments)
    write(
        output,
        {
            **origin(__file__),
            "config": to_dict(config),
            "median": medians,
            "microseconds_per_env_step": stages,
            "rounds": rounds,
        },
    )


def read_config(arguments: Arguments) -> RunConfig:
    """The settings that `repertory train` would take, on all cores."""
    words = [arguments.algorithm, "--env", arguments.env]
    if arguments.protocol:
        words += ["--protocol", arguments.protocol]
    config = parse_train([*words, *as_words(arguments.flags)]).configs[0]
    given = {flag.partition("=")[0].replace("_", "-") for flag in arguments.flags}
    if isinstance(config, BatchedA2CConfig) and "num-learners" not in given:
        config = dataclasses.replace(config, num_learners=min(config.num_actors, num_cores()))
    return config


def default_output(config: RunConfig, arguments: Arguments) -> Path:
    """A name that says what was measured."""
    parts = [arguments.env, arguments.algorithm, config.network, config.precision]
    name = "__".join(parts).replace("/", "_")
    return RESULTS / f"throughput__{name}.json"


def measure_run(config: RunConfig, seconds: float) -> tuple[float, dict[str, float]]:
    """Env steps per second of a training run, and microseconds per env step by stage.

    The clock starts with the first line of metrics, so that the start of the run is left out; of
    what follows, the first tenth is too.
    """
    lines: list[dict[str, Any]] = []

    def keep(record: dict[str, Any]) -> bool:
        if record["kind"] == "progress":
            lines.append(record)
        return not lines or lines[-1]["wall_seconds"] - lines[0]["wall_seconds"] < seconds

    with tempfile.TemporaryDirectory() as folder:
        measured = dataclasses.replace(
            config,
            total_steps=10**9,
            log_every_steps=1000,
            run_dir=Path(folder) / "run",
        )
        train(measured, on_record=keep)
    skipped = max(1, len(lines) // 10)
    first, counted = lines[skipped - 1], lines[skipped:-1]
    steps = counted[-1]["env_steps"] - first["env_steps"]
    elapsed = counted[-1]["wall_seconds"] - first["wall_seconds"]
    own_steps = steps / config.num_players
    seconds_in = {
        stage: 1e6 * sum(line["seconds_in"][stage] for line in counted) / config.num_players
        for stage in STAGES
    }
    return steps / elapsed, {stage: total / own_steps for stage, total in seconds_in.items()}


def measure_limit(config: RunConfig, seconds: float) -> float:
    """Env steps per second of the bare loop, summed over a process for each core."""
    spawn = multiprocessing.get_context("spawn")
    num_processes = min(num_cores(), total_columns(config))
    barrier = spawn.Barrier(num_processes)
    with spawn.Pool(num_processes, initializer=keep_barrier, initargs=(barrier,)) as pool:
        columns = total_columns(config) // num_processes
        tasks = [(config, columns, index, seconds) for index in range(num_processes)]
        return sum(pool.starmap(bare_loop, tasks, chunksize=1))


def total_columns(config: RunConfig) -> int:
    """Columns of the whole run."""
    players = (getattr(config, name, 1) for name in ("num_actors", "num_workers"))
    return config.num_envs * max(players)


_barrier: Barrier | None = None


def keep_barrier(barrier: Barrier) -> None:
    """Keep the barrier where `bare_loop` finds it."""
    global _barrier
    _barrier = barrier


def bare_loop(config: RunConfig, columns: int, index: int, seconds: float) -> float:
    """Env steps per second of one process that does what cannot be left out."""
    torch.set_num_threads(1)
    seeds = environments.seeds_for(config.seed, index, columns)
    environment = environments.make_vector(config.environment, seeds, 1)
    model = models.create(config, environment.spec)
    num_actions = int(environment.spec.action_space.n)  # type: ignore[attr-defined]
    length = config.unroll_length
    observations = torch.from_numpy(environment.reset())
    batch = torch.zeros((length, *observations.shape), dtype=observations.dtype)
    resets = torch.zeros((length, columns), dtype=torch.bool)
    core_state = model.initial_core_state(columns)
    actions = torch.randint(num_actions, (997, columns)).numpy()

    def one_unroll(number: int) -> None:
        for row in range(length):
            with torch.inference_mode():
                model(observations[None], core_state, resets[:1])
            tick = environment.step(actions[(number * length + row) % len(actions)])
            batch[row] = torch.from_numpy(tick.observations)
        output = model(batch, core_state, resets)
        loss = output.values.sum() + output.policy.log_prob(torch.zeros_like(resets).long()).sum()
        model.zero_grad()
        loss.backward()

    for number in range(20):
        one_unroll(number)
    assert _barrier is not None
    _barrier.wait(60)
    start = time.perf_counter()
    number = 0
    while time.perf_counter() - start < seconds:
        one_unroll(number)
        number += 1
    return number * length * columns / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
