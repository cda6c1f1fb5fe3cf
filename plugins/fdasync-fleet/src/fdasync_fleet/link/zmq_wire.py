"""A wire of ZMQ sockets, read on the loop: one ROUTER for processes that dial us, one DEALER for each address we dial.

ZMQ connects, reconnects and queues on native threads of its own, which run no Python. Its file descriptor is edge
triggered: it reports a possible change once, and any call on the socket may swallow the report. So a socket is read
until it is empty, and read again after each turn in which a frame was sent. (`zmq.asyncio` is about 15 times slower.)

With keys, CURVE authenticates and encrypts every connection that is not ipc; `zap.py` has the allow list.

Knows no messages and no sessions. Called by `Links`; routers and instances make it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
from typing import TYPE_CHECKING

import zmq

from fdasync.errors import ConfigError, ProtocolError
from fdasync_fleet.link.address import check_address, check_free, has_no_file, is_ipc
from fdasync_fleet.link.session import MAX_FRAME_NBYTES
from fdasync_fleet.link.wire import NAME_NBYTES, Frame, Pipe, Wire
from fdasync_fleet.link.zap import DOMAIN, OPEN_DOMAIN, ZAP_ADDRESS, Doorkeeper
from fdasync_fleet.link.zmq_listener import ListenerGuard

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync_fleet.link.keys import FleetKeys

_HIGH_WATER = 1000
# messages read in one callback of the loop
_READ_CAP = 64
_RECONNECT_MS = (50, 1000)
# so that a Bye just before hanging up still goes out
_LINGER_MS = 50
_TRY_FULL_S = 0.005
# libzmq closes a connection without a handshake after so long
_HANDSHAKE_S = 5.0
# the kernel would wait ever longer between its tries to reach a host that does not answer
_CONNECT_S = 2.0
_MONITOR = "inproc://refusals"
# how long a dialed process has to take one of our two keys before the other one is tried
_TRY_KEY_S = 2.0
_MORE = zmq.NOBLOCK | zmq.SNDMORE
# descriptors of a context and its first sockets; ZMQ ends the process if it can open no more
_FILES = 24
# a routing id: name of the process, number of the dial, and how often it was dialed anew
_COUNT_NBYTES = 4
_LINE_NBYTES = NAME_NBYTES + _COUNT_NBYTES


def _check_files() -> None:
    """Raises ConfigError if too few descriptors are free for ZMQ."""
    with contextlib.ExitStack() as tried:
        try:
            for _ in range(_FILES):
                tried.callback(os.close, os.eventfd(0))
        except OSError:
            raise _too_many_files() from None


def _too_many_files() -> ConfigError:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    hint = "say `ulimit -n 1024`, or more, first"
    return ConfigError("open files", "this process has too many open for another link", limit=limit, hint=hint)


def _line_of(name: bytes) -> bytes:
    return name[:_LINE_NBYTES] if len(name) == _LINE_NBYTES + _COUNT_NBYTES else name


class ZmqPipe(Pipe):
    """Attributes:
    name: routing id of the latest connection of the process that dialed us; empty for our own DEALERs.
    line: what all of these routing ids begin with.
    number: of our own DEALERs: the dial, and how often it was dialed anew.
    closed: it was hung up.
    full: it refused frames.
    port: its socket.
    """

    __slots__ = ("closed", "full", "line", "name", "number", "port")

    def __init__(self, address: str, name: bytes) -> None:
        super().__init__(address)
        self.name = name
        self.line = _line_of(name)
        self.number = (0, 0)
        self.closed = False
        # a fresh DEALER is not connected yet
        self.full = bool(address)
        self.port: _Port


class _Port:
    """One ZMQ socket on the loop; `read` is called when it may have frames, at least once after each event."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: zmq.Socket[bytes], read: Callable[[_Port], None]) -> None:
        self.sock = sock
        self._loop = loop
        self._read = read
        self._fd = int(sock.getsockopt(zmq.FD))
        self._soon = False
        self.closed = False
        loop.add_reader(self._fd, self._go)
        self.again()

    def again(self) -> None:
        """Read in the next turn: a call on the socket may have swallowed the edge."""
        if not self._soon:
            self._soon = True
            self._loop.call_soon(self._go)

    def _go(self) -> None:
        self._soon = False
        if not self.closed:
            self._read(self)

    def close(self, linger_ms: int) -> None:
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._fd)
            self.sock.close(linger=linger_ms)


class ZmqWire(Wire):
    """See the module and `Wire`. Must be closed: it owns the sockets' threads and files.

    Args:
        high_water: messages that are queued for one pipe, on either side, before `send` refuses more.
        max_frame_nbytes: ZMQ disconnects a process that sends a longer frame.
        on_guard: called with an address and a reason when its listener is closed for lack of file descriptors
            (`zmq_listener.py`), and with "" when it listens again.
        keys: keys of the fleet (`keys.py`); without them, addresses beyond the loopback are refused.
        on_refused: called with a reason and a number of connections that were refused (`zap.py`).

    Attributes:
        guard: the guard of the listeners; None before the first.
        door: says who may connect, and counts who may not; None without keys.
    """

    def __init__(
        self,
        *,
        high_water: int = _HIGH_WATER,
        max_frame_nbytes: int = MAX_FRAME_NBYTES,
        on_guard: Callable[[str, str], None] | None = None,
        keys: FleetKeys | None = None,
        on_refused: Callable[[str, int], None] | None = None,
    ) -> None:
        self._high_water = high_water
        self._max_frame_nbytes = max_frame_nbytes
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._router: _Port | None = None
        self._inbound: dict[bytes, ZmqPipe] = {}
        self._dealers: dict[_Port, ZmqPipe] = {}
        self._on_guard = on_guard
        self.guard: ListenerGuard | None = None
        self._keys = keys
        self._on_refused = on_refused
        self.door: Doorkeeper | None = None
        # the ZAP handler's socket and the monitor's
        self._doors: list[_Port] = []
        self._trying: dict[_Port, asyncio.TimerHandle] = {}
        self._name = b""
        self._dials = 0
        # pipes that refused frames, of processes that dialed us
        self._full: list[ZmqPipe] = []
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False

    def open(
        self, name: bytes, on_frames: Callable[[Pipe, list[Frame]], None], on_room: Callable[[Pipe], None]
    ) -> None:
        if len(name) != NAME_NBYTES or not name[0]:
            raise ProtocolError(f"a name on a wire has {NAME_NBYTES} bytes and does not begin with a zero")
        self._name = name
        self._on_frames = on_frames
        self._on_room = on_room
        self._loop = asyncio.get_running_loop()
        _check_files()
        self._context = zmq.Context(io_threads=1)

    def _port(self, kind: int, options: dict[int, int | bytes], read: Callable[[_Port], None] | None = None) -> _Port:
        if self._context is None or self._closed:
            raise ProtocolError("the wire is closed, or was not opened")
        try:
            sock = self._context.socket(kind)
        except zmq.ZMQError as error:
            raise _too_many_files() if error.errno == errno.EMFILE else error from None
        low, high = _RECONNECT_MS
        common: dict[int, int | bytes] = {
            zmq.LINGER: 0,
            zmq.SNDHWM: self._high_water,
            zmq.RCVHWM: self._high_water,
            zmq.MAXMSGSIZE: self._max_frame_nbytes,
            zmq.HANDSHAKE_IVL: int(_HANDSHAKE_S * 1000),
            zmq.CONNECT_TIMEOUT: int(_CONNECT_S * 1000),
            zmq.RECONNECT_IVL: low,
            zmq.RECONNECT_IVL_MAX: high,
        }
        for option, value in (common | options).items():
            sock.setsockopt(option, value)
        return _Port(self._loop, sock, read or self._read)

    def _open_door(self) -> None:
        """Answer libzmq's questions about clients, and count refusals. Before the first listener: libzmq
        refuses clients while its questions have no answer."""
        assert self._keys is not None
        assert self._router is not None
        door = self.door = Doorkeeper(self._loop, self._keys.allowed, 1.2 * _HANDSHAKE_S, self._on_refused)

        def read(port: _Port) -> None:
            done = door.answer(port.sock) if port is self._doors[0] else door.read_failures(port.sock)
            if not done:
                port.again()

        self._doors.append(self._port(zmq.ROUTER, {}, read))
        self._doors[0].sock.bind(ZAP_ADDRESS)
        door.watch(self._router.sock, _MONITOR)
        # without a limit: libzmq's thread would wait for this loop, and links with it
        self._doors.append(self._port(zmq.PAIR, {zmq.RCVHWM: 0, zmq.MAXMSGSIZE: -1}, read))
        self._doors[1].sock.connect(_MONITOR)
        for port in self._doors:
            port.again()

    def _secure(self, address: str) -> None:
        """Set the options of the next listener."""
        assert self._router is not None
        sock = self._router.sock
        sock.setsockopt(zmq.IPV6, int("[" in address))
        if self._keys is None:
            return
        if is_ipc(address):
            sock.setsockopt(zmq.CURVE_SERVER, 0)
            sock.setsockopt(zmq.ZAP_DOMAIN, OPEN_DOMAIN)
            return
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_SECRETKEY, self._keys.keys[0].server.secret.encode())
        sock.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def listen(self, address: str) -> str:
        # a listener at all interfaces tells others where that is
        check_address(address, listens=True, keyed=self._keys is not None, anywhere=True)
        check_free(address)
        if self._router is None:
            options: dict[int, int | bytes] = {zmq.ROUTER_MANDATORY: 1, zmq.ROUTER_HANDOVER: 1}
            self._router = self._port(zmq.ROUTER, options)
        if self._keys is not None and self.door is None:
            self._open_door()
        if self.guard is None:
            self.guard = ListenerGuard(self._router.sock, self._loop, self._on_guard, self._secure)
        actual = self.guard.listen(address)
        self._router.again()
        return actual

    def is_absent(self, address: str) -> bool:
        return has_no_file(address)

    def dial(self, address: str) -> Pipe:
        check_address(address, keyed=self._keys is not None)
        self._dials += 1
        pipe = ZmqPipe(address, b"")
        # differs from that of an earlier pipe to the same listener, which may not have noticed that pipe's end
        pipe.number = (self._dials, 0)
        pipe.port = self._dealer(pipe)
        self._dealers[pipe.port] = pipe
        return pipe

    def _dealer(self, pipe: ZmqPipe) -> _Port:
        """A new connection of a pipe."""
        address = pipe.address
        name = self._name + b"".join([number.to_bytes(_COUNT_NBYTES, "big") for number in pipe.number])
        port = self._port(zmq.DEALER, {zmq.ROUTING_ID: name, zmq.IMMEDIATE: 1, zmq.IPV6: int("[" in address)})
        try:
            self._connect(port, address, 0)
        except zmq.ZMQError as error:
            port.close(0)
            raise ConfigError("address", f"cannot dial {address!r}: {error.strerror}") from None
        return port

    def _connect(self, port: _Port, address: str, number: int) -> None:
        """Connect with one of our keys; if nothing comes of it, with the other one, in turn."""
        self._trying.pop(port, None)
        if self._keys is not None and not is_ipc(address):
            keys = self._keys.keys
            server, client = keys[number % len(keys)].server, keys[0].client
            port.sock.setsockopt(zmq.CURVE_SERVERKEY, server.public.encode())
            port.sock.setsockopt(zmq.CURVE_PUBLICKEY, client.public.encode())
            port.sock.setsockopt(zmq.CURVE_SECRETKEY, client.secret.encode())
            if len(keys) > 1:
                # bare timer: looks whether the connection is up
                self._trying[port] = self._loop.call_later(_TRY_KEY_S, self._try_other, port, address, number + 1)
        port.sock.connect(address)

    def _try_other(self, port: _Port, address: str, number: int) -> None:
        pipe = self._dealers.get(port)
        if pipe is None or port.closed:
            self._trying.pop(port, None)
            return
        if not int(port.sock.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            port.sock.disconnect(address)
            self._connect(port, address, number)
        else:
            # bare timer: it may be another process with another key that listens there later
            self._trying[port] = self._loop.call_later(_TRY_KEY_S, self._try_other, port, address, number)
        port.again()

    def redial(self, pipe: Pipe) -> None:
        """See `Wire.redial`. The kernel pauses ever longer before it sends again what it owes: after a cut of 40 s a
        connection that stays may be dead for half a minute more. A new one is there within seconds.

        It has a routing id of its own: where two connections have the same one, the listener's libzmq (4.3.5) keeps the
        older one's descriptor for ever, if bytes arrive on that before its end.
        """
        assert isinstance(pipe, ZmqPipe)
        if pipe.closed or pipe.name or is_ipc(pipe.address):
            return
        old = pipe.port
        dial, count = pipe.number
        pipe.number = (dial, count + 1)
        pipe.port = self._dealer(pipe)
        self._close_dealer(old, 0)
        self._dealers[pipe.port] = pipe
        pipe.full = True

    def _close_dealer(self, port: _Port, linger_ms: int) -> None:
        del self._dealers[port]
        if port in self._trying:
            self._trying.pop(port).cancel()
        port.close(linger_ms)

    def send(self, pipe: Pipe, frames: list[Frame]) -> bool:
        assert isinstance(pipe, ZmqPipe)
        if pipe.closed:
            return True
        port = pipe.port
        send = port.sock.send
        # before the send, which may raise
        port.again()
        try:
            if pipe.name:
                send(pipe.name, _MORE)
            if len(frames) == 2:
                send(frames[0], _MORE)
            send(frames[-1], zmq.NOBLOCK)
        except zmq.Again:
            if not pipe.full:
                pipe.full = True
                if pipe.name:
                    self._full.append(pipe)
                    # bare timer: tries again
                    self._retry = self._retry or self._loop.call_later(_TRY_FULL_S, self._try_full)
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # the process that dialed us went away; it may come back
            pipe.is_cut = True
            return True
        pipe.is_cut = False
        return True

    def hang_up(self, pipe: Pipe) -> None:
        assert isinstance(pipe, ZmqPipe)
        if pipe.closed:
            return
        pipe.closed = True
        if pipe.name:
            self._inbound.pop(pipe.line, None)
        else:
            self._close_dealer(pipe.port, _LINGER_MS)

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        ports = [*self._dealers, *([self._router] if self._router is not None else [])]
        for pipe in (*self._dealers.values(), *self._inbound.values()):
            pipe.closed = True
        # first, before another process can take the address
        if self.guard is not None:
            self.guard.close()
        if self.door is not None:
            self.door.close()
        while self._trying:
            self._trying.popitem()[1].cancel()
        if self._router is not None and self._doors:
            self._router.sock.disable_monitor()
        for port in (*ports, *self._doors):
            port.close(0)
        self._dealers.clear()
        self._inbound.clear()
        self._full.clear()
        if self._retry is not None:
            self._retry.cancel()
        if self._context is not None:
            # a signal (a child's end, on uvloop) would interrupt it, and pyzmq gives a context up that was interrupted
            masked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                self._context.term()  # blocking: joins ZMQ's threads, milliseconds: nothing lingers but a Bye, 50 ms
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, masked)

    # -- reading ------------------------------------------------------------------------------

    def _read(self, port: _Port) -> None:
        recv, sock = port.sock.recv, port.sock
        # None: the ROUTER, on which a frame with the sender's name comes first
        dialed = self._dealers.get(port)
        try:
            for _ in range(_READ_CAP):
                pipe = self._pipe_of(port, recv(zmq.NOBLOCK)) if dialed is None else dialed
                head = recv(zmq.NOBLOCK)
                frames: list[Frame] = self._rest(sock, head) if sock.getsockopt(zmq.RCVMORE) else [head]
                if pipe is not None:
                    self._on_frames(pipe, frames)
                if port.closed:
                    return
            port.again()
        except zmq.Again:
            pass
        except BaseException:
            port.again()
            raise
        if dialed is not None and dialed.full and int(sock.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            dialed.full = False
            self._on_room(dialed)

    def _pipe_of(self, port: _Port, name: bytes) -> ZmqPipe | None:
        """None: an older connection of a pipe that was dialed anew."""
        pipe = self._inbound.get(_line_of(name))
        if pipe is None:
            pipe = ZmqPipe("", name)
            pipe.port = port
            self._inbound[pipe.line] = pipe
        elif pipe.name != name:
            if name < pipe.name:
                return None
            pipe.name = name
        return pipe

    def _try_full(self) -> None:
        """A ROUTER does not say which pipe has room again, so all pipes that had none are tried."""
        self._retry = None
        full, self._full = self._full, []
        for pipe in full:
            pipe.full = False
        for pipe in full:
            if not pipe.closed:
                self._on_room(pipe)

    def _rest(self, sock: zmq.Socket[bytes], head: bytes) -> list[Frame]:
        """The frames of a message that has several. Of more than three frames, the first three, which show that it is
        no message."""
        frames: list[Frame] = [head]
        more = True
        while more:
            part = sock.recv(zmq.NOBLOCK, copy=False)
            more = part.more
            if len(frames) < 3:
                frames.append(part.buffer)
        return frames
