"""Makes a scheduler: the one place that says which attachments it has, and in which order they are asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.scheduler.core import Scheduler
from fdasync.scheduler.disagg.decode import DecodeSide
from fdasync.scheduler.disagg.prefill import PrefillSide
from fdasync.scheduler.drafts import StepDrafts
from fdasync.scheduler.state.policy import own_policy
from fdasync.scheduler.tiers.parts import Parts
from fdasync.scheduler.tiers.snapshot_planner import SnapshotPlanner

if TYPE_CHECKING:
    from fdasync.drafting import Drafter
    from fdasync.scheduler.state.attachment import Attachment
    from fdasync.scheduler.state.config import SchedulerConfig
    from fdasync.scheduler.state.policy import Policy


def make_scheduler(
    config: SchedulerConfig,
    policy: Policy | None = None,
    drafter: Drafter | None = None,
    more: tuple[Attachment, ...] = (),
) -> Scheduler:
    """A scheduler that knows nothing yet.

    Args:
        policy: the policy that `config` names; None: it is one of the package's own.
        drafter: the drafter that `config` names, made with `drafter_limits`; None: it is made here, which raises
            PluginError and ConfigError.
        more: attachments that are asked behind the scheduler's own. A trace does not name them: it replays with equal
            ones only.
    """
    parts = Parts(config)
    policy = policy or own_policy(config.policy, config.policy_config)
    return Scheduler(parts, policy, (*own_attachments(parts, drafter), *more))


def own_attachments(parts: Parts, drafter: Drafter | None) -> tuple[Attachment, ...]:
    """The attachments that the configuration asks for. Their order is part of every trace: in it blocks go back, and
    actions come."""
    config, snapshots = parts.config, parts.index.pool.snapshots
    found: list[Attachment] = [] if snapshots is None else [SnapshotPlanner(parts, snapshots)]
    if config.drafter or config.own_drafter:
        found.append(StepDrafts(config, drafter))
    return (*found, PrefillSide(parts), DecodeSide(parts))
