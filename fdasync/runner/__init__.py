"""The contract of runners, the batch of lanes that runners keep, and a runner that computes arithmetic, no model.

The engine launches steps by the contract and knows no model; `runner/worker` runs any runner in a process of its own.
"""

from fdasync.result import TopLogprobs
from fdasync.runner.base import Capacity, Runner, RunnerLimits, StepOutput

__all__ = ["Capacity", "Runner", "RunnerLimits", "StepOutput", "TopLogprobs"]
