"""Training: settings become a run, a new one or one that goes on.

What is here: the two ways to begin, and what is refused before anything starts. What is not here:
the run itself (`runs`).
"""

from __future__ import annotations

import importlib.util
import multiprocessing.process
import pickle
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from repertory import checkpoints, environments, models
from repertory.algorithms import ALGORITHMS, Algorithm
from repertory.config import (
    ConfigError,
    RunConfig,
    from_dict,
    from_yaml,
    to_dict,
    validate,
)
from repertory.environments.base import EnvironmentSpec
from repertory.metrics import Record, RunFolder
from repertory.runs import Callback, Result, Run, signals_end


def train(config: RunConfig, *, on_record: Callback | None = None) -> Result:
    """Train an agent and leave a run folder behind.

    Args:
        config: Settings of one of the algorithms; its type says which.
        on_record: Called with every record (`event`, `progress`, `end`, and about once a second a
            `pulse` with the env steps so far); returning False ends the run after the update in
            progress.

    Returns:
        Where the run lies and how it ended.

    Raises:
        ConfigError: A setting is out of its range, or the run folder cannot be made.
        EnvironmentRefused: The environment does not exist or cannot be used.
        RoleFailed: A role raised, was killed or hung; no role is left.
    """
    _refuse_a_script_without_guard()
    name, _ = _algorithm_of(config)
    config = from_dict(type(config), vars(config))
    validate(config)
    if config.resume_from is not None:
        raise ConfigError(
            "resume_from is for a run that goes on, which `repertory.resume` or `repertory resume` "
            "does in its own folder; init_from starts another run from its parameters"
        )
    if config.init_from is not None:
        try:
            config = replace(config, init_from=checkpoints.resolve(config.init_from))
        except checkpoints.CheckpointNotFound as error:
            raise ConfigError(str(error)) from error
    spec = environments.describe(config.environment)
    _refuse_what_roles_could_not_use(config, spec)
    folder = RunFolder.create(config, name, spec)
    with folder.claimed():
        return _supervised(config, name, spec, folder, on_record)


def resume(
    run_dir: Path | str,
    *,
    on_record: Callback | None = None,
    **changes: Any,
) -> Result:
    """Go on with a run, in its folder, from its newest checkpoint that can be read.

    Parameters, optimiser state, env steps, updates, schedules, curves, the best and the seconds go
    on; games begin anew, with other seeds than those the run began with. Lines of metrics beyond
    the checkpoint are set aside in a file of their own.

    Args:
        run_dir: The run's folder.
        on_record: As in `train`.
        changes: Settings that are to be others from now on, by name. What a model or a curve is
            made of cannot change; an environment that is a callable has to be given again.

    Raises:
        ConfigError: A setting may not change or does not exist, nothing is left to do, or the run
            still goes on.
        CheckpointError: There is no checkpoint that can be read.
        EnvironmentRefused: The environment cannot be used any more.
        RoleFailed: As in `train`.
    """
    _refuse_a_script_without_guard()
    folder = RunFolder(Path(run_dir))
    if not folder.path.is_dir():
        raise checkpoints.CheckpointNotFound(f"there is no run {run_dir}")
    with folder.claimed():
        return _resume(folder, on_record, changes)


def _resume(folder: RunFolder, on_record: Callback | None, changes: Mapping[str, Any]) -> Result:
    """The same in a folder that is this process's own."""
    _, state, _ = checkpoints.newest_readable(folder.path)
    if state["algorithm"] not in ALGORITHMS:
        raise ConfigError(f"{folder.path} is of an unknown algorithm, {state['algorithm']!r}")
    before = from_yaml(ALGORITHMS[state["algorithm"]].config, state["config"])
    wanted = from_dict(type(before), {**vars(before), "run_dir": folder.path, **changes})
    changed = _changes(replace(before, run_dir=folder.path), wanted)
    validate(wanted)
    checkpoint, state, damaged = checkpoints.newest_readable(
        folder.path, scheduled_only=wanted.exact_resume
    )
    config = replace(wanted, resume_from=checkpoint)
    if state["env_steps"] >= config.total_steps:
        raise ConfigError(
            f"the run has learned from {state['env_steps']:,} of {config.total_steps:,} env steps "
            "already; total_steps says how far to go on"
        )
    spec = environments.describe(config.environment)
    if checkpoints.spec_text(spec) != state["spec"]:
        raise ConfigError(
            f"{checkpoint} was made for {state['spec']}; {spec.name} now has "
            f"{checkpoints.spec_text(spec)}"
        )
    _refuse_what_roles_could_not_use(config, spec)
    checkpoints.set_aside_after(folder.checkpoints, checkpoint)
    folder.change_config(wanted, state["algorithm"], state["env_steps"])
    notes = [f"going on after {state['env_steps']:,} env steps", *damaged]
    if changed and config.exact_resume:
        notes.append("with other settings, this is not the run that would never have been stopped")
    event = {
        "kind": "event",
        "event": "resume",
        "checkpoint": str(checkpoint),
        "from_env_steps": state["env_steps"],
        "from_updates": state["updates"],
        "lines_set_aside": folder.set_aside_lines_after(state["env_steps"]),
        "changes": changed,
        "message": "; ".join(notes),
    }
    return _supervised(
        config,
        state["algorithm"],
        spec,
        folder,
        on_record,
        event=event,
        progress=state.get("progress"),
    )


def _supervised(
    config: RunConfig,
    name: str,
    spec: EnvironmentSpec,
    folder: RunFolder,
    on_record: Callback | None,
    *,
    event: Record | None = None,
    progress: Mapping[str, Any] | None = None,
) -> Result:
    """Start the roles, and watch over them to the end."""
    run = Run(config, name, spec, folder, on_record)
    if event is not None:
        run.go_on(event, progress or {})
    with signals_end(run):
        return run.supervise()


def _algorithm_of(config: RunConfig) -> tuple[str, Algorithm]:
    for name, algorithm in ALGORITHMS.items():
        if type(config) is algorithm.config:
            return name, algorithm
    known = ", ".join(algorithm.config.__name__ for algorithm in ALGORITHMS.values())
    raise ConfigError(f"{type(config).__name__} does not belong to an algorithm (known: {known})")


_NEVER_CHANGES = (
    *("env", "env_kwargs", "protocol", "image_layout", "max_episode_steps", "seed", "network"),
    *("hidden_sizes", "core", "core_size", "last_inputs", "standardize_images", "optimizer"),
    "run_dir",
    *("init_from", "resume_from"),
)
"""What a run's model and curve are made of; another value would be another run."""


def _changes(before: RunConfig, after: RunConfig) -> dict[str, Any]:
    """The settings that differ, with their new values.

    Raises:
        ConfigError: One of them cannot change within a run.
    """
    old, new = to_dict(before), to_dict(after)
    changed = {name: value for name, value in new.items() if value != old[name]}
    for name in changed.keys() & _NEVER_CHANGES:
        raise ConfigError(
            f"{name} cannot change from {old[name]} to {new[name]} in a run that goes on; start a "
            "new one (init_from takes over the parameters)"
        )
    return changed


def _refuse_what_roles_could_not_use(config: RunConfig, spec: EnvironmentSpec) -> None:
    """Find out here, in one line, what would fail in a role, with a traceback."""
    if config.runtime == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            'runtime=ray needs Ray, which is not installed: pip install "repertory[ray]"'
        )
    # On a cluster the GPU is another machine's.
    if config.device == "cuda" and config.runtime != "ray" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but this machine has no GPU that PyTorch can use")
    try:
        models.create_on_cpu(config, spec)
    except (ValueError, checkpoints.CheckpointError) as error:
        raise ConfigError(str(error)) from error
    if config.runtime != "inline" and callable(config.env):
        try:
            pickle.dumps(config.env)
        except Exception as error:
            raise ConfigError(
                "env cannot travel to another process: define it at the top level of a module, "
                'or use runtime="inline"'
            ) from error


def _refuse_a_script_without_guard() -> None:
    """A role imports the script that started it; unguarded, it would train all over."""
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        # Written here: a process that a server makes would end without printing a reason.
        sys.stderr.write(
            "repertory: this script trains when it is imported, as each new process does; put the "
            'call under `if __name__ == "__main__":`, or use runtime="inline"\n'
        )
        sys.stderr.flush()
        raise SystemExit(1)
