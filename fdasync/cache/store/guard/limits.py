"""What a guard allows a store; an engine makes it of its configuration."""

from __future__ import annotations

import msgspec


class GuardLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a guard allows a store.

    Attributes:
        call_s: deadline of a call, in seconds; and how long a call may wait in line before.
        open_s: deadline of `open`, in seconds.
        kill_s: how long a call or an `open` may run at all, in seconds, but never less than its deadline: then the
            store is killed. None: without limit.
        reap_s: how much longer than the closing deadline the store's process may take to be gone, in seconds; 0: it has
            none.
        max_calls: most calls of the store at a time.
        max_nbytes: most bytes of their parts; a single call that has more runs alone.
        failures: calls in a row that failed for now, of a batch all items, until the breaker opens.
        retry_s: from the breaker's opening to the first probe, in seconds; doubles with each probe that fails.
        max_retry_s: never longer than this, in seconds.
        required: a store that cannot be opened is an error of `open`; else the breaker opens the store later.
    """

    call_s: float
    open_s: float = 60.0
    kill_s: float | None = None
    reap_s: float = 0.0
    max_calls: int = 8
    max_nbytes: int = 256 << 20
    failures: int = 3
    retry_s: float = 1.0
    max_retry_s: float = 60.0
    required: bool = True
