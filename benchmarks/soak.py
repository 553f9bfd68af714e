"""An hour of training, and what it takes: memory, descriptors, threads, shared memory.

A run of `repertory train` in processes of its own, looked at every few seconds. What grows for ever
is a fault; the result holds what each kind of process took after a tenth of the time and at the
end, and the samples between.

    python benchmarks/soak.py --minutes 60 --train impala --env CartPole-v1 --replay-share 0.5
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from reports import RESULTS, origin

LOOK_SECONDS = 5.0
WARM_SHARE = 0.1


def main() -> None:
    """Train, look, and write down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--name", default="soak", help="name of the result")
    parser.add_argument("--train", nargs=argparse.REMAINDER, required=True, help="as the command")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "repertory", "train", *arguments.train]
        words += ["--total-steps", "1e12", "--max-minutes", str(arguments.minutes)]
        words += ["--run-dir", f"{folder}/run"]
        shared_before = shared_bytes()
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        begun = time.monotonic()
        samples = []
        try:
            while process.poll() is None:
                time.sleep(LOOK_SECONDS)
                if sample := look(process.pid):
                    samples.append({"seconds": round(time.monotonic() - begun, 1), **sample})
        finally:
            process.terminate()
            process.wait()
        metrics = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
    end = json.loads(metrics[-1])
    # The last look is at an end, where processes go one by one.
    warm, last = samples[int(WARM_SHARE * len(samples))], samples[max(0, len(samples) - 2)]
    result = {
        **origin(__file__),
        "train": shlex.join(arguments.train),
        "minutes": arguments.minutes,
        "exit_code": process.returncode,
        "env_steps": end.get("env_steps"),
        "reason": end.get("reason"),
        "shared_bytes_left": shared_bytes() - shared_before,
        "warm": warm,
        "last": last,
        "samples": samples[:: max(1, len(samples) // 60)],
    }
    output = RESULTS / f"{arguments.name}.json"
    output.write_text(json.dumps(result, indent=1) + "\n")
    for key in warm:
        sys.stdout.write(f"{key}: {warm[key]} -> {last[key]}\n")
    sys.stdout.write(f"written to {output}\n")


def look(pid: int) -> dict[str, Any] | None:
    """Sums over a process and all below it; None if one of them ended meanwhile."""
    try:
        parent = psutil.Process(pid)
        processes = [parent, *parent.children(recursive=True)]
        return {
            "processes": len(processes),
            # Shared pages count once: in the proportional share of each.
            "megabytes": round(sum(p.memory_full_info().pss for p in processes) / 1e6, 1),
            "descriptors": sum(p.num_fds() for p in processes),
            "threads": sum(p.num_threads() for p in processes),
            "shared_bytes": shared_bytes(),
        }
    except psutil.NoSuchProcess:
        return None


def shared_bytes() -> int:
    """Bytes of files in the folder of shared memory."""
    folder, total = Path("/dev/shm"), 0
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError):  # files there come and go
            total += path.stat().st_size
    return total


if __name__ == "__main__":
    main()
