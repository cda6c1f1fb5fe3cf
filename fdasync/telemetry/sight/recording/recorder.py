"""Records what an engine did in its last minutes, its latencies, and the experts chosen under each set of weights.

Runs on the engine's loop: `ended` at each request's end, `tick` ten times a second, `weights_changed` at updates.
Numbers are cheap to keep and are only put together when somebody looks. Knows no engine. Made by `engine_sights.py`.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

from fdasync.telemetry.sight.latencies import Histogram
from fdasync.telemetry.sight.sight import MAX_PICKS_NBYTES, MOMENT_S, MOST_MOMENTS, MOST_TABLES, Moment, Picks, Sight

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from fdasync.stats import EngineStats
    from fdasync.telemetry.sight.latencies import Counts


class PicksSoFar(NamedTuple):
    """Counts since the engine's start, as the runner's side keeps them.

    Attributes:
        table: int64 [layers, experts], a copy.
        rows, counted: as in `Picks`.
    """

    table: NDArray[np.int64]
    rows: int
    counted: int


class PickRecorder:
    """Tables of picks by weights.

    Args:
        read: the counts so far, None once they can no longer be read; None: nothing is counted, as without routing.
        layers: hidden-layer numbers of the table's rows.
        namespace, version: of the weights in use.
    """

    def __init__(
        self, read: Callable[[], PicksSoFar | None] | None, layers: tuple[int, ...], namespace: bytes, version: str
    ) -> None:
        self._read = read
        self._layers = layers
        self._namespace = namespace
        self._version = version
        self._before = None if read is None else read()
        self._past: deque[Picks] = deque(maxlen=MOST_TABLES - 1)

    def weights_changed(self, namespace: bytes, version: str) -> None:
        """The weights, or their label, are others from now on; no step is in flight where the weights are."""
        now = None if self._read is None or namespace == self._namespace else self._read()
        if now is not None:
            past = self._since(now)
            # updates of several calls in one pause bring no table that anybody wants to see
            if past.rows:
                self._past.appendleft(past)
            self._before = now
        self._namespace, self._version = namespace, version

    def tables(self, *, past: bool = True) -> tuple[Picks, ...]:
        """Newest first; without `past` only the table of the weights in use. No more than fit `MAX_PICKS_NBYTES`."""
        now = None if self._read is None else self._read()
        if now is None:
            return ()
        tables = [self._since(now), *(self._past if past else ())]
        size = len(tables[0].table)
        return tuple(tables[: MAX_PICKS_NBYTES // size])

    def _since(self, now: PicksSoFar) -> Picks:
        before = self._before
        assert before is not None
        layers, num_experts = now.table.shape
        assert layers == len(self._layers)
        return Picks(
            version=self._version,
            layers=self._layers,
            num_experts=num_experts,
            rows=now.rows - before.rows,
            counted=now.counted - before.counted,
            table=(now.table - before.table).astype("<i8").tobytes(),
            namespace=self._namespace,
        )


class Recorder:
    """See the module.

    Args:
        stats: the engine's, now.
        picks: tables of picks.
        started_at: time by the clock of `tick`.
    """

    def __init__(self, stats: Callable[[], EngineStats], picks: PickRecorder, started_at: float) -> None:
        self.picks = picks
        self._stats = stats
        self._ttft, self._tpot, self._total = Histogram(), Histogram(), Histogram()
        self._ends: Counter[str] = Counter()
        self._moments: deque[Moment] = deque(maxlen=MOST_MOMENTS)
        self._number = 0
        self._last_at = started_at
        self._last = stats()
        self._last_ttft: Counts = ()
        self._last_tpot: Counts = ()

    def ended(self, reason: str, total_s: float, ttft_s: float | None, tpot_s: float | None) -> None:
        """A request has ended.

        Args:
            reason: as the metric `fdasync_requests_finished_total` says it.
            ttft_s, tpot_s: None where nobody knows when its tokens came.
        """
        self._ends[reason] += 1
        if reason != "handed_over":
            # the decode instance tells how long it took in all
            self._total.observe(total_s)
        if ttft_s is not None:
            self._ttft.observe(ttft_s)
        if tpot_s is not None:
            self._tpot.observe(tpot_s)

    def tick(self, now: float) -> None:
        """Time passes; ends a moment where it is over."""
        seconds = now - self._last_at
        if seconds < MOMENT_S:
            return
        # a loop that stood still for long leaves a gap
        self._number += max(int(seconds / MOMENT_S), 1)
        stats = self._stats()
        counted, last = stats.scheduler, self._last.scheduler
        self._moments.append(
            Moment(
                number=self._number,
                seconds=seconds,
                # what a stop cuts off no longer counts
                tokens=max(stats.tokens - self._last.tokens, 0),
                prompt_tokens=counted.prompt_tokens - last.prompt_tokens,
                hits=(
                    counted.hit_tokens_device - last.hit_tokens_device,
                    counted.hit_tokens_host - last.hit_tokens_host,
                    counted.hit_tokens_store - last.hit_tokens_store,
                ),
                finished=counted.finished - last.finished,
                running=counted.running,
                waiting=counted.waiting + stats.waiting_for_place,
                used_blocks=counted.used_blocks,
                ttft=self._ttft.since(self._last_ttft),
                tpot=self._tpot.since(self._last_tpot),
            )
        )
        self._last_at, self._last = now, stats
        self._last_ttft, self._last_tpot = self._ttft.counts, self._tpot.counts

    def sight(self, since: int = 0, *, past_picks: bool = True) -> Sight:
        """All that there is to see, now.

        Args:
            since: number of a moment; only later ones are told.
            past_picks: tables of earlier weights, too.
        """
        return Sight(
            stats=self._stats(),
            ttft=self._ttft.counts,
            tpot=self._tpot.counts,
            total=self._total.counts,
            ttft_s=self._ttft.sum_s,
            tpot_s=self._tpot.sum_s,
            total_s=self._total.sum_s,
            ends=tuple(sorted(self._ends.items())),
            moments=tuple([moment for moment in self._moments if moment.number > since]),
            picks=self.picks.tables(past=past_picks),
        )
