"""The Ray actor that keeps the shared parameters of A3C: one call at a time, so none is lost.

A push is a call that Ray delivers at most once, and that nobody repeats. What is not here: what
becomes of it (`served`).
"""

from __future__ import annotations

from typing import Any


class ModelServer:
    """An ordinary actor: it does one thing at a time."""

    def __init__(self, *settings: Any) -> None:
        """Begin with given parameters; the settings are those of `ServedModel`."""
        # Imported here: every seat that holds a handle of this actor imports this module, and a
        # seat needs no torch.
        from repertory.runtimes.ray_cluster.served import ServedModel

        self._served = ServedModel(*settings)

    def at(self, key: str, verb: str, *arguments: Any) -> Any:
        """A verb, called as those of a place are."""
        return getattr(self._served, verb)(*arguments)
