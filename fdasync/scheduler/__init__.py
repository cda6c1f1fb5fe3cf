"""The pure core: events in, actions out."""

from fdasync.scheduler.core import Scheduler, SchedulerConfig, SchedulerStats

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerStats"]
