"""Draws learning curves that `learning.py` has written: over env steps, and over minutes.

    python benchmarks/plot.py --output docs/images/pong.svg \
        learning__pong_impala_fast=impala learning__pong_a3c_fast=a3c

Each result is the name of its file, and may be followed by what its curve is called. The first run
of each is drawn, with thin lines at the returns of `--levels`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from reports import RESULTS

STYLE = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "repertory",  # the same drawing is the same file
}


def main() -> None:
    """Read the results and draw them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", metavar="RESULT[=LABEL]")
    parser.add_argument("--output", type=Path, required=True, help="an .svg or .png file")
    parser.add_argument("--levels", type=float, nargs="*", default=[])
    parser.add_argument("--title", default="")
    arguments = parser.parse_args()
    plt.rcParams.update(STYLE)
    figure, (over_steps, over_minutes) = plt.subplots(
        1, 2, figsize=(8.0, 3.5), sharey=True, layout="constrained"
    )
    for word in arguments.results:
        name, _, label = word.partition("=")
        curve = json.loads((RESULTS / f"{name}.json").read_text())["runs"][0]["curve"]
        returns = [float("nan") if mean is None else mean for mean in curve["episode_return_mean"]]
        millions = [steps / 1e6 for steps in curve["env_steps"]]
        minutes = [seconds / 60 for seconds in curve["wall_seconds"]]
        over_steps.plot(millions, returns, linewidth=1.6, label=label or name)
        over_minutes.plot(minutes, returns, linewidth=1.6)
    for axes in (over_steps, over_minutes):
        for level in arguments.levels:
            axes.axhline(level, color="0.75", linewidth=0.8, linestyle=":", zorder=0)
    over_steps.set_xlabel("million env steps")
    over_minutes.set_xlabel("minutes")
    over_steps.set_ylabel("mean return of 100 games")
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    figure.suptitle(arguments.title)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    undated = {"Date": None} if arguments.output.suffix == ".svg" else None
    figure.savefig(arguments.output, dpi=150, metadata=undated)


if __name__ == "__main__":
    main()
