"""Instances that hand over blocks by Mooncake's engine where both trust the network, and else as before."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from fdasync_fleet.instance import instance as instance_module
from fdasync_fleet.link.keys import new_keys
from fdasync_fleet.router.config import RouterConfig
from fdasync_fleet.testing.transports.harness import TransportHooks
from fdasync_fleet.transfer.plugins import TransportSpec, transport_class
from fdasync_fleet.transfer.process.proxy import TransferProcess
from fdasync_fleet.transfer.tcp import TcpTransport
from fdasync_fleet.transfer.transports import Transports
from fdasync_mooncake.transfer import engine as engine_module
from fdasync_mooncake.transfer.staging import SLOTS
from fdasync_mooncake.transfer.transport import MooncakeTransport

import fdasync
from fdasync import Instance, SamplingParams
from fdasync.errors import ConfigError, PluginError
from fdasync.events.catalog import LinkChanged
from fdasync.testing import check_sample, oracle_of, synthetic_config
from fdasync.testing.harness.leaks import no_leaks

PROMPT = tuple(range(40))
PARAMS = SamplingParams(max_tokens=8, temperature=0.0)
LISTEN = "tcp://127.0.0.1:*"


@pytest.fixture(autouse=True)
def declared():
    """The entry point: a tree beside the installation it came from may be newer."""
    try:
        transport_class("mooncake")
    except PluginError as error:
        pytest.skip(f"{error}: install plugins/fdasync-mooncake again")


def make(role, **options):
    return Instance(synthetic_config(role=role), **{"listen": LISTEN, **options})


async def linked(instance):
    """What an instance is told of the blocks of the next instance whose link is up."""
    with_blocks = instance.engine.bus.subscribe(LinkChanged)
    try:
        async with asyncio.timeout(300):
            async for event in with_blocks:
                if event.up and event.blocks:
                    return event.blocks
    finally:
        with_blocks.close()


def test_it_is_off_unless_it_is_said_that_the_network_is_trusted():
    with pytest.raises(ConfigError, match=r"'mooncake'.*--trusted-network"):
        make("decode", transport="mooncake")
    with pytest.raises(ConfigError, match="trusted_network"):
        make("decode", trusted_network=True, encrypt_blocks=True, keys=new_keys())
    kinds = {name: list(make("decode", **given)._transports._transports) for name, given in {
        "off": {}, "on": {"trusted_network": True}, "socket": {"trusted_network": True, "listen": "ipc:///tmp/x"},
        "named": {"trusted_network": True, "transport": "mooncake"},
    }.items()}  # fmt: skip
    assert kinds == {"off": ["shm", "tcp"], "on": ["shm", "mooncake", "tcp"], "socket": ["shm"], "named": ["mooncake"]}
    assert "socket of this machine" in make("decode", trusted_network=True, listen="ipc:///tmp/x").notice


def test_where_the_plugin_is_missing_the_notice_says_so(monkeypatch):
    monkeypatch.setattr(instance_module, "FAST", "no-such-transport")
    made = make("decode", trusted_network=True)
    assert list(made._transports._transports) == ["shm", "tcp"]
    assert "no-such-transport" in made.notice


def test_at_an_address_that_it_cannot_have_it_is_left_out():
    made = make("decode", trusted_network=True, listen="tcp://[::1]:*", keys=new_keys())
    assert list(made._transports._transports) == ["shm", "tcp"]
    assert "IPv6" in made.notice


@pytest.mark.nightly
@pytest.mark.usefixtures("network")
async def test_instances_hand_over_blocks_by_it_and_results_are_right():
    options = {"transport": "mooncake", "trusted_network": True}
    with no_leaks():
        async with make("decode", **options) as decode, make("prefill", **options) as prefill:
            addresses = [prefill.address, decode.address]
            told = asyncio.ensure_future(linked(decode))
            async with fdasync.connect(addresses, RouterConfig(require="all")) as router:
                results = await asyncio.gather(
                    *[router.complete((*PROMPT, number), params=PARAMS) for number in range(12)]
                )
                assert await told == "by mooncake"
                assert decode.engine.stats().scheduler.received_blocks > 0
                oracle = oracle_of(decode.engine.config)
                for number, result in enumerate(results):
                    check_sample(result.samples[0], (*PROMPT, number), PARAMS, oracle)

                # both engines die: requests are retried, and end as they should
                process = decode._process
                assert process is not None
                before = decode.engine.stats().scheduler.received_blocks
                for side in (decode, prefill):
                    assert side._process is not None
                    kill_child_of(side._process.pid)
                results = await asyncio.gather(
                    *[router.complete((*reversed(PROMPT), number), params=PARAMS) for number in range(6)]
                )
                for number, result in enumerate(results):
                    check_sample(result.samples[0], (*reversed(PROMPT), number), PARAMS, oracle)
                assert decode.engine.stats().scheduler.received_blocks > before


@pytest.mark.nightly
@pytest.mark.usefixtures("network")
@pytest.mark.parametrize("trusting", ["decode", "prefill"])
async def test_where_one_side_trusts_the_network_the_next_way_is_taken_and_told(trusting):
    async with (
        make("decode", trusted_network=trusting == "decode") as decode,
        make("prefill", trusted_network=trusting == "prefill") as prefill,
    ):
        side = decode if trusting == "decode" else prefill
        told = asyncio.ensure_future(linked(side))
        async with fdasync.connect([prefill.address, decode.address], RouterConfig(require="all")) as router:
            result = await router.complete(PROMPT, params=PARAMS)
            assert result.samples[0].finish_reason == "length"
            assert decode.engine.stats().scheduler.received_blocks > 0
            assert await told == "by shm, tcp; not by mooncake: it offers none (--trusted-network on both sides)"
        assert decode.notice == prefill.notice == ""


@pytest.mark.nightly
@pytest.mark.usefixtures("network")
@pytest.mark.parametrize("in_process", [True, False])
async def test_the_way_follows_the_route_and_an_engine_that_does_not_start_is_left_out(in_process, monkeypatch):
    hooks = TransportHooks()
    hooks.make = MooncakeTransport
    names = ("shm", "mooncake", "tcp")

    def opened():
        if in_process:
            process = TransferProcess([TransportSpec(name, optional=name == "mooncake") for name in names])
            return Transports(process.transports, process, ["mooncake"])
        return Transports([transport_class(name)() for name in names], None, ["mooncake"])

    with no_leaks():
        async with hooks.sides(1) as (side,):
            here = opened()
            await here.open(side.regions)
            assert here.problems == {}
            sources = dict(here.sources())
            assert here.told(here.sources()) == "by shm, mooncake, tcp"
            # of another machine
            far = tuple([(name, type(one)("elsewhere", *list_of(one)[1:])) for name, one in sources.items()])
            assert here.told(far) == "by mooncake, tcp"
            monkeypatch.setenv("MOONCAKE_PROTOCOL", "pigeon")
            other = opened()
            await other.open(side.regions)
            assert "pigeon" in other.problems["mooncake"]
            assert other.told(here.sources()) == "by shm, tcp"
            assert [name for name, _ in other.sources()] == ["shm", "tcp"]
            await other.aclose()
            await here.aclose()


@pytest.mark.nightly
@pytest.mark.usefixtures("network")
@pytest.mark.parametrize("why", ["firewall", "protocol", "elsewhere"])
async def test_an_engine_that_cannot_be_read_from_here_has_its_sender_read_over_tcp(why, monkeypatch):
    monkeypatch.setattr(engine_module, "CONNECT_S", 0.5)
    hooks = TransportHooks()
    hooks.make = MooncakeTransport
    with no_leaks(), silent_port() as port:
        async with hooks.sides(2) as (sender, receiver):
            tcp = TcpTransport()
            await tcp.open(sender.regions)
            engine = sender.transport.engine
            if why == "firewall":
                engine.segment = f"127.0.0.1:{port}"
            elif why == "protocol":
                engine.protocol = "rdma"
            else:
                engine.segment = "10.1.2.3:15000"
            parts, sums = sender.block("a", 300_000)
            tcp.offer(parts)
            sources = (("mooncake", sender.source), ("tcp", tcp.source()))
            ways = Transports([MooncakeTransport(), TcpTransport()], None, ["mooncake"])
            await ways.open(receiver.regions)
            loop = asyncio.get_running_loop()
            for _ in range(2):
                spec = receiver.copy_spec(parts, sums)
                (outcome,) = await ways.receive(sources, [spec], loop.time() + 5.0)
                assert outcome.ok, outcome
                receiver.assert_has(spec, "a")
            # it was asked once
            assert sender.transport._server.slots.num_free == SLOTS
            assert ways._unfit == {sender.source.token}
            await ways.aclose()
            await tcp.aclose()


@contextmanager
def silent_port():
    """A port that takes no connection: its queue is full, as behind a firewall that drops what comes."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener, ExitStack() as dialled:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            sock = dialled.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def kill_child_of(pid):
    """The one child of a transfer process is its engine."""
    assert pid > 1
    (engine,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert int(engine) > 1
    os.kill(int(engine), signal.SIGKILL)


def list_of(source):
    return [source.machine, source.pid, source.regions, source.token, source.address]
