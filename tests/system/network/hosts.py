"""Network namespaces as hosts, and what joins them. A namespace has no name: a child process holds it and ends with its
standard input, so that nothing is left when the test process is killed. Used by the tests of this folder,
`benchmarks.fleet.network` and `tests.nightly.chaos.chaos`.
Needs root, `unshare`, `ip` and `nsenter`; a `Cable` needs `tc` with the queue discipline tbf.
"""

import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import IO

#: networks by name: delay each way in seconds, share of packets lost, Mbit/s each way
NETWORKS = {
    "lan": (0.0, 0.0, 1000.0),
    "near": (0.0002, 0.01, 100.0),
    "region": (0.002, 0.01, 100.0),
    "far": (0.02, 0.01, 100.0),
}
_TBF = "tbf rate {rate_kbit:.0f}kbit burst 256k latency 50ms"
_PROBE = "ip tuntap add dev probe mode tun"
_PROBE_CABLE = (
    f"ip link add probe type veth peer name eborp && tc qdisc add dev probe root {_TBF.format(rate_kbit=1e6)}"
)


def _tried(script: str, what: str) -> str | None:
    try:
        done = subprocess.run(["unshare", "--net", "sh", "-c", script], capture_output=True, text=True, timeout=10)
    except FileNotFoundError:
        return "network namespaces need the command unshare"
    return f"no network namespaces with {what} here: {done.stderr.strip()}" if done.returncode else None


def why_not() -> str | None:
    """Why this machine cannot hold hosts and wires, or None where it can."""
    return _tried(_PROBE, "TUN devices")


def why_no_cable() -> str | None:
    """Why this machine cannot hold hosts and cables, or None where it can."""
    return _tried(_PROBE_CABLE, "veth devices of a rate (tc, tbf)")


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
        device: str = "wire",
    ) -> None:
        """`device`: its name on `b`; that on `a` is wire."""
        forwarder = Path(__file__).with_name("forwarder.py")
        ends = [str(a.pid), str(b.pid), address_a, address_b, device]
        super().__init__([sys.executable, str(forwarder), *ends, str(delay_s), str(loss), str(rate_mbit), str(seed)])

    def __enter__(self) -> "Wire":
        self._expect("ready")
        return self

    def cut(self, *directions: str) -> None:
        """Cuts these directions, of `ab` and `ba`, and heals those not named."""
        self._input.write(" ".join(directions) + "\n")
        self._input.flush()
        self._expect("ok")


class Cable:
    """Joins two hosts by a pair of veth devices of `rate_mbit` in each direction, without delay or loss: the kernel's
    own, with no process between them."""

    def __init__(self, a: Host, b: Host, address_a: str, address_b: str, *, rate_mbit: float) -> None:
        self._ends = ((a, address_a, address_b), (b, address_b, address_a))
        self._rate_mbit = rate_mbit

    def __enter__(self) -> "Cable":
        (a, *_), (b, *_) = self._ends
        pair = f"ip link add cable netns {a.pid} type veth peer name cable netns {b.pid}"
        subprocess.run(pair.split(), check=True)
        tbf = _TBF.format(rate_kbit=1000 * self._rate_mbit)
        for host, address, peer in self._ends:
            for line in (
                f"ip addr add {address} peer {peer} dev cable",
                "ip link set cable up",
                f"tc qdisc add dev cable root {tbf}",
            ):
                subprocess.run(host.command(line.split()), check=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        subprocess.run(self._ends[0][0].command(["ip", "link", "del", "cable"]), check=True)


def join(network: str, a: Host, b: Host, address_a: str, address_b: str, *, seed: int = 0) -> Wire | Cable:
    """What joins two hosts as `NETWORKS` says of `network`: a cable where nothing delays or loses."""
    delay_s, loss, rate_mbit = NETWORKS[network]
    if not delay_s and not loss:
        return Cable(a, b, address_a, address_b, rate_mbit=rate_mbit)
    return Wire(a, b, address_a, address_b, delay_s=delay_s, loss=loss, rate_mbit=rate_mbit, seed=seed)
