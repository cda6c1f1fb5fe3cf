"""Guesses the next tokens of sequences that decode, and how many guesses pay. Pure; knows no scheduler."""

from fdasync.drafting.base import Drafter, DrafterLimits, DrafterStats
from fdasync.drafting.planning import DraftCounters, DraftPlanner
from fdasync.drafting.plugins import make_drafter
from fdasync.drafting.speculation import Speculation

__all__ = [
    "DraftCounters",
    "DraftPlanner",
    "Drafter",
    "DrafterLimits",
    "DrafterStats",
    "Speculation",
    "make_drafter",
]
