"""Compares each answer of a fleet with the oracle, and with the models of the instances that it came from.

Knows results and models of passes; nothing of schedules and leases. Called by `simulation.py`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from fdasync.cache.aux import wanted_specs
from fdasync.events.actions import FinishRequest
from fdasync.events.catalog import LeaseAsked, RequestPrepared
from fdasync.events.trace import Turn
from fdasync.scheduler.replay import replay
from fdasync.testing.harness.engines import check_sample, expected

if TYPE_CHECKING:
    from fdasync.result import Sample
    from fdasync.testing.harness.pass_model import Owner, Read
    from tests.support.sim_engine.workload import RequestPlan
    from tests.support.sim_fleet.machine import Machine


class Served:
    """One sample's way: the machine where it ended, and the machine that prefilled it if that was another one."""

    def __init__(self, last: Machine, key: int, first: Machine | None, first_key: int, index: int) -> None:
        self.last, self.first = last, first
        self.owner: Owner = (key, index)
        self.first_owner: Owner = (first_key, index)

    def seen(self, prompt_len: int) -> list[Read]:
        """What the first pass over each position read; over the prompt's, the prefilling machine's pass."""
        seen = self.last.passes.seen.get(self.owner, [])
        if self.first is None:
            return seen
        return self.first.passes.seen.get(self.first_owner, [])[:prompt_len] + seen[prompt_len:]

    def cached(self) -> int:
        if self.first is not None:
            return self.first.passes.cached.get(self.first_owner, 0)
        return self.last.passes.cached.get(self.owner, 0)

    def check_stamps(self, sample: Sample, prompt_len: int) -> None:
        """Each row is of the request's first pass over its position, or of the KV that this pass found."""
        got = sample.aux["stamp"][:, 0].tolist()
        start = sample.start
        own = self.last.passes.stamps.get(self.owner, [])[start : start + len(got)]
        if self.first is None:
            assert got == own, f"rows carry the stamps {got}, first passes were {own}"
            return
        # a sample that never ran here, or was preempted before its first step, has the rows of its hand-over,
        theirs = self.first.passes.stamps.get(self.first_owner, [])[start:]
        # from blocks that others may share, also of other prefillers; its open block is its own
        size = self.last.plan.runner.block_tokens
        stats = self.last.engine.stats().scheduler
        calm = not stats.preemptions and stats.weight_version == "0"
        begun = calm and self.last.passes.cached.get(self.owner, 0) >= prompt_len
        shared = 0 if begun else prompt_len // size * size - start
        for number, stamp in enumerate(got):
            allowed = [stamps[number] for stamps in (own, theirs) if number < len(stamps)]
            problem = f"row {start + number} carries the stamp {stamp}, not one of {allowed}"
            assert number < shared or stamp in allowed, problem


def check_served(plan: RequestPlan, sample: Sample, served: Served, *, steady: bool) -> None:
    """Check a sample that an instance answered. `steady`: weights never changed."""
    prompt_len = len(plan.prompt)
    seen = None if steady else served.seen(prompt_len)
    oracle = served.last.oracle
    specs = wanted_specs(served.last.engine.capacity.aux_specs, plan.routing, plan.aux)
    names = [spec.name for spec in specs]
    check_sample(sample, plan.prompt, plan.params, oracle, start=plan.start, names=names, seen=seen)
    if sample.finish_reason in ("stop", "length"):
        want = expected(plan.prompt, plan.params, sample.index, oracle, seen)
        assert sample.text == want.text, f"text {sample.text!r}, oracle {want.text!r}"
    if sample.token_ids:
        cached = served.cached()
        assert sample.cached_tokens == cached, (
            f"{sample.cached_tokens} cached tokens in the result, there were {cached}"
        )
    if "stamp" in sample.aux:
        served.check_stamps(sample, prompt_len)
    stop = 0
    for span in sample.weight_version:
        assert span.start == stop < span.stop
        stop = span.stop
        if seen is not None:
            ids = {seen[prompt_len - 1 + number].weights_id for number in range(span.start, span.stop)}
            assert ids == {int(span.weights_id, 16)}, f"{span} was sampled under {ids}"
    assert stop == len(sample.token_ids)


def check_trace(machine: Machine) -> None:
    """Every sample ended at most once, and the same events give the same actions."""
    trace = machine.engine.trace().encode()
    decoder = msgspec.json.Decoder(Turn)
    turns = [decoder.decode(line) for line in trace.splitlines()[1:]]
    came: list[int] = []
    for turn in turns:
        for event in turn.events:
            if isinstance(event, RequestPrepared):
                came.append(event.key)
            elif isinstance(event, LeaseAsked):
                came += [request.key for request in event.requests]
    ended = Counter(action.key for turn in turns for action in turn.actions if isinstance(action, FinishRequest))
    twice = [key for key, count in ended.items() if count > 1]
    assert not twice, f"sequences {twice} of {machine.name} ended twice"
    assert ended.keys() <= set(came)
    if not (machine.dead or machine.failing):
        never = set(came) - ended.keys()
        assert not never, f"sequences {sorted(never)} of {machine.name} never ended"
    assert replay(trace) == len(turns)
