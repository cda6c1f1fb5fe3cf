"""The pure core, which takes events and returns actions; `engine/driver.py` calls it once in each turn of the loop."""

from fdasync.scheduler.core import Scheduler
from fdasync.scheduler.make import make_scheduler
from fdasync.scheduler.state.config import LeaseRules, SchedulerConfig
from fdasync.scheduler.state.policy import Candidate, Order, Policy

__all__ = ["Candidate", "LeaseRules", "Order", "Policy", "Scheduler", "SchedulerConfig", "make_scheduler"]
