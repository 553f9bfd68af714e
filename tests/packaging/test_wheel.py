"""The wheel, built from this checkout and used where the checkout cannot be seen.

The new environment has a site-packages of its own with the wheel's copy in it. The requirements
are not installed a second time: a `.pth` file lends it the running environment's. Such a file only
adds a folder to the path and does not run the `.pth` files in there, so an editable install of the
checkout stays out of sight.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, REPOSITORY
from tests.packaging.metadata import project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.xdist_group("wheel")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built with the running environment's build backend."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    run([*build, str(REPOSITORY)], folder)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of a new environment with the wheel in it."""
    root = tmp_path_factory.mktemp("installation")
    venv.create(root, with_pip=False, symlinks=True)
    place = {"base": str(root), "platbase": str(root)}
    site_packages = Path(sysconfig.get_path("purelib", "venv", vars=place))
    scripts = Path(sysconfig.get_path("scripts", "venv", vars=place))
    lent = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages / "lent.pth").write_text("\n".join(sorted(lent)) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(scripts / "python"), "install"]
    run([*pip, "--quiet", "--no-deps", "--no-index", str(wheel)], root)
    return scripts


def run(command: list[str], folder: Path) -> str:
    """Run in `folder`, without anything that leads back to the checkout; what it printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
    finished = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=150,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"repertory", f"repertory-{project()['version']}.dist-info"}
    sources = {str(path.relative_to(PACKAGE.parent)) for path in PACKAGE.rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert "repertory/py.typed" in names


def test_wheel_carries_licence_and_readme(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    information = f"repertory-{project()['version']}.dist-info"
    licence = archive.read(f"{information}/licenses/LICENSE").decode()
    assert licence == (REPOSITORY / "LICENSE").read_text()
    metadata = archive.read(f"{information}/METADATA").decode()
    assert "License-Expression: MIT\n" in metadata
    assert "Requires-Python: >=3.11\n" in metadata
    assert (REPOSITORY / "README.md").read_text() in metadata


def test_installed_copy_is_the_one_that_runs(installation: Path, tmp_path: Path) -> None:
    code = "import repertory; print(repertory.__file__)"
    printed = run([str(installation / "python"), "-c", code], tmp_path)
    assert Path(printed.strip()).is_relative_to(installation.parent)


def test_command_says_its_version(installation: Path, tmp_path: Path) -> None:
    printed = run([str(installation / "repertory"), "--version"], tmp_path)
    assert project()["version"] in printed


def test_installed_command_trains(installation: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [str(installation / "repertory"), "train", "a2c", "--env", "CartPole-v1"]
    extent = ["--total-steps", "2000", "--runtime", "inline", "--run-dir", str(folder)]
    run([*command, *extent], tmp_path)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert max(record.get("env_steps", 0) for record in records) >= 2000
    assert (folder / "config.yaml").is_file()
    assert list((folder / "checkpoints").glob("step_*.pt"))


def test_example_of_the_readme_runs(installation: Path, tmp_path: Path) -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    example, _ = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    shortened = example.replace("total_steps=200_000", "total_steps=2_000")
    assert shortened != example
    script = tmp_path / "example.py"
    script.write_text(shortened + "    assert action in (0, 1)\n")
    run([str(installation / "python"), str(script)], tmp_path)
    assert len(list((tmp_path / "runs").glob("CartPole-v1__a2c__1__*/config.yaml"))) == 1
