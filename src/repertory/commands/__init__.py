"""The command line: `repertory COMMAND ...`.

What is here: finding the command, and turning whatever it raises into one line and an exit code.
What is not here: the commands themselves, each a module of this package with a function
`run(arguments) -> exit code` that imports what it needs only when it is called.

Exit codes: 0 done; 1 failed, with the cause last; 2 wrong use; 130 and 143 interrupted or
terminated.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import MappingProxyType

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "train": "Train an agent.",
        "resume": "Go on with a run from its newest checkpoint.",
        "eval": "Play whole games with a trained agent and report the returns.",
    }
)
"""Every command, by the name of its module, with what it does."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Words after `repertory`; by default those of this process.

    Returns:
        The exit code.
    """
    first, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if first in ("-h", "--help"):
        sys.stdout.write(_help() + "\n")
        return 0
    if first == "--version":
        sys.stdout.write(f"repertory {_version()}\n")
        return 0
    if first not in COMMANDS:
        return _unknown(first)
    # A console script does not look for modules where it was called, which `module:Env-v0` needs.
    sys.path.append(os.getcwd())
    try:
        command = importlib.import_module(f"repertory.commands.{first}")
        return int(command.run(rest))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read this, `head` for one, has seen enough; nothing can be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception as error:
        return _report(error)


def _version() -> str:
    """The installed version; a checkout that was never installed has none."""
    try:
        return importlib.metadata.version("repertory")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _help() -> str:
    """What `repertory --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: repertory COMMAND ...",
            "",
            "Actor-critic agents that people can run, trust and read.",
            "",
            *lines,
            "",
            "`repertory COMMAND --help` says more; `repertory --version` names this version.",
        ]
    )


def _unknown(word: str) -> int:
    """Refuse a command that does not exist."""
    from repertory.synonyms import closest_hint

    known = ", ".join(COMMANDS)
    return _fail(f"unknown command {word!r}{closest_hint(word, COMMANDS)} (known: {known})", 2)


def _report(error: Exception) -> int:
    """Say what went wrong: one line for wrong use, the traceback first where it is a failure."""
    from repertory.config import ConfigError
    from repertory.environments.base import EnvironmentRefused

    if isinstance(error, (ConfigError, EnvironmentRefused)):
        return _fail(str(error), 2)

    from repertory.checkpoints import CheckpointError, CheckpointNotFound
    from repertory.runtimes.base import RoleFailed

    if isinstance(error, CheckpointNotFound):
        return _fail(str(error), 2)
    if isinstance(error, RoleFailed):
        # What matters happened in the role; this process only heard of it.
        sys.stderr.write(error.traceback)
    elif not isinstance(error, CheckpointError):
        traceback.print_exception(error)
    return _fail(str(error) or type(error).__name__, 1)


def _fail(message: str, code: int) -> int:
    """Print one line on stderr and hand back the exit code."""
    sys.stderr.write(f"repertory: {' '.join(message.split())}\n")
    return code
