"""Draws learning curves that `learning.py` or `reuse.py` has written: over env steps, and minutes.

    python benchmarks/plot.py --output docs/images/pong.svg \
        learning__pong_impala_fast=impala learning__pong_a3c_fast=a3c
    python benchmarks/plot.py --output docs/images/reuse.svg reuse__minatar_breakout

Each result is the name of its file, and may be followed by what its curve is called. Of a file that
compares settings every run is drawn, in a colour for each setting; of others the first one. Thin
lines are at the returns of `--levels`.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

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
    drawn = [one for word in arguments.results for one in read(word)]
    for place, (label, curves) in enumerate(drawn):
        for number, curve in enumerate(curves):
            returns = [math.nan if m is None else m for m in curve["episode_return_mean"]]
            style = {"color": f"C{place}", "linewidth": 1.6 if len(curves) == 1 else 1.1}
            millions = [steps / 1e6 for steps in curve["env_steps"]]
            over_steps.plot(millions, returns, label=None if number else label, **style)
            minutes = [seconds / 60 for seconds in curve["wall_seconds"]]
            over_minutes.plot(minutes, returns, **style)
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


def read(word: str) -> list[tuple[str, list[dict[str, Any]]]]:
    """What is drawn in one colour each: a name, and curves."""
    name, _, label = word.partition("=")
    runs = json.loads((RESULTS / f"{name}.json").read_text())["runs"]
    if isinstance(runs, list):
        return [(label or name, [runs[0]["curve"]])]
    return [(setting, [run["curve"] for run in several]) for setting, several in runs.items()]


if __name__ == "__main__":
    main()
