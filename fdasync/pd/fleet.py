"""The instances that a router knows: how each is doing, which blocks it has, and who is to serve a request.

Pure but for the peers that it keeps: told what came over the links, asked by `router.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fdasync.pd.messages import BlockNews, Facts, Hello, Status
    from fdasync.pd.peer import Peer

_MAX_DECODERS = 8


class Route(msgspec.Struct, frozen=True):
    """Who is to serve a request.

    Attributes:
        first: who gets it.
        decoders: to whom `first` shall hand it, in order; empty: it serves it whole.
    """

    first: Member
    decoders: tuple[Member, ...]


class Member:
    """One instance.

    Attributes:
        status: its latest word of how it is doing; `status_at`: when it came.
        blocks: identities that it has, under `namespace`.
        tokens: prompt tokens that were sent there and have not been computed yet, as far as known.
        live: requests that it serves, or prefills.
        leaving: it takes no more requests.
        sessions: how often it came up.
        behind: it has other weights than the router's others, and gets no requests; changed: since this process of it
            came up first; dropped: why it is not used any more.
    """

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.status: Status | None = None
        self.status_at = 0.0
        self.blocks: set[bytes] = set()
        self.namespace = b""
        self.weight_version = 0
        self.tokens = 0
        self.live = 0
        self.leaving = False
        self.sessions = 0
        self.behind = False
        self.changed = False
        self.dropped = ""
        self._incarnation = b""

    @property
    def hello(self) -> Hello:
        assert self.peer.hello is not None
        return self.peer.hello

    @property
    def facts(self) -> Facts:
        facts = self.hello.facts
        assert facts is not None
        return facts

    @property
    def address(self) -> str:
        return self.peer.address

    @property
    def is_leaving(self) -> bool:
        """It drains, or soon will."""
        return self.leaving or (self.status is not None and self.status.state == "draining")

    @property
    def takes_work(self) -> bool:
        return self.peer.is_up and not self.behind and not self.is_leaving

    def came_up(self) -> None:
        """A new session: what it had is not known any more."""
        self.sessions += 1
        self.status = None
        self.blocks.clear()
        before, self._incarnation = self._incarnation, self.peer.incarnation
        self.changed = before == self._incarnation and (self.changed or self.namespace != self.hello.namespace)
        self.namespace = self.hello.namespace
        self.weight_version = self.facts.weight_version
        self.leaving = False

    def has(self, namespace: bytes, version: int) -> None:
        """It has the router's weights."""
        if namespace != self.namespace:
            self.blocks.clear()
        self.namespace, self.weight_version = namespace, version
        self.behind = self.changed = False

    def learn(self, news: BlockNews) -> None:
        """It gained and lost blocks."""
        if news.reset or news.namespace != self.namespace:
            self.blocks.clear()
            self.changed = self.changed or news.namespace != self.namespace
            self.namespace = news.namespace
        self.blocks.update(news.added)
        self.blocks.difference_update(news.removed)

    def prefix_blocks(self, keys: Sequence[bytes]) -> int:
        """Leading blocks that it has."""
        for number, key in enumerate(keys):
            if key not in self.blocks:
                return number
        return len(keys)

    def prefill_cost(self, keys: Sequence[bytes], num_tokens: int) -> float:
        """Prompt tokens that stand before the end of this request's prefill there."""
        queued = 0 if self.status is None else self.status.queued_tokens
        shape = self.hello.shape
        had = 0 if shape is None else self.prefix_blocks(keys) * shape.block_tokens
        return max(queued, self.tokens) + max(num_tokens - had, 0)

    def decode_cost(self, keys: Sequence[bytes]) -> float:
        """How full it would be, 0 to 1 and beyond, what it has of this request set against that."""
        total = self.facts.num_blocks
        used = 0 if self.status is None else self.status.num_blocks - self.status.free_blocks
        # requests that were sent since the last word of it
        running = 0 if self.status is None else self.status.running + self.status.leased
        newer = max(self.live - running, 0)
        size = 1 if self.hello.shape is None else self.hello.shape.block_tokens
        return (used + newer * max(len(keys), 256 // size, 1) - self.prefix_blocks(keys)) / max(total, 1)


class Fleet:
    """See the module.

    Args:
        direct_below_tokens: prompts that lack fewer tokens on a decode instance go there at once, without prefill
            elsewhere.

    Attributes:
        namespace: of the weights that all are to have; empty before the first came up.
    """

    def __init__(self, direct_below_tokens: int) -> None:
        self._direct_below_tokens = direct_below_tokens
        self.namespace = b""
        self.members: dict[Peer, Member] = {}

    def add(self, peer: Peer) -> Member:
        return self.members.setdefault(peer, Member(peer))

    def find(self, address: str) -> Member | None:
        return next((member for member in self.members.values() if member.address == address), None)

    def up(self) -> list[Member]:
        """Those that are there, working or not."""
        return [member for member in self.members.values() if member.peer.is_up]

    def may_serve(self, prefill: str, decoders: Sequence[str]) -> bool:
        """Whether there is somebody who may take a request of whom its caller names, now or later."""
        if prefill:
            first = self.find(prefill)
            if first is None or not first.peer.is_up or first.is_leaving:
                return False
        if decoders and not self._named(decoders):
            return False
        return any(not member.is_leaving for member in self.up())

    def _named(self, decoders: Sequence[str]) -> list[Member]:
        named = [member for address in decoders if (member := self.find(address)) is not None]
        return [member for member in named if not member.is_leaving and member.peer.role != "prefill"]

    def _working(self, roles: Iterable[str], without: Iterable[str]) -> list[Member]:
        members = [member for member in self.members.values() if member.takes_work and member.hello.role in roles]
        # who failed before is asked last, not never
        kept = [member for member in members if member.address not in without]
        return kept or members

    def choose(
        self,
        keys: Sequence[bytes],
        num_tokens: int,
        without: Sequence[str],
        prefill: str,
        decoders: Sequence[str],
        *,
        whole: bool = False,
    ) -> Route | None:
        """The route of a request; None: nobody takes work now.

        Args:
            keys: identities of its full blocks, as far as known.
            without: addresses of those that failed it before.
            prefill, decoders: who the caller says it shall be; "" and empty: anybody.
            whole: no decode instance takes it from another one: one instance serves it whole.
        """
        first = self.find(prefill) if prefill else None
        # one that is not there may be to whoever hands over
        named = [member for member in self._named(decoders) if member.takes_work or not member.peer.is_up]
        if (prefill and (first is None or not first.takes_work)) or (decoders and not named):
            return None
        decodes = named or self._by_decode(self._working(["decode"], without), keys)
        # nobody hands over to himself
        decodes = [member for member in decodes if member is not first]
        prefills = (
            [first] if first is not None else self._by_prefill(self._working(["prefill"], without), keys, num_tokens)
        )
        # who shall decode it is said: nobody else serves it whole
        mixed = [] if named else self._by_prefill(self._working(["mixed"], without), keys, num_tokens)
        if first is not None and not decodes:
            return Route(first, ())
        if (
            not whole
            and decodes
            and prefills
            and (first is not None or not self._is_direct(decodes[0], keys, num_tokens))
        ):
            if (
                mixed
                and not first
                and mixed[0].prefill_cost(keys, num_tokens) < prefills[0].prefill_cost(keys, num_tokens)
            ):
                return Route(mixed[0], ())
            return Route(prefills[0], tuple(decodes[:_MAX_DECODERS]))
        # one half is missing: whoever is there serves it whole
        anybody = mixed or decodes or prefills
        return Route(anybody[0], ()) if anybody else None

    def _is_direct(self, decode: Member, keys: Sequence[bytes], num_tokens: int) -> bool:
        size = 1 if decode.hello.shape is None else decode.hello.shape.block_tokens
        return num_tokens - decode.prefix_blocks(keys) * size < self._direct_below_tokens

    @staticmethod
    def _by_decode(members: list[Member], keys: Sequence[bytes]) -> list[Member]:
        return sorted(members, key=lambda member: (member.decode_cost(keys), member.live))

    @staticmethod
    def _by_prefill(members: list[Member], keys: Sequence[bytes], num_tokens: int) -> list[Member]:
        return sorted(members, key=lambda member: (member.prefill_cost(keys, num_tokens), member.live))
