"""What the note of the self-check says."""

from __future__ import annotations

from fdasync_transformers.start.selfcheck import explained

FIGURES = "self-check: relative logit error 4.4e-03 median, 7.4e-02 worst, routing equal at 99.26%"


def test_routing_that_is_not_equal_everywhere_is_explained() -> None:
    assert explained(FIGURES, 0.9926).startswith(f"{FIGURES}; elsewhere other experts were as good up to rounding")
    assert explained(FIGURES, 1.0) == FIGURES
