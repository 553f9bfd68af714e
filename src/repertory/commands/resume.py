"""`repertory resume`: go on with a run in its folder, from its newest checkpoint.

What is here: the words of the command. What is not here: what may change and what goes on
(`training.resume`), and how a value is read (`config`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from repertory.spawning import prepare_to_start_children

_HELP = """usage: repertory resume RUN [--SETTING VALUE ...]

Go on with a run, in its own folder, from its newest checkpoint that can be read. Parameters,
optimiser, env steps, schedules and curves go on; games begin anew. Settings may be changed by the
flags of `repertory train`, except the environment's (env, env-kwargs, protocol, image-layout,
max-episode-steps), the model's (network, hidden-sizes, core, core-size, last-inputs,
standardize-images), seed and optimizer.

  repertory resume runs/CartPole-v1__a2c__1__...
  repertory resume runs/CartPole-v1__a2c__1__... --total-steps 2e6 --num-envs 16
"""


def run(arguments: Sequence[str]) -> int:
    """Resume as the arguments say.

    Args:
        arguments: Words after `repertory resume`.

    Returns:
        The exit code: 0, or 130 or 143 after a signal, with a checkpoint saved.

    Raises:
        ConfigError: Wrong use.
        CheckpointError: There is no checkpoint that can be read.
    """
    from repertory.config import ConfigError

    words = list(arguments)
    if not words or {"-h", "--help"} & set(words):
        sys.stdout.write(_HELP)
        return 0 if words else 2
    if words[0].startswith("-"):
        raise ConfigError("resume which run? Name its folder first")
    run_dir = Path(words[0])
    if run_dir.is_file():
        raise ConfigError(
            f"a run goes on from its newest checkpoint: name its folder, not {run_dir}"
        )
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run folder {run_dir}")

    # Imported late, so that wrong use is answered without waiting for all that trains; what is
    # imported here is imported there at the same time.
    prepare_to_start_children()
    from repertory.commands.arguments import changed_settings
    from repertory.commands.train import signal_code
    from repertory.console import make_console
    from repertory.training import resume

    with make_console(sys.stdout, preset=None) as console:
        result = resume(run_dir, on_record=console.on_record, **changed_settings(words[1:]))
    return signal_code(result.reason)
