"""A stand-in for an instance: real links, real messages, real block news; steps cost time and compute nothing.

A mixed instance with continuous batching: one line of prompts, steps that carry whole prompts up to a budget beside all
running requests, a cache of blocks that is evicted by last use. Requests behind a running prompt with the same blocks
count them as had, as an engine's leader gives them. Between two changes of what runs, many steps are one timer.

Knows the router only by its messages. Made by `scale_world.py`; `scale_memory.py` uses its handshake.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from fdasync_fleet.instance.kv_events import KvEvents
from fdasync_fleet.link.links import Links
from fdasync_fleet.messages import (
    PROTOCOL,
    Abort,
    Call,
    Heartbeat,
    Hello,
    Piece,
    Progress,
    Reply,
    Standing,
    Status,
    Submit,
)
from fdasync_fleet.results import answer_message

from fdasync.cache.identity import block_keys, root_key
from fdasync.errors import PeerRefused, PeerUnreachable
from fdasync.events.actions import TellBlocks
from fdasync.result import CachedTokens, Sample, WeightSpan
from fdasync.runner.facts import ModelFacts
from fdasync.stats import EngineStats, SchedulerStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync_fleet.link.peer import Peer
    from fdasync_fleet.messages import Message
    from fdasync_fleet.testing.sim.network import SimNetwork

NAMESPACE = b"n" * 16
VOCAB_SIZE = 151_936

# of an engine that serves the shape of Qwen3-30B-A3B on one H200 (`benchmarks/results/gpu_serving_df.json`): seconds of
# a step by running requests, between which the time is interpolated, and of each token of a prompt
STEP_S = {1: 1 / 352, 64: 64 / 3858, 256: 256 / 11_245}
PROMPT_TOKEN_S = 1 / 79_827
BLOCK_TOKENS = 16
NUM_BLOCKS = 20_000
MAX_REQUESTS = 256
MAX_STEP_TOKENS = 8192
FACTS = ModelFacts(
    model="m", vocab_size=VOCAB_SIZE, eos_ids=(), max_context_tokens=32_768, block_tokens=BLOCK_TOKENS,
    num_blocks=NUM_BLOCKS, block_nbytes=2 * 48 * 4 * 128 * 2 * BLOCK_TOKENS, kv_layout="layout", kv_dtype="bfloat16",
    max_step_tokens=MAX_STEP_TOKENS, max_requests=MAX_REQUESTS,
)  # fmt: skip


def decode_s(running: int) -> float:
    """Seconds of a decode step."""
    return float(np.interp(running, list(STEP_S), list(STEP_S.values()))) if running else 0.0


def hello_of(name: str, address: str) -> Hello:
    """The handshake of an instance."""
    return Hello(PROTOCOL, name, "mixed", address, namespace=NAMESPACE, facts=FACTS, namespace_base=bytes(16))


class _Request:
    """A request of a router on this instance."""

    __slots__ = ("cached", "keys", "left", "made", "max_tokens", "name", "peer", "streams", "tokens")

    def __init__(self, submit: Submit, peer: Peer, keys: list[bytes]) -> None:
        self.name, self.peer, self.keys = submit.request, peer, keys
        self.tokens = array("i", submit.tokens)
        self.max_tokens, self.streams = submit.params.max_tokens, submit.streams
        self.cached = 0
        # prompt tokens that it must compute; output tokens
        self.left = len(self.tokens)
        self.made = 0


class StandIn:
    """See the module.

    Args:
        number: of its process, unlike that of every other process in this network.

    Attributes:
        address: where it listens.
        wire: its place in the network.
        failures: defects that its links reported.
        links: its links.
    """

    def __init__(self, network: SimNetwork, name: str, number: int) -> None:
        self.name, self.address = name, f"ipc:///fleet/{name}"
        self.failures: list[Exception] = []
        self.wire = network.wire(name)
        # identities of the blocks that it has, oldest first
        self._blocks: dict[bytes, None] = {}
        self.loop = asyncio.get_running_loop()
        self._network = network
        self._rng = np.random.default_rng(number)
        self._root = root_key(NAMESPACE, b"")
        self._waiting: dict[str, _Request] = {}
        self._running: dict[str, _Request] = {}
        # blocks that prompts in the line will fill
        self._pending: Counter[bytes] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._began, self._step_s, self._steps = 0.0, 0.0, 0
        self._batch: list[_Request] = []
        self._kv_events = KvEvents(self, lambda: ("0", 0))
        self.links = Links(self.wire, self, incarnation=number.to_bytes(12, "big").replace(b"\0", b"\1", 1))
        self.links.listen(self.address)

    # -- the context of `KvEvents`

    def namespace(self) -> bytes:
        return NAMESPACE

    def guarded(self, work: Callable[[], None]) -> Callable[..., None]:
        return lambda *_: work()

    # -- what links call

    def hello(self) -> Hello:
        return hello_of(self.name, self.address)

    def check(self, hello: Hello) -> None: ...

    def beat(self, _: Peer) -> Heartbeat:
        used = sum([len(one.keys) for one in self._running.values()])
        queued = sum([one.left for one in self._waiting.values()])
        free = max(NUM_BLOCKS - used, 0)
        told = SchedulerStats(
            waiting=len(self._waiting), queued_tokens=queued, running=len(self._running), free_blocks=free,
            used_blocks=NUM_BLOCKS - free,
        )  # fmt: skip
        return Heartbeat((), Status(EngineStats(scheduler=told)))

    def on_up(self, peer: Peer) -> None:
        self._kv_events.add(peer)

    def on_heartbeat(self, peer: Peer, heartbeat: Heartbeat) -> None: ...

    def on_failure(self, error: Exception) -> None:
        self.failures.append(error)

    def on_lost(self, peer: Peer, _: PeerUnreachable) -> None:
        self._kv_events.remove(peer)
        for request in [*self._waiting.values(), *self._running.values()]:
            if request.peer is peer:
                self._forget(request.name)

    def on_message(self, peer: Peer, message: Message, _: object) -> None:
        if isinstance(message, Submit):
            self._take(peer, message)
        elif isinstance(message, Abort):
            self._forget(message.request)
        elif isinstance(message, Call):
            self._say(peer, Reply(message.number, Standing(NAMESPACE)))

    async def die(self) -> None:
        """Its process is gone, without a word."""
        self._network.kill(self.wire)
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()
        self._running.clear()
        await self.links.aclose(0.0)

    # -- requests

    def _say(self, peer: Peer, message: Message) -> None:
        # a full link is a defect of the stand-in: a real instance waits
        try:
            peer.send(message)
        except (PeerUnreachable, PeerRefused):
            return

    def _take(self, peer: Peer, submit: Submit) -> None:
        keys = block_keys(self._root, array("i", submit.tokens), BLOCK_TOKENS)
        request = _Request(submit, peer, keys)
        # an open block is never shared, and a token is left to compute
        most = (len(request.tokens) - 1) // BLOCK_TOKENS
        had = 0
        while had < most and (keys[had] in self._blocks or keys[had] in self._pending):
            had += 1
        request.cached = had * BLOCK_TOKENS
        request.left = len(request.tokens) - request.cached
        self._pending.update(keys[had:])
        self._waiting[request.name] = request
        self._replan()

    def _forget(self, name: str) -> None:
        request = self._waiting.get(name)
        if request is not None and request not in self._batch:
            del self._waiting[name]
            self._unpend(request)
        self._running.pop(name, None)

    def _unpend(self, request: _Request) -> None:
        for key in request.keys[request.cached // BLOCK_TOKENS :]:
            self._pending[key] -= 1
            if not self._pending[key]:
                del self._pending[key]

    def _store(self, keys: list[bytes]) -> None:
        """These blocks, one behind the other, are there and were just used; the oldest make room."""
        blocks = self._blocks
        added = tuple([key for key in keys if key not in blocks])
        # the last block is the first to go
        for key in reversed(keys):
            blocks.pop(key, None)
            blocks[key] = None
        removed = []
        while len(blocks) > NUM_BLOCKS:
            oldest = next(iter(blocks))
            del blocks[oldest]
            removed.append(oldest)
        if added or removed:
            self._kv_events.tell(TellBlocks(added, tuple(removed)))

    # -- steps

    def _replan(self) -> None:
        """Something came: a run of many decode steps ends with the one that is under way."""
        if self._timer is None:
            self._plan()
        elif self._steps > 1:
            gone = int((self.loop.time() - self._began) / self._step_s)
            self._steps = min(gone + 1, self._steps)
            self._timer.cancel()
            self._timer = self.loop.call_at(self._began + self._steps * self._step_s, self._done)

    def _plan(self) -> None:
        self._timer = None
        self._batch = []
        tokens = len(self._running)
        for request in self._waiting.values():
            full = len(self._running) + len(self._batch) >= MAX_REQUESTS
            if full or (self._batch and tokens + request.left > MAX_STEP_TOKENS):
                break
            self._batch.append(request)
            tokens += request.left
        if not self._batch and not self._running:
            return
        prompts_s = sum([request.left for request in self._batch]) * PROMPT_TOKEN_S
        self._step_s = decode_s(max(len(self._running), 1)) + prompts_s
        # streams tell of every token
        alone = self._batch or any(request.streams for request in self._running.values())
        self._steps = 1 if alone else min([one.max_tokens - one.made for one in self._running.values()])
        self._began = self.loop.time()
        self._timer = self.loop.call_at(self._began + self._steps * self._step_s, self._done)

    def _done(self) -> None:
        pieces: dict[Peer, list[Piece]] = {}
        for request in self._running.values():
            request.made += self._steps
            self._tell(request, self._steps, pieces)
        for request in self._batch:
            del self._waiting[request.name]
            self._unpend(request)
            self._store(request.keys)
            request.left, request.made = 0, 1
            self._running[request.name] = request
            self._tell(request, 1, pieces)
        for peer, some in pieces.items():
            self._say(peer, Progress(tuple(some)))
        for request in [one for one in self._running.values() if one.made >= one.max_tokens]:
            del self._running[request.name]
            self._end(request)
        self._plan()

    def _tell(self, request: _Request, count: int, pieces: dict[Peer, list[Piece]]) -> None:
        if request.streams:
            ids = tuple(self._rng.integers(0, VOCAB_SIZE, count).tolist())
            request.tokens.extend(ids)
            reason = "length" if request.made >= request.max_tokens else None
            piece = Piece(request.name, 0, ids, "", None, None, None, reason)
            pieces.setdefault(request.peer, []).append(piece)

    def _end(self, request: _Request) -> None:
        count = request.max_tokens
        if not request.streams:
            request.tokens.extend(self._rng.integers(0, VOCAB_SIZE, count).tolist())
        tokens, keys = request.tokens, request.keys
        # the last token was never computed
        rest = tokens[len(keys) * BLOCK_TOKENS : -1]
        self._store(keys + block_keys(keys[-1] if keys else self._root, rest, BLOCK_TOKENS))
        sample = Sample(
            index=0,
            token_ids=tuple(tokens[-count:]),
            text="",
            raw_logprobs=None,
            processed_logprobs=None,
            top_logprobs=None,
            finish_reason="length",
            cached=CachedTokens(device=request.cached),
            weight_version=(WeightSpan(0, count, "0"),),
            routing=None,
            aux={},
            start=0,
        )
        answer = answer_message(request.name, sample)
        assert answer is not None
        self._say(request.peer, answer)
