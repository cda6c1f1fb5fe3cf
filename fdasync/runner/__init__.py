"""Runners: the contract, and what every runner shares."""

from fdasync.result import TopLogprobs
from fdasync.runner.base import Capacity, Runner, RunnerLimits, StepOutput

__all__ = ["Capacity", "Runner", "RunnerLimits", "StepOutput", "TopLogprobs"]
