"""A router over a simulated network, in front of instances that a test scripts."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from fdasync_fleet.link.links import Links
from fdasync_fleet.messages import (
    PROTOCOL,
    Abort,
    Answered,
    Call,
    Ended,
    Failed,
    Heartbeat,
    Hello,
    KvEventBatch,
    Moved,
    Outputs,
    Piece,
    Progress,
    PromptTokens,
    Reply,
    SampleEnd,
    Standing,
    Status,
    Submit,
)
from fdasync_fleet.router.config import RouterConfig
from fdasync_fleet.router.router import Router
from fdasync_fleet.testing.sim.network import SimNetwork
from fdasync_fleet.verbs import Failure, name_of

from fdasync.request import FIRST_VERSION
from fdasync.runner.facts import ModelFacts
from fdasync.stats import EngineStats, SchedulerStats, State
from fdasync.testing.sim.loop import run_sim

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fdasync_fleet.router.stats import InstanceStats

FACTS = ModelFacts(
    model="m", vocab_size=300, eos_ids=(), max_context_tokens=1000, block_tokens=4, num_blocks=100, block_nbytes=64,
    kv_layout="l", kv_dtype="d", max_step_tokens=64, max_requests=4096, no_sleep="",
)  # fmt: skip


def hello_of(name: str, address: str, role: str, facts: ModelFacts = FACTS, order: int = 0, **more: Any) -> Hello:
    """What an instance says first; the digest is the same for all."""
    more = {"namespace": b"n" * 16, **more}
    return Hello(
        PROTOCOL, name, role, address, facts=facts, namespace_base=bytes(16), weight_order=order, **more,
    )  # type: ignore[arg-type]  # fmt: skip


def status_of(
    state: State = "running", waiting: int = 0, queued: int = 0, running: int = 0, free: int = 100, blocks: int = 100,
) -> Status:  # fmt: skip
    """What an instance with so many device blocks says with its heartbeats."""
    told = SchedulerStats(
        waiting=waiting, queued_tokens=queued, running=running, free_blocks=free, used_blocks=blocks - free
    )
    return Status(EngineStats(state=state, scheduler=told))


NAMESPACE = b"n" * 16
ROLES = {"p": "prefill", "d": "decode", "m": "mixed"}


class Command:
    """What a router had a script do: the name of the verb, and its arguments.

    Attributes:
        values: the arguments, by name; also attributes of their own, others have what means nothing.
        path, part: of a verb that brings weights: the folder, or the tensors of a group.
    """

    def __init__(self, number: int, verb: str, **values: Any) -> None:
        self.number, self.verb, self.values = number, verb, values.copy()
        self.version, self.order, self.mode, self.expected, self.weights_id = FIRST_VERSION, 0, "abort", "", ""
        self.path, self.part, self.level, self.tags, self.limit_s = "", None, 1, (), 0.0
        source = values.pop("source", "")
        if isinstance(source, str):
            self.path = source
        else:
            self.part = source
        vars(self).update(values)

    @classmethod
    def of(cls, call: Call) -> Command:
        return cls(call.number, name_of(call.verb), **msgspec.structs.asdict(call.verb))


def failure(error: str, problem: str, field: str, expected: str = "", held: str = "") -> Failure:
    """What an instance says of an error of this class."""
    fields: dict[str, Any] = {"problem": problem}
    if error in ("BadInput", "ConfigError"):
        fields |= {"field": field, "limit": None, "hint": "", "other": ""}
    elif error == "WakeFailed":
        fields["part"] = field
    elif error == "UpdateUnderWay":
        fields = {"where": problem, "what": "another update is under way"}
    elif error == "Asleep":
        fields = {"call": "update_weights", "parts": ("weights",)}
    elif error == "WeightsDiffer":
        fields = {"expected": expected, "held": held, "tensor": "", "where": ""}
    return Failure(error, fields)


def replied(
    number: int,
    error: str = "",
    problem: str = "",
    namespace: bytes = b"",
    weight_version: str = FIRST_VERSION,
    weight_order: int = 0,
    field: str = "",
    expected: str = "",
    held: str = "",
    state: Any = "running",
    is_delta: bool = False,
) -> Reply:
    """An instance's reply: how it stands, and what it did or why it did not."""
    standing = Standing(namespace, weight_version, weight_order, state, is_delta)
    return Reply(number, standing, held, failure(error, problem, field, expected, held) if error else None)


def standing(reply: Reply, **values: Any) -> Reply:
    """A reply of an instance that stands otherwise."""
    return msgspec.structs.replace(reply, standing=msgspec.structs.replace(reply.standing, **values))


def done(
    number: int, error: str = "", problem: str = "", namespace: bytes = b"", version: int = 0, field: str = ""
) -> Reply:
    """The label of weights is their order."""
    return replied(number, error, problem, namespace, str(version), version, field)


def runs(one: InstanceStats) -> bool:
    """Whether it has said that samples run there."""
    return one.status is not None and one.status.stats.scheduler.running > 0


def kv_batch(
    namespace: bytes, version: int, reset: bool, added: tuple[bytes, ...], removed: tuple[bytes, ...]
) -> KvEventBatch:
    """The label of weights is their order."""
    return KvEventBatch(namespace, str(version), reset, added, removed, version)


class Script:
    """A scripted instance: p0 prefills, d0 decodes, m0 does both.

    Attributes:
        submits, aborts, commands: messages that it got; `claims` alone answers claims.
        namespace, version: of its weights, in its hello; the version is label and order.
        max_context_tokens: in its hello.
        answers, obeys: called with each Submit, or command; None: neither is answered.
    """

    def __init__(self, network: SimNetwork, name: str, number: int) -> None:
        self.name, self.address = name, f"ipc:///run/{name}"
        self.wire = network.wire(name)
        self.network = network
        self.facts = FACTS
        self.status = status_of()
        self.submits: list[Submit] = []
        self.aborts: list[str] = []
        self.commands: list[Command] = []
        self.namespace, self.version = NAMESPACE, 0
        self.max_context_tokens = 1000
        self.claims: Callable[[Command], Reply | None] = lambda command: Reply(command.number)
        self.answers: Callable[[Submit], None] | None = None
        self.failures: list[Exception] = []
        self.obeys: Callable[[Command], Reply | None] | None = lambda command: replied(
            command.number, "", "", b"w" * 16, command.version, command.order
        )
        self.router: Any = None
        self.links = Links(self.wire, self, incarnation=bytes([number]) * 12)
        self.links.listen(self.address)

    # -- what links ask

    def hello(self) -> Hello:
        facts = msgspec.structs.replace(
            self.facts, max_context_tokens=self.max_context_tokens, weight_version=str(self.version)
        )
        return hello_of(self.name, self.address, ROLES[self.name[0]], facts, self.version, namespace=self.namespace)

    def check(self, hello: Hello) -> None:
        return None

    def beat(self, peer: Any) -> Heartbeat:
        return Heartbeat((), self.status)

    def on_up(self, peer: Any) -> None:
        self.router = peer

    def on_message(self, peer: Any, message: Any, payload: Any) -> None:
        if isinstance(message, Submit):
            self.submits.append(message)
            if self.answers is not None:
                self.answers(message)
        elif isinstance(message, Abort):
            self.aborts.append(message.request)
        elif isinstance(message, Call):
            command = Command.of(message)
            if command.verb in ("claim", "release"):
                reply = self.claims(command)
            else:
                self.commands.append(command)
                reply = None if self.obeys is None else self.obeys(command)
            if reply is not None:
                self.router.send(reply)

    def on_heartbeat(self, peer: Any, heartbeat: Any) -> None: ...

    def on_lost(self, peer: Any, error: Any) -> None: ...

    def on_failure(self, error: Exception) -> None:
        self.failures.append(error)

    # -- what it says

    def tokens(self, name: str, *tokens: int, index: int = 0, finish: str | None = None) -> None:
        self.router.send(Progress((Piece(name, index, tokens, "", None, None, None, finish),)))

    def prompt(self, name: str, *tokens: int) -> None:
        self.router.send(PromptTokens(name, array("i", tokens).tobytes()))

    def sample(self, name: str, *tokens: int, index: int = 0, reason: str = "length") -> None:
        """All of a sample, but its pieces."""
        self.router.send(Outputs(name, index, 0, array("i", tokens).tobytes(), "", None, None, None))
        self.router.send(SampleEnd(name, index, len(tokens), reason, (0, 0, 0), (), None, None, ()))

    def end(self, name: str, *samples: tuple[int, ...], reason: str = "length") -> None:
        """The end, behind these samples: all that were not sent before."""
        for index, tokens in enumerate(samples):
            self.sample(name, *tokens, index=index, reason=reason)
        self.router.send(Ended(name))

    def answer(self, name: str, *tokens: int, count: int | None = None) -> None:
        """All of a request of one sample in one message; `count`: tokens that it says it has."""
        outputs = Outputs(name, 0, 0, array("i", tokens).tobytes(), "", None, None, None)
        count = len(tokens) if count is None else count
        end = SampleEnd(name, 0, count, "length", (0, 0, 0), (), None, None, ())
        self.router.send(Answered(name, outputs, end))

    def moved(self, name: str, to: Script) -> None:
        self.router.send(Moved(name, to.address))

    def failed(self, name: str, error: str = "EngineBusy", *, retriable: bool = True, **fields: str) -> None:
        self.router.send(Failed(name, error, "no", retriable=retriable, **fields))

    def has(self, *keys: bytes) -> None:
        self.router.send(kv_batch(NAMESPACE, 0, False, keys, ()))

    def die(self) -> None:
        self.network.kill(self.wire)


class Scene:
    """A router and its scripts, by name."""

    def __init__(self, names: tuple[str, ...], config: dict[str, Any]) -> None:
        self.network = SimNetwork(random.Random(1))
        self.scripts: dict[str, Script] = {}
        self.begun = 0
        for name in names:
            self.begin(name)
        self.router = Router(
            [script.address for script in self.scripts.values()], RouterConfig(**config),
            wire=self.network.wire("router"), seed=1,
        )  # fmt: skip

    def begin(self, name: str, namespace: bytes = NAMESPACE) -> Script:
        """Start an instance, or another process in the place of a dead one."""
        self.begun += 1
        script = self.scripts[name] = Script(self.network, name, self.begun)
        script.namespace = namespace
        return script

    def __getattr__(self, name: str) -> Script:
        return self.scripts[name]


async def settle(seconds: float = 0.2) -> None:
    await asyncio.sleep(seconds)


@asynccontextmanager
async def scene(*names: str, **config: Any) -> AsyncIterator[Scene]:
    made = Scene(names, config)
    try:
        async with made.router:
            yield made
    finally:
        for script in made.scripts.values():
            await script.links.aclose(0.0)


Test = Callable[["Scene"], Coroutine[Any, Any, None]]


def in_scene(*names: str, **config: Any) -> Callable[[Test], Callable[[], None]]:
    """A test that takes a scene, in virtual time; nothing of it may be live at its end."""

    def wrap(test: Test) -> Callable[[], None]:
        def run() -> None:
            async def main() -> None:
                async with scene(*names, **config) as made:
                    await test(made)
                    assert made.router.live == []
                    assert not [script.failures for script in made.scripts.values() if script.failures]
                    assert made.router.dispatch.num_held == 0
                    for member in made.router.table.instances.values():
                        assert (member.live, member.tokens) == (0, 0)

            run_sim(main())

        run.__name__ = test.__name__
        return run

    return wrap
