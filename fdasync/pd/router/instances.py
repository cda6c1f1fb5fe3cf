"""Keeps the load and the blocks of a router's instances, and chooses the instances that serve a request.

Pure, but it reads the state of each instance's peer. `router/router.py` passes on what instances report;
`router/dispatch.py` asks for routes. Knows no requests but their keys and needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fdasync.pd.router.limits import Need, Room
from fdasync.request import FIRST_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fdasync.errors import BadInput
    from fdasync.pd.link.peer import Peer
    from fdasync.pd.messages import Facts, Hello, KvEventBatch, Role, Shape, Status

_MAX_DECODERS = 8
# every instance can hold this
_LEAST = Need()


class Route(msgspec.Struct, frozen=True):
    """The instances that serve a request.

    Attributes:
        first: the instance that gets the request.
        decoders: instances to which `first` may hand it over, in order; empty: `first` serves it whole.
    """

    first: InstanceHandle
    decoders: tuple[InstanceHandle, ...]


class InstanceHandle:
    """One instance of a router.

    Attributes:
        peer: the link to it.
        status: its latest status; None before the first in this session.
        status_at: time of that status, by the loop's clock.
        blocks: identities of the blocks that it has, under `namespace`.
        namespace, weight_version, weight_order: of its weights.
        tokens: prompt tokens that this router sent it and that it has not computed yet, as far as known.
        live: requests of this router that it serves or prefills.
        leaving: this router sends it no more requests.
        sessions: how often it came up.
        behind: it has other weights than this router's instances must have, and gets no requests.
        waits: while `behind`: why it gets no requests until another router updates it; "" where this router will.
        changed: its weights have changed since this process of it first came up.
        dropped: why the router has stopped using it; "" while it uses it.
    """

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.status: Status | None = None
        self.status_at = 0.0
        # what it was told before its first status
        self._told_paused = False
        self.blocks: set[bytes] = set()
        self.namespace = b""
        self.weight_version = FIRST_VERSION
        self.weight_order = 0
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
    def shape(self) -> Shape:
        shape = self.hello.shape
        assert shape is not None
        return shape

    @property
    def facts(self) -> Facts:
        facts = self.hello.facts
        assert facts is not None
        return facts

    @property
    def room(self) -> Room | None:
        """How much it holds, by its latest handshake; None before the first."""
        return None if self.peer.hello is None else Room(self.facts, self.shape.block_tokens)

    def may(self, fits: Callable[[Room], bool]) -> bool:
        """Whether it can hold a request; True as long as it has not answered."""
        room = self.room
        return room is None or fits(room)

    @property
    def address(self) -> str:
        return self.peer.address

    @property
    def is_leaving(self) -> bool:
        """It drains, or this router has asked it to."""
        return self.leaving or (self.status is not None and self.status.state == "draining")

    @property
    def is_out(self) -> bool:
        """It gets no more requests from this router, unless another router or an operator changes that."""
        return self.is_leaving or (self.peer.is_up and bool(self.waits))

    @property
    def takes_work(self) -> bool:
        return self.peer.is_up and not self.behind and not self.is_leaving

    def was_told(self, *, paused: bool) -> None:
        """It has paused or resumed: its latest status is of before."""
        self._told_paused = paused
        if self.status is not None and self.status.state != "draining":
            self.status = msgspec.structs.replace(self.status, state="paused" if paused else "running")

    @property
    def is_paused(self) -> bool:
        """It plans no steps, as its latest status says, or this router's last call."""
        return self._told_paused if self.status is None else self.status.state == "paused"

    def came_up(self) -> None:
        """A new session has begun; its blocks are unknown."""
        self.sessions += 1
        self.status = None
        self._told_paused = False
        self.blocks.clear()
        before, self._incarnation = self._incarnation, self.peer.incarnation
        self.changed = before == self._incarnation and (self.changed or self.namespace != self.hello.namespace)
        self.namespace = self.hello.namespace
        self.weight_version, self.weight_order = self.facts.weight_version, self.facts.weight_order
        self.leaving = False

    def has(self, namespace: bytes, version: str, order: int) -> None:
        """It has the weights that it must have."""
        if namespace != self.namespace:
            self.blocks.clear()
        self.namespace, self.weight_version, self.weight_order = namespace, version, order
        self.behind = self.changed = False
        self.waits = ""

    def learn(self, kv_events: KvEventBatch) -> None:
        """It reports blocks that it gained and lost."""
        if kv_events.reset or kv_events.namespace != self.namespace:
            self.blocks.clear()
            self.changed = self.changed or kv_events.namespace != self.namespace
            self.namespace = kv_events.namespace
        self.weight_version, self.weight_order = kv_events.weight_version, kv_events.weight_order
        self.blocks.update(kv_events.added)
        self.blocks.difference_update(kv_events.removed)

    def prefix_blocks(self, keys: Sequence[bytes]) -> int:
        """Number of leading blocks of a prompt that it has."""
        for number, key in enumerate(keys):
            if key not in self.blocks:
                return number
        return len(keys)

    def prefill_cost(self, keys: Sequence[bytes], num_tokens: int) -> float:
        """Prompt tokens that the instance would compute until this request's prefill is done."""
        queued = 0 if self.status is None else self.status.queued_tokens
        had = self.prefix_blocks(keys) * self.shape.block_tokens
        return max(queued, self.tokens) + max(num_tokens - had, 0)

    def decode_cost(self, keys: Sequence[bytes]) -> float:
        """Fraction of its blocks that would be in use with this request (0 to 1 and beyond), less the blocks of the
        request's prefix that it has already."""
        total = self.facts.num_blocks
        used = 0 if self.status is None else self.status.num_blocks - self.status.free_blocks
        running = 0 if self.status is None else self.status.running + self.status.leased
        # requests that the latest status does not count yet
        newer = max(self.live - running, 0)
        return (used + newer * max(len(keys), 256 // self.shape.block_tokens, 1) - self.prefix_blocks(keys)) / max(
            total, 1
        )


class _Costs:
    """The costs of one request on each instance."""

    def __init__(
        self, instances: list[InstanceHandle], keys: Sequence[bytes], num_tokens: int, without: Sequence[str]
    ) -> None:
        self._instances = instances
        self._keys = keys
        self._num_tokens = num_tokens
        self._without = without

    def prefill_cost(self, instance: InstanceHandle) -> float:
        return instance.prefill_cost(self._keys, self._num_tokens)

    def best(self, role: Role, fits: Callable[[Room], bool]) -> list[InstanceHandle]:
        """Instances of a role that take work and can hold the request, the best first."""
        instances = [instance for instance in self._instances if instance.takes_work and instance.hello.role == role]
        instances = [instance for instance in instances if instance.may(fits)]
        # an instance that failed the request before is used only where no other is left
        instances = [instance for instance in instances if instance.address not in self._without] or instances
        if role == "decode":
            return sorted(instances, key=lambda instance: (instance.decode_cost(self._keys), instance.live))
        return sorted(instances, key=lambda instance: (self.prefill_cost(instance), instance.live))


class InstanceTable:
    """See the module.

    Args:
        direct_below_tokens: a decode instance prefills a prompt itself if it lacks fewer tokens of it than this.

    Attributes:
        namespace, weight_version, weight_order: of the weights that all instances must have; the namespace is empty
            before the first instance came up.
        instances: all instances, by peer, in the order in which they were added.
    """

    def __init__(self, direct_below_tokens: int) -> None:
        self._direct_below_tokens = direct_below_tokens
        self.namespace = b""
        self.weight_version = FIRST_VERSION
        self.weight_order = 0
        self.instances: dict[Peer, InstanceHandle] = {}

    def add(self, peer: Peer) -> InstanceHandle:
        return self.instances.setdefault(peer, InstanceHandle(peer))

    def find(self, address: str) -> InstanceHandle | None:
        return next((instance for instance in self.instances.values() if instance.address == address), None)

    def up(self) -> list[InstanceHandle]:
        """Instances with a link, whether they take work or not."""
        return [instance for instance in self.instances.values() if instance.peer.is_up]

    def may_serve(self, prefill: str, decoders: Sequence[str], need: Need = _LEAST) -> bool:
        """Whether some instance may take a request now or later, of the instances that its caller names if it does."""
        if prefill:
            first = self.find(prefill)
            if first is None or not first.peer.is_up or first.is_out:
                return False
        if decoders and not self._named(decoders):
            return False
        able = [instance for instance in self._able(prefill, decoders) if not instance.is_out]
        # a named decode instance without a link to this router may have one to the prefill instance
        able = [instance for instance in able if (instance.peer.is_up or decoders) and instance.may(need.fits_whole)]
        return bool(able) and any(not instance.is_out for instance in self.up())

    def refusal(self, need: Need, prefill: str, decoders: Sequence[str]) -> BadInput | None:
        """Why no instance (of those that its caller names, if it does) will ever serve a request; None: one may. An
        instance that is down may come back, and one that never answered may hold anything."""
        able = self._able(prefill, decoders)
        rooms = [room for instance in able if (room := instance.room) is not None]
        if not rooms or len(rooms) < len(able) or any(map(need.fits_whole, rooms)):
            return None
        return need.refusal(rooms)

    def _able(self, prefill: str, decoders: Sequence[str]) -> list[InstanceHandle]:
        """Instances of which one has to hold all of a request, whether it serves it whole or takes it over."""
        first = self.find(prefill) if prefill else None
        if decoders:
            named = [instance for address in decoders if (instance := self.find(address)) is not None]
            return [*[instance for instance in named if instance is not first], *([first] if first is not None else [])]
        if first is not None:
            # the named prefill instance comes first
            decodes = [instance for instance in self.instances.values() if instance.peer.role in ("decode", None)]
            return [first, *[instance for instance in decodes if instance is not first]]
        return list(self.instances.values())

    def _named(self, decoders: Sequence[str]) -> list[InstanceHandle]:
        named = [instance for address in decoders if (instance := self.find(address)) is not None]
        return [instance for instance in named if not instance.is_out and instance.peer.role != "prefill"]

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
        """The route of a request; None: no instance that can hold it takes work now.

        Args:
            keys: identities of the prompt's full blocks, as far as known.
            num_tokens: tokens of the prompt, as far as known.
            without: addresses of instances that failed the request before.
            prefill, decoders: addresses that the caller names; "" and empty: any instance.
            need: how much the request needs.
            whole: one instance must serve it whole, since no decode instance takes it over.
        """
        first = self.find(prefill) if prefill else None
        # a named decode instance without a link to this router may have one to the prefill instance
        named = [instance for instance in self._named(decoders) if instance.takes_work or not instance.peer.is_up]
        if (prefill and (first is None or not first.takes_work)) or (decoders and not named):
            return None
        costs = _Costs(list(self.instances.values()), keys, num_tokens, without)
        takers = [instance for instance in named if instance.may(need.fits_decode)]
        if not named:
            takers = costs.best("decode", need.fits_decode)
        # an instance does not hand over to itself
        takers = [instance for instance in takers if instance is not first]
        givers = costs.best("prefill", need.fits_prefill)
        mixed = costs.best("mixed", need.fits_whole)
        if first is not None:
            givers = [first] if first.may(need.fits_prefill) else []
        if named or first is not None:
            # the caller names instances: no other serves it whole
            mixed = []
        if not whole and takers and givers and (first is not None or not self._is_direct(takers[0], keys, num_tokens)):
            if mixed and costs.prefill_cost(mixed[0]) < costs.prefill_cost(givers[0]):
                return Route(mixed[0], ())
            return Route(givers[0], tuple(takers[:_MAX_DECODERS]))
        # prefill or decode instances are missing or too small: one instance serves the request whole
        able = [*mixed, *costs.best("decode", need.fits_whole), *costs.best("prefill", need.fits_whole)]
        if named or first is not None:
            able = self._able(prefill, decoders)
        able = [instance for instance in able if instance.takes_work and instance.may(need.fits_whole)]
        return Route(able[0], ()) if able else None

    def _is_direct(self, decode: InstanceHandle, keys: Sequence[bytes], num_tokens: int) -> bool:
        # a decode instance that the caller names may not have answered yet
        size = 1 if decode.room is None else decode.room.block_tokens
        return num_tokens - decode.prefix_blocks(keys) * size < self._direct_below_tokens
