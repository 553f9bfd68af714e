"""Joining a Ray cluster and leaving it as it was found.

A process has one connection to Ray. Runs in one process share it: the first makes it and the last
ends it, and one that was there before is used and left alone. Ray is never asked for just any
cluster, since it would take whichever it finds a trace of.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import ray

from repertory.runtimes.base import RoleFailed

_STORE_SHARE = 0.5  # of an object store for unrolls; the rest is for parameters, and for room

_lock = threading.Lock()
_users: list[Connection] = []
_is_ours = False


class Connection:
    """One run's share of this process's connection."""

    def __init__(self, address: str, modules: Sequence[str] = ()) -> None:
        """Not joined yet.

        Args:
            address: `local`, `auto` or `HOST:PORT`.
            modules: Files or folders that Ray copies to other machines.
        """
        self._address = address
        self._modules = list(modules)

    @property
    def is_local(self) -> bool:
        """Whether the cluster is made for this process, on this machine alone."""
        return self._address == "local"

    def open(self) -> None:
        """Join the cluster, or make one.

        Raises:
            RoleFailed: There is no cluster at that address, or none can be made.
        """
        global _is_ours
        with _lock:
            if not ray.is_initialized():
                try:
                    with _own_handlers(), _modules_of_this_process(self.is_local):
                        ray.init(**self._settings())
                except (OSError, RuntimeError, ValueError) as error:
                    reason = f"cannot join the cluster at {self._address}: {error}"
                    raise RoleFailed("ray", " ".join(reason.split())) from error
                _is_ours = True
            _users.append(self)

    def close(self) -> None:
        """Leave it. Harmless when called twice."""
        global _is_ours
        with _lock:
            if self not in _users:
                return
            _users.remove(self)
            if not _users and _is_ours:
                _is_ours = False
                ray.shutdown()

    def cpus(self, wanted: float) -> float:
        """What to ask of Ray; on one machine nothing, so that roles may outnumber its cores."""
        return 0.0 if self.is_local else wanted

    def lacking(self, cpus: float, gpus: float) -> str:
        """What the cluster lacks for a run that needs so much in all; nothing if it is enough."""
        has = ray.cluster_resources()
        if has.get("CPU", 0.0) >= cpus and has.get("GPU", 0.0) >= gpus:
            return ""
        return f"the run needs {cpus:g} CPUs and {gpus:g} GPUs; {self.resources()}"

    def crowded(self, nbytes: int) -> str:
        """What is wrong with so many bytes of unrolls at one machine; nothing if there is room."""
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        room = min((node.get("object_store_memory", 0.0) for node in alive), default=0.0)
        if nbytes <= _STORE_SHARE * room:
            return ""
        return (
            f"unrolls on their way to a learner may take {nbytes / 1e6:,.0f} MB, and the smallest "
            f"object store of the cluster has {room / 1e6:,.0f} MB: Ray writes to disk what does "
            "not fit, and everybody waits for it. Start Ray with a larger --object-store-memory, "
            "or lower queue_capacity"
        )

    def resources(self) -> str:
        """What the cluster has, in words."""
        has, free = ray.cluster_resources(), ray.available_resources()
        kinds = [f"{has.get(k, 0.0):g} {k}s ({free.get(k, 0.0):g} free)" for k in ("CPU", "GPU")]
        return f"the cluster has {' and '.join(kinds)}"

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "address": self._address,
            "log_to_driver": False,
            "logging_level": logging.ERROR,
        }
        if self.is_local:
            settings["include_dashboard"] = False
        elif self._modules:
            settings["runtime_env"] = {"py_modules": self._modules}
        return settings


def source_of(module: str) -> list[str]:
    """The file or folder to copy to other machines, so that they can import a module.

    Args:
        module: Its dotted name.

    Returns:
        At most one path; none for what is installed, which every machine has to have itself.
    """
    top = module.partition(".")[0]
    spec = importlib.util.find_spec(top) if top not in ("", "__main__") else None
    if spec is None or spec.origin is None:
        return []
    path = os.path.realpath(spec.origin)
    installed = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "purelib")}
    if not os.path.isfile(path) or any(path.startswith(folder + os.sep) for folder in installed):
        return []
    return [os.path.dirname(path) if spec.submodule_search_locations else path]


@contextlib.contextmanager
def _own_handlers() -> Iterator[None]:
    """Keep this process's handlers of signals, which Ray would replace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _modules_of_this_process(wanted: bool) -> Iterator[None]:
    """Have processes that are started in the block find modules where this one does."""
    before = os.environ.get("PYTHONPATH")
    if wanted:
        found = [os.path.abspath(path) for path in sys.path]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(found))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before
