"""Instances and a router on hosts of their own, over delay, loss and cuts: exact, or an error that allows a retry."""

from __future__ import annotations

import json
import time
from itertools import product
from typing import TYPE_CHECKING

import pytest

from tests.system.network.fleets import A, B, check, fleet
from tests.system.network.hosts import NETWORKS, Host, Wire, join, why_no_cable, why_not

if TYPE_CHECKING:
    from pathlib import Path

_REASON, _NO_CABLE = why_not(), why_no_cable()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
_cable = pytest.mark.skipif(_NO_CABLE is not None, reason=str(_NO_CABLE))


@pytest.mark.ci
@pytest.mark.parametrize(
    "network",
    [
        "region",
        pytest.param("lan", marks=[_cable, pytest.mark.nightly]),
        pytest.param("near", marks=pytest.mark.nightly),
        pytest.param("far", marks=pytest.mark.nightly),
    ],
)
def test_requests_and_updates_are_exact_over_a_network(tmp_path: Path, network: str) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "weights.json").write_text(json.dumps({"weights_id": 7}))
    a, b = Host(), Host()
    with fleet(tmp_path, a, b, join(network, a, b, A, B, seed=1), weights=str(weights)) as load:
        load.update()
        time.sleep(0.5)  # the load goes on meanwhile
        found = load.end()
    check(found)
    # the update ends what runs
    assert set(found["ends"]) <= {"length", "abort"}, found
    assert found["ends"]["length"] > 2
    assert found["weights"] == ["new"]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("directions", "cut_s", "beside"),
    [
        (("ab", "ba"), 1.0, "decode"),
        *[
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in product((("ab", "ba"), ("ab",), ("ba",)), (1.0, 5.0, 40.0), ("decode", "prefill"))
            if case != (("ab", "ba"), 1.0, "decode")
        ],
    ],
)
def test_a_cut_hangs_nothing_and_heals(tmp_path: Path, directions: tuple[str, ...], cut_s: float, beside: str) -> None:
    """The router is cut off from the instance that it is not beside."""
    delay_s, loss, rate_mbit = NETWORKS["region"]
    a, b = Host(), Host()
    wire = Wire(a, b, A, B, delay_s=delay_s, loss=loss, rate_mbit=rate_mbit, seed=2)
    with fleet(tmp_path, a, b, wire, router=a if beside == "prefill" else b) as load:
        wire.cut(*directions)
        time.sleep(cut_s)  # so long is the cut
        wire.cut()
        found = load.end()
    check(found)
    assert found["ends"]["length"] > 1
    assert found["healed_s"] < 20.0


@pytest.mark.nightly
def test_blocks_cross_by_mooncakes_engine(tmp_path: Path) -> None:
    try:
        from fdasync_mooncake.testing import why_not as no_mooncake
    except ImportError as error:
        pytest.skip(f"plugins/fdasync-mooncake is not installed: {error}")
    if reason := no_mooncake():
        pytest.skip(reason)
    a, b = Host(), Host()
    wire = Wire(a, b, A, B, delay_s=0.002, loss=0.01, seed=1)
    with fleet(tmp_path, a, b, wire, transport=("mooncake", "--trusted-network")) as load:
        time.sleep(1.0)  # the load goes on meanwhile
        wire.cut("ab", "ba")
        time.sleep(1.0)  # the length of the cut
        wire.cut()
        found = load.end()
    check(found)
