"""The `Runtime` of a Ray cluster: seats for the roles, and the watch over them.

Nothing of Ray is touched before `supervise`: only then is it known who keeps what, and what all of
it needs. Learners are placed first, then actors wherever there is room. What is here: placing,
starting, watching, replacing and ending. What is not here: membership, transport and scheduling,
which are Ray's.
"""

from __future__ import annotations

import itertools
import os
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError
from torch import nn
from torch.optim import Optimizer

from repertory.metrics import Record
from repertory.parameters import travelling_tensors, unflatten
from repertory.runtimes.base import Order, Role, RoleFailed
from repertory.runtimes.ray_cluster.connection import Connection
from repertory.runtimes.ray_cluster.ends import QueueWriter, StoreReader, ends_in
from repertory.runtimes.ray_cluster.roles import RoleRecord
from repertory.runtimes.ray_cluster.seats import Seat, Seating
from repertory.runtimes.ray_cluster.servers import ModelServer
from repertory.runtimes.ray_cluster.shared import Group, Model, Queue, Store
from repertory.runtimes.stops import GRACE_SECONDS, LATE, Stop
from repertory.trajectories import TrajectorySpec

_POLL_SECONDS = 0.1
_NEWS_SECONDS = 1.0  # a seat that has no news says so after so long
_START_SECONDS = 600.0  # for a role to be placed and to give its first sign of life
_PLACE_SECONDS = 30.0  # for a role to be placed once others have ended
_SERVER = "parameter server"


class RayRuntime:
    """The `Runtime` of a Ray cluster; see the module."""

    def __init__(
        self,
        address: str = "local",
        role_timeout_seconds: float = 120.0,
        start_seconds: float | None = None,
        max_restarts: int = 0,
        *,
        actor_cpus: float = 1.0,
        learner_cpus: float | None = None,
        learner_gpus: float = 0.0,
        modules: Sequence[str] = (),
        files: Sequence[Path] = (),
    ) -> None:
        """Nothing is started yet.

        Args:
            address: `local` for a cluster of this machine that ends with the run, `auto` for the
                one that this machine belongs to, or `HOST:PORT` of a head node.
            role_timeout_seconds: A role that gives no sign of life for so long is taken to hang.
            start_seconds: For a role to be placed and to begin; by default ten minutes.
            max_restarts: How many dead or hung roles are replaced before one ends the run; only
                those that were started as replaceable.
            actor_cpus: CPUs that Ray sets aside for an actor or a worker. Not on `local`, where all
                roles are on this machine in any case.
            learner_cpus: The same for a learner; by default its threads.
            learner_gpus: GPUs for each learner.
            modules: Files or folders of Python modules that other machines lack; Ray copies them.
            files: Checkpoints that roles will load, wherever they are.
        """
        self._connection = Connection(address, modules)
        self._timeout = role_timeout_seconds
        self._start_seconds = start_seconds or _START_SECONDS
        self._max_restarts = max_restarts
        self._restarts = 0
        self._actor_cpus = actor_cpus
        self._learner_cpus = learner_cpus
        self._learner_gpus = learner_gpus
        self._files: Any = files
        self._roles: list[RoleRecord] = []
        self._models: list[Model] = []
        self._numbers = itertools.count()
        self._places: dict[str, tuple[str, tuple[Any, ...]]] = {}
        self._homes: dict[str, Any] = {}
        self.results: dict[str, Any] = {}
        self._failure: RoleFailed | None = None
        self._looked = time.monotonic()
        self._stop = Stop(role_timeout_seconds)
        self._aborted = False
        self._states_asked = 0
        self._told = (False, False, 0)
        self._begun = False
        self._largest_queue = 0

    def trajectory_queue(
        self, spec: TrajectorySpec, num_actors: int, *, order: Order, capacity: int = 2
    ) -> Queue:
        """See `Runtime`."""
        key = self._place("queue", num_actors, order)
        queue = Queue(key, spec, num_actors, order, capacity)
        self._largest_queue = max(self._largest_queue, queue.nbytes)
        return queue

    def parameter_store(self, model: nn.Module, num_readers: int) -> Store:
        """See `Runtime`."""
        return Store(self._place("store"))

    def learner_group(self, model: nn.Module, num_learners: int) -> Group:
        """See `Runtime`."""
        return Group(self._place("group", num_learners), num_learners)

    def shared_model(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        num_workers: int,
        *,
        lock: bool,
        shared_statistics: bool,
        updates: int = 0,
        env_steps: int = 0,
    ) -> Model:
        """See `Runtime`. One actor makes all steps, one at a time, so there is nothing to lock."""
        packed = cloudpickle.dumps((model, optimizer))
        settings = (packed, num_workers, shared_statistics, (updates, env_steps), 1)
        self._models.append(Model(f"model-{next(self._numbers)}", model, settings))
        return self._models[-1]

    def start(
        self,
        name: str,
        role: Role,
        *arguments: Any,
        threads: int = 1,
        replaceable: bool = False,
    ) -> None:
        """See `Runtime`. The role is placed when `supervise` is called."""
        started = RoleRecord(name, role, arguments, threads, replaceable)
        for end in ends_in(arguments):
            # Whoever reads a queue keeps it; for the others it is the first to come.
            if not isinstance(end, (QueueWriter, StoreReader)) and end.key in self._places:
                started.keeps[end.key] = self._places.pop(end.key)
        self._roles.append(started)

    def supervise(self, on_record: Callable[[str, Record], None]) -> dict[str, Any]:
        """See `Runtime`."""
        try:
            self._begin(on_record)
            while not all(role.ended for role in self._roles):
                self._pass_on()
                self._read_news(on_record)
                self._look_for_the_lost(on_record)
                self._aborted |= self._stop.over()
                if self._stop.over(GRACE_SECONDS / 2):
                    self._cut_short()
                if self._stop.over(GRACE_SECONDS):
                    break
                if self._failure is not None:
                    raise self._failure
            self._stop.missing += [RoleFailed(r.name, LATE) for r in self._roles if not r.ended]
            self._failure = self._failure or self._stop.failure(self.results)
            if self._failure is not None:
                raise self._failure
            self._bring_parameters_home()
            return self.results
        except RoleFailed as failure:
            failure.results = self.results
            raise
        finally:
            self.close()

    def collect_state(self) -> None:
        """See `Runtime`."""
        self._states_asked += 1

    def stop(self, *, hurry: bool = False) -> None:
        """See `Runtime`."""
        self._stop.ask(hurry)  # passed on by `supervise`: a signal handler is no place to call Ray

    def close(self) -> None:
        """End every role, by force after a few seconds, and leave the cluster."""
        if self._begun:
            self._begun = False
            spent = GRACE_SECONDS if self._aborted else 0.0
            self._aborted = True
            self._pass_on()
            for role in self._roles:
                role.ended |= role.coming is None  # not even begun
            deadline = time.monotonic() + GRACE_SECONDS - spent
            while time.monotonic() < deadline and not all(role.ended for role in self._roles):
                self._read_news(None)
            self._end_by_force()
        self._roles.clear()
        self._models.clear()
        self._homes.clear()
        self._connection.close()

    def _cut_short(self) -> None:
        """Have roles that are late hand over what they have; said once."""
        for role in self._roles:
            if role.seat is not None and not role.ended and not role.cut_short:
                role.cut_short = True
                role.seat.cut_short.remote()

    def _place(self, kind: str, *how: Any) -> str:
        key = f"{kind}-{next(self._numbers)}"
        self._places[key] = (kind, how)
        return key

    def _begin(self, on_record: Callable[[str, Record], None]) -> None:
        """Join the cluster, place what has to be beside others, then everybody."""
        self._connection.open()
        self._begun = True
        self._files = ray.put({str(path): path.read_bytes() for path in self._files})
        lacking = self._connection.lacking(
            sum(self._cpus(role) for role in self._roles),
            self._learner_gpus * sum(role.learns for role in self._roles),
        )
        warnings = {
            "waiting": lacking and f"{lacking}; what is lacking is waited for",
            "crowded": self._connection.crowded(self._largest_queue),
        }
        for event, message in warnings.items():
            if message and self._roles:
                on_record(
                    self._roles[0].name, {"kind": "event", "event": event, "message": message}
                )
        for model in self._models:
            cpus = self._connection.cpus(self._actor_cpus)
            server = ray.remote(ModelServer).options(num_cpus=cpus)
            model.server = server.remote(*model.settings)
            model.coming = model.server.at.remote(model.key, "live")
            self._homes[model.key] = model.server
        in_order = sorted(self._roles, key=lambda role: not role.learns)
        for role in in_order:
            self._seat(role)
            self._homes.update(dict.fromkeys(role.keeps, role.seat))
        for role in in_order:
            self._launch(role)

    def _cpus(self, role: RoleRecord) -> float:
        learner_cpus = role.threads if self._learner_cpus is None else self._learner_cpus
        return self._connection.cpus(learner_cpus if role.learns else self._actor_cpus)

    def _seat(self, role: RoleRecord) -> None:
        """Ask Ray for an actor."""
        role.answered, role.silent_seconds = False, 0.0
        role.seat = (
            ray.remote(Seat)
            .options(
                num_cpus=self._cpus(role),
                num_gpus=self._learner_gpus if role.learns else 0,
                max_concurrency=100_000,
            )
            .remote()
        )

    def _launch(self, role: RoleRecord) -> None:
        """Have the role's process started."""
        role.coming = role.seat.launch.remote(
            Seating(
                name=role.name,
                packed=cloudpickle.dumps((role.role, role.arguments)),
                threads=role.threads,
                timeout_seconds=self._timeout,
                start_seconds=self._start_seconds,
                # Others may still be starting, and then be silent for as long as is allowed.
                patience_seconds=self._start_seconds + 2 * self._timeout,
                keeps=role.keeps,
                homes={key: home for key, home in self._homes.items() if key not in role.keeps},
                generation=role.generation,
                starts=role.starts,
                files=self._files,
                variables=self._variables(role),
                folder=os.getcwd(),
            )
        )
        role.seat.tell.remote(*self._told)

    def _variables(self, role: RoleRecord) -> dict[str, str | None]:
        """Environment variables of a role's process that are not as Ray would have them."""
        # Ray sets the first to what it takes a role's CPUs to be, and hides no GPU from whoever
        # was given none.
        variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}
        if not (role.learns and self._learner_gpus):
            variables["CUDA_VISIBLE_DEVICES"] = ""
        return variables

    def _pass_on(self) -> None:
        """Tell the seats what is wanted of the roles, where that has changed."""
        flags = (self._stop.asked, self._aborted, self._states_asked)
        if flags != self._told:
            self._told = flags
            for role in self._roles:
                if role.seat is not None and not role.ended:
                    role.seat.tell.remote(*flags)

    def _read_news(self, on_record: Callable[[str, Record], None] | None) -> None:
        """Handle what has come, waiting a little for the first.

        Args:
            on_record: None while the run is being closed: then only results count.
        """
        waiting = {role.coming: role for role in self._roles if not role.ended}
        ray.wait(list(waiting), num_returns=1, timeout=_POLL_SECONDS)
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        for call in ready:
            role = waiting[call]
            try:
                news = ray.get(call)
            except RayTaskError as error:  # a fault of ours, or of what a role is made of
                self._fail(role, _line(error.cause or error), str(error))
                role.ended = True
                continue
            except RayError as error:
                self._lose(role, f"its actor is lost: {_line(error)}", on_record, seat=True)
                continue
            role.answered, role.silent_seconds = True, 0.0
            for kind, content in news if isinstance(news, list) else []:
                self._handle(role, kind, content, on_record)
            if role.coming is call:  # one that is being replaced waits for its start
                role.coming = role.seat.news.remote(_NEWS_SECONDS)

    def _handle(
        self,
        role: RoleRecord,
        kind: str,
        content: Any,
        on_record: Callable[[str, Record], None] | None,
    ) -> None:
        if kind == "ended":
            role.ended = True
            if role.name not in self.results and self._failure is None:
                self._lose(role, role.reason or content, on_record)
            return
        try:
            said = pickle.loads(content)
        except Exception as error:  # of a class that only the role can import, say
            kind, said = "error", (f"unreadable message: {error}", "", None)
        if kind == "record":
            if on_record is not None:
                on_record(role.name, said)
        elif kind == "result":
            self.results[role.name] = said
        elif kind == "lost" and role.replaceable:
            role.reason = said[0]
        else:
            reason, trace, state = said
            if state is not None:
                self.results[role.name] = state
            self._fail(role, reason, trace)

    def _lose(
        self,
        role: RoleRecord,
        reason: str,
        on_record: Callable[[str, Record], None] | None,
        *,
        seat: bool = False,
    ) -> None:
        """A role has ended without a result or an error; replace it, or let the run fail.

        Args:
            role: Which.
            reason: How it ended.
            on_record: Where a replacement is told; None while the run is being closed.
            seat: Whether its actor is lost too, and with it what the actor kept.
        """
        role.ended = True
        if on_record is None or role.name in self.results:
            return
        if self._stop.asked:  # another one would only have to end again
            self._stop.missing.append(RoleFailed(role.name, LATE if role.cut_short else reason))
            return
        if not role.replaceable or (seat and role.keeps):
            self._fail(role, reason)
            return
        if self._restarts == self._max_restarts:
            self._fail(role, f"{reason}, after {self._restarts} replacements in this run")
            return
        self._restarts += 1
        message = (
            f"{role.name} failed: {reason}; it is replaced ({self._restarts} of at most "
            f"{self._max_restarts} replacements)"
        )
        on_record(role.name, {"kind": "event", "event": "replaced", "message": message})
        role.ended, role.reason = False, None
        role.starts += 1
        if seat:
            ray.kill(role.seat)  # one that is only cut off must not go on beside its successor
            role.generation += 1
            self._seat(role)
        self._launch(role)

    def _look_for_the_lost(self, on_record: Callable[[str, Record], None]) -> None:
        """Give up actors that do not answer: seats hear of a hung role long before."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 1.0), now
        for role in self._roles:
            if role.ended:
                continue
            role.silent_seconds += passed
            if role.answered and role.silent_seconds > self._timeout + _NEWS_SECONDS:
                ray.kill(role.seat)
                reason = f"its actor has not answered for {role.silent_seconds:.0f} s"
                self._lose(role, reason, on_record, seat=True)
            elif not role.answered and self._is_over_for(role):
                role.ended = True  # nobody needs it any more
                self._stop.missing.append(RoleFailed(role.name, "the run ended before it began"))
            elif not role.answered and role.silent_seconds > self._start_seconds:
                reason = f"no place for it within {self._start_seconds:g} s"
                self._fail(role, f"{reason}: {self._connection.resources()}")
        for model in self._models:
            if ray.wait([model.coming], timeout=0)[0]:
                try:
                    ray.get(model.coming)
                    model.coming = model.server.at.remote(model.key, "live")
                except RayError as error:
                    self._failure = self._failure or RoleFailed(_SERVER, _line(error), str(error))

    def _is_over_for(self, role: RoleRecord) -> bool:
        """Whether it need not begin any more: those whose state counts have ended."""
        ends = {r.name: r.learns or r.shares for r in self._roles}
        ended = any(ends[name] and state is not None for name, state in self.results.items())
        return ended and not role.learns and role.silent_seconds > _PLACE_SECONDS

    def _bring_parameters_home(self) -> None:
        """Copy what workers have made of shared parameters into the model they began with."""
        for model in self._models:
            memory = np.array(ray.get(model.server.at.remote(model.key, "parameters"), timeout=60))
            tensors = travelling_tensors(model.model)
            unflatten(torch.from_numpy(memory).view(tensors[0].dtype), tensors)

    def _end_by_force(self) -> None:
        seats = [role.seat for role in self._roles if role.seat is not None]
        ray.wait(
            [seat.end.remote() for seat in seats], num_returns=len(seats), timeout=GRACE_SECONDS / 2
        )
        for actor in (*seats, *(model.server for model in self._models if model.server)):
            ray.kill(actor)

    def _fail(self, role: RoleRecord, reason: str, trace: str = "") -> None:
        if self._failure is None:
            self._failure = RoleFailed(role.name, reason, trace)


def _line(error: BaseException) -> str:
    """An error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
