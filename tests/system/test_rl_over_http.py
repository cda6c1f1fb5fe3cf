"""The example of an RL loop over HTTP: its KL is that of the same loop in one process, and Ctrl-C leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.commands import is_running, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = Path(__file__).parents[2] / "examples"
PRETRAIN_STEPS = 6
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def rl() -> Iterator[Any]:
    """The example as a module; it finds `rl_loop` beside it, as it does when it is run."""
    pytest.importorskip("fdasync_http")
    pytest.importorskip("httpx2")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield import_module("rl_over_http")


@pytest.fixture(scope="module")
def model(rl: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rl_http") / "model"
    assert rl.small_moe.pretrain(folder, steps=PRETRAIN_STEPS, say=[].append) == folder
    return folder


# so little training sorts nothing, and without rewards no update would change a weight
REWARDED = """
import sys
import rl_over_http as example
example.small_moe.reward = lambda _, tokens: len(set(tokens)) / example.small_moe.VOCAB_SIZE
sys.exit(example.main())
"""


def test_its_kl_is_that_of_the_loop_in_one_process(model: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REWARDED, *options_for(model), "--steps", "3"],
        cwd=EXAMPLES, capture_output=True, text=True, timeout=300, check=False, env=environment(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"│ +(\d) │ +(\S+) │ +(\S+) │ +(yes|NO) │", done.stdout)
    assert [row[0] for row in rows] == ["1", "2", "3"], done.stdout
    assert all(http == local and equal == "yes" for _, http, local, equal in rows), done.stdout
    values = [float(row[1]) for row in rows]
    # weights change with each step; what is left is bfloat16's rounding
    assert len(set(values)) == 3
    assert all(0 < value < 1e-3 for value in values)
    rewards = [float(one) for one in re.findall(r"reward ([\d.]+)", done.stdout)]
    assert all(0 < one < 1 for one in rewards), done.stdout
    assert not list(tmp_path.iterdir())


def test_one_loop_alone_is_not_called_equal(rl: Any) -> None:
    none = rl.rl_loop.mismatch([np.zeros(3, np.float32)], [np.zeros(3, np.float32)])
    one = rl.rl_loop.StepFigures(0.5, none, 0, 0, 0, 0.0, 0, 0, 1.0, 1.0)
    assert [column.header for column in rl.compared({"over HTTP": [one]}).columns] == ["step", "over HTTP"]
    both = rl.compared({"over HTTP": [one], "in process": [one]})
    assert list(both.columns[-1].cells) == ["yes"]


def options_for(model: Path) -> list[str]:
    return ["--folder", str(model), "--pretrain-steps", str(PRETRAIN_STEPS), "--problems", "4"]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


def processes_of(group: int) -> list[int]:
    """Processes of a group that run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getpgid(int(entry.name)) == group and is_running(int(entry.name)):
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found


@pytest.mark.parametrize("to_all", [True, False], ids=["from a terminal", "to it alone"])
@pytest.mark.parametrize("said", ["loading", "step 1,"])
def test_an_interrupt_leaves_nothing_behind(model: Path, tmp_path: Path, said: str, to_all: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLES / "rl_over_http.py"), *options_for(model), "--steps", "500"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=environment(tmp_path),
    )  # fmt: skip
    assert process.stdout is not None
    heard = ""
    for line in process.stdout:
        heard += line
        if said in line:
            break
    (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=600)
    assert process.returncode == 130, heard + rest
    assert "Traceback" not in rest, rest
    wait_for(lambda: not processes_of(process.pid), "the server and its engine have ended")
    assert not list(tmp_path.iterdir())
