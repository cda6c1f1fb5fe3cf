"""A request on its way to another instance, and that instance, as a prefill instance sees them. Pure data.

Moved by `disagg/prefill.py` (leases) and `disagg/sender.py` (blocks).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fdasync.events.catalog import RequestPrepared
    from fdasync.scheduler.state.hold import Export
    from fdasync.scheduler.state.sequence import Sequence


class Errand:
    """A group of samples on its way to another instance.

    Attributes:
        state: "waiting" to be asked for, "asked", "granted", "failed" until its samples have ended, "ended".
        decoders: instances that may still be asked; `at`: the next of them; `rounds`: times that all were
            asked; `losses`: leases lost.
        refusals: what each instance said last, when it gave no lease.
        attempt: of the ask in flight or granted; -1 before the first.
        full: full blocks of the prompt; the next one to be sent is `next_block`.
        begun: its first sample entered prefill under this lease.
        exports: blocks on their way to be offered, in order.
        hands: samples that have their first token, and their open blocks once those are on their way.
        sent: some sample's hand-over was sent.
        handed: samples that the other instance goes on with.
        stop_at: when to stop looking for room; over_at: when not to begin again.
    """

    __slots__ = (
        "at", "attempt", "begun", "decoders", "exports", "full", "group", "handed", "hands", "losses", "next_block",
        "order", "over_at", "peer", "ready_at", "refusals", "rounds", "samples", "sent", "seqs", "state", "stop_at",
        "tokens",
    )  # fmt: skip

    def __init__(
        self, event: RequestPrepared, order: tuple[int, int], block_tokens: int, stop_at: float, over_at: float
    ) -> None:
        self.group = event.group
        self.order = order
        self.decoders = list(event.decoders)
        self.samples = event.samples
        self.tokens = len(event.tokens)
        self.full = self.tokens // block_tokens
        self.stop_at = stop_at
        self.over_at = over_at
        self.state = "waiting"
        self.at = self.rounds = self.losses = 0
        self.attempt = -1
        self.peer = ""
        self.refusals: dict[str, str] = {}
        self.ready_at = 0.0
        self.next_block = 0
        self.begun = self.sent = False
        self.handed = 0
        self.seqs: list[Sequence] = []
        self.exports: list[tuple[int, Export]] = []
        self.hands: dict[int, Export | None] = {}

    @property
    def granted(self) -> bool:
        return self.state == "granted"

    @property
    def why(self) -> str:
        """In words, what each instance said last, those that said the same together."""
        said: dict[str, list[str]] = {}
        for peer, reason in self.refusals.items():
            said.setdefault(reason, []).append(peer)
        return "; ".join([f"{', '.join(peers)}: {reason}" for reason, peers in said.items()])


class Decoder:
    """One decode instance, as a prefill instance sees it: errands that would ask it next, and what it was asked.

    Attributes:
        silent: it did not answer the last question: one at a time is asked until it does.
        prompt: it answered the last one right away.
    """

    __slots__ = ("asked_tokens", "asks", "prompt", "queue", "silent")

    def __init__(self) -> None:
        self.queue: list[Errand] = []
        self.asks = 0
        self.asked_tokens = 0
        self.silent = self.prompt = False
