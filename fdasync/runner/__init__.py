"""Runners: the contract, the input batch that they share, and a runner of arithmetic."""

from fdasync.result import TopLogprobs
from fdasync.runner.base import Capacity, Runner, RunnerLimits, StepOutput

__all__ = ["Capacity", "Runner", "RunnerLimits", "StepOutput", "TopLogprobs"]
