"""docs/write-a-processor.md as a distribution: its class, its entry point and its test, as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint

from tests.support.outer import outer_environment

PAGE = Path(__file__).parents[4] / "docs" / "write-a-processor.md"
# an engine that finds it by its name; the tiny model says 11 at once
ENGINE = """
import asyncio
import sys

from fdasync import Engine, EngineConfig, SamplingParams


async def main():
    own = {"dtype": "float32", "device": "cpu", "num_threads": 1, "self_check": False, "processors": ["keep_going"]}
    config = EngineConfig(model=sys.argv[1], runner_config=own, process="inline", tokenizer="none", num_blocks=32)
    async with Engine(config) as engine:
        plain = await engine.complete([5, 9, 7], SamplingParams(max_tokens=8, temperature=0.0))
        first = plain.samples[0].token_ids[0]
        asked = {"keep_going": {"token": first, "tokens": 3}}
        found = await engine.complete([5, 9, 7], SamplingParams(max_tokens=8, temperature=0.0, processors=asked))
        print(first not in found.samples[0].token_ids[:3], first in plain.samples[0].token_ids[:3])


asyncio.run(main())
"""


@pytest.mark.ci
def test_the_processor_of_the_page_installs_and_passes_its_test(tmp_path: Path) -> None:
    text = PAGE.read_text()
    processor, test = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (project,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "keep_going.py").write_text(processor)
    (tmp_path / "test_keep_going.py").write_text(test)
    (tmp_path / "engine.py").write_text(ENGINE)
    info = tmp_path / "keep_going-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: keep-going\nVersion: 1.0\n")
    ((group, points),) = tomllib.loads(project)["project"]["entry-points"].items()
    lines = [f"{name} = {target}" for name, target in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    make_tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    for command, wanted in (
        ("-m pytest -q -p no:cacheprovider -p no:asyncio test_keep_going.py", "1 passed"),
        ("engine.py model", "True True"),
        ("-m fdasync plugins", "keep_going"),
    ):
        done = subprocess.run(
            [sys.executable, *command.split()],
            cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
            env=outer_environment(PYTHONPATH=path),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert wanted in done.stdout, command
