"""What a learner or worker needs of others, for tests in which there are none."""

from __future__ import annotations

from typing import Any

import torch

from repertory.metrics import Record


class Alone:
    """A group of one."""

    def sum(self, vector: torch.Tensor, *counts: int) -> tuple[int, ...]:
        return counts

    def leave(self) -> None:
        """Nobody is left behind."""


class Line:
    """A role's line to nobody; keeps the records."""

    name = "learner-0"
    starts = 0

    def __init__(self) -> None:
        self.records: list[Record] = []

    def report(self, record: Record) -> None:
        self.records.append(record)

    def offer_state(self, collect: Any) -> None:
        """Nobody asks."""
