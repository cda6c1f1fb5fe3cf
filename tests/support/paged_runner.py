"""A naive runner, host and store that compute cell by cell, for tests of the scheduler.

Every cell of KV holds its inputs: salt, tokens, the weights of each position. So a block that is stale, missing,
misplaced, of other weights or written twice is found at once, in any tier. Rows become visible when their step is done,
as in the real arena. Steps and transfers end when the test ends them.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fdasync.cache.identity import block_keys
from fdasync.engine.prepare import salted
from fdasync.events.actions import FetchBlocks, ReceiveBlocks, RunStep, StoreBlocks, SwapIn, SwapOut
from fdasync.events.catalog import StepDone
from fdasync.runner.synthetic.oracle import U64, Oracle, SyntheticConfig

if TYPE_CHECKING:
    from fdasync.scheduler import SchedulerConfig

VOCAB = 6
ORACLE = Oracle(SyntheticConfig(vocab_size=VOCAB))


@lru_cache(maxsize=100_000)
def next_token(tokens: tuple[int, ...]) -> int:
    """The token after these; the same under all weights, so that a test knows it beforehand."""
    digest = ORACLE.digests(tokens)[-1:]
    return int(ORACLE.sample(digest, np.zeros(1, U64), ORACLE.config.weights_id)[0])


def whole_output(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tuple(tokens)))
    return tokens[len(prompt) :]


def namespace_of_version(version: int) -> bytes:
    return b"weights %d" % version


class Cell(NamedTuple):
    """KV, or a row, of one position: the inputs that it was computed from."""

    salt: str
    tokens: tuple[int, ...]
    versions: tuple[int, ...]


class Lane:
    def __init__(self, tokens: list[int], position: int, blocks: list[int], salt: str, versions: list[int]) -> None:
        self.tokens = tokens
        self.position = position
        self.blocks = blocks
        self.salt = salt
        self.versions = versions

    def cell(self, position: int) -> Cell:
        return Cell(self.salt, tuple(self.tokens[: position + 1]), tuple(self.versions[: position + 1]))


class Flight(NamedTuple):
    """A step in flight."""

    step: RunStep
    tokens: tuple[int, ...]
    rows: dict[tuple[int, int], tuple[int, Cell]]
    named: set[int]
    slots: set[int]
    written: set[int]
    done: list[tuple[int, int]]
    sampled: list[int]
    version: int


class PagedRunner:
    """See the module.

    Attributes:
        store: objects of the store: (namespace, key) -> cells; a test may take keys out at any time.
        salts: salt of each sequence.
        midway: sequences that another instance prefilled; an open block of theirs may be filled in part.
        passed: for each step that is done, (sequence, positions computed).
        sampled: for each sequence, the weights that each of its tokens was sampled under.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.version = int(config.weight_version)
        self.salts: dict[int, str] = {}
        self.lanes: dict[int, Lane] = {}
        self.decoding: list[int] = []
        self.cells: dict[tuple[int, int], Cell] = {}
        self.slot_of_block: dict[int, tuple[int, int]] = {}
        self.rows: dict[tuple[int, int], tuple[int, Cell]] = {}
        self.flights: deque[Flight] = deque()
        self.passed: dict[int, list[tuple[int, int]]] = {}
        self.sampled: dict[int, list[int]] = {}
        self.next_step = 0
        self.host: dict[int, list[Any]] = {}
        self.slot_of_host: dict[int, tuple[int, int]] = {}
        self.copies: dict[int, tuple[SwapOut | SwapIn, list[list[Cell]]]] = {}
        self.host_reads: Counter[int] = Counter()
        self.host_writes: set[int] = set()
        self.puts: dict[int, tuple[StoreBlocks, list[list[Cell]], list[int]]] = {}
        self.fetches: dict[int, tuple[FetchBlocks, list[int]]] = {}
        self.numbers: set[tuple[str, int]] = set()
        self.store: dict[tuple[bytes, bytes], list[Cell]] = {}
        self.midway: set[int] = set()
        self.receives: dict[int, ReceiveBlocks] = {}

    # -- steps

    def launch(self, step: RunStep) -> None:
        config = self.config
        assert step.step_id == self.next_step
        assert len(self.flights) < config.pipeline_depth
        self.next_step += 1
        for key in step.leaves:
            del self.lanes[key]
            self.decoding = [other for other in self.decoding if other != key]
        fresh_blocks: list[int] = []
        fresh_slots: list[int] = []
        for start in step.starts:
            assert start.key not in self.lanes
            tokens = list(array("i", start.tokens))
            cached, rest = divmod(start.num_cached, config.block_tokens)
            assert rest == 0 or start.key in self.midway
            assert start.num_cached < len(tokens)
            assert len(start.blocks) == -(-len(tokens) // config.block_tokens) == len(set(start.blocks))
            own = start.blocks[cached:]
            fresh_blocks += own
            if config.capture:
                fresh_slots += start.slots
                self.slot_of_block.update(zip(own, zip(start.slots, start.generations, strict=True), strict=True))
            # whatever it hits was computed under the weights of now
            versions = [self.version] * start.num_cached
            lane = Lane(tokens, start.num_cached, list(start.blocks), self.salts[start.key], versions)
            self.lanes[start.key] = lane
        for append in step.appends:
            lane = self.lanes[append.key]
            assert append.key in self.decoding
            assert append.key not in step.skips
            # just when it is needed
            assert lane.position == len(lane.blocks) * config.block_tokens
            lane.blocks.append(append.block)
            fresh_blocks.append(append.block)
            if config.capture:
                fresh_slots.append(append.slot)
                self.slot_of_block[append.block] = (append.slot, append.generation)
        self._check_fresh(fresh_blocks, fresh_slots)
        decodes = [key for key in self.decoding if key not in step.skips]
        assert set(step.skips) <= set(self.decoding)
        assert len(self.lanes) <= config.max_running
        assert 0 < len(decodes) + sum(chunk.count for chunk in step.chunks) <= config.max_step_tokens
        assert len({chunk.key for chunk in step.chunks}) == len(step.chunks)
        work = [(key, 1, True) for key in decodes] + [(chunk.key, chunk.count, chunk.last) for chunk in step.chunks]
        flight = Flight(step, (), {}, set(), set(), set(), [], [], self.version)
        for key, count, _ in work:
            assert count > 0
            self._write(self.lanes[key], count, flight)
        tokens = []
        for key, _, samples in work:
            lane = self.lanes[key]
            self._read(lane)
            flight.done.append((key, lane.position))
            if samples:
                assert lane.position == len(lane.tokens)
                tokens.append(next_token(tuple(lane.tokens)))
                lane.tokens.append(tokens[-1])
                flight.sampled.append(key)
            else:
                assert lane.position < len(lane.tokens)
        self.decoding += [chunk.key for chunk in step.chunks if chunk.last]
        if config.capture:
            flight.slots.update(self.slot_of_block[block][0] for block in flight.named)
        self.flights.append(flight._replace(tokens=tuple(tokens)))

    def _check_fresh(self, blocks: list[int], slots: list[int]) -> None:
        assert all(0 <= block < self.config.num_blocks for block in blocks)
        assert len(set(blocks)) == len(blocks)
        assert len(set(slots)) == len(slots)
        for flight in self.flights:
            assert not flight.named & set(blocks), "a block that a step in flight names got another writer"
            assert not flight.slots & set(slots), "a slot that a step in flight names got another writer"
        assert not self._moving() & set(blocks), "a block that a copy in flight names got another writer"
        kept = {self.slot_of_host[block][0] for block in self._host_in_use() if block in self.slot_of_host}
        assert not kept & set(slots), "a slot that belongs to a host block in use got another writer"

    def _moving(self) -> set[int]:
        copied = {block for copy, _ in self.copies.values() for block in copy.device}
        return copied | {block for receive in self.receives.values() for block in receive.device}

    def _host_in_use(self) -> set[int]:
        return self.host_writes | {block for block, count in self.host_reads.items() if count}

    def _write(self, lane: Lane, count: int, flight: Flight) -> None:
        size = self.config.block_tokens
        for position in range(lane.position, lane.position + count):
            block, offset = lane.blocks[position // size], position % size
            lane.versions.append(self.version)
            cell = lane.cell(position)
            self.cells[block, offset] = cell
            flight.written.add(block)
            if self.config.capture:
                slot, generation = self.slot_of_block[block]
                assert generation > 0
                flight.rows[slot, offset] = (generation, cell)
        lane.position += count
        flight.named.update(lane.blocks[: -(-lane.position // size)])

    def _read(self, lane: Lane) -> None:
        size = self.config.block_tokens
        for position in range(lane.position):
            cell = self.cells[lane.blocks[position // size], position % size]
            assert cell == lane.cell(position), "KV of other tokens, of another place, or of other weights"

    def complete(self) -> StepDone:
        flight = self.flights.popleft()
        self.rows.update(flight.rows)
        self.passed[flight.step.step_id] = flight.done
        for key in flight.sampled:
            self.sampled.setdefault(key, []).append(flight.version)
        return StepDone(step_id=flight.step.step_id, tokens=flight.tokens)

    def load(self, version: int) -> None:
        assert not self.flights
        self.version = version

    # -- copies between device and host

    def _once(self, kind: str, number: int) -> None:
        assert (kind, number) not in self.numbers, f"{kind} {number} was given twice"
        self.numbers.add((kind, number))

    def copy(self, copy: SwapOut | SwapIn) -> None:
        size = self.config.block_tokens
        self._once("copy", copy.copy_id)
        assert len(copy.device) == len(copy.host) == len(set(copy.device)) == len(set(copy.host)) > 0
        assert not self._moving() & set(copy.device), "a block is in two copies"
        contents = []
        if isinstance(copy, SwapOut):
            for device, host in zip(copy.device, copy.host, strict=True):
                assert not any(device in flight.written for flight in self.flights), "an open block goes out"
                self._take_host(host)
                # of an open block that is handed over, what counts of it
                counts = [self.cells.get((device, offset)) for offset in range(size)]
                assert counts[0] is not None
                contents.append(counts)
                if self.config.capture:
                    self.slot_of_host[host] = self.slot_of_block[device]
        else:
            named = {block for flight in self.flights for block in flight.named}
            assert not named & set(copy.device), "a block that a step in flight names got another writer"
            slots = list(zip(copy.slots, copy.generations, strict=True))
            assert slots == ([self.slot_of_host[host] for host in copy.host] if self.config.capture else [])
            for number, (device, host) in enumerate(zip(copy.device, copy.host, strict=True)):
                assert host not in self.host_writes
                contents.append(self.host[host])
                self.host_reads[host] += 1
                for offset in range(size):
                    self.cells.pop((device, offset), None)
                if slots:
                    self.slot_of_block[device] = slots[number]
        self.copies[copy.copy_id] = (copy, contents)

    def _take_host(self, host: int) -> None:
        assert 0 <= host < self.config.num_host_blocks
        assert host not in self._host_in_use(), "a host block in use got another writer"
        self.host_writes.add(host)
        self.host.pop(host, None)

    def end_copy(self, number: int) -> None:
        copy, contents = self.copies.pop(number)
        size = self.config.block_tokens
        for device, host, content in zip(copy.device, copy.host, contents, strict=True):
            if isinstance(copy, SwapOut):
                now = [self.cells.get((device, offset)) for offset in range(size)]
                assert content == now, "written while it was copied"
                self.host_writes.remove(host)
                self.host[host] = content
            else:
                assert self.host[host] == content, "written while it was copied"
                self.host_reads[host] -= 1
                self.cells.update({(device, offset): cell for offset, cell in enumerate(content) if cell is not None})

    # -- other instances

    def export(self, host: int, slot: int, rows: int, *, on_device: bool = False) -> list[Any]:
        """Let another instance read a host block, or a device block, and its rows from now on; returns the content."""
        if on_device:
            return self._export_device(host, slot, rows)
        assert host not in self.host_writes
        content = self.host[host]
        assert None not in content[:rows], "a block that is not whole is offered"
        if self.config.capture:
            assert self.slot_of_host[host][0] == slot
            for offset in range(rows):
                assert self.rows[slot, offset] == (self.slot_of_host[host][1], content[offset])
        self.host_reads[host] += 1
        return content

    def _export_device(self, device: int, slot: int, rows: int) -> list[Any]:
        assert not any(device in flight.written for flight in self.flights), "an open block is read"
        content = [self.cells.get((device, offset)) for offset in range(self.config.block_tokens)]
        assert None not in content[:rows], "a block that is not whole is offered"
        if self.config.capture:
            assert self.slot_of_block[device][0] == slot
            for offset in range(rows):
                assert self.rows[slot, offset] == (self.slot_of_block[device][1], content[offset])
        return content

    def end_export(self, host: int, content: list[Any], *, on_device: bool = False) -> None:
        if on_device:
            now = [self.cells.get((host, offset)) for offset in range(self.config.block_tokens)]
            assert now == content, "written while another instance reads it"
            return
        assert self.host[host] == content, "written while another instance reads it"
        self.host_reads[host] -= 1

    def receive(self, receive: ReceiveBlocks) -> None:
        self._once("receive", receive.receive_id)
        count = len(receive.indices)
        assert not (receive.device and receive.host)
        places_here = receive.device or receive.host
        assert count == len(places_here) == len(set(places_here)) == len(receive.offers) == len(receive.rows) > 0
        assert len(receive.slots) == len(receive.generations) == (count if self.config.capture else 0)
        for host in receive.host:
            self._take_host(host)
        if receive.device:
            named = {block for flight in self.flights for block in flight.named}
            assert not named & set(receive.device), "a block that a step in flight names got another writer"
            assert not self._moving() & set(receive.device), "a block is in two copies"
            for device in receive.device:
                for offset in range(self.config.block_tokens):
                    self.cells.pop((device, offset), None)
        if self.config.capture:
            busy = {slot for flight in self.flights for slot in flight.slots}
            assert not busy & set(receive.slots), "a slot that a step in flight names got another writer"
            places = zip(receive.slots, receive.generations, strict=True)
            (self.slot_of_block if receive.device else self.slot_of_host).update(zip(places_here, places, strict=True))
        self.receives[receive.receive_id] = receive

    def end_receive(self, number: int, contents: list[list[Any] | None]) -> None:
        """None: it did not arrive."""
        receive = self.receives.pop(number)
        for at, (place, content) in enumerate(zip(receive.device or receive.host, contents, strict=True)):
            if not receive.device:
                self.host_writes.remove(place)
            if content is not None:
                rows = receive.rows[at]
                if receive.device:
                    self.cells.update({(place, offset): cell for offset, cell in enumerate(content[:rows])})
                else:
                    self.host[place] = [*content[:rows], *[None] * (self.config.block_tokens - rows)]
                if self.config.capture:
                    for offset in range(rows):
                        self.rows[receive.slots[at], offset] = (receive.generations[at], content[offset])

    # -- the store

    def put(self, put: StoreBlocks) -> None:
        self._once("store", put.put_id)
        size = self.config.block_tokens
        assert len(put.keys) == len(put.host) == len(set(put.host)) == len(set(put.keys)) > 0
        assert len(put.slots) == (len(put.host) if self.config.capture else 0)
        # two blocks of one identity may be: one of them was computed before a reset of the cache
        in_flight = {other.host[at] for other, _, held in self.puts.values() for at in held}
        assert not in_flight & set(put.host), "a block is being written twice"
        contents = []
        for number, (key, host) in enumerate(zip(put.keys, put.host, strict=True)):
            assert host not in self.host_writes
            content = self.host[host]
            salt, tokens, versions = content[-1]
            assert set(versions) == {self.version}, "KV of other weights is written"
            assert put.namespace == namespace_of_version(self.version)
            assert key == block_keys(salted(put.namespace, salt), tokens, size)[-1]
            if self.config.capture:
                slot, generation = self.slot_of_host[host]
                assert put.slots[number] == slot
                # rows and KV of one computation
                rows = [self.rows[slot, offset] for offset in range(size)]
                assert rows == [(generation, cell) for cell in content]
            contents.append(content)
            self.host_reads[host] += 1
        self.puts[put.put_id] = (put, contents, list(range(len(contents))))

    def end_put(self, number: int, stored: list[bool], *, late: bool) -> None:
        """Store the blocks with `stored`; a late end keeps the holds on the others."""
        put, contents, held = self.puts[number]
        for at in list(held):
            if stored[at]:
                assert self.host[put.host[at]] == contents[at], "written while it was stored"
                if self.config.capture:
                    slot, generation = self.slot_of_host[put.host[at]]
                    rows = [self.rows[slot, offset] for offset in range(self.config.block_tokens)]
                    assert rows == [(generation, cell) for cell in contents[at]], "rows written while they were stored"
                self.store[put.namespace, put.keys[at]] = contents[at]
            if stored[at] or not late:
                self.host_reads[put.host[at]] -= 1
                held.remove(at)
        if not late:
            del self.puts[number]

    def count(self, namespace: bytes, keys: tuple[bytes, ...]) -> int:
        return [*[(namespace, key) in self.store for key in keys], False].index(False)

    def write_for_others(self, tokens: list[int], salt: str) -> None:
        """Blocks that another engine with these weights computed."""
        size = self.config.block_tokens
        namespace = namespace_of_version(self.version)
        lane = Lane(tokens, 0, [], salt, [self.version] * len(tokens))
        for number, key in enumerate(block_keys(salted(namespace, salt), tokens, size)):
            content = [lane.cell(position) for position in range(number * size, (number + 1) * size)]
            self.store.setdefault((namespace, key), content)

    def fetch(self, fetch: FetchBlocks) -> None:
        self._once("store", fetch.fetch_id)
        count = len(fetch.keys)
        assert count == len(fetch.host) == len(set(fetch.host)) > 0
        assert len(fetch.slots) == len(fetch.generations) == (count if self.config.capture else 0)
        for host in fetch.host:
            self._take_host(host)
        if self.config.capture:
            busy = {slot for flight in self.flights for slot in flight.slots}
            assert not busy & set(fetch.slots), "a slot that a step in flight names got another writer"
            self.slot_of_host.update(zip(fetch.host, zip(fetch.slots, fetch.generations, strict=True), strict=True))
        self.fetches[fetch.fetch_id] = (fetch, list(range(count)))

    def has(self, number: int) -> list[bool]:
        """Which blocks of a fetch the store has, or that came already."""
        fetch, held = self.fetches[number]
        return [at not in held or (fetch.namespace, key) in self.store for at, key in enumerate(fetch.keys)]

    def end_fetch(self, number: int, arrived: list[bool], *, late: bool) -> None:
        """Fill the blocks with `arrived`; after a late end the others may still be written to."""
        fetch, held = self.fetches[number]
        for at in list(held):
            host = fetch.host[at]
            if arrived[at]:
                content = self.store[fetch.namespace, fetch.keys[at]]
                self.host[host] = content
                if self.config.capture:
                    for offset, cell in enumerate(content):
                        self.rows[fetch.slots[at], offset] = (fetch.generations[at], cell)
            if arrived[at] or not late:
                self.host_writes.remove(host)
                held.remove(at)
        if not late:
            del self.fetches[number]

    def is_quiet(self) -> bool:
        """Nothing is in flight, and nothing is held."""
        held: tuple[Any, ...] = (self.flights, self.copies, self.puts, self.fetches, self.receives, self._host_in_use())
        return not any(held)
