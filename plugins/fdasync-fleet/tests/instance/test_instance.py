"""An instance before its model is loaded, beside others that do not fit, and when its engine fails."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack, nullcontext
from random import Random

import msgspec
import pytest
from fdasync_fleet.instance.text_digest import text_digest
from fdasync_fleet.messages import difference, shape_of
from fdasync_fleet.router.router import Router
from fdasync_fleet.testing.sim.network import SimNetwork
from fdasync_fleet.testing.sim.transport import SimFabric, SimFaults, SimTransport

from fdasync import Instance, SamplingParams
from fdasync.cache.aux import AuxSpec
from fdasync.errors import ConfigError, EngineFailed, InstanceLost, PeerRefused
from fdasync.result import Usage
from fdasync.testing import LetterTokenizer, check_sample, oracle_of, synthetic_config, synthetic_engine
from fdasync.testing.sim.loop import run_sim
from tests.support.router_scene import FACTS, hello_of

BRIEF = SamplingParams(max_tokens=8)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
LONG = SamplingParams(max_tokens=40)


def make(network=None, number=0, *, role="mixed", runner=None, **options):
    config = synthetic_config(runner or {"step_s": 0.05}, role=role, host_blocks=16)
    values = {"listen": f"ipc://m{number}", "transports": []}
    if network is not None:
        values["wire"] = network.wire(f"m{number}")
    return Instance(config, **{**values, **options})


# -- before anything is loaded


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"listen": "ipc://"}, "ipc://"),
        ({"listen": "tcp://0.0.0.0:1"}, "0.0.0.0"),
        ({"listen": "tcp://127.0.0.1:70000"}, "70000"),
        ({"peers": ["ipc://d0", "nonsense"]}, "nonsense"),
        ({"peers": ["tcp://127.0.0.1:0"]}, "tcp://127.0.0.1:0"),
        ({"name": "n" * 257}, "name: has 257 characters"),
    ],
)
def test_wrong_addresses_and_names_are_refused_before_there_is_an_engine(options, named):
    with pytest.raises(ConfigError) as caught:
        make(**options)
    assert named in str(caught.value)


@pytest.mark.parametrize(("listen", "problem", "names"), [
    ("ipc://m0", "", ["shm"]),
    ("ipc://m0", "no procfs", ["tcp"]),
    ("tcp://127.0.0.1:0", "", ["shm", "tcp"]),
    ("tcp://127.0.0.1:0", "no procfs", ["shm", "tcp"]),
])  # fmt: skip
def test_an_instance_that_only_its_user_can_call_opens_no_port(listen, problem, names, monkeypatch):
    monkeypatch.setattr("fdasync_fleet.instance.instance.shm_problem", lambda: problem)
    instance = make(listen=listen, transports=None)
    assert list(instance._transports._transports) == names
    assert ("no procfs" in instance.notice) == (names == ["tcp"])
    assert make(listen=listen, transports=None, transport="tcp").notice == ""


def test_the_longest_name_is_taken():
    make(name="n" * 256)


@pytest.mark.parametrize("family", ["ipc", "tcp"])
async def test_an_address_that_is_taken_is_refused_before_the_model_loads(family, tmp_path):
    with socket.socket(socket.AF_UNIX if family == "ipc" else socket.AF_INET, socket.SOCK_STREAM) as other:
        other.bind(str(tmp_path / "s") if family == "ipc" else ("127.0.0.1", 0))
        other.listen()
        address = f"ipc://{tmp_path}/s" if family == "ipc" else f"tcp://127.0.0.1:{other.getsockname()[1]}"
        instance = make(listen=address)
        with pytest.raises(ConfigError) as caught:
            await instance.start()
        assert address in str(caught.value)
        assert instance.engine.state == "new"
        await instance.aclose()


# -- others that do not fit


def test_of_two_shapes_what_people_can_read_is_named_first():
    specs = (AuxSpec("routing", (2, 2), "uint8"),)
    facts = msgspec.structs.replace(FACTS, aux_specs=specs)
    ours = msgspec.structs.replace(hello_of("a", "a", "mixed", facts), text=b"t" * 16)
    other = msgspec.structs.replace(
        facts, kv_layout="hnd", kv_dtype="float16", block_tokens=32, block_nbytes=2048, aux_specs=(), vocab_size=301,
        eos_ids=(7, 8), routing_debug=True, numerics="fixed", sum_slices=4, num_blocks=7, max_context_tokens=7,
    )  # fmt: skip
    theirs = msgspec.structs.replace(ours, name="b", facts=other, text=b"", namespace_base=b"o" * 16)
    named = []
    while (found := difference(ours, theirs)) is not None:
        named.append(found[0])
        last, of = found, found[0]
        if of in ("text", "namespace_base"):
            theirs = msgspec.structs.replace(theirs, **{of: getattr(ours, of)})
        else:
            other = msgspec.structs.replace(other, **{of: getattr(facts, of)})
            theirs = msgspec.structs.replace(theirs, facts=other)
    assert named == [
        "kv_layout", "kv_dtype", "block_tokens", "block_nbytes", "aux_specs", "vocab_size", "eos_ids", "routing_debug",
        "numerics", "sum_slices", "text", "namespace_base",
    ]  # fmt: skip
    assert last == ("namespace_base", bytes(16).hex(), (b"o" * 16).hex())


def test_another_block_size_is_told_by_name_and_another_number_of_blocks_fits():
    async def main():
        network = SimNetwork(Random(1))
        ours = make(network, 0, runner={"num_blocks": 40, "block_tokens": 4})
        more = make(network, 1, runner={"num_blocks": 80, "block_tokens": 4})
        other = make(network, 2, runner={"num_blocks": 40, "block_tokens": 8})
        async with ours, more, other:
            assert shape_of(ours.hello()) == shape_of(more.hello())
            assert ours.engine.capacity.num_blocks != more.engine.capacity.num_blocks
            async with Router([ours.address, more.address], wire=network.wire("router"), seed=1) as router:
                with pytest.raises(PeerRefused) as caught:
                    await router.add(other.address)
        assert caught.value.field == "block_tokens"
        assert "has 4" in str(caught.value)
        assert "has 8" in str(caught.value)

    run_sim(main())


class _Numbers:
    """Tokens are numbers, all but one."""

    def __init__(self, odd):
        self.odd = odd

    def encode(self, text):
        return [1] * len(text)

    def decode(self, token_ids):
        return " ".join("odd" if token == self.odd else str(token) for token in token_ids)


class _Upper(LetterTokenizer):
    def decode(self, token_ids):
        return super().decode(token_ids).upper()


@pytest.mark.parametrize(
    ("field", "options", "words"),
    [
        ("eos_ids", {"runner": {"eos_id": 9}}, "has (7,), m1 has (9,)"),
        ("eos_ids", {"runner": {"eos_id": -1}}, "has (7,), m1 has ()"),
        ("text", {"runner": {"eos_id": 7}, "tokenizer": _Upper()}, "has"),
        ("text", {"runner": {"eos_id": 7}, "tokenizer": None}, "has"),
        ("routing_debug", {"runner": {"eos_id": 7}, "engine": {"routing_debug": True}}, "has False, m1 has True"),
        ("numerics", {"runner": {"eos_id": 7}, "engine": {"numerics": "fixed"}}, "has 'default', m1 has 'fixed'"),
    ],
)
def test_instances_that_would_answer_differently_do_not_fit(field, options, words):
    """By routers, and by instances that hand over to each other."""

    async def main():
        network = SimNetwork(Random(1))
        ours = make(network, 0, runner={"eos_id": 7}, name="m0", tokenizer=LetterTokenizer())
        config = synthetic_config(options["runner"], role="mixed", host_blocks=16, **options.get("engine", {}))
        other = Instance(
            config, listen="ipc://m1", name="m1", transports=[], wire=network.wire("m1"),
            tokenizer=options.get("tokenizer", LetterTokenizer()),
        )  # fmt: skip
        async with ours, other:
            async with Router([ours.address], wire=network.wire("router"), seed=1) as router:
                with pytest.raises(PeerRefused) as caught:
                    await router.add(other.address)
            assert caught.value.field == field
            assert words in caught.value.problem
            refused = ours.check(other.hello())
            assert refused is not None
            assert refused.field == field

    run_sim(main())


def test_prefill_and_decode_of_unlike_numerics_refuse_each_other_and_alike_ones_serve():
    async def main(numerics):
        network, fabric = SimNetwork(Random(1)), SimFabric(Random(2), SimFaults())
        sides = []
        for number, role in enumerate(("prefill", "decode")):
            config = synthetic_config(role=role, host_blocks=16, numerics=numerics[number])
            wire = network.wire(f"m{number}")
            sides.append(Instance(config, listen=f"ipc://m{number}", transports=[SimTransport(fabric)], wire=wire))
        async with sides[0], sides[1]:
            if numerics[0] != numerics[1]:
                for ours, other in (sides, sides[::-1]):
                    assert ours.check(other.hello()).field == "numerics"
                return
            addresses = [side.address for side in sides]
            async with Router(addresses, wire=network.wire("router"), seed=1) as router:
                result = await router.complete([1, 2, 3, 4, 5], GREEDY)
                assert router.facts().numerics == numerics[0]
            check_sample(result.samples[0], [1, 2, 3, 4, 5], GREEDY, oracle_of(sides[1].engine.config))
            assert sides[1].engine.stats().scheduler.leases_granted == 1

    for numerics in (("fixed", "fixed"), ("fixed", "default"), ("default", "fixed")):
        run_sim(main(numerics))


def test_a_digest_of_text_follows_what_a_tokenizer_does():
    digests = [text_digest(tokenizer, 100) for tokenizer in (LetterTokenizer(), LetterTokenizer(), _Upper(), None)]
    assert digests[0] == digests[1] != digests[2]
    assert digests[3] == b""
    # every token counts, of a large vocabulary too
    digests = [text_digest(_Numbers(odd), 100_000) for odd in (-1, -1, 0, 77_777, 99_999)]
    assert len(set(digests)) == 4


def test_a_tokenizer_s_own_word_of_what_it_is_made_of_decides():
    class Told(_Numbers):
        def fingerprint(self):
            return self.word

    tokenizers = [Told(-1), Told(5), Told(-1)]
    for tokenizer, word in zip(tokenizers, (b"a", b"a", b"b"), strict=True):
        tokenizer.word = word
    digests = [text_digest(tokenizer, 100) for tokenizer in tokenizers]
    assert digests[0] == digests[1] != digests[2]


# -- what it says of itself


def test_room_that_is_promised_to_leases_is_not_free_for_the_router():
    async def main():
        network, fabric = SimNetwork(Random(1)), SimFabric(Random(2), SimFaults())
        d = make(
            network, 1, role="decode", runner={"num_blocks": 16, "block_tokens": 4}, transports=[SimTransport(fabric)]
        )
        slow = {"num_blocks": 16, "block_tokens": 4, "step_s": 5.0}
        p = make(network, 0, role="prefill", runner=slow, transports=[SimTransport(fabric)])
        async with d, p:
            assert d.status().free_blocks == 16
            async with Router([p.address, d.address], wire=network.wire("router"), seed=1) as router:
                task = asyncio.ensure_future(router.complete(range(50), BRIEF))
                await asyncio.sleep(2.0)
                # 12 full blocks and an open one are leased, and none of them has been offered yet
                assert d.engine.stats().scheduler.free_blocks == 16
                assert d.status().free_blocks == 3
                (told,) = [one.status for one in router.stats().instances if one.address == d.address]
                assert told.free_blocks == 3
                assert len((await task).token_ids) == 8
                assert d.status().free_blocks == 16

    run_sim(main())


# -- what its callers are told


@pytest.mark.parametrize("roles", [("mixed",), ("prefill", "decode")])
def test_a_router_tells_the_usage_that_an_engine_tells(roles):
    async def main():
        network, fabric = SimNetwork(Random(1)), SimFabric(Random(2), SimFaults())
        params = SamplingParams(max_tokens=5, n=2, seed=3)
        async with synthetic_engine(synthetic_config()) as alone, AsyncExitStack() as stack:
            fleet = [
                make(network, number, role=role, transports=[SimTransport(fabric)]) for number, role in enumerate(roles)
            ]
            for instance in fleet:
                await stack.enter_async_context(instance)
            addresses = [instance.address for instance in fleet]
            async with Router(addresses, wire=network.wire("router"), seed=1) as router:
                for cached in (0, 40):
                    results = [await each.complete(range(42), params) for each in (alone, router)]
                    assert results[0].usage == results[1].usage == Usage(42, cached, 10)

    run_sim(main())


@pytest.mark.parametrize("role", ["mixed", "decode"])
def test_a_text_whose_instance_is_lost_keeps_the_tokens_of_its_prompt(role):
    async def main():
        network, fabric = SimNetwork(Random(1)), SimFabric(Random(2), SimFaults())
        options = {"tokenizer": LetterTokenizer()}
        last = make(network, 0, role=role, transports=[SimTransport(fabric)], **options)
        first = make(network, 1, role="prefill", transports=[SimTransport(fabric)], **options)
        await last.start()
        async with first if role == "decode" else nullcontext():
            addresses = [last.address, first.address] if role == "decode" else [last.address]
            async with Router(addresses, wire=network.wire("router"), seed=1) as router:
                async with router.generate("letters", LONG) as stream:
                    assert (await anext(stream)).token_ids
                    last.engine.fail(RuntimeError("told to"))
                    with pytest.raises(InstanceLost) as caught:
                        async for _ in stream:
                            pass
                assert caught.value.partial.prompt_token_ids == tuple(LetterTokenizer().encode("letters"))
            await last.aclose()

    run_sim(main())


# -- a failure


def test_an_instance_whose_engine_fails_hangs_up_and_others_serve():
    async def main():
        network = SimNetwork(Random(1))
        one, other = make(network, 0), make(network, 1)
        async with other:
            await one.start()
            async with Router([one.address, other.address], wire=network.wire("router"), seed=1) as router:
                tasks = [asyncio.ensure_future(router.complete((number, 2), LONG)) for number in range(4)]
                await asyncio.sleep(0.2)
                one.engine.fail(RuntimeError("told to"))
                await asyncio.sleep(1.0)
                up = {member.address: member.is_up for member in router.stats().instances}
                assert up == {one.address: False, other.address: True}
                results = await asyncio.gather(*tasks)
                assert {len(result.token_ids) for result in results} == {40}
                assert len((await router.complete((9, 2), BRIEF)).token_ids) == 8
            await one.aclose()
            await one.aclose()

    run_sim(main())


def test_an_instance_that_closes_as_its_engine_fails_leaves_nothing():
    async def main():
        network = SimNetwork(Random(1))
        one = make(network, 0)
        await one.start()
        async with Router([one.address], wire=network.wire("router"), seed=1):
            one.engine.fail(RuntimeError("told to"))
            await one.aclose()
        assert one._hanging_up.done()
        assert not one._context.tasks()

    run_sim(main())


def test_peers_of_an_instance_that_failed_know_at_once():
    async def main():
        network = SimNetwork(Random(1))
        decode = make(network, 1, role="decode")
        await decode.start()
        prefill = make(network, 0, role="prefill", peers=[decode.address])
        async with prefill:
            peer = prefill._links.dial(decode.address)
            await peer.ready(5.0)
            decode.engine.fail(RuntimeError("told to"))
            await asyncio.sleep(0.7)
            assert not peer.is_up
            await decode.aclose()

    run_sim(main())


def test_an_instance_whose_engine_fails_while_it_starts_says_so_and_leaves_nothing():
    class Fails(SimTransport):
        async def open(self, regions):
            await super().open(regions)
            one.engine.fail(RuntimeError("told to"))

    one = make(SimNetwork(Random(1)), transports=[Fails(SimFabric(Random(1), SimFaults()))])

    async def main():
        with pytest.raises(EngineFailed, match="told to"):
            await one.start()
        assert one.engine.state == "failed"
        assert not one._context.tasks()

    run_sim(main())


def test_transports_are_closed_before_the_memory_that_they_copy_is_freed():
    blocks_left = []

    class Watches(SimTransport):
        async def aclose(self):
            blocks_left.append(len(one._context.host.kv))
            await super().aclose()

    one = make(SimNetwork(Random(1)), transports=[Watches(SimFabric(Random(1), SimFaults()))])

    async def main():
        await one.start()
        # the engine alone: its attendant ends the copies
        await one.engine.aclose()
        assert blocks_left == [16]
        assert len(one._context.host.kv) == 0
        await one.aclose()

    run_sim(main())
