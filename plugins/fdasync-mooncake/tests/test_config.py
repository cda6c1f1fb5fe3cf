"""What is refused before anything starts, and in which words. Needs no pool."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from fdasync_mooncake import MooncakeConfig, MooncakeStore
from fdasync_mooncake.usage import parse_usage, read_usage

from fdasync.cache.store.plugins import make_store
from fdasync.errors import ConfigError, StoreRejected, StoreUnavailable


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"master": "nowhere"}, "master is 'nowhere', not HOST:PORT"),
        ({"master": "host:0"}, "master"),
        ({"master": "::1:50051"}, "master"),
        ({"metrics": "host"}, "metrics"),
        ({"prefix": ""}, "prefix"),
        ({"prefix": "A"}, "prefix"),
        ({"prefix": "a/"}, "prefix"),
        ({"prefix": "a..b"}, "prefix"),
        ({"segment_nbytes": -1}, "segment_nbytes is -1, at least 0"),
        ({"replicas": 0}, "replicas"),
        ({"threads": 0}, "threads"),
        ({"rpc_timeout_s": 0}, "no wait is without a deadline"),
        ({"protocol": "rdma"}, "devices names none"),
    ],
)
async def test_a_wrong_value_is_named(values, words):
    store = MooncakeStore(MooncakeConfig(**values))
    with pytest.raises(StoreRejected) as caught:
        await store.open([])
    assert words in str(caught.value)
    await store.aclose()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.exists_prefix(["a"])


def test_the_registry_knows_it():
    store = make_store("mooncake", {"master": "host:1", "segment_nbytes": 1 << 30})
    assert isinstance(store, MooncakeStore)
    assert store.blocking, "it must never run in an engine's process"
    with pytest.raises(ConfigError, match="segment_bytes"):
        make_store("mooncake", {"segment_bytes": 1})


@pytest.mark.parametrize("broken", ["None", "a module without `store`"])
def test_without_the_wheel_it_says_what_to_install(broken):
    script = """
        import asyncio, socket, sys, types
        sys.modules["mooncake"] = None if sys.argv[1] == "None" else types.ModuleType("mooncake")
        from fdasync.errors import StoreRejected
        from fdasync_mooncake import MooncakeConfig, MooncakeStore

        async def main(port):
            store = MooncakeStore(MooncakeConfig(master=f"127.0.0.1:{port}"))
            try:
                await store.open([])
            except StoreRejected as error:
                print(error)
            await store.aclose()

        # something that takes connections is all that stands before the import
        with socket.create_server(("127.0.0.1", 0)) as server:
            asyncio.run(main(server.getsockname()[1]))
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), broken],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    for word in ("mooncake-transfer-engine-non-cuda", "needs CUDA", "never both", "libibverbs1"):
        assert word in done.stdout


def test_figures_are_read_from_the_metrics():
    lines = ["# HELP master_key_count x", "master_key_count 3", "master_allocated_bytes 70", 'other{a="b"} 1.5']
    pool = parse_usage([*lines, "master_total_capacity_bytes 100"])
    assert (pool.objects, pool.nbytes, pool.capacity_nbytes) == (3, 70, 100)
    with pytest.raises(KeyError):
        parse_usage(lines)


def test_no_metrics_server_is_told():
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:9"):
        read_usage("127.0.0.1", 9, 1)
