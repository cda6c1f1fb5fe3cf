"""Which addresses a wire takes: Unix sockets and loopback, since links are not authenticated yet.

Whoever can connect can pretend to be an instance; so another address is refused by name until peers prove who they are.
Used by `zmq_wire.py`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat

from fdasync.errors import ConfigError

# device and inode: whose file it is
FileId = tuple[int, int]
_IPC, _TCP = "ipc://", "tcp://127.0.0.1:"
# of a Unix socket's path with its closing zero, in Linux
_MAX_PATH_NBYTES = 107
_MAX_PORT, _PORT_DIGITS = 65535, 5
_HINT = "links are not authenticated yet: use ipc:///path or tcp://127.0.0.1:port"


def absolute(address: str) -> str:
    """An ipc address with its absolute path, in its one spelling; others as they are.

    Whoever is told of an address may work in another folder than whoever was given it.
    """
    path = address.removeprefix(_IPC)
    if path == address or not path or path.startswith("@") or path in ("*", "!") or "\0" in path:
        # what is wrong with these is said by `check_address`
        return address
    if not path.startswith("/"):
        path = os.path.join(os.getcwd(), path)  # blocking: microseconds, the kernel has it at hand
    # a path may begin with two slashes, which `normpath` keeps
    return _IPC + "/" + os.path.normpath(path).lstrip("/")


def check_address(address: str, *, listens: bool = False) -> None:
    """Raises ConfigError that names the address, if it is none or not of this machine."""
    if address.startswith(_IPC):
        _check_path(address, address.removeprefix(_IPC))
        return
    port = address.removeprefix(_TCP)
    if port == address and f"{address}:" != _TCP:
        raise ConfigError("address", f"{address!r} is neither ipc nor loopback", hint=_HINT)
    if listens and port == "*":
        return
    limit = "1 to 65535, and 0 or * to listen"
    # digits of other alphabets are numbers to Python, and none to ZMQ
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
    """Raises ConfigError if somebody listens at an address, or a file is there that is no socket.

    The socket file of a listener that died is fine: ZMQ replaces it. It would replace a live one as well, hence this.
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
            # its queue is full, or it is another user's: either way it is somebody's
            pass
    raise ConfigError("address", f"somebody listens at {address!r} already", hint="choose another path")


def _check_port(address: str) -> None:
    port = address.removeprefix(_TCP)
    if port in ("*", "0"):
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # as ZMQ does: connections of a listener that is gone do not matter
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(port)))
        except OSError as error:
            raise ConfigError("address", f"cannot listen at {address!r}: {error.strerror}") from None


def keep_to_us(address: str) -> FileId | None:
    """Let only our user connect at an ipc address that we listen at; which file it is. Raises OSError."""
    path = address.removeprefix(_IPC)
    if path == address:
        return None
    # who may connect may speak
    os.chmod(path, 0o600)  # blocking: microseconds, once for each listener
    found = os.lstat(path)  # blocking: the same
    return found.st_dev, found.st_ino


def remove_dead(address: str) -> None:
    """Remove the socket file that a listener at an ipc address left behind when it was killed; a live one stays."""
    with contextlib.suppress(ConfigError, OSError):
        check_free(address)
        os.unlink(address.removeprefix(_IPC))  # blocking: microseconds


def remove_file(address: str, file: FileId) -> None:
    """Remove the socket file of an ipc address, which ZMQ leaves behind, if it is still the one that was ours."""
    path = address.removeprefix(_IPC)
    try:
        found = os.lstat(path)  # blocking: microseconds, once for each listener
        if (found.st_dev, found.st_ino) == file:
            os.unlink(path)  # blocking: the same
    except OSError:
        # somebody was faster, or took the folder away
        return
