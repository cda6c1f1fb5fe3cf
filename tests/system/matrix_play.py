"""What is played in every cell of the matrix, and what must come of it.

One play for all: a burst of requests that share prefixes, come in groups, sample, and are too many for the blocks where
the cell wants preemptions; somebody is aborted and the weights change in its middle where the cell says so; then
prompts come back after device and host have forgotten them; then, where there is a store, in a second engine on it.
Each step asserts that it was what the cell is about. Tokens, log-probs and every row of every spec are held against the
oracle, stamps against the passes in the trace.

Knows engines by their public face only. Called by `test_matrix.py`, in virtual and in real time.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

from fdasync import SamplingParams
from fdasync.testing import PassModel, oracle_of
from tests.system.matrix import (
    BLOCK_TOKENS,
    NEW_WEIGHTS_ID,
    REAL,
    STORES,
    WEIGHTS_ID,
    engine_config,
    host_blocks,
    num_blocks,
)
from tests.system.matrix_life import Life, Stage, tokens

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync.cache.store.base import Store
    from tests.system.covering import Cell

SHARED = tokens("shared", 8)
SOLO = tokens("solo", 25)
LEAVER = SHARED + tokens("leaver", 3)
GROUP = SHARED + tokens("group", 3)
TAIL = SHARED + tokens("tail", 6)
LATEST = SHARED + tokens("latest", 10)
LATE = SHARED + tokens("late", 5)


class Play:
    """One cell. `store` is given where it lives in this process; else `store_config` says where it is."""

    def __init__(
        self, cell: Cell, *, store: Store | None = None, store_config: Mapping[str, Any] | None = None
    ) -> None:
        self.cell = cell
        self.real = cell["tier"] in REAL
        self._configs = [engine_config(cell, store_config, second=second) for second in (False, True)]
        self._stage = Stage(oracle_of(self._configs[0]), store)
        self._passes = PassModel(BLOCK_TOKENS, WEIGHTS_ID, runs=cell["drafts"] != "none")

    def wants(self, dimension: str, *values: str) -> bool:
        return self.cell[dimension] in values

    @property
    def _calm(self) -> bool:
        return self.wants("preempt", "none")

    @property
    def _writes_through(self) -> bool:
        return not self.wants("preempt", "writeback")

    async def run(self) -> None:
        """Raises AssertionError."""
        first = Life(self._stage, self._configs[0], self._passes)
        async with first.running():
            await self._burst(first)
            await self._come_back(first)
        first.check()
        self._check_first(first)
        if self.wants("tier", *STORES):
            # as if the machine had been started again
            second = Life(self._stage, self._configs[1], self._passes.next_life(WEIGHTS_ID))
            async with second.running():
                await self._second_engine(first, second)
            second.check()
            assert second.stats.preemptions == 0
            assert second.stats.fetched_blocks > 0
            assert second.stats.swapped_in_blocks > 0

    # -- the burst ------------------------------------------------------------------------------------

    async def _burst(self, life: Life) -> None:
        greedy = SamplingParams(temperature=0.0, logprobs="raw")
        sampled = SamplingParams(temperature=1.0, logprobs="both")
        async with asyncio.TaskGroup() as group:
            # the oldest is never preempted: it sees everything from beginning to end; and not all end early by drafts
            life.begin(group, "solo", SOLO, greedy, 48, paced=True)
            life.begin(group, "leaver", LEAVER, sampled, 40, paced=self.wants("abort", "no"))
            life.begin(group, "group", GROUP, sampled, 14, n=2)
            life.begin(group, "tail", TAIL, greedy, 20, start=5)
            life.begin(group, "latest", LATEST, sampled, 24, paced=True)
            if self.wants("abort", "yes"):
                await life.until(lambda: life.told("leaver") >= 4 and (self._calm or life.counters.preemptions > 0))
                assert life.engine.abort("leaver")
            if not self.wants("update", "none"):
                await self._update(life, group)
        leaver = life.asked["leaver"].result.samples[0]
        if self.wants("abort", "yes"):
            assert leaver.finish_reason == "abort"
            assert 4 <= len(leaver.token_ids) < 40
            assert leaver.routing is not None
            assert len(leaver.routing.array) == len(LEAVER) + len(leaver.token_ids) - 1
            assert leaver.raw_logprobs is not None
            assert len(leaver.raw_logprobs) == len(leaver.token_ids)
        cut = {name for name, asked in life.asked.items() if asked.result.finish_reason == "abort"}
        if not self.wants("update", "abort"):
            assert cut == ({"leaver"} if self.wants("abort", "yes") else set())

    async def _update(self, life: Life, group: asyncio.TaskGroup) -> None:
        """New weights while some decode; and somebody comes in at that very moment."""
        engine = life.engine
        await life.until(lambda: life.told("solo") >= 6 and self._ready(life))
        life.begin(group, "late", LATE, SamplingParams(temperature=1.0, logprobs="raw"), 6)
        mode: Literal["abort", "keep"] = "abort" if self.wants("update", "abort") else "keep"
        life.weights[1] = NEW_WEIGHTS_ID
        tensor = ("weights", "uint64", (1,), NEW_WEIGHTS_ID.to_bytes(8, "little"))
        assert life.told("solo") < 48
        await engine.update_weights(1, [tensor], mode)
        # the KV of this prompt is in every tier and of no use, and nobody else computes it under these weights
        probe = await life.ask("probe", SOLO, 3)
        assert probe.cached_tokens == 0, f"{probe.cached} of the old weights were matched"
        assert [span.version for span in probe.weight_version] == ["1"]

    def _ready(self, life: Life) -> bool:
        """The update shall come after what the cell is about, and hit more than one."""
        counters = life.counters
        back = life.resumed > 0 and counters.swapped_in_blocks > 0
        seen = {
            "none": True,
            "recompute": life.recomputed > 0,
            # some of those who are kept are on their way back at that moment
            "swap": life.arriving > 0 if self.wants("update", "keep") else back,
            "writeback": back and counters.written_blocks > 0,
        }
        return seen[self.cell["preempt"]] and counters.running >= 2

    # -- prompts come back ------------------------------------------------------------------------------

    async def _come_back(self, life: Life) -> None:
        whole = len(SOLO) // BLOCK_TOKENS * BLOCK_TOKENS
        if self.wants("update", "keep") and self.wants("cache", "on"):
            # who waited while the weights changed is found under the new ones
            assert (await life.ask("late again", LATE, 3)).cached_tokens > 0
        preemptions = life.counters.preemptions
        outputs = life.asked["solo"].result.token_ids[:-1]
        again = await life.ask("again", SOLO + outputs, 3)
        if not self.wants("update", "none"):
            # the probe computed the prompt under the new weights; nobody computed the rest under them alone
            assert again.cached_tokens <= whole
        cached = (await life.ask("once more", SOLO, 3)).cached
        assert cached.device == (whole if self.wants("cache", "on") else 0)
        if not self.real:
            await self._forget(life)
            cached = (await life.ask("returns", SOLO, 3)).cached
            assert cached.device == 0
            assert cached.host == (whole if self.wants("tier", "host") else 0)
            # in a write-back cell the store has what was preempted, be it the probe, of the same prompt
            preempted = any(known[: len(SOLO)] == SOLO for known in life.resumed_tokens)
            stored = self.wants("tier", *STORES) and (self._writes_through or preempted)
            assert cached.store == (whole if stored else 0)
        # one at a time, nobody is in anybody's way
        assert life.counters.preemptions == preemptions

    async def _forget(self, life: Life) -> None:
        """Everything that was on the device leaves it, and what was on the host too where a store is behind it."""
        room = num_blocks(self.cell) * BLOCK_TOKENS
        times = 1
        if self.wants("tier", *STORES):
            times += -(-host_blocks(self.cell) // num_blocks(self.cell)) + 1
        for number in range(times):
            await life.ask(f"filler-{number}", tokens(f"filler-{number}", room - BLOCK_TOKENS), 2)

    async def _second_engine(self, first: Life, second: Life) -> None:
        """The prompts and outputs of before; what was computed under the first weights is in the store."""
        await second.teach()
        stored, known = {}, {}
        for name in ("latest", "tail", "group", "solo"):
            before = first.asked[name]
            outputs = before.result.token_ids[:-1]
            result = await second.ask(f"second {name}", before.prompt + outputs, 3)
            stored[name], known[name] = result.cached.store, result.cached_tokens
        if self._writes_through:
            # nobody computed it under other weights before, and nobody shares it
            assert stored["solo"] >= len(SOLO) // BLOCK_TOKENS * BLOCK_TOKENS
        else:
            # preempted while it decoded: what it had made so far was kept too. Nobody here computed it; the beginning
            # that it shares with others may have come before
            assert any(count > len(first.asked[name].prompt) for name, count in known.items())

    # -- what a cell must have been -------------------------------------------------------------------

    def _check_first(self, life: Life) -> None:
        stats, facts = life.stats, life.facts
        assert (stats.preemptions == 0) == self._calm
        assert facts.depth == int(self.cell["depth"])
        # slots stay with their KV
        assert facts.aux_nbytes == 0
        assert (max(facts.prefills.values()) > 1) == self.wants("prefill", "chunked")
        # some drafts were right, and some were not
        assert (0 < stats.accepted_tokens < stats.drafted_tokens) == (not self.wants("drafts", "none"))
        assert bool(facts.resumed) == (not self._calm)
        if self.wants("preempt", "recompute"):
            assert any(again >= BLOCK_TOKENS for _, again in facts.resumed)
        if self.wants("preempt", "swap", "writeback") and not self.wants("update", "keep"):
            assert any(cached > 0 for cached, _ in facts.resumed)
        if self.wants("tier", "device"):
            assert stats.swapped_out_blocks == stats.swapped_in_blocks == 0
        else:
            assert stats.swapped_out_blocks > 0
            # a calm cell in real time has no reason to: its second engine has
            assert stats.swapped_in_blocks > 0 or (self.real and self._calm)
        if self.wants("tier", *STORES):
            assert stats.written_blocks > 0
            assert stats.dropped_writes == 0
        self._check_update(life)

    def _check_update(self, life: Life) -> None:
        samples = [sample for asked in life.asked.values() for sample in asked.result.samples]
        spans = [len(sample.weight_version) for sample in samples if sample.token_ids]
        if self.wants("update", "none"):
            assert set(spans) == {1}
        if self.wants("update", "keep"):
            assert spans.count(2) >= 2
            assert life.asked["solo"].result.finish_reason == "length"
        if self.wants("update", "abort"):
            assert set(spans) == {1}
            cut = [sample for sample in samples if sample.finish_reason == "abort" and sample.token_ids]
            assert len(cut) > (1 if self.wants("abort", "yes") else 0)
            assert life.asked["solo"].result.finish_reason == "abort"
