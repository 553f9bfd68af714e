"""One word per concept: other names for the same thing do not appear in code.

`docs/glossary.md` maps the other names to ours.
"""

from __future__ import annotations

import re

import pytest

from tests.architecture.source import PACKAGE, REPOSITORY, Module, identifiers, modules

# Anywhere within an identifier.
FORBIDDEN_PARTS = {
    "timestep": "env step or tick",
    "timesteps": "env steps or ticks",
    "rollout": "trajectory, or to unroll",
    "rollouts": "trajectories",
    "fragment": "trajectory",
    "fragments": "trajectories",
    "gamma": "discount",
    "done": "terminated, truncated or valid",
    "dones": "terminated, truncated or valid",
    "baseline": "value",
    "baselines": "values",
}
# As a whole identifier; inside longer ones these words have ordinary meanings (`hidden_sizes`).
FORBIDDEN_WHOLE = {
    "global_step": "env_steps or updates",
    "hidden": "core_state",
    "hidden_state": "core_state",
    "weights": "parameters",
    "score": "episode_return",
    "scores": "episode_returns",
}
# (module, identifier) -> why another word than ours is right there.
ALLOWED: dict[tuple[str, str], str] = {}


def parts(identifier: str) -> list[str]:
    """The words of an identifier in snake_case or CamelCase, in lower case."""
    separated = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", identifier)
    return [part for part in separated.lower().split("_") if part]


def forbidden(module: Module) -> dict[str, str]:
    """Identifiers of a module that use another name for something of ours, with our word."""
    found = {}
    for identifier in identifiers(module):
        ours = [FORBIDDEN_PARTS[part] for part in parts(identifier) if part in FORBIDDEN_PARTS]
        ours += [FORBIDDEN_WHOLE[identifier]] if identifier in FORBIDDEN_WHOLE else []
        if ours:
            found[identifier] = ours[0]
    return found


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_identifiers_use_our_words(module: Module) -> None:
    found = forbidden(module)
    allowed = {identifier for name, identifier in ALLOWED if name == module.name}
    assert {name: ours for name, ours in found.items() if name not in allowed} == {}


def test_every_exception_is_still_needed() -> None:
    found = {(module.name, name) for module in modules() for name in forbidden(module)}
    assert set(ALLOWED) <= found


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("num_timesteps = 1", {"num_timesteps"}),
        ("class RolloutBuffer: ...", {"RolloutBuffer"}),
        ("def f(gamma): ...", {"gamma"}),
        ("def done(): ...", {"done"}),
        ("x.done", {"done"}),
        ("f(dones=1)", {"dones"}),
        ("from a import baseline as value", {"baseline"}),
        ("global_step: int", {"global_step"}),
        ("score, weights = 1, 2", {"score", "weights"}),
        ("hidden = 0", {"hidden"}),
        ("hidden_sizes, weights_only, abandoned = 1, 2, 3", set()),
        ("'gamma'  # done", set()),
        ("HINTS = {'gamma': 'discount'}", set()),
    ],
)
def test_other_words_are_noticed_in_names_and_only_there(text: str, names: set[str]) -> None:
    assert set(forbidden(Module("m", text))) == names


def test_glossary_explains_every_word_that_is_refused() -> None:
    glossary = (REPOSITORY / "docs" / "glossary.md").read_text(encoding="utf-8")
    refused = {word.removesuffix("s") for word in [*FORBIDDEN_PARTS, *FORBIDDEN_WHOLE]}
    assert {word for word in refused if word not in glossary} == set()


def test_package_was_found() -> None:
    assert PACKAGE.is_dir()
    assert {"repertory", "repertory.config", "repertory.trajectories"} <= {
        module.name for module in modules()
    }
