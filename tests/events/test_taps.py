"""Taps that a configuration names: loaded by entry point, refused when broken, never in the engine's way."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from fdasync import Engine, SamplingParams
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.cli.common.options import engine_config, parse_plugin
from fdasync.errors import BadInput, ConfigError, DeadlineExceeded, PluginError, StoreUnavailable
from fdasync.events.catalog import RequestEnded, TapFailed
from fdasync.events.tap import Tap
from fdasync.registry.registry import TAPS, Registry
from fdasync.testing import synthetic_config, until
from fdasync.testing.stores.wrapper import Wrapper
from tests.support.plugins import install_plugin

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fdasync.ipc.shared_memory import SharedRegion

SOURCE = """
    import asyncio
    import msgspec
    from fdasync.events.catalog import BreakerChanged, RequestEnded
    from fdasync.events.tap import Tap

    class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        limit: int = 3

    class Collect(Tap):
        config_type = Keys
        kinds = (RequestEnded,)
        limit = 2

        async def run(self, events):
            self.seen = []
            async for event in events:
                self.seen.append(event)
            await asyncio.sleep(0)
            self.seen.append(self.config.limit)

    class States(Collect):
        kinds = (BreakerChanged,)

    class Raises(Tap):
        async def run(self, events):
            async for event in events:
                raise OSError("no space left")

    class Deaf(Tap):
        kinds = (RequestEnded,)
        limit = 2

        async def run(self, events):
            await asyncio.Event().wait()

    class Stubborn(Tap):
        kinds = (RequestEnded,)

        async def run(self, events):
            self.released = asyncio.Event()
            while not self.released.is_set():
                try:
                    await self.released.wait()
                except asyncio.CancelledError:
                    asyncio.current_task().uncancel()

    class Slow(Tap):
        kinds = (RequestEnded,)
        ended = False

        async def run(self, events):
            try:
                await asyncio.Event().wait()
            finally:
                for _ in range(50):
                    await asyncio.sleep(0)
                self.ended = True

    class Odd(Tap):
        config_type = dict

        async def run(self, events):
            return

    class Unfinished(Tap):
        pass

    class NoTap:
        pass

    class Words(Tap):
        kinds = ("StepDone",)

        async def run(self, events):
            return

    class Full(Tap):
        limit = 0

        async def run(self, events):
            return

    class Breaks(Tap):
        def __init__(self, config):
            raise OSError("no such file")

        async def run(self, events):
            return

    class Early(Tap):
        async def run(self, events):
            raise asyncio.CancelledError
"""
CLASSES = ("Collect", "Raises", "Deaf", "Stubborn", "Slow", "Odd", "Unfinished", "NoTap", "Words", "Full", "Breaks",
           "Early", "States")  # fmt: skip
PARAMS = SamplingParams(max_tokens=2, temperature=0.0)


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {name.lower(): f"fdasync_bad:{name}" for name in CLASSES} | {"absent": "fdasync_bad_too:Tap"}
    install_plugin(tmp_path, monkeypatch, SOURCE, TAPS, points)


def tap_of(engine: Engine, name: str) -> Tap:
    return engine._runtime.taps._taps[name]


async def test_a_named_tap_reads_its_events_until_the_end():
    engine = Engine(synthetic_config(taps={"collect": {"limit": 7}}))
    async with engine:
        result = await engine.complete([1, 2, 3], PARAMS, request_id="one")
        await until(lambda: engine.stats().taps[0].delivered == 1)
        (stats,) = engine.stats().taps
        assert (stats.name, stats.delivered, stats.dropped, stats.pending, stats.problem) == ("collect", 1, 0, 0, "")
    ended, limit = tap_of(engine, "collect").seen
    assert isinstance(ended, RequestEnded)
    assert (ended.request_id, ended.output_tokens) == ("one", len(result.token_ids))
    # what it did behind its last event was waited for
    assert limit == 7


class Away(Wrapper):
    """A store that cannot be opened."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(MemoryConfig()))

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        raise StoreUnavailable("memory", "nobody is there")


async def test_a_tap_reads_once_that_the_store_was_left_alone_at_the_start():
    config = synthetic_config(taps={"states": {}}, host_blocks=8, store="memory", store_retry_s=60.0)
    async with Engine(config, store=Away()) as engine:
        pass
    told, _ = tap_of(engine, "states").seen
    assert (told.state, told.seq) == ("open", 0)
    assert "nobody is there" in told.problem


@pytest.mark.parametrize(
    ("taps", "error", "words"),
    [
        ({"nothing": {}}, PluginError, "not installed; there are: .*collect"),
        ({"absent": {}}, PluginError, r"fdasync-bad.*importing fdasync_bad_too:Tap failed"),
        ({"notap": {}}, PluginError, "fdasync_bad:NoTap is not a Tap class"),
        ({"odd": {}}, PluginError, "Odd has no config_type"),
        ({"unfinished": {}}, PluginError, "cannot be made.*run"),
        ({"words": {}}, PluginError, "words.*kinds.*no tuple of classes of events"),
        ({"full": {}}, PluginError, "full.*limit"),
        ({"breaks": {}}, PluginError, "breaks.*no such file"),
        ({"collect": {"limits": 3}}, ConfigError, r"config\.taps\.collect\.limits.*not a key"),
        ({"collect": {"limit": "x"}}, ConfigError, r"config\.taps\.collect\.limit"),
        ({"deaf": {"limit": 3}}, ConfigError, r"config\.taps\.deaf\.limit"),
        ({"collect": 3}, ConfigError, r"config\.taps"),
    ],
)
def test_a_tap_that_is_missing_or_broken_is_refused_at_once(taps, error, words):
    with pytest.raises(error, match=words):
        Engine({"runner": "synthetic", "process": "inline", "taps": taps})


async def test_a_tap_that_raises_is_told_and_the_engine_goes_on():
    async with Engine(synthetic_config(taps={"raises": {}, "collect": {}})) as engine:
        failures = engine.bus.subscribe(TapFailed)
        await engine.complete([1, 2, 3], PARAMS)
        failed = await anext(failures)
        assert (failed.tap, failed.problem) == ("raises", "OSError: no space left")
        await engine.complete([1, 2, 4], PARAMS)
        await until(lambda: engine.stats().taps[1].delivered == 2)
        raises, _ = engine.stats().taps
        assert raises.problem == "OSError: no space left"
        failures.close()


async def test_a_tap_that_failed_at_the_start_is_told_to_later_subscribers():
    async with Engine(synthetic_config(taps={"early": {}})) as engine:
        await until(lambda: engine.stats().taps[0].problem)
        await engine.complete([1, 2, 3], PARAMS)
        async with engine.bus.subscribe(TapFailed) as failures:
            failed = await anext(failures)
        assert (failed.tap, failed.problem.split(":")[0]) == ("early", "CancelledError")
        assert engine.stats().taps[0].pending == 0


@pytest.mark.parametrize(("kinds", "limit"), [(("StepDone",), 10), ((int,), 10), ((), 0), ((), "10"), ((), True)])
async def test_a_subscription_that_no_turn_could_serve_is_refused(kinds, limit):
    async with Engine(synthetic_config()) as engine:
        with pytest.raises(BadInput):
            engine.bus.subscribe(*kinds, limit=limit)
        await asyncio.wait_for(engine.pause(), 300)


async def test_a_slow_tap_loses_events_and_counts_them():
    engine = Engine(synthetic_config(taps={"deaf": {}}, close_deadline_s=0.3))
    await engine.start()
    for number in range(5):
        await engine.complete([1, 2, number], PARAMS)
    await until(lambda: engine.stats().taps[0].dropped == 3)
    assert engine.stats().taps[0].pending == 2
    # it does not end by itself: it is cancelled at the deadline, and named
    with pytest.raises(DeadlineExceeded, match="ending the taps deaf"):
        await engine.aclose()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "fdasync-tap-deaf"]


async def test_a_tap_that_swallows_its_cancelling_is_waited_for_and_named():
    engine = Engine(synthetic_config(taps={"collect": {}, "deaf": {}, "stubborn": {}}, close_deadline_s=0.3))
    await engine.start()
    with pytest.raises(DeadlineExceeded, match=r"ending the taps deaf, stubborn did not end within 0\.3 s") as caught:
        await engine.aclose()
    assert caught.value.__notes__ == ["tap stubborn goes on: it was cancelled, and did not end within 1 s"]
    assert [stats.problem for stats in engine.stats().taps] == [
        "",
        "",
        "it was cancelled, and did not end within 1 s",
    ]
    left = [task for task in asyncio.all_tasks() if task.get_name().startswith("fdasync")]
    assert [task.get_name() for task in left] == ["fdasync-tap-stubborn"]
    tap_of(engine, "stubborn").released.set()
    await asyncio.wait_for(left[0], 300)


async def test_a_tap_that_ends_some_turns_after_its_cancelling_is_waited_for():
    engine = Engine(synthetic_config(taps={"slow": {}}, close_deadline_s=0.3))
    await engine.start()
    with pytest.raises(DeadlineExceeded, match="ending the taps slow") as caught:
        await engine.aclose()
    assert not hasattr(caught.value, "__notes__")
    assert tap_of(engine, "slow").ended


def test_the_command_line_names_taps():
    def keys(name):
        return Registry().load(TAPS, name, Tap).config_type

    assert parse_plugin("--tap", "collect:limit=4", keys) == ("collect", {"limit": 4})
    assert parse_plugin("--tap", "raises", keys) == ("raises", {})
    with pytest.raises(BadInput, match=r"--tap collect\.limits"):
        parse_plugin("--tap", "collect:limits=4", keys)
    with pytest.raises(BadInput, match="the name of a tap"):
        parse_plugin("--tap", ":x", keys)
    with pytest.raises(PluginError, match="is not a Tap class"):
        parse_plugin("--tap", "notap", keys)


def test_taps_of_the_command_line_join_those_of_the_file(tmp_path):
    path = tmp_path / "engine.toml"
    path.write_text('runner = "synthetic"\n[taps.raises]\n[taps.collect]\nlimit = 1\n')
    names = ("model", "runner", "dtype", "device", "num_threads", "num_blocks", "block_tokens", "max_context_tokens",
             "max_running", "max_step_tokens", "host_blocks", "seed", "numerics", "sum_slices",
             "tensor_parallel")  # fmt: skip
    others = {"store": None, "store_required": False, "policy": None, "gpus": (), "share_gpus": False}
    others |= {"drafter": None, "draft_tokens": None}
    given = {**dict.fromkeys(names), "config_path": path, **others}
    config = engine_config({**given, "taps": ("collect:limit=4",)})
    assert config.taps == {"raises": {}, "collect": {"limit": 4}}
    with pytest.raises(BadInput, match="--tap: names collect twice; give all its keys in one --tap"):
        engine_config({**given, "taps": ("collect:limit=4", "raises", "collect:limit=5")})
