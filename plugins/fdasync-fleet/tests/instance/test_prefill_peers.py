"""Decode instances that are gone: a prefill instance does not call them for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fdasync_fleet.instance.prefill_service import PrefillService


class Dialed:
    """A peer as `PrefillService` sees it."""

    def __init__(self, address: str, *, is_up: bool) -> None:
        self.address, self.is_up = address, is_up


class Lines:
    """Links that write down whom they hung up."""

    def __init__(self) -> None:
        self.hung_up: list[str] = []

    def hang_up(self, peer: Any) -> None:
        self.hung_up.append(peer.address)


@pytest.mark.parametrize(("address", "is_up", "wanted", "forgotten"), [
    ("ipc:///run/d0", False, False, True),
    ("ipc:///run/d0", True, False, False),
    ("ipc:///run/d0", False, True, False),
    ("ipc:///run/kept", False, False, False),
])  # fmt: skip
def test_a_peer_that_is_gone_and_not_wanted_is_forgotten(
    address: str, is_up: bool, wanted: bool, forgotten: bool
) -> None:
    context: Any = SimpleNamespace(links=Lines())
    prefill_service = PrefillService(context, ["ipc:///run/kept"])
    peer: Any = Dialed(address, is_up=is_up)
    if wanted:
        # under a lease of which the end is being told
        lease: Any = SimpleNamespace(peer=peer, over=True)
        prefill_service._by_name["r", 0] = lease
    prefill_service.on_lost(peer, "it said goodbye")
    assert context.links.hung_up == ([address] if forgotten else [])
