"""Drafts for the steps of an engine: asks the drafter for paths, and learns from the tokens which drafts were accepted.

One `plan` belongs to each planned step and one `done` to each completed one, in the same order; up to `depth` steps are
in flight. A path begins behind the tokens known at its plan. Tokens of earlier steps that come later move its head,
also where they differ from the path. So what was drafted and accepted is counted exactly as the runner sees it.

A drafter that does not pay is switched off for so many steps: no path is asked for, and no token is told. Then a step
tries it again. `plan` calls the caller back before, who tells of all sequences and their tokens at once.

Pure: the same calls give the same drafts. It knows no queue, no block and no step's layout. Called by the scheduler.
"""

from __future__ import annotations

from collections import deque
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fdasync.drafting.budget import StepPrices, choose_drafts
from fdasync.drafting.guard import GuardedDrafter
from fdasync.errors import InvariantBroken
from fdasync.events.actions import Drafts, path_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from fdasync.drafting.base import Drafter

# of each verified draft, the weight of its verdict in the running acceptance of its sequence, and of all
_OWN_WEIGHT = 0.1
_COMMON_WEIGHT = 0.005
_FIRST_ACCEPTANCE = 0.5
# a step in which every sequence drafts, whatever the budget says: the interval doubles while it shows no gain
_TRY_EVERY, _TRY_EVERY_AT_MOST = 32, 512
# a step in which none does, so that the plain step's price stays known
_PLAIN_EVERY = 64
_NO_LIMIT = 1 << 62


class DraftCounters(NamedTuple):
    """Since the start.

    Attributes:
        drafter: name of the drafter.
        drafted: drafts that were forwarded, as far as the tokens tell.
        accepted: drafts that equalled the token in their place.
        steps: completed steps that had a path.
    """

    drafter: str
    drafted: int
    accepted: int
    steps: int


class Beginning(NamedTuple):
    """A sequence that begins to draft.

    Attributes:
        key, group, prompt, answer, salt: as of `Drafter.begin`.
        limit: the most tokens that it may have, prompt and answer: nothing is drafted for its last token or behind.
        steps: decode steps that gave tokens of its answer, since the caller counts them.
    """

    key: int
    group: int
    prompt: bytes
    answer: bytes
    limit: int = _NO_LIMIT
    salt: str = ""
    steps: int = 0


class _Flight(NamedTuple):
    """A planned step: its decodes, and its rows if all paths are followed."""

    keys: tuple[int, ...]
    rows: int
    has_paths: bool


class DraftPlanner:
    """See the module. Not thread-safe.

    Args:
        name: of the drafter, for the counters.
        max_drafts: the most drafts that a step verifies of a sequence.
        depth: the most steps in flight. The drafter's `limits.path_tokens` is `path_tokens(max_drafts, depth)`.
        weighs: forward as many drafts as pay, and none before the price of steps is known; False: as many as there are.

    Its methods raise PluginError where the drafter raises or breaks its contract; no call follows.
    """

    def __init__(self, drafter: Drafter, *, name: str, max_drafts: int, depth: int, weighs: bool = True) -> None:
        self._drafter = GuardedDrafter(drafter, name)
        self._name = name
        self._weighs = weighs
        self._most = max_drafts
        self._depth = depth
        self._prices = StepPrices()
        self._flights: deque[_Flight] = deque()
        # how many of them have paths
        self._followed = 0
        # whether tokens are told as steps complete
        self._is_on = False
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._keys_of_rows: tuple[tuple[int, ...], npt.NDArray[np.int64]] | None = None
        # by row: tokens known, the most that there may be, the chance that a draft is accepted, and that a path fits
        # when its step begins
        self._lengths = np.zeros(0, np.int64)
        self._limits = np.zeros(0, np.int64)
        # by row: what `tally` returns
        self._tally = np.zeros((0, 3), np.int64)
        self._acceptance = np.zeros(0)
        self._reach = np.zeros(0)
        # by turn (the step's number modulo `depth`) and row: the path's tokens, how many, how many of them are known
        # by now, and how many drafts the step may forward
        self._paths = np.zeros((depth, 0, path_tokens(max_drafts, depth)), np.int32)
        self._ends = np.zeros((depth, 0), np.int64)
        self._heads = np.zeros((depth, 0), np.int64)
        self._forward = np.zeros((depth, 0), np.int64)
        self._common = _FIRST_ACCEPTANCE
        self._common_reach = 1.0
        self._planned = 0
        self._done = 0
        # whether drafts paid when paths were last there; with about so many running
        self._pays = True
        self._weighed_at = 0
        self._try_at, self._try_every = _TRY_EVERY, _TRY_EVERY
        self._drafted = self._accepted = self._drafting_steps = 0

    # -- sequences --------------------------------------------------------------------------------

    def begin(self, fresh: Sequence[Beginning], *, now: float = 0.0) -> None:
        """Sequences have their first tokens, or came from elsewhere with some. A sequence that is preempted goes on
        after that, and begins no second time. Raises InvariantBroken for a live key."""
        keys, groups, prompts, answers, limits, salts, steps = zip(*fresh, strict=True)
        while len(self._free) < len(keys):
            self._grow()
        taken = []
        for key in keys:
            if key in self._rows:
                raise InvariantBroken(f"sequence {key} began to draft twice")
            self._rows[key] = row = self._free.pop()
            taken.append(row)
        self._keys_of_rows = None
        rows = np.array(taken)
        self._lengths[rows] = [(len(one.prompt) + len(one.answer)) // 4 for one in fresh]
        self._limits[rows] = limits
        self._tally[rows] = 0
        self._tally[rows, 0] = steps
        self._acceptance[rows] = self._common
        self._reach[rows] = self._common_reach
        self._ends[:, rows] = self._forward[:, rows] = 0
        self._drafter.call("begin_all", keys, groups, prompts, answers, salts, now=now)

    def end(self, key: int, *, now: float = 0.0) -> None:
        """A sequence ended; steps in flight may still name it. Does nothing for a key that is not live."""
        row = self._rows.pop(key, None)
        if row is not None:
            self._free.append(row)
            self._keys_of_rows = None
            self._drafter.call("end", key, now=now)

    def tally(self, key: int) -> tuple[int, int, int]:
        """A live sequence's decode steps that gave tokens since it began, drafts forwarded, drafts accepted."""
        steps, drafted, accepted = self._tally[self._rows[key]].tolist()
        return steps, drafted, accepted

    def lengths(self, keys: tuple[int, ...]) -> list[int]:
        """Tokens that are known here of each live sequence, its prompt's included."""
        lengths: list[int] = self._lengths[self._rows_of(keys)].tolist()
        return lengths

    # -- steps ------------------------------------------------------------------------------------

    def plan(self, keys: tuple[int, ...], catch_up: Callable[[], None] | None = None) -> Drafts | None:
        """Drafts for the next step, which decodes these sequences; None: there are none. Sequences that have not begun
        get none. Called once for each planned step, also where `keys` is empty. Raises InvariantBroken where `depth`
        steps are in flight.

        Args:
            catch_up: called before the drafter is asked, and only then. Tells by `begin`, `take` and `end` what the
                caller has kept to itself while the drafter was off. None: the drafter is never off.
        """
        ahead = len(self._flights)
        if ahead >= self._depth:
            raise InvariantBroken(f"{ahead} steps are in flight")
        turn = self._planned % self._depth
        self._planned += 1
        asks = self._asks(len(keys))
        # off once no path is in flight any more
        self._is_on = asks or self._followed > 0 or catch_up is None
        if asks and catch_up is not None:
            catch_up()
        if not asks or not self._rows:
            self._flights.append(_Flight(keys, len(keys), False))
            return None
        rows = self._rows_of(keys)
        live = rows >= 0
        known = keys if live.all() else tuple([key for key in keys if key in self._rows])
        rows = rows[live]
        if not len(rows):
            self._flights.append(_Flight(keys, len(keys), False))
            return None
        self._ends[turn, rows] = self._forward[turn, rows] = 0
        # the last token of a sequence is sampled behind the draft before it
        useful = np.clip(self._limits[rows] - self._lengths[rows] - 1, 0, self._paths.shape[2])
        counts, tokens = self._drafter.propose(known, useful)
        # each step in flight gives one token at least, where it has room
        drafts = np.minimum(self._budget(rows, counts, len(keys)), np.maximum(useful - ahead, 0))
        ends = np.where(drafts > 0, np.minimum(counts, drafts + ahead * (self._most + 1)), 0)
        has = ends > 0
        if not has.any():
            self._flights.append(_Flight(keys, len(keys), False))
            return None
        place = np.repeat(np.arange(len(rows)), counts)
        within = np.arange(len(tokens)) - np.repeat(np.cumsum(counts) - counts, counts)
        kept = within < ends[place]
        place, within, tokens = place[kept], within[kept], tokens[kept]
        self._paths[turn, rows[place], within] = tokens
        mine, ends, forward = rows[has], ends[has], drafts[has]
        self._ends[turn, mine], self._heads[turn, mine], self._forward[turn, mine] = ends, 0, forward
        self._flights.append(_Flight(keys, len(keys) + int(forward.sum()), True))
        self._followed += 1
        return Drafts(
            keys=known if has.all() else tuple([known[number] for number in np.flatnonzero(has).tolist()]),
            starts=tuple(self._lengths[mine].tolist()),
            counts=tuple(ends.tolist()),
            most=tuple(forward.tolist()),
            tokens=tokens.astype("<i4", copy=False).tobytes(),
        )

    def done(
        self,
        keys: tuple[int, ...],
        counts: Sequence[int] | None,
        tokens: Sequence[int],
        *,
        seconds: float | None = None,
    ) -> bool:
        """The oldest step in flight completed. Returns whether its tokens were told to the drafter. If not, they come
        later, by `take`, or in what a sequence begins with.

        Args:
            keys: the decodes of its plan, in order, and behind them the sequences whose last chunk it computed: new
                sequences, and preempted ones. Sequences that have not begun, or have ended, are passed over: `begin` is
                called afterwards, with all tokens.
            counts: tokens of each; None: one each.
            tokens: all of them, int32.
            seconds: what the step took, if it did nothing but decode.
        """
        turn = self._done % self._depth
        flight = self._complete(keys, seconds)
        if not self._is_on:
            return False
        decodes = len(flight.keys)
        self._followed -= flight.has_paths
        rows = self._rows_of(keys)
        given = np.asarray(tokens, np.int32)
        many = np.ones(len(keys), np.int64) if counts is None else np.asarray(counts, np.int64)
        if len(many) != len(keys) or int(many.sum()) != len(given):
            raise InvariantBroken(f"{len(given)} tokens and {len(many)} counts for {len(keys)} sequences")
        live = rows >= 0
        if not live.all():
            given, rows, many, decodes = given[np.repeat(live, many)], rows[live], many[live], int(live[:decodes].sum())
            keys = tuple([key for key in keys if key in self._rows])
        if not len(rows):
            return True
        if flight.has_paths:
            # the columns of this turn have entries of an earlier step for a sequence that begins again in this one
            self._judge(turn, rows[:decodes], many[:decodes], given)
        for number, other in enumerate(self._flights):
            if other.has_paths:
                self._heads[(self._done + number) % self._depth, rows] += many
        self._lengths[rows] += many
        self._tally[rows[:decodes], 0] += many[:decodes] > 0
        self._drafter.call("take", keys, many, given)
        return True

    def take(self, keys: tuple[int, ...], steps: Sequence[int], counts: Sequence[int], tokens: Sequence[int]) -> None:
        """Tokens of live sequences from steps that were not told: so many steps gave so many of each."""
        rows, many = self._rows_of(keys), np.array(counts, np.int64)
        self._lengths[rows] += many
        self._tally[rows, 0] += np.array(steps, np.int64)
        self._drafter.call("take", keys, many, np.array(tokens, np.int32))

    @property
    def outlasts(self) -> bool:
        """See `Drafter`."""
        return self._drafter.outlasts

    @property
    def counters(self) -> DraftCounters:
        """See `DraftCounters`."""
        return DraftCounters(self._name, self._drafted, self._accepted, self._drafting_steps)

    # -- parts ------------------------------------------------------------------------------------

    def _complete(self, keys: tuple[int, ...], seconds: float | None) -> _Flight:
        """Remove the oldest step from those in flight, and measure its price."""
        if not self._flights:
            raise InvariantBroken("a step is done, and none was planned")
        flight = self._flights.popleft()
        if keys[: len(flight.keys)] != flight.keys:
            raise InvariantBroken(f"a step of {flight.keys} is done, and was told as one of {keys}")
        self._done += 1
        if seconds is not None and flight.rows:
            self._prices.measure(flight.rows, seconds)
        return flight

    def _asks(self, running: int) -> bool:
        """Whether the next step asks the drafter at all."""
        if not self._weighs:
            return True
        if self._planned % _PLAIN_EVERY == 0 or not running or not self._prices.knows(running):
            return False
        if not self._weighed_at < 2 * running < 4 * self._weighed_at:
            # rows that were dear beside many sequences may be nearly free beside few, and the other way round
            self._weighed_at, self._pays = running, True
            self._try_at, self._try_every = min(self._try_at, self._planned + _TRY_EVERY), _TRY_EVERY
        return self._pays or self._planned >= self._try_at

    def _budget(
        self, rows: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], running: int
    ) -> npt.NDArray[np.int64]:
        """Drafts for each sequence, for those with paths of so many tokens; every one of these in a try."""
        drafts = np.zeros(len(rows), np.int64)
        has = np.flatnonzero(counts)
        if not len(has):
            return drafts
        if not self._weighs:
            return np.minimum(counts, self._most)
        mine = rows[has]
        drafts[has] = choose_drafts(self._acceptance[mine], self._reach[mine], self._most, self._prices, running)
        self._pays = bool(drafts.any())
        if self._planned >= self._try_at:
            self._try_every = _TRY_EVERY if self._pays else min(2 * self._try_every, _TRY_EVERY_AT_MOST)
            self._try_at = self._planned + self._try_every
            drafts[has] = self._most
        return np.minimum(drafts, counts)

    def _judge(
        self, turn: int, rows: npt.NDArray[np.int64], many: npt.NDArray[np.int64], given: npt.NDArray[np.int32]
    ) -> None:
        """What became of the drafts of the step that completed."""
        heads = self._heads[turn, rows]
        drafted = np.minimum(self._forward[turn, rows], self._ends[turn, rows] - heads)
        used = np.flatnonzero((drafted > 0) & (many > 0))
        if self._depth > 1:
            self._learn_reach(rows[self._forward[turn, rows] > 0], rows[used])
        self._drafting_steps += 1
        if not len(used):
            return
        rows, heads, drafted, accepted = rows[used], heads[used], drafted[used], many[used] - 1
        last = given[(np.cumsum(many) - 1)[used]]
        # a run that ends with a token of the path ended for want of room, and no draft was rejected
        width = self._paths.shape[2]
        rejected = (accepted < drafted) & (last != self._paths[turn, rows, np.minimum(heads + accepted, width - 1)])
        right = np.minimum(accepted, drafted)
        forwarded = np.where(rejected, drafted, right)
        self._tally[rows, 1] += forwarded
        self._tally[rows, 2] += right
        self._drafted += int(forwarded.sum())
        self._accepted += int(right.sum())
        self._learn(rows, accepted, rejected)

    def _learn(self, rows: npt.NDArray[np.int64], right: npt.NDArray[np.int64], wrong: npt.NDArray[np.bool_]) -> None:
        """So many tokens of each path were right, and then one was wrong or none."""
        verdicts = right + wrong
        keep = (1 - _OWN_WEIGHT) ** verdicts
        share = right / np.maximum(verdicts, 1)
        self._acceptance[rows] = self._acceptance[rows] * keep + share * (1 - keep)
        total = int(verdicts.sum())
        if total:
            keep_all = (1 - _COMMON_WEIGHT) ** total
            self._common = self._common * keep_all + int(right.sum()) / total * (1 - keep_all)

    def _learn_reach(self, planned: npt.NDArray[np.int64], reached: npt.NDArray[np.int64]) -> None:
        """Drafts were planned for some sequences; `reached` had a path that still fitted at their step."""
        if len(planned):
            self._reach[planned] *= 1 - _OWN_WEIGHT
            self._reach[reached] += _OWN_WEIGHT
            keep_all = (1 - _COMMON_WEIGHT) ** len(planned)
            self._common_reach = self._common_reach * keep_all + len(reached) / len(planned) * (1 - keep_all)

    def _rows_of(self, keys: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """The row of each key; -1: it is not live."""
        cached = self._keys_of_rows
        if cached is not None and (cached[0] is keys or cached[0] == keys):
            return cached[1]
        find = self._rows.get
        rows = np.fromiter(map(find, keys, repeat(-1)), np.int64, len(keys))
        self._keys_of_rows = (keys, rows)
        return rows

    def _grow(self) -> None:
        old = len(self._lengths)
        more = max(old, 64)
        self._lengths = np.concatenate((self._lengths, np.zeros(more, np.int64)))
        self._limits = np.concatenate((self._limits, np.zeros(more, np.int64)))
        self._tally = np.concatenate((self._tally, np.zeros((more, 3), np.int64)))
        self._acceptance = np.concatenate((self._acceptance, np.zeros(more)))
        self._reach = np.concatenate((self._reach, np.zeros(more)))
        self._paths = np.concatenate((self._paths, np.zeros((self._depth, more, self._paths.shape[2]), np.int32)), 1)
        blank = np.zeros((self._depth, more), np.int64)
        self._ends = np.concatenate((self._ends, blank), 1)
        self._heads = np.concatenate((self._heads, blank), 1)
        self._forward = np.concatenate((self._forward, blank), 1)
        self._free.extend(range(old + more - 1, old - 1, -1))
