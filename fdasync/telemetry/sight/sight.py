"""What an engine shows of itself to people: gauges, counters, latencies, its last minutes, the experts chosen.

Pure data, which crosses links as it is (`fdasync_fleet/messages.py`), so bounds stand in the types. An engine makes a
`Sight` of itself; `Generator.watch` gives one for each engine behind a generator. Read by `fdasync top`, by the page of
the HTTP front and by its metrics.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from fdasync.stats import EngineStats
from fdasync.telemetry.sight.latencies import NUM_BUCKETS

Meta = msgspec.Meta
#: seconds that a `Moment` lasts
MOMENT_S = 5.0
#: moments that an engine keeps: ten minutes
MOST_MOMENTS = 120
#: tables of picks that an engine keeps: of the weights in use, and of earlier weights
MOST_TABLES = 4
#: bytes of all tables of picks that cross a link at a time; a model of more cells shows none
MAX_PICKS_NBYTES = 2 << 20

_Count = Annotated[int, Meta(ge=0, lt=1 << 48)]
_Seconds = Annotated[float, Meta(ge=0, le=1e12)]
_Name = Annotated[str, Meta(max_length=256)]
_Bucket = Annotated[int, Meta(ge=0, lt=NUM_BUCKETS)]
_Counts = Annotated[tuple[tuple[_Bucket, _Count], ...], Meta(max_length=NUM_BUCKETS)]
#: prompt tokens that were not computed: found on the device, on the host, in the store
Hits = tuple[_Count, _Count, _Count]


class Moment(msgspec.Struct, frozen=True):
    """What an engine did in `MOMENT_S` seconds, and how it stood at their end.

    Attributes:
        number: of the moment, from 1 on; a moment that its loop missed is left out.
        seconds: that it really lasted.
        tokens, prompt_tokens, hits, finished: that were sampled, admitted, found in a tier; samples that ended.
        running, waiting: samples at its end.
        used_blocks: device blocks that samples used at its end.
        ttft, tpot: histograms of the requests that ended in it, as in `Sight`.
    """

    number: _Count
    seconds: _Seconds
    tokens: _Count
    prompt_tokens: _Count
    hits: Hits
    finished: _Count
    running: _Count
    waiting: _Count
    used_blocks: _Count
    ttft: _Counts = ()
    tpot: _Counts = ()


class Picks(msgspec.Struct, frozen=True):
    """The experts that were chosen under one set of weights. What was computed counts, also what was computed again or
    for a sample that was aborted; what was found in a cache does not.

    Attributes:
        version: label of the weights.
        layers: hidden-layer numbers of the rows of the table.
        num_experts: of each layer.
        rows: tokens that were computed.
        counted: tokens that were looked at: all of `rows`, or up to a number of each step (`cache/picks.py`).
        table: int64 little-endian [layers, experts]: picks, each counted for as many tokens as its token stands for.
            They are estimates where `counted` is below `rows`.
        namespace: of the weights, on every instance that has them; a label may have named several.
    """

    version: _Name
    layers: Annotated[tuple[_Count, ...], Meta(max_length=4096)]
    num_experts: Annotated[int, Meta(ge=1, le=1 << 16)]
    rows: _Count
    counted: _Count
    table: Annotated[bytes, Meta(max_length=MAX_PICKS_NBYTES)]
    namespace: Annotated[bytes, Meta(max_length=64)] = b""


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """One engine at one moment. Counters count from its start.

    Attributes:
        stats: its numbers.
        ttft, tpot, total: histograms (`latencies.py`) of ended requests in seconds: to the first token, by each later
            token, to the end. The first two are of requests whose tokens are handed out as they come.
        ttft_s, tpot_s, total_s: their sums.
        ends: requests that ended, by reason, as `fdasync_requests_finished_total` counts them.
        moments: of the last minutes, oldest first.
        picks: tables of the weights in use and of earlier weights, newest first; () without routing.
    """

    stats: EngineStats
    ttft: _Counts = ()
    tpot: _Counts = ()
    total: _Counts = ()
    ttft_s: _Seconds = 0.0
    tpot_s: _Seconds = 0.0
    total_s: _Seconds = 0.0
    ends: Annotated[tuple[tuple[_Name, _Count], ...], Meta(max_length=16)] = ()
    moments: Annotated[tuple[Moment, ...], Meta(max_length=MOST_MOMENTS)] = ()
    picks: Annotated[tuple[Picks, ...], Meta(max_length=MOST_TABLES)] = ()


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """One engine behind a generator.

    Attributes:
        name, role: its own; "alone" for an engine without others, "" for an instance before its first answer.
        address: that a router dials; "" of an engine.
        is_up: whether there is a link to it.
        problem: why there is none, or why it gets no requests although there is one; else "".
        age_s: age of `sight`.
        sight: as it was when it last answered; None before that.
    """

    name: str
    role: str
    address: str
    is_up: bool
    problem: str
    age_s: float
    sight: Sight | None
