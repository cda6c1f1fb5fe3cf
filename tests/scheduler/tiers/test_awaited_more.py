"""Awaited snapshots: runs of the greatest length, what a store gets of them, and newcomers beside them."""

from __future__ import annotations

import pytest

from tests.scheduler.table import Table
from tests.scheduler.tiers.test_awaited_snapshots import recurrent
from tests.scheduler.tiers.test_stored_snapshots import kept, writing


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prompt", range(1, 17))
def test_a_step_that_comes_to_a_block_s_end_by_its_longest_run_alone_is_told(prompt: int, depth: int):
    """Whatever step comes to the end of a block was told of its snapshot, also if every draft is right."""
    table = recurrent(block_tokens=16, pipeline_depth=depth, max_run_tokens=4, num_snapshots=16)
    table.turn(table.request(1, range(prompt), 60))
    told, forwarded, number = {}, prompt, 100

    def note(step):
        told[step.step_id] = {take.position for take in step.snapshots}

    for step in table.flying:
        note(step)
    first = True
    while table.flying and 1 not in table.finished:
        step = table.flying[0]
        count = 1 if first else min(4, prompt + 60 - 1 - forwarded)
        run = list(range(number, number + max(count, 1)))
        number += len(run)
        before = forwarded
        forwarded += 0 if first else len(run)
        ends = [at for at in range(before + 1, forwarded + 1) if at % 16 == 0]
        assert set(ends) <= told[step.step_id], f"step from {before} to {forwarded} was told of {told[step.step_id]}"
        first = False
        turned = table.turn(table.runs(run))
        for one in turned.steps:
            note(one)


def test_a_store_gets_a_state_that_a_step_in_flight_was_told_of_too():
    table = writing(max_run_tokens=3, pipeline_depth=2)
    prompt = range(500, 506)
    table.turn(table.request(1, prompt, 20))
    states, number = {}, 700
    late = 0
    for _ in range(100):
        if not table.flying and not table.in_flight:
            break
        events = table.answers()
        if table.flying:
            seq = next(iter(table.scheduler.queues.decoding.values()), None)
            width = 2 if seq is not None and seq.decoding and len(seq.tokens) < 24 else 1
            run = list(range(number, number + width))
            number += width
            events = [table.runs(run), *events]
        turned = table.turn(*events)
        late += sum(one.step >= 0 for one in table.scheduler.swap_planner._snapshot_queue)
        for put in turned.puts:
            places = put.snapshots_host or (-1,) * len(put.keys)
            states.update({key: place >= 0 for key, place in zip(put.keys, places, strict=True)})
    answer = table.finished[1].token_ids
    keys = table.keys([*prompt, *answer])[: (len(prompt) + len(answer) - 1) // 4]
    assert late, "no state waited for a step"
    assert kept(table, [*prompt, *answer])[: len(keys)] == "x" * len(keys)
    assert [states[key] for key in keys] == [(at + 1) % 3 == 0 for at in range(len(keys))]
    assert table.is_empty()


def test_newcomers_are_admitted_beside_sequences_that_await_all_places():
    """Two long answers, whose drafts make each of them await places all the time, and two more lanes."""
    table = Table(
        recurrent=True, num_snapshots=3, num_host_snapshots=16, num_host_blocks=64, state_every_tokens=1000,
        max_step_tokens=64, max_run_tokens=4, pipeline_depth=2, num_blocks=400,
    )  # fmt: skip
    prefix = range(9)
    table.run(table.request(1, prefix, 1))
    for key in range(2, 5):
        table.run(table.request(key, range(key * 100, key * 100 + 9), 1))
    table.turn(table.request(20, range(2000, 2005), 300), table.request(21, range(2100, 2105), 300))
    for _ in range(8):
        table.turn(table.done(), *table.answers())
    # its prefix has a snapshot on the host; the other has none anywhere
    table.turn(table.request(30, prefix, 4), table.request(31, range(3000, 3005), 4))
    for _ in range(60):
        table.turn(table.done(), *table.answers())
    assert {30, 31} <= table.finished.keys()
