"""A fleet over two hosts: a prefill instance on the one, a decode instance on the other, a router and its callers.

Used by the tests of this folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tests.support.commands import config_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from tests.system.network.hosts import Host

A, B = "10.9.0.1", "10.9.0.2"
COMMAND = str(Path(sys.executable).with_name("fdasync"))
#: longest that the end of a load takes; 30 s of it for a request's deadline
_END_S = 90.0

Part = Literal["prefill", "decode", "router"]


class Load:
    """The router and its callers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._expect("going\n")

    def _expect(self, said: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == said

    def update(self) -> None:
        """Update the weights while requests go on."""
        assert self._process.stdin is not None
        self._process.stdin.write("update\n")
        self._process.stdin.flush()
        self._expect("updated\n")

    def end(self) -> dict[str, Any]:
        """What became of the requests, once all of them have ended and one more was served."""
        told, _ = self._process.communicate(timeout=_END_S)
        assert self._process.returncode == 0
        found: dict[str, Any] = json.loads(told)
        return found


@contextmanager
def fleet(
    folder: Path,
    a: Host,
    b: Host,
    joined: AbstractContextManager[object],
    *,
    router: Host | None = None,
    weights: str = "",
    under: Mapping[Part, Sequence[str]] | None = None,
    runner: dict[str, Any] | None = None,
    late: bool = False,
    transport: Sequence[str] = ("tcp",),
) -> Iterator[Load]:
    """Blocks go over the network: hosts that are namespaces of one machine could map each other's memory.

    Args:
        joined: what joins the hosts.
        router: the router's host; None: the decode instance's.
        weights: the folder for updates.
        under: commands under which parts of it run, such as `env NAME=VALUE`.
        runner: of the configuration.
        late: a request at the end runs longer than its deadline.
        transport: by which blocks travel, with the options that go with it.
    """
    under = under or {}
    keys, config = str(folder / "keys.json"), config_file(folder, runner)
    subprocess.run([COMMAND, "keys", "new", keys], check=True, capture_output=True)
    with a, b, joined, ExitStack() as ended:

        def start(part: Part, host: Host, *argv: str) -> subprocess.Popen[str]:
            command = host.command([*under.get(part, ()), *argv])
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            ended.enter_context(process)
            ended.callback(process.kill)
            return process

        addresses = [f"tcp://{A}:7000", f"tcp://{B}:7001"]
        parts: tuple[tuple[Part, Host, str], ...] = (("prefill", a, addresses[0]), ("decode", b, addresses[1]))
        for role, host, address in parts:
            serve = ["serve", "--config", str(config), "--role", role, "--listen", address, "--keys", keys]
            out = start(role, host, COMMAND, *serve, "--transport", *transport).stdout
            assert out is not None
            assert "ready at" in out.readline()
        beside = b if router is None else router
        argv = ["-m", "tests.system.network._load", str(config), keys, weights, str(int(late)), *addresses]
        yield Load(start("router", beside, sys.executable, *argv))


def check(found: dict[str, Any]) -> None:
    """Every request ended once, right or with an error that allows another try; instances hold nothing of it."""
    assert sum(found["ends"].values()) == found["asked"], found
    assert found["held"] == []
    assert not [end for end in found["ends"] if end.startswith("wrong")], found
    assert found["live"] == 0
    assert found["received_blocks"] > 0, "no hand-over crossed the wire"
