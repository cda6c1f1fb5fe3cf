"""The pure core: events in, actions out."""

from fdasync.scheduler.core import Scheduler
from fdasync.scheduler.state.config import LeaseRules, SchedulerConfig, SchedulerStats

__all__ = ["LeaseRules", "Scheduler", "SchedulerConfig", "SchedulerStats"]
