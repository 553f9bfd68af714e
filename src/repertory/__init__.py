"""Actor-critic agents that people can run, trust and read.

What is here is the whole public surface; each name is imported when it is first asked for, so that
`import repertory` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from repertory.agent import Agent
    from repertory.algorithms.a2c import A2CConfig
    from repertory.algorithms.a3c import A3CConfig
    from repertory.algorithms.batched_a2c import BatchedA2CConfig
    from repertory.algorithms.impala import IMPALAConfig
    from repertory.evaluation import Evaluation, evaluate
    from repertory.runs import Result
    from repertory.training import resume, train

__all__ = [
    "A2CConfig",
    "A3CConfig",
    "Agent",
    "BatchedA2CConfig",
    "Evaluation",
    "IMPALAConfig",
    "Result",
    "evaluate",
    "resume",
    "train",
]

_MODULES = {
    "A2CConfig": "repertory.algorithms.a2c",
    "A3CConfig": "repertory.algorithms.a3c",
    "Agent": "repertory.agent",
    "BatchedA2CConfig": "repertory.algorithms.batched_a2c",
    "Evaluation": "repertory.evaluation",
    "IMPALAConfig": "repertory.algorithms.impala",
    "Result": "repertory.runs",
    "evaluate": "repertory.evaluation",
    "resume": "repertory.training",
    "train": "repertory.training",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'repertory' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return __all__
