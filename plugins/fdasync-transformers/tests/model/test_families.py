"""Every family that is served: paged tokens equal `generate`, captured ids equal the routers' own selections.

What makes each family odd (windows, sinks, chunks, latents, query temperature) is also taken away once, and
the self-check must then refuse the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checks.steps import PLAYED, generated, paged_steps_equal_generate, prompts, selections
from common_families import SERVED
from fdasync_transformers.capture import routing as capture
from fdasync_transformers.model import attention, families, probe
from fdasync_transformers.model.kv import KVPool, Reach
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from made import Made
from step_driver import Driver
from structures import by_structure

from fdasync.errors import ConfigError, UnsupportedModel

if TYPE_CHECKING:
    from pathlib import Path

MOE = [family for family in SERVED if family != "qwen3_dense"]
MLA = ("glm4_moe_lite", "deepseek_v2", "deepseek_v3", "longcat_flash")


@pytest.mark.ci
@pytest.mark.parametrize("family", PLAYED.by_day)
async def test_paged_steps_equal_generate_and_capture_equals_the_routers(tmp_path: Path, family: str) -> None:
    await paged_steps_equal_generate(Made(family, tmp_path))


@pytest.mark.ci(after=3)
@pytest.mark.parametrize(
    ("family", "layers", "experts", "top_k"),
    [
        ("qwen3_moe", (0, 2, 3), 8, 3),
        ("ernie4_5_moe", (1, 2, 3), 8, 3),
        ("glm4_moe", (1, 2, 3), 8, 3),
        ("glm4_moe_lite", (1, 2, 3), 8, 3),
        ("llama4_text", (1, 3), 8, 1),
        ("longcat_flash", (0, 1), 8, 3),
    ],
)
async def test_layer_ids_are_hidden_layer_numbers(
    tmp_path: Path, family: str, layers: tuple[int, ...], experts: int, top_k: int
) -> None:
    make_tiny_checkpoint(tmp_path, family)
    driver = await Driver.open(tmp_path)
    capacity = driver.capacity
    assert (capacity.moe_layer_ids, capacity.num_experts, capacity.top_k) == (layers, experts, top_k)
    assert capacity.top_k_by_layer is None
    await driver.close()


async def test_uneven_top_k_is_told_by_layer(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "hunyuan_v1_moe")
    driver = await Driver.open(tmp_path)
    assert driver.capacity.top_k == 3
    assert driver.capacity.top_k_by_layer == (2, 3, 1, 2)
    await driver.close()


@pytest.mark.ci
async def test_more_than_256_experts_make_wide_rows(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path, "qwen3_moe", num_experts=300, moe_intermediate_size=4, num_experts_per_tok=6)
    driver = await Driver.open(tmp_path)
    (seq,) = sequences = [driver.sequence(prompts(40)[0], 4)]
    await driver.run(sequences)
    rows = driver.rows(seq)
    assert rows.dtype == np.uint16
    assert rows.max() > 255
    wanted = selections(model, (seq.prompt + seq.tokens)[:-1])
    assert all(np.array_equal(np.sort(rows[:, layer], axis=-1), ids) for layer, ids in enumerate(wanted))
    await driver.close()


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("family", by_structure(MLA))
async def test_latents_and_expanded_kv_give_the_same_tokens(tmp_path: Path, family: str) -> None:
    make_tiny_checkpoint(tmp_path, family)
    results, sizes = [], []
    for latent in (True, False):
        driver = await Driver.open(tmp_path, config={"latent_mla": latent})
        sequences = [driver.sequence(prompt, 8) for prompt in prompts(6, 30)]
        await driver.run(sequences, chunks=2)
        results.append([seq.tokens for seq in sequences])
        sizes.append(driver.capacity.block_nbytes)
        await driver.close()
    assert results[0] == results[1]
    assert sizes[0] * 4 < sizes[1]


async def test_half_precision_passes_the_self_check(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    driver = await Driver.open(tmp_path, config={"dtype": "bfloat16"})
    assert driver.capacity.kv_dtype == "bfloat16"
    sequences = [driver.sequence(prompt, 4) for prompt in prompts(6, 30)]
    await driver.run(sequences)
    assert all(len(seq.tokens) == 4 for seq in sequences)
    await driver.close()


async def test_longrope_of_phimoe_ends_where_cached_keys_would_change(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.1, 1.2, 1.3, 1.4]}
    rope |= {"long_factor": [2.0, 3.0, 4.0, 5.0], "short_mscale": 1.2, "long_mscale": 1.5}
    rope |= {"original_max_position_embeddings": 48, "factor": 4.0}
    model = make_tiny_checkpoint(tmp_path, "phimoe", rope_parameters=rope)
    driver = await Driver.open(tmp_path)
    assert driver.capacity.max_context_tokens == 48
    assert any("48" in note for note in driver.capacity.notes)
    sequences = [driver.sequence(prompt, 7) for prompt in prompts(5, 17, 40)]
    await driver.run(sequences, chunks=2)
    assert [seq.tokens for seq in sequences] == [generated(model, seq.prompt, 7) for seq in sequences]
    await driver.close()


async def test_layers_of_experts_alone_keep_nothing(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path, "nemotron_h", layers_block_type=["attention", "moe"] * 2)
    driver = await Driver.open(tmp_path)
    assert driver.capacity.kv_layout == "shares-first:2x(2,8,8)"
    assert driver.capacity.state_specs == ()
    sequences = [driver.sequence(prompt, 5, arrival) for arrival, prompt in enumerate(prompts(9, 14))]
    await driver.run(sequences, chunks=2)
    assert [seq.tokens for seq in sequences] == [generated(model, seq.prompt, 5) for seq in sequences]
    await driver.close()


# -- what is refused ----------------------------------------------------------------------------


async def refused(folder: Path, **limits: Any) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        await Driver.open(folder, **limits)
    return caught.value.reason


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
async def test_rope_that_depends_on_the_batch_is_refused(tmp_path: Path, kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    make_tiny_checkpoint(tmp_path, "qwen3_moe", rope_parameters=rope)
    assert "batch" in await refused(tmp_path)


async def test_experts_that_cannot_be_exchanged_say_so(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "llama4_text")
    with pytest.raises(ConfigError) as caught:
        await Driver.open(tmp_path, config={"experts": "grouped_mm"})
    assert caught.value.field == "runner_config.experts"


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("family", ["qwen3_moe_swa", "gpt_oss", "llama4_text", "qwen2_moe_swa", "mixtral", "phimoe"])
async def test_self_check_refuses_a_model_whose_window_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    make_tiny_checkpoint(tmp_path, family)
    monkeypatch.setattr(probe, "_reach", lambda *_: Reach())
    assert "differs from separate sequences" in await refused(tmp_path)


async def test_self_check_refuses_lost_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_checkpoint(tmp_path, "gpt_oss")
    honest = attention._attend
    monkeypatch.setattr(attention, "_attend", lambda *args: honest(*args[:-2], None, args[-1]))
    assert "differs" in await refused(tmp_path)


async def test_self_check_refuses_an_unmended_query_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_checkpoint(tmp_path, "llama4_text")
    monkeypatch.setattr(families, "mend", lambda _: families.Mends((), None, ()))
    assert "differs" in await refused(tmp_path)


async def test_self_check_refuses_ids_of_the_wrong_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    honest = capture.RoutingCapture.rows
    monkeypatch.setattr(capture.RoutingCapture, "rows", lambda self, count: honest(self, count)[::-1])
    assert "routing equal at" in await refused(tmp_path)


async def test_self_check_refuses_reading_what_a_past_owner_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    # a block that is filled in part keeps the rest of what was in it
    monkeypatch.setattr(KVPool, "clear", lambda *_: None)
    assert "differs from separate sequences" in await refused(tmp_path)


async def test_self_check_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_checkpoint(tmp_path, "mixtral")
    monkeypatch.setattr(probe, "_reach", lambda *_: Reach())
    driver = await Driver.open(tmp_path, config={"self_check": False})
    await driver.close()
