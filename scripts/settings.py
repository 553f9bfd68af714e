"""Write docs/settings.md: every setting and every preset, as the code has them.

Called without arguments: `python scripts/settings.py`. A test says when it is due.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from repertory.algorithms import ALGORITHMS
from repertory.config import RunConfig, field_docs
from repertory.presets import PRESETS, Preset

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"

HEAD = """# Settings

Every setting has one name: a field of a config class from Python, the same with hyphens as a flag
(`--unroll-length 20`, `--no-shared-statistics`), the same again in a run's `config.yaml`, which
`--config` takes back. Presets are laid over the defaults, a file over presets, flags over both;
`--print-config` shows what comes out. One default differs: on the command line, `runtime` is
`processes` for every algorithm. Names that other libraries use are in the
[glossary](glossary.md#settings-by-other-names).

This page is written by `python scripts/settings.py`.
"""

PRESETS_HEAD = """
## Presets

A preset belongs to an algorithm. The first one in this table that is made for the environment is
taken by itself on the command line; `--preset NAME` takes another, `--preset none` none. No preset
sets a protocol or a seed. From Python none is applied.

| algorithm | preset | is made for | source |
|---|---|---|---|
"""


def page() -> str:
    """The page as text."""
    return "".join(
        [
            HEAD,
            "\n## All algorithms\n",
            *_settings(RunConfig, {}),
            *(
                part
                for name, (config_class, _) in ALGORITHMS.items()
                for part in (f"\n## `{name}`\n", *_settings(config_class, field_docs(RunConfig)))
            ),
            PRESETS_HEAD,
            *(_preset_row(preset) for preset in PRESETS),
            "\nWhat they set beside the defaults:\n\n",
            *(part for preset in PRESETS for part in _values(preset)),
        ]
    )


def _settings(config_class: type[RunConfig], apart: Mapping[str, Any]) -> Iterator[str]:
    """A table for each group of the settings that are not documented elsewhere."""
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    kinds = typing.get_type_hints(config_class)
    group = None
    for name, doc in field_docs(config_class).items():
        if name in apart or name == "resume_from":  # which is no flag
            continue
        if doc.group != group:
            group = doc.group
            yield f"\n### {group}\n" if not apart else ""
            yield "\n| setting | default | |\n|---|---|---|\n"
        text = _cell(doc.text)
        if typing.get_origin(kinds[name]) is typing.Literal:
            options = [f"`{option}`" for option in typing.get_args(kinds[name])]
            text += f" One of {', '.join(options)}."
        yield f"| `{name}` | {_default(fields[name])} | {text} |\n"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()}`"
    if field.default is dataclasses.MISSING:
        return "must be given"
    return "none" if field.default is None else f"`{_plain(field.default)}`"


def _plain(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:_}" if value >= 10_000 else str(value)
    if isinstance(value, tuple):
        return " ".join(str(part) for part in value)
    return str(value)


def _preset_row(preset: Preset) -> str:
    made_for = ", ".join(f"`{pattern}`" for pattern in preset.environments) or "its name only"
    if preset.protocol:
        made_for += f", with `--protocol {preset.protocol}`"
    return f"| `{preset.algorithm}` | `{preset.name}` | {made_for} | {_cell(preset.source)} |\n"


def _values(preset: Preset) -> Iterator[str]:
    config_class, _ = ALGORITHMS[preset.algorithm]
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    changed = [
        f"{name} {_plain(value)}"
        for name, value in preset.settings.items()
        if value != defaults[name]
    ]
    yield f"- `{preset.algorithm}`, `{preset.name}`: {', '.join(changed)}\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    PAGE.write_text(page())
