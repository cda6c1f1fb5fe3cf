"""Two or three schedulers that prefill and decode for each other, in any order of events.

Leases are lost, answers come late or never, blocks do not arrive, weights change on one side and then on the other.
`tests/support/paged_runner.py` finds what is computed from wrong KV, on either side.
"""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from fdasync.cache.identity import block_keys
from fdasync.engine.prepare import salted
from fdasync.events.catalog import (
    AbortRequested,
    CacheResetRequested,
    LeaseAnswered,
    LeaseGivenUp,
    LeasesRenewed,
    PauseRequested,
    ResumeRequested,
    SleepRequested,
    StopChecked,
    StopMatched,
    TimerFired,
    WeightsChanged,
)
from fdasync.request import PauseMode
from fdasync.scheduler import SchedulerConfig
from fdasync.scheduler.disagg.decode import DecodeSide
from fdasync.scheduler.disagg.prefill import PrefillSide
from fdasync.scheduler.state.config import LeaseRules
from tests.scheduler.disagg.pd_world import World
from tests.support.attached import attached, held_by_exports, held_for_others
from tests.support.helpers import POLICIES, machine_settings, make_request, make_sampler
from tests.support.paged_runner import VOCAB, namespace_of_version

SHARED = [1, 2, 3, 1, 5, 0] * 2
RULES = {"find_s": 6.0, "total_s": 20.0, "ttl_s": 3.0, "silent_s": 1.0, "age_s": 0.5, "receive_s": 5.0}


class PdMachine(RuleBasedStateMachine):
    """See the module."""

    @initialize(
        depth=st.integers(1, 2), num_blocks=st.integers(2, 14), decode_blocks=st.integers(3, 14),
        size=st.sampled_from([2, 4]), ahead=st.sampled_from([0, 1, 30]),
        max_running=st.integers(1, 4), extra=st.integers(0, 6), capture=st.booleans(), two=st.booleans(),
        num_host=st.sampled_from([1, 2, 3, 5, 20]), staging=st.sampled_from([0, 1, 2, 4]),
        cache=st.sampled_from([True, True, True, False]), reserve=st.integers(0, 2), lanes=st.integers(0, 3),
        policies=st.lists(POLICIES, min_size=2, max_size=2),
        readers=st.sampled_from([(), ("d0",), ("d1",), ("d0", "d1")]),
    )  # fmt: skip
    def begin(
        self, depth, num_blocks, decode_blocks, size, max_running, extra, capture, two, num_host, staging, ahead,
        cache, reserve, lanes, policies, readers,
    ):  # fmt: skip
        rules = LeaseRules(**RULES, staging_blocks=staging, ahead_tokens=ahead, beyond_running=lanes)

        def config(blocks, policy):
            return SchedulerConfig(
                block_tokens=size, num_blocks=blocks, max_running=max_running, max_step_tokens=max_running + extra,
                pipeline_depth=depth, capture=capture, decode_reserve_blocks=reserve, prefix_cache=cache,
                namespace=namespace_of_version(0), num_host_blocks=num_host, leases=rules, kv_events=True,
                policy=policy[0], policy_config=policy[1],
            )  # fmt: skip

        decoders = [config(decode_blocks, policies[1])] * (2 if two else 1)
        self.world = World(config(num_blocks, policies[0]), decoders, readers)
        self.cache, self.size, self.capture = cache, size, capture

    # -- requests

    def request(self, side, prompt, max_tokens, **fields):
        namespace = namespace_of_version(side.version)
        salt = fields.get("salt", "")
        root = salted(namespace, salt)
        keys = block_keys(root, prompt, self.size)
        return make_request(
            side.next_key(),
            prompt,
            max_tokens,
            self.size,
            namespace=namespace,
            root=root,
            block_keys=tuple(keys),
            **fields,
        )

    @rule(
        shared=st.integers(0, 12), own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
        max_tokens=st.integers(1, 10), stops=st.frozensets(st.integers(0, VOCAB - 1), max_size=1), n=st.integers(1, 3),
        checks=st.booleans(), emits=st.booleans(), patience=st.sampled_from([1e9, 1e9, 3.0]), start=st.integers(-1, 6),
        salt=st.sampled_from(["", "", "s"]), first=st.integers(0, 1), priority=st.integers(0, 1),
    )  # fmt: skip
    def hand_off(self, shared, own, max_tokens, stops, n, checks, emits, patience, start, salt, first, priority):
        world, side = self.world, self.world.prefill
        prompt = [*SHARED[:shared], *own]
        if len(prompt) > side.config.num_blocks * self.size:
            return
        names = list(world.decodes)
        decoders = tuple(names[first:] + names[:first]) if len(names) > 1 else tuple(names)
        group = side.next_key()
        fields = {"deadline": world.now + patience, "salt": salt, "priority": priority, "samples": n, "group": group}
        world.whole[group] = self.request(
            side, prompt, max_tokens, stop_ids=stops, checks_stops=checks, emits=emits or checks,
            start=min(start, len(prompt) - 1) if self.capture else -1, **fields,
        )  # fmt: skip
        for index in range(n):
            sampler = make_sampler(len(prompt), index=index)
            one = self.request(side, prompt, 1, start=-1, decoders=decoders, sampler=sampler, **fields)
            side.add(one)
            side.queue.append(one)
        side.turn()

    @rule(
        data=st.data(), own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6), max_tokens=st.integers(1, 10),
        shared=st.integers(0, 8),
    )  # fmt: skip
    def local(self, data, own, max_tokens, shared):
        """A request that is served whole where it comes in."""
        side = data.draw(st.sampled_from(self.world.sides))
        prompt = [*SHARED[:shared], *own]
        room = side.config.num_blocks * self.size - len(prompt) + 1
        if room < 1:
            return
        request = self.request(side, prompt, min(max_tokens, room), start=0 if self.capture else -1)
        side.add(request)
        side.queue.append(request)
        side.turn()

    @rule(data=st.data())
    def abort(self, data):
        side = data.draw(st.sampled_from(self.world.sides))
        if side.requests:
            group = side.requests[data.draw(st.sampled_from(sorted(side.requests)))].group
            keys = [key for key, request in side.requests.items() if request.group == group]
            side.aborted.update(keys)
            side.queue.append(AbortRequested(keys=tuple(keys)))
            side.turn()

    # -- what is in flight ends

    @rule(data=st.data(), count=st.integers(1, 2))
    def complete(self, data, count):
        side = data.draw(st.sampled_from(self.world.sides))
        for _ in range(min(count, len(side.runner.flights))):
            side.queue.append(side.runner.complete())
        side.turn()

    @rule(data=st.data())
    def copy_ends(self, data):
        copies = [(side, number) for side in self.world.sides for number in sorted(side.runner.copies)]
        if copies:
            side, number = data.draw(st.sampled_from(copies))
            side.end_copy(number)
            side.turn()

    @rule(data=st.data(), count=st.integers(1, 4), hold=st.booleans())
    def deliver(self, data, count, hold):
        for _ in range(count):
            ways = [way for way, mail in self.world.mail.items() if mail]
            if ways:
                self.world.deliver(*data.draw(st.sampled_from(ways)))
                if not hold:
                    self.turns()
        self.turns()

    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]), hold=st.booleans())
    def receive_ends(self, data, fails, hold):
        receives = [(side, number) for side in self.world.sides for number in sorted(side.runner.receives)]
        if receives:
            side, number = data.draw(st.sampled_from(receives))
            count = len(side.runner.receives[number].indices)
            bad = data.draw(st.lists(st.booleans(), min_size=count, max_size=count)) if fails else [False] * count
            self.world.end_receive(side, number, bad)
            if not hold:
                self.turns()

    @rule(data=st.data(), match=st.sampled_from([False, False, False, True]))
    def answer(self, data, match):
        side = data.draw(st.sampled_from(self.world.sides))
        self.answer_one(side, match)
        side.turn()

    @staticmethod
    def answer_one(side, match):
        if side.answers:
            key, number = side.answers.popleft()
            if key in side.kept:
                return
            if match:
                side.kept[key] = number
                side.queue.append(StopMatched(key=key, keep_tokens=number))
            else:
                side.queue.append(StopChecked(key=key, num_tokens=number))

    @rule(data=st.data())
    def hash_ends(self, data):
        sides = [side for side in self.world.sides if side.hashes]
        if sides:
            side = data.draw(st.sampled_from(sides))
            side.end_hash()
            side.turn()

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 4.0]), renews=st.sampled_from([True, True, True, False]))
    def time_passes(self, seconds, renews):
        world = self.world
        world.now += seconds
        for (group, attempt), lease in world.leases.items():
            if not (lease.over or lease.granted) and world.now >= lease.ask.answer_by:
                self.no_answer(group, attempt, silent=False)
        for side in world.sides:
            if renews and side.leases:
                side.queue.append(
                    LeasesRenewed(groups=tuple(group for group, lease in side.leases.items() if not lease.over))
                )
            if world.now >= side.wake_at:
                side.queue.append(TimerFired())
        self.turns()

    @rule(rounds=st.integers(1, 6), mail=st.booleans())
    def go_on(self, rounds, mail):
        """All is well for a while: so trouble also comes where leases are well under way."""
        for _ in range(rounds):
            self.finish_everything(mail=mail, seconds=0.01)

    # -- trouble

    def open_asks(self):
        return [name for name, lease in self.world.leases.items() if not (lease.over or lease.granted)]

    @precondition(lambda self: self.open_asks())
    @rule(data=st.data())
    def nobody_answers(self, data):
        """The question is not waited for any more."""
        group, attempt = data.draw(st.sampled_from(self.open_asks()))
        self.no_answer(group, attempt, silent=True)
        self.turns()

    def no_answer(self, group, attempt, *, silent):
        lease = self.world.leases[group, attempt]
        lease.over = True
        self.world.send(self.world.prefill, lease.side, "give up", lease)
        answer = LeaseAnswered(group=group, attempt=attempt, granted=False, silent=silent, reason="no answer")
        self.world.prefill.queue.append(answer)

    @rule(data=st.data(), seen_first=st.booleans())
    def link_is_lost(self, data, seen_first):
        """Both sides notice, whatever was on its way."""
        world = self.world
        side = data.draw(st.sampled_from(list(world.decodes.values())))
        world.mail["p", side.name].clear()
        world.mail[side.name, "p"].clear()
        if seen_first:
            self.lose_all(side)
            self.turns()
        if side.leases:
            side.queue.append(LeaseGivenUp(groups=tuple(side.leases), reason="the link is lost"))
            side.leases.clear()
        self.turns()
        # mail that was sent in between went nowhere
        world.mail["p", side.name].clear()
        world.mail[side.name, "p"].clear()
        self.lose_all(side)
        self.turns()

    def lose_all(self, side):
        for lease in list(self.world.leases.values()):
            if lease.side is side:
                self.world.lose(lease)

    @rule(data=st.data(), mode=st.sampled_from(get_args(PauseMode)), everywhere=st.booleans())
    def pause(self, data, mode, everywhere):
        sides = self.world.sides if everywhere else [data.draw(st.sampled_from(self.world.sides))]
        for side in sides:
            if mode == "abort":
                side.aborted.update(side.requests)
            side.queue.append(PauseRequested(mode=mode))
            side.turn()
            # one that waits lets those that have begun end
            side.paused = side.paused or mode != "wait"

    @rule(data=st.data(), resume=st.booleans())
    def sleep(self, data, resume):
        """One side's blocks leave the device as soon as nothing is in flight."""
        side = data.draw(st.sampled_from(self.world.sides))
        side.queue.append(SleepRequested())
        side.turn()
        side.paused = True
        while side.runner.flights:
            side.queue.append(side.runner.complete())
            side.turn()
        self.turns()
        if resume:
            self.resume_one(side)

    @rule(data=st.data())
    def reset_cache(self, data):
        side = data.draw(st.sampled_from(self.world.sides))
        side.queue.append(CacheResetRequested())
        side.turn()

    @rule(data=st.data())
    def resume(self, data):
        self.resume_one(data.draw(st.sampled_from(self.world.sides)))

    @staticmethod
    def resume_one(side):
        side.paused = False
        side.queue.append(ResumeRequested())
        side.turn()

    @rule(data=st.data(), resume=st.booleans())
    def update(self, data, resume):
        """New weights for whoever is behind, or for one that goes ahead."""
        side = data.draw(st.sampled_from(self.world.sides))
        side.queue.append(PauseRequested())
        side.turn()
        side.paused = True
        while side.runner.flights:
            side.queue.append(side.runner.complete())
            side.turn()
        side.version += 1
        side.runner.load(side.version)
        namespace = namespace_of_version(side.version)
        side.queue.append(WeightsChanged(version=side.version, namespace=namespace, weights_id=f"of {side.version}"))
        if resume:
            side.paused = False
            side.queue.append(ResumeRequested())
        side.turn()
        self.turns()

    def turns(self):
        for _ in range(20):
            for side in self.world.sides:
                side.turn()
            if not any(side.queue for side in self.world.sides):
                return

    # -- the end

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        for side in world.sides:
            self.resume_one(side)
        for _ in range(600):
            self.finish_everything()
            done = all(len(side.finished) == len(side.requests) for side in world.sides)
            if done and all(side.is_quiet for side in world.sides) and not any(world.mail.values()):
                break
        for side in world.sides:
            self.check_end(side)
        # whoever prefilled a sample and said that another goes on with it is right
        for key, end in world.prefill.finished.items():
            if end.reason == "handed_over":
                name, there = world.handed[key]
                assert world.started[name][there] == key
                assert world.decodes[name].finished[there].reason not in ("lease_lost", "no_lease", "never_lease")

    def finish_everything(self, *, mail=True, seconds=0.25):
        world = self.world
        for side in world.sides:
            while side.answers:
                self.answer_one(side, False)
            while side.hashes:
                side.end_hash()
            for number in list(side.runner.copies):
                side.end_copy(number)
            for number in list(side.runner.receives):
                world.end_receive(side, number, [False] * len(side.runner.receives[number].indices))
            if side.runner.flights:
                side.queue.append(side.runner.complete())
        for way, letters in world.mail.items():
            while mail and letters:
                world.deliver(*way)
        self.time_passes(seconds, True)

    def check_end(self, side):
        assert sorted(side.finished) == sorted(side.requests)
        stats, scheduler = side.scheduler.stats(), side.scheduler
        assert (stats.running, stats.waiting, stats.leased, stats.hand_offs) == (0, 0, 0, 0)
        assert stats.free_blocks + stats.idle_blocks == side.config.num_blocks
        assert (stats.moving, stats.writing, held_by_exports(scheduler), scheduler.index.reserved) == (0, 0, 0, 0)
        assert held_for_others(attached(scheduler, PrefillSide)) == scheduler.index.lent == 0
        assert not attached(scheduler, PrefillSide)._asks
        assert not attached(scheduler, DecodeSide).leases
        assert not attached(scheduler, DecodeSide)._receiver.is_receiving
        for block in scheduler.index.pool.live():
            assert block.key is not None
            assert block.host < 0 or block.host_list is not None


TestPdMachine = pytest.mark.heavy("rules of a machine in orders that nobody wrote down")(PdMachine.TestCase)
TestPdMachine.settings = machine_settings(200, 50)
