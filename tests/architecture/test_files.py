"""What must hold for every file that is checked in."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.architecture.source import REPOSITORY

# Folders that exist on one person's or one build machine only.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:home|Users|root|work|opt)/[\w.-]+")
# Written by programs, in whatever form they write.
RECORDED = (".json", ".jsonl", ".csv", ".svg")
TIDY = re.compile(r"(?:(?:.*\S)?\n)*.*\S\n")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def tracked_texts() -> dict[str, str]:
    """Path and text of every tracked text file."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True, timeout=30
    )
    texts = {}
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = REPOSITORY / name
        content = path.read_bytes() if path.is_file() else b""
        if b"\0" not in content:
            texts[name] = content.decode("utf-8")
    return texts


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    if not (REPOSITORY / ".git").exists():
        pytest.skip("not a checkout, so nothing says which files are tracked")
    return tracked_texts()


def test_no_file_names_a_place_on_one_machine(texts: dict[str, str]) -> None:
    assert "pyproject.toml" in texts
    found = {name: MACHINE_PATH.findall(text) for name, text in texts.items()}
    assert {name: paths for name, paths in found.items() if paths} == {}


@pytest.mark.parametrize("folder", ["home", "Users", "root", "work", "opt"])
def test_a_place_on_one_machine_is_noticed(folder: str) -> None:
    assert MACHINE_PATH.findall(f"open('/{folder}/someone/x')") == [f"/{folder}/someone"]


@pytest.mark.parametrize("text", ["runs/home/x", "https://example.org/home/x", "/dev/shm/x"])
def test_other_paths_are_not_reported(text: str) -> None:
    assert MACHINE_PATH.findall(text) == []


def broken_links(document: Path, text: str) -> list[str]:
    """Relative links in a Markdown text that lead to no file."""
    targets = [target.partition("#")[0] for target in LINK.findall(text) if "://" not in target]
    return [target for target in targets if target and not (document.parent / target).exists()]


def test_links_between_documents_lead_somewhere(texts: dict[str, str]) -> None:
    documents = {name: text for name, text in texts.items() if name.endswith(".md")}
    found = {name: broken_links(REPOSITORY / name, text) for name, text in documents.items()}
    assert {name: links for name, links in found.items() if links} == {}


def test_broken_link_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "there.md").touch()
    text = "[a](there.md) [b](there.md#part) [c](#part) [d](https://example.org) [e](missing.md)"
    assert broken_links(tmp_path / "index.md", text) == ["missing.md"]


def test_hand_written_files_end_with_one_newline_and_have_no_trailing_blanks(
    texts: dict[str, str],
) -> None:
    untidy = [
        name
        for name, text in texts.items()
        if text and not name.endswith(RECORDED) and not TIDY.fullmatch(text)
    ]
    assert untidy == []


@pytest.mark.parametrize("text", ["a", "a \n", "a\n\n", "a\t\nb\n"])
def test_untidy_text_is_noticed(text: str) -> None:
    assert not TIDY.fullmatch(text)


def test_tidy_text_is_not_reported() -> None:
    assert TIDY.fullmatch("a\n\n  b c\n")
