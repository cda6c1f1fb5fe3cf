"""Random work for an engine, drawn from a seed: who asks for what, when, and how they behave.

`Workload.draw(seed)` is pure data: a shape for the engine and its runner, requests, at most one disaster.
Knows no engine; played by `simulation.py`.
"""

from __future__ import annotations

from random import Random
from typing import Any, Literal

import msgspec

from fdasync.config import EngineConfig
from fdasync.request import LogprobKind, SamplingParams
from fdasync.runner.oracle import SyntheticConfig
from fdasync.testing.edges import Fault, FaultKind

Way = Literal["complete", "stream", "slow", "leave", "abort", "cancel"]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_LOGPROBS: tuple[LogprobKind, ...] = ("none", "none", "none", "raw", "processed", "both")


class RequestPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One request and its caller.

    Attributes:
        arrives_s: when it is made.
        way: "complete" and "stream" wait for the end, "slow" rests between deltas, "leave" leaves the stream
            after a few deltas, "abort" has somebody else abort it, "cancel" cancels the caller's task.
        after_s: when the abort or the cancellation comes, after the arrival; the rest of a slow reader.
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


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """See the module.

    Attributes:
        fault: what the runner does wrong, or None.
        ends: "wait": every caller is waited for; "drain", "close": that is called at `ends_at_s`.
        max_delay_s: see `EdgeRunner`.
    """

    seed: int
    config: EngineConfig
    runner: SyntheticConfig
    requests: tuple[RequestPlan, ...]
    fault: Fault | None
    ends: Literal["wait", "drain", "close"]
    ends_at_s: float
    max_delay_s: float

    @classmethod
    def draw(cls, seed: int) -> Workload:
        """The workload of a seed; the same for ever, as far as this file stays the same."""
        random = Random(seed)
        block_tokens = random.choice((2, 4, 8))
        num_blocks = random.randint(5, 40)
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
        draw = _Draw(random, runner, config)
        requests = tuple(draw.request(number) for number in range(random.randint(3, 24)))
        fault = None
        if random.random() < 0.25:
            kinds: tuple[FaultKind, ...] = ("fail", "hang", "die")
            fault = Fault(random.choice(kinds), random.randint(0, 60))
        return cls(
            seed=seed,
            config=config,
            runner=runner,
            requests=requests,
            fault=fault,
            ends=random.choice(("wait", "wait", "wait", "wait", "drain", "close")),
            ends_at_s=random.uniform(0.0, draw.span_s),
            max_delay_s=random.choice((0.0, 0.0, 0.005, 0.05)),
        )


class _Draw:
    def __init__(self, random: Random, runner: SyntheticConfig, config: EngineConfig) -> None:
        self._random = random
        self._runner = runner
        self._captures = bool(runner.num_moe_layers) and config.routing is not False
        self._room = runner.max_context_tokens
        self._max_requests = config.max_requests
        self._prefixes = [self._tokens(random.randint(1, self._room // 2)) for _ in range(2)]
        self.span_s = random.choice((0.0, 0.05, 0.5, 2.0))

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple([self._random.randrange(self._runner.vocab_size) for _ in range(count)])

    def request(self, number: int) -> RequestPlan:
        random = self._random
        prefix = random.choice(self._prefixes)
        # half of them share a whole prefix: one leads, the others wait for it
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
                min_tokens=random.randint(0, max_tokens) if random.random() < 0.2 and not stops else 0,
                temperature=random.choice((0.0, 1.0)),
                # one's own: `PassModel` tells requests apart by it
                seed=number,
                n=min(random.choice((1, 1, 1, 2, 4)), self._max_requests),
                stop=stops,
                stop_token_ids=self._tokens(random.randint(0, 2)),
                ignore_eos=random.random() < 0.2,
                logprobs=random.choice(_LOGPROBS),
            ),
            arrives_s=random.uniform(0.0, self.span_s),
            way=way,
            after_s=random.uniform(0.0, max(self.span_s, 0.05)),
            priority=random.choice((0, 0, 0, 1, 2, -1)),
            deadline_s=random.uniform(0.001, 0.5) if random.random() < 0.15 else 3600.0,
            start=random.randrange(len(prompt)) if random.random() < 0.3 else 0,
            cache_salt=random.choice(("", "", "", "other")),
            routing=False if random.random() < 0.1 else None,
        )


def arguments(plan: RequestPlan) -> dict[str, Any]:
    """Keyword arguments for `Engine.generate` and `Engine.complete`."""
    return {
        "priority": plan.priority,
        "deadline_s": plan.deadline_s,
        "start": plan.start,
        "cache_salt": plan.cache_salt,
        "routing": plan.routing,
    }
