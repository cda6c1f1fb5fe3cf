"""Runners: the contract, and what every runner shares."""

from fdasync.runner.base import Capacity, Runner, RunnerLimits, StepOutput, TopLogprobs

__all__ = ["Capacity", "Runner", "RunnerLimits", "StepOutput", "TopLogprobs"]
