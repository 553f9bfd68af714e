"""The glossary and the code name the same settings."""

from __future__ import annotations

import re

from repertory.synonyms import NAMES_ELSEWHERE
from tests.architecture.source import REPOSITORY

ROW = re.compile(r"^\| `(\w+)` \| (`.+`) \|$", re.MULTILINE)


def test_settings_and_their_other_names_are_those_of_the_code() -> None:
    text = (REPOSITORY / "docs" / "glossary.md").read_text(encoding="utf-8")
    section = text.partition("\n## Settings by other names\n")[2]
    listed = {ours: tuple(re.findall(r"`(\w+)`", others)) for ours, others in ROW.findall(section)}
    assert listed == dict(NAMES_ELSEWHERE)
