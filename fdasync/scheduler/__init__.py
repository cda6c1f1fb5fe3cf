"""The pure core: it takes events and returns actions. `engine/driver.py` calls it once per turn."""

from fdasync.scheduler.core import Scheduler
from fdasync.scheduler.state.config import LeaseRules, SchedulerConfig, SchedulerStats
from fdasync.scheduler.state.policy import Candidate, Order, Policy

__all__ = ["Candidate", "LeaseRules", "Order", "Policy", "Scheduler", "SchedulerConfig", "SchedulerStats"]
