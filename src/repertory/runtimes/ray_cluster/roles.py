"""What the parent of a run on a cluster knows of one of its roles.

What is here: the record. What is not here: what is made of it (`runtime`), and the role (`lines`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from repertory.runtimes.base import Role
from repertory.runtimes.ray_cluster.ends import Member, ModelWorker, ends_in


@dataclass
class RoleRecord:
    """What the parent knows of a role.

    Attributes:
        seat: Its actor; another one once the first is lost.
        coming: The call to the seat that is under way.
        answered: Whether this seat has ever answered.
        silent_seconds: Since it last did; counted a look at a time, and a look counts little.
        reason: Why it is about to end, where it has said so itself.
        cut_short: Whether its seat was asked to have it end at once.
    """

    name: str
    role: Role
    arguments: tuple[Any, ...]
    threads: int
    replaceable: bool
    keeps: dict[str, tuple[str, tuple[Any, ...]]] = field(default_factory=dict)
    seat: Any = None
    coming: Any = None
    generation: int = 0
    starts: int = 0
    answered: bool = False
    silent_seconds: float = 0.0
    reason: str | None = None
    cut_short: bool = False
    ended: bool = False

    @property
    def learns(self) -> bool:
        """Whether it is a learner: one that sums with others, or could."""
        return any(isinstance(end, Member) for end in ends_in(self.arguments))

    @property
    def shares(self) -> bool:
        """Whether it is a worker of A3C, any of which can tell the shared state."""
        return any(isinstance(end, ModelWorker) for end in ends_in(self.arguments))
