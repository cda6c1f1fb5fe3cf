"""The runner's flat view of steps, against a naive one kept sequence by sequence: `input_batch.py`."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from fdasync.errors import InvariantBroken
from fdasync.events.actions import BlockAppend, Chunk, RunStep, SeqStart
from fdasync.runner.input_batch import InputBatch
from tests.support.helpers import machine_settings, make_sampler

SIZE = 4


def start(key, length, blocks, cached=0, slots=None, generations=None):
    fresh = len(blocks) - cached // SIZE
    return SeqStart(
        key, array("i", range(key * 100, key * 100 + length)).tobytes(), cached, tuple(blocks),
        tuple(range(50, 50 + fresh)) if slots is None else tuple(slots),
        (1,) * fresh if generations is None else tuple(generations),
        make_sampler(length, seed=key),
    )  # fmt: skip


def make_table(max_running=4):
    return InputBatch(max_running, 64, SIZE, 32)


def test_a_step_is_flattened_decodes_first():
    table = make_table()
    table.plan(RunStep(0, starts=(start(1, 6, (3, 9)),), chunks=(Chunk(1, 6, True),)))
    batch = table.plan(RunStep(1, starts=(start(2, 10, (5, 7, 8), slots=(1, 2, 0)),), chunks=(Chunk(2, 7, False),)))
    assert batch.num_decodes == 1
    assert batch.counts.tolist() == [1, 7]
    assert batch.starts.tolist() == [6, 0]
    assert batch.positions.tolist() == [6, 0, 1, 2, 3, 4, 5, 6]
    assert batch.kv_index.tolist() == [9 * 4 + 2, 20, 21, 22, 23, 28, 29, 30]
    assert batch.aux_index.tolist() == [51 * 4 + 2, 4, 5, 6, 7, 8, 9, 10]
    assert batch.sampled.tolist() == [0]
    assert table.block_table(int(batch.lanes[1]), 7).tolist() == [5, 7]


def test_a_decode_has_positions_for_a_run_and_keeps_those_that_stand():
    table = InputBatch(4, 64, SIZE, 32, 3)
    starts = (start(1, 6, (3, 9)), start(2, 3, (5,)))
    table.plan(RunStep(0, starts=starts, chunks=(Chunk(1, 6, True), Chunk(2, 3, True))))
    # the second one's block has room for one token
    batch = table.plan(RunStep(1, appends=(BlockAppend(1, 7, 60, 1),)))
    assert batch.counts.tolist() == [3, 1]
    assert batch.positions.tolist() == [6, 7, 8, 3]
    assert batch.kv_index.tolist() == [38, 39, 28, 23]
    assert batch.aux_index.tolist() == [51 * 4 + 2, 51 * 4 + 3, 240, 50 * 4 + 3]
    table.take_runs(batch, np.array([2, 1]))
    batch = table.plan(RunStep(2, skips=(2,)))
    assert batch.positions.tolist() == [8, 9, 10]
    # the second one's table is full: it waits for a block, with no position in this step
    batch = table.plan(RunStep(3, skips=(1,)))
    assert (batch.counts.tolist(), batch.positions.tolist()) == ([0], [])
    table.take_runs(batch, np.array([0]))
    batch = table.plan(RunStep(4, skips=(1,), appends=(BlockAppend(2, 11, 61, 1),)))
    assert batch.positions.tolist() == [4, 5, 6]


def test_a_run_ends_where_the_context_does():
    table = InputBatch(4, 7, SIZE, 32, 3)
    table.plan(RunStep(0, starts=(start(1, 5, (3, 9)),), chunks=(Chunk(1, 5, True),)))
    assert table.plan(RunStep(1)).positions.tolist() == [5, 6]


def test_cached_blocks_keep_the_slots_that_they_were_written_with():
    table = make_table()
    table.plan(
        RunStep(0, starts=(start(1, 8, (3, 4), slots=(10, 11), generations=(5, 6)),), chunks=(Chunk(1, 8, True),))
    )
    second = start(2, 9, (3, 4, 5), cached=8, slots=(12,), generations=(7,))
    batch = table.plan(RunStep(1, leaves=(1,), starts=(second,), chunks=(Chunk(2, 1, True),)))
    assert batch.positions.tolist() == [8]
    slots, generations = table.slots_of(np.array([3, 4, 5]))
    assert slots.tolist() == [10, 11, 12]
    assert generations.tolist() == [5, 6, 7]
    assert batch.generations.tolist() == [7]


def test_a_lane_is_free_again_in_the_step_that_takes_it():
    table = make_table(max_running=1)
    table.plan(RunStep(0, starts=(start(1, 3, (0,)),), chunks=(Chunk(1, 3, True),)))
    batch = table.plan(RunStep(1, leaves=(1,), starts=(start(2, 2, (1,)),), chunks=(Chunk(2, 2, False),)))
    assert (len(table), batch.num_decodes) == (1, 0)
    lane = int(batch.lanes[0])
    assert table.tokens[lane, :2].tolist() == [200, 201]
    assert (table.known[lane], table.samplers[lane].seed) == (2, 2)


def test_a_preempted_one_may_come_back_in_the_step_that_it_leaves():
    table = make_table()
    table.plan(RunStep(0, starts=(start(1, 3, (0,)),), chunks=(Chunk(1, 3, True),)))
    batch = table.plan(RunStep(1, leaves=(1,), starts=(start(1, 5, (2, 3)),), chunks=(Chunk(1, 5, True),)))
    assert batch.num_decodes == 0
    assert batch.positions.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (RunStep(1, leaves=(2,)), InvariantBroken),
        (RunStep(1, leaves=(1, 1)), InvariantBroken),
        (RunStep(1, starts=(start(1, 3, (5,)),)), InvariantBroken),
        (RunStep(1, chunks=(Chunk(2, 1, False),)), KeyError),
        (RunStep(1, appends=(BlockAppend(2, 1, 1, 1),)), KeyError),
        # one more token than its blocks hold
        (RunStep(1), InvariantBroken),
    ],
)
def test_what_the_contract_forbids_is_refused(step, error):
    table = make_table()
    table.plan(RunStep(0, starts=(start(1, 4, (0,)),), chunks=(Chunk(1, 4, True),)))
    with pytest.raises(error):
        table.plan(step)


class Naive:
    """One sequence, kept the slow way."""

    def __init__(self, length, tokens, blocks):
        self.length = length
        self.tokens = tokens
        self.blocks = blocks


class LaneMachine(RuleBasedStateMachine):
    @initialize(max_running=st.integers(1, 5), capture=st.booleans())
    def begin(self, max_running, capture):
        self.table = InputBatch(max_running, 64, SIZE, 64)
        self.max_running = max_running
        self.capture = capture
        self.live: dict[int, Naive] = {}
        self.decoding: list[int] = []
        self.slots: dict[int, tuple[int, int]] = {}
        self.steps = 0
        self.keys = 0
        self.uses = 0

    def use(self, blocks):
        """Slots of these blocks, each under a generation that was never seen."""
        if not self.capture:
            return (), ()
        pairs = []
        for block in blocks:
            self.uses += 1
            self.slots[block] = (63 - block, self.uses)
            pairs.append(self.slots[block])
        return tuple(slot for slot, _ in pairs), tuple(generation for _, generation in pairs)

    @rule(data=st.data())
    def step(self, data):
        free = sorted(set(range(64)) - {block for seq in self.live.values() for block in seq.blocks})
        leaves = data.draw(st.lists(st.sampled_from(sorted(self.live)), max_size=2, unique=True)) if self.live else []
        for key in leaves:
            del self.live[key]
        self.decoding = [key for key in self.decoding if key in self.live]
        starts = []
        for _ in range(data.draw(st.integers(0, 2))):
            if len(self.live) == self.max_running or len(free) < 8:
                break
            length = data.draw(st.integers(1, 20))
            # blocks of somebody who has written them already, as a prefix hit
            shared = []
            owners = [seq for seq in self.live.values() if seq.length >= SIZE]
            if owners and data.draw(st.booleans()):
                owner = data.draw(st.sampled_from(owners))
                shared = owner.blocks[: min(owner.length // SIZE, (length - 1) // SIZE)]
            fresh = [free.pop(0) for _ in range(-(-length // SIZE) - len(shared))]
            slots, generations = self.use(fresh)
            self.keys += 1
            event = start(self.keys, length, [*shared, *fresh], len(shared) * SIZE, slots, generations)
            starts.append(event)
            tokens = list(array("i", event.tokens))
            self.live[self.keys] = Naive(len(shared) * SIZE, tokens, [*shared, *fresh])
        appends, skips = [], []
        for key in self.decoding:
            seq = self.live[key]
            full = seq.length == len(seq.blocks) * SIZE
            if full and free and seq.length < 60 and data.draw(st.booleans()):
                block = free.pop(0)
                slots, generations = self.use([block])
                appends.append(BlockAppend(key, block, *((slots[0], generations[0]) if slots else (-1, 0))))
                seq.blocks.append(block)
            elif full or data.draw(st.integers(0, 4)) == 0:
                skips.append(key)
        chunks = []
        for key, seq in self.live.items():
            left = len(seq.tokens) - seq.length
            if key not in self.decoding and left > 0 and data.draw(st.booleans()):
                count = data.draw(st.integers(1, left))
                chunks.append(Chunk(key, count, count == left))
        self.perform(RunStep(self.steps, tuple(leaves), tuple(starts), tuple(appends), tuple(skips), tuple(chunks)))
        self.steps += 1

    def perform(self, step):
        batch = self.table.plan(step)
        want = [(key, 1, True) for key in self.decoding if key not in step.skips]
        num_decodes = len(want)
        want += [(chunk.key, chunk.count, chunk.last) for chunk in step.chunks]
        positions, kv_index, aux_index, generations = [], [], [], []
        starts = []
        for key, count, _ in want:
            seq = self.live[key]
            starts.append(seq.length)
            for position in range(seq.length, seq.length + count):
                block = seq.blocks[position // SIZE]
                positions.append(position)
                kv_index.append(block * SIZE + position % SIZE)
                if self.capture:
                    slot, generation = self.slots[block]
                    aux_index.append(slot * SIZE + position % SIZE)
                    generations.append(generation)
            seq.length += count
        assert batch.step_id == step.step_id
        assert batch.num_decodes == num_decodes
        assert batch.counts.tolist() == [count for _, count, _ in want]
        assert batch.starts.tolist() == starts
        assert batch.positions.tolist() == positions
        assert batch.kv_index.tolist() == kv_index
        if self.capture:
            assert batch.aux_index.tolist() == aux_index
            assert batch.generations.tolist() == generations
        assert batch.sampled.tolist() == [number for number, (_, _, samples) in enumerate(want) if samples]
        for lane, (key, _, _) in zip(batch.lanes, want, strict=True):
            seq = self.live[key]
            assert self.table.block_table(lane, seq.length).tolist() == seq.blocks[: -(-seq.length // SIZE)]
            assert self.table.tokens[lane, : self.table.known[lane]].tolist() == seq.tokens
            assert self.table.samplers[lane].seed == key
        self.decoding += [chunk.key for chunk in step.chunks if chunk.last]
        assert len(self.table) == len(self.live)

    @precondition(lambda self: self.live)
    @rule()
    def everybody_leaves(self):
        keys = tuple(self.live)
        self.live.clear()
        self.decoding.clear()
        self.perform(RunStep(self.steps, leaves=keys))
        self.steps += 1


TestLaneMachine = LaneMachine.TestCase
TestLaneMachine.settings = machine_settings(60, 25)
