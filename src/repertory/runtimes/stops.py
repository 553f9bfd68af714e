"""A stop: roles are asked to end by themselves, and have a time for it.

What is here: the clock of it. What is not here: how a role hears of it and the force that is used
on one that does not end (the runtimes), and what a late one still hands over (`last_words`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from repertory.runtimes.base import RoleFailed

_HURRY_SECONDS = 4.0  # for roles to end by themselves where somebody waits
GRACE_SECONDS = 5.0  # from then on, before they are ended by force
NOT_BEGUN = "the run was asked to stop before it had begun; nothing was learned"
LATE = "it was asked to stop and did not end in time; what it learned last is lost"


class Stop:
    """Whether roles were asked to end, and whether their time for it is over.

    Attributes:
        asked: Whether they were.
        missing: Roles that were lost since, and had no successor.
    """

    def __init__(self, patience_seconds: float) -> None:
        """Not asked yet.

        Args:
            patience_seconds: What they have for it where nobody waits.
        """
        self.asked = False
        self.missing: list[RoleFailed] = []
        self._patience = patience_seconds
        self._hurry = False
        self._since: float | None = None

    def ask(self, hurry: bool) -> None:
        """Ask them; again with `hurry` where somebody has lost patience."""
        if hurry and not self._hurry:
            self._hurry, self._since = True, None
        self.asked = True

    def failure(self, results: Mapping[str, Any]) -> RoleFailed | None:
        """What is wrong where no role returned the state that the run was to save.

        Args:
            results: What roles returned, by name.
        """
        if any(result is not None for result in results.values()):
            return None
        return self.missing[0] if self.missing else None

    def over(self, more_seconds: float = 0.0) -> bool:
        """Whether their time has passed, and so many seconds more."""
        if not self.asked:
            return False
        now = time.monotonic()
        since = self._since = self._since or now  # a signal's handler may come between two lines
        allowed = _HURRY_SECONDS if self._hurry else self._patience
        return now - since > allowed + more_seconds
