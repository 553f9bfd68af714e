"""Size is a feature with a number: what has to be read stays small enough to be read.

Raising a number here is a commit of its own that says why.
"""

from __future__ import annotations

import pytest

from tests.architecture.source import Module, code_lines, config_lines, modules

ALGORITHM_LINES = 250
MODULE_LINES = 400
PACKAGE_LINES = 10_000


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_module_is_within_its_budget(module: Module) -> None:
    assert len(code_lines(module.text)) <= MODULE_LINES


@pytest.mark.parametrize(
    "module",
    [module for module in modules() if module.is_in("repertory.algorithms")],
    ids=lambda module: module.name,
)
def test_algorithm_is_within_its_budget(module: Module) -> None:
    assert len(code_lines(module.text) - config_lines(module.text)) <= ALGORITHM_LINES


def test_package_is_within_its_budget() -> None:
    assert sum(len(code_lines(module.text)) for module in modules()) <= PACKAGE_LINES


COUNTED = '''"""A module's docstring
of two lines."""

# A comment.
from dataclasses import dataclass


@dataclass
class SomeConfig:
    """What it is."""

    size: int = 1
    """What the field is."""


def area(  # with a remark
    width: float,
) -> str:
    """One line."""

    return """a text
that is not documentation""" + str(width)
'''


def test_counted_are_code_lines_only() -> None:
    assert sorted(code_lines(COUNTED)) == [5, 8, 9, 12, 16, 17, 18, 21, 22]


def test_config_of_an_algorithm_is_not_counted() -> None:
    assert sorted(code_lines(COUNTED) - config_lines(COUNTED)) == [5, 16, 17, 18, 21, 22]
