"""The fuzzing program, on fewer cases than it sends by itself; and that it finds what it looks for."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from fdasync_http import app
from fdasync_http.server import Listen, serving

from tests.nightly.http import fuzz

_PYTHON = os.environ.get("FDASYNC_FUZZ_PYTHON", sys.executable)
_CASES = Path(fuzz.__file__).with_name("cases.py")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        sys.executable == _PYTHON and importlib.util.find_spec("schemathesis") is None,
        reason="Schemathesis is not installed (the extra `proof`), and FDASYNC_FUZZ_PYTHON names no Python that has it",
    ),
]


def test_every_answer_is_as_described_and_memory_does_not_grow():
    told = fuzz.run(_PYTHON, 1500, seed=1)
    for group, least in (("use", 900), ("control", 500)):
        assert told[group]["failures"] == {}
        assert told[group]["cases"] >= least
    generated = told["use"]["statuses"]
    for label in ("POST /generate", "POST /v1/chat/completions", "POST /v1/rollout", "POST /inference/v1/generate",
                  "POST /v1/responses", "POST /v1/messages", "POST /v1/messages/count_tokens",
                  "POST /v1/chat/completions/render"):  # fmt: skip
        assert generated[label]["200"] > 5, "the cases of a path are all refused"
    assert told["control"]["beside"] > 10


class Broken:
    """Answers of an app, some of them wrong."""

    def __init__(self, inner):
        self.inner = inner

    async def __call__(self, scope, receive, send):
        async def changed(message):
            if message["type"] == "http.response.start":
                path = scope["path"]
                if path == "/ping":
                    message["status"] = 418
                if path == "/version":
                    message["headers"] = [(b"content-type", b"text/csv"), *message["headers"][:1]]
                if path == "/model_info" and message["status"] == 405:
                    message["status"] = 200
            await send(message)

        await self.inner(scope, receive, changed)


async def test_wrong_statuses_media_types_and_methods_are_found(scene_of):
    async with scene_of() as scene, serving(Broken(app(scene.generator)), Listen(port=0, drain_s=1.0)) as served:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        process = await asyncio.create_subprocess_exec(
            _PYTHON, "-P", str(_CASES), served.url, "--group", "use", "--cases", "60",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, env=environment,
        )  # fmt: skip
        async with asyncio.timeout(300):
            out, _ = await process.communicate()
    failures = " ".join(json.loads(out)["failures"])
    for words in ("GET /ping: 418 Undocumented status code", "GET /version: 200 Undocumented Content-Type",
                  "POST /model_info: 200", "405 is due"):  # fmt: skip
        assert words in failures
    assert "/generate" not in failures
