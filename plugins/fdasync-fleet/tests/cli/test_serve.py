"""`fdasync serve` as a user and a parent process meet it: ready lines, signals, errors in one line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvloop
from cli_options import options

import fdasync
from fdasync import SamplingParams
from fdasync.cli.common.options import engine_config, parse_policy, parse_store
from fdasync.drafting import Speculation
from fdasync.errors import BadInput, PluginError
from fdasync.testing import check_sample, oracle_of
from fdasync.testing.harness.engines import until
from tests.support.commands import command, config_file, config_of, errors, is_running, wait_for
from tests.support.plugins import install_plugin
from tests.support.router_scene import runs

if TYPE_CHECKING:
    from tests.support.commands import Running

PARAMS = SamplingParams(max_tokens=40, temperature=0.0)
PROMPT = list(range(30))
# of the synthetic runner
NOTE = "no model: tokens follow from those before them by a rule"


@pytest.mark.ci
def test_it_says_when_it_is_ready_serves_and_drains(tmp_path: Path) -> None:
    config = config_file(tmp_path, {"step_s": 0.03})
    address = f"ipc://{tmp_path}/m0"
    ours, theirs = os.pipe()
    arguments = [
        "serve", "--config", str(config), "--listen", address, "--name", "m0", "--max-running", "4",
        "--ready-fd", str(theirs), "--json-log", str(tmp_path / "log"), "--metrics-port", "0",
    ]  # fmt: skip

    oracle = oracle_of(config_of(config))

    async def ask(running: Running) -> None:
        async with fdasync.connect([address]) as router:
            assert router.stats().instances[0].role == "mixed"
            answer = asyncio.ensure_future(router.complete(PROMPT, PARAMS))
            await until(lambda: any(runs(one) for one in router.stats().instances))
            os.kill(running.process.pid, signal.SIGTERM)
            check_sample((await answer).samples[0], PROMPT, PARAMS, oracle)

    with command(tmp_path, *arguments, pass_fds=[theirs]) as running:
        os.close(theirs)
        with os.fdopen(ours) as pipe:
            ready = json.loads(pipe.read())
        assert ready["address"] == address
        assert (ready["name"], ready["role"], ready["model"]) == ("m0", "mixed", "synthetic")
        assert (ready["pid"], ready["block_tokens"], ready["num_blocks"]) == (running.process.pid, 4, 64)
        running.until(r"ready at ipc://\S+/m0 as m0 \(mixed\): synthetic, 64 blocks of 4 tokens")
        assert ready["notes"] == [NOTE]
        running.until(f"note: {NOTE}")
        with urllib.request.urlopen(f"http://127.0.0.1:{ready['metrics_port']}/metrics", timeout=300) as page:
            assert b"fdasync_" in page.read()
        uvloop.run(ask(running))
        assert running.wait() == 0, running.text
    assert "draining, waits for 1 requests" in running.text
    assert running.text.endswith("drained\n")
    assert '"event":"RequestEnded"' in (tmp_path / "log").read_text().replace(" ", "")
    assert not (tmp_path / "m0").exists()


@pytest.mark.ci
def test_the_second_signal_ends_at_once(tmp_path: Path) -> None:
    config = config_file(tmp_path, {"step_s": 0.2})
    address = f"ipc://{tmp_path}/m0"

    async def ask(running: Running) -> None:
        async with fdasync.connect([address]) as router:
            answer = asyncio.ensure_future(router.complete(PROMPT, SamplingParams(max_tokens=200)))
            await until(lambda: any(runs(one) for one in router.stats().instances))
            os.kill(running.process.pid, signal.SIGINT)
            await until(lambda: router.stats().instances[0].state == "draining")
            os.kill(running.process.pid, signal.SIGINT)
            assert (await answer).finish_reason == "abort"

    with command(tmp_path, "serve", "--config", str(config), "--listen", address) as running:
        running.until("ready at")
        uvloop.run(ask(running))
        assert running.wait() == 1, running.text
    assert "ending at once" in running.text
    assert "Traceback" not in running.text


@pytest.mark.ci
def test_requests_that_outlive_the_drain_end_with_what_they_have_at_its_deadline(tmp_path: Path) -> None:
    config = config_file(tmp_path, {"step_s": 0.05})
    address = f"ipc://{tmp_path}/m0"

    async def ask(running: Running) -> None:
        async with fdasync.connect([address]) as router:
            asked = [(2, 12), (3, 200), (4, 12)]
            answers = [
                asyncio.ensure_future(router.complete([number, *PROMPT], SamplingParams(max_tokens=most)))
                for number, most in asked
            ]
            await until(lambda: any(runs(one) for one in router.stats().instances))
            os.kill(running.process.pid, signal.SIGTERM)
            reasons = [(await answer).finish_reason for answer in answers]
            assert reasons == ["length", "abort", "length"]

    with command(tmp_path, "serve", "--config", str(config), "--listen", address, "--drain-s", "5") as running:
        running.until("ready at")
        uvloop.run(ask(running))
        assert running.wait() == 1, running.text
    assert "did not end within 5 s" in running.text


@pytest.mark.ci
def test_a_terminal_that_closes_ends_it_at_once(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/m0"
    with command(tmp_path, "serve", "--config", str(config_file(tmp_path)), "--listen", address) as running:
        running.until("ready at")
        running.signal(signal.SIGHUP)
        assert running.wait() == 1, running.text
    assert "ending at once" in running.text
    assert not (tmp_path / "m0").exists()


@pytest.mark.ci
def test_a_worker_that_dies_ends_it_with_the_reason(tmp_path: Path) -> None:
    config = config_file(tmp_path, process="worker")
    with command(tmp_path, "serve", "--config", str(config), "--listen", f"ipc://{tmp_path}/m0") as running:
        running.until("ready at")
        pid = running.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        # the other one copies blocks
        (worker,) = [each for each in children if "worker" in Path(f"/proc/{each}/cmdline").read_text()]
        os.kill(int(worker), signal.SIGKILL)
        assert running.wait() == 1, running.text
        wait_for(lambda: not is_running(int(worker)), "the end of the worker")
    assert "WorkerDied" in running.text
    assert "Traceback" not in running.text
    # ready, the runner's note, the line of the log, and the end
    assert len(running.text.splitlines()) == 4, running.text
    assert "ERROR fdasync.engine: EngineDied" in running.text


@pytest.mark.ci
def test_it_serves_without_a_store_that_is_not_there_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
        from fdasync.cache.store.memory import MemoryStore
        from fdasync.errors import StoreUnavailable

        class Absent(MemoryStore):
            async def open(self, regions):
                raise StoreUnavailable("absent", "nobody answers")
    """
    install_plugin(tmp_path, monkeypatch, source, "fdasync.stores", {"absent": "fdasync_bad:Absent"})
    config, address = config_file(tmp_path, store="absent"), f"ipc://{tmp_path}/m0"
    with command(tmp_path, "serve", "--config", str(config), "--listen", address) as running:
        running.until("without store absent for now, it is tried again: nobody answers")
        running.signal(signal.SIGTERM)
        assert running.wait() == 0, running.text
    with command(tmp_path, "serve", "--config", str(config), "--listen", address, "--store-required") as running:
        assert running.wait() == 2, running.text
    assert "nobody answers" in running.text


@pytest.mark.ci
def test_a_signal_while_it_loads_ends_it(tmp_path: Path) -> None:
    config = config_file(tmp_path, {"load_s": 30.0}, process="worker")
    with command(tmp_path, "serve", "--config", str(config), "--listen", f"ipc://{tmp_path}/m0") as running:
        pid = running.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        wait_for(lambda: bool(children.read_text()), "a worker")
        running.signal(signal.SIGTERM)
        assert running.wait() in (0, 130), running.text
    assert "Traceback" not in running.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--listen", "tcp://0.0.0.0:80"], ["neither ipc nor loopback", "fdasync keys new"]),
        (["--listen", "127.0.0.1:80"], ["'127.0.0.1:80' has no transport", "tcp://127.0.0.1:port"]),
        (["--listen", "tcp://127.0.0.1:99999"], ["tcp://127.0.0.1:99999", "out of range", "65535"]),
        (["--listen", "tcp://127.0.0.1:123456789"], ["out of range"]),
        (["--listen", "tcp://127.0.0.1:x"], ["has no port"]),
        (["--listen", "tcp://127.0.0.1"], ["has no port"]),
        (["--listen", "ipc:///x", "--peer", "tcp://127.0.0.1:0"], ["out of range"]),
        (["--listen", "ipc:///no/such/folder/x"], ["/no/such/folder/x", "No such file"]),
        (["--listen", "nonsense"], ["'nonsense'"]),
        ([], ["--listen"]),
        (["--listen", "ipc:///x", "--role", "both"], ["mixed", "prefill", "decode"]),
        (["--listen", "ipc:///x", "--transport", "no-such-transport"], ["shm", "tcp"]),
        (["--listen", "ipc:///x", "--block-tokens", "5"], ["--block-tokens", "power of two"]),
        (["--listen", "ipc:///x", "--max-step-tokens", "3"], ["--max-step-tokens", "at least"]),
        (["--listen", "ipc:///x", "--runner", "nonsense"], ["nonsense", "synthetic"]),
        (["--listen", "ipc:///x", "--runner", "transformers"], ["--model", "checkpoint folder"]),
        (["--listen", "ipc:///x", "--store", "no-such-store:x"], ["'no-such-store'", "file", "memory"]),
        (["--listen", "ipc:///x", "--policy", ""], ["--policy", "lacks the name of a policy", "NAME:key=value"]),
        (["--listen", "ipc:///x", "--tap", ""], ["--tap", "lacks the name of a tap"]),
        (["--listen", "ipc:///x", "--store-required"], ["--store-required", "names no store"]),
        (["--listen", "ipc:///x", "--dtype", "float32"], ["dtype"]),
        (["--listen", "ipc:///x", "--numerics", "exact"], ["--numerics", "'default' or 'fixed'"]),
        (["--listen", "ipc:///x", "--ready-fd", "99"], ["99", "no open descriptor"]),
        (["--listen", "ipc:///x", "--peer", "tcp://10.0.0.1:5"], ["10.0.0.1", "loopback"]),
    ],
)
def test_bad_input_is_named(
    arguments: list[str], words: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    said = errors(capsys, monkeypatch, "serve", "--config", str(config_file(tmp_path)), *arguments)
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "max_running = ", "TOML"),
        ("a.json", "{", "JSON"),
        ("a.json", "[1]", "holds no keys"),
        ("a.json", '{"max_runing": 3}', "max_runing"),
        ("a.toml", "lease_kill_s = 30.0", "config.lease_kill_s: is named 'store_kill_s' now"),
        ("a.toml", "max_running = 'many'", "max_running"),
        ("a.toml", "runner_config = 3", "runner_config"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_named(
    name: str, text: str, words: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = tmp_path / name
    path.write_text(text)
    assert words in errors(capsys, monkeypatch, "serve", "--config", str(path), "--listen", "ipc:///x")


@pytest.mark.ci
def test_a_model_that_cannot_be_loaded_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    arguments = ("--model", str(tmp_path / "model"), "--listen", f"ipc://{tmp_path}/m0")
    with command(tmp_path, "serve", *arguments) as running:
        assert running.wait() == 2
    assert "CheckpointError" in running.text
    assert "config.json" in running.text
    assert len(running.text.splitlines()) == 1, running.text


def test_options_beat_the_file(tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_text('model = "."\nrole = "decode"\nmax_running = 8\nrunner_config = { dtype = "float32" }\n')
    config = engine_config(options(config_path=path, max_running=4, store="file:kv", num_threads=2))
    assert (config.model, config.role, config.max_running) == (".", "decode", 4)
    assert config.runner_config == {"dtype": "float32", "num_threads": 2}
    assert (config.store, config.store_config) == ("file", {"path": "kv"})
    assert not config.store_required
    assert engine_config(options(config_path=path, store="file:kv", store_required=True)).store_required
    assert engine_config(options(config_path=path), "prefill").role == "prefill"
    assert engine_config(options(model="..", dtype="bfloat16")).role == "mixed"


def test_the_number_of_ranks_comes_from_the_file_or_from_the_option(tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_text('model = "."\ntensor_parallel = 2\n')
    assert engine_config(options(model=".")).tensor_parallel == 1
    assert engine_config(options(config_path=path)).tensor_parallel == 2
    assert engine_config(options(config_path=path, tensor_parallel=4)).tensor_parallel == 4
    with pytest.raises(BadInput, match="tensor_parallel"):
        engine_config(options(model=".", tensor_parallel=9))


def test_slices_of_sums_come_from_the_option_and_need_fixed_numerics() -> None:
    sliced = {"model": ".", "numerics": "fixed", "sum_slices": 4, "tensor_parallel": 2}
    assert engine_config(options(**sliced)).sum_slices == 4
    for change in ({"sum_slices": 3}, {"numerics": "default"}, {"sum_slices": None}):
        with pytest.raises(BadInput, match="sum_slices"):
            engine_config(options(**{**sliced, **change}))


def test_numerics_come_from_the_file_or_from_the_option(tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_text('model = "."\nnumerics = "fixed"\n')
    assert engine_config(options(model=".")).numerics == "default"
    assert engine_config(options(model=".", numerics="fixed")).numerics == "fixed"
    assert engine_config(options(config_path=path)).numerics == "fixed"
    assert engine_config(options(config_path=path, numerics="default")).numerics == "default"


def test_a_policy_is_named_with_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_text('model = "."\npolicy = "shortest-prompt-first"\npolicy_config = { ageing_s_per_token = 0.5 }\n')
    for text, name, config in (
        (None, "shortest-prompt-first", {"ageing_s_per_token": 0.5}),
        ("arrival", "arrival", {}),
        ("shortest-prompt-first:0.25", "shortest-prompt-first", {"ageing_s_per_token": 0.25}),
    ):
        made = engine_config(options(config_path=path, policy=text))
        assert (made.policy, made.policy_config) == (name, config)
    with pytest.raises(BadInput, match=r"--policy shortest-prompt-first\.ageing: is not a key that exists"):
        parse_policy("shortest-prompt-first:ageing=1")
    told = r"'no-such-policy' of fdasync\.policies: not installed; there are: .*\barrival\b"
    with pytest.raises(PluginError, match=told):
        parse_policy("no-such-policy")


def test_a_drafter_is_named_with_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_text('model = "."\n[speculation]\nmax_tokens = 5\nbudget = false\n')
    plain = options(model=".")
    assert engine_config(dict(plain)).speculation is None
    assert engine_config(options(config_path=path)).speculation == Speculation(max_tokens=5, budget=False)
    made = engine_config(options(config_path=path, drafter="ngram:keep_s=600", draft_tokens=2)).speculation
    assert made == Speculation(drafter="ngram", drafter_config={"keep_s": 600.0}, max_tokens=2, budget=False)
    assert engine_config({**plain, "drafter": "none"}).speculation == Speculation(drafter="none")
    with pytest.raises(BadInput, match=r"--drafter ngram\.keep: is not a key that exists"):
        engine_config({**plain, "drafter": "ngram:keep=1"})
    with pytest.raises(PluginError, match=r"'nobody' of fdasync\.drafters: not installed; there are: .*\bngram\b"):
        engine_config({**plain, "drafter": "nobody"})
    with pytest.raises(BadInput, match=r"--draft-tokens.*no drafter"):
        engine_config({**plain, "draft_tokens": 3})


@pytest.mark.parametrize(
    ("text", "store"),
    [
        (None, None),
        ("memory", ("memory", {})),
        ("memory:5000", ("memory", {"max_nbytes": 5000})),
        ("file:kv", ("file", {"path": "kv"})),
        # what is text in the plugin stays text
        ("file:path=123,threads=4,sync=data", ("file", {"path": "123", "threads": 4, "sync": "data"})),
        ("file:/a=b/c,max_nbytes=1000000", ("file", {"path": "/a=b/c", "max_nbytes": 1_000_000})),
        ('file:{"path": "a,b", "threads": 1}', ("file", {"path": "a,b", "threads": 1})),
        ("mooncake", ("mooncake", {})),
        ("mooncake:host:1", ("mooncake", {"master": "host:1"})),
        ("mooncake:host:1,rpc_timeout_s=0.5", ("mooncake", {"master": "host:1", "rpc_timeout_s": 0.5})),
        ("sqlite:kv.db", ("sqlite", {"path": "kv.db"})),
        ("sqlite:path=kv.db,max_nbytes=null", ("sqlite", {"path": "kv.db", "max_nbytes": None})),
    ],
)  # fmt: skip
def test_any_installed_store_can_be_named(text: str | None, store: object) -> None:
    name = (text or "").partition(":")[0]
    if name in ("mooncake", "sqlite"):
        pytest.importorskip({"mooncake": "fdasync_mooncake", "sqlite": "fdasync_example"}[name])
    assert parse_store(text) == store


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["--store", "the name of a store", "NAME:key=value"]),
        (":", ["--store", "the name of a store", "NAME:key=value"]),
        (":x", ["the name of a store"]),
        ("file:", ["configuration behind the colon", "NAME:{JSON}"]),
        ("file", ["--store file", "`path`", "max_nbytes"]),
        ("file:path=a,max_nbyte=3", ["--store file.max_nbyte", "not a key", "did you mean 'max_nbytes'?"]),
        ("file:path=a,max_nbytes=20GiB", ["--store file.max_nbytes", "not a whole number"]),
        ("file:path=a,max_nbytes=3", ["--store file.max_nbytes", "at least 16384"]),
        ("file:a,b", ["'b'", "key=value", "file:{...}"]),
        ("file:a,path=b", ["path is given twice"]),
        ('file:{"path": 3}', ["--store file.path", "`str`"]),
        ('file:{"path": ', ["no JSON"]),
    ],
)
def test_what_is_wrong_with_a_store_is_named(text: str, words: list[str]) -> None:
    with pytest.raises(BadInput) as caught:
        parse_store(text)
    for word in words:
        assert word in str(caught.value)


def test_a_store_that_is_not_installed_is_told_with_those_that_are() -> None:
    with pytest.raises(PluginError, match=r"'Memory'.*there are: .*\bfile\b.*\bmemory\b") as caught:
        parse_store("Memory:3")
    assert caught.value.name == "Memory"
