"""What people look at: the sights of all engines behind a generator put together, in numbers that need no more sums.

`summary_of` is what `fdasync top --json` prints, what `GET /v1/sight` of the HTTP front answers, and what its page and
the screen of `fdasync top` show. Pure. Called by `cli/top.py` and the HTTP plugin.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, get_args

import msgspec

from fdasync.stats import EngineStats, State, summed
from fdasync.telemetry.sight.experts import Experts, experts_of
from fdasync.telemetry.sight.latencies import added, quantile
from fdasync.telemetry.sight.sight import MOMENT_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.telemetry.sight.latencies import Counts
    from fdasync.telemetry.sight.sight import Moment, Watched

#: an engine is called slow if a token takes it so many times as long as the others of its kind
SLOW = 1.5
# sights that are older than this say nothing of now
_STALE_S = 5.0
_QUANTILES = (0.5, 0.9, 0.99)
# from the state that serves most to the states that serve nothing
_STATES: tuple[str, ...] = (*get_args(State), "silent", "away")
# what keeps an engine from going on until somebody brings weights
_NEEDS = {
    "waits_for_weights": "waits for weights: it has woken without any, and an update has to bring them",
    "broken": "its weights are broken: an update has failed half-way, and another one has to mend that",
}


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that so large a share of requests does not exceed; None: no request of the window tells.

    Attributes:
        count: requests.
        p50, p90, p99: seconds.
    """

    count: int
    p50: float | None
    p90: float | None
    p99: float | None


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates over a window of the last seconds.

    Attributes:
        seconds: that it has, of engines that have run so long.
        tokens_per_s, prompt_tokens_per_s, finished_per_s: sampled tokens, prompt tokens admitted, samples ended.
        hit_share: of the prompt tokens, those found on the device, on the host, in the store; None: there were none.
        ttft, tpot: from the call to the first token; from then on, by each token. Of requests whose tokens are handed
            out as they come.
        token_s: seconds that a sample waited for each of its tokens, of all requests; None: nothing was sampled.
    """

    seconds: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    finished_per_s: float
    hit_share: tuple[float, float, float] | None
    ttft: Latency
    tpot: Latency
    token_s: float | None


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    Attributes:
        name, role, address: see `Watched`.
        state: as its stats say it; "away" without a link, "silent" without an answer.
        problems: in words; () where all is well.
        slow: a token takes it longer than the others of its role.
        rates: of it alone.
        stats: its numbers, as it last told them; None before that.
    """

    name: str
    role: str
    address: str
    state: str
    problems: tuple[str, ...]
    slow: bool
    rates: Rates
    stats: EngineStats | None


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """All engines in one moment.

    Attributes:
        age_s: seconds ago that it ended.
        rates: of it.
        running, waiting: samples at its end.
        used_share: of the device blocks.
    """

    age_s: float
    rates: Rates
    running: int
    waiting: int
    used_share: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """All engines together.

    Attributes:
        model: its name.
        state: of the engine that is nearest to running.
        states: how many engines are in each state, from running on.
        weight_version: of the engines; several, if they differ, with commas.
        stats: sums over the engines that answer (`stats.summed`).
        rates: of all together; of a request that was handed over, its prompt and its output count once.
        problems: of engines, each with the name before it.
        engines: each.
        history: moments, oldest first.
        experts: by weights, newest first.
    """

    model: str
    state: str
    states: dict[str, int]
    weight_version: str
    stats: EngineStats
    rates: Rates
    problems: tuple[str, ...]
    engines: tuple[Engine, ...]
    history: tuple[Past, ...] = ()
    experts: tuple[Experts, ...] = ()


def summary_of(
    watched: Sequence[Watched], *, model: str, window_s: float = 60.0, history: bool = True, experts: bool = True
) -> Summary:
    """Put sights together.

    Args:
        model: its name.
        window_s: that rates and latencies are of.
        history, experts: with these.
    """
    count = max(round(window_s / MOMENT_S), 1)
    recent = [_recent(one, count) for one in watched]
    apart = any(one.role == "prefill" and one.is_up for one in watched)
    token_s = [rates_of([moments]).token_s for moments in recent]
    engines = tuple(
        [
            _engine(one, moments, _slow(number, watched, token_s))
            for number, (one, moments) in enumerate(zip(watched, recent, strict=True))
        ]
    )
    present = [one for one in engines if one.state not in ("away", "silent")]
    told = [one.stats for one in present if one.stats is not None]
    said = [one.state for one in engines]
    states = {state: said.count(state) for state in _STATES if state in said}
    return Summary(
        model=model,
        state=next(iter(states), "away"),
        states=states,
        weight_version=", ".join(dict.fromkeys([stats.scheduler.weight_version for stats in told])),
        stats=summed(told),
        rates=rates_of([_once(one.role, moments, apart) for one, moments in zip(watched, recent, strict=True)]),
        problems=tuple([f"{one.name or one.address}: {problem}" for one in engines for problem in one.problems]),
        engines=engines,
        history=_history(watched, apart) if history else (),
        experts=experts_of([one.sight.picks for one in watched if one.sight is not None]) if experts else (),
    )


def rates_of(recent: Sequence[Sequence[Moment]]) -> Rates:
    """What engines did together, each in moments of one window."""
    flat = [moment for moments in recent for moment in moments]
    # engines work side by side: each adds the rate of its own seconds
    spans = [sum([moment.seconds for moment in moments]) for moments in recent]

    def per_s(name: str) -> float:
        pairs = zip(recent, spans, strict=True)
        return float(sum([sum([getattr(one, name) for one in moments]) / span for moments, span in pairs if span]))

    prompt = sum([moment.prompt_tokens for moment in flat])
    device, host, store = [sum([moment.hits[tier] for moment in flat]) for tier in range(3)]
    tokens = sum([moment.tokens for moment in flat])
    waited_s = sum([moment.running * moment.seconds for moment in flat if moment.tokens])
    return Rates(
        seconds=max(spans, default=0.0),
        tokens_per_s=per_s("tokens"),
        prompt_tokens_per_s=per_s("prompt_tokens"),
        finished_per_s=per_s("finished"),
        hit_share=(device / prompt, host / prompt, store / prompt) if prompt else None,
        ttft=_latency([moment.ttft for moment in flat]),
        tpot=_latency([moment.tpot for moment in flat]),
        token_s=waited_s / tokens if tokens and waited_s else None,
    )


def _latency(parts: Sequence[Counts]) -> Latency:
    counts = added(parts)
    p50, p90, p99 = [quantile(counts, share) for share in _QUANTILES]
    return Latency(count=sum([count for _, count in counts]), p50=p50, p90=p90, p99=p99)


def _recent(one: Watched, count: int) -> tuple[Moment, ...]:
    """The moments of the window; () of an engine that says nothing any more."""
    if one.sight is None or not one.is_up or one.age_s > _STALE_S or not one.sight.moments:
        return ()
    last = one.sight.moments[-1].number
    return tuple([moment for moment in one.sight.moments if moment.number > last - count])


def _slow(number: int, watched: Sequence[Watched], token_s: Sequence[float | None]) -> str:
    """Why an engine is called slow; "": it is not."""
    own, role = token_s[number], watched[number].role
    others = [
        seconds
        for at, (one, seconds) in enumerate(zip(watched, token_s, strict=True))
        if at != number and one.role == role and seconds is not None
    ]
    if own is None or not others or role == "prefill" or own < SLOW * median(others):
        return ""
    return f"slow: a token takes {own * 1e3:.3g} ms, at the others {median(others) * 1e3:.3g} ms"


def _engine(one: Watched, recent: Sequence[Moment], slow: str) -> Engine:
    sight, stats = one.sight, EngineStats() if one.sight is None else one.sight.stats
    silent = sight is None or one.age_s > _STALE_S
    state = "away" if not one.is_up else "silent" if silent else stats.state
    problems = [one.problem] if one.problem else []
    if one.is_up and silent:
        problems.append("does not say how it is" if sight is None else f"has not answered for {one.age_s:.0f} s")
    if state in _NEEDS:
        problems.append(_NEEDS[state])
    if one.is_up:
        if stats.store_problem:
            problems.append(f"without its store: {stats.store_problem}")
        if stats.tap_problem:
            problems.append(f"without taps: {stats.tap_problem}")
        if stats.dropped_events:
            problems.append(f"its taps lost {stats.dropped_events} events")
    if slow:
        problems.append(slow)
    return Engine(
        name=one.name,
        role=one.role,
        address=one.address,
        state=state,
        problems=tuple(problems),
        slow=bool(slow),
        rates=rates_of([recent]),
        stats=None if sight is None else stats,
    )


def _once(role: str, moments: Sequence[Moment], apart: bool) -> tuple[Moment, ...]:
    """A request that is handed over has its prompt told by the prefill side and its output by the decode side: both
    count both."""
    if apart and role == "prefill":
        return tuple([msgspec.structs.replace(moment, tokens=0, finished=0) for moment in moments])
    if apart and role == "decode":
        return tuple([msgspec.structs.replace(moment, prompt_tokens=0, hits=(0, 0, 0)) for moment in moments])
    return tuple(moments)


def _history(watched: Sequence[Watched], apart: bool) -> tuple[Past, ...]:
    """Moments of all engines side by side. They end at most `MOMENT_S` apart, counted from the latest of each."""
    by_age: dict[int, list[Moment]] = {}
    for one in watched:
        if one.sight is None or not one.sight.moments or not one.is_up or one.age_s > _STALE_S:
            continue
        last = one.sight.moments[-1].number
        for moment in _once(one.role, one.sight.moments, apart):
            by_age.setdefault(last - moment.number, []).append(moment)
    blocks = sum([one.sight.stats.scheduler.num_blocks for one in watched if one.sight is not None and one.is_up])
    return tuple(
        [
            Past(
                age_s=age * MOMENT_S,
                rates=rates_of([[moment] for moment in moments]),
                running=sum([moment.running for moment in moments]),
                waiting=sum([moment.waiting for moment in moments]),
                used_share=sum([moment.used_blocks for moment in moments]) / blocks if blocks else 0.0,
            )
            for age, moments in sorted(by_age.items(), reverse=True)
        ]
    )
