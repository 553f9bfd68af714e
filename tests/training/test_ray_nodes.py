"""A cluster of two machines, played by two addresses of this one, that loses one in mid-run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.leftovers import Leftovers
from tests.programs import run_program
from tests.ray_clusters import HAS_RAY

PROGRAM = """
import sys
from ray.cluster_utils import Cluster
from repertory import IMPALAConfig, train

# How soon Ray gives a silent machine up; by default it takes tens of seconds.
SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 5,
}


def main():
    head = {"num_cpus": 2, "include_dashboard": False, "node_ip_address": "127.0.0.2"}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": SOON})
    nodes = [cluster.add_node(num_cpus=1, node_ip_address="127.0.0.3")]
    enough = []

    def on_record(record):
        env_steps = record.get("env_steps", 0)
        if nodes and record["kind"] == "progress" and env_steps >= 200:
            cluster.remove_node(nodes.pop(), allow_graceful=False)
            cluster.add_node(num_cpus=1, node_ip_address="127.0.0.4")
        if record.get("event") == "replaced":
            enough.append(5000)  # env steps to go on for
        return not enough or env_steps < enough[0]

    config = IMPALAConfig(
        env="CartPole-v1",
        num_envs=2,
        total_steps=10**7,
        log_every_steps=100,
        runtime="ray",
        address=cluster.address,
        run_dir=sys.argv[1],
    )
    try:
        train(config, on_record=on_record)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
"""


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed (the extra `ray`)")
def test_b108_a_machine_is_lost_and_another_one_takes_its_actors(tmp_path: Path) -> None:
    """Dead actor or node: wait never returns.

    Source: ray-project/ray#3715, #22349, #21910, #15206.
    """
    before = Leftovers.now()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = run_program(str(program), str(tmp_path / "run"), timeout=280, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    told = [line["message"] for line in lines if line.get("event") == "replaced"]
    assert len(told) == 1
    assert "its actor is lost" in told[0]
    assert lines[-1]["kind"] == "end"
    assert lines[-1]["reason"] == "callback"
    before.check(descriptors=False)
