"""What the requests of one scheduler become over a naive runner, and whether that is right. The state machines of
`test_machine.py` and of `disagg/` are ledgers."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from fdasync.scheduler import SchedulerConfig, make_scheduler
from tests.support.paged_runner import PagedRunner, whole_output

if TYPE_CHECKING:
    from fdasync.events.actions import FinishRequest, HashAgain, RowSpan
    from fdasync.events.catalog import RequestPrepared


class Ledger:
    """The scheduler, its runner, and of each request by key what it was told.

    Attributes:
        emitted: tokens; `rows`: the tokens that each routing row was computed from.
        answers: (key, number of tokens), to be looked at for stops; `kept`: how many tokens a match kept.
        aborted: somebody asked to end them.
        hashes: prompts to be hashed again, in order.
        queue: events of the next turn.
    """

    def open(self, config: SchedulerConfig) -> None:
        self.config = config
        self.scheduler = make_scheduler(config)
        self.runner = PagedRunner(config)
        self.requests: dict[int, RequestPrepared] = {}
        self.finished: dict[int, FinishRequest] = {}
        self.rows: dict[int, list[Any]] = {}
        self.emitted: dict[int, list[int]] = {}
        self.answers: deque[tuple[int, int]] = deque()
        self.kept: dict[int, int] = {}
        self.aborted: set[int] = set()
        self.hashes: list[HashAgain] = []
        self.queue: list[Any] = []
        self.wake_at = float("inf")
        self.version = 0

    def add(self, request: RequestPrepared) -> None:
        self.requests[request.key] = request
        self.runner.salts[request.key] = request.salt

    def emit(self, key: int, token: int) -> None:
        assert key not in self.finished
        assert self.requests[key].emits
        tokens = self.emitted.setdefault(key, [])
        tokens.append(token)
        if self.requests[key].checks_stops:
            self.answers.append((key, len(tokens)))

    def copy(self, span: RowSpan) -> None:
        assert span.key not in self.finished
        request = self.requests[span.key]
        rows = self.rows.setdefault(span.key, [])
        assert span.start == request.start + len(rows)
        assert span.offset == span.start % self.config.block_tokens
        assert len(span.slots) == len(span.generations) == -(-(span.offset + span.count) // self.config.block_tokens)
        assert span.count > 0
        for at in range(span.offset, span.offset + span.count):
            number, offset = divmod(at, self.config.block_tokens)
            generation, row = self.runner.rows[span.slots[number], offset]
            assert generation == span.generations[number], "a row of another use of the slot"
            assert row.salt == request.salt
            rows.append(row.tokens)

    def finish(self, end: FinishRequest) -> None:
        """It has the tokens and rows that it should have, and a reason that they bear out. A machine looks by itself at
        the reasons that only its own play has, such as a hand-over."""
        key = end.key
        assert key not in self.finished, "a sample ended twice"
        self.finished[key] = end
        request = self.requests[key]
        whole = whole_output(request.tokens, request.max_tokens)
        count = len(end.token_ids)
        assert list(end.token_ids) == whole[:count]
        stops = [
            number
            for number, token in enumerate(whole, 1)
            if token in request.stop_ids and number >= request.min_tokens
        ]
        assert count <= min([*stops, request.max_tokens])
        if end.reason == "stop" and end.matched_stop < 0:
            assert self.kept[key] == count
        elif end.reason == "stop":
            assert end.token_ids[-1] == end.matched_stop
            assert stops[0] == count
        elif end.reason == "length":
            assert count == request.max_tokens
            assert not stops
        elif end.reason == "abort":
            assert key in self.aborted
        if request.emits:
            emitted = self.emitted.get(key, [])
            assert emitted == whole[: len(emitted)]
            assert len(emitted) >= count
        rows = self.rows.get(key, [])
        if request.start < 0:
            assert not rows
            assert end.num_rows == 0
        elif end.reason in ("stop", "length"):
            assert end.num_rows == len(request.tokens) + count - 1 - request.start
        assert len(rows) >= end.num_rows
        tokens = (*request.tokens, *whole)
        for number, row in enumerate(rows[: end.num_rows]):
            assert row == tokens[: request.start + number + 1]
