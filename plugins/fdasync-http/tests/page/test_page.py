"""The page in a real browser, over two instances: one is slow, and one expert of one layer is never chosen.

`FDASYNC_SCREENSHOTS=docs` writes the screenshots there; else they go to the test's own folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fdasync_http import HttpConfig, app
from fdasync_http.server import Listen, serving

import fdasync
from fdasync import Instance, SamplingParams
from fdasync.errors import WeightsBroken
from fdasync.runner.synthetic import WEIGHTS_FILE, SyntheticRunner
from fdasync.runner.synthetic.oracle import SyntheticConfig
from fdasync.testing import synthetic_config

KEY = "sk-0123456789abcdef"
LAYERS, EXPERTS = 12, 32
DEAD_LAYER, DEAD = 7, 19
MODEL = {"num_moe_layers": LAYERS, "num_experts": EXPERTS, "top_k": 4, "num_blocks": 256, "pass_stamp": False}

pytestmark = pytest.mark.nightly


class DeadExpertRunner(SyntheticRunner):
    """Its routers never choose one expert of one layer, and one of another layer often."""

    async def bind(self, num_blocks: int, arena: Any, host: Any = None, snapshots: Any = None) -> None:
        inner = arena.scatter

        def scatter(index: Any, generations: Any, values: Any) -> None:
            rows = values["routing"].copy()
            rows[:, DEAD_LAYER][rows[:, DEAD_LAYER] == DEAD] = DEAD - 1
            rows[:, 2, 0] = np.where(rows[:, 2, 0] % 2, 5, rows[:, 2, 0])
            inner(index, generations, {**values, "routing": rows})

        arena.scatter = scatter
        await super().bind(num_blocks, arena, host)


async def load(router: fdasync.Router, until: asyncio.Event) -> None:
    """Clients that go on until the end, two thirds with a prompt that others have."""

    async def client(number: int) -> None:
        rng = random.Random(number)
        while not until.is_set():
            prompt = [*range(24), *[rng.randrange(90) for _ in range(8)]]
            async with router.generate(prompt, SamplingParams(max_tokens=rng.randrange(8, 60))) as stream:
                async for _ in stream:
                    pass

    await asyncio.gather(*[client(number) for number in range(10)])


async def test_who_reads_the_page_finds_the_slow_instance_and_the_dead_expert(tmp_path: Path, browse: Any) -> None:
    folder = Path(os.environ.get("FDASYNC_SCREENSHOTS", str(tmp_path)))
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / WEIGHTS_FILE).write_text(json.dumps({"weights_id": 7}))
    ended = asyncio.Event()
    async with AsyncExitStack() as stack:
        addresses = []
        for name, step_s in (("quick", 0.01), ("lazy", 0.04)):
            config = synthetic_config({**MODEL, "step_s": step_s}, role="mixed", host_blocks=64)
            runner = DeadExpertRunner(SyntheticConfig(**config.runner_config), config.runner_limits())
            addresses.append(f"ipc://{tmp_path}/{name}")
            await stack.enter_async_context(
                Instance(
                    config, listen=addresses[-1], name=name, runner=runner, transport="shm", transfer_process=False
                )
            )
        router = await stack.enter_async_context(fdasync.connect(addresses))
        served = await stack.enter_async_context(
            serving(app(router, HttpConfig(api_key=KEY)), Listen(port=0, drain_s=1.0))
        )
        loading = asyncio.ensure_future(load(router, ended))
        page = await stack.enter_async_context(browse())
        try:
            await _read(page, served.url, router, tmp_path / "new", folder)
        finally:
            ended.set()
            await asyncio.wait_for(loading, 300)


async def _read(page: Any, url: str, router: fdasync.Router, new: Path, folder: Path) -> None:
    await page.resize(1280, 900)
    await page.open(f"{url}/")
    # the key, by the keyboard alone
    await page.until("!document.getElementById('ask').hidden && document.activeElement.id === 'key'")
    said = "document.getElementById('status').textContent"
    await page.type("wrong-0123456789abcd")
    await page.press("Enter")
    await page.until(f"{said} === 'This key does not open it.' && document.activeElement.id === 'key'")
    await page.type(KEY)
    await page.press("Enter")
    await page.until("!document.getElementById('all').hidden")
    complaints = [one for one in page.complaints if "401" not in one]
    assert complaints == []
    page.complaints.clear()

    # which instance is slow, in words and not by its color alone
    await page.until("document.getElementById('problems').textContent.includes('lazy: slow')", 300)
    rows = await page.eval("[...document.querySelectorAll('#engines tbody tr')].map(row => row.innerText.split('\\t'))")
    assert [row[:3] for row in rows] == [["quick", "mixed", "running"], ["lazy", "mixed", "slow"]]
    tokens = await page.eval("document.getElementById('now').innerText")
    assert "tokens a second" in tokens

    # which expert is dead: in the table, and in the map by a key
    cells = f"[...document.querySelectorAll('#layers tbody tr')][{DEAD_LAYER}].innerText"
    await page.until(f"{cells}.trim().endsWith('{DEAD}')")
    others = await page.eval("[...document.querySelectorAll('#layers tbody tr')].map(row => row.cells[4].innerText)")
    assert [text for number, text in enumerate(others) if number != DEAD_LAYER] == [""] * (LAYERS - 1)
    assert await page.eval("document.querySelectorAll('#layers tbody tr')[2].cells[2].innerText") == "5"
    await page.eval("document.getElementById('span').focus()")
    await page.press("Tab")
    await page.until("document.activeElement.classList.contains('wide') || document.activeElement.id === 'map'")
    await page.eval("document.getElementById('map').focus()")
    await page.press("d")
    readout = "document.getElementById('readout').textContent"
    assert await page.eval(readout) == f"layer {DEAD_LAYER}, expert {DEAD}: never chosen"
    assert await page.eval("document.getElementById('readout').getAttribute('aria-live')") == "polite"
    await page.press("ArrowRight")
    assert (await page.eval(readout)).startswith(f"layer {DEAD_LAYER}, expert {DEAD + 1}: ")
    # pictures and controls have names for those who do not see them
    nodes = await page.accessible()
    named = dict(nodes)
    assert all(name for role, name in nodes if role in ("button", "combobox", "image", "img", "application", "region"))
    assert f"layer {DEAD_LAYER} expert {DEAD}" in named["application"], named
    headings = [name for role, name in nodes if role == "heading"]
    assert headings[:3] == ["fdasync", "Problems", "Now"]
    charts = [name for role, name in nodes if role in ("image", "img")]
    assert any("sampled now" in name for name in charts), charts

    # new weights have a table of their own
    await router.update_weights("step-1", new, mode="keep")
    await page.until("document.getElementById('version').value === 'step-1'")
    assert await page.eval("[...document.getElementById('version').options].map(one => one.value)") == ["step-1", "0"]
    await page.until("document.querySelectorAll('#charts polyline').length >= 8 && told.history.length >= 7", 300)
    await page.until(f"{cells}.trim().endsWith('{DEAD}')")
    (folder / "page.png").write_bytes(await page.screenshot())
    await page.resize(1280, 900, dark=True)
    (folder / "page-dark.png").write_bytes(await page.screenshot())
    # small windows scroll tables, and never the page, sideways
    await page.resize(360, 700)
    await page.until("document.documentElement.scrollWidth <= 360")

    # it can be stopped from moving
    await page.eval("document.getElementById('pause').click()")
    assert await page.eval("document.getElementById('pause').getAttribute('aria-pressed')") == "true"
    assert page.complaints == []
    assert {address.partition("?")[0] for address in page.asked} == {f"{url}/", f"{url}/v1/sight"}


async def test_who_reads_the_page_tells_each_state_from_the_others(tmp_path: Path, browse: Any) -> None:
    """One instance in each state, and the words for all of them together."""
    states = ["running", "paused", "updating", "asleep", "waits_for_weights", "broken"]
    tensors = [("weights", "uint64", (1,), b"\5" + bytes(7))]
    async with AsyncExitStack() as stack:
        engines, addresses = {}, []
        for state in states:
            config = synthetic_config({}, role="mixed", host_blocks=64)
            addresses.append(f"ipc://{tmp_path}/{state}")
            instance = Instance(
                config, listen=addresses[-1], name=f"i-{state}", transport="shm", transfer_process=False
            )
            engines[state] = (await stack.enter_async_context(instance)).engine
        router = await stack.enter_async_context(fdasync.connect(addresses))
        served = await stack.enter_async_context(serving(app(router), Listen(port=0, drain_s=1.0)))
        page = await stack.enter_async_context(browse())
        await page.open(f"{served.url}/")
        await page.until("document.getElementById('state').textContent === 'running'")
        await engines["paused"].pause()
        await engines["updating"].begin_weight_update()
        await engines["asleep"].sleep(1)
        await engines["waits_for_weights"].update_weights(1, tensors)
        await engines["waits_for_weights"].sleep(2)
        await engines["waits_for_weights"].wake()
        with pytest.raises(WeightsBroken):
            await engines["broken"].update_weights(1, tensors, expected="0" * 32)
        words = [state.replace("_", " ") for state in states]
        cells = "[...document.querySelectorAll('#engines tbody tr')].map(row => row.cells[2])"
        await page.until(f"{cells}.map(cell => cell.textContent).join() === {json.dumps(','.join(words))}")
        kinds = await page.eval(f"{cells}.map(cell => cell.className)")
        assert kinds == ["word good", "word", "word", "word", "word bad", "word bad"]
        assert await page.eval("document.getElementById('state').textContent") == ", ".join(
            [f"1 {words[at]}" for at in (0, 1, 4, 5, 2, 3)]
        )
        problems = await page.eval("[...document.querySelectorAll('#problems li')].map(one => one.textContent)")
        for state, told in (("waits_for_weights", "waits for weights"), ("broken", "weights are broken")):
            assert any(problem.startswith(f"i-{state}: ") and told in problem for problem in problems)
        assert not any(problem.startswith(("i-running", "i-paused", "i-updating", "i-asleep")) for problem in problems)
        # also for those who do not see it
        assert "status" in [role for role, _ in await page.accessible()]
        assert page.complaints == []
