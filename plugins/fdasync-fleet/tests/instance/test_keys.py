"""A fleet over tcp with keys: prefill, decode and router are let in, hand over blocks, and nobody else comes."""

from __future__ import annotations

import asyncio
import socket

import pytest
from fdasync_fleet.link.keys import load_keys, new_keys, save_keys
from fdasync_fleet.router.config import RouterConfig

import fdasync
from fdasync import Instance, SamplingParams
from fdasync.errors import ConfigError, DeadlineExceeded
from fdasync.events.catalog import ConnectionsRefused
from fdasync.testing import synthetic_config

PROMPT = tuple(range(40))


@pytest.fixture
def keys(tmp_path):
    """A fleet's keys, as they come from their file."""
    save_keys(tmp_path / "fleet.json", new_keys(), replace=False)
    return load_keys(tmp_path / "fleet.json")


@pytest.fixture
def host():
    """This machine's address on its network; the loopback if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # sends nothing: asks for the route
        return "127.0.0.1" if probe.connect_ex(("192.0.2.1", 9)) else probe.getsockname()[0]


@pytest.mark.ci
@pytest.mark.parametrize("encrypts", [False, True])
async def test_a_keyed_fleet_hands_over_and_lets_nobody_else_in(keys, host, encrypts):
    options = {"listen": f"tcp://{host}:*", "transport": "tcp", "keys": keys, "encrypt_blocks": encrypts}
    async with (
        Instance(synthetic_config(role="decode"), **options) as decode,
        Instance(synthetic_config(role="prefill"), **options) as prefill,
    ):
        refusals = decode.engine.bus.subscribe(ConnectionsRefused)
        addresses = [prefill.address, decode.address]
        async with fdasync.connect(addresses, RouterConfig(require="all"), keys=keys) as router:
            result = await router.complete(PROMPT, params=SamplingParams(max_tokens=8))
            assert result.samples[0].finish_reason == "length"
            assert decode.engine.stats().scheduler.received_blocks > 0
            if not host.startswith("127."):
                with pytest.raises(ConfigError, match="neither ipc nor loopback"):
                    await fdasync.connect(addresses).start()
            with pytest.raises(DeadlineExceeded):
                await fdasync.connect(addresses, RouterConfig(connect_s=0.5), keys=new_keys()).start()
            async with asyncio.timeout(300):
                event = await anext(refusals)
            assert isinstance(event, ConnectionsRefused)
            assert (event.address, event.count > 0) == (decode.address, True)
            result = await router.complete(PROMPT, params=SamplingParams(max_tokens=8))
            assert result.samples[0].finish_reason == "length"
        refusals.close()


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:*", "ipc:///tmp/fdasync-none"])
def test_blocks_are_encrypted_where_links_have_keys_alone(keys, listen):
    given = {} if listen.startswith("tcp") else {"keys": keys}
    with pytest.raises(ConfigError, match=r"encrypt_blocks.*needs links with keys"):
        Instance(synthetic_config(role="decode"), listen=listen, encrypt_blocks=True, **given)
