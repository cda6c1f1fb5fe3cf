"""A wire between two network namespaces: each end is a TUN device, and this process carries packets from one to the
other with a delay and a loss drawn from a seed, and with directions cut by command.
It knows nothing of what they hold.

`python forwarder.py PID_A PID_B ADDRESS_A ADDRESS_B DEVICE_B DELAY_S LOSS RATE_MBIT SEED`, started by `hosts.Wire` as
root. The device is `wire` on A and DEVICE_B on B. A rate of 0 is none; else each direction has a queue of 50 ms, and
loses what comes to a full one. It prints `ready`, then `ok` after each line on its standard input: the directions that
are cut from now on, of `ab` and `ba`, parted by spaces. It ends with its standard input, and its devices with it.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import os
import random
import struct
import subprocess
import sys

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MTU_NBYTES = 1500
_QUEUE_S = 0.05


def enter(pid: int) -> None:
    """Move the calling process into the network namespace of process `pid`. Raises OSError where the kernel refuses."""
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    refused = libc.setns(namespace, _CLONE_NEWNET)
    os.close(namespace)
    if refused:
        raise OSError(ctypes.get_errno(), f"setns to the network namespace of process {pid}")


def open_tun(pid: int, address: str, peer: str, device: str = "wire") -> int:
    """The descriptor of a new TUN device in the network namespace of process `pid`, up, with a route to `peer`.

    Moves the calling process into that namespace. Raises OSError where the kernel refuses, or CalledProcessError."""
    enter(pid)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
    subprocess.run(["ip", "addr", "add", address, "peer", peer, "dev", device], check=True)
    subprocess.run(["ip", "link", "set", device, "mtu", str(_MTU_NBYTES), "up"], check=True)
    return tun


async def carry(tun_a: int, tun_b: int, delay_s: float, loss: float, rate_mbit: float, seed: int) -> None:
    """Carries packets until standard input ends."""
    loop = asyncio.get_running_loop()
    draw = random.Random(seed)
    cut: set[str] = set()
    # when each direction has sent what it has
    free_at = {"ab": 0.0, "ba": 0.0}
    ended = loop.create_future()

    def deliver(tun: int, packet: bytes) -> None:
        with contextlib.suppress(BlockingIOError):  # a full queue loses the packet, as a switch does
            os.write(tun, packet)

    def receive(source: int, target: int, direction: str) -> None:
        packet = os.read(source, _MTU_NBYTES)
        if direction in cut or draw.random() < loss:
            return
        now = loop.time()
        sent_at = max(free_at[direction], now)
        if rate_mbit:
            if sent_at - now > _QUEUE_S:
                return
            sent_at += len(packet) * 8 / (rate_mbit * 1e6)
            free_at[direction] = sent_at
        loop.call_at(sent_at + delay_s, deliver, target, packet)

    def command() -> None:
        line = sys.stdin.buffer.readline()
        if not line:
            loop.remove_reader(sys.stdin.fileno())
            ended.set_result(None)
            return
        cut.clear()
        cut.update(line.decode().split())
        print("ok", flush=True)

    loop.add_reader(tun_a, receive, tun_a, tun_b, "ab")
    loop.add_reader(tun_b, receive, tun_b, tun_a, "ba")
    loop.add_reader(sys.stdin.fileno(), command)
    print("ready", flush=True)
    await ended


def main() -> None:
    pid_a, pid_b, address_a, address_b, device, delay_s, loss, rate_mbit, seed = sys.argv[1:]
    tun_a = open_tun(int(pid_a), address_a, address_b)
    tun_b = open_tun(int(pid_b), address_b, address_a, device)
    asyncio.run(carry(tun_a, tun_b, float(delay_s), float(loss), float(rate_mbit), int(seed)))


if __name__ == "__main__":
    main()
