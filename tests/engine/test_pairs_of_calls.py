"""Each pair of calls that stop an engine, change it or let it go on, the second one while the first is under way: when
each returns, with which error, and what the engine does then."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from fdasync import Engine, SamplingParams
from fdasync.errors import EngineClosed, UpdateUnderWay
from fdasync.testing import check_idle, run_sim, synthetic_config, synthetic_engine, until
from tests.engine.updates import weights

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

# the first request runs for a second, the other one waits for its lane
_LONG = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
_SHORT = SamplingParams(max_tokens=2, temperature=0.0)
_BOUND_S = 600.0

CALLS: dict[str, Callable[[Engine], Awaitable[object]]] = {
    "place": lambda engine: engine.pause("in_place"),
    "retract": lambda engine: engine.pause("retract"),
    "wait": lambda engine: engine.pause("wait"),
    "abort": lambda engine: engine.pause("abort"),
    "resume": lambda engine: engine.resume(),
    "update": lambda engine: engine.update_weights(None, weights(1), "keep"),
    "upabort": lambda engine: engine.update_weights(None, weights(1), "abort"),
    "begin": lambda engine: engine.begin_weight_update("keep"),
    "sleep": lambda engine: engine.sleep(1, "keep"),
    "sl.wait": lambda engine: engine.sleep(1, "wait"),
    "wake": lambda engine: engine.wake(),
    "drain": lambda engine: engine.drain(),
    "aclose": lambda engine: engine.aclose(),
}

# rows: the first call; columns: the second one. Of each call in turn, when it returned:
#   -  at once;  r  when the requests had ended that ran;  u  at the deadline of an update in parts that nobody ends;
#   x  when everything was undone;  B  it raised UpdateUnderWay;  C  EngineClosed
# and then what the engine does: Running, Paused, Updating, Asleep, Draining, Closed
_TABLE = """
        place   retract wait    abort   resume  update  upabort begin   sleep   sl.wait wake    drain   aclose
place   --P     --P     --P     --P     --R     --P     --P     --U     --A     --A     --P     -xD     --C
retract --P     --P     --P     --P     --R     --P     --P     --U     --A     --A     --P     -xD     --C
wait    --P     --P     rrP     --P     --R     r-P     --P     u-P     --A     rrA     r-P     rxD     C-C
abort   --P     --P     --P     --P     --R     --P     --P     --U     --A     --A     --P     --D     --C
resume  --P     --P     -rP     --P     --R     --R     --R     --U     --A     -rA     --R     -rD     --C
update  --P     --P     -rP     --P     --R     -BR     -BR     -BR     -BR     -BR     -BR     -rD     C-C
upabort --P     --P     --P     --P     --R     -BR     -BR     -BR     -BR     -BR     -BR     --D     C-C
begin   --U     --U     -uP     --U     --U     -BU     -BU     -BU     -BU     -BU     -BU     -uD     --C
sleep   --A     --A     --A     --A     --A     -BA     -BA     -BA     --A     --A     --R     -xD     C-C
sl.wait --A     --A     rrA     --A     r-A     rBA     rBA     rBA     rrA     rrA     rrR     rxD     C-C
wake    --P     --P     -rP     --P     --R     --R     --R     --U     --A     -rA     --R     -rD     --C
drain   x-D     x-D     xrD     --D     r-D     r-D     --D     u-D     x-D     xrD     r-D     rrD     --C
aclose  -CC     -CC     -CC     -CC     -CC     -CC     -CC     -CC     -CC     -CC     -CC     -CC     --C
"""
# as above, but in the very turn in which the first call began: it has not come to anything yet
_AT_ONCE = {
    ("place", "aclose"): "C-C",
    ("retract", "aclose"): "C-C",
    ("abort", "aclose"): "C-C",
    ("begin", "aclose"): "C-C",
}


async def timed(call: Awaitable[object]) -> str:
    """When it returned, by a letter of the table; "?": never."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        async with asyncio.timeout(_BOUND_S):
            await call
    except UpdateUnderWay:
        return "B"
    except EngineClosed:
        return "C"
    except TimeoutError:
        return "?"
    took_s = loop.time() - began
    return "-" if took_s < 0.4 else "r" if took_s < 5 else "u" if took_s < 15 else "x"


async def play(first: str, second: str, gap_s: float) -> str:
    config = synthetic_config(
        {"step_s": 0.01, "load_s": 0.1, "sleep_s": 0.05, "weights_id": 1, "max_context_tokens": 128, "num_blocks": 64},
        max_running=1, update_deadline_s=10.0, request_deadline_s=400.0,
    )  # fmt: skip
    async with synthetic_engine(config) as engine:
        requests = [asyncio.ensure_future(engine.complete([n, 2, 3], p)) for n, p in ((1, _LONG), (2, _SHORT))]
        await asyncio.sleep(0.1)
        one = asyncio.ensure_future(timed(CALLS[first](engine)))
        await asyncio.sleep(gap_s)
        two = asyncio.ensure_future(timed(CALLS[second](engine)))
        # drains, for example, may need the other call to be undone
        await asyncio.wait([one, two], timeout=20.0)
        doing = engine.state if engine.state != "running" else engine.load().doing
        if engine.state in ("running", "draining"):
            # nothing keeps it from going on once all is undone
            await engine.abandon_weight_update()
            await engine.wake()
            await engine.resume()
        ends = [await one, await two]
        for request in requests:
            try:
                assert (await request).finish_reason in ("length", "abort")
            except EngineClosed:
                assert "aclose" in (first, second)
        if engine.state in ("running", "draining"):
            await until(lambda: not (engine.stats().scheduler.moving or engine.stats().steps_in_flight), every_s=0.01)
            check_idle(engine)
        return f"{''.join(ends)}{doing[0].upper()}"


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("gap_s", [pytest.param(0.0, marks=pytest.mark.nightly), 0.02])
@pytest.mark.parametrize("first", sorted(CALLS, key=lambda call: call not in ("abort", "aclose", "upabort")))
def test_each_pair_ends_as_the_table_says(first, gap_s):
    header, *rows = _TABLE.strip("\n").splitlines()
    assert header.split() == list(CALLS)
    wanted = dict(zip(CALLS, next(row.split()[1:] for row in rows if row.split()[0] == first), strict=True))
    if not gap_s:
        wanted |= {second: _AT_ONCE[first, second] for second in CALLS if (first, second) in _AT_ONCE}
    assert {second: run_sim(play(first, second, gap_s)) for second in CALLS} == wanted
