"""What it brings IMPALA to learn from trajectories again: from replay, and in several passes.

Four settings, several seeds, one run after the other: replay or not, one pass or three. A reuse
costs time, so the settings are compared twice: after equally many env steps, and after equally many
seconds. Runs that have ended are not repeated, so that the script can be stopped and called again.

    python benchmarks/reuse.py --total-steps 2000000 --runs runs/reuse
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from learning import from_folder, summary
from repertory.commands.arguments import parse_seeds, parse_train
from repertory.config import RunConfig, to_yaml
from repertory.training import train
from reports import RESULTS, as_words, origin, say, write

SETTINGS: dict[str, list[str]] = {
    "once": ["replay-share=0", "passes=1"],
    "replay": ["replay-share=0.5", "passes=1"],
    "passes": ["replay-share=0", "passes=3"],
    "replay and passes": ["replay-share=0.5", "passes=3"],
}


@dataclass
class Arguments:
    """What to train."""

    env: str = "MinAtar/Breakout-v1"
    """Environment id."""
    total_steps: int = 2_000_000
    """Env steps of each run."""
    seeds: str = "1..3"
    """`1..3` or `1,2,3`."""
    flags: list[str] = field(default_factory=list)
    """More flags of `repertory train impala`, without dashes: `surrogate=clip`, `passes=2`."""
    runs: Path = Path("runs/reuse")
    """Folder of the runs."""
    output: Path = RESULTS / "reuse__minatar_breakout.json"
    """JSON file; written after every run."""


def main() -> None:
    """Train what is not there yet, and write down what there is."""
    arguments = tyro.cli(Arguments, description=__doc__)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in SETTINGS}
    for seed in parse_seeds(arguments.seeds):
        for name in SETTINGS:
            config = read_config(arguments, name, seed)
            assert config.run_dir is not None
            if not has_ended(config, config.run_dir):
                result = train(config)
                if result.reason != "total_steps":
                    say(f"{config.run_dir} ended early ({result.reason}); call again to repeat it")
                    return
            runs[name].append(from_folder(config.run_dir, threshold=None))
            say(f"{name}, {summary(runs[name][-1], threshold=None)}")
            write(arguments.output, report(runs))


def read_config(arguments: Arguments, name: str, seed: int) -> RunConfig:
    """The settings that `repertory train` would take for one of the runs."""
    folder = arguments.runs / f"{name.replace(' ', '-')}__{seed}"
    words = ["impala", "--env", arguments.env, "--run-dir", str(folder), "--seed", str(seed)]
    words += ["--total-steps", str(arguments.total_steps)]
    return parse_train([*words, *as_words([*SETTINGS[name], *arguments.flags])]).configs[0]


def has_ended(config: RunConfig, folder: Path) -> bool:
    """Whether a run is there and came to its end; what is left of one that did not is removed.

    Raises:
        SystemExit: A run with other settings is there.
    """
    settings, metrics = folder / "config.yaml", folder / "metrics.jsonl"
    if not settings.exists():
        return False
    if settings.read_text(encoding="utf-8") != to_yaml(config, "impala"):
        raise SystemExit(f"{folder} is a run with other settings; name another folder with --runs")
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    if lines and json.loads(lines[-1]).get("reason") == "total_steps":
        return True
    shutil.rmtree(folder)
    return False


def report(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Everything that belongs to the figures."""
    return {
        **origin(__file__),
        "at_equal_env_steps": at_equal("env_steps", runs),
        "at_equal_seconds": at_equal("wall_seconds", runs),
        "runs": runs,
    }


def at_equal(axis: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Mean return of the last 100 episodes of each run where the shortest one ended."""
    curves = {name: [run["curve"] for run in of_one] for name, of_one in runs.items()}
    where = min(curve[axis][-1] for of_one in curves.values() for curve in of_one)
    reached = {name: [value_at(axis, where, c) for c in of_one] for name, of_one in curves.items()}
    return {axis: where, "episode_return_mean": reached}


def value_at(axis: str, where: float, curve: dict[str, list[Any]]) -> float | None:
    """The last value of a curve that is not past a point; None before the first episode's end."""
    pairs = zip(curve[axis], curve["episode_return_mean"], strict=True)
    values = [value for place, value in pairs if place <= where]
    found: float | None = values[-1] if values else None
    return found


if __name__ == "__main__":
    main()
