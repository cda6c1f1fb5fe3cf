"""A stand-in for an instance: real links, real messages, real block news; steps cost time and compute nothing.

A mixed instance with continuous batching: one line of prompts, steps that carry whole prompts up to a budget beside all
running requests, a cache of blocks that is evicted by last use. Requests behind a running prompt with the same blocks
count them as had, as an engine's leader gives them. Between two changes of what runs, many steps are one timer.

Knows the router only by its messages. Made by `scale_world.py`.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from fdasync_fleet.instance.kv_events import KvEvents
from fdasync_fleet.link.links import Links
from fdasync_fleet.messages import (
    PROTOCOL,
    Abort,
    Command,
    Done,
    Facts,
    Failed,
    Heartbeat,
    Hello,
    Piece,
    Progress,
    Shape,
    Status,
    Submit,
)
from fdasync_fleet.results import answer_message

from fdasync.cache.identity import block_keys, root_key
from fdasync.errors import PeerRefused, PeerUnreachable
from fdasync.events.actions import TellBlocks
from fdasync.result import CachedTokens, Sample, WeightSpan

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync_fleet.link.peer import Peer
    from fdasync_fleet.link.session import LinkConfig
    from fdasync_fleet.messages import Message, Role
    from fdasync_fleet.testing.sim.network import SimNetwork, SimWire

NAMESPACE = b"n" * 16
VOCAB_SIZE = 151_936


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Calibration: the time of a step, of an engine that serves the shape of Qwen3-30B-A3B on one H200.

    Attributes:
        step_s: (running requests, seconds of a decode step), between which the time is interpolated. Of
            `benchmarks/results/gpu_serving_df.json`: 352, 3,858 and 11,245 tokens/s at 1, 64 and 256 running.
        prompt_token_s: seconds for each token of a prompt; 79,827 tokens/s (same file).
        block_tokens: tokens of a block of that model.
    """

    step_s: tuple[tuple[int, float], ...] = ((1, 1 / 352), (64, 64 / 3858), (256, 256 / 11_245))
    prompt_token_s: float = 1 / 79_827
    block_tokens: int = 16
    num_blocks: int = 20_000
    max_requests: int = 256
    max_step_tokens: int = 8192
    max_context_tokens: int = 32_768

    def decode_s(self, running: int) -> float:
        return float(np.interp(running, *zip(*self.step_s, strict=True))) if running else 0.0


def shape_of(pace: Pace) -> Shape:
    block_nbytes = 2 * 48 * 4 * 128 * 2 * pace.block_tokens
    return Shape(bytes(16), "layout", "bfloat16", pace.block_tokens, block_nbytes, (), VOCAB_SIZE, (), False, b"")


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
        network, wire: where it listens.
        number: of its process, unlike that of every other process in this network.
        pace: what steps cost.

    Attributes:
        address: where it listens.
        blocks: identities of the blocks that it has, oldest first.
        failures: defects that its links reported.
        computed_tokens, had_tokens: prompt tokens so far.
    """

    def __init__(
        self, network: SimNetwork, wire: SimWire, name: str, number: int, pace: Pace, links: LinkConfig
    ) -> None:
        self.name, self.address, self.pace = name, f"ipc:///fleet/{name}", pace
        self.failures: list[Exception] = []
        self.blocks: dict[bytes, None] = {}
        self.computed_tokens = self.had_tokens = 0
        self.wire = wire
        self.loop = asyncio.get_running_loop()
        self._network = network
        self._rng = np.random.default_rng(number)
        self._shape = shape_of(pace)
        self._root = root_key(NAMESPACE, b"")
        self._waiting: dict[str, _Request] = {}
        self._running: dict[str, _Request] = {}
        # blocks that prompts in the line will fill
        self._pending: dict[bytes, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._began, self._step_s, self._steps = 0.0, 0.0, 0
        self._batch: list[_Request] = []
        self.kv_events = KvEvents(self, lambda: ("0", 0))  # type: ignore[arg-type]
        self.links = Links(wire, self, links, incarnation=number.to_bytes(12, "big").replace(b"\0", b"\1", 1))
        self.links.listen(self.address)

    # -- the context of `KvEvents`

    def namespace(self) -> bytes:
        return NAMESPACE

    def guarded(self, work: Callable[[], None]) -> Callable[..., None]:
        return lambda *_: work()

    # -- what links call

    def hello(self) -> Hello:
        pace = self.pace
        role: Role = "mixed"
        facts = Facts(
            "m", VOCAB_SIZE, pace.max_context_tokens, pace.num_blocks, (), 0, None, "", "", pace.max_step_tokens, "0",
            pace.max_requests,
        )  # fmt: skip
        return Hello(PROTOCOL, self.name, role, self.address, self._shape, (), NAMESPACE, facts)

    def check(self, hello: Hello) -> None: ...

    def beat(self, peer: Peer) -> Heartbeat:
        del peer
        used = sum([len(one.keys) for one in self._running.values()])
        queued = sum([one.left for one in self._waiting.values()])
        free, total = max(self.pace.num_blocks - used, 0), self.pace.num_blocks
        return Heartbeat((), Status("running", len(self._waiting), queued, len(self._running), 0, free, total))

    def on_up(self, peer: Peer) -> None:
        self.kv_events.add(peer)

    def on_heartbeat(self, peer: Peer, heartbeat: Heartbeat) -> None: ...

    def on_failure(self, error: Exception) -> None:
        self.failures.append(error)

    def on_lost(self, peer: Peer, error: PeerUnreachable) -> None:
        del error
        self.kv_events.remove(peer)
        for request in [*self._waiting.values(), *self._running.values()]:
            if request.peer is peer:
                self._forget(request.name)

    def on_message(self, peer: Peer, message: Message, payload: Any) -> None:
        del payload
        if isinstance(message, Submit):
            self._take(peer, message)
        elif isinstance(message, Abort):
            self._forget(message.request)
        elif isinstance(message, Command):
            self._say(peer, Done(message.number, namespace=NAMESPACE))

    def die(self) -> asyncio.Task[None]:
        """Its process is gone, without a word."""
        self._network.kill(self.wire)
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()
        self._running.clear()
        return self.loop.create_task(self.links.aclose(0.0))

    # -- requests

    def _say(self, peer: Peer, message: Message, payload: Any = None) -> None:
        # a full link is a defect of the stand-in: a real instance waits
        try:
            peer.send(message, payload)
        except (PeerUnreachable, PeerRefused):
            return

    def _take(self, peer: Peer, submit: Submit) -> None:
        keys = block_keys(self._root, array("i", submit.tokens), self.pace.block_tokens)
        request = _Request(submit, peer, keys)
        if len(request.tokens) + request.max_tokens > self.pace.max_context_tokens:
            self._say(peer, Failed(submit.request, "BadInput", "too long", field="prompt"))
            return
        # an open block is never shared, and a token is left to compute
        most = (len(request.tokens) - 1) // self.pace.block_tokens
        had = 0
        while had < most and (keys[had] in self.blocks or keys[had] in self._pending):
            had += 1
        request.cached = had * self.pace.block_tokens
        request.left = len(request.tokens) - request.cached
        for key in keys[had:]:
            self._pending[key] = self._pending.get(key, 0) + 1
        self._waiting[request.name] = request
        self._replan()

    def _forget(self, name: str) -> None:
        request = self._waiting.get(name)
        if request is not None and request not in self._batch:
            del self._waiting[name]
            self._unpend(request)
        self._running.pop(name, None)

    def _unpend(self, request: _Request) -> None:
        for key in request.keys[request.cached // self.pace.block_tokens :]:
            count = self._pending.get(key, 0)
            if count > 1:
                self._pending[key] = count - 1
            else:
                self._pending.pop(key, None)

    def _store(self, keys: list[bytes]) -> None:
        """These blocks, one behind the other, are there and were just used; the oldest make room."""
        blocks = self.blocks
        added = tuple([key for key in keys if key not in blocks])
        # the last block is the first to go
        for key in reversed(keys):
            blocks.pop(key, None)
            blocks[key] = None
        removed = []
        while len(blocks) > self.pace.num_blocks:
            oldest = next(iter(blocks))
            del blocks[oldest]
            removed.append(oldest)
        if added or removed:
            self.kv_events.tell(TellBlocks(added, tuple(removed)))

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
            if len(self._running) + len(self._batch) >= self.pace.max_requests:
                break
            if self._batch and tokens + request.left > self.pace.max_step_tokens:
                break
            self._batch.append(request)
            tokens += request.left
        if not self._batch and not self._running:
            return
        prompts_s = sum([request.left for request in self._batch]) * self.pace.prompt_token_s
        self._step_s = self.pace.decode_s(max(len(self._running), 1)) + prompts_s
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
            self.computed_tokens += request.left
            self.had_tokens += request.cached
            if self._waiting.pop(request.name, None) is None:
                continue
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
            piece = Piece(request.name, 0, ids, "", None, None, None, reason)  # type: ignore[arg-type]
            pieces.setdefault(request.peer, []).append(piece)

    def _end(self, request: _Request) -> None:
        count = request.max_tokens
        if not request.streams:
            request.tokens.extend(self._rng.integers(0, VOCAB_SIZE, count).tolist())
        tokens = request.tokens
        self._store(self._all_keys(request))
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

    def _all_keys(self, request: _Request) -> list[bytes]:
        """With those of the output; the last token was never computed."""
        size, keys = self.pace.block_tokens, request.keys
        root = keys[-1] if keys else self._root
        return keys + block_keys(root, request.tokens[len(keys) * size : -1], size)
