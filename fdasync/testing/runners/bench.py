"""A runner on a bench: a test writes steps and chooses blocks and slots by hand, without a scheduler.

`Bench` numbers steps, builds their parts and reads rows out of the arena. It decides nothing and checks nothing. Used
by the suites for runners and by further tests of runners.
"""

from __future__ import annotations

from array import array
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fdasync.cache.aux_arena import AuxArena
from fdasync.cache.host_arena import HostArena
from fdasync.events.actions import BlockAppend, Chunk, RunStep, SeqStart, SwapIn, SwapOut
from fdasync.request import SamplerSpec

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Mapping, Sequence

    from numpy.typing import NDArray

    from fdasync.runner.base import Capacity, CopyOutput, Runner, StepOutput

GREEDY = SamplerSpec(prompt_len=0)


def noisy(seed: int, index: int = 0) -> SamplerSpec:
    """A sampler at temperature 1."""
    return msgspec.structs.replace(GREEDY, seed=seed, index=index, temperature=1.0)


@dataclass(frozen=True)
class Answer:
    """What a sequence sampled.

    Attributes:
        tokens: sampled ids.
        rows: of all positions that were computed, by spec name.
    """

    tokens: list[int]
    rows: dict[str, NDArray[Any]]


class Bench:
    """One runner, open and bound.

    A slot does not have its block's number (block b starts with slot num_blocks-1-b), so that a runner that mixes them
    up is found out. A slot stays with its KV when the KV is swapped.

    Attributes:
        runner, capacity: open and bound, and what its `open` returned.
        arena, host: given to `bind`; None: without rows, without a host tier.
    """

    def __init__(
        self, runner: Runner, capacity: Capacity, arena: AuxArena | None, host: HostArena | None = None
    ) -> None:
        self.runner = runner
        self.capacity = capacity
        self.arena = arena
        self.host = host
        self._step_id = -1
        self._copy_id = -1
        self._generation: dict[int, int] = {}
        self._slot_of = {block: capacity.num_blocks - 1 - block for block in range(capacity.num_blocks)}
        self._slot_on_host: dict[int, int] = {}

    @property
    def size(self) -> int:
        return self.capacity.block_tokens

    def prompt(self, length: int, salt: int = 0) -> list[int]:
        """Token ids inside the vocabulary, different for each salt."""
        random = np.random.default_rng([length, salt])
        return [int(token) for token in random.integers(0, self.capacity.vocab_size, length)]

    def slot(self, block: int) -> int:
        """The slot of a device block."""
        return self._slot_of[block]

    def generation(self, block: int) -> int:
        """The generation of the present use of the block's slot; 0 before the first use."""
        return self._generation.get(self.slot(block), 0)

    # -- parts of a step ----------------------------------------------------------------------------

    def start(
        self, key: int, tokens: Sequence[int], blocks: Sequence[int], *, cached: int = 0, prompt_len: int | None = None,
        sampler: SamplerSpec = GREEDY,
    ) -> SeqStart:  # fmt: skip
        """A sequence that joins; its blocks behind the cached tokens get a new generation.

        A block that is cached in part keeps its slot and generation: its first rows are there.
        """
        used = blocks[: -(-len(tokens) // self.size)]
        whole, part = divmod(cached, self.size)
        pairs = [self._kept(block) for block in used[whole : whole + 1] if part]
        pairs += [self._use(block) for block in used[whole + len(pairs) :]]
        sampler = msgspec.structs.replace(sampler, prompt_len=len(tokens) if prompt_len is None else prompt_len)
        return SeqStart(
            key=key,
            tokens=array("i", tokens).tobytes(),
            num_cached=cached,
            blocks=tuple(used),
            slots=tuple([slot for slot, _ in pairs if slot >= 0]),
            generations=tuple([generation for slot, generation in pairs if slot >= 0]),
            sampler=sampler,
        )

    def append(self, key: int, block: int) -> BlockAppend:
        return BlockAppend(key, block, *self._use(block))

    def _kept(self, block: int) -> tuple[int, int]:
        return (-1, 0) if self.arena is None else (self.slot(block), self.generation(block))

    def _use(self, block: int) -> tuple[int, int]:
        if self.arena is None:
            return -1, 0
        if self._held_slots().count(self.slot(block)) > 1:
            # the slot's rows belong to KV that is still in another block
            self._slot_of[block] = self._free_slot(self.arena)
        slot = self.slot(block)
        return slot, self._next_generation(slot)

    def _held_slots(self) -> list[int]:
        return [*self._slot_of.values(), *self._slot_on_host.values()]

    def _free_slot(self, arena: AuxArena) -> int:
        held = set(self._held_slots())
        return next(slot for slot in range(arena.num_slots) if slot not in held)

    def _next_generation(self, slot: int) -> int:
        self._generation[slot] = generation = self._generation.get(slot, 0) + 1
        return generation

    # -- copies -------------------------------------------------------------------------------------

    def swap_out(self, device: Sequence[int], host: Sequence[int]) -> asyncio.Future[CopyOutput]:
        """Start the next copy: device blocks to host blocks."""
        self._copy_id += 1
        self._slot_on_host.update((place, self.slot(block)) for block, place in zip(device, host, strict=True))
        return self.runner.copy(SwapOut(self._copy_id, tuple(device), tuple(host)))

    def swap_in(self, host: Sequence[int], device: Sequence[int]) -> asyncio.Future[CopyOutput]:
        """Start the next copy: host blocks to device blocks, which take over the slots."""
        self._copy_id += 1
        self._slot_of.update((block, self._slot_on_host[place]) for place, block in zip(host, device, strict=True))
        slots: tuple[int, ...] = ()
        generations: tuple[int, ...] = ()
        if self.arena is not None:
            slots = tuple([self.slot(block) for block in device])
            generations = tuple([self.generation(block) for block in device])
        return self.runner.copy(
            SwapIn(copy_id=self._copy_id, host=tuple(host), device=tuple(device), slots=slots, generations=generations)
        )

    def receive(
        self, kv: Sequence[NDArray[np.uint8]], rows: Mapping[str, NDArray[Any]], tokens: int, host: Sequence[int]
    ) -> None:
        """Write another instance's blocks, with the first `tokens` tokens of a sequence, into these host blocks, and
        the rows of the tokens into new slots."""
        assert self.host is not None, f"the bench has no host tier: {self.host}"
        for number, (place, block) in enumerate(zip(host, kv, strict=True)):
            self.host.kv[place] = block
            self._slot_on_host.pop(place, None)
            if self.arena is None:
                self._slot_on_host[place] = -1
                continue
            slot = self._slot_on_host[place] = self._free_slot(self.arena)
            first, last = number * self.size, min((number + 1) * self.size, tokens)
            index = slot * self.size + np.arange(last - first)
            generations = np.full(last - first, self._next_generation(slot), np.uint32)
            self.arena.scatter(index, generations, {name: part[first:last] for name, part in rows.items()})

    def fill_rows(self, byte: int) -> None:
        """Set every byte of every row, as if earlier uses of the slots had left these bytes."""
        if self.arena is not None:
            for rows in self.arena.rows.values():
                rows.view(np.uint8)[:] = byte

    # -- steps --------------------------------------------------------------------------------------

    def launch(self, **parts: Any) -> asyncio.Future[StepOutput]:
        """Launch the next step with these parts of `RunStep`."""
        self._step_id += 1
        drafts, own_drafts = parts.pop("drafts", None), parts.pop("own_drafts", None)
        columns = {name: tuple(part) for name, part in parts.items()}
        return self.runner.launch(RunStep(self._step_id, **columns, drafts=drafts, own_drafts=own_drafts))

    async def step(self, **parts: Any) -> tuple[int, ...]:
        """Launch the next step and wait for its tokens."""
        return (await self.launch(**parts)).tokens

    def launch_prefill(self, *starts: SeqStart) -> asyncio.Future[StepOutput]:
        """One step that starts these sequences and forwards all their tokens."""
        chunks = [Chunk(start.key, len(start.tokens) // 4 - start.num_cached, True) for start in starts]
        return self.launch(starts=starts, chunks=chunks)

    async def decode(self, key: int, length: int, blocks: Sequence[int], count: int) -> list[int]:
        """`count` steps of the one decoding sequence whose next token is at position `length`."""
        tokens: list[int] = []
        for position in range(length, length + count):
            appends = [self.append(key, blocks[position // self.size])] if position % self.size == 0 else []
            tokens += await self.step(appends=appends)
        return tokens

    async def answer(
        self, key: int, prompt: Sequence[int], count: int, blocks: Sequence[int], *, cached: int = 0,
        sampler: SamplerSpec = GREEDY,
    ) -> Answer:  # fmt: skip
        """Run one sequence alone: prefill in one step, decode, leave. Returns `count` tokens and all rows."""
        start = self.start(key, prompt, blocks, cached=cached, sampler=sampler)
        tokens = list((await self.launch_prefill(start)).tokens)
        tokens += await self.decode(key, len(prompt), blocks, count - 1)
        rows = self.rows(blocks, 0, len(prompt) + count - 1)
        await self.leave(key)
        return Answer(tokens, rows)

    async def leave(self, *keys: int) -> None:
        """Run a step in which sequences only leave."""
        await self.step(leaves=keys)

    def rows(self, blocks: Sequence[int], first: int, last: int) -> dict[str, NDArray[Any]]:
        """Copies of the rows of positions [first, last); raises InvariantBroken where one was never written."""
        if self.arena is None:
            return {}
        into = {spec.name: np.empty((last - first, *spec.shape), spec.dtype) for spec in self.arena.specs}
        named = blocks[first // self.size : -(-last // self.size)]
        slots, generations = [self.slot(block) for block in named], [self.generation(block) for block in named]
        self.arena.copy_rows(slots, generations, first % self.size, last - first, into, 0)
        return into


@asynccontextmanager
async def on_bench(runner: Runner, *, host_blocks: int = 0) -> AsyncIterator[Bench]:
    """Open and bind a runner; at the end close it, and then the arenas.

    The arena has two slots more than there are blocks on device and host, so that every block can be computed anew.
    """
    arena = host = None
    try:
        capacity = await runner.open()
        if capacity.aux_specs:
            num_slots = capacity.num_blocks + host_blocks + 2
            arena = AuxArena.create(num_slots, capacity.block_tokens, capacity.aux_specs)
        if host_blocks:
            host = HostArena.create(host_blocks, capacity.block_nbytes)
        await runner.bind(capacity.num_blocks, arena, host)
        yield Bench(runner, capacity, arena, host)
    finally:
        await runner.aclose()
        for memory in (arena, host):
            if memory is not None:
                memory.close()
