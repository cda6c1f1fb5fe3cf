"""One instance in a process of its own, for benchmarks of prefill/decode disaggregation: healthy or not.

    python -m benchmarks.fleet.pd_process '{"role": ..., "address": ...}'

`workers` of a prefill instance: 0: fdasync's own way to lease room; else so many threads in order, as other systems do
it. `answers_s` of a decode instance: lease requests reach it so many seconds late; below 0 never. All other messages
are on time. Started by `pd_fleet.py`.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop
from fdasync_fleet.instance.instance import Instance

import fdasync.scheduler.core as core
from fdasync.engine.config import EngineConfig
from fdasync.scheduler.disagg.prefill import PrefillSide

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.scheduler.disagg.handoff import HandOff


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """One instance.

    Attributes:
        role, address, config, transport: of the instance.
        workers, answers_s: see the module.
    """

    role: str
    address: str
    config: dict[str, Any]
    workers: int = 0
    answers_s: float = 0.0
    transport: str = "auto"


def in_order(workers: int, prepare_s: float = 0.0) -> type[PrefillSide]:
    """A prefill side that leases room as prepare threads do: each thread takes the oldest request, prepares it for so
    long, asks its instance, and keeps the request until it has an answer, however often it has to ask. (The threads of
    other systems take batches, and reserve their own blocks before they ask: both only make it worse.)"""

    class InOrder(PrefillSide):
        """`_taken`: time at which each hand-off that a thread holds is prepared, by group."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._taken: dict[int, float] = {}

        @property
        def wake_at(self) -> float:
            due = [
                ready_at
                for group, ready_at in self._taken.items()
                if group in self.hand_offs and self.hand_offs[group].attempt < 0
            ]
            return min([super().wake_at, *due])

        def _ask(self, now: float) -> None:
            live = self.hand_offs
            self._taken = {
                group: ready_at for group, ready_at in self._taken.items() if group in live and not live[group].granted
            }
            queued: list[HandOff] = sorted(
                [hand_off for peer in self._peers.values() for hand_off in peer.queue if hand_off.state != "ended"],
                key=lambda hand_off: hand_off.order,
            )
            for hand_off in queued:
                if hand_off.group not in self._taken:
                    if len(self._taken) >= workers:
                        continue
                    self._taken[hand_off.group] = now + prepare_s
                if now >= self._taken[hand_off.group]:
                    peer = self._peer(hand_off.decoders[hand_off.at])
                    peer.queue.remove(hand_off)
                    self._send_ask(hand_off, peer, now)

    return InOrder


def delay_answers(instance: Instance, seconds: float) -> None:
    """Delay the lease requests that reach this instance; below 0 they never do."""
    decode_service = instance._decode_service
    handle: Callable[..., None] = decode_service.on_lease_request

    def later(peer: Any, message: Any) -> None:
        if seconds >= 0:
            asyncio.get_running_loop().call_later(seconds, handle, peer, message)

    for kind, handler in list(instance._on.items()):
        if handler == handle:
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
        core.PrefillSide = in_order(spec.workers)  # type: ignore[misc]
    uvloop.run(main(spec))
