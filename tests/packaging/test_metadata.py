"""The project's files agree with one another about versions, requirements and releases."""

from __future__ import annotations

import re

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.architecture.source import REPOSITORY
from tests.packaging.metadata import project


def pins() -> dict[str, Requirement]:
    """The constraints by name."""
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert len({canonicalize_name(pin.name) for pin in found}) == len(found)
    return {canonicalize_name(pin.name): pin for pin in found}


def requirements(*extras: str) -> list[Requirement]:
    """What is required at run time and by `extras`, those that an extra includes with it."""
    listed = [*project()["dependencies"]]
    for extra in extras:
        listed += project()["optional-dependencies"][extra]
    found = []
    for requirement in map(Requirement, listed):
        if requirement.name == "repertory":
            found += requirements(*requirement.extras)
        else:
            found.append(requirement)
    return found


def test_everything_the_tests_need_is_pinned_within_its_range() -> None:
    constraints = pins()
    for requirement in requirements("dev"):
        pin = constraints[canonicalize_name(requirement.name)]
        [specifier] = pin.specifier
        assert specifier.operator == "=="
        assert requirement.specifier.contains(specifier.version), (str(requirement), str(pin))


def test_tests_include_the_runtimes_and_environments_they_test() -> None:
    needed = {canonicalize_name(requirement.name) for requirement in requirements("dev")}
    assert {"ray", "ale-py", "minatar", "pytest-timeout", "pytest-randomly"} <= needed


def test_constraints_name_versions_and_nothing_of_a_machine() -> None:
    for pin in pins().values():
        assert pin.url is None
        [specifier] = pin.specifier
        assert Version(specifier.version).local is None, "a local build exists in one place only"


@pytest.mark.parametrize(
    "extra", ["atari", "minatar", "box2d", "envpool", "ray", "video", "onnx", "track", "dev"]
)
def test_extra_exists(extra: str) -> None:
    assert project()["optional-dependencies"][extra]


def test_versions_agree() -> None:
    version = project()["version"]
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == version
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    assert headings[0].startswith(("Unreleased", version))
    assert any(heading.split()[0] == version for heading in headings)


def test_ci_runs_every_supported_python() -> None:
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text())
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    prefix = "Programming Language :: Python :: 3."
    supported = [
        classifier.rpartition(" ")[2]
        for classifier in project()["classifiers"]
        if classifier.startswith(prefix)
    ]
    assert matrix == supported
    assert project()["requires-python"] == f">={supported[0]}"


def test_ci_names_actions_by_commit() -> None:
    text = (REPOSITORY / ".github/workflows/ci.yml").read_text()
    used = re.findall(r"uses: (\S+)", text)
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)] == []
