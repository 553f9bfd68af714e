"""The package's source as the architecture tests read it: modules, imports, names, lines of code.

Everything is read from the syntax tree, so nothing has to be importable, and an import inside a
function or under `TYPE_CHECKING` is seen like any other.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "src" / "repertory"

NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Module:
    """One source file.

    Attributes:
        name: Dotted, as it is imported; a package goes by the name of its folder.
        text: Its source.
        is_package: Whether the file is an `__init__.py`; decides what a relative import means.
    """

    name: str
    text: str
    is_package: bool = False

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def is_in(self, *parents: str) -> bool:
        """Whether this is one of `parents` or lies inside one."""
        return is_within(self.name, *parents)


@dataclass(frozen=True)
class Import:
    """One imported name: `from a import b` is `a.b`, which may be a module or a thing in one."""

    name: str
    line: int
    types_only: bool


def is_within(name: str, *parents: str) -> bool:
    """Whether the dotted `name` is one of `parents` or lies inside one."""
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def modules(package: Path = PACKAGE) -> list[Module]:
    """Every module of the package, by name."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found.append(Module(name, path.read_text(encoding="utf-8"), is_package))
    return found


def imports(module: Module) -> list[Import]:
    """What a module imports, wherever in it the import stands."""
    return list(_imports(module, module.tree, types_only=False))


def _imports(module: Module, node: ast.AST, *, types_only: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, types_only)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(module, node)
        for alias in node.names:
            yield Import(f"{base}.{alias.name}", node.lineno, types_only)
    elif isinstance(node, ast.If) and _is_type_checking(node.test):
        for child in node.body:
            yield from _imports(module, child, types_only=True)
        for child in node.orelse:
            yield from _imports(module, child, types_only=types_only)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _imports(module, child, types_only=types_only)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    """The dotted name that a `from` import starts at."""
    if node.level == 0:
        return node.module or ""
    parts = module.name.split(".")
    up = node.level - 1 if module.is_package else node.level
    parts = parts[: len(parts) - up]
    return ".".join([*parts, node.module] if node.module else parts)


def attribute_chains(module: Module) -> list[tuple[str, int]]:
    """Dotted names as written in expressions, such as `torch.distributions.Normal`, and lines."""
    chains = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            parts: list[str] = []
            inner: ast.expr = node
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name):
                chains.append((".".join(reversed([*parts, inner.id])), node.lineno))
    return chains


def identifiers(module: Module) -> set[str]:
    """Every name that the module's code uses or makes; texts and comments are not code."""
    found: set[str] = set()
    for node in ast.walk(module.tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.alias(name=name, asname=asname):
                found.update(name.split("."))
                found.update([asname] if asname else [])
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                found.add(name)
            case ast.ExceptHandler(name=str(name)):
                found.add(name)
    return found


def code_lines(text: str) -> set[int]:
    """Numbers of the lines that hold code: no blank ones, no comments, no docstrings.

    A string that stands alone as a statement counts as a docstring wherever it stands, since the
    string under a dataclass field documents that field.
    """
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            documentation.update(_lines(node))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return code - documentation


def config_lines(text: str) -> set[int]:
    """Numbers of the lines that belong to a module's config dataclasses, decorators included."""
    lines: set[int] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config") and node.decorator_list:
            lines.update(range(node.decorator_list[0].lineno, (node.end_lineno or 0) + 1))
    return lines


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)
