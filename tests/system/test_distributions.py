"""What is built of this repository: wheels are whole and work alone; type checkers read an editable install."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.floors import ROOT, pyprojects
from tests.support.wheels import TEN_LINES, build, copied, sources
from tests.test_bare import bare, closure, installed

pytestmark = pytest.mark.ci

COMMAND = """
    import sys
    from fdasync_command import main

    sys.argv = ["fdasync", *sys.argv[1:]]
    main()
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each distribution, by its name."""
    found = build(tmp_path_factory.mktemp("wheels"))
    return {wheel.name.partition("-")[0].replace("_", "-"): wheel for wheel in found}


def test_a_wheel_has_all_files_of_its_package_and_all_entry_points(wheels: dict[str, Path]) -> None:
    assert len(wheels) == len(pyprojects()) > 8
    for pyproject in pyprojects():
        project = tomllib.loads(pyproject.read_text())["project"]
        if project["name"] != "fdasync-example":  # a page shows all of that one
            whole = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            assert project["classifiers"] == whole["classifiers"]
        with zipfile.ZipFile(wheels[project["name"]]) as wheel:
            names = set(wheel.namelist())
            (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
            points = configparser.ConfigParser()
            points.optionxform = str  # type: ignore[method-assign, assignment]
            if f"{info}/entry_points.txt" in names:
                points.read_string(wheel.read(f"{info}/entry_points.txt").decode())
        own = [path.relative_to("src") if path.parts[0] == "src" else path for path in sources(pyproject)]
        package = {str(path) for path in own if path.name not in ("pyproject.toml", "README.md")}
        assert {name for name in names if not name.startswith(info)} == package
        assert f"{project['name'].replace('-', '_')}/py.typed" in package
        assert f"{info}/licenses/LICENSE" in names
        declared = {**project.get("entry-points", {}), "console_scripts": project.get("scripts", {})}
        assert {group: dict(points[group]) for group in points.sections()} == {k: v for k, v in declared.items() if v}


def test_the_wheels_list_their_plugins_and_serve(wheels: dict[str, Path], tmp_path: Path) -> None:
    """In a folder that has them, and of others what they require."""
    names = set().union(*map(closure, wheels))
    installed(tmp_path, {name for name in names if name not in wheels})
    for wheel in wheels.values():
        zipfile.ZipFile(wheel).extractall(tmp_path)
    listed = bare(tmp_path, COMMAND, "plugins", "--json")
    assert '"problem": ""' in listed
    assert set(re.findall(r'"distribution": "([^"]+)"', listed)) == set(wheels) - {"fdasync-kernels"}
    assert bare(tmp_path, TEN_LINES).splitlines() == ["16 16 (18, 4, 2)"] * 2


# -- an IDE finds it ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment in which the core and the fleet are installed as by `pip install -e`."""
    folder = tmp_path_factory.mktemp("editable")
    venv.create(folder / "env", symlinks=True)
    python = folder / "env" / "bin" / "python"
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True).stdout.strip())
    for pyproject in (ROOT / "pyproject.toml", ROOT / "plugins" / "fdasync-fleet" / "pyproject.toml"):
        copy = copied(pyproject, folder / "checkout" / pyproject.parent.name)
        made = "import sys; from setuptools import build_meta; print(build_meta.build_editable(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", made, str(folder)], cwd=copy, check=True, capture_output=True)
    for wheel in folder.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(site)
    # packages of others are those of this environment; path files there are not read
    (site / "zz_others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder outside the checkout: lines of README and of pages behind it, and a line with a wrong name."""
    pages = {"README.md": 1, "docs/embed.md": 2, "docs/prefill-decode.md": 2}
    for page, count in pages.items():
        # whole programs: other blocks of these pages name what a reader has
        blocks = re.findall(r"```python\n((?:import|from) .*?)```", (ROOT / page).read_text(), re.DOTALL)
        assert len(blocks) == count, page
        for number, block in enumerate(blocks):
            (tmp_path / f"{Path(page).stem.replace('-', '_')}_{number}.py").write_text(block)
    (tmp_path / "wrong.py").write_text("from fdasync import EngineConfig\n\nEngineConfig(max_runing=3)\n")
    return tmp_path


def complaints(command: list[str], folder: Path) -> list[str]:
    """The lines that tell of errors."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    return [line.strip() for line in done.stdout.splitlines() if re.search(r": error|- error", line)] or [done.stderr]


def test_mypy_reads_an_editable_install(editable: Path, elsewhere: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(editable), "--cache-dir=.cache"]
    (told,) = complaints([*command, "."], elsewhere)
    assert told.startswith('wrong.py:3: error: Unexpected keyword argument "max_runing"')


@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed: npm install -g pyright")
def test_pyright_reads_an_editable_install(editable: Path, elsewhere: Path) -> None:
    (told,) = complaints(["pyright", "--pythonpath", str(editable), "."], elsewhere)
    assert 'wrong.py:3:14 - error: No parameter named "max_runing"' in told
