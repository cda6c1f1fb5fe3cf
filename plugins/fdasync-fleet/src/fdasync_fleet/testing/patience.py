"""Limits of links and leases for tests with real links and processes: a busy machine must not make an answer late.

Tests of silence and of late answers have limits of their own, or play in virtual time. Called by tests.
"""

from __future__ import annotations

from fdasync.scheduler.state.config import LeaseRules
from fdasync_fleet.link.session import LinkConfig

# even on a busy machine an answer takes less
_PATIENCE_S = 300.0

#: of instances and routers; a peer that says goodbye, or whose process ends, is lost at once all the same
LINKS = LinkConfig(lost_s=_PATIENCE_S, deaf_s=_PATIENCE_S)

#: of the configurations of prefill and decode instances
LEASES = LeaseRules(
    silent_s=_PATIENCE_S, queue_s=_PATIENCE_S, find_s=_PATIENCE_S, total_s=2 * _PATIENCE_S, ttl_s=_PATIENCE_S,
    max_ttl_s=_PATIENCE_S, receive_s=_PATIENCE_S,
)  # fmt: skip
