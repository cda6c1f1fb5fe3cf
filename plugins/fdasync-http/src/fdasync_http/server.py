"""Serves the app with uvicorn, on a socket and a loop of its caller's.

    async with serving(app, address) as served:
        print(served.url)

uvicorn's own handling of signals, logging and processes is off: its owner decides when it ends. Knows no engine. Called
by `run.py` and by tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import ssl
from typing import TYPE_CHECKING, Any

import uvicorn

from fdasync.errors import BadInput
from fdasync_http.config import Listen as Listen  # noqa: TC001 - callers have it from here
from fdasync_http.protocol import protocol_with

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from starlette.types import ASGIApp

_BACKLOG = 4096
_KEEP_ALIVE_S = 75
_START_S = 30.0


def check_exposure(listen: Listen, *, has_key: bool) -> None:
    """Raise BadInput for a host that does not resolve, and where other machines could reach a server that asks for
    nothing. Asks the system's resolver, which blocks."""
    _resolved(listen)
    if has_key or listen.client_authority or is_loopback(listen.host):
        return
    raise BadInput(
        "host",
        f"{listen.host} can be reached from other machines, and every path would be open",
        hint="give an API key, or an authority of client certificates; or listen on 127.0.0.1",
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Served:
    """A server that runs.

    Attributes:
        url: where clients find it.
        port: as bound.
        ended: done when the last answer was sent, after `stop`.
    """

    def __init__(self, server: uvicorn.Server, ended: asyncio.Task[None], url: str, port: int) -> None:
        self.url = url
        self.port = port
        self.ended = ended
        self._server = server

    def stop(self) -> None:
        """Take no more connections, and close connections that have no request; answers under way go on."""
        self._server.should_exit = True

    def drop(self) -> None:
        """`stop`, and close every connection, whatever it waits for."""
        self.stop()
        self._server.force_exit = True
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # signals are the owner's
        yield


def bind(listen: Listen) -> socket.socket:
    """A socket at the address. Until it is given to `serving` clients are refused. Raises BadInput."""
    family, address = _resolved(listen)
    # asyncio's own loop turns Nagle's algorithm off only where the protocol is named: each answer on a connection that
    # is kept would wait 40 ms for an acknowledgement
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _unbound(listen, error) from None
    bound.setblocking(False)
    return bound


def _resolved(listen: Listen) -> tuple[socket.AddressFamily, Any]:
    """Family and address of the host and port; of a name with several, an address of IPv4. Raises BadInput."""
    try:
        # blocking: the system's resolver, before anything is served
        found = socket.getaddrinfo(listen.host or None, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        hint = "listen on 127.0.0.1 for this machine alone, on 0.0.0.0 for every address that it has"
        raise BadInput("host", f"{listen.host} does not resolve: {why}", hint=hint) from None
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, address


def check_certificates(listen: Listen) -> None:
    """Raise BadInput for certificates that cannot be served with, before anything is loaded."""
    if not listen.certificate:
        if listen.key or listen.client_authority:
            raise BadInput("--ssl-certfile", "is missing", hint="--ssl-keyfile and --ssl-ca-certs need it")
        return
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(listen.certificate, listen.key or None)
    except (OSError, ssl.SSLError) as error:
        raise BadInput("--ssl-certfile", f"{listen.certificate} cannot be used: {error}") from None
    if listen.client_authority:
        try:
            context.load_verify_locations(listen.client_authority)
        except (OSError, ssl.SSLError) as error:
            raise BadInput("--ssl-ca-certs", f"{listen.client_authority} cannot be used: {error}") from None


def _unbound(listen: Listen, error: OSError) -> BadInput:
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be bound: {error.strerror}"
        return BadInput(
            "port", f"{listen.port} of {listen.host} {why}", hint="choose another one; 0 takes any free one"
        )
    return BadInput("host", f"{listen.host}:{listen.port} cannot be bound: {error.strerror}")


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, listen: Listen, bound: socket.socket | None = None) -> AsyncIterator[Served]:
    """Serve until the block is left; answers under way then have `drain_s` to end.

    Args:
        bound: of `bind`, closed at the end; None: made here.

    Raises BadInput for an address that cannot be bound; what uvicorn raises where it cannot start.
    """
    bound = bind(listen) if bound is None else bound
    try:
        bound.listen(_BACKLOG)
    except OSError as error:
        # another program bound it at the same time, and was faster to listen
        bound.close()
        raise _unbound(listen, error) from None
    config = uvicorn.Config(
        app,
        http=protocol_with(listen.limits),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        # clients can cause warnings as often as they like
        log_level="error",
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(int(listen.drain_s), 1),
        ssl_certfile=listen.certificate or None,
        ssl_keyfile=listen.key or None,
        ssl_ca_certs=listen.client_authority or None,
        ssl_cert_reqs=2 if listen.client_authority else 0,
    )
    server = _Server(config)
    task = asyncio.ensure_future(server.serve(sockets=[bound]))
    try:
        # bare deadline: binding is done; what is left are a few turns of the loop
        async with asyncio.timeout(_START_S):
            while not server.started and not task.done():  # noqa: ASYNC110 - uvicorn tells in no other way
                await asyncio.sleep(0.005)
        if not server.started:
            task.result()  # of a task that is done
            raise BadInput("host", f"{listen.host}:{listen.port}: the server ended before it served")
        port = bound.getsockname()[1]
        host = f"[{listen.host}]" if ":" in listen.host else listen.host
        yield Served(server, task, f"{'https' if listen.certificate else 'http'}://{host}:{port}", port)
    finally:
        server.should_exit = True
        await asyncio.wait([task])
        bound.close()
        if not task.cancelled():
            task.result()  # of a task that is done
