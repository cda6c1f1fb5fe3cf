"""An instance's error is the same kind of error at the router."""

from __future__ import annotations

from types import SimpleNamespace

from fdasync_fleet.router.weights.replies import error_of

from fdasync.errors import Asleep


def test_an_instance_that_sleeps_is_told_as_asleep() -> None:
    instance = SimpleNamespace(peer=SimpleNamespace(name="d0"))
    error = error_of(instance, SimpleNamespace(error="Asleep", problem="sleeps", field=""))
    assert isinstance(error, Asleep)
    assert "d0" in str(error)
