"""Random work for a fleet of instances, drawn from a seed: instances, requests and incidents.

`PdWorkload.draw(seed)` is pure data. Knows no instance and no router; played by `simulation.py`.
"""

from __future__ import annotations

from random import Random
from typing import Literal

import msgspec
from fdasync_fleet.link.session import LinkConfig
from fdasync_fleet.router.config import RouterConfig
from fdasync_fleet.testing.sim.network import NetworkConditions
from fdasync_fleet.testing.sim.transport import SimFaults

from fdasync.drafting import Speculation
from fdasync.engine.config import EngineConfig
from fdasync.runner.synthetic.oracle import SyntheticConfig
from fdasync.scheduler.state.config import LeaseRules
from tests.support.sim_engine.workload import RequestDraw, RequestPlan, with_policy

InstanceRole = Literal["mixed", "prefill", "decode"]
Kind = Literal[
    "kill", "freeze", "part", "drain", "join", "update", "pause", "die", "router", "rank_dies", "rank_hangs", "label",
    "abort_all", "wake",
]  # fmt: skip
#: deadline of requests that are meant to end earlier
PATIENT_S = 200.0
#: distance between the first stamps of two instances
STAMPS = 1_000_000


class InstancePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One instance.

    Attributes:
        name: for people.
        address: where it listens; a later instance with the same address replaces an earlier one.
        config, runner: of its engine and of its runner.
        max_delay_s: see `FaultRunner`.
        rank_delay_s: the same for each rank of a group.
    """

    name: str
    address: str
    config: EngineConfig
    runner: SyntheticConfig
    max_delay_s: float
    rank_delay_s: float = 0.0

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest sample that it serves whole, prompt and output; the last token is never forwarded."""
        blocks, context = self.config.num_blocks, self.config.max_context_tokens
        assert isinstance(blocks, int)
        most = blocks * self.runner.block_tokens + 1
        return min(most, context) if isinstance(context, int) else most


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One event that strikes the fleet.

    Attributes:
        at_s: when.
        kind: "part": the target and `other` do not hear each other; "join": the instance of `plan` comes; "die": the
            target's runner dies; "router": the routers are killed, and with them all requests; "rank_dies",
            "rank_hangs": rank `other` of the target's group dies, or answers no step any more; "label": the weights in
            use get another; "abort_all": of one router's requests.
        target, other: numbers of instances among those that are present then; -1: the router.
        for_s: length of a freeze, a parting, a pause or a drain; time until a killed instance is back (0: never).
        plan: of a joining instance.
        mode, weights_id: of an update.
        label: of an update, or of the weights in use; it may have been used before. None: a new one.
        router: number of the router that does it.
    """

    at_s: float
    kind: Kind
    target: int = 0
    other: int = 0
    for_s: float = 0.0
    plan: InstancePlan | None = None
    mode: Literal["abort", "keep"] = "keep"
    weights_id: int = 0
    label: int | None = None
    router: int = 0


class PdWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """See the module.

    Attributes:
        seed: of the draw.
        shape: of the model, for every instance.
        instances, requests, incidents: the plans.
        links, router: configuration.
        conditions, faults: of the network, and of transports.
        calm: there are no incidents and faults, and rules are patient: every request must succeed.
        unequal: instances differ widely in size, and few requests are too large for all of them.
        routers: how many routers control the fleet, each with requests of its own.
    """

    seed: int
    shape: SyntheticConfig
    instances: tuple[InstancePlan, ...]
    requests: tuple[RequestPlan, ...]
    incidents: tuple[Incident, ...]
    links: LinkConfig
    router: RouterConfig
    conditions: NetworkConditions
    faults: SimFaults
    calm: bool
    unequal: bool
    routers: int

    @classmethod
    def draw(cls, seed: int) -> PdWorkload:
        """The workload of a seed; the same for ever, as far as this file stays the same."""
        return _Draw(seed).workload()


class _Draw:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random = Random(f"pd {seed}")
        self.calm = random.random() < 0.3
        # from a stream of its own, so that the other draws of a seed stay
        self.sizes = Random(f"sizes {seed}")
        self.unequal = self.sizes.random() < 0.35
        # likewise: a third of the fleets have two routers
        self.routers = 1 + (Random(f"routers {seed}").random() < 0.35)
        self.block_tokens = random.choice((2, 4, 4, 8))
        self.rules = self._rules()
        self.shape = SyntheticConfig(
            num_moe_layers=0 if random.random() < 0.08 else random.randint(1, 3),
            num_experts=random.choice((8, 256, 300)),
            vocab_size=60,
            eos_id=random.choice((-1, 7)),
            block_tokens=self.block_tokens,
            weights_id=random.randint(1, 1 << 40),
            values_spec=random.random() < 0.7,
            pass_stamp=random.random() < 0.9,
            load_s=random.choice((0.0, 0.05)),
            jitter=1.0,
            # blocks are the same bytes at any width
            kv_shares=Random(f"shares {seed}").choice((1, 2, 4)),
        )
        # likewise: a third of the fleets have a model with recurrent layers
        states = Random(f"recurrent {seed}")
        self.every = 0
        if states.random() < 0.33:
            self.shape = msgspec.structs.replace(self.shape, state_words=states.randint(1, 3))
            self.every = self.block_tokens * states.choice((1, 2, 3))
        self.made = 0
        self.span_s = random.choice((0.0, 0.2, 1.0, 4.0))

    def workload(self) -> PdWorkload:
        random = self.random
        drawn: tuple[tuple[InstanceRole, int], ...] = (
            ("prefill", random.randint(1, 3)),
            ("decode", random.randint(1, 3)),
            ("mixed", random.choice((0, 0, 0, 1, 2))),
        )
        roles = [role for role, count in drawn for _ in range(count)]
        instances = tuple([self.instance(role) for role in roles])
        return PdWorkload(
            seed=self.seed,
            shape=self.shape,
            instances=instances,
            requests=self._requests(instances),
            incidents=() if self.calm else self._incidents(),
            links=self._links(),
            router=RouterConfig(
                retries=random.choice((0, 1, 3, 3)),
                direct_below_tokens=random.choice((0, 0, 2 * self.block_tokens)),
                handoff_s=random.choice((0.05, 1.0, 10.0)),
                command_s=30.0,
                connect_s=30.0,
            ),
            conditions=self._conditions(),
            faults=self._faults(),
            calm=self.calm,
            unequal=self.unequal,
            routers=self.routers,
        )

    def _rules(self) -> LeaseRules:
        random = self.random
        if self.calm:
            # patient, and still small enough for queues
            return LeaseRules(
                asks=random.choice((1, 4, 256)),
                asks_per_peer=random.choice((1, 2, 16)),
                ahead_tokens=random.choice((0, 1, 16)),
                silent_s=5.0,
                queue_s=random.choice((0.2, 5.0)),
                find_s=1e6,
                total_s=1e6,
                max_total_s=1e6,
                ttl_s=10.0,
                staging_blocks=random.choice((0, 1, 2, 5)),
                receive_s=100.0,
                line=random.choice((1, 3, 256)),
                age_s=random.choice((0.01, 0.5, 2.0)),
                beyond_running=random.choice((4, 4, 64)),
            )
        return LeaseRules(
            asks=random.choice((1, 4, 256)),
            asks_per_peer=random.choice((1, 2, 16)),
            ahead_tokens=random.choice((0, 0, 1, 16)),
            silent_s=random.choice((0.02, 0.3, 1.0)),
            queue_s=random.choice((0.02, 0.5, 5.0)),
            find_s=random.choice((0.1, 2.0, 60.0)),
            total_s=random.choice((0.1, 2.0, 120.0)),
            ttl_s=random.choice((0.3, 1.0, 5.0)),
            staging_blocks=random.choice((0, 1, 2, 5)),
            receive_s=random.choice((0.05, 1.0, 10.0)),
            line=random.choice((1, 3, 256)),
            age_s=random.choice((0.01, 0.5, 2.0)),
            beyond_running=random.choice((4, 4, 64)),
        )

    def instance(self, role: InstanceRole, address: str = "") -> InstancePlan:
        random = self.random
        number = self.made
        self.made += 1
        num_blocks = random.randint(12, 40)
        max_running = random.randint(1, 10)
        step_s = random.choice((0.0, 0.001, 0.02))
        name = f"{role[0]}{number}"
        plan = InstancePlan(
            name=name,
            address=address or f"ipc:///run/{name}",
            config=EngineConfig(
                runner="synthetic",
                process="inline",
                role=role,
                num_blocks=num_blocks,
                host_blocks=random.randint(3, 2 * num_blocks),
                max_running=max_running,
                max_step_tokens=max_running + random.choice((1, 6, 24)),
                max_requests=random.choice((max_running + 3, 4096)),
                pipeline_depth=random.choice((1, 2, 2)),
                decode_reserve_blocks=random.choice(("auto", 0, 1)),
                write_back=random.random() < 0.7,
                step_deadline_s=30.0,
                close_deadline_s=60.0,
                leases=self.rules,
                store="memory" if Random(f"store {self.seed} {number}").random() < 0.3 else "",
                seed=number,
                trace_turns=1 << 20,
            ),
            runner=msgspec.structs.replace(
                self.shape,
                stamp_base=(number + 1) * STAMPS,
                step_s=step_s,
                token_s=random.choice((0.0, step_s / 10)),
                copy_s=random.choice((0.0, 0.0001, 0.01)),
                seed=number,
            ),
            max_delay_s=random.choice((0.0, 0.0, 0.005, 0.05)),
        )
        config = with_policy(plan.config, Random(f"policy {self.seed} {number}"))
        plan = msgspec.structs.replace(plan, config=config)
        plan = self._with_ranks(self._with_runs(self._with_states(plan) if self.every else plan))
        return self._resized(plan) if self.unequal else plan

    def _with_states(self, plan: InstancePlan) -> InstancePlan:
        """Few or many places for states, from a stream of its own."""
        random, change = Random(f"states {self.seed} {plan.name}"), msgspec.structs.replace
        host = random.choice(("auto", random.randint(1, 6)))
        config = change(plan.config, host_snapshots=host, state_every_tokens=self.every)
        places = random.choice((2, 3, random.randint(4, 40)))
        return change(plan, config=config, runner=change(plan.runner, num_snapshots=places))

    def _with_runs(self, plan: InstancePlan) -> InstancePlan:
        """Half of them yield runs of tokens; from a stream of their own."""
        random, config = Random(f"runs {self.seed} {plan.name}"), plan.config
        if random.random() < 0.5:
            return plan
        most = random.choice((2, 3, 4))
        budget = config.max_step_tokens + (most - 1) * config.max_running
        change = msgspec.structs.replace
        config = change(config, max_step_tokens=budget)
        if random.random() < 0.5:
            # drafts of the engine instead of the runner's own
            speculation = Speculation(max_tokens=most - 1, budget=random.random() < 0.3)
            return change(plan, config=change(config, speculation=speculation))
        return change(plan, runner=change(plan.runner, max_run_tokens=most), config=config)

    def _with_ranks(self, plan: InstancePlan) -> InstancePlan:
        """Half of them are groups of 2 or 4 ranks, whatever the widths of the others; from a stream of their own."""
        random = Random(f"ranks {self.seed} {plan.name}")
        width = random.choice((1, 1, 2, 4))
        if width == 1:
            return plan
        config = msgspec.structs.replace(plan.config, process="worker", tensor_parallel=width)
        return msgspec.structs.replace(plan, config=config, rank_delay_s=random.choice((0.0, 0.001, 0.02)))

    def _resized(self, plan: InstancePlan) -> InstancePlan:
        """The plan with its own number of blocks and length of context, either of which may be the limit."""
        blocks = self.sizes.choice((6, 10, 20, 40))
        context = self.sizes.choice(("auto", "auto", 5 * self.block_tokens, 15 * self.block_tokens))
        config = msgspec.structs.replace(plan.config, num_blocks=blocks, max_context_tokens=context)
        return msgspec.structs.replace(plan, config=config)

    def _joiner(self) -> InstancePlan:
        """A joining instance, large enough for all requests unless sizes are unequal."""
        plan = self.instance(self.random.choice(("mixed", "prefill", "decode", "decode")))
        if self.unequal:
            return plan
        return msgspec.structs.replace(plan, config=msgspec.structs.replace(plan.config, num_blocks=40))

    def _requests(self, instances: tuple[InstancePlan, ...]) -> tuple[RequestPlan, ...]:
        random = self.random
        least = min(plan.config.num_blocks for plan in instances if isinstance(plan.config.num_blocks, int))
        # a group needs a block for each sample on top of its prompt's
        room = (least - 5) * self.block_tokens
        if self.unequal:
            # and now and then too much for any
            room = max(plan.most_tokens for plan in instances) + self.block_tokens
        lanes = min(plan.config.max_running + self.rules.beyond_running for plan in instances)
        draw = RequestDraw(random, self.shape, room=room, most_samples=min(lanes, 4))
        draw.span_s = self.span_s
        return tuple([self._at_boundaries(draw.request(number)) for number in range(random.randint(3, 30))])

    def _at_boundaries(self, plan: RequestPlan) -> RequestPlan:
        """Prompts that just fill their blocks, or not quite, or just not."""
        size, count = self.block_tokens, len(plan.prompt)
        boundary = count // size * size + self.random.choice((0, 1, -1))
        if plan.deadline_s > PATIENT_S:
            plan = msgspec.structs.replace(plan, deadline_s=PATIENT_S)
        if self.random.random() < 0.5 or not plan.start < boundary <= count:
            return plan
        first = plan.params.prompt_logprobs_start
        scored = None if first is None else min(first, boundary - 1)
        params = msgspec.structs.replace(plan.params, prompt_logprobs_start=scored)
        return msgspec.structs.replace(plan, prompt=plan.prompt[:boundary], params=params)

    def _links(self) -> LinkConfig:
        beat_s = self.random.choice((0.05, 0.2))
        lost_s = beat_s * (50 if self.calm else self.random.choice((5, 20)))
        return LinkConfig(
            beat_s=beat_s,
            lost_s=lost_s,
            retry_s=0.05,
            ack_s=self.random.choice((0.005, 0.05)),
            window_messages=self.random.choice((2, 16, 4096)),
        )

    def _conditions(self) -> NetworkConditions:
        random = self.random
        delay_s = (0.0001, random.choice((0.0002, 0.002, 0.02)))
        if random.random() < 0.5:
            return NetworkConditions(delay_s=delay_s)
        return NetworkConditions(
            delay_s=delay_s,
            drop=random.choice((0.0, 0.02, 0.1)),
            duplicate=random.choice((0.0, 0.1)),
            reorder=random.choice((0.0, 0.2)),
        )

    def _faults(self) -> SimFaults:
        random = self.random
        latency_s = (0.0002, random.choice((0.0005, 0.005, 0.05)))
        if self.calm or random.random() < 0.5:
            return SimFaults(latency_s=latency_s)
        return SimFaults(
            latency_s=latency_s,
            corrupt=random.choice((0.0, 0.02, 0.2)),
            fail=random.choice((0.0, 0.02, 0.2)),
            stall=random.choice((0.0, 0.0, 0.05)),
        )

    def _incidents(self) -> tuple[Incident, ...]:
        random = self.random
        kinds: tuple[Kind, ...] = ("kill", "freeze", "part", "drain", "join", "update", "pause", "die")
        plans = []
        for _ in range(random.choice((0, 1, 1, 2, 3, 5))):
            kind = random.choice(kinds)
            brief, long = random.choice((0.05, 0.3)), random.choice((1.0, 3.0, 8.0))
            plans.append(
                Incident(
                    at_s=random.uniform(0.0, max(self.span_s, 0.3) * 1.5),
                    kind=kind,
                    target=random.randint(-1 if kind == "part" else 0, 5),
                    other=random.randint(0, 5),
                    for_s=random.choice((0.0, brief, long)) if kind == "kill" else random.choice((brief, long)),
                    plan=self._joiner() if kind == "join" else None,
                    mode=random.choice(("abort", "keep")),
                    weights_id=random.randint(1, 1 << 40),
                )
            )
        if random.random() < 0.1:
            plans.append(Incident(at_s=random.uniform(0.0, max(self.span_s, 0.3)), kind="router"))
        plans += self._after_updates(plans)
        plans += self._of_ranks()
        if self.routers > 1:
            plans = self._of_two_routers(plans)
        return tuple(sorted(plans, key=lambda plan: plan.at_s))

    def _of_two_routers(self, plans: list[Incident]) -> list[Incident]:
        """Either router does what is done; and more that both do at once: updates under few labels, labels, pauses,
        sleeps, wakes, aborts. Drawn from a stream of its own."""
        random = Random(f"two routers {self.seed}")
        given = [msgspec.structs.replace(plan, router=random.randint(0, 1)) for plan in plans]
        kinds: tuple[Kind, ...] = ("update", "update", "label", "label", "pause", "pause", "wake", "abort_all")
        span_s = max(self.span_s, 0.3) * 1.5
        at_s = 0.0
        for _ in range(random.choice((2, 6, 12))):
            # now and then in the same turn
            at_s = random.choice((at_s, random.uniform(0.0, span_s)))
            given.append(
                Incident(
                    at_s=at_s,
                    kind=random.choice(kinds),
                    target=random.randint(0, 5),
                    other=random.randint(0, 40),
                    for_s=random.choice((0.0, 0.05, 0.3, 1.0)),
                    mode=random.choice(("abort", "keep")),
                    # few, so that they return
                    weights_id=random.randint(1, 3),
                    label=random.choice((None, *range(4))),
                    router=random.randint(0, 1),
                )
            )
        return given

    def _of_ranks(self) -> list[Incident]:
        """A rank that dies or goes silent. Drawn from a stream of its own."""
        random = Random(f"broken ranks {self.seed}")
        if random.random() < 0.7:
            return []
        kinds: tuple[Kind, ...] = ("rank_dies", "rank_hangs")
        # while there is work: an idle group notices no silent rank
        at_s = random.uniform(0.0, max(self.span_s, 0.2)) / 2
        return [Incident(at_s=at_s, kind=random.choice(kinds), target=random.randint(0, 5), other=random.randint(0, 3))]

    def _after_updates(self, plans: list[Incident]) -> list[Incident]:
        """Instances that join soon after an update, maybe with older weights. Drawn from a stream of its own."""
        before, self.random = self.random, Random(f"after updates {self.seed}")
        random = self.random
        late = []
        for plan in plans:
            if plan.kind == "update" and random.random() < 0.7:
                at_s = plan.at_s + random.choice((0.05, 0.2, 0.5))
                late.append(Incident(at_s=at_s, kind="join", plan=self._joiner()))
        self.random = before
        return late
