"""Blocks, slots and the prefix index together, against dicts and lists."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fdasync.cache.aux import SlotPool
from fdasync.cache.blocks import Block, BlockPool
from fdasync.cache.prefix import PrefixIndex, block_keys
from tests.helpers import ROOT, machine_settings

SIZE = 2
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=10)


class ModelBlock(msgspec.Struct, eq=False):
    """What must be true of one computation of a block. `step` is -1 once it is sealed."""

    block: Block
    key: bytes | None = None
    pins: int = 1
    step: int = -1
    sealed: bool = False


class User(msgspec.Struct, eq=False):
    """A sequence: its chain, how many of its full blocks were planned, and the last step that names it."""

    number: int
    keys: list[bytes]
    chain: list[ModelBlock]
    planned: int
    step: int = -1


class IndexMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 9), enabled=st.sampled_from([True, True, True, False]))
    def begin(self, num_blocks, enabled):
        self.index = PrefixIndex(BlockPool(num_blocks, SlotPool(num_blocks)), enabled=enabled)
        self.free = num_blocks
        self.indexed: dict[bytes, ModelBlock] = {}
        self.idle: list[bytes] = []  # in the order of eviction
        self.users: list[User] = []
        self.step = 0
        self.done = -1
        self.flights: list[list[ModelBlock]] = []
        self.generations: dict[int, int] = {}
        self.numbers = 0
        self.keys_seen: set[bytes] = set()

    def model_match(self, keys, limit, before):
        run = []
        for key in keys[:limit]:
            entry = self.indexed.get(key)
            if entry is None or entry.step >= before:
                break
            run.append(entry)
        return run

    def allocate(self):
        block = self.index.allocate()
        if self.free:
            self.free -= 1
        elif self.idle:
            # only here may an identity be lost: the one used longest ago, leaves first
            lost = self.indexed.pop(self.idle.pop(0))
            assert lost.block.key is None
        else:
            assert block is None
            return None
        assert block is not None
        slot = block.slot
        assert slot is not None
        assert slot.generation > self.generations.get(slot.id, 0)
        self.generations[slot.id] = slot.generation
        assert all(block is not entry.block for user in self.users for entry in user.chain)
        return ModelBlock(block)

    def release(self, chain):
        self.index.release([entry.block for entry in chain])
        for entry in reversed(chain):
            entry.pins -= 1
            if entry.pins:
                continue
            if entry.key is None:
                self.free += 1
            else:
                self.idle.append(entry.key)

    @rule(tokens=PROMPTS)
    def enter(self, tokens):
        """Match, pin, reserve; a plan that does not fit takes nothing."""
        keys = block_keys(ROOT, tokens, SIZE)
        self.keys_seen |= set(keys)
        limit = (len(tokens) - 1) // SIZE
        run = self.model_match(keys, limit, self.step)
        assert self.index.match(keys, limit, self.step) == [entry.block for entry in run]
        needed = -(-len(tokens) // SIZE) - len(run)
        if needed > self.index.num_available - sum(entry.pins == 0 for entry in run):
            return
        self.index.pin([entry.block for entry in run])
        for entry in run:
            if not entry.pins:
                self.idle.remove(entry.key)
            entry.pins += 1
        fresh = [self.allocate() for _ in range(needed)]
        assert None not in fresh
        self.users.append(User(self.numbers, keys, run + fresh, len(run)))
        self.numbers += 1

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def plan(self, data):
        """One step fills the next full blocks of some sequences."""
        flight = []
        for user in data.draw(st.lists(st.sampled_from(self.users), max_size=3, unique=True)):
            stop = data.draw(st.integers(user.planned, len(user.keys)))
            for number in range(user.planned, stop):
                entry, key = user.chain[number], user.keys[number]
                self.index.begin(entry.block, key, self.step)
                if self.index.enabled and key not in self.indexed:
                    entry.key, entry.step = key, self.step
                    self.indexed[key] = entry
                flight.append(entry)
            user.planned = stop
            user.step = self.step
        self.flights.append(flight)
        self.step += 1

    @precondition(lambda self: self.flights)
    @rule()
    def complete(self):
        for entry in self.flights.pop(0):
            self.index.seal(entry.block)
            entry.sealed, entry.step = True, -1
        self.done += 1

    @precondition(lambda self: any(user.planned < len(user.keys) for user in self.users))
    @rule(data=st.data())
    def seal_decoded(self, data):
        """A block filled by decoding: nobody knew its identity before."""
        user = data.draw(st.sampled_from([user for user in self.users if user.planned < len(user.keys)]))
        entry, key = user.chain[user.planned], user.keys[user.planned]
        self.index.seal(entry.block, key)
        entry.sealed = True
        if self.index.enabled and key not in self.indexed:
            entry.key = key
            self.indexed[key] = entry
        user.planned += 1

    @precondition(lambda self: any(user.step <= self.done for user in self.users))
    @rule(data=st.data())
    def leave(self, data):
        user = data.draw(st.sampled_from([user for user in self.users if user.step <= self.done]))
        self.users.remove(user)
        self.release(user.chain)

    @invariant()
    def agrees(self):
        self.index.check()
        assert self.index.pool.num_free == self.free
        assert self.index.num_available == self.free + len(self.idle)
        assert list(self.index._idle) == self.idle
        for user in self.users:
            for entry in user.chain:
                block = entry.block
                assert (block.key, block.pins, block.sealed) == (entry.key, entry.pins, entry.sealed)
        for key in self.keys_seen:
            for before in (self.done + 1, self.step):
                want = self.model_match([key], 1, before)
                assert self.index.match([key], 1, before) == [entry.block for entry in want]
                entry = self.indexed.get(key)
                coming = entry is not None and entry.step >= before
                assert self.index.is_coming(key, before) == coming


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = machine_settings(100, 40)
