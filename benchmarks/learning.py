"""Learning curves of a preset over several seeds, with what is needed to make them again.

Each seed is a run of `repertory train` with the flags given; its curve is thinned to about two
hundred points. With `--threshold` the file also says when the mean return of the last 100 episodes
first reached it, in env steps and in minutes.

    python benchmarks/learning.py --name cartpole --threshold 475 \
        --train a2c --env CartPole-v1 --total-steps 200000 --seeds 1..5

A run that was made by itself, or cut short, becomes a result through `--from`:

    python benchmarks/learning.py --name pong --threshold 10 --from runs/ALE_Pong-v5__...
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

from repertory.commands.arguments import parse_train
from repertory.config import RunConfig, parse_yaml, to_dict
from repertory.training import train
from reports import RESULTS, elsewhere, origin

_POINTS = 200
_CURVE = ("env_steps", "wall_seconds", "episode_return_mean", "entropy", "explained_variance")


def main() -> None:
    """Run the seeds one after another and write down their curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", required=True, help="name of the result")
    parser.add_argument("--threshold", type=float, help="mean return that should be reached")
    parser.add_argument("--runs", type=Path, help="folder for the runs; by default runs/")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--from", nargs="+", type=Path, dest="folders", help="run folders")
    source.add_argument("--train", nargs=argparse.REMAINDER, help="as the command")
    arguments = parser.parse_args()
    output = RESULTS / f"learning__{arguments.name}.json"
    output.parent.mkdir(exist_ok=True)
    runs = [from_folder(folder, arguments.threshold) for folder in arguments.folders or ()]
    if runs:
        output.write_text(json.dumps(report(arguments.threshold, runs), indent=1))
        for run in runs:
            print(summary(run, arguments.threshold))
        print(f"written to {output}")
        return
    for config in parse_train(arguments.train).configs:
        runs.append(one_run(config, arguments.threshold, arguments.runs))
        output.write_text(json.dumps(report(arguments.threshold, runs, arguments.train), indent=1))
        print(summary(runs[-1], arguments.threshold), flush=True)
    print(f"written to {output}")


def one_run(config: RunConfig, threshold: float | None, folder: Path | None) -> dict[str, Any]:
    """Train once; the curve and what came of it."""
    lines: list[dict[str, Any]] = []

    def keep(record: dict[str, Any]) -> None:
        if record["kind"] == "progress":
            lines.append(record)

    if folder is not None:
        config = dataclasses.replace(config, run_dir=folder / f"seed-{config.seed}")
    result = train(config, on_record=keep)
    settings = to_dict(dataclasses.replace(config, run_dir=None))
    return outcome(settings, result.reason, lines, threshold)


def from_folder(folder: Path, threshold: float | None) -> dict[str, Any]:
    """The same of a run folder, with the command and the revision it was made by."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [record for record in records if record["kind"] == "progress"]
    last = records[-1]
    settings = parse_yaml((folder / "config.yaml").read_text()) | {"run_dir": None}
    made_by = {
        "command": elsewhere((folder / "command.txt").read_text().strip()),
        "git": json.loads((folder / "meta.json").read_text())["git"],
    }
    reason = last["reason"] if last["kind"] == "end" else "cut short"
    return made_by | outcome(settings, reason, lines, threshold)


def outcome(
    settings: dict[str, Any], reason: str, lines: list[dict[str, Any]], threshold: float | None
) -> dict[str, Any]:
    """What came of a run, and its curve, thinned."""
    step = max(1, len(lines) // _POINTS)
    kept = [*lines[::step], lines[-1]]
    return {
        "config": settings,
        "reason": reason,
        "reached": None if threshold is None else first_at(lines, threshold),
        "best": max(
            line["episode_return_mean"] for line in lines if line["episode_return_mean"] is not None
        ),
        "last": lines[-1]["episode_return_mean"],
        "env_steps": lines[-1]["env_steps"],
        "minutes": lines[-1]["wall_seconds"] / 60,
        "curve": {key: [line.get(key) for line in kept] for key in _CURVE},
    }


def first_at(lines: list[dict[str, Any]], threshold: float) -> dict[str, float] | None:
    """Where the mean return of a full window first reached the threshold."""
    for line in lines:
        mean = line["episode_return_mean"]
        if line["episodes"] >= 100 and mean is not None and mean >= threshold:
            return {"env_steps": line["env_steps"], "minutes": line["wall_seconds"] / 60}
    return None


def report(
    threshold: float | None, runs: list[dict[str, Any]], words: list[str] | None = None
) -> dict[str, Any]:
    """Everything that belongs to the figures."""
    train_words = {"train": shlex.join(["repertory", "train", *words])} if words else {}
    return train_words | {
        **origin(__file__),
        "threshold": threshold,
        "runs": runs,
    }


def summary(run: dict[str, Any], threshold: float | None) -> str:
    """One line a run."""
    line = (
        f"seed {run['config']['seed']}: best {run['best']:.1f}, last {run['last']:.1f} after "
        f"{run['env_steps']:,} env steps in {run['minutes']:.1f} min"
    )
    if threshold is not None and run["reached"]:
        steps, minutes = run["reached"]["env_steps"], run["reached"]["minutes"]
        line += f"; {threshold:g} reached at {steps:,} env steps, {minutes:.1f} min"
    return line


if __name__ == "__main__":
    main()
