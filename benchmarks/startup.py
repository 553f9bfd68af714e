"""Seconds from the command to the first env step, and what they are made of.

Each round starts `repertory train` in a new interpreter and waits for the first line of metrics.
The first update was made by then, so that the figure is a little above the first env step's.

    python benchmarks/startup.py --rounds 5
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from reports import RESULTS, origin, say, write

COMMANDS = {
    "CartPole-v1, a2c": "a2c --env CartPole-v1 --log-every-steps 40",
    "Pong, batched_a2c, 32 environments": "batched_a2c --env ALE/Pong-v5 --protocol dqn "
    "--num-learners 2 --num-actors 2 --num-envs 16 --log-every-steps 32",
}


def main() -> None:
    """Measure, side by side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in (*COMMANDS, "import repertory")}
    for _ in range(arguments.rounds):
        begun = time.monotonic()
        subprocess.run([sys.executable, "-c", "import repertory.training"], check=True)
        seconds["import repertory"].append(time.monotonic() - begun)
        for name, words in COMMANDS.items():
            seconds[name].append(measure(words))
    rows: dict[str, Any] = {
        name: {
            "median_seconds": round(statistics.median(values), 2),
            "seconds": [round(value, 2) for value in values],
        }
        for name, values in seconds.items()
    }
    for name, row in rows.items():
        say(f"{name}: {row['median_seconds']} s")
    write(RESULTS / "startup.json", {**origin(__file__), "rows": rows})


def measure(words: str) -> float:
    """From the command to the first line that tells of env steps."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "run" / "metrics.jsonl"
        begun = time.monotonic()
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "repertory", "train"),
                *words.split(),
                *("--run-dir", str(metrics.parent)),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while not (metrics.exists() and '"progress"' in metrics.read_text()):
            if process.poll() is not None:
                raise RuntimeError(f"train {words} ended with {process.returncode}")
            time.sleep(0.01)
        passed = time.monotonic() - begun
        process.terminate()
        process.wait()
        return passed


if __name__ == "__main__":
    main()
