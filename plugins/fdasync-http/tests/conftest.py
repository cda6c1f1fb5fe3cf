"""A live server over an engine, and over a router of a prefill and a decode instance; and a client."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx2
import pytest
from fdasync_http import HttpConfig, app
from fdasync_http.server import Listen, serving

import fdasync
from fdasync import Generator, Instance
from fdasync.runner.synthetic import WEIGHTS_FILE
from fdasync.testing import LetterTokenizer, oracle_of, synthetic_config, synthetic_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from fdasync.engine.tokenizer import Tokenizer
    from fdasync.runner.oracle import Oracle

STEP = {"step_s": 0.002}
# roles of the instances behind a router
ROLES = {"engine": (), "router": ("prefill", "decode"), "fleet": ("mixed", "mixed")}
KEY = "sk-0123456789abcdef"
ADMIN = "sk-admin-0123456789"


class Scene(NamedTuple):
    """A server that runs.

    Attributes:
        client: talks to it.
        generator: behind it.
        oracle: knows every right token and row.
        weights: a folder in which weights lie, each in a folder of its own.
        url: where it listens.
        port: the same.
    """

    client: httpx2.AsyncClient
    generator: Generator
    oracle: Oracle
    weights: Path
    url: str
    port: int

    def new_weights(self, name: str, weights_id: int) -> Path:
        """A folder of weights that clients may name."""
        folder = self.weights / name
        folder.mkdir()
        (folder / WEIGHTS_FILE).write_text(json.dumps({"weights_id": weights_id}))
        return folder


@asynccontextmanager
async def generator_of(
    kind: str, folder: Path, tokenizer: Tokenizer | None = None, **runner: Any
) -> AsyncIterator[Generator]:
    """A generator that has started: "engine", "router" of a prefill and a decode instance, or "fleet", a router of two
    mixed ones."""
    values = {**STEP, **runner}
    own = tokenizer or LetterTokenizer()
    async with AsyncExitStack() as stack:
        roles = ROLES[kind]
        addresses = [f"ipc://{folder}/{role}{number}" for number, role in enumerate(roles)]
        for role, address in zip(roles, addresses, strict=True):
            config = synthetic_config(values, role=role, host_blocks=64)
            instance = Instance(config, listen=address, tokenizer=own, transport="shm")
            await stack.enter_async_context(instance)
        if roles:
            made: Generator = fdasync.connect(addresses)
        else:
            made = synthetic_engine(synthetic_config(values), tokenizer=own)
        yield await stack.enter_async_context(made)


@pytest.fixture(params=["engine", "router"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def scene_of(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Scene]]:
    @asynccontextmanager
    async def make(
        kind: str = "engine", listen: Listen | None = None, headers: dict[str, str] | None = None, **config: Any
    ) -> AsyncIterator[Scene]:
        weights = tmp_path / "weights"
        runner = config.pop("runner", {})
        tokenizer = config.pop("tokenizer", None) or LetterTokenizer()
        weights.mkdir(exist_ok=True)
        async with generator_of(kind, tmp_path, tokenizer, **runner) as generator:
            settings = HttpConfig(**{"weights_root": str(weights), **config})
            service = app(generator, settings, tokenizer=tokenizer)
            async with (
                serving(service, listen or Listen(port=0, drain_s=1.0)) as served,
                httpx2.AsyncClient(base_url=served.url, timeout=20.0, headers=headers) as client,
            ):
                oracle = oracle_of(synthetic_config({**STEP, **runner}))
                yield Scene(client, generator, oracle, weights, served.url, served.port)

    return make


@pytest.fixture
async def scene(kind: str, scene_of: Callable[..., AbstractAsyncContextManager[Scene]]) -> AsyncIterator[Scene]:
    async with scene_of(kind) as made:
        yield made
