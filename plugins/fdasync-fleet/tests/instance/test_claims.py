"""Which of several routers may change an instance, and which call ends its claim."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fdasync_fleet.instance.peer_verbs import Claims

from fdasync.errors import UpdateUnderWay


async def test_a_call_that_began_before_a_claim_does_not_end_it():
    claims = Claims()
    first, second = (SimpleNamespace(name=name, is_up=True) for name in "ab")
    # a wake of a router that claims nothing for it
    late = claims.of(first)
    claims.take(first, 10.0)
    claims.release(first, late)
    with pytest.raises(UpdateUnderWay, match="of a"):
        claims.take(second)
    claims.release(first, claims.of(first))
    claims.take(second, 10.0)
    assert (claims.of(first), claims.of(second)) == (0, 2)
