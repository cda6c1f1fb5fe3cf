"""How each play of `test_machine.py` ends, and its sleeps: all that is in flight ends well, and nothing is left in any
tier, or on the device."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from fdasync.events.catalog import (
    FetchEnded,
    LateTransferEnded,
    LookedUp,
    ResumeRequested,
    SleepRequested,
    StepDone,
    StoreEnded,
    SwapDone,
)
from fdasync.scheduler.replay import replay


class EndOfPlay:
    """See the module. The machine has the scheduler, its runner, and what is in flight."""

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        self.queue.append(ResumeRequested())
        for _ in range(3000):
            self.finish_everything()
            if self.runner.is_quiet() and not (self.answers or self.queue or self.lookups or self.hashes):
                break
        assert sorted(self.finished) == sorted(self.requests)
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.finished) == (0, 0, len(self.requests))
        assert stats.free_blocks + stats.idle_blocks == self.config.num_blocks
        assert (stats.moving, stats.writing, stats.waiting_for_store, stats.late_transfers) == (0, 0, 0, 0)
        # nothing is left in any tier but what may be evicted
        index = self.scheduler.index
        for block in index.pool.live():
            assert block.key is not None
            assert block.host < 0 or block.host_list is not None
        while index.make_host_room(for_fetch=True) and index.pool.num_host_free < self.config.num_host_blocks:
            index.pool.allocate_host().hold("write")
            if sum(len(block.host_holds) for block in index.pool.live()) == self.config.num_host_blocks:
                break
        sampled = sum(
            len(event.tokens) for events, _ in self.trace._turns for event in events if type(event) is StepDone
        )
        assert stats.generated_tokens + stats.dropped_tokens == sampled
        assert replay(self.trace.encode()) == len(self.trace._turns)

    @rule(first=st.booleans(), resume=st.booleans())
    def sleep(self, first, resume):
        """As the engine does it: what is in flight ends, the device is empty, and its memory has other content then."""
        if first:
            # with steps in flight and copies under way
            self.queue.append(SleepRequested())
            self.turn(False)
        else:
            self.queue.append(SleepRequested())
        for _ in range(1000):
            self.finish_everything()
            if self.scheduler.pausing.stage == "clear":
                break
        assert self.scheduler.pausing.stage == "clear"
        self.runner.cells.clear()
        if resume:
            self.queue.append(ResumeRequested())
            self.turn(False)

    def finish_everything(self):
        """Everything in flight ends well, one after the other."""
        runner = self.runner
        while self.answers:
            self.answer(1, False, True)
        while self.hashes:
            self.hash_ends(False, True)
        for number, lookup in list(self.lookups.items()):
            del self.lookups[number]
            count = runner.count(lookup.namespace, lookup.keys)
            self.queue.append(LookedUp(lookup_id=number, count=count, seconds=0.001, answered=True))
        for number in list(runner.copies):
            runner.end_copy(number)
            self.queue.append(SwapDone(copy_id=number, seconds=0.001, kv_nbytes=0, aux_nbytes=0))
        for number in list(runner.fetches):
            arrived = runner.has(number)
            runner.end_fetch(number, arrived, late=False)
            if number in self.late_fetches:
                self.queue.append(LateTransferEnded(transfer_id=number, arrived=tuple(arrived)))
            else:
                self.queue.append(
                    FetchEnded(fetch_id=number, arrived=tuple(arrived), late=False, seconds=0.001, nbytes=0)
                )
        for number in list(runner.puts):
            stored = (True,) * len(runner.puts[number][0].keys)
            runner.end_put(number, list(stored), late=False)
            if number in self.late_puts:
                self.queue.append(LateTransferEnded(transfer_id=number, arrived=stored))
            else:
                self.queue.append(StoreEnded(put_id=number, stored=stored, late=False, seconds=0.001, nbytes=0))
        self.late_fetches.clear()
        self.late_puts.clear()
        if runner.flights:
            self.queue.append(runner.complete())
        self.turn(False)
