"""The example on TRL's trainer, as users start it: three steps, fixed numerics, old log-probs, Ctrl-C, TRL missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = Path(__file__).parents[2] / "examples"
PRETRAIN_STEPS = 25  # fewer, and the experts that differ move no log-prob
PROBLEMS, GROUP = 9, 8
pytestmark = pytest.mark.nightly
needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed: pip install 'trl>=1.16,<2'")

# what users run, in a program that looks at it from within
WATCHED = """
import sys, threading
import trl_grpo as example

def line(number, one, own=example.line):
    assert threading.active_count() == 1, threading.enumerate()
    return own(number, one)

example.line = line
{more}
sys.exit(example.main())
"""
# two updates for each rollout: TRL computes old log-probs of whole rollouts, in parts
TWICE = """
import functools
example.GRPOConfig = functools.partial(example.GRPOConfig, num_iterations=2)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("trl") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import_module("small_moe").pretrain(folder, steps=PRETRAIN_STEPS, say=[].append)
    before = sorted(folder.iterdir())
    yield folder
    assert sorted(folder.iterdir()) == before  # TRL wrote nothing into it


def options_for(model: Path) -> list[str]:
    return ["--folder", str(model), "--pretrain-steps", str(PRETRAIN_STEPS), "--problems", str(PROBLEMS)]


def play(model: Path, tmp_path: Path, *options: str, more: str = "") -> tuple[str, list[dict[str, Any]]]:
    """What a run says, and the figures that it writes."""
    out = tmp_path / "made" / "figures.json"
    done = subprocess.run(
        [sys.executable, "-c", WATCHED.format(more=more), *options_for(model), "--out", str(out), *options],
        cwd=EXAMPLES, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    return done.stdout, msgspec.json.decode(out.read_bytes())["figures"]


def rows_of(step: dict[str, Any]) -> int:
    """Every token of a sample but the last has a row, its prompt included; a step has a problem of each length."""
    prompts = sum(range(6 + 1, 14 + 2))
    return int(step["tokens"]) + GROUP * prompts - PROBLEMS * GROUP


@needs_trl
def test_three_steps_replay_the_rollouts_experts(model: Path, tmp_path: Path) -> None:
    said, steps = play(model, tmp_path, "--steps", "3")
    assert len(steps) == said.count("K3 KL ") - 1 == 3, said  # and the table's head
    for step in steps:
        # bfloat16's rounding is left; on the same samples the trainer's own experts are further away
        assert 0 < step["kl_replayed"] < step["kl_live"] < 1e-2, step
        assert step["replayed_tokens"] == rows_of(step)
    # the second step was sampled from other weights
    assert len({step["kl_replayed"] for step in steps}) == 3


@needs_trl
def test_with_fixed_numerics_every_ratio_is_one(model: Path, tmp_path: Path) -> None:
    _, steps = play(model, tmp_path, "--steps", "2", "--numerics", "fixed")
    assert [step["other_bits"] for step in steps] == [0, 0]
    assert [step["kl_live"] for step in steps] == [step["kl_replayed"] for step in steps] == [0, 0]


@needs_trl
def test_old_log_probs_are_of_the_rollouts_experts_too(model: Path, tmp_path: Path) -> None:
    _, (step,) = play(model, tmp_path, "--steps", "1", more=TWICE)
    # of the whole rollout, and in the loss of the first update
    assert step["replayed_tokens"] == 2 * rows_of(step)


@needs_trl
@pytest.mark.parametrize("to_all", [True, False], ids=["from a terminal", "to it alone"])
def test_an_interrupt_leaves_nothing_behind(model: Path, tmp_path: Path, to_all: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLES / "trl_grpo.py"), *options_for(model), "--steps", "500"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("step 1:"):
            break
    (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=600)
    assert process.returncode == 130, said + rest
    assert "Traceback" not in rest, rest
    with pytest.raises(ProcessLookupError):  # its worker has ended too
        os.killpg(process.pid, 0)
    assert not list(tmp_path.iterdir())


def test_without_trl_it_says_how_to_install_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['trl'] = None; import trl_grpo"],
        cwd=EXAMPLES, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "trl_grpo.py needs TRL" in done.stderr
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr
