"""Where instances say that they are, where others reach them, and what an error says when the two differ."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest
from fdasync_fleet.link.keys import new_keys
from fdasync_fleet.router.config import RouterConfig

import fdasync
from fdasync import Instance, SamplingParams
from fdasync.errors import ConfigError, DeadlineExceeded, InstanceLost, PeerRefused, PeerUnreachable
from fdasync.scheduler import LeaseRules
from fdasync.testing import synthetic_config, until
from tests.nightly.chaos.proxy import Proxy

PROMPT = tuple(range(40))
PARAMS = SamplingParams(max_tokens=4)
ANY = "tcp://127.0.0.1:0"
ALL = RouterConfig(require="all", retries=0)


def config(role, **rules):
    return synthetic_config(role=role, leases=LeaseRules(silent_s=0.3, find_s=0.6, **rules))


def port_of(instance):
    return int(instance.address.rpartition(":")[2])


def problem_of(router):
    """What the first instance tells a router of others."""
    status = router.stats().instances[0].status
    return "" if status is None else status.peer_problem


@asynccontextmanager
async def translated(instance):
    """What stands between an instance and those that dial it."""
    between = Proxy()
    await between.open()
    between.target = port_of(instance)
    try:
        yield between, f"tcp://127.0.0.1:{between.port}"
    finally:
        await between.aclose()


@pytest.mark.ci
async def test_one_that_the_router_reaches_and_the_prefill_instance_does_not_is_named_with_both_views():
    async with (
        Instance(config("decode"), listen=ANY) as decode,
        Instance(config("prefill"), listen=ANY, name="p") as prefill,
        translated(decode) as (between, address),
        fdasync.connect([prefill.address, address], ALL) as router,
    ):
        between.refuses = True
        with pytest.raises(InstanceLost) as found:
            await router.complete(PROMPT, PARAMS)
        view = f"{address}: the router reaches a decode instance there, which says that it listens at {decode.address}"
        assert f"{view}; from {prefill.address} nobody answers" in str(found.value)
        seen = {one.address: one for one in router.stats().instances}
        assert (seen[address].says, seen[prefill.address].says) == (decode.address, prefill.address)
        await until(lambda: view in problem_of(router))
        between.refuses = False
        assert (await router.complete(PROMPT, PARAMS)).samples[0].finish_reason == "length"
        await until(lambda: not problem_of(router))
        assert decode.engine.stats().scheduler.received_blocks > 0


@pytest.mark.ci
async def test_another_process_at_the_address_gets_nothing_and_is_named_with_both_views():
    async with (
        Instance(config("decode"), listen=ANY) as decode,
        Instance(config("decode"), listen=ANY, name="stranger") as stranger,
        Instance(config("prefill"), listen=ANY) as prefill,
        translated(decode) as (between, address),
        fdasync.connect([prefill.address, address], ALL) as router,
        fdasync.connect([prefill.address, address], RouterConfig(require="all")) as patient,
    ):
        # those that dial from now on
        between.target = port_of(stranger)
        with pytest.raises(InstanceLost) as found:
            await router.complete(PROMPT, PARAMS)
        view = f"{address}: the router reaches a decode instance there, which says that it listens at {decode.address}"
        there = f"from {prefill.address} stranger answers (it says that it listens at {stranger.address})"
        assert f"{view}; {there}" in str(found.value)
        assert stranger.engine.stats().scheduler.leases_granted == 0
        # one that may try again has it served whole
        assert (await patient.complete(PROMPT, PARAMS)).samples[0].finish_reason == "length"
        assert decode.engine.stats().scheduler.received_blocks == 0
        await until(lambda: there in problem_of(router))


@pytest.mark.ci
async def test_a_process_that_answers_at_two_addresses_is_one_instance():
    async with (
        Instance(config("mixed"), listen=ANY, name="m") as mixed,
        translated(mixed) as (_, address),
    ):
        async with fdasync.connect([mixed.address], ALL) as router:
            with pytest.raises(PeerRefused, match=f"also answers at {mixed.address}, and says that it listens at"):
                await router.add(address)
            assert (await router.complete(PROMPT, PARAMS)).samples[0].finish_reason == "length"
            assert [one.state for one in router.stats().instances] == ["running", "refused"]
        with pytest.raises(PeerRefused, match="also answers at"):
            async with fdasync.connect([mixed.address, address], ALL):
                pass


@pytest.mark.ci
async def test_a_host_besides_the_listening_address_is_what_others_dial():
    keys = new_keys()
    options = {"keys": keys, "transport": "tcp"}
    async with (
        Instance(config("decode"), listen="tcp://0.0.0.0:0", host="127.0.0.1", **options) as decode,
        Instance(config("prefill"), listen="tcp://[::]:0", host="lo", **options) as prefill,
    ):
        assert decode.listens == f"tcp://0.0.0.0:{port_of(decode)}"
        assert (decode.address, prefill.address) == (
            f"tcp://127.0.0.1:{port_of(decode)}",
            f"tcp://127.0.0.1:{port_of(prefill)}",
        )
        async with fdasync.connect([prefill.address, decode.address], ALL, keys=keys) as router:
            assert [one.says for one in router.stats().instances] == [prefill.address, decode.address]
            assert (await router.complete(PROMPT, PARAMS)).samples[0].finish_reason == "length"
        assert decode.engine.stats().scheduler.received_blocks > 0


@pytest.mark.parametrize(("listen", "host", "field", "problem"), [
    ("tcp://0.0.0.0:0", "", "address", "names no machine"),
    ("tcp://127.0.0.1:0", "0.0.0.0", "host", "names no machine"),
    ("tcp://127.0.0.1:0", "no-such-interface", "host", "nor an interface"),
    ("ipc:///tmp/x", "127.0.0.1", "host", "has no host"),
])  # fmt: skip
def test_a_host_that_nobody_could_dial_is_refused(listen, host, field, problem):
    with pytest.raises(ConfigError, match=problem) as found:
        Instance(config("mixed"), listen=listen, host=host, keys=new_keys())
    assert found.value.field == field


@pytest.mark.ci
async def test_blocks_are_read_at_the_data_port_of_the_host_that_is_said():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = {"transport": "tcp", "keys": new_keys(), "host": "127.0.0.9", "data_port": port}
    async with Instance(config("mixed"), listen="tcp://0.0.0.0:0", **options) as mixed:
        ((_, source),) = mixed.hello().sources
        assert source.address == f"127.0.0.9:{port}"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        assert await reader.read() == b""


async def test_a_data_port_that_is_taken_is_named():
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        with pytest.raises(ConfigError, match=f"{port}.*in use"):
            async with Instance(config("mixed"), listen=ANY, transport="tcp", keys=new_keys(), data_port=port):
                pass
    finally:
        server.close()
        await server.wait_closed()


async def test_a_socket_file_that_is_missing_ends_the_wait_unless_a_time_was_named(tmp_path):
    address = f"ipc://{tmp_path}/gone"
    with pytest.raises(PeerUnreachable, match="gone: there is no socket file: no instance listens there"):
        await fdasync.connect([address], RouterConfig(settle_s=0.05)).start()
    with pytest.raises(DeadlineExceeded, match="gone"):
        await fdasync.connect([address], RouterConfig(connect_s=0.05, settle_s=0.0)).start()
    # the others serve
    async with (
        Instance(config("mixed"), listen=ANY) as mixed,
        fdasync.connect([mixed.address, address], RouterConfig(settle_s=0.05)) as router,
    ):
        assert [one.address for one in router.stats().missing] == [address]
    with pytest.raises(PeerUnreachable, match="gone"):
        await fdasync.connect([mixed.address, address], RouterConfig(require="all", settle_s=0.05)).start()
