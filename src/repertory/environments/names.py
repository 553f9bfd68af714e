"""What to say of a name that does not exist, and of a package that is not installed.

What is here: the search for the closest name and the wording of both refusals. What is not here:
any list of names; each adapter knows its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from repertory.environments.base import EnvironmentRefused

_FEW = 6
"""As many names as a line can list."""


def closest(wanted: str, candidates: Iterable[str]) -> str | None:
    """The candidate that looks most like `wanted`, whatever its case; None if none comes near.

    A namespace may be left out or be wrong: `Pong-v5` finds `ALE/Pong-v5`.
    """
    by_key: dict[str, str] = {}
    for candidate in candidates:
        by_key.setdefault(_bare(candidate).lower(), candidate)
    for candidate in by_key.copy().values():
        by_key[candidate.lower()] = candidate
    for spelling in (wanted.lower(), _bare(wanted).lower()):
        matches = difflib.get_close_matches(spelling, by_key, n=1, cutoff=0.7)
        if matches:
            return by_key[matches[0]]
    return None


def _bare(name: str) -> str:
    """An id without its module and its namespace."""
    return name.rpartition(":")[2].rpartition("/")[2]


def unknown(kind: str, wanted: str, candidates: Iterable[str]) -> EnvironmentRefused:
    """One line for a name that does not exist, with the closest that does, or else all of a few.

    Args:
        kind: What was looked for, such as `environment`.
        wanted: The name given.
        candidates: The names there are.
    """
    names = list(candidates)
    match = closest(wanted, names)
    if match is not None:
        hint = f"; did you mean {match}?"
    elif len(names) <= _FEW:
        hint = f"; there are {', '.join(names)}"
    else:
        hint = ""
    return EnvironmentRefused(f"no {kind} is called {wanted!r}{hint}")


def not_installed(name: str, package: str, extra: str) -> EnvironmentRefused:
    """One line for an optional package that is missing, with the command that installs it."""
    return EnvironmentRefused(
        f'{name} needs {package}, which is not installed: pip install "repertory[{extra}]"'
    )
