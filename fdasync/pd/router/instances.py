"""The instances that a router knows: how each is doing, which blocks it has, and who is to serve a request.

Pure but for the peers that it keeps: told what came over the links, asked by `router/router.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fdasync.pd.router.limits import Need, Room

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fdasync.errors import BadInput
    from fdasync.pd.link.peer import Peer
    from fdasync.pd.messages import BlockNews, Facts, Hello, Role, Status

_MAX_DECODERS = 8
# whatever an instance holds, it holds this
_LEAST = Need()


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
        behind: it has other weights than the router's others, and gets no requests; waits: why it will get none until
            somebody else updates it, where this router does not; changed: since this process of it came up first;
            dropped: why it is not used any more.
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
        self.waits = ""
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
    def room(self) -> Room | None:
        """How much it holds, by its last word; None: it never answered."""
        hello = self.peer.hello
        if hello is None or hello.facts is None or hello.shape is None:
            return None
        return Room(hello.facts, hello.shape.block_tokens)

    def may(self, fits: Callable[[Room], bool]) -> bool:
        """Whether it can hold a request, as far as known."""
        room = self.room
        return room is None or fits(room)

    @property
    def address(self) -> str:
        return self.peer.address

    @property
    def is_leaving(self) -> bool:
        """It drains, or soon will."""
        return self.leaving or (self.status is not None and self.status.state == "draining")

    @property
    def is_out(self) -> bool:
        """It gets no more requests, unless somebody else does something about it."""
        return self.is_leaving or (self.peer.is_up and bool(self.waits))

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
        self.waits = ""

    def learn(self, news: BlockNews) -> None:
        """It gained and lost blocks."""
        if news.reset or news.namespace != self.namespace:
            self.blocks.clear()
            self.changed = self.changed or news.namespace != self.namespace
            self.namespace = news.namespace
        self.weight_version = news.weight_version
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


class _Ask:
    """One request, and what it would cost the members of a fleet."""

    def __init__(self, members: list[Member], keys: Sequence[bytes], num_tokens: int, without: Sequence[str]) -> None:
        self._members = members
        self._keys = keys
        self._num_tokens = num_tokens
        self._without = without

    def prefill_cost(self, member: Member) -> float:
        return member.prefill_cost(self._keys, self._num_tokens)

    def best(self, role: Role, fits: Callable[[Room], bool]) -> list[Member]:
        """Those of a role that take work and can hold it, the best first."""
        members = [member for member in self._members if member.takes_work and member.hello.role == role]
        members = [member for member in members if member.may(fits)]
        # who failed before is asked last, not never
        members = [member for member in members if member.address not in self._without] or members
        if role == "decode":
            return sorted(members, key=lambda member: (member.decode_cost(self._keys), member.live))
        return sorted(members, key=lambda member: (self.prefill_cost(member), member.live))


class Fleet:
    """See the module.

    Args:
        direct_below_tokens: prompts that lack fewer tokens on a decode instance go there at once, without prefill
            elsewhere.

    Attributes:
        namespace, weight_version: of the weights that all are to have; empty before the first came up.
    """

    def __init__(self, direct_below_tokens: int) -> None:
        self._direct_below_tokens = direct_below_tokens
        self.namespace = b""
        self.weight_version = 0
        self.members: dict[Peer, Member] = {}

    def add(self, peer: Peer) -> Member:
        return self.members.setdefault(peer, Member(peer))

    def find(self, address: str) -> Member | None:
        return next((member for member in self.members.values() if member.address == address), None)

    def up(self) -> list[Member]:
        """Those that are there, working or not."""
        return [member for member in self.members.values() if member.peer.is_up]

    def may_serve(self, prefill: str, decoders: Sequence[str], need: Need = _LEAST) -> bool:
        """Whether there is somebody who may take a request of whom its caller names, now or later."""
        if prefill:
            first = self.find(prefill)
            if first is None or not first.peer.is_up or first.is_out:
                return False
        if decoders and not self._named(decoders):
            return False
        able = [member for member in self._able(prefill, decoders) if not member.is_out]
        # a named one that is not there may be to whoever hands over
        able = [member for member in able if (member.peer.is_up or decoders) and member.may(need.fits_whole)]
        return bool(able) and any(not member.is_out for member in self.up())

    def refusal(self, need: Need, prefill: str, decoders: Sequence[str]) -> BadInput | None:
        """Why nobody, of whom its caller names, will ever serve a request; None: somebody may. One who is not there now
        may come back, and one who never answered may hold anything."""
        able = self._able(prefill, decoders)
        rooms = [room for member in able if (room := member.room) is not None]
        if not rooms or len(rooms) < len(able) or any(map(need.fits_whole, rooms)):
            return None
        return need.refusal(rooms)

    def _able(self, prefill: str, decoders: Sequence[str]) -> list[Member]:
        """Of whom one has to hold all of a request: who takes it from another could serve it whole as well."""
        first = self.find(prefill) if prefill else None
        if decoders:
            named = [member for address in decoders if (member := self.find(address)) is not None]
            return [*[member for member in named if member is not first], *([first] if first is not None else [])]
        if first is not None:
            # it is the first of them, if it can
            decodes = [member for member in self.members.values() if member.peer.role in ("decode", None)]
            return [first, *[member for member in decodes if member is not first]]
        return list(self.members.values())

    def _named(self, decoders: Sequence[str]) -> list[Member]:
        named = [member for address in decoders if (member := self.find(address)) is not None]
        return [member for member in named if not member.is_out and member.peer.role != "prefill"]

    def choose(
        self,
        keys: Sequence[bytes],
        num_tokens: int,
        without: Sequence[str],
        prefill: str,
        decoders: Sequence[str],
        *,
        need: Need = _LEAST,
        whole: bool = False,
    ) -> Route | None:
        """The route of a request; None: nobody who can hold it takes work now.

        Args:
            keys: identities of its full blocks, as far as known.
            without: addresses of those that failed it before.
            prefill, decoders: who the caller says it shall be; "" and empty: anybody.
            need: what it needs of whoever serves it.
            whole: no decode instance takes it from another one: one instance serves it whole.
        """
        first = self.find(prefill) if prefill else None
        # one that is not there may be to whoever hands over
        named = [member for member in self._named(decoders) if member.takes_work or not member.peer.is_up]
        if (prefill and (first is None or not first.takes_work)) or (decoders and not named):
            return None
        ask = _Ask(list(self.members.values()), keys, num_tokens, without)
        takers = [member for member in named if member.may(need.fits_decode)]
        if not named:
            takers = ask.best("decode", need.fits_decode)
        # nobody hands over to himself
        takers = [member for member in takers if member is not first]
        givers = ask.best("prefill", need.fits_prefill)
        mixed = ask.best("mixed", need.fits_whole)
        if first is not None:
            givers = [first] if first.may(need.fits_prefill) else []
        if named or first is not None:
            # who it shall be is said: nobody else serves it whole
            mixed = []
        if not whole and takers and givers and (first is not None or not self._is_direct(takers[0], keys, num_tokens)):
            if mixed and ask.prefill_cost(mixed[0]) < ask.prefill_cost(givers[0]):
                return Route(mixed[0], ())
            return Route(givers[0], tuple(takers[:_MAX_DECODERS]))
        # one half is missing, or too small: whoever is there serves it whole
        anybody = [*mixed, *ask.best("decode", need.fits_whole), *ask.best("prefill", need.fits_whole)]
        if named or first is not None:
            anybody = self._able(prefill, decoders)
        able = [member for member in anybody if member.takes_work and member.may(need.fits_whole)]
        return Route(able[0], ()) if able else None

    def _is_direct(self, decode: Member, keys: Sequence[bytes], num_tokens: int) -> bool:
        size = 1 if decode.room is None else decode.room.block_tokens
        return num_tokens - decode.prefix_blocks(keys) * size < self._direct_below_tokens
