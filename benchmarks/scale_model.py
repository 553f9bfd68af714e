"""Where a cluster saturates: figures of `scale.py` carried to actors that were never started.

Nothing here is measured. An actor plays at the pace that a sleep-bound one had; a learner takes
what the intake's figures say, or as many samples as are given for its device; each version is
pulled by every machine of actors once an unroll, over a network that is given. The smallest of
these bounds the run, and the table says which.

    python benchmarks/scale_model.py --network-gbit 10 --learner-samples 20000
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from reports import RESULTS, origin, say, write

ACTORS = (1, 10, 32, 100, 300, 1000)
LEARNERS = (1, 2, 4)


def main() -> None:
    """Print the table and write it down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measured", type=Path, default=RESULTS / "scale.json")
    parser.add_argument("--network-gbit", type=float, default=10.0, help="of the learners' machine")
    parser.add_argument(
        "--learner-samples",
        type=float,
        default=20_000.0,
        help="samples/s that one learner can learn from on its device",
    )
    parser.add_argument("--parameters-mb", type=float, default=6.4)
    parser.add_argument("--actors-per-node", type=int, default=16)
    arguments = parser.parse_args()
    measured = json.loads(arguments.measured.read_text())
    rows = [
        predict(measured, actors, learners, arguments) for learners in LEARNERS for actors in ACTORS
    ]
    head = "actors  learners  env steps/s  share of ideal  bound by"
    say(head)
    for row in rows:
        say(
            f"{row['actors']:6,}  {row['learners']:8}  {row['env_steps_per_second']:11,.0f}  "
            f"{row['share_of_ideal']:14.0%}  {row['bound_by']}"
        )
    settings = {name: str(value) for name, value in vars(arguments).items()}
    write(
        RESULTS / "scale_model.json",
        {**origin(__file__), "computed_not_measured": True, "settings": settings, "rows": rows},
    )


def predict(
    measured: dict[str, Any], actors: int, learners: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """What bounds a run of so many actors and learners, and at which pace."""
    alone = next(row for row in measured["actors"] if row["actors"] == 1)
    steps = measured["columns"] * measured["unroll_length"]  # of a trajectory
    intake = max(row["trajectories_per_second"] for row in measured["intake"])
    megabytes = max(row["megabytes_per_second_sent"] for row in measured["intake"]) / intake
    network = arguments.network_gbit * 1e3 / 8  # MB/s, each way
    nodes = -(-actors // arguments.actors_per_node)
    ideal = actors * alone["env_steps_per_second"]
    # An object is fetched once by a node, whose actors share it; at most once an unroll.
    pulls = nodes * alone["env_steps_per_second"] / steps * arguments.parameters_mb
    bounds = {
        "actors": ideal,
        "intake of one process a learner": learners * intake * steps,
        "learning": learners * arguments.learner_samples,
        "network in": network / megabytes * steps,
        "network out, parameters": ideal * network / pulls,
    }
    bound_by = min(bounds, key=lambda name: bounds[name])
    return {
        "actors": actors,
        "learners": learners,
        "env_steps_per_second": bounds[bound_by],
        "share_of_ideal": bounds[bound_by] / ideal,
        "bound_by": bound_by,
        "bounds": {name: round(value) for name, value in bounds.items()},
    }


if __name__ == "__main__":
    main()
