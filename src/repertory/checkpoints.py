"""Checkpoints: what a run saves, so that it can be played, continued and passed on.

A checkpoint is a file of tensors, numbers, strings, lists and dicts, and of nothing else. It is
read with torch's `weights_only`, so that opening a stranger's file runs none of its code, and it is
refused when it is written if it holds anything that could not be read back.

What is here: the file, its names in a run folder, and parameters under the names of the plain
module. What is not here: when to save, and what an algorithm has to save beside its model.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
from collections.abc import Collection, Mapping
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from repertory.environments.base import EnvironmentSpec
from repertory.metrics import versions
from repertory.step_names import numbered, step_path, steps_of

FORMAT_VERSION = 1
"""Grows when a file of before could no longer be read as it is."""

KEYS = (
    "format_version",
    "model",
    "optimizer",
    "env_steps",
    "updates",
    "algorithm",
    "config",
    "protocol",
    "spec",
    "versions",
)
"""What every checkpoint holds; an algorithm may add keys of its own."""

_POINTERS = ("latest", "best")


class CheckpointError(Exception):
    """A checkpoint cannot be written, read or used; one line says which and why."""


class CheckpointNotFound(CheckpointError):
    """There is no checkpoint where one was looked for."""


def make_state(
    *,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Any],
    env_steps: int,
    updates: int,
    algorithm: str,
    config: str,
    spec: EnvironmentSpec,
    progress: Mapping[str, Any] | None = None,
    scheduled: bool = False,
) -> dict[str, Any]:
    """The keys that every checkpoint holds.

    Args:
        model: Its parameters, as `model_state` gives them.
        optimizer: The optimiser's `state_dict()`.
        env_steps: Env steps the parameters have learned from.
        updates: Updates they have gone through.
        algorithm: Its name.
        config: The settings as `config.to_yaml` writes them.
        spec: Of the environment that was trained on.
        progress: What the run's curves go on from, as `progress.Progress.state_dict` gives it.
        scheduled: Whether a run with `exact_resume` may go on from it.

    Raises:
        CheckpointError: A parameter is not finite.
    """
    for name, parameter in model.items():
        if not torch.isfinite(parameter).all():
            raise CheckpointError(f"{name} holds numbers that are not finite, and is of no use")
    return {
        "format_version": FORMAT_VERSION,
        "model": dict(model),
        "optimizer": dict(optimizer),
        "env_steps": env_steps,
        "updates": updates,
        "algorithm": algorithm,
        "config": config,
        "protocol": spec.protocol,
        "spec": spec_text(spec),
        "versions": versions(),
        "progress": dict(progress or {}),
        "scheduled": scheduled,
    }


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint so that the path holds either the whole of it or what it held before.

    Args:
        path: The file; its folder exists.
        state: What to write. Tensors are copied to the CPU.

    Raises:
        CheckpointError: A value is of a type that no checkpoint holds, or the file cannot be
            written.
    """
    plain = check_plain(state)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(plain, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch has an error of its own for a full disk
        reason = getattr(error, "strerror", None) or "it could not be written whole"
        raise CheckpointError(f"cannot write {path}: {reason}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


_brought: dict[str, bytes] = {}


def bring(files: Mapping[str, bytes]) -> None:
    """Have `load` find checkpoints in this process that lie on another machine, by their paths."""
    _brought.update(files)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint, with all tensors on the CPU. Nothing in the file is run.

    Raises:
        CheckpointNotFound: There is no such file.
        CheckpointError: The file is damaged, is no checkpoint of this package, holds more than
            plain values, or was written by a later version.
    """
    try:
        source = io.BytesIO(_brought[str(path)]) if str(path) in _brought else path
        state = torch.load(source, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointNotFound(f"there is no checkpoint {path}") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} was refused: it holds more than tensors and plain values, or is no checkpoint"
        ) from error
    except OSError as error:
        if error.errno == errno.EINVAL:  # a position that a whole file would have
            raise CheckpointError(f"{path} is damaged: it ends too early") from error
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:
        # torch raises whatever the first impossible byte leads to.
        raise CheckpointError(f"{path} is damaged, or no checkpoint") from error
    if not isinstance(state, dict) or "format_version" not in state:
        raise CheckpointError(f"{path} is a torch file, but no checkpoint of this package")
    version = state["format_version"]
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {version}, and this version reads format {FORMAT_VERSION}; "
            f"the version that wrote it can read it: {state.get('versions')}"
        )
    missing = [key for key in KEYS if key not in state]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}")
    return state


def check_plain(value: Any, name: str = "state") -> Any:
    """A copy of `value` made of tensors, numbers, strings, None, lists, tuples and dicts only.

    Mappings become dicts and tensors copies in ordinary memory: a view would drag its whole
    storage along, and a tensor in shared memory may change while it is written.

    Args:
        value: What to copy.
        name: How to name it in an error.

    Raises:
        CheckpointError: Something else is in it; the message names the key and the type.
    """
    # Exact types: numpy's float64 is a float, and still cannot be read back safely.
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise CheckpointError(f"{name} has the key {key!r}, which is no string or int")
        return {key: check_plain(item, f"{name}.{key}") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(check_plain(item, f"{name}[{i}]") for i, item in enumerate(value))
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointError(f"{name} is a {kind}, which a checkpoint does not hold: make it plain")


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under the names of the plain module.

    `torch.compile` and `DistributedDataParallel` wrap a module and put their own names before its
    own, anywhere in the tree; a file must not depend on how its model was run.
    """
    return {_plain_name(name): tensor for name, tensor in _unwrap(model).state_dict().items()}


def load_model_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Fill a module, compiled, wrapped or plain, with what `model_state` returned for another.

    Raises:
        CheckpointError: A name is missing, unknown, or has another shape. The module is then
            as it was.
    """
    module = _unwrap(model)
    own = {_plain_name(name): (name, tensor) for name, tensor in module.state_dict().items()}
    missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or unknown:
        raise CheckpointError(
            "the parameters are of another model"
            + (f"; missing: {', '.join(missing)}" if missing else "")
            + (f"; unknown: {', '.join(unknown)}" if unknown else "")
        )
    for name, (_, tensor) in own.items():
        if tensor.shape != state[name].shape:
            raise CheckpointError(
                f"the parameters are of another model; {name} is {list(state[name].shape)} "
                f"in the checkpoint and {list(tensor.shape)} here"
            )
    module.load_state_dict({name: state[plain] for plain, (name, _) in own.items()}, strict=True)


def spec_text(spec: EnvironmentSpec) -> str:
    """What a model has to fit, on one line; compared as a whole before parameters are used."""
    return (
        f"observations {spec.observation_space}, image layout {spec.image_layout}, "
        f"actions {spec.action_space}"
    )


def save_step(folder: Path, state: Mapping[str, Any]) -> Path:
    """Save under the name of its env steps, and point `latest` to it.

    Args:
        folder: The run's folder of checkpoints.
        state: As `save` takes it, with `env_steps`.

    Returns:
        The file.
    """
    path = step_path(folder, state["env_steps"])
    save(path, state)
    point(folder, "latest", path)
    return path


def prune(folder: Path, keep: int, also: Collection[Path] = ()) -> None:
    """Delete all but the newest checkpoints of a folder, and what `best` stands for.

    Args:
        folder: The run's folder of checkpoints.
        keep: How many of the newest stay.
        also: Others that stay, as somebody is about to read them.
    """
    spared = {path.name for path in also}
    # What cannot be deleted now, or is not there any more, is no reason to stop for.
    with contextlib.suppress(OSError):
        spared.add((folder / "best").read_text(encoding="utf-8").strip())
    with contextlib.suppress(OSError):
        for _, path in sorted(numbered(folder))[:-keep]:
            if path.name not in spared:
                path.unlink(missing_ok=True)


def set_aside_after(folder: Path, checkpoint: Path) -> None:
    """Give the checkpoints of a folder that are newer than one of them other names.

    A run that goes on from that one makes their env steps again; nothing is deleted but halves of
    files that were never whole. Where one of them was the best or the latest, the one that is gone
    on from takes its place.
    """
    for steps, path in numbered(folder):
        if steps > steps_of(checkpoint):
            path.rename(_free_name(path.with_name(f"set_aside_{path.name}")))
            for name in _POINTERS:
                pointer = folder / name
                if pointer.is_file() and pointer.read_text(encoding="utf-8").strip() == path.name:
                    point(folder, name, checkpoint)
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def _free_name(path: Path) -> Path:
    """The path, or with a number before its suffix where there is such a file already."""
    candidates = (path.with_stem(f"{path.stem}_{number}") for number in count(2))
    return next(free for free in chain([path], candidates) if not free.exists())


def point(folder: Path, name: str, checkpoint: Path) -> None:
    """Make `latest` or `best` stand for a checkpoint of the same folder.

    A pointer is a small text file with the checkpoint's name: a symbolic link needs rights on
    Windows and does not survive many archives, and a copy would cost the file's size again.

    Raises:
        CheckpointError: It cannot be written.
    """
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    try:
        temporary.write_text(checkpoint.name + "\n", encoding="utf-8")
        os.replace(temporary, folder / name)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder / name}: {error.strerror}") from error


def latest(run_dir: Path) -> Path:
    """The checkpoint of a run with the most env steps.

    Found by number and not through the pointer, which is one behind if the run was killed between
    the two writes.

    Raises:
        CheckpointNotFound: The folder holds none.
    """
    found = numbered(run_dir / "checkpoints")
    if not found:
        raise CheckpointNotFound(f"the run {run_dir} holds no checkpoint")
    return max(found)[1]


def newest_readable(
    run_dir: Path, *, scheduled_only: bool = False
) -> tuple[Path, dict[str, Any], list[str]]:
    """The newest checkpoint of a run that can be read, its state, and a line for each that cannot.

    Args:
        run_dir: The run's folder.
        scheduled_only: Look only at those that a run with `exact_resume` may go on from.

    Raises:
        CheckpointNotFound: The folder holds none.
        CheckpointError: None of them can be read, or none is scheduled.
    """
    damaged: list[str] = []
    newest = latest(run_dir)
    for _, path in sorted(numbered(newest.parent), reverse=True):
        try:
            state = load(path)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        if state.get("scheduled") or not scheduled_only:
            return path, state, damaged
    unscheduled = f"{run_dir} has no scheduled checkpoint yet; --no-exact-resume takes another one"
    raise CheckpointError("; ".join(damaged) or unscheduled)


def resolve(run_or_checkpoint: Path) -> Path:
    """The checkpoint file that a path means.

    Args:
        run_or_checkpoint: A run folder (its latest checkpoint), a checkpoint, or `latest` or
            `best` in a folder of checkpoints.

    Raises:
        CheckpointNotFound: There is none.
    """
    path = run_or_checkpoint
    if str(path) in _brought:
        return path
    if path.is_dir():
        return latest(path)
    if not path.exists():
        raise CheckpointNotFound(f"there is no run and no checkpoint {path}")
    if path.name in _POINTERS:
        target = path.with_name(Path(path.read_text(encoding="utf-8").strip()).name)
        if not target.is_file():
            raise CheckpointNotFound(f"{path} names {target.name}, which is not there")
        return target
    return path


def run_folder_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint lies in, or None if it lies elsewhere."""
    if len(checkpoint.parts) < 3:
        checkpoint = checkpoint.absolute()
    folder = checkpoint.parent.parent
    inside = checkpoint.parent.name == "checkpoints"
    return folder if inside and (folder / "config.yaml").is_file() else None


def _unwrap(model: nn.Module) -> nn.Module:
    """The module inside wrappers around the whole of it."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _plain_name(name: str) -> str:
    """A parameter's name without the part that `torch.compile` adds for a compiled submodule."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, where the system lets a folder be synchronised."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
