"""The play of published shapes: rehearsed on a CPU, and its judge finds what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fdasync_transformers.weights import loading

from benchmarks.lib.published_shapes import SHAPES
from fdasync.errors import UnsupportedModel
from tests.nightly.shapes import child, shapes
from tests.nightly.shapes.folder import write_config
from tests.nightly.shapes.judge import Float32Arithmetic, ShapeJudge, with_rows
from tests.nightly.shapes.process import Children
from tests.nightly.shapes.run import serve

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


@pytest.fixture
def no_blocking() -> None:
    """In place of the one that looks: the runner of this process computes on the test's own loop."""


def spec_of(folder: Path, name: str) -> child.Spec:
    return child.Spec(name, str(folder), str(folder / "found.json"), 0, tiny=True, kernels="torch")


def rehearse(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, report and messages of the play."""
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.nightly", "shapes", "--tiny", "--json", str(out), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=400)
    return done.returncode, json.loads(out.read_text()), done.stderr


@pytest.mark.nightly
def test_a_rehearsal_by_kernels_writes_what_it_found(tmp_path: Path) -> None:
    """One shape with groups and latents, one with windows and sinks, in Triton's interpreter."""
    names = {"DeepSeek-V3": "deepseek_v3", "gpt-oss-120b": "gpt_oss_120b"}
    status, report, said = rehearse(tmp_path, "--shapes", ",".join(names))
    assert status == 0, said
    figures, conditions = report["figures"], report["conditions"]
    assert figures["shapes_served"] == 2
    assert figures["shapes_failed"] == figures["wrong_rows"] == figures["missing_rows"] == figures["wrong_tokens"] == 0
    assert figures["exact_rows"] > 0.8 * figures["rows"] > 200
    for name, key in names.items():
        assert 0 < figures[f"weights_s_{key}"] <= figures[f"start_s_{key}"]
        assert figures[f"layers_{key}"] == SHAPES[name].least_layers
        assert figures[f"misplaced_{key}"] > 0.5
        assert figures[f"decode_ms_64_{key}"] > 0
        assert conditions["shapes"][name]["facts"]["books"]["hit_tokens"] > 0
    # 16 latents and 8 rotary dims of 3 layers; 2 heads of 16, keys and values, of 2 layers
    assert (figures["kv_token_bytes_deepseek_v3"], figures["kv_token_bytes_gpt_oss_120b"]) == (144, 256)
    assert "void" in conditions


@pytest.mark.nightly
def test_quantised_forms_tell_how_they_were_loaded(tmp_path: Path) -> None:
    status, report, said = rehearse(tmp_path, "--quantised", "--kernels", "torch")
    assert status == 0, said
    figures, found = report["figures"], report["conditions"]["shapes"]
    assert set(found) == set(shapes.QUANTISED)
    assert figures["wrong_rows"] == 0
    for name, form in (("DeepSeek-V3", "FP8"), ("gpt-oss-120b", "MXFP4")):
        key = shapes.slug(name)
        assert found[name]["facts"]["notes"][0].startswith(f"{form} dequantised to bfloat16")
        assert figures[f"load_gb_per_s_{key}"] > 0
        assert 0 < figures[f"largest_shard_gb_{key}"] < figures[f"weights_gb_{key}"]
        # of its own memory the child took some while it loaded, and was seen to
        assert found[name]["host_nbytes_while_loading"] > 0


@pytest.mark.nightly
async def test_a_child_that_fails_or_takes_too_long_is_told_and_ends(tmp_path: Path) -> None:
    children = Children()
    try:
        with pytest.raises(RuntimeError, match="KeyError: 'no such shape'"):
            await children.do(spec_of(tmp_path, "no such shape"), 120.0)
        with pytest.raises(RuntimeError, match="stopped after 0 s"):
            await children.do(spec_of(tmp_path, "Mixtral-8x7B"), 0.01)
        found, _ = await children.do(spec_of(tmp_path, "Mixtral-8x7B"), 120.0)
        assert found.counts["exact_rows"] > 100
    finally:
        await children.aclose()


# latents and groups; windows and sinks; a bias of its own; the others' parts are of these
QUICK = ("DeepSeek-V3", "gpt-oss-120b", "ERNIE-4.5-21B-A3B")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in SHAPES]
)
def test_every_shape_is_served_and_exact(name: str, tmp_path: Path) -> None:
    """The work of a child, here, with torch's attention; its verdict changes where rows are moved."""
    spec = spec_of(tmp_path, name)
    write_config(tmp_path, name, 0, small=True)
    try:
        loading.read_checkpoint(str(tmp_path), with_tensors=False)
    except UnsupportedModel as error:
        pytest.skip(f"this build does not load it: {error}")
    found = child.run(spec)
    assert found.counts["missing_rows"] == found.counts.get("wrong_rows", 0) == found.counts.get("wrong_tokens", 0) == 0
    assert found.counts["exact_rows"] > 100
    assert found.counts["answers"] == child.TINY.requests + child.TINY.again
    # half a spread of logits is no rounding
    assert found.tolerance < 0.5
    assert found.misplaced > 0.5


async def test_moved_lacking_and_other_rows_are_found(tmp_path: Path) -> None:
    write_config(tmp_path, "GLM-4.6", 0, small=True)
    asked = replace(child.TINY, kernels="torch")
    _, answers = await serve(str(tmp_path), asked, random_weights=True, mark=lambda _: None)
    checkpoint = loading.read_checkpoint(str(tmp_path), with_tensors=False)
    judge = ShapeJudge(lambda: loading.draw(checkpoint, "bfloat16", CPU), CPU)
    judge.calibrate(2, 40, (10, 272))
    assert judge.judge(answers).wrong == 0
    answer = max(answers, key=lambda one: len(one.prompt))
    routing = answer.routing
    assert judge.judge([with_rows(answer, np.roll(routing.array, 1, axis=0))]).counts["wrong_rows"] > 10
    assert judge.judge([with_rows(answer, routing.array[:-1])]).counts["missing_rows"] == len(routing.layer_ids)
    other = routing.array.copy()
    other[3, 0, 0] = next(expert for expert in range(16) if expert not in other[3, 0])
    assert judge.judge([with_rows(answer, other)]).counts["wrong_rows"] <= 1
    assert judge.judge([with_rows(answer, other)]).counts["exact_rows"] < judge.judge([answer]).counts["exact_rows"]


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "DeepSeek-V3", "MiniMax-M2", "gpt-oss-120b", "ERNIE-4.5-21B-A3B"])
def test_half_weights_compute_in_float32_as_wide_ones_do(name: str, tmp_path: Path) -> None:
    write_config(tmp_path, name, 0, small=True)
    checkpoint = loading.read_checkpoint(str(tmp_path), with_tensors=False)
    half: Any = loading.draw(checkpoint, "bfloat16", CPU)
    wide: Any = loading.draw(checkpoint, "bfloat16", CPU).float()
    ids = torch.randint(0, 272, (1, 40), generator=torch.Generator().manual_seed(0))
    for model in (half, wide):
        model.set_attn_implementation("eager")
        model.set_experts_implementation("eager")
    with torch.no_grad():
        rounded, exact = half(input_ids=ids, use_cache=False).logits, wide(input_ids=ids, use_cache=False).logits
        with Float32Arithmetic():
            found = half(input_ids=ids, use_cache=False).logits
    assert torch.equal(found, exact)
    assert not torch.equal(rounded.float(), exact)


@pytest.mark.parametrize("arguments", [["--shapes", "GPT-5"], ["--quantised", "--shapes", "Mixtral-8x7B"]])
def test_shapes_that_are_not_there_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        shapes.main(arguments)
    assert arguments[-1] in capsys.readouterr().err
