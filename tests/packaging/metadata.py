"""What the project file says."""

from __future__ import annotations

import tomllib
from typing import Any

from tests.architecture.source import REPOSITORY


def project() -> dict[str, Any]:
    """The `[project]` table of pyproject.toml."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    table: dict[str, Any] = tomllib.loads(text)["project"]
    return table
