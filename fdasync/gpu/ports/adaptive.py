"""The default port: sleeps until shortly before the predicted end, then queries once per turn of the loop.

A port that queries all the time is as fast as a blocked loop and costs a core; a callback of the driver costs 0.4 ms,
since an idle core is slow to wake. Durations of one kind of step hardly change, so this port sleeps through most of a
step and queries through the last half millisecond: as fast as querying all the time, for a tenth of its cost.

While the end is not known, or was missed, the port looks at growing distances, so a step that hangs burns no core.
Knows nothing of torch or steps. Called by runners.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar, Protocol

from fdasync.gpu.completion import CompletionPort
from fdasync.gpu.ports.native import TimerFd

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Hashable

    from fdasync.gpu.completion import Work

_FLOOR_S = 500e-6
_SHARE = 0.03
_ERRORS = 4.0
_WEIGHT = 0.2
# how long past the predicted end the port queries at every turn, in margins
_PATIENCE = 4.0
_FIRST_STEP_S = 50e-6
_GROWTH = 1.5
_MAX_STEP_S = 1e-3
# the longest sleep: bounds how late a wrong prediction, or a failed device, is noticed
_MAX_SLEEP_S = 0.025
_MAX_KINDS = 1024


class Alarm(Protocol):
    """Wakes the port once at a time; `TimerFd` is one."""

    def arm(self, delay_s: float) -> None:
        """Wake the port after this many seconds, instead of at the moment set before."""
        ...

    def close(self) -> None:
        """Never wake the port again."""
        ...


class Estimate:
    """How long works of one kind take: moving averages of the duration and of its absolute error, in seconds.

    Attributes:
        duration_s: None before the first work, and after two works in a row, or one by far, were over before the port
            looked.
        error_s: average of the absolute error of `duration_s`.
    """

    __slots__ = ("_misses", "duration_s", "error_s")

    def __init__(self) -> None:
        self.duration_s: float | None = None
        self.error_s = 0.0
        self._misses = 0

    def margin_s(self) -> float:
        return max(_FLOOR_S, _SHARE * (self.duration_s or 0.0), _ERRORS * self.error_s)

    def learn(self, low_s: float, high_s: float) -> None:
        """A work was still running after `low_s` and was seen done after `high_s`."""
        duration = self.duration_s
        if duration is None:
            self.duration_s = (low_s + high_s) / 2
            # a margin so wide that the next look comes early enough
            self.error_s = (high_s - low_s) / 2
            self._misses = 0
            return
        width_s, margin_s = high_s - low_s, self.margin_s()
        far = duration - high_s > 2 * margin_s
        if width_s > margin_s or (far and width_s > _FLOOR_S):
            if low_s <= duration <= high_s:
                # the loop was late, or this work was; the estimate may be right
                return
            if high_s < duration:
                # over before the first look, by an unknown time
                self._misses += 1
                if far or self._misses == 2:
                    self.duration_s = None
                else:
                    self._move(max(high_s - margin_s, 0.0) - duration)
                return
        self._misses = 0
        self._move(min(max(duration, low_s), high_s) - duration)

    def _move(self, by_s: float) -> None:
        assert self.duration_s is not None
        self.duration_s += _WEIGHT * by_s
        self.error_s += _WEIGHT * (abs(by_s) - self.error_s)


class _Watch:
    """What the port knows of a lane's oldest work; moments are of the port's clock.

    Attributes:
        busy: whether the lane has work.
        began: when the work started, as far as known.
        end: when it should be done; None: not known.
        margin: how long before `end` the port looks at every turn.
        unseen: the last moment at which the work was not done.
        last_end: when the work before it was done.
        next_look: when the port looks next; None: at every turn.
        step: from the next look to the one after it, while `end` is not known.
    """

    __slots__ = ("began", "busy", "end", "last_end", "margin", "next_look", "step", "unseen")

    def __init__(self) -> None:
        self.busy = False
        self.began = self.unseen = self.last_end = self.margin = 0.0
        self.end: float | None = None
        self.next_look: float | None = None
        self.step = _FIRST_STEP_S


class AdaptivePort(CompletionPort):
    """See the module; `CompletionPort` has the contract. Has one fd, and no timer while no work is in flight.

    Args:
        clock: seconds; durations are its differences.
        alarm: makes the alarm, from a loop and the callback that the alarm calls.

    Raises OSError if the kernel gives no timer.
    """

    name: ClassVar[str] = "adaptive"

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        alarm: Callable[[asyncio.AbstractEventLoop, Callable[[], None]], Alarm] = TimerFd,
    ) -> None:
        super().__init__()
        self._clock = clock
        self._watches: dict[str, _Watch] = {}
        self._estimates: dict[tuple[str, Hashable], Estimate] = {}
        self._turn: asyncio.Handle | None = None
        self._armed_for: float | None = None
        self._alarm = alarm(self._loop, self._woken)

    def predicted_s(self, lane: str, kind: Hashable) -> float | None:
        """How long the next work of this kind should take, in seconds; None: not known."""
        estimate = self._estimates.get((lane, kind))
        return None if estimate is None else estimate.duration_s

    def _open_lane(self, lane: str) -> None:
        self._watches[lane] = _Watch()

    def _given(self, work: Work) -> None:
        work.given_at = now = self._clock()
        watch = self._watches[work.lane]
        if not watch.busy:
            self._plan(watch, work)
            self._schedule(watch, now)
            self._arrange(now)

    def _seen(self, work: Work) -> None:
        watch = self._watches[work.lane]
        now = self._clock()
        self._estimate(work).learn(max(watch.unseen - watch.began, 0.0), now - watch.began)
        # a late look at this work must not make the next one seem to have begun late
        guess = (watch.unseen + now) / 2 if watch.end is None else watch.end
        watch.last_end = min(max(guess, watch.unseen), now)
        works = self._lanes[work.lane]
        watch.busy = bool(works)
        if works:
            self._plan(watch, works[0])

    def _stop(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        self._alarm.close()

    def _estimate(self, work: Work) -> Estimate:
        key = (work.lane, work.kind)
        estimate = self._estimates.get(key)
        if estimate is None:
            if len(self._estimates) == _MAX_KINDS:
                # a caller whose kinds never repeat must not fill the memory: forget the oldest kind
                del self._estimates[next(iter(self._estimates))]
            estimate = self._estimates[key] = Estimate()
        return estimate

    def _plan(self, watch: _Watch, work: Work) -> None:
        """Begin to watch `work`, now the oldest of its lane."""
        watch.busy = True
        watch.began = watch.unseen = max(work.given_at, watch.last_end)
        watch.step = _FIRST_STEP_S
        estimate = self._estimate(work)
        watch.margin = estimate.margin_s()
        watch.end = None if estimate.duration_s is None else watch.began + estimate.duration_s

    def _schedule(self, watch: _Watch, now: float) -> None:
        """Set when to look again at the lane's oldest work, which is not done."""
        if watch.end is not None:
            if now < watch.end - watch.margin:
                watch.next_look = min(watch.end - watch.margin, now + _MAX_SLEEP_S)
                return
            if now <= watch.end + _PATIENCE * watch.margin:
                watch.next_look = None
                return
        watch.next_look = now + watch.step
        watch.step = min(watch.step * _GROWTH, _MAX_STEP_S)

    def _look(self, lane: str, watch: _Watch) -> None:
        self._drain(lane)
        if watch.busy and not self._stopped:
            now = self._clock()
            watch.unseen = now
            self._schedule(watch, now)

    def _arrange(self, now: float) -> None:
        """Ask the loop for the next turn, and set the alarm, as the lanes need them."""
        nearest = None
        for watch in self._watches.values():
            if not watch.busy:
                continue
            if watch.next_look is None:
                if self._turn is None:
                    self._turn = self._loop.call_soon(self._every_turn)
            elif nearest is None or watch.next_look < nearest:
                nearest = watch.next_look
        # an early alarm costs a look at the clock, as much as setting it anew: so it is never set to a later moment
        if nearest is not None and (self._armed_for is None or nearest < self._armed_for):
            self._armed_for = nearest
            self._alarm.arm(nearest - now)

    def _every_turn(self) -> None:
        self._turn = None
        for lane, watch in list(self._watches.items()):
            if watch.busy and watch.next_look is None and not self._stopped:
                self._look(lane, watch)
        if not self._stopped:
            self._arrange(self._clock())

    def _woken(self) -> None:
        self._armed_for = None
        now = self._clock()
        for lane, watch in list(self._watches.items()):
            if watch.busy and watch.next_look is not None and watch.next_look <= now and not self._stopped:
                self._look(lane, watch)
        if not self._stopped:
            self._arrange(self._clock())
