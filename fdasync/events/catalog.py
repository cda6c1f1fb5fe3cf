"""Every event in the system, on one page, in the past tense.

Frozen, tagged structs that carry all the scheduler reads (token ids, lengths, block keys) and no
tensors, rows or text, so that a ring can keep them and a trace can replay them. `at` (engine seconds)
and `seq` are stamped by `EventBus.publish` and by nobody else; tests that call the scheduler directly
give `at` themselves.
"""

from __future__ import annotations

import msgspec

from fdasync.request import SamplerSpec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all events. Defaults are left out of traces: JSON has no word for a deadline that is infinite.

    Attributes:
        at: engine time in seconds, stamped at publish.
        seq: number of the event within its engine, stamped at publish.
    """

    at: float = 0.0
    seq: int = 0


class RequestPrepared(Event, frozen=True, kw_only=True):
    """One sample of a request is valid, tokenised and hashed, and waits to be scheduled.

    Attributes:
        key: internal number of the sample; never repeats within an engine.
        group: key of the first sample of the same request.
        tokens: prompt token ids.
        block_keys: chained identity of each full prompt block (empty: prefix cache off).
        max_tokens: most new tokens.
        min_tokens: fewer are never ended by a stop id.
        stop_ids: ids that end it, EOS included.
        priority: higher is served first and preempted last.
        deadline: engine time at which it ends with reason "deadline".
        emits: its tokens are wanted as they come (a stream, stop strings, log-probs).
        checks_stops: it has stop strings; `output.py` answers every emit.
        start: first position whose aux rows are wanted; -1: none are.
        sampler: for the runner.
        namespace: root key it was hashed under.
    """

    key: int
    group: int
    tokens: tuple[int, ...]
    block_keys: tuple[bytes, ...]
    max_tokens: int
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    deadline: float = float("inf")
    emits: bool = False
    checks_stops: bool = False
    start: int = -1
    sampler: SamplerSpec
    namespace: bytes = b""


class AbortRequested(Event, frozen=True, kw_only=True):
    """The caller left, or called abort. Unknown and ended keys are counted, never an error."""

    keys: tuple[int, ...]


class StepDone(Event, frozen=True, kw_only=True):
    """A step completed: its KV, its aux rows and its tokens are there.

    Attributes:
        step_id: as in `RunStep`.
        tokens: one per sampled sequence, in the order `RunStep` defines.
    """

    step_id: int
    tokens: tuple[int, ...]


class StepFailed(Event, frozen=True, kw_only=True):
    """A step ended without a result. Fails the engine; kept for the trace."""

    step_id: int
    problem: str


class StopMatched(Event, frozen=True, kw_only=True):
    """A stop string was found: the request keeps this many output tokens."""

    key: int
    keep_tokens: int


class StopChecked(Event, frozen=True, kw_only=True):
    """The first `num_tokens` output tokens hold no stop string."""

    key: int
    num_tokens: int


class TimerFired(Event, frozen=True, kw_only=True):
    """The time of the last `WakeAt` has come."""


AnyEvent = RequestPrepared | AbortRequested | StepDone | StepFailed | StopMatched | StopChecked | TimerFired
