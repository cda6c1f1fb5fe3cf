"""Times of fleets in real time: of real links and processes, which a busy machine must not make late.

For tests of what a fleet does; those of silence and of late answers bring times of their own, or play in virtual time.
Knows nothing of fleets. Called by tests.
"""

from __future__ import annotations

from fdasync.pd.link.session import LinkConfig
from fdasync.scheduler.state.config import LeaseRules

# a machine is busy for less
_PATIENCE_S = 300.0

#: of instances and routers; one that says goodbye, or whose process ends, is lost at once all the same
LINKS = LinkConfig(lost_s=_PATIENCE_S, deaf_s=_PATIENCE_S)

#: of the configurations of prefill and decode instances
LEASES = LeaseRules(
    silent_s=_PATIENCE_S, queue_s=_PATIENCE_S, find_s=_PATIENCE_S, total_s=2 * _PATIENCE_S, ttl_s=_PATIENCE_S,
    max_ttl_s=_PATIENCE_S, receive_s=_PATIENCE_S,
)  # fmt: skip
