"""A live server over an engine, and over a router of a prefill and a decode instance; and a client."""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx2
import pytest
import uvicorn
from fdasync_fleet.testing.patience import LEASES, LINKS
from fdasync_http import HttpConfig, app
from fdasync_http.server import Listen, serving

import fdasync
from fdasync import Generator, Instance
from fdasync.runner.plugins import make_runner
from fdasync.runner.synthetic import WEIGHTS_FILE
from fdasync.testing import FaultRunner, LetterTokenizer, oracle_of, synthetic_config, synthetic_engine, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from fdasync.engine.config import EngineConfig
    from fdasync.engine.tokenizer import Tokenizer
    from fdasync.runner.synthetic.oracle import Oracle

STEP = {"step_s": 0.002}
# roles of the instances behind a router
ROLES = {"engine": (), "router": ("prefill", "decode"), "fleet": ("mixed", "mixed")}
KEY = "sk-0123456789abcdef"
ADMIN = "sk-admin-0123456789"
# reading the authorities of the machine takes a client longer than a server and an engine take to start
NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class _Sooner:
    """In place of `asyncio` where uvicorn looks for it: its server asks ten times as often whether it is to end."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 10)


@pytest.fixture(autouse=True, scope="session")
def servers_end_soon() -> Iterator[None]:
    """Hundreds of them end here, a tenth of a second and more each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", _Sooner())
        yield


class Steps:
    """The steps of every engine of a scene, let go by hand: what a client has read so far does not depend on the clock.

    Scenes that ask for `held` steps begin with none held.
    """

    def __init__(self) -> None:
        self._runners: list[FaultRunner] = []

    def runner_of(self, config: EngineConfig) -> FaultRunner:
        """The runner that this configuration names, whose steps are held with the others."""
        inner = make_runner(config.runner, config.runner_config, config.runner_limits())
        self._runners.append(FaultRunner(inner, Random(0)))
        return self._runners[-1]

    def hold(self) -> None:
        """From now on no step ends but those that `let` lets go."""
        for runner in self._runners:
            runner.hold()

    def release(self) -> None:
        """Hold no longer."""
        for runner in self._runners:
            runner.release()

    async def let(self, count: int) -> None:
        """Let so many more steps end, wherever they are computed, and hold those behind them."""
        most = self._ended + count
        await until(lambda: self._let_up_to(most))

    async def each(self, events: AsyncIterator[Any], count: int) -> AsyncIterator[Any]:
        """The first `count` events of a stream that has not begun. An event is there before the next step ends."""
        for _ in range(count):
            let = asyncio.ensure_future(self.let(1))
            yield await anext(events)
            await let

    def _let_up_to(self, most: int) -> bool:
        for runner in self._runners:
            if self._ended < most:
                runner.release(1)
        return self._ended == most

    @property
    def _ended(self) -> int:
        return sum(runner.completed for runner in self._runners)


class Scene(NamedTuple):
    """A server that runs.

    Attributes:
        client: talks to it.
        generator: behind it.
        oracle: knows every right token and row.
        weights: a folder in which weights lie, each in a folder of its own.
        url: where it listens.
        port: the same.
        steps: of a scene that asked for `held` ones.
    """

    client: httpx2.AsyncClient
    generator: Generator
    oracle: Oracle
    weights: Path
    url: str
    port: int
    steps: Steps

    def new_weights(self, name: str, weights_id: int) -> Path:
        """A folder of weights that clients may name."""
        folder = self.weights / name
        folder.mkdir()
        (folder / WEIGHTS_FILE).write_text(json.dumps({"weights_id": weights_id}))
        return folder


@asynccontextmanager
async def generator_of(
    kind: str, folder: Path, tokenizer: Tokenizer | None = None, steps: Steps | None = None, **runner: Any
) -> AsyncIterator[Generator]:
    """A generator that has started: "engine", "router" of a prefill and a decode instance, or "fleet", a router of two
    mixed ones. `steps`: takes on the steps of its engines.

    Instances copy blocks on this loop: a process for each would be most of what a test costs, and no client sees it.
    Those of `fdasync up`, whose servers other tests call, have theirs."""
    values = {**STEP, **runner}
    own = tokenizer or LetterTokenizer()
    async with AsyncExitStack() as stack:
        roles = ROLES[kind]
        addresses = [f"ipc://{folder}/{role}{number}" for number, role in enumerate(roles)]
        for role, address in zip(roles, addresses, strict=True):
            config = synthetic_config(values, role=role, host_blocks=64, leases=LEASES)
            held = steps and steps.runner_of(config)
            instance = Instance(
                config, listen=address, links=LINKS, runner=held, tokenizer=own, transport="shm", transfer_process=False
            )
            await stack.enter_async_context(instance)
        if roles:
            made: Generator = fdasync.connect(addresses, links=LINKS)
        else:
            config = synthetic_config(values)
            made = synthetic_engine(config, runner=steps and steps.runner_of(config), tokenizer=own)
        yield await stack.enter_async_context(made)


@pytest.fixture(params=["engine", "router"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def scene_of(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Scene]]:
    @asynccontextmanager
    async def make(
        kind: str = "engine", listen: Listen | None = None, headers: dict[str, str] | None = None,
        held: bool = False, **config: Any,
    ) -> AsyncIterator[Scene]:  # fmt: skip
        weights = tmp_path / "weights"
        runner = config.pop("runner", {})
        tokenizer = config.pop("tokenizer", None) or LetterTokenizer()
        steps = Steps()
        weights.mkdir(exist_ok=True)
        async with generator_of(kind, tmp_path, tokenizer, steps if held else None, **runner) as generator:
            settings = HttpConfig(**{"weights_root": str(weights), **config})
            service = app(generator, settings, tokenizer=tokenizer)
            async with (
                serving(service, listen or Listen(port=0, drain_s=1.0)) as served,
                httpx2.AsyncClient(base_url=served.url, timeout=300, headers=headers, verify=NO_AUTHORITIES) as client,
            ):
                oracle = oracle_of(synthetic_config({**STEP, **runner}))
                try:
                    yield Scene(client, generator, oracle, weights, served.url, served.port, steps)
                finally:
                    # an engine that closes waits for its steps
                    steps.release()

    return make


@pytest.fixture
async def scene(kind: str, scene_of: Callable[..., AbstractAsyncContextManager[Scene]]) -> AsyncIterator[Scene]:
    async with scene_of(kind) as made:
        yield made
