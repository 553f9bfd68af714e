"""What a user may import, and that the four algorithms can be read side by side."""

from __future__ import annotations
import __future__

import ast
import inspect
import itertools
from types import ModuleType

import pytest

import repertory
from tests.architecture.source import Module, modules


def visible_names(package: ModuleType) -> set[str]:
    """Names that `dir` shows, less private ones, submodules and `from __future__ import ...`."""
    public = {name: getattr(package, name) for name in dir(package) if not name.startswith("_")}
    return {
        name
        for name, value in public.items()
        if not isinstance(value, ModuleType | __future__._Feature)
    }


def test_all_lists_exactly_the_visible_names() -> None:
    listed = list(getattr(repertory, "__all__", []))
    assert len(listed) == len(set(listed))
    assert set(listed) - {"__version__"} == visible_names(repertory)


def test_every_listed_object_has_a_docstring_of_its_own() -> None:
    objects = {name: getattr(repertory, name) for name in getattr(repertory, "__all__", [])}
    documented = {name for name, value in objects.items() if value.__doc__}
    described = {
        name
        for name, value in objects.items()
        if inspect.isroutine(value) or inspect.isclass(value)
    }
    assert described - documented == set()


def test_visible_name_that_is_not_listed_is_noticed() -> None:
    package = ModuleType("package")
    package.__dict__.update(
        train=len, _private=1, submodule=ast, annotations=__future__.annotations
    )
    assert visible_names(package) == {"train"}


def undocumented(module: Module) -> list[str]:
    """Public classes, functions and methods without a docstring, and the module without one."""
    missing = [] if ast.get_docstring(module.tree) else [module.name]
    missing += [
        f"{module.name}.{name}"
        for name, node in public_definitions(module.tree)
        if ast.get_docstring(node) is None
    ]
    return missing


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public_definitions(node: ast.Module | ast.ClassDef) -> list[tuple[str, Definition]]:
    """Public definitions at the top of a module or class and, dotted, those inside its classes."""
    found: list[tuple[str, Definition]] = []
    for child in node.body:
        if not isinstance(child, Definition) or child.name.startswith("_"):
            continue
        found.append((child.name, child))
        if isinstance(child, ast.ClassDef):
            found += [(f"{child.name}.{name}", inner) for name, inner in public_definitions(child)]
    return found


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_everything_public_is_documented(module: Module) -> None:
    assert undocumented(module) == []


def test_missing_docstring_is_noticed() -> None:
    text = 'class A:\n    """Is documented."""\n    def f(self): ...\n    def _g(self): ...\n'
    assert undocumented(Module("m", text)) == ["m", "m.A.f"]


def functions(module: Module) -> list[str]:
    """Names of a module's own functions, private ones too, in the order they are written."""
    return [node.name for node in module.tree.body if isinstance(node, ast.FunctionDef)]


OUTLINE = ["train", "learn", "targets"]
"""Functions that every algorithm has, in this order: start the roles, update, estimate."""


def differences(first: Module, second: Module) -> list[str]:
    """How two algorithm files fail to be readable side by side.

    Each has the outline. What else an arrangement needs is its own affair, but two files that both
    have a function of one name have such functions in one order.
    """
    names = {module.name: functions(module) for module in (first, second)}
    found = [
        f"{name} lacks the outline {OUTLINE} in this order: {listed}"
        for name, listed in names.items()
        if [function for function in listed if function in OUTLINE] != OUTLINE
    ]
    both = set(names[first.name]) & set(names[second.name])
    shared = [[name for name in listed if name in both] for listed in names.values()]
    if shared[0] != shared[1]:
        found.append(f"order: {first.name} {shared[0]}, {second.name} {shared[1]}")
    return found


def algorithm_modules() -> list[Module]:
    return [module for module in modules() if module.name.startswith("repertory.algorithms.")]


def test_algorithm_files_keep_the_same_functions_in_the_same_order() -> None:
    algorithms = algorithm_modules()
    if len(algorithms) < 2:
        pytest.skip("nothing to compare yet: fewer than two algorithms")
    found = [differences(*pair) for pair in itertools.combinations(algorithms, 2)]
    assert [line for lines in found for line in lines] == []


@pytest.mark.parametrize(
    ("first", "second", "number"),
    [
        ("train learn targets", "train learn targets", 0),
        ("train learn targets", "train act _own learn targets", 0),
        ("train learn targets", "train learn", 1),
        ("train learn targets", "learn train targets", 2),
        ("train act fill learn targets", "train fill act learn targets", 1),
        ("train _a _b learn targets", "train _b _a learn targets", 1),
    ],
)
def test_difference_of_outline_is_noticed(first: str, second: str, number: int) -> None:
    files = [
        Module(name, "\n".join(f"def {function}(): ..." for function in listed.split()))
        for name, listed in (("first", first), ("second", second))
    ]
    assert len(differences(*files)) == number
