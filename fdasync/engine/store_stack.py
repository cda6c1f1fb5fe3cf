"""From a configuration to the store that an engine uses: found by name, hosted if it blocks, checked, wrapped.

From the inside out: the store itself; `Sealed`, which writes and checks the object format next to it; a process of
their own if the store blocks; a timeout on every call; limits on calls and bytes at a time; the circuit breaker;
the trace. What wrappers tell becomes events for taps. A store that cannot be opened for now is the breaker's to open
later, unless the configuration says that the engine needs it. Called by `runtime.py`; decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.cache.store.block_format import BlockSchema, Section
from fdasync.cache.store.checked import Sealed
from fdasync.cache.store.process.proxy import HostedStore
from fdasync.cache.store.wrappers import Breaker, Limits, Timeout, Trace
from fdasync.events.catalog import BreakerChanged, StoreCalled
from fdasync.ipc.shared_memory import HOST_REGION

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fdasync.cache.host_arena import HostArena
    from fdasync.cache.store.base import Store
    from fdasync.cache.store.wrappers import BreakerState, StoreCall
    from fdasync.engine.config import EngineConfig
    from fdasync.events.catalog import Event
    from fdasync.ipc.deadlines import Closing
    from fdasync.ipc.shared_memory import SharedRegion
    from fdasync.registry.registry import Registry
    from fdasync.runner.base import Capacity

# calls in a row that fail at once; one that does not answer is enough
_BREAKER_FAILURES = 3
_MAX_CALLS_NBYTES = 256 << 20
# killing and reaping a store's process
_REAP_S = 15.0


class StoreStack:
    """One engine's store with all that is around it.

    Args:
        given: a store object instead of the one that the config names; it is owned from now on.
        closing: the deadline of `aclose`, which others share.

    Attributes:
        store: the outermost. Its name is the one in the config, whether it is open or not.
        left_alone: what the breaker told last, unless that is that the store is used.
        hosted: the one that talks to the store's process; None where it has none.
        publish: where what the wrappers tell goes; set by the owner once there is a bus.
    """

    def __init__(
        self,
        config: EngineConfig,
        registry: Registry,
        capacity: Capacity,
        host: HostArena,
        given: Store | None,
        closing: Closing,
    ) -> None:
        """Raises PluginError; ConfigError naming the key."""
        self.publish: Callable[[Event], None] = lambda _event: None
        self.left_alone: BreakerChanged | None = None
        self._name = config.store
        self.hosted: HostedStore | None = None
        schema = schema_of(capacity, host)
        store: Store
        if given is None and registry.load_store(config.store).blocking:
            store = self.hosted = HostedStore(
                config.store,
                config.store_config,
                schema,
                close_deadline_s=closing,
                open_deadline_s=max(config.store_open_deadline_s, config.lease_kill_s),
            )
        else:
            store = Sealed(given or registry.make_store(config.store, config.store_config), schema)
        store = Timeout(
            store,
            call_s=config.store_deadline_s,
            kill_s=config.lease_kill_s,
            open_s=config.store_open_deadline_s,
            close_s=closing,
            reap_s=0.0 if self.hosted is None else _REAP_S,
            name=config.store,
        )
        store = Limits(
            store, max_calls=config.store_calls, max_nbytes=_MAX_CALLS_NBYTES, max_wait_s=config.store_deadline_s
        )
        store = Breaker(
            store,
            failures=_BREAKER_FAILURES,
            cooldown_s=config.store_retry_s,
            probe_s=config.store_deadline_s,
            on_state=self._on_state,
            opens_late=not config.store_required,
            name=config.store,
        )
        self.store = Trace(store, self._on_call)

    def _on_call(self, call: StoreCall) -> None:
        counts = call.outcomes
        self.publish(
            StoreCalled(
                store=call.store,
                verb=call.verb,
                items=call.items,
                nbytes=call.done_nbytes,
                seconds=call.seconds,
                done=counts.get("done", 0) + counts.get("exists", 0),
                missed=counts.get("miss", 0),
                damaged=counts.get("damaged", 0),
                failed=counts.get("failed", 0) + counts.get("full", 0),
                error=call.error.partition(":")[0],
            )
        )

    def _on_state(self, state: BreakerState, why: str) -> None:
        event = BreakerChanged(store=self._name, state=state, problem=why)
        self.left_alone = None if state == "closed" else event
        self.publish(event)

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        """Raises StoreRejected, ConfigError and PluginError for what no later attempt mends; StoreUnavailable, where
        the engine needs the store: else it is left alone, and opened when that works."""
        await self.store.open(regions)

    async def aclose(self) -> None:
        """Close them all; idempotent, right after a failed `open` too. Raises what closing the store raises, and
        StoreTimeout, naming what never ended."""
        await self.store.aclose()


def schema_of(capacity: Capacity, host: HostArena) -> BlockSchema:
    """What every stored block of this runner is."""
    size = capacity.block_tokens
    sections = [Section("kv", capacity.kv_dtype, (capacity.block_nbytes,), capacity.block_nbytes)]
    sections += [
        Section(spec.name, spec.dtype, (size, *spec.shape), size * spec.token_nbytes) for spec in capacity.aux_specs
    ]
    return BlockSchema(
        layout=capacity.kv_layout,
        kv_dtype=capacity.kv_dtype,
        block_tokens=size,
        sections=tuple(sections),
        zeros=host.zeros(HOST_REGION),
        trash=host.trash(HOST_REGION),
    )
