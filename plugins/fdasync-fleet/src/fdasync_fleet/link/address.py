"""Checks addresses: without keys a wire takes Unix sockets and loopback only, and refuses any other address by name.

Without keys any process that can connect can pretend to be an instance (`keys.py`). Knows no sockets of ZMQ.
Called by `links.py`, `zmq_wire.py`, `zmq_listener.py`, routers and instances.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import stat
import struct
from typing import Any

from fdasync.errors import ConfigError

# device and inode of a socket file
FileId = tuple[int, int]
_IPC, _TCP = "ipc://", "tcp://127.0.0.1:"
# Linux's limit for a Unix socket's path is 108 with the closing zero
_MAX_PATH_NBYTES = 107
_SIOCGIFADDR, _MAX_INTERFACE = 0x8915, 15
_MAX_PORT, _PORT_DIGITS = 65535, 5
_HINT = (
    "use ipc:///path or tcp://127.0.0.1:port; links to other machines need keys: `fdasync keys new FILE`, then"
    " --keys FILE on all of them"
)
# a name of a host or an interface
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


def is_ipc(address: str) -> bool:
    return address.startswith(_IPC)


def has_no_file(address: str) -> bool:
    """Whether the socket file of an ipc address is missing."""
    return is_ipc(address) and not os.path.lexists(address.removeprefix(_IPC))  # blocking: microseconds


def host_of(address: str) -> str:
    """The host of a tcp address, as a number without brackets where it is one; "" of an ipc address."""
    return "" if is_ipc(address) else address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def absolute(address: str) -> str:
    """An ipc address with its absolute path, in its one spelling; other addresses unchanged.

    Raises ConfigError for what is no text. An address is passed on between processes, whose working directories may
    differ.
    """
    _check_text(address)
    path = address.removeprefix(_IPC)
    if path == address or not path or path.startswith("@") or path in ("*", "!") or "\0" in path:
        # `check_address` refuses these
        return address
    if not path.startswith("/"):
        path = os.path.join(os.getcwd(), path)  # blocking: microseconds, the kernel has it at hand
    # a path may begin with two slashes, which `normpath` keeps
    return _IPC + "/" + os.path.normpath(path).lstrip("/")


def _check_text(address: Any) -> None:
    if not isinstance(address, str):
        raise ConfigError("address", f"{address!r:.100} is no text", hint=_HINT)
    try:
        os.fsencode(address)
    except UnicodeEncodeError:
        raise ConfigError("address", f"{address!r} has a lone surrogate", hint=_HINT) from None


def number_of(address: str) -> str:
    """The host of a tcp address in numbers; that of an interface is its IPv4 address. Raises ConfigError."""
    host = host_of(address)
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", host.encode()[:_MAX_INTERFACE]))
    except OSError as error:
        hint = "name an address of this machine, or an interface that has one (`ip address`)"
        raise ConfigError("address", f"{host!r} is no interface with an address: {error.strerror}", hint=hint) from None
    return socket.inet_ntoa(found[20:24])


def advertised(address: str, host: str) -> str:
    """The address that others dial where `host` stands in place of the host of `address`; "": as it is. An interface
    stands for its address. Raises ConfigError."""
    if not host:
        return address
    if is_ipc(address):
        raise ConfigError("host", f"{address} has no host", hint="listen at tcp://, or leave --host out")
    bare = host.removeprefix("[").removesuffix("]")
    try:
        number = number_of(f"tcp://[{bare}]:1")
    except ConfigError:
        problem = f"{host!r} is neither an address in numbers nor an interface of this machine"
        raise ConfigError("host", problem, hint="say the address that the other machines dial, in numbers") from None
    found = ipaddress.ip_address(number)
    if found.is_unspecified or found.is_multicast:
        raise ConfigError("host", f"{host!r} names no machine", hint="say the address that the other machines dial")
    return f"tcp://{f'[{number}]' if found.version == 6 else number}:{address.rpartition(':')[2]}"


def check_address(address: str, *, listens: bool = False, keyed: bool = False, anywhere: bool = False) -> None:
    """Raises ConfigError, which names the address, if it is malformed, or beyond this machine and `keyed` is false:
    there are no keys. `anywhere`: it may stand for all interfaces, since others are told another address."""
    if is_ipc(address):
        _check_path(address, address.removeprefix(_IPC))
        return
    if "://" not in address:
        raise ConfigError(
            "address", f"{address!r} has no transport", hint="such as ipc:///path or tcp://127.0.0.1:port"
        )
    port = address.removeprefix(_TCP)
    if port == address and f"{address}:" != _TCP:
        if not keyed:
            raise ConfigError("address", f"{address!r} is neither ipc nor loopback", hint=_HINT)
        port = _check_host(address, anywhere=anywhere)
    if listens and port == "*":
        return
    limit = "1 to 65535, and 0 or * to listen"
    # Python takes digits of other alphabets for numbers, ZMQ does not
    if not (port.isascii() and port.isdigit()):
        raise ConfigError("address", f"{address!r} has no port", limit=limit)
    if len(port) > _PORT_DIGITS or not (0 if listens else 1) <= int(port) <= _MAX_PORT:
        raise ConfigError("address", f"the port of {address!r} is out of range", limit=limit)


def _check_host(address: str, *, anywhere: bool) -> str:
    """Check the host of a tcp address; returns its port."""
    hint = "say tcp://HOST:PORT, with an address of the machine; [..] around one of IPv6"
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host:
        raise ConfigError("address", f"{address!r} is neither ipc nor tcp, or has no port", hint=hint)
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        found = ipaddress.ip_address(bare)
    except ValueError:
        if bare != host or not _NAME.fullmatch(host) or not any(map(str.isalpha, host)):
            raise ConfigError("address", f"{address!r} has no host", hint=hint) from None
        return port
    if (found.version == 6) != (bare != host):
        raise ConfigError("address", f"{address!r} has no host", hint=hint)
    if (found.is_unspecified and not anywhere) or found.is_multicast:
        # it is passed on to other machines, which could not dial it
        raise ConfigError("address", f"{address!r} names no machine", hint=f"{hint}; or say --host besides")
    return port


def _check_path(address: str, path: str) -> None:
    if len(os.fsencode(path)) > _MAX_PATH_NBYTES:
        raise ConfigError("address", f"the path of {address!r} is too long", limit=f"{_MAX_PATH_NBYTES} bytes")
    if not path or path.startswith("@") or path in ("*", "!") or "\0" in path:
        # an abstract name is open to every user of the machine
        raise ConfigError("address", f"{address!r} names no path", hint=_HINT)


def check_free(address: str) -> None:
    """Raises ConfigError if a process listens at the address, or a file that is no socket is there.

    ZMQ replaces the socket file of a listener that died. It would also replace a live socket, hence this check.
    """
    path = address.removeprefix(_IPC)
    if path == address:
        _check_port(address)
        return
    try:
        mode = os.lstat(path).st_mode  # blocking: microseconds, once for each listener
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError("address", f"{address!r}: {error.strerror}") from None
    if not stat.S_ISSOCK(mode):
        raise ConfigError("address", f"there is a file at {address!r} that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return
        except OSError:
            # the listener's queue is full, or it is another user's: either way it lives
            pass
    raise ConfigError("address", f"a process listens at {address!r} already", hint="choose another path")


def _check_port(address: str) -> None:
    port = address.rpartition(":")[2]
    if port in ("*", "0"):
        return
    try:
        host = ipaddress.ip_address(host_of(address))
    except ValueError:
        # the name of an interface: ZMQ finds its address
        return
    with socket.socket(socket.AF_INET6 if host.version == 6 else socket.AF_INET, socket.SOCK_STREAM) as probe:
        # as ZMQ does, so that connections of a listener that is gone do not matter
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((str(host), int(port)))
        except OSError as error:
            raise ConfigError("address", f"cannot listen at {address!r}: {error.strerror}") from None


def keep_to_us(address: str) -> FileId | None:
    """Let only this user connect at an ipc address of ours. Returns the socket file's id, None for tcp. Raises
    OSError."""
    path = address.removeprefix(_IPC)
    if path == address:
        return None
    os.chmod(path, 0o600)  # blocking: microseconds, once for each listener
    found = os.lstat(path)  # blocking: the same
    return found.st_dev, found.st_ino


def remove_dead(address: str) -> None:
    """Remove the socket file that a listener at an ipc address left behind when it was killed; a live one stays."""
    with contextlib.suppress(ConfigError, OSError):
        check_free(address)
        os.unlink(address.removeprefix(_IPC))  # blocking: microseconds


def remove_file(address: str, file: FileId) -> None:
    """Remove the socket file of an ipc address, which ZMQ leaves behind, if it still has this id."""
    path = address.removeprefix(_IPC)
    try:
        found = os.lstat(path)  # blocking: microseconds, once for each listener
        if (found.st_dev, found.st_ino) == file:
            os.unlink(path)  # blocking: the same
    except OSError:
        # the file or its folder is gone already
        return
