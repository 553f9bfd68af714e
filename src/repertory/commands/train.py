"""`repertory train`: settings in, a trained agent and its run folder out.

What is here: the checks that come before anything starts, and one run after another where several
seeds were asked for. What is not here: the settings (`arguments`) and the training (`training`).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from repertory.spawning import prepare_to_start_children

if TYPE_CHECKING:
    from repertory.commands.arguments import TrainArguments
    from repertory.config import RunConfig

_SIGNALLED = {"interrupted": 130, "terminated": 143}
"""Exit codes of runs that a signal ended: 128 and the signal's number, as shells have it."""

_STARTS_NO_CHILD = {"-h", "--help", "--print-config", "inline", "ray"}
"""Words after which getting ready for processes would be for nothing."""


def run(arguments: Sequence[str]) -> int:
    """Train as the arguments say.

    Args:
        arguments: Words after `repertory train`.

    Returns:
        The exit code: 0, or 130 or 143 after a signal, with a checkpoint saved; whatever goes
        wrong is raised.

    Raises:
        ConfigError: Wrong use.
        EnvironmentRefused: The environment does not exist or cannot be used.
    """
    # What is imported from here on is imported there at the same time.
    if not _STARTS_NO_CHILD & {word.rpartition("=")[2] for word in arguments}:
        prepare_to_start_children()
    from repertory.commands.arguments import parse_train

    parsed = parse_train(arguments)
    _check(parsed.configs[0])
    if parsed.print_config:
        sys.stdout.write(_printed(parsed))
        return 0

    # Imported late, so that wrong use is answered without waiting for all that trains.
    from repertory.console import make_console
    from repertory.training import train

    preset = parsed.preset
    if preset and preset.protocol and preset.protocol != parsed.configs[0].protocol:
        sys.stdout.write(
            f"warning: preset {preset.name} was published with --protocol {preset.protocol}\n"
        )
    for config in parsed.configs:
        with make_console(sys.stdout, preset=preset.name if preset else "none") as console:
            result = train(config, on_record=console.on_record)
        if code := signal_code(result.reason):
            return code
    return 0


def signal_code(reason: str) -> int:
    """Exit code of a run that a signal has ended, and 0 for others.

    What was asked for is done, so that from now on no further signal cuts the end short.
    """
    if reason not in _SIGNALLED:
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return _SIGNALLED[reason]


def _check(config: RunConfig) -> None:
    """Refuse what only the file system or the environment can tell."""
    from repertory.config import ConfigError
    from repertory.environments import describe

    if config.init_from is not None and not config.init_from.exists():
        raise ConfigError(f"init_from: there is no {config.init_from}")
    describe(config.environment)


def _printed(parsed: TrainArguments) -> str:
    """What `--print-config` shows: YAML that `--config` takes, under a line on its origin."""
    from repertory.config import to_yaml

    preset = parsed.preset
    origin = f"preset {preset.name}: {preset.source}" if preset else "no preset"
    return f"# {origin}\n{to_yaml(parsed.configs[0], parsed.algorithm)}"
