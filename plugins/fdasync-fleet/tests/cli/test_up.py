"""`fdasync up` as a user meets it: what it starts, says and leaves behind. Real processes, synthetic runner."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import select
import signal
import socket
import sys
import termios
import time
from typing import TYPE_CHECKING

import msgspec
import pytest
import uvloop
from fdasync_fleet.cli.local.fleet import plans_for
from fleet_up import up

import fdasync
from fdasync import EngineConfig, SamplingParams
from fdasync.runner.synthetic import WEIGHTS_FILE
from fdasync.runner.synthetic.oracle import Oracle, SyntheticConfig
from fdasync.testing import check_sample, oracle_of
from fdasync.testing.harness.engines import until
from tests.support.commands import DEADLINE_S, children, command, config_file, config_of, errors, is_running, wait_for
from tests.support.plugins import install_plugin
from tests.support.router_scene import runs

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.commands import Running

pytestmark = pytest.mark.ci


# as `fdasync up --mixed 2`, but for who is given up when
_IMPATIENT = """
import json, sys
from pathlib import Path
from fdasync import EngineConfig
from fdasync_fleet.cli.local.restarts import RestartRules
from fdasync_fleet.cli.local.options import UpOptions
from fdasync_fleet.cli.up import run_up

config = EngineConfig.from_mapping(json.loads(Path(sys.argv[1]).read_text()))
sys.exit(run_up(config, UpOptions(mixed=2, folder=sys.argv[2]), RestartRules(first_s=0.01, limit=LIMIT)))
"""

# its router never gets to its end
_DEAF = """
import asyncio
from fdasync_fleet.router.router import Router

LIMIT = 1

async def start(self):
    print("connecting", flush=True)
    await asyncio.sleep(600)

Router.start = start
"""

# the third process cannot be started
_SHORT = """
from fdasync_fleet.cli.local import child as local_child

LIMIT = 2

class Popen(local_child.subprocess.Popen):
    count = 0

    def __init__(self, *args, **kwargs):
        Popen.count += 1
        if Popen.count == 3:
            raise OSError(24, "Too many open files")
        super().__init__(*args, **kwargs)

local_child.subprocess.Popen = Popen
"""


def answers(path: Path) -> bool:
    """Whether somebody listens there."""
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) == 0


def test_requests_go_over_two_instances_and_ctrl_c_drains(tmp_path: Path) -> None:
    config = config_file(tmp_path, {"step_s": 0.02})
    oracle = oracle_of(config_of(config))

    async def ask(running: Running, addresses: list[str]) -> None:
        async with fdasync.connect(addresses) as router:
            prompts = [[number, *range(30)] for number in range(6)]
            params = SamplingParams(max_tokens=40, temperature=0.0)
            tasks = [asyncio.ensure_future(router.complete(prompt, params)) for prompt in prompts]
            await until(lambda: sum(one.live for one in router.stats().instances) == len(prompts))
            os.kill(running.process.pid, signal.SIGINT)
            for prompt, result in zip(prompts, await asyncio.gather(*tasks), strict=True):
                check_sample(result.samples[0], prompt, params, oracle)

    with up(tmp_path, config, "--prefill", "1", "--decode", "1") as (running, addresses, pids):
        assert list(pids) == ["p0", "d0"]
        uvloop.run(ask(running, addresses))
        assert running.wait() == 0, running.text
    assert "draining" in running.text
    assert "all drained" in running.text
    assert "NAME" in running.text


def test_a_killed_child_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    config = config_file(tmp_path)
    oracle = oracle_of(config_of(config))
    params = SamplingParams(max_tokens=8, temperature=0.0)

    async def ask(addresses: list[str], pid: int) -> None:
        async with fdasync.connect(addresses) as router:
            os.kill(pid, signal.SIGKILL)
            for number in range(4):
                result = await router.complete([number] * 20, params, deadline_s=300)
                check_sample(result.samples[0], [number] * 20, params, oracle)

    with up(tmp_path, config, "--prefill", "1", "--decode", "2", "--restart", "no") as (running, addresses, pids):
        uvloop.run(ask(addresses, pids["d0"]))
        running.until(r"d0 \(decode\) was ended by SIGKILL; the others go on")
        running.signal(signal.SIGTERM)
        assert running.wait() == 1, running.text
    assert "started again" not in running.text


def test_a_killed_child_is_started_again_and_joins_with_the_fleets_weights(tmp_path: Path) -> None:
    config = config_file(tmp_path)
    new = tmp_path / "new"
    new.mkdir()
    (new / WEIGHTS_FILE).write_text(json.dumps({"weights_id": 1234}))
    oracle = Oracle(msgspec.structs.replace(SyntheticConfig(**config_of(config).runner_config), weights_id=1234))
    params = SamplingParams(max_tokens=8, temperature=0.0)

    async def ask(addresses: list[str], pid: int) -> None:
        async with fdasync.connect(addresses) as router:
            await router.update_weights(5, str(new))
            os.kill(pid, signal.SIGKILL)
            await until(lambda: not router.stats().instances[0].is_up)
            for number in range(4):
                result = await router.complete([number] * 20, params, deadline_s=300)
                check_sample(result.samples[0], [number] * 20, params, oracle)
            # it comes with the weights of its checkpoint, and gets those of the others
            await until(lambda: router.stats().instances[0].is_up and not router.stats().instances[0].problem)
            result = await router.complete([7] * 20, params, deadline_s=300, prefill=addresses[0])
            check_sample(result.samples[0], [7] * 20, params, oracle)
            assert [span.version for span in result.samples[0].weight_version] == ["5"]
            assert router.stats().dropped == router.stats().missing == ()
            assert [one.weight_version for one in router.stats().instances] == ["5", "5"]

    with up(tmp_path, config, "--mixed", "2") as (running, addresses, pids):
        uvloop.run(ask(addresses, pids["m0"]))
        assert "m0 (mixed) was ended by SIGKILL; it is started again in 0.5 s" in running.text
        again = children(running.process.pid)
        assert again["m1"] == pids["m1"]
        assert again["m0"] != pids["m0"]
        running.signal(signal.SIGTERM)
        assert running.wait() == 0, running.text
    assert not is_running(again["m0"])
    assert re.search(r"m0 +mixed +ended .* 1 ", running.text), running.text


def test_those_that_do_not_stay_up_are_given_up_by_name(tmp_path: Path) -> None:
    arguments = (str(config_file(tmp_path)), str(tmp_path / "run"))
    with command(tmp_path, *arguments, program=[sys.executable, "-c", "LIMIT = 1" + _IMPATIENT]) as running:
        running.until("ready; connect with")
        killed: dict[str, int] = {}
        for name in ("m0", "m1") * 2:

            def alive(name: str = name) -> int:
                pid = children(running.process.pid).get(name, 0)
                return 0 if pid == killed.get(name) else pid

            wait_for(lambda: bool(alive()), name)
            killed[name] = alive()
            os.kill(killed[name], signal.SIGKILL)
        # as long as one of them is there, or comes back, it goes on
        assert running.wait() == 1, running.text
    for name in ("m0", "m1"):
        assert running.text.count(f"{name} (mixed) was ended by SIGKILL; it is started again in 0.01 s") == 1
        assert f"{name} (mixed) was ended by SIGKILL; it was started again 1 times, and is given up" in running.text
        assert re.search(rf"{name} +mixed +given up .* 1 ", running.text), running.text
    assert "drained" not in running.text
    assert not (tmp_path / "run").exists()


def test_ctrl_c_ends_it_while_it_waits_to_start_one_again(tmp_path: Path) -> None:
    with up(tmp_path, config_file(tmp_path), "--mixed", "1", "--folder", str(tmp_path / "run")) as (running, _, pids):
        os.kill(pids["m0"], signal.SIGKILL)
        running.until("it is started again in 0.5 s")
        running.signal(signal.SIGINT)
        assert running.wait() == 1, running.text
    assert not (tmp_path / "run").exists()
    assert "Traceback" not in running.text


def test_one_that_was_told_to_end_stays_away(tmp_path: Path) -> None:
    with up(tmp_path, config_file(tmp_path), "--mixed", "2") as (running, _, pids):
        os.kill(pids["m0"], signal.SIGTERM)
        running.until(r"m0 \(mixed\) ended with exit code 0; the others go on")
        running.signal(signal.SIGTERM)
        assert running.wait() == 1, running.text


def test_a_store_that_is_not_there_is_said_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        import os
        from fdasync.cache.store.memory import MemoryStore
        from fdasync.errors import StoreUnavailable

        class Absent(MemoryStore):
            async def open(self, regions):
                if not os.path.exists(f"{os.environ['TMPDIR']}/there"):
                    raise StoreUnavailable("absent", "nobody answers")
                await super().open(regions)
    """
    install_plugin(tmp_path, monkeypatch, source, "fdasync.stores", {"absent": "fdasync_bad:Absent"})
    with up(tmp_path, config_file(tmp_path, store="absent"), "--mixed", "1") as (running, _, _):
        running.until("m0: without its store for now, it is tried again: .*nobody answers")
        (tmp_path / "there").touch()
        running.until("m0: its store is used again")
        running.signal(signal.SIGTERM)
        assert running.wait() == 0, running.text


def test_the_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    config = config_file(tmp_path, {"step_s": 0.2})

    async def ask(running: Running, addresses: list[str]) -> None:
        async with fdasync.connect(addresses) as router:
            answer = asyncio.ensure_future(router.complete([1, 2, 3], SamplingParams(max_tokens=200)))
            await until(lambda: any(runs(one) for one in router.stats().instances))
            os.kill(running.process.pid, signal.SIGINT)
            await until(lambda: any(one.state == "draining" for one in router.stats().instances))
            os.kill(running.process.pid, signal.SIGINT)
            assert (await answer).finish_reason == "abort"

    with up(tmp_path, config, "--mixed", "2", "--folder", str(tmp_path / "run")) as (running, addresses, _):
        assert addresses == [f"ipc://{tmp_path}/run/m{number}" for number in range(2)]
        uvloop.run(ask(running, addresses))
        assert running.wait() == 1, running.text
    assert "ending all at once" in running.text
    assert not (tmp_path / "run").exists()


def test_nothing_is_left_when_its_terminal_closes(tmp_path: Path) -> None:
    terminal, theirs = os.openpty()

    def lead() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    with command(
        tmp_path, "up", "--config", str(config_file(tmp_path)), "--mixed", "2", "--folder", str(tmp_path / "run"),
        stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=lead,
    ) as running:  # fmt: skip
        os.close(theirs)
        said = b""
        while b"fdasync.connect(" not in said:
            assert select.select([terminal], [], [], DEADLINE_S)[0], said
            said += os.read(terminal, 1 << 16)
        pids = children(running.process.pid)
        assert len(pids) == 2
        os.close(terminal)
        assert running.wait() == 1
        wait_for(lambda: not any(map(is_running, pids.values())), "the end of its processes")
    assert not (tmp_path / "run").exists()
    assert not list(tmp_path.glob("fdasync-*"))


def test_a_hangup_ends_all_at_once(tmp_path: Path) -> None:
    with up(tmp_path, config_file(tmp_path), "--mixed", "1", "--folder", str(tmp_path / "run")) as (running, _, _):
        running.signal(signal.SIGHUP)
        assert running.wait() == 1, running.text
    assert "ending all at once" in running.text
    assert "draining" not in running.text
    assert not (tmp_path / "run").exists()


def test_nohup_keeps_it(tmp_path: Path) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with up(tmp_path, config_file(tmp_path), "--mixed", "1", preexec_fn=ignore) as (running, _, _):
        running.signal(signal.SIGHUP)
        running.signal(signal.SIGTERM)
        assert running.wait() == 0, running.text
    assert "all drained" in running.text


def test_it_goes_on_when_nobody_reads_stdout_any_more(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    config = config_file(tmp_path)
    os.close(ours)

    async def ask(addresses: list[str]) -> None:
        async with fdasync.connect(addresses) as router:
            assert (await router.complete([1, 2, 3], SamplingParams(max_tokens=2))).samples

    # what it says is read from stderr
    with up(tmp_path, config, "--mixed", "1", stdout=theirs) as (running, addresses, _):
        os.close(theirs)
        uvloop.run(ask(addresses))
        running.signal(signal.SIGTERM)
        assert running.wait() == 0, running.text
    lines = running.text.splitlines()
    assert lines[0].startswith("fdasync up: stdout is gone (Broken pipe); it goes on")
    assert lines[1].startswith("fdasync up: loading m0")
    assert lines[-1] == "fdasync up: all drained"
    assert "Traceback" not in running.text


def test_its_folder_keeps_what_others_put_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("--mixed", "2", "--folder", str(run), "--store", f"file:{run}/store")
    with up(tmp_path, config_file(tmp_path), *arguments) as (running, _, pids):
        (run / "notes").write_text("mine")
        (run / "m0.json").write_text("mine too")
        # it leaves its socket behind
        os.kill(pids["m1"], signal.SIGKILL)
        running.until("m1 .* was ended by SIGKILL")
        running.signal(signal.SIGTERM)
        assert running.wait() == 1, running.text
    assert sorted(os.listdir(run)) == ["m0.json", "notes", "store"]
    assert sorted(os.listdir(run / "store")) == ["m0", "m1"]
    assert (run / "m0.json").read_text() == "mine too"


def test_a_second_one_in_its_folder_is_refused_and_harms_no_instance(tmp_path: Path) -> None:
    config, run = config_file(tmp_path), tmp_path / "run"
    arguments = ("--mixed", "1", "--folder", str(run))

    async def ask(addresses: list[str]) -> None:
        async with fdasync.connect(addresses) as router:
            assert (await router.complete([1, 2, 3], SamplingParams(max_tokens=2))).samples

    with up(tmp_path, config, *arguments) as (running, addresses, _):
        (tmp_path / "second").mkdir()
        with command(tmp_path / "second", "up", "--config", str(config), *arguments) as second:
            assert second.wait() == 2
        assert f"other instances have their sockets in {run}" in second.text
        assert len(second.text.splitlines()) == 1, second.text
        uvloop.run(ask(addresses))
        running.signal(signal.SIGTERM)
        assert running.wait() == 0, running.text
    assert not run.exists()


def test_files_of_others_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "p0").write_text("mine")
    arguments = ("--prefill", "1", "--decode", "1", "--folder", str(tmp_path))
    with command(tmp_path, "up", "--config", str(config_file(tmp_path)), *arguments) as running:
        assert running.wait() == 2
    assert f"{tmp_path}/p0" in running.text
    assert "loading" not in running.text
    assert (tmp_path / "p0").read_text() == "mine"


def test_it_takes_the_folder_of_one_that_was_killed(tmp_path: Path) -> None:
    config, run = config_file(tmp_path), tmp_path / "run"
    arguments = ("--mixed", "1", "--folder", str(run))
    with command(tmp_path, "up", "--config", str(config), *arguments) as running:
        running.until("ready; connect with")
        pids = children(running.process.pid)
        running.signal(signal.SIGKILL)
        running.wait()
        wait_for(lambda: not any(map(is_running, pids.values())), "the end of its children")
    assert os.listdir(run) == ["m0"]
    (tmp_path / "out").unlink()
    with up(tmp_path, config, *arguments) as (running, _, _):
        running.signal(signal.SIGTERM)
        assert running.wait() == 0, running.text
    assert not os.listdir(run)


def test_a_child_that_cannot_start_ends_all_and_is_named(tmp_path: Path) -> None:
    config = config_file(tmp_path, {"no_such_key": 1})
    with command(tmp_path, "up", "--config", str(config), "--prefill", "1", "--decode", "1") as running:
        assert running.wait() == 2
    assert "did not start: it ended with exit code 2" in running.text
    assert "no_such_key" in running.text
    assert "Traceback" not in running.text
    assert not list(tmp_path.glob("fdasync-*"))


def test_one_that_ends_while_others_load_ends_all_and_is_named(tmp_path: Path) -> None:
    arguments = ("--mixed", "2", "--folder", str(tmp_path / "run"))
    with command(tmp_path, "up", "--config", str(config_file(tmp_path)), *arguments) as running:
        wait_for(lambda: len(children(running.process.pid)) == 2, "both")
        pids = children(running.process.pid)
        os.kill(pids["m1"], signal.SIGSTOP)
        # it takes requests, and `up` knows that in a moment
        wait_for((tmp_path / "run" / "m0").exists, "the first one")
        wait_for(lambda: answers(tmp_path / "run" / "m0"), "an answer of the first one")
        time.sleep(0.5)
        os.kill(pids["m0"], signal.SIGKILL)
        running.until("m0 (ended before all were ready|did not start): it was ended by SIGKILL")
        # the other one cannot end as it should
        os.kill(pids["m1"], signal.SIGCONT)
        assert running.wait() == 1, running.text
        wait_for(lambda: not any(map(is_running, pids.values())), "the end of its processes")
    assert "ready; connect with" not in running.text
    assert not (tmp_path / "run").exists()


def test_ctrl_c_ends_it_while_it_connects(tmp_path: Path) -> None:
    arguments = (str(config_file(tmp_path)), str(tmp_path / "run"))
    with command(tmp_path, *arguments, program=[sys.executable, "-c", _DEAF + _IMPATIENT]) as running:
        running.until("connecting")
        os.kill(children(running.process.pid)["m0"], signal.SIGKILL)
        # it does not wait for the connection to start one again
        running.until("m0 .* was ended by SIGKILL; it is started again in 0.01 s")
        wait_for(lambda: len(children(running.process.pid)) == 2, "another one in its place")
        running.signal(signal.SIGINT)
        assert running.wait() == 130, running.text
    assert "interrupted while it connected" in running.text
    assert "Traceback" not in running.text
    assert not (tmp_path / "run").exists()


def test_one_that_cannot_be_started_again_is_tried_later(tmp_path: Path) -> None:
    arguments = (str(config_file(tmp_path)), str(tmp_path / "run"))
    with command(tmp_path, *arguments, program=[sys.executable, "-c", _SHORT + _IMPATIENT]) as running:
        running.until("ready; connect with")
        pids = children(running.process.pid)
        os.kill(pids["m0"], signal.SIGKILL)
        running.until("m0 cannot be started: .*Too many open files; it is started again in 0.02 s")
        wait_for(lambda: children(running.process.pid).get("m0", pids["m0"]) != pids["m0"], "another one")
        running.signal(signal.SIGTERM)
        running.wait()
    assert "Traceback" not in running.text
    assert not (tmp_path / "run").exists()


def test_children_end_with_an_up_that_was_killed(tmp_path: Path) -> None:
    with command(tmp_path, "up", "--config", str(config_file(tmp_path)), "--mixed", "1") as running:
        running.until("ready; connect with")
        pids = children(running.process.pid)
        running.signal(signal.SIGKILL)
        running.wait()
        wait_for(lambda: not any(map(is_running, pids.values())), "the end of its children")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no instances: say --prefill 1 --decode 1"),
        (("--prefill", "1"), "add --decode 1"),
        (("--decode", "1"), "add --prefill 1"),
        (("--mixed", "1", "--listen", "ipc:///run/some"), "say --folder, in which each instance has its own"),
        (("--mixed", "1", "--listen", "tcp://10.0.0.5:7000"), "fdasync keys new FILE"),
        (("--mixed", "1", "--folder", __file__), f"'--folder': Directory '{__file__}' is a file."),
        (("--mixed", "1", "--json-log", __file__), f"'--json-log': Directory '{__file__}' is a file."),
        (("--mixed", "1", "--host", "10.0.0.5"), "say --listen tcp://HOST:PORT, too"),
        (("--mixed", "3", "--listen", "tcp://127.0.0.1:65534"), "the port of 'tcp://127.0.0.1:65536' is out of range"),
    ],
)
def test_what_cannot_work_is_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    assert words in errors(capsys, monkeypatch, "up", "--config", str(config_file(tmp_path)), *arguments)


def test_instances_share_cores_and_have_stores_of_their_own(tmp_path: Path) -> None:
    config = EngineConfig(model="m", store="file", store_config={"path": "kv"}, role="mixed")
    plans = plans_for(config, {"prefill": 1, "decode": 2})
    assert [(plan.name, plan.role, plan.config.role) for plan in plans] == [
        ("p0", "prefill", "prefill"), ("d0", "decode", "decode"), ("d1", "decode", "decode"),
    ]  # fmt: skip
    assert [plan.config.store_config["path"] for plan in plans] == ["kv/p0", "kv/d0", "kv/d1"]
    places = [plan.config.runner_config for plan in plans]
    assert [(place["instance"], place["instances"]) for place in places] == [(0, 3), (1, 3), (2, 3)]
    threads = {plan.config.runner_config["num_threads"] for plan in plans}
    assert threads == {max((max(len(os.sched_getaffinity(0)) - 1, 1)) // 3, 1)}
