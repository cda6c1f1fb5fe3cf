"""The attacks of `http_attack` on a front of its own: bounded memory, the answers that are meant, others served."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

from tests.nightly.http.attacker import IDLE
from tests.nightly.http.process import attack, front, memory_of

ROOT = Path(__file__).parents[4]
BODY = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
_MIB = 1 << 20
# most memory of the front, in MiB, and the only answers that the attacker may see
BOUNDS = {
    "slow_headers": (24, set()),
    "half_bodies": (48, set()),
    "idle_10000": (128, set()),
    # as long as the limit of bodies at most, and what is joined of it
    "body_200_mb": (16, {"413"}),
    "chunked_200_mb": (160, {"413"}),
    "json_10000_deep": (16, {"400"}),
    "json_900000_parts": (64, {"400"}),
    "headers_10_mb": (16, {"431"}),
    "headers_60_kb": (16, {"200"}),
    "pipelined_5000": (48, {"closed", "400", "200"}),
}
pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("name", list(BOUNDS))
async def test_an_attack_is_bounded_and_others_are_served(name, tmp_path):
    most_mib, statuses = BOUNDS[name]
    config = tmp_path / "engine.toml"
    config.write_text("[runner_config]\nstep_s = 0.002\n")
    with front("--runner", "synthetic", "--config", str(config)) as server:
        async with httpx2.AsyncClient(base_url=server.url, timeout=300) as client:
            assert (await client.post("/generate", json=BODY)).status_code == 200
            before = memory_of([server.pid]).rss
            slowest_s, most, served = 0.0, before, 0
            async with attack(name, server.port) as told:
                until = time.monotonic() + 4.0
                while time.monotonic() < until:
                    begin = time.monotonic()
                    assert (await client.post("/generate", json=BODY)).status_code == 200
                    slowest_s = max(slowest_s, time.monotonic() - begin)
                    most = max(most, memory_of([server.pid]).rss)
                    served += 1
            assert set(told["statuses"]) <= statuses
            assert told["statuses"] or not statuses, "the attack sent nothing"
            assert (most - before) / _MIB <= most_mib
            # a loop that an attack blocks would keep others waiting
            assert slowest_s < 2.0
            assert served > 5
            if name == "idle_10000":
                assert told["held"] == IDLE
            assert (await client.get("/health_generate")).status_code == 200


def test_the_play_tells_what_an_attack_costs_others(tmp_path):
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.nightly", "http_attack", "--only", "json_10000_deep", "--pairs", "1"]
    subprocess.run([*command, "--json", str(out)], cwd=ROOT, check=True, timeout=600)
    figures = json.loads(out.read_text())["figures"]
    assert set(figures) == {"engine_tpot_p99_json_10000_deep", "http_tpot_p99_json_10000_deep"}
    assert all(ratio > 0 for ratio in figures.values())
