"""Programs of others as processes, and `fdasync http` as they meet it: a process on the synthetic runner.

The programs are those of the extra `proof`. They are looked for beside this Python and on PATH, so they may be
installed in environments of their own; a test whose program is missing is skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

START_S = 300.0
TEMPLATE = (
    '{% if tools %}call <tool_call>{"name": n, "arguments": {}}</tool_call>{% endif %}'
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Front(NamedTuple):
    """A process of `fdasync http`.

    Attributes:
        process: of the front; its engine is a child of it.
        url, port: where it listens.
    """

    process: asyncio.subprocess.Process
    url: str
    port: int


@pytest.fixture
def program() -> Callable[[str], str]:
    """The path of an installed program; skips the test where there is none."""

    def find(name: str) -> str:
        found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        if found is None:
            pytest.skip(f"{name} is not installed: pip install './plugins/fdasync-http[proof]', or put it on PATH")
        return found

    return find


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of 272 tokens and a chat template; the synthetic runner reads no weights of it."""
    made = pytest.importorskip("fdasync_transformers").make_random_checkpoint
    folder = tmp_path_factory.mktemp("programs") / "tiny-moe"
    made(folder, "qwen3_moe", size="tiny")
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def front_of(tmp_path: Path, checkpoint: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def start(*options: str, port: int = 0, **runner: Any) -> AsyncIterator[Front]:
        shape = {"step_s": 0.01, "vocab_size": 272, "num_blocks": 4096, **runner}
        config = tmp_path / "engine.json"
        config.write_text(json.dumps({"runner": "synthetic", "tokenizer": "transformers", "runner_config": shape}))
        read, write = os.pipe()
        arguments = ["--config", config, "--model", checkpoint, "--port", port, "--ready-fd", write, "--drain-s", 5]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "fdasync", "http", *map(str, arguments), *options, pass_fds=(write,)
        )
        os.close(write)
        try:
            ready = json.loads(await line_of(read))
            yield Front(process, ready["url"], ready["port"])
        finally:
            await end(process)

    return start


async def line_of(descriptor: int) -> bytes:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
    )
    try:
        async with asyncio.timeout(START_S):
            return await reader.readline()
    finally:
        transport.close()


async def end(process: asyncio.subprocess.Process) -> None:
    """As a terminal would, twice; then for good."""
    for signal in ("terminate", "terminate", "kill"):
        if process.returncode is not None:
            return
        getattr(process, signal)()
        try:
            async with asyncio.timeout(300):
                await process.wait()
        except TimeoutError:
            continue


@pytest.fixture
def run_program(tmp_path: Path) -> Callable[..., Any]:
    """Runs a program in the background: a context that gives its process and the file with what it says."""

    @asynccontextmanager
    async def start(*command: str, **environment: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Path]]:
        said = tmp_path / f"{Path(command[0]).name}.log"
        descriptor = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        # foreign programs must find neither our modules nor the network
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        offline = {"HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1", "HOME": str(tmp_path)}
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=descriptor, stderr=descriptor, cwd=tmp_path,
            env={**clean, **offline, **environment},
        )  # fmt: skip
        os.close(descriptor)
        try:
            yield process, said
        finally:
            await end(process)

    return start


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A port that the kernel finds free, for programs that cannot be told to take any."""

    def find() -> int:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            return int(bound.getsockname()[1])

    return find
