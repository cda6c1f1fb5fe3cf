"""docs/write-a-processor.md as a distribution: its class, its entry point and its test, as they stand there."""

from __future__ import annotations

from pathlib import Path

import pytest
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint

from tests.support.page_plugin import install, output_of, run_tests

PAGE = Path(__file__).parents[4] / "docs" / "write-a-processor.md"
# an engine that finds it by its name, and bars what the model says first
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
    install(PAGE, tmp_path, "keep_going")
    assert "1 passed" in run_tests(tmp_path, "keep_going")
    (tmp_path / "engine.py").write_text(ENGINE)
    make_tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    assert "True True" in output_of(tmp_path, "engine.py", "model")
    assert "keep_going" in output_of(tmp_path, "-m", "fdasync", "plugins")
