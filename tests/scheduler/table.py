"""A scheduler whose runner, tiers and store are the test: `Table` turns it, `Turned` is what it did."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from fdasync.cache.identity import block_keys
from fdasync.engine.prepare import salted
from fdasync.events.actions import (
    CopyRows,
    EmitTokens,
    FetchBlocks,
    FinishRequest,
    HashAgain,
    LookUp,
    RunStep,
    StoreBlocks,
    SwapIn,
    SwapOut,
    WakeAt,
)
from fdasync.events.catalog import (
    AbortRequested,
    CacheResetRequested,
    FetchEnded,
    Hashed,
    LateTransferEnded,
    LookedUp,
    PauseRequested,
    RequestPrepared,
    ResumeRequested,
    SleepRequested,
    StepDone,
    StopChecked,
    StopMatched,
    StoreEnded,
    SwapDone,
    TimerFired,
    WeightsChanged,
)
from fdasync.scheduler import SchedulerConfig, make_scheduler

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fdasync.events.actions import Action
    from fdasync.events.catalog import Event
    from fdasync.request import PauseMode
    from fdasync.scheduler.state.attachment import Attachment
    from fdasync.stats import SchedulerStats
from tests.support.helpers import ROOT, make_request


def span(start: int, version: str) -> tuple[int, str, str]:
    """Of a result: tokens of the weights that first had this label."""
    return start, version, "" if version == "0" else f"of {version}"


class Table:
    """A scheduler and short words for the events that tests put on the table; every turn ends in `check()`.

    What the scheduler asked of copies, store and hashing lies here until the test answers it, or has it answered by
    `answers()` from a model of a store.

    Args:
        attachments: besides the scheduler's own.

    Attributes:
        flying: steps in flight.
        copies, lookups, fetches, puts: in flight, by number; `late`: leases that are out; `hashes`: in order.
        kept: what the model store has: (namespace, key).
        now: time of the events made here.
    """

    def __init__(self, *, attachments: tuple[Attachment, ...] = (), **config: Any) -> None:
        values: dict[str, Any] = {
            "block_tokens": 4, "num_blocks": 64, "max_running": 8, "max_step_tokens": 16,
            # scripts say who is first by the order of their lines
            "policy": "arrival",
        }  # fmt: skip
        self.config = SchedulerConfig(**{**values, **config})
        self.scheduler = make_scheduler(self.config, more=attachments)
        self.now = 1.0
        self.namespace = self.config.namespace
        self.flying: list[RunStep] = []
        self.copies: dict[int, SwapOut | SwapIn] = {}
        self.lookups: dict[int, LookUp] = {}
        self.fetches: dict[int, FetchBlocks] = {}
        self.puts: dict[int, StoreBlocks] = {}
        self.late: dict[int, FetchBlocks | StoreBlocks] = {}
        self.hashes: list[HashAgain] = []
        self.kept: dict[tuple[bytes, bytes], None] = {}
        self.finished: dict[int, FinishRequest] = {}
        self.rows: dict[int, list[tuple[int, int]]] = {}
        self.row_ends: dict[int, int] = {}
        self.decoding: list[int] = []
        self._next_token = 1000
        self._counts: dict[int, int] = {}

    # -- events

    def request(self, key: int, tokens: Iterable[int], max_tokens: int = 8, **fields: Any) -> RequestPrepared:
        """Hashed under the namespace in use, unless it is given."""
        prompt = tuple(tokens)
        namespace = fields.setdefault("namespace", self.namespace)
        root = fields.setdefault("root", self.root(namespace, fields.get("salt", "")))
        fields.setdefault("block_keys", tuple(block_keys(root, prompt, self.config.block_tokens)))
        return make_request(key, prompt, max_tokens, self.config.block_tokens, **{"at": self.now, **fields})

    @staticmethod
    def root(namespace: bytes, salt: str = "") -> bytes:
        return salted(namespace, salt) if namespace or salt else ROOT

    def keys(self, tokens: Iterable[int], namespace: bytes | None = None) -> list[bytes]:
        """Identities of the full blocks of these tokens, under the namespace in use unless it is given."""
        root = self.root(self.namespace if namespace is None else namespace)
        return block_keys(root, tuple(tokens), self.config.block_tokens)

    def done(self, *tokens: int, at: float | None = None) -> StepDone:
        """The oldest step in flight is done; tokens that are not given are numbers that never repeat."""
        step = self.flying.pop(0)
        count = self.sampled(step)
        fresh = range(self._next_token, self._next_token + count - len(tokens))
        self._next_token += len(fresh)
        return StepDone(step_id=step.step_id, tokens=(*tokens, *fresh), at=self.now if at is None else at)

    def runs(self, *runs: Sequence[int], at: float | None = None) -> StepDone:
        """The oldest step in flight is done, with a run of tokens for each sequence that it sampled for."""
        step = self.flying.pop(0)
        assert self.sampled(step) == len(runs)
        tokens = tuple([token for run in runs for token in run])
        counts = tuple(map(len, runs))
        return StepDone(step_id=step.step_id, tokens=tokens, counts=counts, at=self.now if at is None else at)

    def abort(self, *keys: int) -> AbortRequested:
        return AbortRequested(keys=keys, at=self.now)

    def checked(self, key: int, num_tokens: int) -> StopChecked:
        return StopChecked(key=key, num_tokens=num_tokens, at=self.now)

    def matched(self, key: int, keep_tokens: int) -> StopMatched:
        return StopMatched(key=key, keep_tokens=keep_tokens, at=self.now)

    @staticmethod
    def timer(at: float) -> TimerFired:
        return TimerFired(at=at)

    def pause(self, mode: PauseMode = "in_place") -> PauseRequested:
        return PauseRequested(mode=mode, at=self.now)

    def resume(self) -> ResumeRequested:
        return ResumeRequested(at=self.now)

    def sleep(self) -> SleepRequested:
        return SleepRequested(at=self.now)

    def reset(self) -> CacheResetRequested:
        return CacheResetRequested(at=self.now)

    def weights(self, version: int, weights_id: str = "") -> WeightsChanged:
        """New weights, and a namespace that belongs to them."""
        self.namespace = b"weights %d" % version
        return WeightsChanged(
            version=str(version), namespace=self.namespace, weights_id=weights_id or f"of {version}", at=self.now
        )

    # -- answers

    def copied(self, number: int | None = None) -> SwapDone:
        """The copy of this number, or the oldest, ended."""
        number = min(self.copies) if number is None else number
        del self.copies[number]
        return SwapDone(copy_id=number, seconds=0.001, kv_nbytes=0, aux_nbytes=0, at=self.now)

    def looked_up(self, number: int | None = None, count: int | None = None, **fields: Any) -> LookedUp:
        """The lookup of this number, or the oldest, ended: with this count, or what the model store has."""
        number = min(self.lookups) if number is None else number
        lookup = self.lookups.pop(number)
        if count is None:
            has = [(lookup.namespace, key) in self.kept for key in lookup.keys]
            count = (*has, False).index(False)
        values: dict[str, Any] = {"seconds": 0.001, "answered": True, "at": self.now}
        return LookedUp(lookup_id=number, count=count, **{**values, **fields})

    def fetched(self, number: int | None = None, arrived: str | None = None, **fields: Any) -> FetchEnded:
        """The fetch of this number, or the oldest, ended; `arrived`: "+" or "-" for each block, or what the model store
        has."""
        number = min(self.fetches) if number is None else number
        fetch = self.fetches.pop(number)
        values: dict[str, Any] = {"seconds": 0.001, "late": False, "nbytes": 0, "at": self.now, **fields}
        came = [(fetch.namespace, key) in self.kept for key in fetch.keys] if arrived is None else _signs(arrived)
        self._lease(number, fetch, came, late=values["late"])
        return FetchEnded(fetch_id=number, arrived=tuple(came), **values)

    def stored(self, number: int | None = None, stored: str | None = None, **fields: Any) -> StoreEnded:
        """The write of this number, or the oldest, ended; `stored`: "+" or "-" for each block, or all are."""
        number = min(self.puts) if number is None else number
        put = self.puts.pop(number)
        values: dict[str, Any] = {"seconds": 0.001, "late": False, "nbytes": 0, "at": self.now, **fields}
        kept = [True] * len(put.keys) if stored is None else _signs(stored)
        self.kept.update({(put.namespace, key): None for key, ok in zip(put.keys, kept, strict=True) if ok})
        self._lease(number, put, kept, late=values["late"])
        return StoreEnded(put_id=number, stored=tuple(kept), **values)

    def _lease(self, number: int, transfer: FetchBlocks | StoreBlocks, done: list[bool], *, late: bool) -> None:
        if late:
            # what is done is not held any longer
            held = tuple([host for host, ok in zip(transfer.host, done, strict=True) if not ok])
            states = tuple([place for place, ok in zip(transfer.snapshots_host, done, strict=False) if not ok])
            self.late[number] = replace(transfer, host=held, snapshots_host=states)

    def returned(self, number: int, arrived: str) -> LateTransferEnded:
        """The late rest of a fetch or a write ended; "+" or "-" for each of its blocks."""
        del self.late[number]
        return LateTransferEnded(transfer_id=number, arrived=tuple(_signs(arrived)), at=self.now)

    def hashed(self, namespace: bytes | None = None) -> Hashed:
        """The oldest sequence that was to be hashed again is, under the namespace in use unless it is given."""
        action = self.hashes.pop(0)
        namespace = self.namespace if namespace is None else namespace
        root = self.root(namespace, action.salt)
        keys = block_keys(root, array("i", action.tokens), self.config.block_tokens)
        return Hashed(key=action.key, namespace=namespace, root=root, block_keys=tuple(keys), at=self.now)

    def answers(self) -> list[Event]:
        """Everything that is in flight ends, but steps and leases."""
        found: list[Event] = [self.copied() for _ in range(len(self.copies))]
        found += [self.looked_up() for _ in range(len(self.lookups))]
        found += [self.fetched() for _ in range(len(self.fetches))]
        found += [self.stored() for _ in range(len(self.puts))]
        return found + [self.hashed() for _ in range(len(self.hashes))]

    @property
    def in_flight(self) -> int:
        """Everything but steps and leases."""
        return sum(map(len, (self.copies, self.lookups, self.fetches, self.puts, self.hashes)))

    # -- turns

    def turn(self, *events: Event) -> Turned:
        actions = self.scheduler.handle(list(events))
        for action in actions:
            if isinstance(action, RunStep):
                self._follow(action)
            elif isinstance(action, CopyRows):
                for span in action.spans:
                    # rows are contiguous, so where the first span starts says the rest
                    first = self.row_ends.get(span.key, span.start)
                    assert span.start == first, f"rows of {span.start} follow those up to {first}"
                    self.row_ends[span.key] = first + span.count
                    self.rows.setdefault(span.key, []).append((span.offset, span.count))
            elif isinstance(action, FinishRequest):
                assert action.key not in self.finished, f"{action.key} ended twice"
                self.finished[action.key] = action
            else:
                self._lay_down(action)
        self._check_places()
        self.scheduler.check()
        return Turned(actions)

    def _lay_down(self, action: Action) -> None:
        held: dict[int, Any]
        if isinstance(action, SwapOut | SwapIn):
            held, number = self.copies, action.copy_id
        elif isinstance(action, LookUp):
            held, number = self.lookups, action.lookup_id
        elif isinstance(action, FetchBlocks):
            held, number = self.fetches, action.fetch_id
        elif isinstance(action, StoreBlocks):
            held, number = self.puts, action.put_id
        else:
            if isinstance(action, HashAgain):
                self.hashes.append(action)
            return
        assert number not in held, f"{action} bears a number that is in use"
        assert number not in self.late or isinstance(action, SwapOut | SwapIn | LookUp)
        held[number] = action

    def _check_places(self) -> None:
        """Nothing is written to by two, or read while somebody writes it; no copy names a block that another copies."""
        copies = list(self.copies.values())
        device = Counter(block for copy in copies for block in copy.device)
        assert not device or max(device.values()) == 1, "a device block is in two copies"
        outs = [copy for copy in copies if isinstance(copy, SwapOut)]
        fetches = [*self.fetches.values(), *(late for late in self.late.values() if isinstance(late, FetchBlocks))]
        puts = [*self.puts.values(), *(late for late in self.late.values() if isinstance(late, StoreBlocks))]
        written = Counter(block for one in (*outs, *fetches) for block in one.host)
        ins = Counter(block for copy in copies if isinstance(copy, SwapIn) for block in copy.host)
        read = Counter(block for put in puts for block in put.host)
        assert not written or max(written.values()) == 1, "a host block has two writers"
        assert not ins or max(ins.values()) == 1, "a host block is copied in twice at a time"
        assert not read or max(read.values()) == 1, "a host block is being stored twice"
        assert not written.keys() & (ins.keys() | read.keys()), "a host block is read while it is written"
        written = Counter(place for one in (*outs, *fetches) for place in one.snapshots_host if place >= 0)
        ins = Counter(place for one in copies if isinstance(one, SwapIn) for place in one.snapshots_host)
        read = Counter(place for put in puts for place in put.snapshots_host if place >= 0)
        assert not written or max(written.values()) == 1, "a snapshot's place on the host has two writers"
        assert not written.keys() & (ins.keys() | read.keys()), "a snapshot is read while it is written"

    def sampled(self, step: RunStep) -> int:
        return self._counts.pop(step.step_id)

    def _follow(self, step: RunStep) -> None:
        """The runner's decode set (`RunStep`), to know how many tokens the step samples."""
        self.decoding = [key for key in self.decoding if key not in step.leaves]
        assert set(step.skips) <= set(self.decoding)
        computed = {*self.decoding, *(chunk.key for chunk in step.chunks)} - set(step.skips)
        assert {take.key for take in step.snapshots} <= computed, "a snapshot of what the step does not compute"
        lasts = [chunk.key for chunk in step.chunks if chunk.last]
        self._counts[step.step_id] = len(self.decoding) - len(step.skips) + len(lasts)
        self.decoding += lasts
        self.flying.append(step)

    def run(self, *events: Event, turns: int = 200) -> None:
        """These events, then one step after the other, everything else answered, until nothing is left to do."""
        self.turn(*events)
        for _ in range(turns):
            if not self.flying and not self.in_flight:
                return
            steps = [self.done()] if self.flying else []
            self.turn(*steps, *self.answers())
        raise AssertionError(f"still running after {turns} turns")

    def answer(self, turns: int = 50) -> None:
        """Answer everything but steps until nothing more is asked."""
        for _ in range(turns):
            if not self.in_flight:
                return
            self.turn(*self.answers())
        raise AssertionError(f"still asking after {turns} turns")

    def num_rows(self, key: int) -> int:
        return sum(count for _, count in self.rows.get(key, ()))

    @property
    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def places(self, tokens: Iterable[int], namespace: bytes | None = None) -> list[str]:
        """Where the indexed blocks of these tokens are: "device", "host", "both", or "" for one that is not indexed."""
        found = [self.scheduler.index.get(key) for key in self.keys(tokens, namespace)]
        names = {(True, False): "device", (False, True): "host", (True, True): "both"}
        return ["" if block is None else names[block.id >= 0, block.host >= 0] for block in found]

    def is_empty(self) -> bool:
        """Nobody uses anything any more: what is left may be evicted."""
        stats = self.stats
        free = stats.free_blocks + stats.idle_blocks == stats.num_blocks
        private = any(block.key is None for block in self.scheduler.index.pool.live())
        busy = stats.moving or stats.writing or stats.waiting_for_store or stats.late_transfers or self.in_flight
        return free and not (stats.waiting or stats.running or self.flying or private or busy)


def _signs(text: str) -> list[bool]:
    assert set(text) <= {"+", "-"}
    return [sign == "+" for sign in text]


class Turned:
    """The actions of one turn."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self.actions = actions
        self.steps = [action for action in actions if isinstance(action, RunStep)]
        self.finishes = [action for action in actions if isinstance(action, FinishRequest)]
        self.emits = [action for action in actions if isinstance(action, EmitTokens)]
        self.wakes = [action for action in actions if isinstance(action, WakeAt)]
        self.outs = [action for action in actions if isinstance(action, SwapOut)]
        self.ins = [action for action in actions if isinstance(action, SwapIn)]
        self.lookups = [action for action in actions if isinstance(action, LookUp)]
        self.fetches = [action for action in actions if isinstance(action, FetchBlocks)]
        self.puts = [action for action in actions if isinstance(action, StoreBlocks)]
        self.hashes = [action for action in actions if isinstance(action, HashAgain)]

    @property
    def step(self) -> RunStep:
        (step,) = self.steps
        return step

    @property
    def finish(self) -> FinishRequest:
        (finish,) = self.finishes
        return finish

    @property
    def starts(self) -> list[int]:
        return [start.key for step in self.steps for start in step.starts]

    @property
    def cached(self) -> dict[int, int]:
        """Who starts, and how many of its tokens are there already."""
        return {start.key: start.num_cached for step in self.steps for start in step.starts}

    @property
    def chunks(self) -> list[tuple[int, int, bool]]:
        return [(chunk.key, chunk.count, chunk.last) for step in self.steps for chunk in step.chunks]

    @property
    def emitted(self) -> list[tuple[int, int]]:
        return [pair for emit in self.emits for pair in zip(emit.keys, emit.tokens, strict=True)]

    def names(self) -> list[str]:
        return [type(action).__name__ for action in self.actions]
