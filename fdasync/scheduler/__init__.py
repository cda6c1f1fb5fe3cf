"""The pure core: events in, actions out."""

from fdasync.scheduler.config import SchedulerConfig, SchedulerStats
from fdasync.scheduler.core import Scheduler

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerStats"]
