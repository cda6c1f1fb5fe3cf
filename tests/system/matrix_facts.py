"""What an engine did, read from its trace: stamps and weights of every pass, and what a cell must have seen.

The trace holds every action and every event, so it also tells what a store took and gave that lives in another process.
It is read after the engine's end. Knows no results; called by `matrix_life.py`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from fdasync.events.actions import FetchBlocks, RunStep, StoreBlocks, SwapIn, SwapOut
from fdasync.events.catalog import (
    FetchEnded,
    Hashed,
    LateTransferEnded,
    RequestPrepared,
    StepDone,
    StoreEnded,
    SwapDone,
    WeightsChanged,
)
from fdasync.events.trace import Turn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync.events.actions import Action, SeqStart
    from fdasync.events.catalog import Event
    from fdasync.testing import PassModel


class Facts:
    """One engine's life.

    Args:
        passes: of this engine; fed here.
        kept: names of the blocks that the store has; one set for all engines on it. What it has it does not take again.
        weights: weights id of each version.

    Attributes:
        prefills: key -> steps of its first prefill.
        resumed: for each start after the first one of a key: tokens that were cached, and tokens that had been computed
            before and were not.
        aux_nbytes: rows that copies between the tiers moved.
        depth: most steps that were in flight at a time.
        roots: the identity of an empty prefix under each namespace, in order of use.
        writes: (namespace, key) of every block that was given to the store.
    """

    def __init__(self, passes: PassModel, kept: set[str], weights: Mapping[int, int]) -> None:
        self.passes = passes
        self.prefills: Counter[int] = Counter()
        self.resumed: list[tuple[int, int]] = []
        self.aux_nbytes = 0
        self.depth = 0
        self.roots: dict[bytes, bytes] = {}
        self.writes: list[tuple[bytes, bytes]] = []
        self._flying = 0
        # slot, and generation where it is told, of the KV in each block of the device and of the host
        self._device: dict[int, tuple[int, int]] = {}
        self._host: dict[int, tuple[int, int]] = {}
        self._kept = kept
        self._weights = weights
        self._copies: dict[int, SwapOut | SwapIn] = {}
        self._transfers: dict[int, FetchBlocks | StoreBlocks] = {}
        self._begun: set[int] = set()
        self._prefilled: set[int] = set()
        # what came in time is told again when the rest came late
        self._done: set[tuple[int, int]] = set()

    def read(self, trace: bytes) -> None:
        """Take a whole trace. Raises AssertionError where a request started on KV of other weights."""
        decoder = msgspec.json.Decoder(Turn)
        for line in trace.splitlines()[1:]:
            turn = decoder.decode(line)
            for event in turn.events:
                self._event(event)
            for action in turn.actions:
                self._action(action)

    def _event(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._flying -= 1
            self.passes.done(event.step_id, event.counts)
        elif isinstance(event, RequestPrepared | Hashed):
            self.roots[event.namespace] = event.root
        elif isinstance(event, SwapDone):
            self.passes.copied(self._copies.pop(event.copy_id))
            self.aux_nbytes += event.aux_nbytes
        elif isinstance(event, WeightsChanged):
            self.passes.new_weights(self._weights[int(event.version)])
        elif isinstance(event, FetchEnded):
            self._moved(event.fetch_id, event.arrived)
        elif isinstance(event, StoreEnded):
            self._moved(event.put_id, event.stored)
        elif isinstance(event, LateTransferEnded):
            self._moved(event.transfer_id, event.arrived)

    def _moved(self, number: int, arrived: tuple[bool, ...]) -> None:
        action = self._transfers[number]
        for key, host, came in zip(action.keys, action.host, arrived, strict=True):
            name = action.namespace.hex() + key.hex()
            if not came or (number, host) in self._done:
                continue
            self._done.add((number, host))
            if isinstance(action, FetchBlocks):
                self.passes.fetched(name, host)
            elif name not in self._kept:
                self._kept.add(name)
                self.passes.stored(name, host)

    def _action(self, action: Action) -> None:
        if isinstance(action, RunStep):
            self._step(action)
        elif isinstance(action, SwapOut):
            self._copies[action.copy_id] = action
            for device, host in zip(action.device, action.host, strict=True):
                self._host[host] = self._device[device]
        elif isinstance(action, SwapIn):
            self._copies[action.copy_id] = action
            uses = list(zip(action.slots, action.generations, strict=True))
            assert uses == [self._host[host] for host in action.host], f"{action} names slots of other computations"
            self._device.update(zip(action.device, uses, strict=True))
        elif isinstance(action, FetchBlocks):
            self._transfers[action.fetch_id] = action
            uses = list(zip(action.slots, action.generations, strict=True))
            self._host.update(zip(action.host, uses, strict=True))
        elif isinstance(action, StoreBlocks):
            self._transfers[action.put_id] = action
            self.writes += [(action.namespace, key) for key in action.keys]
            slots = tuple(self._host[host][0] for host in action.host)
            assert action.slots == slots, f"{action} names slots of other computations"

    def _step(self, step: RunStep) -> None:
        self._flying += 1
        self.depth = max(self.depth, self._flying)
        for start in step.starts:
            self._start(start)
        for append in step.appends:
            self._device[append.block] = (append.slot, append.generation)
        for chunk in step.chunks:
            self.prefills[chunk.key] += chunk.key not in self._prefilled
            if chunk.last:
                self._prefilled.add(chunk.key)
        self.passes.launched(step)

    def _start(self, start: SeqStart) -> None:
        uses = zip(start.slots, start.generations, strict=True)
        self._device.update(zip(start.blocks[len(start.blocks) - len(start.slots) :], uses, strict=True))
        if start.key in self._begun:
            self._prefilled.add(start.key)
            had = len(self.passes.stamps[start.sampler.seed, start.sampler.index])
            self.resumed.append((start.num_cached, max(had - start.num_cached, 0)))
        self._begun.add(start.key)
