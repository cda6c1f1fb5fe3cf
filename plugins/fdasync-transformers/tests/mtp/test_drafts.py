"""Drafts of multi-token prediction layers over paged KV, held against the library's own layers on whole sequences."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fdasync_transformers.parallel.collectives import HostCollectives
from fdasync_transformers.tiny.mtp import make_mtp_checkpoint
from mtp_play import Lane, Play, open_mtp
from mtp_reference import drafts_of, load_reference
from ranks import as_ranks, returned

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync_transformers.parallel.collectives import Collectives

    from fdasync.ipc.exchange import Exchange

# deeper drafts than layers come from the last layer again
SHAPES = [("deepseek_v3", 1, 3), ("glm4_moe", 1, 3), ("glm4_moe", 2, 2), ("deepseek_v3", 3, 4)]
PROMPTS = [[5, 9, 200, 13, 77, 21, 8, 150, 33], [7], [101, 4, 4, 90, 17]]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: f"{shape[0]}-{shape[1]}-{shape[2]}")
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    family, layers, most = request.param
    folder = tmp_path_factory.mktemp(f"{family}-{layers}")
    make_mtp_checkpoint(folder, family, layers=layers)
    return open_mtp(folder), load_reference(folder, layers), most


def check(reference: Any, lane: Lane, most: int) -> None:
    assert lane.drafts == drafts_of(*reference, lane.known, most)


@pytest.mark.ci
async def test_alone_with_its_prompt_in_chunks(played: Any) -> None:
    opened, reference, most = played
    play = Play(opened)
    lane, start = play.start(1, PROMPTS[0])
    await play.step([], (start,), ((lane, 3),), most)
    assert lane.drafts == []
    await play.step([], (), ((lane, 2),), most)
    await play.step([], (), ((lane, 4),), most)
    check(reference, lane, most)
    for _ in range(3):
        await play.step([lane], most=most)
        check(reference, lane, most)


@pytest.mark.ci(after=1)
async def test_in_a_batch_of_prompts_and_decodes(played: Any) -> None:
    opened, reference, most = played
    play = Play(opened)
    lanes = [play.start(key, prompt, ahead=3) for key, prompt in enumerate(PROMPTS)]
    await play.step([], (lanes[0][1],), ((lanes[0][0], 9),), most)
    await play.step([lanes[0][0]], (lanes[1][1], lanes[2][1]), ((lanes[1][0], 1), (lanes[2][0], 5)), most)
    order = [lane for lane, _ in lanes]
    for _ in range(4):
        await play.step(order, most=most)
        for lane in order:
            check(reference, lane, most)


@pytest.mark.ci(after=1)
async def test_after_a_prefix_hit_and_a_restart(played: Any) -> None:
    opened, reference, most = played
    play = Play(opened)
    lane, start = play.start(1, PROMPTS[0])
    await play.step([], (start,), ((lane, 9),), most)
    for _ in range(4):
        await play.step([lane], most=most)
    # another sequence of the same beginning
    other, start = play.start(2, [*PROMPTS[0][:8], 61, 62], tuple(lane.blocks[:2]))
    await play.step([lane], (start,), ((other, 2),), most)
    check(reference, other, most)
    check(reference, lane, most)
    # preempted, and resumed on the blocks that were full
    full = lane.done // play.size
    resumed, start = play.start(3, lane.known, tuple(lane.blocks[:full]))
    await play.step([other], (start,), ((resumed, len(lane.known) - full * play.size),), most, leaves=(1,))
    check(reference, resumed, most)
    check(reference, other, most)


async def hit_and_restarted(play: Play, most: int) -> tuple[list[list[int]], list[list[Any]]]:
    """Drafts of sequences that begin on cached blocks, and what blocks hold of the layers."""
    lane, start = play.start(1, PROMPTS[0])
    await play.step([], (start,), ((lane, 9),), most)
    drafts = [lane.drafts]
    for _ in range(4):
        await play.step([lane], most=most)
        drafts.append(lane.drafts)
    other, start = play.start(2, [*PROMPTS[0][:8], 61, 62], tuple(lane.blocks[:2]))
    await play.step([lane], (start,), ((other, 2),), most)
    full = lane.done // play.size
    resumed, start = play.start(3, lane.known, tuple(lane.blocks[:full]))
    await play.step([other], (start,), ((resumed, len(lane.known) - full * play.size),), most, leaves=(1,))
    drafts += [other.drafts, resumed.drafts, lane.known]
    return drafts, [[held.numpy() for held in play.mtp_bytes(block)] for block in resumed.blocks[: full + 1]]


# heads for all ranks; more ranks than heads; latents, which all ranks hold
@pytest.mark.ci
@pytest.mark.parametrize(("family", "layers", "ranks"), [("glm4_moe", 2, 2), ("glm4_moe", 1, 4), ("deepseek_v3", 2, 2)])
def test_ranks_hold_together_what_one_process_holds(tmp_path: Path, family: str, layers: int, ranks: int) -> None:
    make_mtp_checkpoint(tmp_path, family, layers=layers)
    exact = {"dtype": "float64", "num_threads": 1}

    async def played_by(collectives: Collectives | None = None) -> Any:
        opened = open_mtp(tmp_path, exact, collectives)
        return *await hit_and_restarted(Play(opened, collectives=collectives), 3), opened.step_model.layout.first_share

    wanted, blocks, _ = asyncio.run(played_by())

    def work(exchange: Exchange) -> Any:
        return asyncio.run(played_by(HostCollectives(exchange)))

    found = returned(as_ranks(ranks, work))
    for drafts, held, first in found:
        assert drafts == wanted
        for mine, whole in zip(held, blocks, strict=True):
            for part, all_of_it in zip(mine, whole, strict=True):
                ours = all_of_it[:, first : first + part.shape[1]]
                np.testing.assert_allclose(part, ours, rtol=0, atol=1e-9, equal_nan=True)


@pytest.mark.ci
@pytest.mark.parametrize(("family", "layers", "most"), SHAPES[2:])
async def test_a_block_depends_on_no_token_behind_it(tmp_path: Path, family: str, layers: int, most: int) -> None:
    """Also where drafts went on into it, where a layer has no KV of the first tokens, and where prompts come in chunks:
    with fixed numerics to the bit."""
    make_mtp_checkpoint(tmp_path, family, layers=layers)
    opened = open_mtp(tmp_path, numerics="fixed")
    ways = []
    for behind, chunks in (((61, 62, 63), (11,)), ((200,), (4, 5)), ((5, 5, 5, 5, 5), (3, 3, 7))):
        play = Play(opened, seed=len(behind))
        lane, start = play.start(1, [*PROMPTS[0][:8], *behind])
        for number, count in enumerate(chunks):
            await play.step([], (start,) if number == 0 else (), ((lane, count),), most)
        ways.append([play.mtp_bytes(block) for block in lane.blocks[:2]])
    # the same first tokens, as tokens that were sampled: drafts had been written where they stand now
    play = Play(opened, seed=9)
    lane, start = play.start(1, PROMPTS[0][:3], ahead=3)
    await play.step([], (start,), ((lane, 3),), most)
    while lane.done < 9:
        row = play.table.lane_of(1)
        play.lanes.tokens[row, lane.done] = PROMPTS[0][lane.done]
        # what was drafted behind another token is not verified
        play.lanes.drafted[row] = 0
        await play.step([lane], most=most)
    ways.append([play.mtp_bytes(block) for block in lane.blocks[:2]])
    for blocks in ways[1:]:
        for one, other in zip(ways[0], blocks, strict=True):
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
    assert all(held.isfinite().all() and held.any() for block in ways[0] for held in block)


@pytest.mark.ci(after=1)
async def test_rejected_drafts_leave_nothing(played: Any) -> None:
    """Runs of which the first, some or all positions stand: tokens, drafts and blocks as one token at a time."""
    opened, reference, most = played
    plain = Play(opened, speculation=0)
    alone, start = plain.start(1, PROMPTS[0], ahead=4)
    await plain.step([], (start,), ((alone, 9),), most)
    for _ in range(11):
        await plain.step([alone], most=most)
    play = Play(opened, seed=3)
    lane, start = play.start(1, PROMPTS[0], ahead=4)
    await play.step([], (start,), ((lane, 9),), most)
    stood = []
    for guesses in ([0, 0], alone.known[11:13], [alone.known[14], 1], [3, 3], alone.known[17:19]):
        stood += await play.step([lane], most=most, guesses=guesses)
        check(reference, lane, min(most, len(lane.blocks) * play.size - lane.done))
    assert stood == [1, 3, 2, 1, 3]
    assert lane.known == alone.known[: len(lane.known)]
    for mine, theirs in zip(lane.blocks[: lane.done // play.size], alone.blocks, strict=False):
        for one, other in zip(play.mtp_bytes(mine), plain.mtp_bytes(theirs), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


async def test_no_drafts_past_the_room_of_a_table(played: Any) -> None:
    opened, reference, most = played
    play = Play(opened)
    lane, start = play.start(1, PROMPTS[0][:7], ahead=0)
    await play.step([], (start,), ((lane, 7),), most)
    # position 7 is the last that the table has room for
    assert len(lane.drafts) == 1
    check(reference, lane, 1)


async def test_the_librarys_generation_makes_the_same_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation import candidate_generator

    make_mtp_checkpoint(tmp_path, "glm4_moe")
    opened = open_mtp(tmp_path)
    main, mtp = load_reference(tmp_path, 1)
    monkeypatch.setattr(candidate_generator.MTPCandidateGenerator, "get_candidates", _recording(seen := []))
    monkeypatch.setattr("transformers.modeling_layers.MtpModel.from_pretrained", lambda *_args, **_kwargs: mtp)
    main.generate(torch.tensor([PROMPTS[0]]), use_mtp=True, max_new_tokens=6, do_sample=False)
    play = Play(opened)
    lane, start = play.start(1, PROMPTS[0])
    await play.step([], (start,), ((lane, 9),), 1)
    mine = {}
    for _ in range(5):
        mine[tuple(lane.known)] = lane.drafts
        await play.step([lane], most=1)
    assert len(seen) >= 3
    for known, drafts in seen:
        assert mine[known] == drafts


def _recording(seen: list[tuple[tuple[int, ...], list[int]]]) -> Any:
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    plain = MTPCandidateGenerator.get_candidates

    def get_candidates(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, input_ids, *args, **kwargs)
        drafts = found[0][0, input_ids.shape[1] :].tolist()
        if drafts:
            seen.append((tuple(input_ids[0].tolist()), drafts))
        return found

    return get_candidates
