"""The pure core: events in, actions out."""

from fdasync.scheduler.config import LeaseRules, SchedulerConfig, SchedulerStats
from fdasync.scheduler.core import Scheduler

__all__ = ["LeaseRules", "Scheduler", "SchedulerConfig", "SchedulerStats"]
