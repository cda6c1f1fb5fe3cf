"""Random work for an engine, drawn from a seed: requests, their callers, faults, updates and an end.

`Workload.draw(seed)` is pure data: a shape for the engine and its runner, requests, at most one disaster.
Knows no engine; played by `simulation.py`.
"""

from __future__ import annotations

from random import Random
from typing import Any, Literal, get_args

import msgspec

from fdasync.drafting import Speculation
from fdasync.engine.config import EngineConfig
from fdasync.request import Grammar, LogprobKind, PauseMode, SamplingParams
from fdasync.runner.synthetic.oracle import SyntheticConfig
from fdasync.testing.harness.fault_runner import StepFault, StepFaultKind
from fdasync.testing.stores.faults import StoreFaults
from tests.support.drafters import Kind
from tests.support.sim_engine.crowd import Control

Way = Literal["complete", "stream", "slow", "leave", "abort", "cancel"]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_HURRY = 50.0
_LOGPROBS: tuple[LogprobKind, ...] = ("none", "none", "none", "raw", "processed", "both")


class RequestPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One request and its caller.

    Attributes:
        prompt, params, priority, deadline_s, start, cache_salt, routing, aux: see `Engine.generate`.
        arrives_s: when the request is made.
        way: "complete" and "stream" wait for the end, "slow" rests between deltas, "leave" leaves the stream
            after a few deltas, "abort" aborts the request from outside, "cancel" cancels the caller's task.
        after_s: time from the arrival to the abort or the cancellation; the rest of a slow reader.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    arrives_s: float
    way: Way
    after_s: float
    priority: int
    deadline_s: float
    start: int
    cache_salt: str
    routing: bool | None
    aux: bool | tuple[str, ...] | None = None


class UpdatePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A weight update, a pause, or both.

    Attributes:
        at_s: when.
        kind: "abort" and "keep" are updates in that mode, "refused" has weights that do not fit, "pause" only pauses,
            or sleeps (mode "retract").
        weights_id: of the new weights.
        pause_s: how long the engine is paused around the update; 0: only for the update itself.
        mode: of the pause.
        resets: the cache is reset after it.
    """

    at_s: float
    kind: Literal["abort", "keep", "refused", "pause"]
    weights_id: int
    pause_s: float
    mode: PauseMode = "in_place"
    resets: bool = False


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """See the module.

    Attributes:
        seed: of the draw.
        config, runner: of the engine and of its runner.
        requests: in no order.
        step_fault: a fault of the runner, or None.
        ends: "wait": every caller is waited for; "drain", "close": that is called at `ends_at_s`.
        max_delay_s: see `FaultRunner`.
        store_faults: of the store, where there is one.
        store_nbytes: capacity of the store.
        updates: of the weights, in order of time.
        again: requests for a second engine on the same store.
        forgets_at_s: when the store loses all objects.
        fault_rank: the rank that has the fault, in a group.
        controls: calls that stop the engine, change it or let it go on (`crowd.py`).
    """

    seed: int
    config: EngineConfig
    runner: SyntheticConfig
    requests: tuple[RequestPlan, ...]
    step_fault: StepFault | None
    ends: Literal["wait", "drain", "close"]
    ends_at_s: float
    max_delay_s: float
    store_faults: StoreFaults
    store_nbytes: int
    updates: tuple[UpdatePlan, ...]
    again: tuple[RequestPlan, ...]
    forgets_at_s: tuple[float, ...]
    fault_rank: int = 0
    controls: tuple[Control, ...] = ()

    def second_life(self) -> Workload | None:
        """The workload of a second engine on the same store, if there is one."""
        if not self.again:
            return None
        return msgspec.structs.replace(
            self,
            requests=self.again,
            again=(),
            updates=(),
            controls=(),
            step_fault=None,
            ends="wait",
            ends_at_s=0.0,
            forgets_at_s=(),
        )

    def hurried(self) -> Workload:
        """The same for real time: every moment is fifty times as soon, and nothing hangs."""
        change = msgspec.structs.replace
        fault = self.step_fault
        if fault is not None and fault.kind == "hang":
            fault = change(fault, kind="fail")
        runner, faults = self.runner, self.store_faults
        return change(
            self,
            runner=change(
                runner,
                step_s=runner.step_s / _HURRY,
                # so long that fetching may beat it
                token_s=runner.token_s / 5,
                copy_s=runner.copy_s / _HURRY,
                load_s=runner.load_s / _HURRY,
            ),
            requests=tuple([_hurried(plan) for plan in self.requests]),
            again=tuple([_hurried(plan) for plan in self.again]),
            updates=tuple(
                [change(plan, at_s=plan.at_s / _HURRY, pause_s=plan.pause_s / _HURRY) for plan in self.updates]
            ),
            step_fault=fault,
            store_faults=change(faults, hang=0.0, delay_s=faults.delay_s / _HURRY),
            forgets_at_s=tuple([at_s / _HURRY for at_s in self.forgets_at_s]),
            ends_at_s=self.ends_at_s / _HURRY,
            max_delay_s=self.max_delay_s / _HURRY,
        )

    @classmethod
    def draw(cls, seed: int) -> Workload:
        """The workload of a seed; the same for ever, as far as this file stays the same."""
        random = Random(seed)
        block_tokens = random.choice((2, 4, 8))
        num_blocks = random.randint(5, 40)
        tight = Random(f"tight {seed}")
        if tight.random() < 0.15:
            num_blocks = tight.randint(1, 4)
        max_running = random.randint(1, 10)
        moe_layers = 0 if random.random() < 0.1 else random.randint(1, 4)
        step_s = random.choice((0.0, 0.001, 0.02))
        runner = SyntheticConfig(
            num_moe_layers=moe_layers,
            num_experts=random.choice((8, 256, 300)),
            vocab_size=60,
            eos_id=random.choice((-1, 7)),
            max_context_tokens=num_blocks * block_tokens,
            block_tokens=block_tokens,
            num_blocks=num_blocks,
            weights_id=random.randint(1, 1 << 40),
            values_spec=random.random() < 0.8,
            pass_stamp=random.random() < 0.9,
            step_s=step_s,
            token_s=random.choice((0.0, step_s / 10)),
            jitter=1.0,
            seed=seed,
        )
        max_step_tokens = max_running + random.choice((0, 1, 6, 24))
        config = EngineConfig(
            runner="synthetic",
            process="inline",
            routing="auto" if random.random() < 0.9 else False,
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            max_requests=random.choice((max_running, max_running + 3, 4096)),
            pipeline_depth=random.choice((1, 2, 2)),
            prefix_cache=random.random() < 0.85,
            decode_reserve_blocks=random.randint(0, 2),
            step_deadline_s=30.0,
            request_deadline_s=3600.0,
            close_deadline_s=60.0,
            trace_turns=1 << 20,
        )
        drafts = Random(f"drafts {seed}")
        runs = Random(f"runs {seed}")
        if runs.random() < 0.5:
            most = runs.choice((2, 3, 4))
            runner = msgspec.structs.replace(runner, max_run_tokens=most)
            config = msgspec.structs.replace(config, max_step_tokens=max_step_tokens + (most - 1) * max_running)
            if drafts.random() < 0.6:
                # drafts of the engine instead of the runner's own
                runner = msgspec.structs.replace(runner, max_run_tokens=1)
                config = with_drafts(config, most - 1, drafts)
        # from a stream of its own, so that older draws of a seed stay
        tiers = _Tiers(Random(f"tiers {seed}"))
        draw = RequestDraw(random, runner, room=runner.max_context_tokens, most_samples=config.max_requests)
        requests = tuple(draw.request(number) for number in range(random.randint(3, 24)))
        config = with_policy(tiers.config(config, num_blocks), Random(f"policy {seed}"))
        again = tiers.again(requests, config)
        states = Random(f"recurrent {seed}")
        if states.random() < 0.4:
            runner, config = with_state(runner, config, states)
        groups = Random(f"ranks {seed}")
        ranks = groups.choice((1, 1, 2, 4))
        if ranks > 1:
            config = msgspec.structs.replace(config, process="worker", tensor_parallel=ranks)
            runner = msgspec.structs.replace(runner, kv_shares=groups.choice((1, 2, 4)))
        fault = None
        if random.random() < 0.25:
            kinds: tuple[StepFaultKind, ...] = ("fail", "hang", "die")
            fault = StepFault(random.choice(kinds), random.randint(0, 60))
        return cls(
            seed=seed,
            config=config,
            runner=tiers.runner(runner),
            requests=requests,
            step_fault=fault,
            ends=random.choice(("wait", "wait", "wait", "wait", "drain", "close")),
            ends_at_s=random.uniform(0.0, draw.span_s),
            max_delay_s=random.choice((0.0, 0.0, 0.005, 0.05)),
            store_faults=tiers.store_faults(seed),
            store_nbytes=tiers.store_nbytes(),
            updates=tiers.updates(draw.span_s),
            again=again,
            forgets_at_s=tiers.forgets(draw.span_s),
            fault_rank=groups.randrange(ranks),
        )


def with_state(runner: SyntheticConfig, config: EngineConfig, random: Random) -> tuple[SyntheticConfig, EngineConfig]:
    """A model with recurrent state, and few or many places for it."""
    runner = msgspec.structs.replace(
        runner, state_words=random.randint(1, 3), num_snapshots=random.choice((1, 2, random.randint(3, 40)))
    )
    every = runner.block_tokens * random.choice((1, 2, 3))
    most = random.randint(1 if config.store else 0, 6) if config.store or config.host_blocks not in ("auto", 0) else 0
    return runner, msgspec.structs.replace(
        config,
        host_snapshots=random.choice(("auto", most)),
        state_every_tokens=random.choice(("auto", every)),
    )


def with_policy(config: EngineConfig, random: Random) -> EngineConfig:
    """The order of arrival, or shorter prompts first, ageing slowly or fast."""
    if random.random() < 0.5:
        return config
    # from a stream of its own, so that the other draws of a seed stay
    ageing = {"ageing_s_per_token": random.choice((0.0001, 0.01, 1.0))}
    return msgspec.structs.replace(config, policy="shortest-prompt-first", policy_config=ageing)


def with_drafts(config: EngineConfig, max_tokens: int, random: Random) -> EngineConfig:
    """Drafts of `ngram`, or of one that knows the answers (`support/drafters.py`), weighed or not."""
    drafter = random.choice(("ngram", *get_args(Kind)))
    speculation = Speculation(drafter=drafter, max_tokens=max_tokens, budget=random.random() < 0.3)
    return msgspec.structs.replace(config, speculation=speculation)


def _hurried(plan: RequestPlan) -> RequestPlan:
    soon = {"arrives_s": plan.arrives_s / _HURRY, "after_s": plan.after_s / _HURRY}
    if plan.deadline_s < 3600:
        soon["deadline_s"] = plan.deadline_s / _HURRY
    return msgspec.structs.replace(plan, **soon)


class _Tiers:
    """Draws the host tier, the store, their faults, and weight updates."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._slow = False

    def config(self, config: EngineConfig, num_blocks: int) -> EngineConfig:
        random = self._random
        if not config.prefix_cache or random.random() < 0.3:
            return config
        return msgspec.structs.replace(
            config,
            # a small one gives way to the store
            host_blocks=random.randint(1, random.choice((num_blocks // 2 + 1, 2 * num_blocks))),
            store="memory" if random.random() < 0.75 else "",
            write_through=random.choice(("all", "all", "prompt", "off")),
            write_back=random.random() < 0.7,
            fetch_min_tokens=random.choice((0, 0, 8)),
            store_deadline_s=random.choice((0.02, 0.2, 5.0)),
            store_retry_s=random.choice((0.01, 0.3)),
            store_calls=random.randint(1, 4),
            store_kill_s=random.choice((0.05, 0.5)),
        )

    def again(self, requests: tuple[RequestPlan, ...], config: EngineConfig) -> tuple[RequestPlan, ...]:
        """Prompts that come back when device and host have forgotten them: in another engine on the same store."""
        random = self._random
        if not config.store or random.random() < 0.2:
            return ()
        self._slow = True
        return tuple(
            msgspec.structs.replace(
                plan,
                params=msgspec.structs.replace(plan.params, seed=len(requests) + number),
                arrives_s=random.uniform(0.0, 1.0),
                way=random.choice(("complete", "complete", "stream", "abort")),
                deadline_s=3600.0,
            )
            for number, plan in enumerate(random.choices(requests, k=random.randint(2, 10)))
        )

    def runner(self, runner: SyntheticConfig) -> SyntheticConfig:
        copy_s = self._random.choice((0.0, 0.0001, 0.01))
        # where computing costs nothing, nothing is fetched
        token_s = self._random.choice((0.001, 0.01)) if self._slow else runner.token_s
        load_s = self._random.choice((0.0, 0.05, 0.5))
        return msgspec.structs.replace(runner, copy_s=copy_s, token_s=token_s, load_s=load_s)

    def store_faults(self, seed: int) -> StoreFaults:
        random = self._random

        def rate(share: float = 0.5) -> float:
            return random.choice((0.05, 0.2, 0.6)) if random.random() < share else 0.0

        if random.random() < 0.4:
            return StoreFaults(seed=seed)
        return StoreFaults(
            seed=seed,
            fail_call=rate(),
            lose_answer=rate(),
            fail_item=rate(),
            drop_put=rate(),
            delay=rate(),
            delay_s=random.choice((0.001, 0.05, 1.0)),
            hang=rate(0.3),
            truncate=rate(),
            # most of a small object is padding, where a wrong bit does no harm
            flip_bit=random.choice((0.0, 0.0, 0.3, 1.0)),
        )

    def store_nbytes(self) -> int:
        # of some blocks, or of all there will ever be
        return self._random.choice((1 << 16, 1 << 18, 1 << 26))

    def updates(self, span_s: float) -> tuple[UpdatePlan, ...]:
        random = self._random
        count = random.choice((0, 0, 0, 0, 1, 1, 2, 3))
        plans = [
            UpdatePlan(
                at_s=random.uniform(0.0, max(span_s, 0.3)),
                kind=random.choice(("abort", "keep", "keep", "refused", "pause")),
                weights_id=random.randint(1, 1 << 40),
                pause_s=random.choice((0.0, 0.0, 0.1)),
            )
            for _ in range(count)
        ]
        # from streams of their own, as `_Tiers` has one
        for number, plan in enumerate(plans):
            own = Random(f"control {plan.weights_id}")
            mode: PauseMode = own.choice(get_args(PauseMode))
            plans[number] = msgspec.structs.replace(plan, mode=mode, resets=own.random() < 0.5)
        return tuple(sorted(plans, key=lambda plan: plan.at_s))

    def forgets(self, span_s: float) -> tuple[float, ...]:
        random = self._random
        return tuple(sorted(random.uniform(0.0, span_s) for _ in range(random.choice((0, 0, 1, 2)))))


class RequestDraw:
    """Draws requests that share prefixes.

    Args:
        runner: sizes, and the specs that it writes.
        room: tokens of the longest request.
        most_samples: of one request.
    """

    def __init__(self, random: Random, runner: SyntheticConfig, *, room: int, most_samples: int) -> None:
        self._random = random
        self._runner = runner
        self._room = room
        self._most_samples = most_samples
        self._prefixes = [self._tokens(random.randint(1, self._room // 2)) for _ in range(2)]
        self.span_s = random.choice((0.0, 0.05, 0.5, 2.0))
        # from a stream of its own, as `_Tiers` has one
        self._rows = Random(f"rows {runner.weights_id}")
        self._others = [name for name, on in (("values", runner.values_spec), ("stamp", runner.pass_stamp)) if on]

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple([self._random.randrange(self._runner.vocab_size) for _ in range(count)])

    def request(self, number: int) -> RequestPlan:
        """The next one; its number is its seed."""
        random = self._random
        prefix = random.choice(self._prefixes)
        # half of them share a whole prefix: the first leads, the others wait for it
        shared = len(prefix) if random.random() < 0.5 else random.randint(0, len(prefix))
        prompt = prefix[:shared] + self._tokens(random.randint(1, 6))
        prompt = prompt[: self._room - 1]
        room = self._room - len(prompt)
        max_tokens = random.randint(1, room) if random.random() < 0.3 else random.randint(1, min(room, 12))
        way: Way = random.choice(("complete", "complete", "complete", "stream", "slow", "leave", "abort", "cancel"))
        stops: tuple[str, ...] = ()
        if random.random() < 0.25:
            stops = tuple(["".join(random.choices(_LETTERS, k=random.randint(1, 3))) for _ in range(2)])
        return RequestPlan(
            prompt=prompt,
            params=SamplingParams(
                max_tokens=max_tokens,
                min_tokens=(least := random.randint(0, max_tokens) if random.random() < 0.2 and not stops else 0),
                temperature=random.choice((0.0, 1.0)),
                # unique: `PassModel` names requests by it
                seed=number,
                n=min(random.choice((1, 1, 1, 2, 4)), self._most_samples),
                stop=stops,
                stop_token_ids=self._tokens(random.randint(0, 2)),
                ignore_eos=(endless := random.random() < 0.2),
                logprobs=(logprobs := random.choice(_LOGPROBS)),
                top_logprobs=self._top(logprobs),
                logit_bias=self._bias(),
                grammar=None if least or endless else self._grammar(),
                prompt_logprobs_start=(scored := self._scored(len(prompt))),
                prompt_top_logprobs=0 if scored is None else self._rows.choice((0, 0, 2)),
            ),
            arrives_s=random.uniform(0.0, self.span_s),
            way=way,
            after_s=random.uniform(0.0, max(self.span_s, 0.05)),
            priority=random.choice((0, 0, 0, 1, 2, -1)),
            deadline_s=random.uniform(0.001, 0.5) if random.random() < 0.15 else 3600.0,
            start=random.randrange(len(prompt)) if random.random() < 0.3 else 0,
            cache_salt=random.choice(("", "", "", "other")),
            routing=False if random.random() < 0.1 else None,
            aux=self._aux(),
        )

    def _top(self, kind: LogprobKind) -> int:
        """The number of alternatives beside each token."""
        return 0 if kind == "none" else self._rows.choice((0, 0, 1, 5))

    def _scored(self, prompt_tokens: int) -> int | None:
        """The position from which the prompt is scored; mostly it is not."""
        return self._rows.randrange(prompt_tokens) if self._rows.random() < 0.25 else None

    def _bias(self) -> dict[int, float]:
        """Mostly none; else one that changes every token, or some."""
        if self._rows.random() < 0.8:
            return {}
        tokens = [self._rows.randrange(self._runner.vocab_size) for _ in range(self._rows.randint(1, 4))]
        return {token: self._rows.choice((-100.0, -5.0, 5.0, 30.0, 100.0)) for token in tokens}

    def _grammar(self) -> Grammar | None:
        """Mostly none; else one that depends on every token of the answer."""
        if self._rows.random() < 0.8:
            return None
        end = f"{{{self._rows.randint(1, 9)}}}" if self._runner.eos_id >= 0 and self._rows.random() < 0.5 else ""
        return Grammar("regex", f"%{self._rows.choice((2, 3, 7))}{end}")

    def _aux(self) -> bool | tuple[str, ...] | None:
        """Which rows a request wants besides routing."""
        some = tuple(self._rows.sample(self._others, self._rows.randint(0, len(self._others))))
        return self._rows.choice((None, None, None, False, some, bool(self._others)))


def arguments(plan: RequestPlan) -> dict[str, Any]:
    """Keyword arguments for `Engine.generate` and `Engine.complete`."""
    return {
        "priority": plan.priority,
        "deadline_s": plan.deadline_s,
        "start": plan.start,
        "cache_salt": plan.cache_salt,
        "routing": plan.routing,
        "aux": plan.aux,
    }
