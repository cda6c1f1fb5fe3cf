"""The dashboard for Grafana asks for series that a tap has, by labels that these have."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from fdasync.drafting import Speculation
from fdasync.telemetry.prometheus import PrometheusTap
from fdasync.testing import synthetic_config, synthetic_engine

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "fdasync.json"
_ASKED = re.compile(r"\b((?:fdasync_|vllm:)\w+)(\{[^}]*\})?")
_SUFFIXES = re.compile(r"_(?:bucket|sum|count)$")


def test_every_panel_asks_for_what_a_tap_tells() -> None:
    labels = asyncio.run(exposed())
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["title"] for panel in panels}) == len(panels) > 8
    for panel in panels:
        assert panel["targets"]
        for target in panel["targets"]:
            check(target, labels)


def check(target: dict[str, Any], labels: dict[str, set[str]]) -> None:
    """A query names series that there are, and groups and labels its lines by labels that these have."""
    asked = _ASKED.findall(target["expr"])
    assert asked, target
    known: set[str] = {"le"}
    for name, filters in asked:
        found = labels.get(name) or labels.get(_SUFFIXES.sub("", name))
        assert found is not None, f"nothing is called {name}"
        assert set(re.findall(r"(\w+)=~?", filters)) <= found, target
        known |= found
    grouped = {each.strip() for by in re.findall(r"by \(([^)]*)\)", target["expr"]) for each in by.split(",")}
    assert grouped <= known, target
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= (grouped or known), target


async def exposed() -> dict[str, set[str]]:
    """The labels of each metric of a tap whose series have the label `engine`, as a scrape of the front has."""
    config = synthetic_config(speculation=Speculation())
    async with synthetic_engine(config) as engine, PrometheusTap(engine, labels={"engine": "m0"}) as tap:
        return {
            f"{family.name}_total" if family.type == "counter" else family.name: {*family._labelnames, "engine"}
            for family in tap.collect()
        }
