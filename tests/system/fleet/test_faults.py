"""Faults of transports are counted."""

from __future__ import annotations

from random import Random

import pytest
from fdasync_fleet.testing.sim.transport import SimFabric, SimFaults


def test_faults_of_transports_are_counted_too():
    fabric = SimFabric(Random(1), SimFaults(corrupt=1.0, stall=1e-9))
    with pytest.raises(AssertionError, match=r"never struck: corrupt, stall \(struck: corrupt 0, fail 0, stall 0\)"):
        fabric.assert_struck()
    assert fabric.strikes("corrupt")
    fabric.assert_struck("corrupt")
    with pytest.raises(AssertionError, match="never struck: stall"):
        fabric.assert_struck()
    fabric.faults = SimFaults()
    with pytest.raises(AssertionError, match="no fault of transports was planned"):
        fabric.assert_struck()
