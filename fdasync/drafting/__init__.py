"""Guesses the next tokens of sequences that decode, and how many guesses pay. Pure; knows no scheduler."""

from fdasync.drafting.base import Drafter, DrafterLimits, DrafterStats
from fdasync.drafting.own_budget import OwnBudget
from fdasync.drafting.planning import Beginning, DraftCounters, DraftPlanner
from fdasync.drafting.plugins import drafter_class, make_drafter
from fdasync.drafting.speculation import RUNNERS_OWN, Speculation

__all__ = [
    "RUNNERS_OWN",
    "Beginning",
    "DraftCounters",
    "DraftPlanner",
    "Drafter",
    "DrafterLimits",
    "DrafterStats",
    "OwnBudget",
    "Speculation",
    "drafter_class",
    "make_drafter",
]
