"""What README shows runs as it stands there, and so do the examples."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fdasync_transformers import make_random_checkpoint

from tests.support.commands import command, config_file

ROOT = Path(__file__).parent.parent


def run(arguments: list[str], cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def snippet(page: str, word: str) -> str:
    """The first one of a page that has this word."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return next(one for one in found if word in one)


@pytest.mark.nightly
def test_tiers_and_weights_run_as_written(tmp_path: Path) -> None:
    make_random_checkpoint(tmp_path / "checkpoint", size="tiny")
    call = "import asyncio\nasyncio.run(step(list(range(20, 90)), 17))\n"
    (tmp_path / "tiers.py").write_text(snippet("docs/embed.md", "PrometheusTap") + call)
    out = run(["tiers.py"], tmp_path)
    assert out.startswith("0 0 0\n")
    assert "fdasync_weight_version" in out
    assert (tmp_path / "kv").is_dir()


@pytest.mark.ci
def test_the_ten_lines_run_as_written(tmp_path: Path) -> None:
    make_random_checkpoint(tmp_path / "checkpoint", size="tiny")
    (tmp_path / "ten_lines.py").write_text(snippet("README.md", "Engine"))
    out = run(["ten_lines.py"], tmp_path)
    shapes = re.findall(r"\((\d+), 2, 2\)$", out, re.MULTILINE)
    assert len(shapes) == 4, out
    assert all(0 < int(rows) <= 3 + 16 - 1 for rows in shapes)


@pytest.mark.ci
def test_a_router_answers_as_written(tmp_path: Path) -> None:
    (line,) = re.findall(r"^fdasync (up .*?)  +#", (ROOT / "docs/prefill-decode.md").read_text(), re.MULTILINE)
    config = config_file(tmp_path, {"vocab_size": 256})
    (tmp_path / "apart.py").write_text(snippet("docs/prefill-decode.md", "ipc://run"))
    with command(tmp_path, *line.replace("--model checkpoint", f"--config {config}").split(), cwd=tmp_path) as running:
        running.until("ready; connect with")
        out = run(["apart.py"], tmp_path)
        running.signal(signal.SIGINT)
        assert running.wait() == 0, running.text
    shapes = re.findall(r"\((\d+), \d+, \d+\)$", out, re.MULTILINE)
    assert shapes == [str(3 + 16 - 1)] * 4, out


@pytest.mark.ci
def test_the_disaggregated_example_runs(tmp_path: Path) -> None:
    out = run([str(ROOT / "examples" / "disaggregated.py")], tmp_path)
    assert out.count("24 tokens (length)") == 4
    assert re.search(r"decode decode: 4 samples, [1-9][0-9]* blocks received", out), out


@pytest.mark.ci
def test_the_http_example_runs(tmp_path: Path) -> None:
    out = run([str(ROOT / "examples" / "http_service.py")], tmp_path)
    assert re.search(r"/llm/generate: \[\d+, \d+, \d+\], [1-9]\d* characters of rows", out), out


@pytest.mark.nightly
def test_the_embedders_example_runs(tmp_path: Path) -> None:
    make_random_checkpoint(tmp_path / "model", size="tiny")
    out = run([str(ROOT / "examples" / "embed.py"), "model"], tmp_path)
    assert out.count("advantage") == 12
    assert out.count("next turn") == 3
