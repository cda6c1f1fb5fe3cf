"""What a prefill instance knows of a request that it hands off, and of each decode instance. Pure data.

`disagg/prefill.py` changes it as leases are asked for and answered, `disagg/sender.py` as blocks are sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fdasync.events.catalog import RequestPrepared
    from fdasync.scheduler.state.hold import Export
    from fdasync.scheduler.state.policy import Order
    from fdasync.scheduler.state.sequence import Sequence
# waiting: no question is in flight; denied: only while the answer is handled; failed: its samples end in this turn
HandOffState = Literal["waiting", "asked", "granted", "denied", "failed", "ended"]


class HandOff:
    """A group of samples on its way to another instance.

    Attributes:
        group: key of the first sample; names the hand-off in events and actions.
        order: its place in line.
        state: how far the search for a lease is.
        decoders: instances that may still be asked.
        at: which of `decoders` is asked next.
        rounds: how often all of `decoders` were asked.
        losses: leases lost so far.
        peer: the instance that was asked last.
        on_device: the instance that granted the lease reads this one's device.
        refusals: by instance, its last reason to give no lease.
        attempt: number of the last question; -1 before the first.
        ready_at: engine time before which no instance is asked; 0: the hand-off stands in an instance's queue.
        tokens: length of the prompt.
        full: number of full blocks of the prompt.
        next_block: which of `full` is sent next.
        begun: its first sample entered prefill under this lease.
        exports: (number, export) of blocks that are to be offered, in order.
        hands: samples that have their first token, each with the export of its open block; None: not exported yet.
        staged: samples whose state counts for the instance's share of the host's places.
        samples: how many samples the request has.
        seqs: the samples that have not ended here.
        sent: the hand-over of at least one sample was sent.
        handed: how many samples the other instance has taken over.
        stop_at: engine time at which the search for room ends.
        over_at: engine time after which no other lease is looked for.
        lost_at: engine time at which the granted lease is over.
    """

    __slots__ = (
        "at", "attempt", "begun", "decoders", "exports", "full", "group", "handed", "hands", "losses", "lost_at",
        "next_block", "on_device", "order", "over_at", "peer", "ready_at", "refusals", "rounds", "samples", "sent",
        "seqs", "staged", "state", "stop_at", "tokens",
    )  # fmt: skip

    def __init__(self, event: RequestPrepared, order: Order, block_tokens: int, stop_at: float, over_at: float) -> None:
        self.group = event.group
        self.order = order
        self.decoders = list(event.decoders)
        self.samples = event.samples
        self.tokens = len(event.tokens)
        self.full = self.tokens // block_tokens
        self.stop_at = stop_at
        self.over_at = over_at
        self.lost_at = 0.0
        self.state: HandOffState = "waiting"
        self.at = self.rounds = self.losses = 0
        self.attempt = -1
        self.peer = ""
        self.refusals: dict[str, str] = {}
        self.ready_at = 0.0
        self.next_block = 0
        self.begun = self.sent = self.on_device = False
        self.handed = 0
        self.seqs: list[Sequence] = []
        self.exports: list[tuple[int, Export]] = []
        self.hands: dict[int, Export | None] = {}
        self.staged: dict[int, None] = {}

    @property
    def granted(self) -> bool:
        return self.state == "granted"

    @property
    def why(self) -> str:
        """The last reason of each instance, in words; instances with the same reason stand together."""
        said: dict[str, list[str]] = {}
        for peer, reason in self.refusals.items():
            said.setdefault(reason, []).append(peer)
        return "; ".join([f"{', '.join(peers)}: {reason}" for reason, peers in said.items()])


@dataclass(slots=True, eq=False)
class Decoder:
    """What a prefill instance knows of one decode instance.

    Attributes:
        queue: hand-offs that ask it next, in order.
        asks: questions to it in flight.
        asked_tokens: prompt tokens of the questions in flight.
        silent: it did not answer the last question in time. Until it answers, it gets one question at a time.
    """

    queue: list[HandOff] = field(default_factory=list)
    asks: int = 0
    asked_tokens: int = 0
    silent: bool = False
