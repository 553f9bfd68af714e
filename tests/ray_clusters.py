"""A Ray cluster of this machine that tests share, and that ends with the test process.

It is nobody's child, so that tests which look for leftovers see only what a run has left. Whoever
keeps it reads from a pipe whose other end the test process holds: that closes even if the tests are
killed, and the cluster goes with it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile

HAS_RAY = importlib.util.find_spec("ray") is not None

# Ray would ask for tokens, and report its use to its makers.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# What Ray will do by default one day; it warns until then.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


@functools.cache
def shared_address() -> str:
    """The address of the cluster, which is started with the first call."""
    held_open, theirs = os.pipe()
    said, saying = os.pipe()
    # Forked twice: the program that remains has no parent here.
    subprocess.run(
        [sys.executable, "-c", _BEGIN, str(held_open), str(saying)],
        pass_fds=[held_open, saying],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=True,
    )
    os.close(held_open)
    os.close(saying)
    _kept.append(theirs)
    with os.fdopen(said) as answers:
        address = answers.readline().strip()
    assert address, "no cluster came up"
    return address


_kept: list[int] = []
_BEGIN = """
import subprocess, sys
descriptors = sys.argv[1:]
subprocess.Popen([sys.executable, "-m", "tests.ray_clusters", *descriptors],
    pass_fds=[int(d) for d in descriptors], start_new_session=True, stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""


def keep(until_closed: int, saying: int) -> None:
    """Start a cluster, say its address, and end it once the other side closes the pipe."""
    import ray

    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets need a short path
    try:
        for attempt in range(3):  # Ray gives up early where the machine is busy
            try:
                ray.init(
                    address="local",
                    num_cpus=2,
                    include_dashboard=False,
                    object_store_memory=300_000_000,
                    log_to_driver=False,
                    _temp_dir=folder,
                )
                break
            except Exception:
                ray.shutdown()
                if attempt == 2:
                    raise
        with os.fdopen(saying, "w") as answer:
            answer.write(ray.get_runtime_context().gcs_address + "\n")
        os.read(until_closed, 1)
        ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    keep(int(sys.argv[1]), int(sys.argv[2]))
