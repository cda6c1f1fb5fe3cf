"""Blocks, slots and the prefix index together, in two tiers with copies in flight, against dicts and lists."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fdasync.cache.aux import Slot, SlotPool
from fdasync.cache.blocks import Block, BlockPool
from fdasync.cache.identity import block_keys, root_key
from fdasync.cache.prefix import PrefixIndex
from tests.support.helpers import machine_settings

SIZE = 2
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=10)


class ModelBlock(msgspec.Struct, eq=False):
    """What must be true of one computation of a block. `step` is -1 once it is sealed.

    `device` and `host`: it has a place there. `copies`: transfers in flight by what they touch: "out" and "in" both
    ends, "put" the host's.
    """

    block: Block
    slot: Slot
    key: bytes | None = None
    ref_count: int = 1
    step: int = -1
    sealed: bool = False
    device: bool = True
    host: bool = False
    whole: bool = False
    out: int = 0
    into: int = 0
    put: int = 0
    used: int = 0

    @property
    def device_moves(self):
        return self.out + self.into

    @property
    def host_holds(self):
        return self.out + self.into + self.put

    @property
    def unused(self):
        return self.device and not self.ref_count and not self.device_moves


class User(msgspec.Struct, eq=False):
    """A sequence: its chain, how many of its full blocks were planned, and the last step that names it.

    `old`: the weights changed under it; its blocks are private from now on.
    """

    number: int
    keys: list[bytes]
    chain: list[ModelBlock]
    planned: int
    step: int = -1
    old: bool = False


class IndexMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 9), num_host=st.sampled_from([0, 1, 2, 3, 6]),
        enabled=st.sampled_from([True, True, True, True, False]),
    )  # fmt: skip
    def begin(self, num_blocks, num_host, enabled):
        self.num_host = num_host if enabled else 0
        pool = BlockPool(num_blocks, SlotPool(num_blocks + self.num_host), self.num_host)
        self.index = PrefixIndex(pool, enabled=enabled)
        self.num_blocks = num_blocks
        self.live: list[ModelBlock] = []
        self.indexed: dict[bytes, ModelBlock] = {}
        self.clock = 0
        self.users: list[User] = []
        self.step = 0
        self.done = -1
        self.flights: list[list[ModelBlock]] = []
        self.generations: dict[int, int] = {}
        self.numbers = 0
        self.epoch = 0
        self.keys_seen: set[bytes] = set()
        self.old_keys: set[bytes] = set()
        self.arriving: list[tuple[ModelBlock, bytes]] = []

    # -- the model

    @property
    def free(self):
        return self.num_blocks - sum(entry.device for entry in self.live)

    @property
    def host_free(self):
        return self.num_host - sum(entry.host for entry in self.live)

    @property
    def device_order(self):
        """What may leave the device, used longest ago first."""
        return sorted([entry for entry in self.live if entry.unused and entry.key], key=lambda entry: entry.used)

    @property
    def host_order(self):
        found = [entry for entry in self.live if entry.whole and not entry.host_holds and entry.key]
        return sorted(found, key=lambda entry: entry.used)

    def use(self, entry):
        """It was used last."""
        self.clock += 1
        entry.used = self.clock

    def idle(self, *, clean):
        return [entry for entry in self.device_order if entry.whole == clean]

    def host_victims(self, kind):
        kinds = {
            "only": lambda entry: not entry.device,
            "used": lambda entry: entry.device and not entry.unused,
            "clean": lambda entry: entry.unused,
        }
        return [entry for entry in self.host_order if kinds[kind](entry)]

    @property
    def host_room(self):
        return bool(self.host_free or self.host_victims("only") or self.host_victims("used"))

    @property
    def available(self):
        return self.free + len(self.idle(clean=True)) + (0 if self.host_room else len(self.idle(clean=False)))

    def settle(self, entry):
        """What nobody can find any more goes."""
        if entry.key is None:
            if entry.unused:
                entry.device = False
            if entry.host and not entry.host_holds:
                entry.host = entry.whole = False
            if not entry.device and not entry.host and entry in self.live:
                self.live.remove(entry)

    def lose(self, entry):
        del self.indexed[entry.key]
        entry.key = None
        self.settle(entry)

    def leave_device(self, entry):
        if not entry.whole:
            self.lose(entry)
        else:
            entry.device = False
            self.settle(entry)

    def leave_host(self, entry):
        if not entry.device:
            self.lose(entry)
        else:
            entry.host = entry.whole = False
            self.settle(entry)

    def model_room(self, *, promised=False):
        """The block that has to leave the device, if any; False: there is none."""
        if self.free:
            return None
        victims = self.idle(clean=True)
        if not victims and (promised or not self.host_room):
            victims = self.idle(clean=False)
        return victims[0] if victims else False

    def model_match(self, keys, limit, before):
        run = []
        for key in keys[:limit]:
            entry = self.indexed.get(key)
            if entry is None or entry.step >= before:
                break
            run.append(entry)
        return run

    def new(self, block, **fields):
        slot = block.slot
        assert slot.generation > self.generations.get(slot.id, 0)
        self.generations[slot.id] = slot.generation
        assert all(block is not entry.block for entry in self.live)
        entry = ModelBlock(block, slot, **fields)
        self.live.append(entry)
        return entry

    def allocate(self, *, promised=False):
        victim = self.model_room(promised=promised)
        block = self.index.take() if promised else self.index.allocate()
        if victim is False:
            assert block is None
            return None
        if victim is not None:
            self.leave_device(victim)
        return self.new(block)

    def release(self, chain):
        self.index.release([entry.block for entry in chain])
        for entry in reversed(chain):
            entry.ref_count -= 1
            if not entry.ref_count:
                self.use(entry)
                self.settle(entry)

    # -- users

    @rule(tokens=PROMPTS)
    def enter(self, tokens):
        """Match, pin, reserve, in either tier; a plan that does not fit takes nothing."""
        keys = block_keys(root_key(b"weights", bytes([self.epoch])), tokens, SIZE)
        self.keys_seen |= set(keys)
        limit = (len(tokens) - 1) // SIZE
        run = self.model_match(keys, limit, self.step)
        hits = self.index.match(keys, limit, self.step)
        assert hits == [entry.block for entry in run]
        away = [entry for entry in run if not entry.device]
        fresh = -(-len(tokens) // SIZE) - len(run)
        here = [entry for entry in run if entry in self.device_order]
        if self.host_room:
            here = [entry for entry in here if entry.whole]
        assert self.index.available_besides(hits) == self.available - len(here)
        if fresh + len(away) > self.available - len(here):
            return
        self.index.pin([entry.block for entry in run if entry.device])
        for entry in [entry for entry in run if entry.device]:
            entry.ref_count += 1
            if entry.ref_count == 1:
                self.settle(entry)
        for entry in away:
            victim = self.model_room(promised=True)
            self.index.bring(entry.block)
            if victim is not None:
                self.leave_device(victim)
            entry.device = True
            entry.ref_count += 1
            self.settle(entry)
        for entry in away:
            # the copy inward starts in the same turn
            entry.into += 1
            self.moves(entry, +1, +1)
        chain = run + [self.allocate(promised=True) for _ in range(fresh)]
        assert None not in chain
        self.users.append(User(self.numbers, keys, chain, len(run)))
        self.numbers += 1

    @precondition(lambda self: self.users)
    @rule()
    def want_one_more(self):
        """A decode looks for a block; it may well get none."""
        entry = self.allocate()
        if entry is not None:
            self.users.append(User(self.numbers, [], [entry], 0))
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
                if not user.old:
                    self.index.begin(entry.block, key, self.step)
                    if self.index.enabled and key not in self.indexed:
                        entry.key, entry.step = key, self.step
                        self.indexed[key] = entry
                        self.use(entry)
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
        entry, key = user.chain[user.planned], None if user.old else user.keys[user.planned]
        self.index.seal(entry.block, key)
        entry.sealed = True
        if self.index.enabled and key is not None and key not in self.indexed:
            entry.key = key
            self.indexed[key] = entry
            self.use(entry)
        user.planned += 1

    @precondition(lambda self: any(user.step <= self.done for user in self.users))
    @rule(data=st.data())
    def leave(self, data):
        user = data.draw(st.sampled_from([user for user in self.users if user.step <= self.done]))
        self.users.remove(user)
        self.release(user.chain)

    # -- transfers

    def moves(self, entry, device, host):
        entry.block.device_moves += device
        (entry.block.hold if host > 0 else entry.block.unhold)("copy")
        self.index.settle(entry.block)
        self.settle(entry)

    def model_host_room(self, *, for_fetch):
        """Ask for room on the host; returns whether there is."""
        expected = bool(self.host_free)
        if not expected:
            for kind in ("only", "used", *(["clean"] if for_fetch else [])):
                victims = self.host_victims(kind)
                if victims:
                    victim, expected = victims[0], True
                    assert self.index.make_host_room(for_fetch=for_fetch)
                    self.leave_host(victim)
                    return True
        assert self.index.make_host_room(for_fetch=for_fetch) == expected
        return expected

    @precondition(lambda self: any(e.key and e.sealed and e.device and not e.host for e in self.live))
    @rule(data=st.data(), oldest=st.booleans())
    def copy_out(self, data, oldest):
        if oldest and self.idle(clean=False):
            entry = self.idle(clean=False)[0]
            assert self.index.next_dirty(1) == [entry.block]
        else:
            entry = data.draw(st.sampled_from([e for e in self.live if e.key and e.sealed and e.device and not e.host]))
        if not self.model_host_room(for_fetch=False):
            return
        if entry.key is None:
            return
        self.index.pool.add_host(entry.block)
        entry.host = True
        entry.out += 1
        self.moves(entry, +1, +1)

    @precondition(lambda self: any(entry.out or entry.into for entry in self.live))
    @rule(data=st.data())
    def copied(self, data):
        entry = data.draw(st.sampled_from([entry for entry in self.live if entry.out or entry.into]))
        if entry.out:
            entry.out -= 1
            entry.whole = entry.block.on_host = True
        else:
            entry.into -= 1
        self.moves(entry, -1, -1)

    @precondition(lambda self: any(entry.whole and entry.key for entry in self.live))
    @rule(data=st.data())
    def put(self, data):
        entry = data.draw(st.sampled_from([entry for entry in self.live if entry.whole and entry.key]))
        entry.put += 1
        self.moves(entry, 0, +1)

    @precondition(lambda self: any(entry.put for entry in self.live))
    @rule(data=st.data())
    def was_put(self, data):
        fetching = [entry for entry, _ in self.arriving]
        puts = [entry for entry in self.live if entry.put and entry not in fetching]
        if not puts:
            return
        entry = data.draw(st.sampled_from(puts))
        entry.put -= 1
        self.moves(entry, 0, -1)

    @precondition(lambda self: self.index.enabled and self.num_host)
    @rule(tokens=PROMPTS)
    def fetch(self, tokens):
        keys = block_keys(root_key(b"weights", bytes([self.epoch])), tokens, SIZE)
        missing = [key for key in keys if key not in self.indexed]
        if not missing or not self.model_host_room(for_fetch=True):
            return
        self.keys_seen |= set(keys)
        entry = self.new(self.index.pool.allocate_host(), ref_count=0, device=False, host=True)
        entry.put += 1
        self.moves(entry, 0, +1)
        self.arriving.append((entry, missing[0]))

    @precondition(lambda self: self.arriving)
    @rule(data=st.data(), came=st.booleans())
    def fetched(self, data, came):
        entry, key = self.arriving.pop(data.draw(st.integers(0, len(self.arriving) - 1)))
        entry.put -= 1
        entry.block.unhold("copy")
        if came:
            entry.sealed = entry.whole = entry.block.sealed = entry.block.on_host = True
            if key not in self.old_keys:
                assert self.index.adopt(entry.block, key) == (key not in self.indexed)
                if key not in self.indexed:
                    entry.key = key
                    self.indexed[key] = entry
                    self.use(entry)
        self.index.settle(entry.block)
        self.settle(entry)

    @precondition(lambda self: not self.flights and self.index.enabled)
    @rule()
    def forget(self):
        """New weights: no identity of before is ever found again."""
        self.index.forget()
        self.epoch += 1
        self.old_keys |= self.keys_seen
        self.unname()

    @precondition(lambda self: self.index.enabled)
    @rule()
    def reset(self):
        """What is indexed is forgotten; what comes later under the same identities is found."""
        self.index.reset()
        self.unname()

    def unname(self):
        self.indexed.clear()
        for user in self.users:
            user.old = True
        for entry in list(self.live):
            entry.key = None
        for entry in list(self.live):
            self.settle(entry)

    # -- what must hold

    @invariant()
    def agrees(self):
        index = self.index
        index.check()
        assert index.pool.num_free == self.free
        assert index.pool.num_host_free == self.host_free
        assert index.num_available == self.available
        assert index.has_host_room == self.host_room
        assert (index.num_idle, index.num_dirty) == (len(self.device_order), len(self.idle(clean=False)))
        assert list(index._clean) == [entry.block for entry in self.idle(clean=True)]
        assert list(index._dirty) == [entry.block for entry in self.idle(clean=False)]
        for kind, held in (("only", index._host_only), ("used", index._host_used), ("clean", index._host_clean)):
            assert list(held) == [entry.block for entry in self.host_victims(kind)]
        assert set(index.pool.live()) == {entry.block for entry in self.live}
        for entry in self.live:
            block = entry.block
            assert (block.key, block.ref_count, block.sealed) == (entry.key, entry.ref_count, entry.sealed)
            assert (block.id >= 0, block.host >= 0, block.on_host) == (entry.device, entry.host, entry.whole)
            assert block.slot == entry.slot

    @invariant()
    def finds(self):
        for key in self.keys_seen | self.old_keys:
            for before in (self.done + 1, self.step):
                want = self.model_match([key], 1, before)
                assert not want or key not in self.old_keys
                assert self.index.match([key], 1, before) == [entry.block for entry in want]
                entry = self.indexed.get(key)
                coming = entry is not None and entry.step >= before
                assert self.index.is_coming(key, before) == coming

    def teardown(self):
        """Every user leaves and every transfer ends: nothing is left but what may be evicted."""
        if not hasattr(self, "index"):
            return
        while self.flights:
            self.complete()
        for user in self.users:
            self.release(user.chain)
        for entry in list(self.live):
            while entry.out or entry.into:
                entry.whole = entry.block.on_host = True
                entry.out, entry.into = (entry.out - 1, entry.into) if entry.out else (entry.out, entry.into - 1)
                self.moves(entry, -1, -1)
            while entry.put:
                entry.put -= 1
                self.moves(entry, 0, -1)
        self.agrees()
        assert all(entry.key is not None for entry in self.live)
        assert self.free + len(self.device_order) == self.num_blocks


TestIndexMachine = pytest.mark.heavy("rules of a machine in orders that nobody wrote down")(IndexMachine.TestCase)
TestIndexMachine.settings = machine_settings(100, 50)
