"""Transports are plugins."""

from __future__ import annotations

import pytest
from fdasync_fleet.transfer.base import Transport
from fdasync_fleet.transfer.plugins import TransportSpec, make_transport

from fdasync.errors import PluginError
from fdasync.registry.registry import TRANSPORTS
from tests.test_registry import context

__all__ = ["context"]


def test_a_transport_is_made_without_arguments_and_configuration(context):
    context("fdasync-plug", TRANSPORTS, greedy="plugmod:Greedy", configured="plugmod:Configured", other="plugmod:Good")
    assert isinstance(make_transport(TransportSpec("shm")), Transport)
    for name, problem in (
        ("greedy", "cannot be made without arguments"),
        ("configured", "has no config_type"),
        ("other", "is not a Transport class"),
    ):
        with pytest.raises(PluginError, match=problem):
            make_transport(TransportSpec(name))
