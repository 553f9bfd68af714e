"""Small roles for the contract suite; importable, as processes need."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn

from repertory.runtimes.base import (
    GroupMember,
    ParameterReader,
    ParameterWriter,
    RoleContext,
    SharedModelWorker,
    TrajectoryReader,
    TrajectoryWriter,
)
from repertory.trajectories import Trajectory, TrajectorySpec

SPEC = TrajectorySpec(
    unroll_length=3,
    num_columns=2,
    observation_shape=(5,),
    observation_dtype=torch.float32,
    action_shape=(),
    action_dtype=torch.int64,
    core_state_shapes=((4,), (4,)),
)


def marked(number: float) -> Trajectory:
    """A trajectory in which every number is `number`."""
    trajectory = SPEC.allocate()
    for tensor in trajectory.to_fields().values():
        tensor.fill_(bool(number) if tensor.dtype == torch.bool else number)
    return trajectory


def mark_of(trajectory: Trajectory) -> list[float]:
    """The number of each column; fails if a column mixes two."""
    marks = trajectory.observations[0, :, 0].tolist()
    for field in ("observations", "actions", "rewards", "behaviour_log_probs", "episode_returns"):
        tensor = getattr(trajectory, field).float()
        for column, mark in enumerate(marks):
            assert (tensor[:, column] == mark).all(), f"{field} mixes trajectories"
    for part in (*trajectory.initial_core_state, trajectory.policy_version):
        for column, mark in enumerate(marks):
            assert (part[column].float() == mark).all(), "the core state mixes trajectories"
    return marks


def model_of(number: float, size: int = 1000) -> nn.Module:
    """A model in which every parameter is `number`."""
    model = nn.Linear(size, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    return model


def number_in(model: nn.Module) -> float:
    """The number in a model; fails if it holds a mixture of two versions."""
    values = {float(v) for p in model.parameters() for v in p.detach().aminmax()}
    assert len(values) == 1, f"a mixture of versions: {values}"
    return values.pop()


def produce(
    context: RoleContext, actor: int, number: int, writer: TrajectoryWriter, pause: float = 0.0
) -> int:
    """Put `number` trajectories marked 100 * actor + index; how many were accepted."""
    for index in range(number):
        time.sleep(pause)
        context.report({"kind": "putting", "index": index})
        if not writer.put(marked(100 * actor + index)):
            return index
    return number


def produce_late(context: RoleContext, seconds: float, writer: TrajectoryWriter) -> bool:
    """Give signs of life for so long, then put one trajectory marked 100."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        context.report({"kind": "alive"})
        time.sleep(0.2)
    return writer.put(marked(100))


def consume(
    context: RoleContext, count: int, batches: int, reader: TrajectoryReader, pause: float = 0.0
) -> list[list[float]]:
    """Take so many batches; the marks of each."""
    seen = []
    context.report({"kind": "ready"})
    for _ in range(batches):
        time.sleep(pause)
        batch = reader.take(count)
        if batch is None:
            break
        seen.append(mark_of(batch))
        context.report({"kind": "taken", "marks": seen[-1]})
    reader.close()
    return seen


def consume_all(context: RoleContext, reader: TrajectoryReader) -> int:
    """Take one at a time until there is no more; how many."""
    number = 0
    while reader.take(1) is not None:
        number += 1
    return number


def publish(
    context: RoleContext,
    versions: int,
    writer: ParameterWriter,
    readers: TrajectoryReader,
    num_readers: int,
    size: int = 1000,
) -> None:
    """Publish versions 0, 1, ... once every reader is there; version k holds the number k."""
    models = [model_of(version, size) for version in range(2)]
    writer.publish(models[0], 0)
    assert readers.take(num_readers) is not None
    for version in range(1, versions):
        model = models[version % 2]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(version)
        writer.publish(model, version)
    writer.close()


def follow(
    context: RoleContext, reader: ParameterReader, here: TrajectoryWriter, size: int = 1000
) -> list[int]:
    """Load the newest version again and again; the versions seen."""
    model, seen = model_of(-1, size), []
    assert reader.refresh(model) == 0
    here.put(marked(0))
    while (version := reader.refresh(model)) is not None:
        assert number_in(model) == version
        seen.append(version)
    return seen


def take_turns_publishing(
    context: RoleContext, rounds: int, writer: ParameterWriter, reader: TrajectoryReader
) -> None:
    """Publish version k + 1 only once somebody has answered to version k."""
    for version in range(rounds):
        writer.publish(model_of(version), version)
        batch = reader.take(1)
        assert batch is not None
        assert mark_of(batch)[0] == version
    writer.close()
    reader.close()


def answer_each_version(
    context: RoleContext, writer: TrajectoryWriter, reader: ParameterReader
) -> list[int]:
    """Wait for exactly version k and answer with a trajectory marked k."""
    model, seen = model_of(-1), []
    while (version := reader.refresh(model, version=len(seen))) is not None:
        assert number_in(model) == version == len(seen)
        seen.append(version)
        if not writer.put(marked(version)):
            break
    return seen


def add_up(
    context: RoleContext, rank: int, rounds: int, member: GroupMember, pause: float = 0.0
) -> list[tuple[list[float], tuple[int, ...]]]:
    """Sum [rank + 1, round] with the others; what came out each round."""
    results = []
    for round_ in range(rounds):
        time.sleep(pause * (rank + 1))
        vector = torch.tensor([rank + 1.0, float(round_), 0.1 * (rank + 1)])
        counts = member.sum(vector, rank, round_)
        if counts is None:
            break
        results.append((vector.tolist(), counts))
        context.report({"kind": "summed", "round": round_})
    return results


def sum_and_leave(context: RoleContext, batches: int, member: GroupMember) -> int:
    """Sum once a batch, and leave after the last; how many sums there were."""
    made = 0
    while made < batches and member.sum(torch.ones(3), 1) is not None:
        made += 1
    member.leave()
    member.leave()
    return made


def take_and_sum(
    context: RoleContext, batches: int, reader: TrajectoryReader, member: GroupMember
) -> int:
    """Sum once for each batch that comes, as a learner does; how many sums there were."""
    for number in range(batches):
        context.report({"kind": "waiting", "batch": number})
        if reader.take(1) is None or member.sum(torch.ones(3), 1) is None:
            return number
    return batches


def add_up_doubles(context: RoleContext, rank: int, member: GroupMember) -> list[float]:
    """Sum float64 numbers that float32 cannot hold."""
    vector = torch.tensor([1.0 + 1e-12 * (rank + 1), 3e9], dtype=torch.float64)
    assert member.sum(vector) == ()
    return vector.tolist()


def give_state(context: RoleContext, rounds: int) -> int:
    """Offer a state after every round; how often it was really collected."""
    given = 0

    def collect() -> dict[str, Any]:
        nonlocal given
        given += 1
        return {"tensor": torch.arange(3), "round": round_}

    for round_ in range(rounds):
        context.report({"kind": "round", "round": round_})
        time.sleep(0.05)
        context.offer_state(collect)
    return given


def threads_here(context: RoleContext) -> int:
    """How many torch threads this role has."""
    _ = torch.randn(200, 200) @ torch.randn(200, 200)
    return torch.get_num_threads()


def only_be_there(context: RoleContext, seconds: float) -> None:
    """Give signs of life for so long, and nothing else."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        context.report({"kind": "alive"})
        time.sleep(0.2)


def raise_after(context: RoleContext, seconds: float, message: str) -> None:
    """Raise in a while."""
    time.sleep(seconds)
    raise ValueError(message)


def die_after(context: RoleContext, seconds: float, how: str) -> None:
    """End without a word: by a signal's name, or `exit`."""
    context.report({"kind": "alive"})
    time.sleep(seconds)
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(60)


def fork_and_die(context: RoleContext, seconds: float) -> None:
    """Be killed while a child that was forked, and so has all that is open here, lives on."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    context.report({"kind": "alive", "forked": pid})
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def terminate_a_program(context: RoleContext) -> int:
    """Ask a program of one's own to end, as environments do; its exit code."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as program:
        program.terminate()
        return program.wait(20)


def end_late(context: RoleContext, seconds: float, state: object) -> object:
    """Go on for so long, with signs of life, whatever is asked; then return a state."""
    only_be_there(context, seconds)
    return state


def offer_and_sleep(context: RoleContext, seconds: float, *, whole: bool = True) -> None:
    """Offer a state, one that can be collected or not, and be in something else for so long."""
    context.offer_state(lambda: {"updates": 7} if whole else {}["half"])
    context.report({"kind": "offered"})
    time.sleep(seconds)


def offer_and_raise(context: RoleContext, message: str) -> None:
    """Offer a state that cannot be collected any more, as of a GPU that has failed; then raise."""
    context.offer_state(lambda: {}["lost"])
    raise ValueError(message)


def hang(context: RoleContext) -> None:
    """Give a first sign of life, then no other."""
    context.report({"kind": "alive"})
    time.sleep(600)


def start_slowly(context: RoleContext, seconds: float) -> str:
    """Take longer to begin than a running role may be silent."""
    time.sleep(seconds)
    context.report({"kind": "alive"})
    return "started"


def push_ones(
    context: RoleContext, pushes: int, worker: SharedModelWorker, size: int = 1000
) -> list[float]:
    """Push a gradient of ones so often, pulling before each; the lags seen."""
    model, lags = model_of(-1, size), []
    ones = torch.ones(sum(p.numel() for p in model.parameters()))
    for _ in range(pushes):
        pulled = worker.pull(model)
        if pulled is None:
            break
        assert torch.isfinite(model.weight).all()  # type: ignore[union-attr, arg-type]
        pushed = worker.push(ones, 1, learning_rate=1.0)
        if pushed is None:
            break
        assert pushed.applied
        lags.append(pushed.lag)
        context.report({"kind": "pushed", "env_steps": pushed.env_steps})
    return lags


def shared_numbers(context: RoleContext, worker: SharedModelWorker) -> tuple[set[float], int, int]:
    """What lies in the shared model: its numbers, updates and env steps."""
    state = worker.state_dict()
    numbers = {float(v) for tensor in state["model"].values() for v in tensor.aminmax()}
    return numbers, state["updates"], state["env_steps"]


def push_known_gradients(
    context: RoleContext, gradients: list[float], worker: SharedModelWorker, size: int = 1000
) -> dict[str, Any]:
    """Push constant gradients one after the other; the state afterwards."""
    count = sum(p.numel() for p in model_of(0, size).parameters())
    for gradient in gradients:
        assert worker.pull(model_of(0, size)) is not None
        assert worker.push(torch.full((count,), gradient), 5, learning_rate=0.1) is not None
    return worker.state_dict()


def hold_a_lock(path: str, lock: Any) -> None:
    """Hold a lock for ever, and say so by making a file."""
    with lock.hold(lambda: False):
        open(path, "w").close()
        time.sleep(600)


def push_and_die(context: RoleContext, pushes: int, worker: SharedModelWorker) -> None:
    """Be killed after so many pushes, with the lock in hand where there is one."""
    push_ones(context, pushes, worker)
    lock = getattr(worker, "_lock", None)
    if lock is not None:
        lock.hold(lambda: False).__enter__()
    os.kill(os.getpid(), signal.SIGKILL)


def produce_and_die(
    context: RoleContext, folder: str, deaths: int, how: str, number: int, writer: TrajectoryWriter
) -> int:
    """Die so often, each time with a slot in hand; the one that lives puts so many trajectories."""
    context.report({"kind": "alive"})
    died = len(os.listdir(folder))
    if died < deaths:
        writer._take_slot()  # type: ignore[attr-defined]
        open(os.path.join(folder, str(died)), "w").close()
        if how == "hang":
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)
    return produce(context, 0, number, writer)
