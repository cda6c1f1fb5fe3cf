"""Chromium without a window, driven by its own protocol (CDP) over a pair of pipes."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_ANSWER_S = 300.0


def chromium() -> str:
    """The path of an installed browser; skips the test where there is none."""
    found = next((path for name in _NAMES if (path := shutil.which(name)) is not None), None)
    if found is None:
        pytest.skip(f"none of {', '.join(_NAMES)} is on PATH")
    return found


class Page:
    """One page.

    Attributes:
        complaints: what the console said, errors of scripts, and what the page's policy refused.
        asked: every URL that it asked for.
    """

    def __init__(self, write: Any) -> None:
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self._write = write
        self._number = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.session = ""

    async def call(self, method: str, **parameters: Any) -> Any:
        """One call of the protocol. Raises RuntimeError with the browser's words."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        answer = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        self._write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(_ANSWER_S):
            told = await answer
        if "error" in told:
            raise RuntimeError(f"{method}: {told['error']}")
        return told["result"]

    def take(self, message: dict[str, Any]) -> None:
        """A message of the browser."""
        if "id" in message:
            self._waiting.pop(message["id"]).set_result(message)
            return
        method, told = message["method"], message["params"]
        if method == "Network.requestWillBeSent":
            self.asked.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(told["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.complaints.append(f"{told['entry']['source']}: {told['entry']['text']}")
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(told["args"]))

    async def eval(self, script: str) -> Any:
        """The value of an expression in the page."""
        told = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, script: str, seconds: float = 60.0) -> Any:
        """Wait until an expression is true in the page."""
        try:
            async with asyncio.timeout(seconds):
                while not (value := await self.eval(script)):  # noqa: ASYNC110 - the page announces nothing
                    await asyncio.sleep(0.1)
        except TimeoutError:
            text = await self.eval("document.body.innerText")
            raise AssertionError(f"{script} did not come true: {text}\n{self.complaints}") from None
        return value

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href.startsWith('http')")

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """A key, such as "Tab", "ArrowDown", "d"."""
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        code = codes.get(key, ord(key[0].upper()))
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        pressed = {"key": key, "windowsVirtualKeyCode": code, "code": key if len(key) > 1 else f"Key{key.upper()}"}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **pressed, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    async def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self) -> bytes:
        """The whole page, as PNG."""
        told = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(told["data"])

    async def accessible(self) -> list[tuple[str, str]]:
        """What a screen reader is told: (role, name) of each node that it does not pass over."""
        nodes = (await self.call("Accessibility.getFullAXTree"))["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")
        ]


@asynccontextmanager
async def browsing(folder: Path) -> AsyncIterator[Page]:
    """A page of a browser of its own, whose profile lies in this folder."""
    path = chromium()
    to_browser, ours = os.pipe()
    theirs, from_browser = os.pipe()[::-1]

    def pipes() -> None:
        # the browser reads from descriptor 3 and writes to 4
        high = [os.dup2(to_browser, 40), os.dup2(theirs, 41)]
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)
        os.set_inheritable(3, True)
        os.set_inheritable(4, True)

    process = await asyncio.create_subprocess_exec(
        path, "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", f"--user-data-dir={folder}/profile", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, preexec_fn=pipes, pass_fds=(3, 4),
        close_fds=True, start_new_session=True,
    )  # fmt: skip
    os.close(to_browser)
    os.close(theirs)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=64 << 20)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_browser, "rb", 0)
    )

    def write(data: bytes) -> None:
        os.write(ours, data)

    page = Page(write)

    async def listen() -> None:
        while True:
            page.take(json.loads((await reader.readuntil(b"\0"))[:-1]))

    listening = asyncio.ensure_future(listen())
    try:
        target = (await page.call("Target.createTarget", url="about:blank"))["targetId"]
        page.session = (await page.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            await page.call(f"{domain}.enable")
        yield page
    finally:
        listening.cancel()
        await asyncio.wait([listening])
        transport.close()
        os.close(ours)
        # every process of it is in its group
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        await process.wait()


@pytest.fixture
def browse(tmp_path: Path) -> Callable[[], AbstractAsyncContextManager[Page]]:
    """A browser of its own: `async with browse() as page`."""
    return lambda: browsing(tmp_path)
