"""The oldest versions that the pyproject files of this repository allow, as constraints for pip.

    python tests/support/floors.py > oldest.txt

The pyproject files are the one place that names floors. Every requirement in them has one, and a package has the same
in each file. Knows pyproject files, and neither pip nor an index. Run by `make test-oldest`; held to its word by
`tests/test_floors.py`.
"""

from __future__ import annotations

import re
import sys
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(\[[^]]*\])?\s*(?P<versions>[^;]*)")
_FLOOR = re.compile(r"[>=]=\s*([0-9][^,\s]*)")


def pyprojects() -> list[Path]:
    """The repository's own and that of each plugin."""
    return [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]


def floors(paths: list[Path]) -> dict[str, str]:
    """The floor of each package that the files require, to build, to run, or for an extra: name to version, in order
    of names, which are lower case with "-". The packages of the files themselves have none.

    Raises ValueError for a requirement without a floor, and for a package with two floors."""
    files = [tomllib.loads(path.read_text()) for path in paths]
    own = {_normal(file["project"]["name"]) for file in files}
    found: dict[str, str] = {}
    for path, file in zip(paths, files, strict=True):
        for requirement in _requirements(file):
            match = _REQUIREMENT.match(requirement)
            name = _normal(match["name"]) if match else ""
            if not match or name in own:
                continue
            floor = _FLOOR.match(match["versions"])
            if floor is None:
                raise ValueError(f"{path}: {requirement!r} names no oldest version")
            if found.setdefault(name, floor[1]) != floor[1]:
                raise ValueError(f"{path}: {name} has floor {floor[1]} here and {found[name]} in another file")
    return dict(sorted(found.items()))


def _requirements(file: dict[str, Any]) -> list[str]:
    extras = file["project"].get("optional-dependencies", {}).values()
    return [*file["build-system"]["requires"], *file["project"].get("dependencies", []), *chain.from_iterable(extras)]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    for name, version in floors(pyprojects()).items():
        sys.stdout.write(f"{name}=={version}\n")


if __name__ == "__main__":
    main()
