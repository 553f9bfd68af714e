"""How the cluster runtime scales, on one machine that plays two: what more machines would meet.

Cores are not what is measured: the environments sleep. Three parts, each on a cluster of two nodes
(127.0.0.2 and 127.0.0.3) that the script makes and ends:

- *actors*: IMPALA with the product's own loops, an MLP, four columns and unrolls of 20, whose tick
  sleeps; efficiency is env steps/s of n actors over n times those of one. The tick is then
  shortened until it bends.
- *intake*: a learner that only takes, from actors that only put: MB/s and trajectories/s.
- *publishing*: seconds from the publication of a version until every reader has loaded it.

    python benchmarks/scale.py --actors 1 2 4 32 --ticks 25 12 6
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from repertory import IMPALAConfig, train
from repertory.runtimes.base import (
    ParameterReader,
    ParameterWriter,
    RoleContext,
    TrajectoryReader,
    TrajectoryWriter,
)
from repertory.runtimes.ray_cluster.runtime import RayRuntime
from repertory.trajectories import TrajectorySpec
from reports import RESULTS, origin, say, write

COLUMNS, UNROLL = 4, 20
SPEC = TrajectorySpec(UNROLL, COLUMNS, (4, 84, 84), torch.uint8, (), torch.int64, frame_stack=4)
SECONDS = 30.0
STACK_SECONDS = 240.0  # for all roles to begin


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--actors", type=int, nargs="*", default=[1, 2, 4, 32])
    parser.add_argument("--ticks", type=float, nargs="*", default=[25.0], help="milliseconds")
    parser.add_argument("--parts", nargs="*", default=["actors", "intake", "publishing"])
    parser.add_argument("--output", type=Path, default=RESULTS / "scale.json")
    arguments = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    here = str(Path(__file__).parent)
    sys.path.insert(0, here)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, sys.path)])
    result: dict[str, Any] = {**origin(__file__), "columns": COLUMNS, "unroll_length": UNROLL}
    with two_nodes() as address:
        if "actors" in arguments.parts:
            result["actors"] = []
            for tick in arguments.ticks:
                for number in arguments.actors:
                    result["actors"].append(measure_actors(address, number, tick))
                    say(str(result["actors"][-1]))
                    write(arguments.output, result)
        if "intake" in arguments.parts:
            result["intake"] = [measure_intake(address, number) for number in (1, 2, 4)]
            say(str(result["intake"]))
            write(arguments.output, result)
        if "publishing" in arguments.parts:
            result["publishing"] = [
                measure_publishing(address, megabytes, readers)
                for megabytes in (6.4, 64.0)
                for readers in (1, 4, 8)
            ]
            say(str(result["publishing"]))
    write(arguments.output, result)


@contextmanager
def two_nodes() -> Iterator[str]:
    """A cluster of two nodes on this machine; its address. Roles may outnumber the cores."""
    from ray.cluster_utils import Cluster

    # Twice 32 unrolls of 2.4 MB, and parameters; the cluster for tests has 150 MB unless told.
    each = {"num_cpus": 64, "object_store_memory": 2_000_000_000}
    head = {**each, "include_dashboard": False, "node_ip_address": "127.0.0.2"}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(**each, node_ip_address="127.0.0.3")
        yield cluster.address
    finally:
        cluster.shutdown()


def measure_actors(address: str, num_actors: int, tick: float) -> dict[str, Any]:
    """Env steps/s in `SECONDS` after all actors have begun, and how busy the cores were."""
    lines: list[dict[str, Any]] = []
    begun: list[float] = []
    busy: list[float] = []

    def on_record(record: dict[str, Any]) -> bool | None:
        if record["kind"] != "progress":
            return None
        now = time.monotonic()
        lines.append({"time": now, **record})
        # Everybody plays once env steps come at the pace of a while ago.
        if not begun and settled(lines, num_actors, tick):
            begun.append(now)
            psutil.cpu_percent()
        over = bool(begun) and now - begun[0] >= SECONDS
        if over and not busy:
            busy.append(psutil.cpu_percent())
        return not over

    with tempfile.TemporaryDirectory() as folder:
        config = IMPALAConfig(
            env="sleepy:Sleepy-v0",
            env_kwargs={"milliseconds": tick / COLUMNS},
            network="mlp",
            hidden_sizes=(16,),
            num_envs=COLUMNS,
            unroll_length=UNROLL,
            num_actors=num_actors,
            batch_trajectories=1,
            total_steps=10**9,
            max_minutes=10.0,
            log_every_steps=COLUMNS * UNROLL * max(1, num_actors // 2),
            runtime="ray",
            address=address,
            run_dir=Path(folder) / "run",
        )
        train(config, on_record=on_record)
    window = [line for line in lines if begun and line["time"] >= begun[0]]
    seconds = window[-1]["time"] - window[0]["time"]
    rate = (window[-1]["env_steps"] - window[0]["env_steps"]) / seconds
    return {
        "actors": num_actors,
        "tick_ms": tick,
        "env_steps_per_second": round(rate, 1),
        "of_sleep_alone": round(rate / (num_actors * COLUMNS * 1000 / tick), 4),
        "policy_lag_mean": statistics.fmean(line["policy_lag_mean"] for line in window),
        "cpu_percent": busy[0] if busy else None,
        "seconds": round(seconds, 1),
    }


def settled(lines: list[dict[str, Any]], num_actors: int, tick: float) -> bool:
    """Whether the pace of the last five seconds is no higher than that of the five before."""
    now = lines[-1]["time"]
    if now - lines[0]["time"] < 12.0 + 0.5 * num_actors:
        return False
    paces = []
    for until in (now, now - 5.0):
        part = [line for line in lines if until - 5.0 <= line["time"] <= until]
        if len(part) < 2:
            return False
        paces.append(
            (part[-1]["env_steps"] - part[0]["env_steps"]) / (part[-1]["time"] - part[0]["time"])
        )
    return paces[0] < 1.02 * paces[1] or now - lines[0]["time"] > STACK_SECONDS


def measure_intake(address: str, num_actors: int) -> dict[str, Any]:
    """What a learner that does nothing else can take."""
    runtime = RayRuntime(address, actor_cpus=1.0)
    queue = runtime.trajectory_queue(SPEC, num_actors, order="arrival")
    runtime.start("learner-0", take_all, SECONDS / 2, queue.reader())
    for index in range(num_actors):
        runtime.start(f"actor-{index}", put_all, queue.writer(index))
    taken, seconds = runtime.supervise(lambda role, record: None)["learner-0"]
    trajectory = SPEC.allocate()
    packed = (UNROLL + 4) * COLUMNS * 84 * 84  # frames of a stack travel once
    return {
        "actors": num_actors,
        "trajectories_per_second": round(taken / seconds, 1),
        "megabytes_per_second_sent": round(taken * packed / seconds / 1e6, 1),
        "megabytes_per_second_unpacked": round(
            taken * trajectory.observations.nbytes / seconds / 1e6, 1
        ),
    }


def take_all(context: RoleContext, seconds: float, reader: TrajectoryReader) -> tuple[int, float]:
    """Take for so long; how many, and in how long exactly."""
    for _ in range(20):
        reader.take(1)
    begun, taken = time.monotonic(), 0
    while time.monotonic() - begun < seconds and reader.take(1) is not None:
        taken += 1
    passed = time.monotonic() - begun
    reader.close()
    return taken, passed


def put_all(context: RoleContext, writer: TrajectoryWriter) -> None:
    """Put one trajectory again and again."""
    trajectory = SPEC.allocate()
    while writer.put(trajectory):
        pass


def measure_publishing(address: str, megabytes: float, readers: int) -> dict[str, Any]:
    """From the publication of a version until the last reader has it."""
    runtime = RayRuntime(address, actor_cpus=1.0)
    model = nn.Linear(1000, int(megabytes * 250), bias=False)
    store = runtime.parameter_store(model, readers)
    done: dict[int, list[float]] = {}
    published: dict[int, float] = {}

    def on_record(role: str, record: dict[str, Any]) -> None:
        if record["kind"] == "published":
            published[record["version"]] = record["time"]
        elif record["kind"] == "read":
            done.setdefault(record["version"], []).append(record["time"])

    runtime.start("learner-0", publish_all, model, store.writer())
    for index in range(readers):
        runtime.start(f"actor-{index}", read_all, model, store.reader(index))
    runtime.supervise(on_record)
    whole = [max(times) - published[v] for v, times in done.items() if len(times) == readers]
    assert whole, json.dumps({"published": len(published)})
    return {
        "megabytes": megabytes,
        "readers": readers,
        "seconds_until_all_have_it": round(statistics.median(whole), 4),
        "versions": len(whole),
    }


def publish_all(context: RoleContext, model: nn.Module, writer: ParameterWriter) -> None:
    """Publish a version every few seconds, ten in all; the first ones find nobody yet."""
    for version in range(10):
        context.report({"kind": "published", "version": version, "time": time.monotonic()})
        writer.publish(model, version)
        time.sleep(4.0)
    writer.close()


def read_all(context: RoleContext, model: nn.Module, reader: ParameterReader) -> None:
    """Load every version as it comes, from the newest at the start on."""
    version = reader.refresh(model)
    while version is not None:
        version = reader.refresh(model, version + 1)
        if version is not None:
            context.report({"kind": "read", "version": version, "time": time.monotonic()})


if __name__ == "__main__":
    main()
