"""`repertory eval`: whole games with a trained agent.

What is here: the flags, what is printed and the file that is left in the run. What is not here:
the games and their rules (`evaluation`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from repertory.config import ConfigError

if TYPE_CHECKING:
    from repertory.evaluation import Evaluation

_SUMMARY = ("mean", "std", "min", "max")


@dataclass(frozen=True)
class EvalArguments:
    """Play whole games with a trained agent and report the returns."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_CHECKPOINT")]
    """A run folder (its latest checkpoint), a checkpoint, or its `best` or `latest`."""
    episodes: int = 20
    """Games to play."""
    greedy: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Play the likeliest action; by default actions are drawn from the policy."""
    num_envs: int | None = None
    """Environment columns that play side by side; by default 8 or fewer."""
    max_episode_steps: int | None = None
    """Env steps after which a game is cut; by default 108,000 frames."""


def run(arguments: Sequence[str]) -> int:
    """Evaluate as the arguments say.

    Args:
        arguments: Words after `repertory eval`.

    Returns:
        Exit code 0; whatever goes wrong is raised.

    Raises:
        ConfigError: Wrong use.
        CheckpointError: There is no checkpoint, or it cannot be used.
    """
    parsed = tyro.cli(EvalArguments, prog="repertory eval", args=list(arguments))
    if not parsed.run.exists():
        # `resolve` would say so too, after a second of importing.
        raise ConfigError(f"there is no run and no checkpoint {parsed.run}")

    # Imported late, so that wrong use is answered without waiting for torch.
    import torch

    from repertory.agent import Agent
    from repertory.checkpoints import resolve, run_folder_of
    from repertory.evaluation import evaluate

    # Beside a training, threads that wait for one another make small passes many times slower.
    torch.set_num_threads(1)
    checkpoint = resolve(parsed.run)
    evaluation = evaluate(
        Agent.load(checkpoint),
        episodes=parsed.episodes,
        greedy=parsed.greedy,
        num_envs=parsed.num_envs,
        max_episode_steps=parsed.max_episode_steps,
    )
    sys.stdout.write(report(evaluation, checkpoint) + "\n")
    folder = run_folder_of(checkpoint)
    if folder is not None:
        file = _write(evaluation, folder / "eval", checkpoint, parsed.max_episode_steps)
        sys.stdout.write(f"written to {file}\n")
    return 0


def report(evaluation: Evaluation, checkpoint: Path) -> str:
    """What is printed: who played by which rules, and the numbers."""
    record = evaluation.to_record()
    frames = f" ({record['frames']:,} frames)" if evaluation.action_repeat != 1 else ""
    actions = "greedy actions" if evaluation.greedy else "stochastic actions"
    lines = [
        f"{evaluation.algorithm} on {evaluation.env} (protocol {evaluation.protocol}), {actions}, "
        f"{record['episodes']} episodes",
        f"checkpoint {checkpoint}, after {evaluation.env_steps:,} env steps{frames}",
        "return" + "".join(f"  {name} {record[f'episode_return_{name}']:.2f}" for name in _SUMMARY),
        f"length  mean {record['episode_length_mean']:,.1f} env steps",
    ]
    if evaluation.num_cut:
        lines.append(
            f"{evaluation.num_cut} of {record['episodes']} episodes truncated by eval limit "
            f"({evaluation.max_episode_steps:,} env steps); --max-episode-steps changes it"
        )
    return "\n".join(lines)


def _write(evaluation: Evaluation, folder: Path, checkpoint: Path, limit: int | None) -> Path:
    """Leave the numbers in the run; the same evaluation made again replaces its file."""
    from repertory.metrics import command, origin

    kind = "greedy" if evaluation.greedy else "stochastic"
    cut = f"_max{limit}" if limit is not None else ""
    file = folder / f"{checkpoint.stem}_{kind}_{len(evaluation.episodes)}{cut}.json"
    folder.mkdir(exist_ok=True)
    record = {
        **evaluation.to_record(),
        "checkpoint": checkpoint.name,
        "command": command(),
        **origin(),
    }
    text = json.dumps(record, indent=2, allow_nan=False)
    file.write_text(text + "\n", encoding="utf-8")
    return file
