"""Where `fdasync top` looks: an HTTP front, by `GET /v1/sight`; or instances, by a router that sends no requests.

Between two looks a router's loop goes on, so its links stay up. Called by `top.py`.
"""

from __future__ import annotations

import asyncio
import http.client
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import msgspec

from fdasync.errors import BadInput, DeadlineExceeded, PeerUnreachable
from fdasync.telemetry.sight.summary import Summary, summary_of
from fdasync_fleet.router.config import RouterConfig
from fdasync_fleet.router.router import Router

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_ANSWER_S = 5.0
# of a front's answer
_MOST_NBYTES = 64 << 20
_CHUNK_NBYTES = 1 << 16
_FRONTS, _INSTANCES = ("http://", "https://"), ("ipc://", "tcp://")
_NAMED = "a front (`fdasync http`) is named by its URL, http://HOST:PORT, an instance by its address, ipc:// or tcp://"


class Source(Protocol):
    """Where `fdasync top` looks."""

    def look(self) -> Summary:
        """What there is to see, now. Raises FdasyncError."""

    def wait(self, seconds: float) -> None:
        """Let time pass."""


class FrontSource:
    """An HTTP front.

    Args:
        url: of it, with the path under which it is mounted.
        key: of its API; "": it has none.
        window_s: that rates are of.
    """

    def __init__(self, url: str, key: str, window_s: float) -> None:
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise BadInput("SOURCE", f"{url!r} is no URL: {error}") from None
        if not key.isascii() or not key.isprintable():
            raise BadInput("--api-key-file", "holds something else than one key of ASCII characters")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput("SOURCE", f"{url!r} is no URL of a front", hint="such as http://127.0.0.1:30000")
        try:
            port = parts.port
        except ValueError:
            raise BadInput("SOURCE", f"the port of {url!r} is no port", limit="1 to 65535") from None
        self._url = url
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, port
        self._path = f"{parts.path.rstrip('/')}/v1/sight?window_s={window_s:g}"
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def look(self) -> Summary:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_ANSWER_S)
        try:
            # no proxy and no redirect: the key goes to this host alone
            connection.request("GET", self._path, headers=self._headers)
            answer = connection.getresponse()
            body = _body_of(answer)
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            problem = f"{type(error).__name__}: {error}; {_NAMED}"
            raise PeerUnreachable(self._url, problem) from None
        finally:
            connection.close()
        if answer.status in (401, 403):
            raise BadInput("--api-key-file", f"{self._url} answers {answer.status}", hint="give the key of the front")
        if answer.status != 200:
            raise PeerUnreachable(self._url, f"/v1/sight answers {answer.status} {answer.reason}")
        try:
            return msgspec.json.decode(body, type=Summary)
        except msgspec.MsgspecError as error:
            raise PeerUnreachable(self._url, f"/v1/sight answers something else: {error}") from None

    def wait(self, seconds: float) -> None:
        # blocking: no loop runs in this process, and nothing else is to be done
        time.sleep(seconds)


def _body_of(answer: http.client.HTTPResponse) -> bytes:
    """The whole answer. Raises TimeoutError if it comes so slowly, or is so long, that it does not end."""
    until, body = time.monotonic() + _ANSWER_S, bytearray()
    while chunk := answer.read1(_CHUNK_NBYTES):
        body += chunk
        if len(body) > _MOST_NBYTES or time.monotonic() > until:
            raise TimeoutError(f"the answer did not end within {_ANSWER_S:g} s and {_MOST_NBYTES} bytes")
    return bytes(body)


class FleetSource:
    """Instances, by the addresses of their links.

    Args:
        runner: runs the router.
        router: has started.
        window_s: that rates are of.
    """

    def __init__(self, runner: asyncio.Runner, router: Router, window_s: float) -> None:
        self._runner, self._router, self._window_s = runner, router, window_s

    def look(self) -> Summary:
        watched = self._runner.run(self._router.watch())
        return summary_of(watched, model=self._router.facts().model, window_s=self._window_s)

    def wait(self, seconds: float) -> None:
        # the loop goes on, and with it the links
        self._runner.run(asyncio.sleep(seconds))


@contextmanager
def source_of(
    sources: Sequence[str], keys: Path | None, key: str, window_s: float, connect_s: float
) -> Iterator[Source]:
    """Where to look. Raises BadInput, and what connecting to instances raises."""
    for one in sources:
        if not one.lower().startswith((*_FRONTS, *_INSTANCES)):
            raise BadInput("SOURCE", f"{one!r} is neither a URL nor an address of an instance", hint=_NAMED)
    urls = [one for one in sources if one.lower().startswith(_FRONTS)]
    if urls and len(sources) > 1:
        raise BadInput("SOURCE", f"{len(sources)} sources", limit="one URL, or addresses of instances")
    if urls and keys is not None:
        raise BadInput("--keys", "is of instances, and a URL was given", hint="--api-key-file has the key of a front")
    if not urls and key:
        raise BadInput("--api-key-file", "is of a front, and addresses were given", hint="--keys has those of a fleet")
    if urls:
        yield FrontSource(urls[0], key, window_s)
        return
    with asyncio.Runner() as runner:

        async def connected() -> Router:
            router = Router(sources, RouterConfig(connect_s=connect_s, settle_s=min(connect_s, 1.0)), keys=keys)
            try:
                await router.start()
            except DeadlineExceeded as error:
                raise PeerUnreachable(", ".join(sources), f"{error}; {_NAMED}") from None
            return router

        router = runner.run(connected())
        try:
            yield FleetSource(runner, router, window_s)
        finally:
            runner.run(router.aclose())
