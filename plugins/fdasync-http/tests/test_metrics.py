"""`GET /metrics`: what each engine does, and a row of docs/metrics.md for each metric."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from fdasync_http.config import HttpConfig
from fdasync_http.front import Front
from fdasync_http.metrics import Figures
from prometheus_client.parser import text_string_to_metric_families

from fdasync import Doing

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


async def states_of(scene):
    """What each engine does."""
    text = (await scene.client.get("/metrics")).text
    samples = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "fdasync_engine_state"
    ]
    assert {sample.value for sample in samples} <= {0.0, 1.0}
    assert {sample.labels["state"] for sample in samples} >= {*get_args(Doing), "draining", "failed", "away"}
    on = [sample.labels for sample in samples if sample.value]
    names = {sample.labels["engine"] for sample in samples}
    assert len(on) == len(names), "an engine does one thing"
    return {labels["engine"]: labels["state"] for labels in on}


async def say(scene, state, count):
    """Return once each says this; of instances it is as old as a router's last look."""
    async with asyncio.timeout(300):
        while list((await states_of(scene)).values()) != [state] * count:
            pass


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("kind", ["engine", "fleet"])
async def test_each_engine_says_what_it_does(scene_of, kind):
    async with scene_of(kind) as scene:
        count = 1 if kind == "engine" else 2
        await say(scene, "running", count)
        await scene.client.post("/sleep")
        await say(scene, "asleep", count)
        await scene.client.post("/wake_up")
        await scene.client.post("/pause")
        await say(scene, "paused", count)
        await scene.client.post("/resume")
        await say(scene, "running", count)


async def test_an_engine_that_is_out_of_reach_is_away_whatever_it_said_last(scene_of):
    async with scene_of() as scene:
        (now,) = await scene.generator.watch()
        lost = msgspec.structs.replace(now, name="", address="ipc:///run/lost", is_up=False)
        new = msgspec.structs.replace(now, name="new", sight=None)
        families = Figures(Front(scene.generator, HttpConfig(), None), (now, lost, new)).collect()
        (states,) = [family for family in families if family.name == "fdasync_engine_state"]
        said = {one.labels["engine"]: one.labels["state"] for one in states.samples if one.value}
    assert said == {now.name: "running", "ipc:///run/lost": "away", "new": "away"}


async def test_every_metric_of_the_front_is_on_the_page(scene_of):
    page = DOCS.read_text()
    rows = re.findall(r"^\| `(fdasync_http_\w+)` \| (\w+) \| ([^|]*?) \| [^|]+ \|$", page, re.MULTILINE)
    documented = {name: (kind, labels) for name, kind, labels in rows}
    assert len(documented) == len(rows), "a metric has two rows"
    async with scene_of() as scene:
        front = Front(scene.generator, HttpConfig(), None)
        described, others = {}, {}
        for family in Figures(front, await scene.generator.watch()).collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = family._labelnames
            kind = family.type, ", ".join(f"`{label}`" for label in labels) or "-"
            (described if name.startswith("fdasync_http_") else others)[name] = kind
    assert documented == described
    # those that engines have themselves are in rows of their own, without the engine's name
    own = {name: kind for name, kind in others.items() if not name.startswith("vllm:")}
    assert own["fdasync_engine_state"] == ("gauge", "`engine`, `state`")
    rows = re.findall(r"^\| `(fdasync_(?!http_)\w+)` \| (\w+) \| ([^|]*?) \| [^|]+ \|$", page, re.MULTILINE)
    told = {name: (kind, labels) for name, kind, labels in rows}
    assert len(own) > 40
    for name, (kind, labels) in own.items():
        assert (kind, labels.removeprefix("`engine`").removeprefix(", ") or "-") == told[name]
    assert any(name.startswith("vllm:") for name in others)
