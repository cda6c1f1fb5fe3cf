"""A fleet over two machines: network namespaces joined by a wire, each with a raylet, files and memory of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fdasync_fleet.link.keys import new_keys, save_keys

from tests.system.network.hosts import Host, Wire, why_not

pytest.importorskip("ray", reason="ray is not installed: pip install 'ray>=2.50'")

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = Path(__file__).parent / "programs" / "two_machines.py"
ADDRESS = "10.77.0.1:6380"
ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "disabled"}
WHOLE_S = 30.0
UP_S = 180.0
END_S = 20.0
# what a machine has for itself: Ray's folder of sockets and logs, and its memory
OWN = "mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && mount -t tmpfs -o size=1g tmpfs /dev/shm && exec "


def end(process: subprocess.Popen[Any]) -> None:
    """End a process that we started, and, for a raylet, those that it started."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(END_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


class Machine:
    """A host with a raylet."""

    def __init__(self, stack: ExitStack, host: Host, argv: list[str], log: Path) -> None:
        with log.open("wb") as file:
            command = host.command(["unshare", "--mount", "sh", "-c", f'{OWN}"$@"', "sh", *argv])
            # it waits for what it starts, and ends that at SIGTERM
            self._raylet = subprocess.Popen(command, stdout=file, stderr=file, env=ENVIRONMENT)
        stack.callback(end, self._raylet)
        self._host = host
        self.log = log

    def command(self, argv: list[str]) -> list[str]:
        """`argv` as run on this machine, beside its raylet."""
        return self._host.command(["nsenter", f"--mount=/proc/{self._raylet.pid}/ns/mnt", *argv])

    def sent_nbytes(self) -> int:
        """Over the wire so far."""
        listed = subprocess.run(self.command(["cat", "/proc/net/dev"]), capture_output=True, text=True, check=True)
        # the loopback and the wire
        return sum(int(line.split()[9]) for line in listed.stdout.splitlines()[2:] if "lo:" not in line)


def raylet(cpus: int, *options: str) -> list[str]:
    ray = Path(sys.executable).with_name("ray")
    sizes = ["--num-cpus", str(cpus), "--object-store-memory", str(80 << 20)]
    return [str(ray), "start", "--block", "--disable-usage-stats", *sizes, *options]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Wire, ExitStack]]:
    """The first of two machines, and their wire."""
    if problem := why_not():
        pytest.skip(problem)
    with ExitStack() as stack:
        a, b = stack.enter_context(Host()), stack.enter_context(Host())
        wire = stack.enter_context(Wire(a, b, "10.77.0.1", "10.77.0.2", delay_s=0.0002))
        options = ["--head", "--node-ip-address", "10.77.0.1", "--port", "6380", "--include-dashboard", "false"]
        first = Machine(stack, a, raylet(4, *options), tmp_path / "a.log")
        options = ["--address", ADDRESS, "--node-ip-address", "10.77.0.2"]
        Machine(stack, b, raylet(2, *options), tmp_path / "b.log")
        until_two(first)
        yield first, wire, stack


def until_two(machine: Machine) -> None:
    """Wait until the second raylet has joined."""
    code = (
        f"import ray, time; ray.init(address='{ADDRESS}', log_to_driver=False, logging_level='ERROR')\n"
        "while sum(node['Alive'] for node in ray.nodes()) < 2: time.sleep(0.1)"
    )
    until = time.monotonic() + UP_S
    while time.monotonic() < until:
        command = machine.command([sys.executable, "-c", code])
        done = subprocess.run(command, capture_output=True, text=True, timeout=UP_S, check=False, env=ENVIRONMENT)
        if done.returncode == 0:
            return
    raise AssertionError(f"{done.stderr}\n{machine.log.read_text()}")


@pytest.mark.nightly
def test_weights_cross_once_links_are_authenticated_and_a_machine_that_falls_silent_is_replaced(machines, tmp_path):
    machine, wire, stack = machines
    keys = tmp_path / "fleet.keys"
    save_keys(keys, new_keys(), replace=False)
    process = subprocess.Popen(
        machine.command([sys.executable, str(PROGRAM), ADDRESS, str(keys)]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    stack.callback(end, process)
    assert process.stdin is not None
    assert process.stdout is not None

    def told() -> dict[str, Any]:
        line = process.stdout.readline()
        assert line, "the fleet's process has ended"
        return json.loads(line)

    def go_on() -> None:
        process.stdin.write("\n")
        process.stdin.flush()

    outlived = told()
    assert len(set(outlived["nodes"])) == 2
    assert outlived["changed"]
    assert outlived["same"]
    assert "m1 has its weights from m0: who published them has ended" in outlived["lines"]
    go_on()
    assert told()["nodes"] == [2, 2]
    before = machine.sent_nbytes()
    go_on()
    published = told()
    sent = machine.sent_nbytes() - before
    print(f"{sent / published['nbytes']:.2f} bytes went over the wire for each byte of weights, to two instances")
    assert 1 <= sent / published["nbytes"] < 1.3
    go_on()
    serves = told()
    assert {address.rpartition(":")[0] for _, address, _, _ in serves["members"]} == {
        "tcp://10.77.0.1",
        "tcp://10.77.0.2",
    }
    assert len({node for *_, node in serves["members"]}) == 2
    assert serves["without_keys"] == "ConfigError"
    assert serves["with_other_keys"] == "DeadlineExceeded"
    assert serves["same"]
    assert serves["crossed"] == 2
    assert serves["updated"]
    assert serves["changed"]
    go_on()
    assert told()["what"] == "loaded"
    lost = [pid for _, address, pid, _ in serves["members"] if "10.77.0.2" in address]
    assert lost
    wire.cut("ab", "ba")
    go_on()
    whole = told()
    print(f"whole again {whole['whole_s']:.1f} s after the wire was cut; {sum(whole['done'])} requests ended whole")
    assert whole["whole_s"] < WHOLE_S
    assert min(whole["done"]) > 0
    # the raylet that was left alone learns that it was given up, and ends with all that it had
    wire.cut()
    until = time.monotonic() + UP_S
    while any(Path(f"/proc/{pid}").exists() for pid in lost) and time.monotonic() < until:
        time.sleep(0.2)
    assert [pid for pid in lost if Path(f"/proc/{pid}").exists()] == []
    go_on()
    assert process.wait(60) == 0
