"""Models whose indexers pick the positions that attention reads. Blocks hold the indexers' keys, modules of other forms
are refused, and the self-check finds attention to other positions. Tokens and rows: `test_families.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fdasync_transformers import TransformersConfig
from fdasync_transformers.model import indexers, ragged
from fdasync_transformers.model.attention import TorchPaging
from fdasync_transformers.model.indexers import EarliestOfEquals, find_indexers
from fdasync_transformers.model.kv import KVLayout, KVPool, LayerSpec, Reach
from fdasync_transformers.model.ragged import RaggedPlan
from fdasync_transformers.start.indexed import refuse_undone
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint, make_tiny_model
from step_driver import Driver

from fdasync.errors import ConfigError, UnsupportedModel
from fdasync.runner.base import RunnerLimits

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


def prompts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(3, 250, length).tolist() for length in lengths]


def generated(model: Any, prompt: list[int], count: int) -> list[int]:
    asked = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.tensor([prompt]), **asked)[0, len(prompt) :].tolist()


# -- the keys in the blocks -----------------------------------------------------------------------------


@pytest.mark.ci(after=2)
@pytest.mark.parametrize(
    ("family", "dtype", "layout"),
    [
        ("deepseek_v32", "float32", "4x(1,20,0)+indexer:4x(1,8,0)"),
        # a layer reads the positions of the one before it, and has no keys of its own
        ("glm_moe_dsa", "float32", "4x(1,20,0)+indexer:3x(1,8,0)"),
        # its keys are float32 in every dtype
        ("dots3_note_text", "bfloat16", "4x(1,20,0)+indexer:2x(1,16,0)"),
    ],
)
async def test_keys_of_indexers_are_parts_of_a_block(tmp_path: Path, family: str, dtype: str, layout: str) -> None:
    make_tiny_checkpoint(tmp_path, family)
    driver = await Driver.open(tmp_path, config={"dtype": dtype, "self_check": False})
    assert driver.capacity.kv_layout == f"shares-first:{layout}"
    keys = layout.partition(":")[2]
    nbytes = int(keys[0]) * 8 * 4
    assert f"reads 16 positions at most, which {keys[0]} indexers pick: {nbytes} bytes of" in driver.capacity.notes[-1]
    await driver.close()


@pytest.mark.ci
async def test_expanded_kv_gives_the_same_tokens(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path, "glm_moe_dsa")
    driver = await Driver.open(tmp_path, config={"latent_mla": False, "self_check": False})
    assert driver.capacity.kv_layout == "shares-first:4x(4,12,12)+indexer:3x(1,8,0)"
    sequences = [driver.sequence(prompt, 8, arrival) for arrival, prompt in enumerate(prompts(6, 30))]
    await driver.run(sequences, chunks=2)
    assert [seq.tokens for seq in sequences] == [generated(model, seq.prompt, 8) for seq in sequences]
    await driver.close()


@pytest.mark.ci
async def test_a_long_chunk_is_scored_in_pieces_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_checkpoint(tmp_path, "deepseek_v32")
    # of 16 heads: 150 pairs of tokens a call, so the second prompt is cut, and its last piece is as short as the first
    monkeypatch.setattr(ragged, "_MASK_ELEMENTS", 16 * 150)
    plan = RaggedPlan(np.array([7, 43]), np.array([0, 0]), np.array([range(11)] * 2), 4, CPU, torch.float32, 1, 1, 16)
    groups = plan.groups(Reach())
    cut = [group for group in groups if group.rows is not None and int(group.rows.max()) > 6]
    firsts = [int(group.rows.min()) for group in cut if group.rows is not None]
    assert len(cut) > 8
    assert firsts == sorted(firsts)
    assert all(group.pieces == 1 and group.queries * group.keys <= 176 for group in cut)
    # the check leaves no number in a block before it is filled: a later piece's must not be scored
    driver = await Driver.open(tmp_path)
    sequences = [driver.sequence(prompt, 6) for prompt in prompts(7, 43)]
    await driver.run(sequences)
    assert [seq.tokens for seq in sequences] == [generated(model, seq.prompt, 6) for seq in sequences]
    await driver.close()


# -- which positions ------------------------------------------------------------------------------------


def test_the_earliest_of_equals_are_picked_whatever_the_length_of_the_row() -> None:
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(-3, 3, (40, 90), generator=draw).float() * 0.5
    rows[rows == 1.0] = -0.0
    rows[:, 60:] = float("-inf")
    wanted = torch.sort(rows, dim=-1, descending=True, stable=True)
    for length in (60, 64, 90):
        with EarliestOfEquals():
            values, picked = rows[:, :length].topk(20, dim=-1)
        assert torch.equal(picked, wanted.indices[:, :20])
        assert torch.equal(values, wanted.values[:, :20])


@pytest.mark.parametrize("queries", [1, 3])
def test_attention_reads_the_chosen_positions_alone(queries: int) -> None:
    layer = LayerSpec(0, 1, 6, 0, latent_rank=4)
    pool = KVPool(KVLayout((layer,), torch.float32), 12, 4, CPU)
    draw = torch.Generator().manual_seed(2)
    pool.blocks.copy_(torch.randn(pool.blocks.shape, generator=draw))
    tables = np.array([[3, 7, 1, 9, 0], [5, 2, 11, 8, 4]])
    counts, starts = np.array([queries, queries]), np.array([17, 12])
    plan = RaggedPlan(counts, starts, tables, 4, CPU, torch.float32, 1, 1, 1)
    paging = TorchPaging(pool, plan, torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    query = torch.randn(2 * queries, 3, 6, generator=draw)
    picked = torch.stack([torch.randperm(12, generator=draw)[:5] for _ in range(2 * queries)]).int()
    picked[1, 3:] = -1
    if queries == 1:
        # a single query reads nothing else, and what is nowhere chosen may be anything
        for table, row in zip(tables, picked, strict=True):
            for at in set(range(20)) - set(row.tolist()) - {0}:
                pool.keys[0][table[at // 4], at % 4] = float("nan")
    out = paging.attend_chosen(layer, query, 0.3, None, picked)
    for row in range(2 * queries):
        places = [at for at in picked[row].tolist() if at >= 0]
        keys = torch.stack([pool.keys[0][tables[row // queries][at // 4], at % 4, 0, 0] for at in places])
        wanted = torch.softmax(query[row] @ keys.T * 0.3, dim=-1) @ keys[:, :4]
        torch.testing.assert_close(out[row], wanted, rtol=1e-5, atol=1e-6)


# -- what is refused ------------------------------------------------------------------------------------


async def refused(folder: Path, **limits: Any) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        await Driver.open(folder, **limits)
    return caught.value.reason


@pytest.mark.ci
@pytest.mark.parametrize("index_topk", [16, 2048])
async def test_self_check_refuses_attention_to_all_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index_topk: int
) -> None:
    make_tiny_checkpoint(tmp_path, "glm_moe_dsa", index_topk=index_topk)
    driver = await Driver.open(tmp_path)
    assert any(f"index_topk {index_topk} played as 13" in note for note in driver.capacity.notes) == (index_topk > 256)
    await driver.close()

    def attend_all(paging: TorchPaging, layer: LayerSpec, query: torch.Tensor, scaling: float, *_: Any) -> torch.Tensor:
        return paging.attend(layer, query, scaling, None)

    monkeypatch.setattr(TorchPaging, "attend_chosen", attend_all)
    assert "differs from separate sequences" in await refused(tmp_path)


async def test_self_check_refuses_keys_that_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_checkpoint(tmp_path, "deepseek_v32")
    honest = indexers._PagedKeys.update_indexer

    def forget(self: Any, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        out = honest(self, keys, layer_idx)
        # one key of a block is lost
        self._paging.pool.keys[self._spec.index][:, 1] = 0
        return out

    monkeypatch.setattr(indexers._PagedKeys, "update_indexer", forget)
    assert "differs from separate sequences" in await refused(tmp_path)


async def test_positions_that_no_attention_takes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_checkpoint(tmp_path, "deepseek_v32")

    def forgetful(forward: Any, nbytes: dict[int, int], _: object) -> None:
        nbytes[forward.indexer.layer] = 32

    monkeypatch.setattr(indexers, "_noted", forgetful)
    assert "layers [0, 1, 2, 3] is not handed the positions that indexers picked" in await refused(tmp_path)


def test_indexers_of_other_kinds_are_none_of_these() -> None:
    assert [one.layer for one in find_indexers(make_tiny_model("glm_moe_dsa"))] == [0, 1, 3]
    for family in ("qwen4_exp_text", "minimax_m3_sparse", "deepseek_v4"):
        assert find_indexers(make_tiny_model(family)) == ()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("runner_config.device", {"config": {"kernels": "triton"}}),
        ("sum_slices", {"sum_slices": 2, "numerics": "fixed"}),
        ("numerics", {"numerics": "fixed"}),
    ],
)
async def test_what_is_not_done_is_refused_by_its_field(
    tmp_path: Path, field: str, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    make_tiny_checkpoint(tmp_path, "deepseek_v32")
    with pytest.raises(ConfigError) as caught:
        await Driver.open(tmp_path, **values)
    assert caught.value.field == field
    assert "indexers so far, such as deepseek_v32" in str(caught.value)


@pytest.mark.parametrize(("field", "limits"), [("runner_config.mtp", {}), ("tensor_parallel", {"tensor_parallel": 2})])
def test_heads_of_prediction_and_ranks_are_refused(field: str, limits: dict[str, int]) -> None:
    known = RunnerLimits(max_running=1, max_step_tokens=8, **limits)
    with pytest.raises(ConfigError) as caught:
        refuse_undone("glm_moe_dsa", TransformersConfig(mtp=not limits), known, CPU)
    assert caught.value.field == field
