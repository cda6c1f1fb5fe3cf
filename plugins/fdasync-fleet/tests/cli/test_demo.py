"""The command line as a user meets it: exit codes, JSON, Ctrl-C, errors in one line."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from click.testing import CliRunner
from fdasync_fleet.cli.demo import one_engine as demo_serving
from fdasync_fleet.cli.demo.run import run_demo
from fdasync_fleet.cli.demo.workload import DemoOptions, Served
from fdasync_transformers import make_random_checkpoint
from rich.console import Console

from fdasync.cli.main import cli
from tests.support.commands import errors, interruptible

COMMAND = [sys.executable, "-c", "from fdasync.cli.main import main; main()"]


def command(
    *arguments: str, cache: Path | None = None, temporary: Path | None = None
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "160"}
    if temporary is not None:
        env["TMPDIR"] = str(temporary)
    if cache is not None:
        env["XDG_CACHE_HOME"] = str(cache)
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=600, env=env, check=False)


@pytest.fixture
def no_blocking() -> None:
    """In place of the one that looks: the runner of `--inline` computes on the loop of the demo."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a chat template: what these tests count is the workload."""
    folder = make_random_checkpoint(tmp_path_factory.mktemp("cli") / "model", size="tiny")
    (folder / "tokenizer_config.json").unlink()
    return folder


@pytest.mark.ci
def test_demo_makes_its_checkpoint_and_every_row_is_exact(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = command("demo", "--requests", "16", "--concurrency", "8", "--json", str(figures), cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(tmp_path / "fdasync") in done.stdout.replace("\n", "")
    values = json.loads(figures.read_text())
    assert values["requests"]["total"] == values["requests"]["finished"] == 16 + 3
    assert "What is the capital of France?" in done.stdout
    assert values["tokens"]["checked"] == values["tokens"]["equal"] + values["tokens"]["tied"] > 100
    assert values["tokens"]["distinct_greedy"] > 50
    assert values["routing"]["rows_checked"] == values["routing"]["rows_exact"] + values["routing"]["rows_tied"] > 1000
    assert values["throughput"]["prefix_hit_rate"] > 0.1
    assert values["throughput"]["ttft_ms_p50"] > 0


@pytest.mark.ci
def test_demo_checks_outputs_of_one_token(model: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = DemoOptions(
        model=model, requests=9, max_tokens=1, json_path=figures, inline=True, policy="shortest-prompt-first:0.01"
    )
    assert run_demo(options, Console(file=io.StringIO())) == 0
    values = json.loads(figures.read_text())
    assert values["requests"]["total"] == values["requests"]["finished"] == 9
    # the samples of the group are not greedy
    assert values["tokens"]["generated"] == values["requests"]["samples"] == 12
    assert values["tokens"]["checked"] == values["tokens"]["equal"] + values["tokens"]["tied"] == 8
    # of every prompt token
    assert values["routing"]["rows_checked"] == values["routing"]["rows_exact"] + values["routing"]["rows_tied"] > 100
    assert values["throughput"]["tpot_ms_p50"] == 0.0


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_demo_serves_again_from_a_store(kind: str, tmp_path: Path) -> None:
    # a model whose prefill costs enough for a store to be worth asking
    model = make_random_checkpoint(tmp_path / "model", size="medium")
    figures = tmp_path / "figures.json"
    store = f"file:{tmp_path / 'kv'}" if kind == "file" else kind
    arguments = ("--requests", "8", "--concurrency", "8", "--store", store, "--json", str(figures))
    done = command("demo", "--model", str(model), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads(figures.read_text())
    assert values["store"]["written_blocks"] > 0
    assert values["store"]["fetched_blocks"] > 0
    assert values["store"]["hit_tokens_store"] > 0
    assert 0 < values["store"]["ttft_ms_p50_stored"] < values["store"]["ttft_ms_p50_computed"]
    assert values["tokens"]["wrong"] == values["routing"]["rows_wrong"] == values["routing"]["rows_missing"] == 0
    assert "with the store" in done.stdout


@pytest.mark.nightly
def test_demo_says_what_a_store_without_room_refused(model: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = ("--requests", "4", "--max-tokens", "8", "--json", str(figures), "--inline")
    done = command("demo", "--model", str(model), *arguments, "--store", f"file:{tmp_path / 'kv'},max_nbytes=16384")
    assert done.returncode == 0, done.stdout + done.stderr
    store = json.loads(figures.read_text())["store"]
    assert store["written_blocks"] == 0
    assert store["refused_blocks"] > 0
    assert "the cap is 16384" in store["refused_why"]
    assert "refused by the store" in done.stdout
    assert "nothing came back from the store: it refused what was written: it never fits" in done.stdout


@pytest.mark.nightly
def test_demo_serves_over_prefill_and_decode_instances(model: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = ("--requests", "8", "--max-tokens", "16", "--pd", "1x1", "--json", str(figures))
    done = command("demo", "--model", str(model), *arguments, temporary=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads(figures.read_text())
    assert values["requests"]["total"] == values["requests"]["finished"] == 8
    assert values["tokens"]["checked"] == values["tokens"]["equal"] + values["tokens"]["tied"] > 30
    assert values["routing"]["rows_wrong"] == values["routing"]["rows_missing"] == 0
    assert (values["pd"]["prefill"], values["pd"]["decode"], values["pd"]["leases"]) == (1, 1, 8)
    assert values["pd"]["blocks"] > 0
    assert values["pd"]["nbytes"] > 0
    assert 0 < values["pd"]["lease_ms_mean"] <= values["pd"]["lease_ms_most"]
    assert "1 prefill, 1 decode" in done.stdout
    assert not list(tmp_path.glob("fdasync-*"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--pd", "1"), "PxD"),
        (("--pd", "0x1"), "1 to 16"),
        (("--pd", "1x99"), "1 to 16"),
        (("--pd", "1x1", "--inline"), "--inline"),
        (("--pd", "1x1", "--store", "memory"), "file:DIR"),
        (("--policy", "longest"), "shortest-prompt-first"),
        (("--policy", ""), "lacks the name of a policy"),
    ],
)
def test_demo_refuses_what_does_not_go_together(
    arguments: tuple[str, ...], words: str, model: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assert words in errors(capsys, monkeypatch, "demo", "--model", str(model), *arguments)


def test_demo_refuses_what_is_no_store(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = errors(capsys, monkeypatch, "demo", "--model", str(model), "--store", "no-such-store:x")
    # other plugins may have stores of their own
    assert re.search(r"'no-such-store'.*\bfile\b.*\bmemory\b", told, re.DOTALL)


OPTIONS = DemoOptions(requests=4, concurrency=4, max_tokens=8, inline=True)


@pytest.fixture(scope="module")
def served(model: Path) -> Served:
    """What the demo serves from the tiny model, once."""
    config = demo_serving._config(OPTIONS, model, None)
    return uvloop.run(demo_serving.serve(OPTIONS, config, Console(file=io.StringIO())))


@pytest.mark.parametrize(("words", "numerics"), [((), "default"), (("--numerics", "fixed"), "fixed")])
def test_the_demo_s_engine_has_the_numerics_of_the_option(
    words: tuple[str, ...], numerics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[DemoOptions] = []
    monkeypatch.setattr("fdasync_fleet.cli.demo.run.run_demo", lambda options, _console: given.append(options))
    assert CliRunner().invoke(cli, ["demo", *words]).exit_code == 0
    assert demo_serving._config(given[0], Path("model"), None).numerics == numerics


def judge(served: Served, model: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The demo's exit code, had it served this."""

    async def serve(*_arguments: Any, **_options: Any) -> Served:
        return served

    monkeypatch.setattr(demo_serving, "serve", serve)
    return run_demo(msgspec.structs.replace(OPTIONS, model=model), Console(file=io.StringIO()))


def wrong_token(sample: Any) -> Any:
    tokens = (*sample.token_ids[:-1], (sample.token_ids[-1] + 1) % 200)
    return msgspec.structs.replace(sample, token_ids=tokens)


def wrong_row(sample: Any) -> Any:
    array = sample.routing.array.copy()
    missing = next(expert for expert in range(8) if expert not in array[3, 1])
    array[3, 1, 0] = missing
    return msgspec.structs.replace(sample, routing=msgspec.structs.replace(sample.routing, array=array))


def short_rows(sample: Any) -> Any:
    routing = msgspec.structs.replace(sample.routing, array=sample.routing.array[:-1])
    return msgspec.structs.replace(sample, routing=routing)


def no_rows(sample: Any) -> Any:
    return msgspec.structs.replace(sample, routing=None)


def test_demo_ends_with_0_when_all_is_equal(served: Served, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge(served, model, monkeypatch) == 0


@pytest.mark.parametrize("change", [wrong_token, wrong_row, short_rows, no_rows])
def test_demo_ends_with_1_when_anything_differs(
    change: Any, served: Served, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = served.results[0]
    samples = (change(first.samples[0]), *first.samples[1:])
    results = [msgspec.structs.replace(first, samples=samples), *served.results[1:]]
    assert judge(msgspec.structs.replace(served, results=results), model, monkeypatch) == 1


def test_demo_names_what_is_wrong_with_a_checkpoint(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in model.iterdir():
        data = path.read_bytes()
        (broken / path.name).write_bytes(data[:-100] if path.suffix == ".safetensors" else data)
    told = errors(capsys, monkeypatch, "demo", "--model", str(broken), "--requests", "1", "--inline")
    assert "CheckpointError" in told
    assert ".safetensors" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("demo", "--requests", "0"), "'--requests': 0 is out of range"),
        (("demo", "--model", "/no/such/folder"), "Directory '/no/such/folder' does not exist"),
        (("nonsense",), "No such command 'nonsense'"),
        (("demo", "--what"), "No such option '--what'"),
    ],
)
def test_bad_arguments_end_with_2(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told in errors(capsys, monkeypatch, *arguments)


@pytest.mark.ci
def test_ctrl_c_ends_the_demo_and_its_worker(model: Path) -> None:
    arguments = [*COMMAND, "demo", "--model", str(model), "--requests", "5000", "--max-tokens", "64"]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=interruptible
    ) as running:
        worker = wait_for_child(running.pid)
        os.killpg(running.pid, signal.SIGINT)
        out, _ = running.communicate(timeout=600)
        assert running.returncode == 130, out
        assert b"interrupted" in out
        assert not Path(f"/proc/{worker}").exists()


def wait_for_child(pid: int) -> int:
    """The worker of a demo that has begun to serve: it has mapped the arena."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in children:
            if "fdasync-aux" in Path(f"/proc/{child}/maps").read_text():
                return int(child)
        time.sleep(0.02)
    raise AssertionError("no worker came up")
