"""One instance in a process of its own, for benchmarks of prefill/decode disaggregation: healthy or not.

    python -m benchmarks.fleet.pd_process '{"address": ..., "config": ...}'

`pd_isolation.py` starts it; `pd_headline.py` plays its prefill side in virtual time.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop
from fdasync_fleet.instance.instance import Instance
from fdasync_fleet.messages import LeaseRequest

import fdasync.scheduler.make as make
from benchmarks.lib.child import stay
from fdasync.engine.config import EngineConfig
from fdasync.scheduler.disagg.prefill import PrefillSide

if TYPE_CHECKING:
    from fdasync.scheduler.disagg.handoff import HandOff


class Spec(msgspec.Struct, frozen=True):
    """One instance.

    Attributes:
        address: where it listens.
        config: of its engine, as plain values.
        workers: of a prefill instance: 0: fdasync's own way to lease room; else so many threads in order, as other
            systems do it.
        answers_s: of a decode instance: lease requests reach it so many seconds late; below 0 never. All other messages
            are on time.
    """

    address: str
    config: dict[str, Any]
    workers: int = 0
    answers_s: float = 0.0


def in_order(workers: int, prepare_s: float = 0.0) -> type[PrefillSide]:
    """A prefill side that leases room as prepare threads do: each thread takes the oldest request, prepares it for so
    long, asks its instance, and keeps the request until it has an answer, however often it has to ask. (The threads of
    other systems take batches, and reserve their own blocks before they ask: both only make it worse.)"""

    class InOrder(PrefillSide):
        """`_taken`: time at which each hand-off that a thread holds is prepared, by group."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._taken: dict[int, float] = {}

        def wake_at(self) -> float:
            due = [
                ready_at
                for group, ready_at in self._taken.items()
                if group in self.hand_offs and self.hand_offs[group].attempt < 0
            ]
            return min([super().wake_at(), *due])

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
    handle = instance._on[LeaseRequest]

    def later(peer: Any, message: Any) -> None:
        if seconds >= 0:
            asyncio.get_running_loop().call_later(seconds, handle, peer, message)

    instance._on[LeaseRequest] = later


async def main(spec: Spec) -> None:
    if spec.workers:
        make.PrefillSide = in_order(spec.workers)  # type: ignore[attr-defined]  # for this process
    async with Instance(msgspec.convert(spec.config, EngineConfig), listen=spec.address) as instance:
        if spec.answers_s:
            delay_answers(instance, spec.answers_s)
        await stay("ready")


if __name__ == "__main__":
    uvloop.run(main(msgspec.json.decode(sys.argv[1], type=Spec)))
