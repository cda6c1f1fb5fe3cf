"""One instance in a process of its own, for benchmarks of prefill/decode disaggregation: healthy or not.

    python -m benchmarks._pd_process '{"role": ..., "address": ...}'

`workers` says how a prefill instance finds room: 0 is ours, else as the peers do it, by so many threads in order.
`answers_s` delays when a decode instance hears questions for room; below 0 it never does. Everything else goes on.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop

import fdasync.scheduler.core as core
from fdasync.engine.config import EngineConfig
from fdasync.pd.instance.instance import Instance
from fdasync.scheduler.disagg.prefill import Borrower

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.scheduler.disagg.handoff import Errand


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What to run."""

    role: str
    address: str
    config: dict[str, Any]
    workers: int = 0
    answers_s: float = 0.0
    transport: str = "auto"


def in_order(workers: int, prepare_s: float = 0.0) -> type[Borrower]:
    """Finding room as prepare threads do it: each takes the oldest request there is, prepares it for so long, asks its
    instance, and stays with it until it has an answer, however often it has to ask. (The peers' threads take batches,
    and reserve their own blocks before they ask: both only make it worse.)"""

    class InOrder(Borrower):
        """`_taken`: errands that a worker has, and when it has prepared them."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._taken: dict[int, float] = {}

        @property
        def wake_at(self) -> float:
            due = [
                ready_at
                for group, ready_at in self._taken.items()
                if group in self._errands and self._errands[group].attempt < 0
            ]
            return min([super().wake_at, *due])

        def _trim(self, now: float) -> None:
            """They have as many leases as their threads brought."""

        def _ask(self, now: float) -> None:
            live = self._errands
            self._taken = {
                group: ready_at for group, ready_at in self._taken.items() if group in live and not live[group].granted
            }
            queued: list[Errand] = sorted(
                [errand for peer in self._peers.values() for errand in peer.queue if errand.state != "ended"],
                key=lambda errand: errand.order,
            )
            for errand in queued:
                if errand.group not in self._taken:
                    if len(self._taken) >= workers:
                        continue
                    self._taken[errand.group] = now + prepare_s
                if now >= self._taken[errand.group]:
                    peer = self._peer(errand.decoders[errand.at])
                    peer.queue.remove(errand)
                    self._send_ask(errand, peer, now)

    return InOrder


def delay_answers(instance: Instance, seconds: float) -> None:
    """Questions for room are heard this much later; below 0 never."""
    lending = instance._lending
    heard: Callable[..., None] = lending.on_ask

    def later(peer: Any, message: Any) -> None:
        if seconds >= 0:
            asyncio.get_running_loop().call_later(seconds, heard, peer, message)

    for kind, handler in list(instance._on.items()):
        if handler == heard:
            instance._on[kind] = later


async def main(spec: Spec) -> None:
    config = msgspec.convert(spec.config, EngineConfig)
    async with Instance(config, listen=spec.address, transport=spec.transport) as instance:
        if spec.answers_s:
            delay_answers(instance, spec.answers_s)
        print("ready", flush=True)
        # until it is ended from outside
        await asyncio.wait_for(asyncio.Event().wait(), 7200.0)


if __name__ == "__main__":
    spec = msgspec.json.decode(sys.argv[1], type=Spec)
    if spec.workers:
        core.Borrower = in_order(spec.workers)  # type: ignore[misc]
    uvloop.run(main(spec))
