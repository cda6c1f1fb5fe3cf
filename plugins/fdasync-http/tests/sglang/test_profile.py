"""`/start_profile`, `/stop_profile` and `fdasync profile`."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest
from fdasync_http.application import app
from fdasync_http.server import Listen, serving

from fdasync import Engine, EngineConfig
from fdasync.errors import RunnerError
from tests.support.commands import errors


class Recorded:
    """Stands for what a generator records: the calls, and when they end."""

    def __init__(self, scene, monkeypatch):
        self.calls: list[float] = []
        self.ends: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(scene.generator, "profile", self.profile)

    async def profile(self, seconds):
        self.calls.append(seconds)
        return await self.ends


async def test_a_stop_waits_for_the_files_and_says_where_they_are(scene, monkeypatch):
    recorded = Recorded(scene, monkeypatch)
    begun = await scene.client.post("/start_profile", json={"seconds": 2.5})
    assert (begun.status_code, begun.json()["message"]) == (200, "a profile of 2.5 s has begun")
    again = await scene.client.post("/start_profile")
    assert again.status_code == 409
    assert "a profile is being recorded" in again.text
    stopping = asyncio.ensure_future(scene.client.post("/stop_profile"))
    assert (await scene.client.get("/health")).status_code == 200
    assert not stopping.done()
    recorded.ends.set_result({"p0": "/tmp/a", "d0": "/tmp/b"})
    assert (await stopping).json()["folders"] == {"p0": "/tmp/a", "d0": "/tmp/b"}
    assert recorded.calls == [2.5]
    # the last one stays known, and the next may begin
    assert (await scene.client.post("/stop_profile")).json()["folders"] == {"p0": "/tmp/a", "d0": "/tmp/b"}
    await scene.client.post("/start_profile", json={"output_dir": "/etc", "num_steps": 3, "with_stack": True})
    await scene.client.post("/stop_profile")
    assert recorded.calls == [2.5, 5.0]


async def test_a_stop_without_a_start_is_none(scene):
    answer = await scene.client.post("/stop_profile")
    assert (answer.status_code, answer.json()["folders"]) == (200, {})


async def test_a_profile_that_failed_is_told_where_its_files_are_asked_for(scene, monkeypatch):
    assert (await scene.client.post("/start_profile")).status_code == 200
    answer = await scene.client.post("/stop_profile")
    assert answer.status_code == 400
    assert "records nothing of itself" in answer.text
    recorded = Recorded(scene, monkeypatch)
    recorded.ends.set_exception(RunnerError("a profile cannot be written to /profiles: no room"))
    await scene.client.post("/start_profile")
    answer = await scene.client.post("/stop_profile")
    assert answer.status_code == 503
    assert "no room" in answer.text


@pytest.mark.parametrize("body", [{"seconds": 0}, {"seconds": 11}, {"seconds": "x"}, {"steps": 3}])
async def test_wrong_values_are_refused(scene, body):
    answer = await scene.client.post("/start_profile", json=body)
    assert answer.status_code in (400, 422)
    assert next(iter(body)) in answer.text


async def command(*arguments):
    pipe = asyncio.subprocess.PIPE
    line = [sys.executable, "-m", "fdasync", "profile", *arguments]
    process = await asyncio.create_subprocess_exec(*line, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(300):
        out, told = await process.communicate()
    return process.returncode, out.decode(), told.decode()


@pytest.mark.ci
async def test_the_command_says_where_the_files_of_a_model_are(tmp_path):
    made = pytest.importorskip("fdasync_transformers").make_random_checkpoint
    model = made(tmp_path / "model", "qwen3_moe", size="tiny")
    sizes = {"block_tokens": 4, "num_blocks": 64, "max_context_tokens": 128, "max_running": 4}
    config = EngineConfig(
        model=str(model), tokenizer="none", process="worker", profile_folder=str(tmp_path / "profiles"),
        runner_config={"num_threads": 1}, **sizes,
    )  # fmt: skip
    async with Engine(config) as engine, serving(app(engine), Listen(port=0)) as server:
        status, out, told = await command(server.url, "--seconds", "0.1")
    assert (status, told) == (0, "a profile of 0.1 s has begun\n")
    name, _, folder = out.strip().partition(": ")
    assert name == "engine"
    assert os.listdir(folder) == ["rank-0.json.gz"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["ftp://x"], 2, "'ftp://x' is no http address"),
        (["http://127.0.0.1:1"], 1, "does not answer: [Errno 111] Connection refused; does `fdasync http` run there?"),
        (["http://127.0.0.1:abc"], 1, "nonnumeric port"),
        (["http://a b/"], 1, "can't contain control characters"),
        (["http://"], 2, "'http://' is no http address"),
        (["http://127.0.0.1:1", "--key-file", __file__], 2, "has no key: one line of ASCII"),
        (["http://127.0.0.1:1", "--seconds", "11"], 2, "11"),
    ],
)
def test_the_command_names_what_is_wrong(capsys, monkeypatch, arguments, status, words):
    assert words in errors(capsys, monkeypatch, "profile", *arguments, status=status)
