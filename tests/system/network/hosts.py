"""Network namespaces as hosts. A namespace has no name: a child process holds it and ends with its standard input, so
that nothing is left when the test process is killed. Used by the tests of this folder.
Needs root, `unshare`, `ip` and `nsenter`.
"""

import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import IO

_PROBE = "ip tuntap add dev probe mode tun"


def why_not() -> str | None:
    """Why this machine cannot hold hosts and wires, or None where it can."""
    try:
        done = subprocess.run(["unshare", "--net", "sh", "-c", _PROBE], capture_output=True, text=True, timeout=10)
    except FileNotFoundError:
        return "network namespaces need the command unshare"
    return f"no network namespaces with TUN devices here: {done.stderr.strip()}" if done.returncode else None


class _Child:
    """A process that ends with its standard input."""

    def __init__(self, argv: list[str]) -> None:
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input: IO[str] = self._process.stdin
        self._output: IO[str] = self._process.stdout
        self.pid = self._process.pid

    def _expect(self, word: str) -> None:
        line = self._output.readline()
        if line != word + "\n":
            raise RuntimeError(f"process {self.pid} said {line!r} where {word!r} was due")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._input.close()
        self._process.wait(10)
        self._output.close()


class Host(_Child):
    """A network namespace with its loopback up."""

    def __init__(self) -> None:
        super().__init__(["unshare", "--net", "sh", "-c", "ip link set lo up && echo ready && exec cat"])

    def __enter__(self) -> "Host":
        self._expect("ready")
        return self

    def command(self, argv: list[str]) -> list[str]:
        """`argv` as run on this host."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", *argv]


class Wire(_Child):
    """Joins two hosts: `delay_s` each way, a share `loss` of packets dropped as `seed` draws, `rate_mbit` in each
    direction, 0: as fast as the process between them."""

    def __init__(
        self,
        a: Host,
        b: Host,
        address_a: str,
        address_b: str,
        *,
        delay_s: float = 0,
        loss: float = 0,
        rate_mbit: float = 0,
        seed: int = 0,
    ) -> None:
        forwarder = Path(__file__).with_name("forwarder.py")
        ends = [str(a.pid), str(b.pid), address_a, address_b]
        super().__init__([sys.executable, str(forwarder), *ends, str(delay_s), str(loss), str(rate_mbit), str(seed)])

    def __enter__(self) -> "Wire":
        self._expect("ready")
        return self

    def cut(self, *directions: str) -> None:
        """Cuts these directions, of `ab` and `ba`, and heals those not named."""
        self._input.write(" ".join(directions) + "\n")
        self._input.flush()
        self._expect("ok")
