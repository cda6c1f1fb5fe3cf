"""The numbers of a running engine, told once: its scheduler's, its own, its taps'.

They travel as they are: `Engine.stats()` returns them, heartbeats to routers and `Sight`s have them, and every number
is a metric (`telemetry/stats_metrics.py`). A field that is added here shows in `/metrics`, in `GET /v1/sight` and at
routers without another line. Bounds stand in the types, since stats cross links.

Pure data. The scheduler makes `SchedulerStats` (`scheduler/stats.py`), the engine the rest.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

import msgspec

from fdasync.request import MAX_VERSION_CHARS, Doing

if TYPE_CHECKING:
    from collections.abc import Sequence

Meta = msgspec.Meta
#: characters of a text that stats hold
MAX_PROBLEM_CHARS = 4096
MAX_NAME_CHARS = 256


class Metric(msgspec.Struct, frozen=True):
    """How a field is told to Prometheus, where its own name and its sentence do not say it all.

    Attributes:
        name: of the metric; "": "fdasync_", the field's name with its units written out, and "_total" of a counter.
        text: for people; "": the sentence of the field.
        labels: of this field, where one metric has several fields.
        named_by: (label, field that has its value), of a metric that is left out while the value is "".
        word: the label that has the field's own text; the metric is 1. Of a field with a few words, there is a series
            for each, and the others are 0.
    """

    name: str = ""
    text: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    named_by: tuple[str, str] | None = None
    word: str = ""


class _Family(msgspec.Struct, frozen=True):
    """A metric of several fields."""

    name: str
    text: str

    def of(self, **labels: str) -> Metric:
        return Metric(self.name, self.text, tuple(labels.items()))

    def named_by(self, label: str, field: str) -> Metric:
        return Metric(self.name, self.text, named_by=(label, field))


#: marks a field that counts from the engine's start
COUNTS = "counts"
Gauge = Annotated[int, Meta(ge=0, lt=1 << 48)]
Counter = Annotated[int, Meta(ge=0, lt=1 << 48), COUNTS]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
Words = Annotated[str, Meta(max_length=MAX_PROBLEM_CHARS)]
#: what an engine that takes requests does, or how far its end is
State = Literal[Doing, "draining", "closing", "closed", "failed"]

_BLOCKS = _Family("fdasync_kv_blocks", "KV blocks by tier; idle: cached, and no sample uses them.")
_SLOTS = _Family("fdasync_row_slots", "Places of rows.")
_PLACES = _Family("fdasync_snapshot_places", "Places for snapshots of recurrent state, by tier.")
_HITS = _Family("fdasync_hit_tokens_total", "Prompt tokens that were not computed, by the tier that had them.")
_EVICTIONS = _Family("fdasync_evictions_total", "Blocks that made room, by tier.")
_SWAPPED = _Family("fdasync_swapped_blocks_total", "in: from host to device.")
_SNAPSHOTS = _Family("fdasync_snapshots_total", "What became of snapshots.")
_LEASES = _Family("fdasync_leases_total", "Leases that were asked for here, by outcome.")
_DRAFTED = _Family("fdasync_drafted_tokens_total", "Drafts that the runner forwarded.")
_ACCEPTED = _Family("fdasync_accepted_tokens_total", "Drafts that equalled the sampled token.")
_DRAFTING = _Family("fdasync_drafting_steps_total", "Steps that had drafts.")


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler counts.

    Attributes:
        waiting: samples that wait to be computed.
        running: samples that hold blocks, and may still have a step planned or in flight.
        steps: completed steps.
        used_blocks: device blocks that samples or copies use.
        idle_blocks: device blocks with content that no sample uses.
        free_blocks: device blocks without content.
        preemptions: how often a sample gave its blocks up for others.
        evictions: blocks that left the device to make room.
        finished: samples that ended.
        generated_tokens: output tokens of ended samples.
        dropped_tokens: tokens sampled for samples that had ended already (overrun).
        late_aborts: aborts of samples that were unknown or had ended.
        prompt_tokens: of admitted samples, at their first admission only.
        hit_tokens_device: tokens among `prompt_tokens` that were found on the device.
        hit_tokens_host: tokens among `prompt_tokens` that were found on the host.
        hit_tokens_store: tokens among `prompt_tokens` that were found in the store.
        used_slots: places of rows with content.
        free_slots: places of rows without content; both are 0 without capture.
        used_host_blocks: blocks of the host tier with content.
        free_host_blocks: blocks of the host tier without content.
        host_evictions: blocks that left the host to make room.
        swapped_in_blocks: blocks copied from host to device.
        swapped_out_blocks: blocks copied from device to host.
        fetched_blocks: blocks read from the store in time.
        late_fetched_blocks: blocks read from the store after the wait for them had ended.
        written_blocks: blocks that the store took.
        dropped_writes: blocks that should have been kept or written, and were not.
        forgotten_blocks: blocks that the store was believed to have, and had not when it was asked.
        fetch_cut_offs: lookups and fetches whose wait ended at its deadline.
        moving: copies between device and host in flight.
        writing: blocks that are being written to the host or the store, or queued for it.
        waiting_for_store: lookups and fetches in flight.
        late_transfers: transfers that go on although the wait for them has ended; they hold blocks.
        reserved_blocks: free and idle blocks that are promised to leases, and not taken yet.
        leased: samples that wait for blocks of another instance, or in line for room for them.
        leases_granted: leases that other instances got here.
        leases_denied: leases that other instances did not get here.
        leases_dropped: leases that ended unused.
        received_blocks: blocks that came from other instances, checked.
        hand_offs: groups of samples on their way to another instance.
        queued_tokens: prompt tokens of the waiting samples.
        paused: no steps are planned.
        weight_version: the caller's label of the weights in use.
        drafter: name of the drafter that steps have drafts of; "": there is none, or the runner alone drafts.
        drafted_tokens: drafts of the drafter that the runner forwarded.
        accepted_tokens: drafts that equalled the token sampled in their place.
        drafting_steps: completed steps that had drafts.
        own_drafter: name of the runner's own drafter.
        own_drafted_tokens: as `drafted_tokens`, of the runner's own drafter.
        own_accepted_tokens: as `accepted_tokens`, of the runner's own drafter.
        own_drafting_steps: as `drafting_steps`, of the runner's own drafter.
        used_snapshots: places of snapshots of recurrent state on the device with content.
        free_snapshots: such places on the device without content.
        used_host_snapshots: such places on the host with content.
        free_host_snapshots: such places on the host without content.
        taken_snapshots: snapshots that steps took.
        resumed_snapshots: samples that started from one.
        lost_snapshots: snapshots that were evicted from their last place.
        refused_snapshots: snapshots that were not taken, since every place was in use.
    """

    waiting: Annotated[Gauge, Metric("fdasync_samples_waiting")] = 0
    running: Annotated[Gauge, Metric("fdasync_samples_running")] = 0
    steps: Counter = 0
    used_blocks: Annotated[Gauge, _BLOCKS.of(tier="device", state="used")] = 0
    idle_blocks: Annotated[Gauge, _BLOCKS.of(tier="device", state="idle")] = 0
    free_blocks: Annotated[Gauge, _BLOCKS.of(tier="device", state="free")] = 0
    preemptions: Counter = 0
    evictions: Annotated[Counter, _EVICTIONS.of(tier="device")] = 0
    finished: Annotated[Counter, Metric("fdasync_samples_ended_total")] = 0
    generated_tokens: Counter = 0
    dropped_tokens: Annotated[Counter, Metric("fdasync_overrun_tokens_total")] = 0
    late_aborts: Counter = 0
    prompt_tokens: Counter = 0
    hit_tokens_device: Annotated[Counter, _HITS.of(tier="device")] = 0
    hit_tokens_host: Annotated[Counter, _HITS.of(tier="host")] = 0
    hit_tokens_store: Annotated[Counter, _HITS.of(tier="store")] = 0
    used_slots: Annotated[Gauge, _SLOTS.of(state="used")] = 0
    free_slots: Annotated[Gauge, _SLOTS.of(state="free")] = 0
    used_host_blocks: Annotated[Gauge, _BLOCKS.of(tier="host", state="used")] = 0
    free_host_blocks: Annotated[Gauge, _BLOCKS.of(tier="host", state="free")] = 0
    host_evictions: Annotated[Counter, _EVICTIONS.of(tier="host")] = 0
    swapped_in_blocks: Annotated[Counter, _SWAPPED.of(direction="in")] = 0
    swapped_out_blocks: Annotated[Counter, _SWAPPED.of(direction="out")] = 0
    fetched_blocks: Annotated[Counter, Metric("fdasync_store_fetched_blocks_total")] = 0
    late_fetched_blocks: Annotated[Counter, Metric("fdasync_store_late_fetched_blocks_total")] = 0
    written_blocks: Annotated[Counter, Metric("fdasync_store_written_blocks_total")] = 0
    dropped_writes: Annotated[Counter, Metric("fdasync_store_dropped_writes_total")] = 0
    forgotten_blocks: Annotated[Counter, Metric("fdasync_store_forgotten_blocks_total")] = 0
    fetch_cut_offs: Annotated[Counter, Metric("fdasync_store_fetch_cut_offs_total")] = 0
    moving: Annotated[Gauge, Metric("fdasync_swaps_in_flight")] = 0
    writing: Annotated[Gauge, Metric("fdasync_store_writing_blocks")] = 0
    waiting_for_store: Annotated[Gauge, Metric("fdasync_store_waits")] = 0
    late_transfers: Annotated[Gauge, Metric("fdasync_store_late_transfers_held")] = 0
    reserved_blocks: Gauge = 0
    leased: Annotated[Gauge, Metric("fdasync_samples_leased")] = 0
    leases_granted: Annotated[Counter, _LEASES.of(state="granted")] = 0
    leases_denied: Annotated[Counter, _LEASES.of(state="denied")] = 0
    leases_dropped: Annotated[Counter, _LEASES.of(state="dropped")] = 0
    received_blocks: Counter = 0
    hand_offs: Gauge = 0
    queued_tokens: Gauge = 0
    paused: bool = False
    weight_version: Annotated[
        str, Meta(max_length=MAX_VERSION_CHARS), Metric(text="1 for the label of the weights in use.", word="version")
    ] = "0"
    drafter: Name = ""
    drafted_tokens: Annotated[Counter, _DRAFTED.named_by("drafter", "drafter")] = 0
    accepted_tokens: Annotated[Counter, _ACCEPTED.named_by("drafter", "drafter")] = 0
    drafting_steps: Annotated[Counter, _DRAFTING.named_by("drafter", "drafter")] = 0
    own_drafter: Name = ""
    own_drafted_tokens: Annotated[Counter, _DRAFTED.named_by("drafter", "own_drafter")] = 0
    own_accepted_tokens: Annotated[Counter, _ACCEPTED.named_by("drafter", "own_drafter")] = 0
    own_drafting_steps: Annotated[Counter, _DRAFTING.named_by("drafter", "own_drafter")] = 0
    used_snapshots: Annotated[Gauge, _PLACES.of(tier="device", state="used")] = 0
    free_snapshots: Annotated[Gauge, _PLACES.of(tier="device", state="free")] = 0
    used_host_snapshots: Annotated[Gauge, _PLACES.of(tier="host", state="used")] = 0
    free_host_snapshots: Annotated[Gauge, _PLACES.of(tier="host", state="free")] = 0
    taken_snapshots: Annotated[Counter, _SNAPSHOTS.of(outcome="taken")] = 0
    resumed_snapshots: Annotated[Counter, _SNAPSHOTS.of(outcome="resumed")] = 0
    lost_snapshots: Annotated[Counter, _SNAPSHOTS.of(outcome="lost")] = 0
    refused_snapshots: Annotated[Counter, _SNAPSHOTS.of(outcome="refused")] = 0

    @property
    def num_blocks(self) -> int:
        """All device blocks."""
        return self.used_blocks + self.idle_blocks + self.free_blocks

    @property
    def num_host_blocks(self) -> int:
        """All blocks of the host tier; 0: there is none."""
        return self.used_host_blocks + self.free_host_blocks

    @property
    def num_slots(self) -> int:
        """All places of rows; 0 without capture."""
        return self.used_slots + self.free_slots

    @property
    def num_snapshots(self) -> int:
        """All places of snapshots on the device; 0 for a model that has KV alone."""
        return self.used_snapshots + self.free_snapshots

    @property
    def num_host_snapshots(self) -> int:
        """All places of snapshots on the host."""
        return self.used_host_snapshots + self.free_host_snapshots

    @property
    def hit_tokens(self) -> int:
        """Tokens among `prompt_tokens` that some tier had."""
        return self.hit_tokens_device + self.hit_tokens_host + self.hit_tokens_store


class TapStats(msgspec.Struct, frozen=True, kw_only=True):
    """One tap of an engine's configuration.

    Attributes:
        name: in the configuration.
        delivered: events that the tap took.
        dropped: events that the tap lost because too many waited.
        pending: events that wait for the tap now.
        problem: the error that ended the tap, or that it did not end when it was cancelled; "" while it runs, and when
            it ended by itself.
    """

    name: Name
    delivered: Counter = 0
    dropped: Counter = 0
    pending: Gauge = 0
    problem: Words = ""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges of an engine now, and counters since its start.

    Attributes:
        state: what the engine does, in one word (`request.Doing`), and from its last requests on, how far its end is:
            "draining" lets live requests end.
        live: samples inside.
        live_tokens: tokens sampled for requests that have not ended.
        waiting_for_place: requests that wait until fewer samples than `max_requests` are live.
        steps_in_flight: steps launched and not completed.
        updating: a weight update is under way.
        reloadable: a wake can load the weights in use again after a sleep has dropped them: they came from a checkpoint
            folder, with at most 64 deltas since.
        released: the parts of the device's memory that a sleep has released ("weights", "kv_cache", "cuda_graph").
        loop_late_max_s: the longest that the engine's loop was held up.
        refused_writes: blocks that the store did not take.
        refused_why: the store's words about the latest refusal, e.g. how much room it needs and how much there is.
        store_problem: why the store is left alone for now; "" while it is used, and where there is none.
        scheduler: what the scheduler counts.
        taps: the taps that the configuration names.
    """

    state: Annotated[State, Metric("fdasync_engine_state", "1 for what the engine does.", word="state")] = "running"
    live: Annotated[Gauge, Metric("fdasync_samples_live")] = 0
    live_tokens: Gauge = 0
    waiting_for_place: Annotated[Gauge, Metric("fdasync_requests_waiting_for_place")] = 0
    steps_in_flight: Gauge = 0
    updating: bool = False
    reloadable: bool = False
    released: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    loop_late_max_s: Seconds = 0.0
    refused_writes: Annotated[Counter, Metric("fdasync_store_refused_writes_total")] = 0
    refused_why: Words = ""
    store_problem: Words = ""
    scheduler: SchedulerStats = SchedulerStats()
    taps: Annotated[tuple[TapStats, ...], Meta(max_length=256)] = ()

    @property
    def doing(self) -> Doing:
        """What the engine does; "running" while it ends."""
        match self.state:
            case "draining" | "closing" | "closed" | "failed":
                return "running"
            case doing:
                return doing

    @property
    def tokens(self) -> int:
        """Tokens sampled so far."""
        return self.scheduler.generated_tokens + self.live_tokens

    @property
    def tap_problem(self) -> str:
        """Which taps ended, and why; "" while all run."""
        return "; ".join([f"{tap.name}: {tap.problem}" for tap in self.taps if tap.problem])

    @property
    def dropped_events(self) -> int:
        """Events that the taps lost."""
        return sum([tap.dropped for tap in self.taps])


def cut(text: str) -> str:
    """What an exception says, as stats may hold it."""
    return text[:MAX_PROBLEM_CHARS].encode(errors="replace").decode()


T = TypeVar("T", bound=msgspec.Struct)


def summed(parts: Sequence[EngineStats]) -> EngineStats:
    """The numbers of several engines together, and of taps of one name. The state is the one nearest to running; flags
    and the longest time hold for any; each text and name is there once, in 256 characters where there are several."""
    return _summed(parts) if parts else EngineStats()


def _summed(parts: Sequence[T]) -> T:
    def together(name: str) -> Any:
        first, *_ = values = [getattr(part, name) for part in parts]
        if name == "state":
            return min(values, key=get_args(State).index)
        if name == "taps":
            named: dict[str, list[TapStats]] = {}
            for tap in chain(*values):
                named.setdefault(tap.name, []).append(tap)
            return tuple(map(_summed, named.values()))
        if isinstance(first, msgspec.Struct):
            return _summed(values)
        if isinstance(first, tuple):
            return tuple(dict.fromkeys(chain(*values)))
        if isinstance(first, str):
            texts = list(filter(None, dict.fromkeys(values)))
            return ", ".join(texts)[:MAX_VERSION_CHARS] if len(texts) > 1 else "".join(texts)
        return max(values) if isinstance(first, bool | float) else sum(values)

    return type(parts[0])(**{name: together(name) for name in type(parts[0]).__struct_fields__})
