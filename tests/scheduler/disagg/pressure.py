"""A decode instance under pressure in virtual time: requests that others prefilled and requests of its own keep coming,
on few blocks. Who waits how long, who is preempted, what gets done."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from fdasync.scheduler.disagg.decode import DecodeSide
from tests.support.attached import attached
from tests.support.pd_table import PdTable

if TYPE_CHECKING:
    from fdasync.events.catalog import Event

STEP_S = 0.02
# of a step, for each token that is prefilled in it
PREFILL_SHARE = 0.01
ENDLESS = {"line": 1000, "max_ttl_s": 1e9, "max_total_s": 1e9}


class Pressure:
    """See the module.

    Attributes:
        waits: by key, the longest that it waited at a time: in line for a lease, for its first step, or after it was
            preempted.
    """

    def __init__(self, rules: dict[str, Any], seed: int = 1, **config: Any) -> None:
        self.table = PdTable({**ENDLESS, **rules}, num_host_blocks=4 * config["num_blocks"], **config)
        self.random = Random(seed)
        self.waits: dict[int, float] = {}
        self.asked: dict[int, float] = {}
        self.granted: dict[int, float] = {}
        self._began = self.table.now
        self._since: dict[int, float] = {}
        self._prompts: dict[int, range] = {}
        self._targets: dict[int, int] = {}
        self._events: list[Event] = []
        self._answered = 0

    # -- arrivals

    def lease(self, length: int, output: int, limit: int = 0, **fields: Any) -> int:
        """Somebody asks for room for so long a prompt; it ends after `output` tokens, and may have had `limit`."""
        key = self._new(length, output if limit else 0)
        event = self.table.lease(key, self._prompts[key], limit or output, ttl_s=1e9, total_s=1e9, **fields)
        self._events.append(event)
        return key

    def local(self, length: int, output: int, **fields: Any) -> int:
        """A request that this instance prefills itself."""
        key = self._new(length, 0)
        self._events.append(self.table.request(key, self._prompts[key], output, **fields))
        return key

    def _new(self, length: int, target: int) -> int:
        key = len(self.asked)
        self.asked[key] = self.table.now
        self._prompts[key] = range(1000 * key, 1000 * key + length)
        if target:
            self._targets[key] = target
        return key

    # -- time

    @property
    def live(self) -> int:
        return len(self.asked) - len(self.table.finished)

    @property
    def seconds(self) -> float:
        return self.table.now - self._began

    def step(self) -> None:
        """One step takes its time, and ends; all copies end; what a lease was granted for arrives."""
        table = self.table
        prefilled = sum(chunk.count for step in table.flying[:1] for chunk in step.chunks)
        table.now += STEP_S * (1 + PREFILL_SHARE * prefilled)
        events, self._events = self._events, []
        for key, target in self._targets.items():
            seq = table.scheduler.sequences.get(key)
            if seq is not None and seq.num_output >= target:
                events.append(table.matched(key, target))
        steps = [table.done()] if table.flying else []
        table.turn(*events, *steps, *[table.copied() for _ in list(table.copies)])
        while self._answered < len(table.answered):
            answer = table.answered[self._answered]
            self._answered += 1
            if answer.verdict == "granted":
                self.granted[answer.group] = table.now
                table.arrive(answer.group, self._prompts[answer.group], prefix=answer.prefix_blocks)
        self._note()

    def _note(self) -> None:
        scheduler = self.table.scheduler
        waiting = [seq.key for seq in scheduler.queues.waiting]
        waiting += [key for lease in attached(scheduler, DecodeSide)._line for key in lease.seqs]
        self._since = {key: self._since.get(key, self.table.now) for key in waiting}
        for key, since in self._since.items():
            self.waits[key] = max(self.waits.get(key, 0.0), self.table.now - since)

    # -- what came of it

    @property
    def preempted_each(self) -> float:
        """Preemptions for each request that ended."""
        return self.table.stats.preemptions / len(self.table.finished)

    @property
    def goodput(self) -> float:
        """Tokens a second, of requests that ended."""
        return sum(len(end.token_ids) for end in self.table.finished.values()) / self.seconds
