"""Checks addresses: a wire takes Unix sockets and loopback only, and refuses any other address by name.

Links are not authenticated yet, so any process that can connect can pretend to be an instance. Knows no sockets of ZMQ.
Called by `links.py`, `zmq_wire.py`, `zmq_listener.py`, routers and instances.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat

from fdasync.errors import ConfigError

# device and inode of a socket file
FileId = tuple[int, int]
_IPC, _TCP = "ipc://", "tcp://127.0.0.1:"
# Linux's limit for a Unix socket's path is 108 with the closing zero
_MAX_PATH_NBYTES = 107
_MAX_PORT, _PORT_DIGITS = 65535, 5
_HINT = "links are not authenticated yet: use ipc:///path or tcp://127.0.0.1:port"


def absolute(address: str) -> str:
    """An ipc address with its absolute path, in its one spelling; other addresses unchanged.

    An address is passed on between processes, whose working directories may differ.
    """
    path = address.removeprefix(_IPC)
    if path == address or not path or path.startswith("@") or path in ("*", "!") or "\0" in path:
        # `check_address` refuses these
        return address
    if not path.startswith("/"):
        path = os.path.join(os.getcwd(), path)  # blocking: microseconds, the kernel has it at hand
    # a path may begin with two slashes, which `normpath` keeps
    return _IPC + "/" + os.path.normpath(path).lstrip("/")


def check_address(address: str, *, listens: bool = False) -> None:
    """Raises ConfigError, which names the address, for one that is malformed or not of this machine."""
    if address.startswith(_IPC):
        _check_path(address, address.removeprefix(_IPC))
        return
    port = address.removeprefix(_TCP)
    if port == address and f"{address}:" != _TCP:
        raise ConfigError("address", f"{address!r} is neither ipc nor loopback", hint=_HINT)
    if listens and port == "*":
        return
    limit = "1 to 65535, and 0 or * to listen"
    # Python takes digits of other alphabets for numbers, ZMQ does not
    if not (port.isascii() and port.isdigit()):
        raise ConfigError("address", f"{address!r} has no port", limit=limit)
    if len(port) > _PORT_DIGITS or not (0 if listens else 1) <= int(port) <= _MAX_PORT:
        raise ConfigError("address", f"the port of {address!r} is out of range", limit=limit)


def _check_path(address: str, path: str) -> None:
    if len(os.fsencode(path)) > _MAX_PATH_NBYTES:
        raise ConfigError("address", f"the path of {address!r} is too long", limit=f"{_MAX_PATH_NBYTES} bytes")
    if not path or path.startswith("@") or path in ("*", "!") or "\0" in path:
        # an abstract name is open to every user of the machine
        raise ConfigError("address", f"{address!r} names no path", hint=_HINT)


def check_free(address: str) -> None:
    """Raises ConfigError if a process listens at an address, or a file is there that is no socket.

    ZMQ replaces the socket file of a listener that died. It would also replace that of a live one, hence this check.
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
    port = address.removeprefix(_TCP)
    if port in ("*", "0"):
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # as ZMQ does, so that connections of a listener that is gone do not matter
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(port)))
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
