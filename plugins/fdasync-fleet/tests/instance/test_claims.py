"""Which of several routers may change an instance, and which call ends its claim."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fdasync_fleet.instance.peer_verbs import Claims

from fdasync.errors import UpdateUnderWay


async def test_a_call_ends_the_claim_of_its_own_change_alone() -> None:
    claims = Claims()
    first, second = (SimpleNamespace(name=name, is_up=True) for name in "ab")
    # a wake that is late, which claims nothing, and ends in the midst of the next one
    late = claims.of(first, "wake")
    claims.take(first, "wake", 10.0)
    claims.release(first, late)
    # weights that the instance lacked
    claims.release(first, claims.of(first, "update_weights"))
    with pytest.raises(UpdateUnderWay, match="of a"):
        claims.check(second)
    claims.release(first, claims.of(first, "wake"))
    claims.take(second, "update_weights", 10.0)
    assert (claims.of(first, "wake"), claims.of(second, "update_weights")) == (0, 2)
