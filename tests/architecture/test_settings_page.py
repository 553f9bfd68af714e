"""The page of settings says what the code says."""

from __future__ import annotations

import runpy
from pathlib import Path


def test_the_page_of_settings_is_of_today() -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "settings.py"))
    assert script["PAGE"].read_text() == script["page"](), "run python scripts/settings.py"
