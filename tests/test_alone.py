"""Each distribution's suite is alone with what its pyproject file names: it imports no other distribution.

    python -m tests.test_alone fdasync-kernels -m "not ci and not nightly"

runs the suite of one in an environment that has all of them, with the others refused.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.support.outer import outer_environment

ROOT = Path(__file__).parent.parent
REFUSING = ROOT / "tests" / "support" / "alone"
#: packages that a distribution may require, and the modules that they are
OF_OTHERS = {
    "torch": "torch", "triton": "triton", "transformers": "transformers", "pyzmq": "zmq", "starlette": "starlette",
    "uvicorn": "uvicorn", "ray": "ray", "cryptography": "cryptography",
}  # fmt: skip
PLUGINS = {path.parent.name: path for path in sorted(ROOT.glob("plugins/*/pyproject.toml"))}
CORE_ROOMS = (
    "cache", "cli", "drafting", "engine", "events", "gpu", "ipc", "runner", "scheduler", "telemetry", "testing",
)  # fmt: skip
# what tests of the core's rooms for devices need
CORE_EXTRAS = {"torch"}


def _asked(requirement: str) -> tuple[str, list[str]]:
    match = re.match(r"([\w.-]+)(?:\[([^]]*)\])?", requirement)
    assert match is not None, requirement
    return match[1], [extra.strip() for extra in (match[2] or "").split(",") if extra]


def needs(name: str, extras: list[str]) -> set[str]:
    """All packages that a distribution requires with these extras, by name, those of its requirements among them."""
    found, todo, seen = set(), [(name, extra) for extra in ["", *extras]], set()
    while todo:
        one, extra = todo.pop()
        found.add(one)
        if one not in PLUGINS or (one, extra) in seen:
            continue
        seen.add((one, extra))
        project = tomllib.loads(PLUGINS[one].read_text())["project"]
        wanted = project.get("optional-dependencies", {}).get(extra, []) if extra else project["dependencies"]
        for requirement in wanted:
            other, more = _asked(requirement)
            todo += [(other, each) for each in ["", *more]]
    return found


def refused(name: str) -> list[str]:
    """Modules that the suite of a distribution may not import: all that neither it nor its extras require."""
    if name == "fdasync":
        allowed = CORE_EXTRAS
    else:
        extras = tomllib.loads(PLUGINS[name].read_text())["project"].get("optional-dependencies", {})
        allowed = needs(name, list(extras))
    ours = {plugin: plugin.replace("-", "_") for plugin in PLUGINS}
    # torch brings it
    allowed |= {"triton"} if "fdasync-kernels" in allowed else set()
    return sorted(module for package, module in {**ours, **OF_OTHERS}.items() if package not in allowed)


def command(name: str, *options: str) -> tuple[list[str], dict[str, str]]:
    """What runs the suite of a distribution, and its environment."""
    folders = [f"tests/{room}" for room in CORE_ROOMS] if name == "fdasync" else [f"plugins/{name}/tests"]
    path = os.pathsep.join([str(REFUSING), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = outer_environment(PYTHONPATH=path, FDASYNC_REFUSED=",".join(refused(name)))
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *folders], environment


def test_what_is_refused_follows_from_the_requirements() -> None:
    assert {"fdasync_fleet", "fdasync_kernels", "zmq", "triton", "transformers"} <= set(refused("fdasync"))
    assert {"fdasync_fleet", "zmq", "fdasync_transformers"} <= set(refused("fdasync-kernels"))
    assert "triton" not in refused("fdasync-kernels")
    assert set(refused("fdasync-ray")) >= {"torch", "transformers"}
    assert entry_points(group="fdasync.stores"), "without a package that is installed nothing would be shown"


@pytest.mark.ci
@pytest.mark.parametrize("name", ["fdasync", *PLUGINS])
def test_a_suite_imports_no_other_distribution(name: str) -> None:
    words, environment = command(name, "--collect-only")
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, "\n".join(re.findall(r"^E .*|^ERROR .*", done.stdout, re.MULTILINE)) or done.stderr
    assert int(re.findall(r"(\d+) tests collected", done.stdout)[0]) > 15


@pytest.mark.ci
def test_row_formats_need_numpy_alone() -> None:
    words, environment = command("fdasync-trainer", "--collect-only")
    environment["FDASYNC_REFUSED"] = ",".join([*refused("fdasync"), "torch"]).replace("fdasync_trainer,", "")
    words[-1] += "/rows"
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    run, its_environment = command(*sys.argv[1:])
    sys.exit(subprocess.run(run, cwd=ROOT, env=its_environment, check=False).returncode)
