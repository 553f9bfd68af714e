"""Who may import whom; `docs/pipeline.md` says why."""

from __future__ import annotations

import pytest

from tests.architecture.source import Module, attribute_chains, imports, is_within, modules


def violations(module: Module) -> list[str]:
    """What a module imports against the rules, one readable line each."""
    found = [
        f"{module.name}:{imported.line} imports {imported.name}: {reason}"
        for imported in imports(module)
        for reason in _reasons(module, imported.name, types_only=imported.types_only)
    ]
    found += [
        f"{module.name}:{line} uses {chain}: {NO_DISTRIBUTIONS}"
        for chain, line in attribute_chains(module)
        if is_within(chain, "torch.distributions")
    ]
    return found


ONLY_PROTOCOLS = "an algorithm knows of runtimes only the protocols in runtimes.base"
RUNTIMES_KNOW_NOTHING = "a runtime carries roles and knows of no algorithm, environment or model"
TARGETS_ARE_PURE = "targets are pure functions and need nothing of the package but types"
RAY_IN_ONE_FOLDER = "Ray is imported in one folder, so that it stays optional"
ALE_IN_ONE_FILE = "the ALE is imported in one file, so that it stays optional"
NO_DISTRIBUTIONS = "policies have their own distributions, drawn from explicit generators"


def _reasons(module: Module, name: str, *, types_only: bool) -> list[str]:
    reasons = []
    if (
        module.is_in("repertory.algorithms")
        and is_within(name, "repertory.runtimes")
        and not is_within(name, "repertory.runtimes.base")
    ):
        reasons.append(ONLY_PROTOCOLS)
    if module.is_in("repertory.runtimes") and is_within(
        name, "repertory.algorithms", "repertory.environments", "repertory.models"
    ):
        reasons.append(RUNTIMES_KNOW_NOTHING)
    if module.is_in("repertory.targets") and is_within(name, "repertory") and not types_only:
        reasons.append(TARGETS_ARE_PURE)
    if is_within(name, "ray") and not module.is_in("repertory.runtimes.ray_cluster"):
        reasons.append(RAY_IN_ONE_FOLDER)
    if is_within(name, "ale_py") and not module.is_in("repertory.environments.atari"):
        reasons.append(ALE_IN_ONE_FILE)
    if is_within(name, "torch.distributions"):
        reasons.append(NO_DISTRIBUTIONS)
    return reasons


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_module_imports_only_what_it_may(module: Module) -> None:
    assert violations(module) == []


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("algorithms.a3c", "from repertory.runtimes import inline", ONLY_PROTOCOLS),
        ("algorithms.a3c", "from repertory.runtimes.processes import X", ONLY_PROTOCOLS),
        ("algorithms.a3c", "import repertory.runtimes.inline", ONLY_PROTOCOLS),
        ("algorithms.a3c", "from ..runtimes import inline", ONLY_PROTOCOLS),
        ("algorithms.a3c", "def f():\n    from repertory.runtimes import inline", ONLY_PROTOCOLS),
        ("runtimes.inline", "from repertory.models.base import Model", RUNTIMES_KNOW_NOTHING),
        ("runtimes.inline", "from repertory import environments", RUNTIMES_KNOW_NOTHING),
        ("runtimes.base", "import repertory.algorithms.a2c", RUNTIMES_KNOW_NOTHING),
        ("targets", "from repertory.trajectories import Trajectory", TARGETS_ARE_PURE),
        ("targets", "from .losses import loss", TARGETS_ARE_PURE),
        ("runtimes.processes", "import ray", RAY_IN_ONE_FOLDER),
        ("commands.doctor", "def f():\n    from ray.util import x", RAY_IN_ONE_FOLDER),
        ("environments.gymnasium", "from ale_py import roms", ALE_IN_ONE_FILE),
        ("models.policies", "from torch import distributions", NO_DISTRIBUTIONS),
        ("models.policies", "import torch\ntorch.distributions.Normal(0, 1)", NO_DISTRIBUTIONS),
    ],
)
def test_rule_is_noticed_when_broken(name: str, text: str, reason: str) -> None:
    assert any(reason in found for found in violations(Module(f"repertory.{name}", text)))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("algorithms.a3c", "from repertory.runtimes.base import Runtime"),
        ("algorithms.a3c", "from repertory.runtimes import base"),
        ("algorithms.a3c", "from repertory.models import build_model"),
        ("runtimes.processes", "from repertory.trajectories import Trajectory"),
        (
            "targets",
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from repertory.trajectories import Trajectory",
        ),
        ("runtimes.ray_cluster.queue", "import ray"),
        ("environments.atari", "import ale_py"),
        ("commands.train", "from repertory.runtimes.inline import InlineRuntime"),
        ("arrays", "import raylib"),
    ],
)
def test_what_is_allowed_is_not_reported(name: str, text: str) -> None:
    assert violations(Module(f"repertory.{name}", text)) == []


def test_relative_import_in_a_package_starts_at_the_package() -> None:
    package = Module("repertory.runtimes", "from .base import Runtime", is_package=True)
    assert [imported.name for imported in imports(package)] == ["repertory.runtimes.base.Runtime"]
