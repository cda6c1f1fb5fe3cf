"""Keeps the state, the load and the blocks of a router's instances.

Pure, but it reads the state of each instance's peer. `router/router.py` passes on what instances report;
`router/choice.py` reads the columns that are kept here. Knows no requests but their needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from fdasync.request import FIRST_VERSION, MAX_VOCAB_SIZE, Doing
from fdasync_fleet.messages import shape_of
from fdasync_fleet.router.blocks.index import BlockIndex
from fdasync_fleet.router.limits import Need, Room
from fdasync_fleet.router.loads import Loads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fdasync.errors import BadInput
    from fdasync.runner.facts import ModelFacts
    from fdasync_fleet.link.peer import Peer
    from fdasync_fleet.messages import Hello, KvEventBatch, Status

# of a prompt token to compute, what a token in use weighs on a mixed instance
_IN_USE = 1 / 16
# from running on
_DOING: tuple[Doing, ...] = get_args(Doing)
#: of an instance's weights among those of the router's instances; docs/prefill-decode.md says what each word means
WeightsStanding = Literal["alike", "behind", "moved", "bringing", "waits", "asleep", "late", "catching_up", "dropped"]
#: it slept, or had no whole weights, when the others got some: it is not dropped, whatever keeps it from getting them
MISSED: tuple[WeightsStanding, ...] = ("asleep", "late", "catching_up")
#: nothing that this router does brings it the weights, before the next update
OUT: tuple[WeightsStanding, ...] = ("waits", "late")
#: of its memory: this router's callers, or somebody else, have it as they want it; or it missed a wake of this router,
#: or did not wake, and gets no requests until it has woken
MemoryStanding = Literal["as_told", "unwoken"]
# every instance can hold this
LEAST = Need()


def farthest(said: Sequence[Doing]) -> Doing:
    """What the instance farthest from running does, as `Doing` orders the words; "running": there is none."""
    return max(said, key=_DOING.index, default="running")


def nearest(said: Sequence[Doing]) -> Doing:
    """What the one does that is nearest to running; "running": there is none."""
    return min(said, key=_DOING.index, default="running")


class InstanceHandle:
    """One instance of a router. What decides whether it gets requests goes to the columns of `Loads` as it changes.

    Attributes:
        peer: the link to it.
        slot: its row in `Loads`, and its bit in bitsets.
        status: its latest status; None before the first in this session.
        status_at: time of that status, by the loop's clock.
        namespace, weight_version, weight_order: of its weights.
        tokens: prompt tokens that this router sent it since its latest status, and that it has to compute.
        live: requests of this router that it serves or prefills.
        beats: number of statuses so far.
        leaving: this router sends it no more requests.
        sessions: how often it came up.
        standing: of its weights; `stands` changes it.
        why: the reason for its standing, for people; "" where that word says all.
        memory: of its memory, whatever weights it has; `wakes` changes it.
    """

    def __init__(self, peer: Peer, loads: Loads, index: BlockIndex) -> None:
        self.peer = peer
        self.slot = loads.new_slot()
        self.status_at = 0.0
        self.namespace = b""
        self.weight_version = FIRST_VERSION
        self.weight_order = 0
        self.beats = 0
        self.sessions = 0
        self.standing: WeightsStanding = "alike"
        self.why = ""
        self.memory: MemoryStanding = "as_told"
        self._loads = loads
        self._index = index
        index.open(self.slot)
        self._status: Status | None = None
        # what it was told before its first status
        self._told: Doing = "running"
        # of requests that were sent since the latest status
        self._tokens = self._fresh = 0
        self._live = 0
        self._size = 0
        self._room: Room | None = None
        self._room_of: Hello | None = None
        self._leaving = False
        self._incarnation = b""

    @property
    def status(self) -> Status | None:
        return self._status

    @status.setter
    def status(self, status: Status | None) -> None:
        before, self._status = self._status, status
        self.beats += 1
        # what was sent before is part of what it reports
        self._tokens = self._fresh = 0
        told = None if status is None else status.stats.scheduler
        self._loads.counted.one[self.slot] = 0 if told is None else told.running + told.leased
        self._weigh()
        if (before is None or before.stats.state) != (status is None or status.stats.state):
            self.refresh()

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def live(self) -> int:
        return self._live

    @live.setter
    def live(self, live: int) -> None:
        self._live = live
        self._loads.live.one[self.slot] = live

    @property
    def leaving(self) -> bool:
        return self._leaving

    @leaving.setter
    def leaving(self, leaving: bool) -> None:
        self._leaving = leaving
        self.refresh()

    @property
    def behind(self) -> bool:
        """It has not the weights, or the label, of this router's instances, and gets no requests."""
        return self.standing != "alike"

    def stands(self, standing: WeightsStanding, why: str = "") -> None:
        """One that was dropped stays so."""
        if self.standing == "dropped":
            return
        before, self.standing, self.why = self.standing, standing, why
        if standing != before:
            self.refresh()

    def wakes(self, memory: MemoryStanding) -> None:
        if memory != self.memory:
            self.memory = memory
            self.refresh()

    def refresh(self) -> None:
        """Something changed that decides whether it takes work, such as its link."""
        self._loads.set_working(self.slot, works=self.takes_work)

    @property
    def blocks(self) -> set[bytes]:
        """Identities of the blocks that it has, under `namespace`; takes a while."""
        return self._index.blocks(self.slot)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that it has."""
        return self._index.count(self.slot)

    @property
    def workers(self) -> int:
        """Number of worker processes; each is a rank of a trainer's group."""
        return self.facts.tensor_parallel

    @property
    def hello(self) -> Hello:
        assert self.peer.hello is not None
        return self.peer.hello

    @property
    def shape(self) -> tuple[tuple[str, Any], ...]:
        """In what it must agree with others."""
        return shape_of(self.hello)

    @property
    def facts(self) -> ModelFacts:
        facts = self.hello.facts
        assert facts is not None
        return facts

    @property
    def room(self) -> Room | None:
        """How much it holds, by its latest handshake; None before the first."""
        hello = self.peer.hello
        if hello is not self._room_of:
            self._room_of = hello
            self._room = None if hello is None else Room(self.facts)
        return self._room

    def may(self, fits: Callable[[Room], bool]) -> bool:
        """Whether it can hold a request; True as long as it has not answered."""
        room = self.room
        return room is None or fits(room)

    @property
    def address(self) -> str:
        return self.peer.address

    @property
    def seen(self) -> tuple[bytes, str]:
        """Incarnation of the process that answers at its address, and where that says that it listens."""
        hello = self.peer.hello
        return (self.peer.incarnation, hello.address) if hello is not None and self.peer.is_up else (b"", "")

    @property
    def is_leaving(self) -> bool:
        """It drains, or this router has asked it to."""
        return self.leaving or (self.status is not None and self.status.stats.state not in _DOING)

    @property
    def is_out(self) -> bool:
        """It gets no more requests from this router, unless another router or an operator changes that."""
        return self.is_leaving or (self.peer.is_up and self.standing in OUT)

    @property
    def takes_work(self) -> bool:
        if not self.peer.is_up or self.behind or self.memory == "unwoken" or self.is_leaving:
            return False
        # requests would wait for its weights, which are nowhere, and not for a call of somebody; or it refuses them
        return self.doing not in ("waits_for_weights", "broken")

    def was_told(self, state: Doing) -> None:
        """It has paused, resumed, fallen asleep, woken or been updated: its latest status is of before."""
        before, self._told = self.said, state
        if self._status is not None and self._status.stats.state in _DOING:
            stats = msgspec.structs.replace(self._status.stats, state=state)
            self._status = msgspec.structs.replace(self._status, stats=stats)
        if self.said != before:
            self.refresh()

    @property
    def said(self) -> Doing:
        """What it does, by its latest status or this router's last call. A draining instance is "running"."""
        if self._status is None:
            return "asleep" if self.memory == "unwoken" else self._told
        return self._status.stats.doing

    @property
    def doing(self) -> Doing:
        """What it has said that it does; or that it waits for weights, if it is awake, lacks the weights of the others,
        and this router cannot bring them."""
        return farthest([self.said, "waits_for_weights"]) if self.standing in OUT else self.said

    @property
    def lacks_weights(self) -> bool:
        """It refuses a delta: its weights are broken, or a sleep dropped them, or others were updated meanwhile."""
        return self.standing in MISSED or self.doing in ("broken", "waits_for_weights")

    @property
    def is_awake(self) -> bool:
        """Its latest status says so."""
        return self._status is not None and self._status.stats.state not in ("asleep", "waking", "draining")

    @property
    def is_paused(self) -> bool:
        """It plans no steps."""
        return self.doing != "running"

    def came_up(self) -> None:
        """A new session has begun; its blocks are unknown."""
        self.sessions += 1
        self.status = None
        self._told = "running"
        if self.standing == "asleep":
            # it is asked anew
            self.stands("late")
        before, self._incarnation = self._incarnation, self.peer.incarnation
        if before == self._incarnation:
            self._learn(self.hello.namespace)
        elif self.standing == "moved":
            self.stands("behind")
        self._forget_blocks()
        self.namespace = self.hello.namespace
        self.weight_version, self.weight_order = self.facts.weight_version, self.hello.weight_order
        self._size = self.facts.block_tokens
        self._loads.set_room(self.slot, self.hello.role, Room(self.facts))
        self._loads.total.one[self.slot] = self.facts.num_blocks
        self.leaving = False

    def _forget_blocks(self) -> None:
        self._index.clear(self.slot)

    def has(self, namespace: bytes, version: str, order: int) -> None:
        """It has the weights that it must have."""
        if namespace != self.namespace:
            self._forget_blocks()
        self.namespace, self.weight_version, self.weight_order = namespace, version, order
        self.stands("alike")

    def came_to(self, namespace: bytes) -> None:
        """It has got other weights, on its way to the weights that it must have."""
        self._forget_blocks()
        self.namespace = namespace

    def _learn(self, namespace: bytes) -> None:
        """It tells which weights it has. Other ones than before have come from elsewhere, unless this router brings it
        some."""
        if namespace != self.namespace:
            self._forget_blocks()
            self.namespace = namespace
            if self.standing not in ("bringing", "catching_up"):
                self.stands("moved")

    def learn(self, kv_events: KvEventBatch) -> None:
        """It reports blocks that it gained and lost."""
        if kv_events.reset:
            self._forget_blocks()
        self._learn(kv_events.namespace)
        self.weight_version, self.weight_order = kv_events.weight_version, kv_events.weight_order
        self._index.add(self.slot, kv_events.added)
        self._index.remove(self.slot, kv_events.removed)

    def removed(self) -> None:
        """The router has forgotten it."""
        self._index.close(self.slot)
        self._loads.give_back(self.slot)
        # requests that were sent to it settle later: from now on they change tables that the router does not read
        self._loads, self._index = Loads(), BlockIndex()
        self.slot = self._loads.new_slot()
        self._index.open(self.slot)

    def sent(self, missing: int, keys: Sequence[bytes]) -> list[bytes]:
        """It was sent a request: a prompt with these blocks, and so many tokens that it has to compute. Returns blocks
        for `settled`."""
        self.live += 1
        self._tokens += missing
        self._fresh += len(keys)
        self._weigh()
        return self._index.expect(self.slot, keys)

    def settled(self, missing: int, num_blocks: int, beats: int, expected: Sequence[bytes]) -> None:
        """It has no more work with a request that it was sent.

        Args:
            missing, num_blocks: of the prompt, as `sent` got them.
            beats: number of statuses when the request was sent.
            expected: what `sent` returned.
        """
        self.live -= 1
        if beats == self.beats:
            self._tokens -= missing
            self._fresh -= num_blocks
            self._weigh()
        self._index.unexpect(self.slot, expected)

    def _weigh(self) -> None:
        status, loads, slot = self._status, self._loads, self.slot
        queued = used = 0
        if status is not None:
            told = status.stats.scheduler
            queued, used = told.queued_tokens, told.num_blocks - status.free_blocks
        work = queued + self._tokens
        loads.work.put(slot, work)
        loads.burden.put(slot, work + (used + self._fresh) * self._size * _IN_USE)
        loads.used.one[slot] = used


class InstanceTable:
    """See the module.

    Attributes:
        loads: the load of all instances, by slot.
        index: the blocks of all instances, by slot.
        namespace, weight_version, weight_order: of the weights that all instances must have; the namespace is empty
            before the first instance came up.
        instances: all instances, by peer, in the order in which they were added.
    """

    def __init__(self) -> None:
        self.loads = Loads()
        self.index = BlockIndex()
        self.namespace = b""
        self.weight_version = FIRST_VERSION
        self.weight_order = 0
        self.instances: dict[Peer, InstanceHandle] = {}
        self._by_address: dict[str, InstanceHandle] = {}
        self._by_slot: dict[int, InstanceHandle] = {}
        self._model: tuple[int, int] | None = None

    def add(self, peer: Peer) -> InstanceHandle:
        instance = self.instances.get(peer)
        if instance is None:
            instance = self.instances[peer] = InstanceHandle(peer, self.loads, self.index)
            self._by_address[peer.address] = self._by_slot[instance.slot] = instance
        return instance

    def remove(self, instance: InstanceHandle) -> None:
        """Forget an instance."""
        del self.instances[instance.peer], self._by_address[instance.address], self._by_slot[instance.slot]
        instance.removed()
        self.links_changed()

    def find(self, address: str) -> InstanceHandle | None:
        return self._by_address.get(address)

    def at(self, slot: int) -> InstanceHandle:
        """The instance of a slot."""
        return self._by_slot[slot]

    def links_changed(self) -> None:
        """An instance came up, was lost or was removed: what all have in common is computed anew when it is asked
        for."""
        self._model = None

    def _common(self) -> tuple[int, int]:
        if self._model is None:
            up = self.up()
            vocab_size = min((instance.facts.vocab_size for instance in up), default=MAX_VOCAB_SIZE)
            self._model = vocab_size, up[0].facts.block_tokens if up else 0
        return self._model

    @property
    def vocab_size(self) -> int:
        """The smallest vocabulary of the instances that are up."""
        return self._common()[0]

    @property
    def block_tokens(self) -> int:
        """Tokens of a block; 0 while no instance is up."""
        return self._common()[1]

    def up(self) -> list[InstanceHandle]:
        """Instances with a link, whether they take work or not."""
        return [instance for instance in self.instances.values() if instance.peer.is_up]

    def may_serve(self, prefill: str, decoders: Sequence[str], need: Need = LEAST) -> bool:
        """Whether some instance may take a request now or later, of the instances that its caller names if it does."""
        if prefill:
            first = self.find(prefill)
            if first is None or not first.peer.is_up or first.is_out:
                return False
        if decoders and not self.named(decoders):
            return False
        able = [instance for instance in self.able(prefill, decoders) if not instance.is_out]
        # a named decode instance without a link to this router may have one to the prefill instance
        able = [instance for instance in able if (instance.peer.is_up or decoders) and instance.may(need.fits_whole)]
        return bool(able) and any(not instance.is_out for instance in self.up())

    def last_resort(self, prefill: str, decoders: Sequence[str], need: Need = LEAST) -> InstanceHandle | None:
        """One of the instances that may take a request, where the weights of all of them are broken: it replies with
        the reason. None: another one may serve it, now or later."""
        first = self.find(prefill) if prefill else None
        if first is not None:
            return first if first.peer.is_up and first.doing == "broken" else None
        able = self.named(decoders) if decoders else self.instances.values()
        able = [one for one in able if one.peer.is_up and not one.is_out and one.may(need.fits_whole)]
        return able[0] if able and all(one.doing == "broken" for one in able) else None

    def refusal(self, need: Need, prefill: str, decoders: Sequence[str]) -> BadInput | None:
        """Why no instance (among those its caller names, if any) will ever serve a request; None: one may. An instance
        that is down may come back, and an instance that never answered may hold anything."""
        able = self.able(prefill, decoders)
        rooms = [room for instance in able if (room := instance.room) is not None]
        if not rooms or len(rooms) < len(able) or any(map(need.fits_whole, rooms)):
            return None
        return need.refusal(rooms)

    def able(self, prefill: str, decoders: Sequence[str]) -> list[InstanceHandle]:
        """Candidates for the one instance that has to hold all of a request, served whole or taken over."""
        first = self.find(prefill) if prefill else None
        if decoders:
            named = [instance for address in decoders if (instance := self.find(address)) is not None]
            return [*[instance for instance in named if instance is not first], *([first] if first is not None else [])]
        if first is not None:
            # the named prefill instance comes first
            decodes = [instance for instance in self.instances.values() if instance.peer.role in ("decode", None)]
            return [first, *[instance for instance in decodes if instance is not first]]
        return list(self.instances.values())

    def named(self, decoders: Sequence[str]) -> list[InstanceHandle]:
        """The instances at these addresses that may decode."""
        named = [instance for address in decoders if (instance := self.find(address)) is not None]
        return [instance for instance in named if not instance.is_out and instance.peer.role != "prefill"]
