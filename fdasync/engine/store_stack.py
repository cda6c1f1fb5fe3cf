"""Builds an engine's store from its configuration: finds it by name, gives it a process if it blocks, wraps it.

From the inside out: the store itself; `CheckedStore`, which writes and checks the object format next to it; a process
of their own if the store blocks; a timeout on every call; limits on calls and bytes at a time; the circuit breaker; the
trace. The wrappers' reports become events. If the store cannot be opened at the start, the breaker opens it later,
unless the configuration requires it. Decides nothing. Called by `runtime.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.cache.store.block_format import BlockSchema, Section
from fdasync.cache.store.checked import CheckedStore
from fdasync.cache.store.plugins import load_store, make_store
from fdasync.cache.store.process.proxy import ProcessStore
from fdasync.cache.store.wrappers import Breaker, Exclusive, Limits, Timeout, Trace
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
    from fdasync.runner.base import Capacity

# failed calls in a row that open the breaker; a single timeout opens it, too
_BREAKER_FAILURES = 3
_MAX_CALLS_NBYTES = 256 << 20
# seconds for killing and reaping a store's process
_REAP_S = 15.0


class StoreStack:
    """One engine's store and its wrappers.

    Args:
        given: a store object in the place of the configured one; the stack owns it from now on. While another engine
            has it open, the stack waits until that engine lets go of it, and opens it then.
        closing: the deadline of `aclose`, which other parts of the engine share.
        publish: takes the wrappers' events.

    Attributes:
        store: the outermost wrapper. Its name is the one in the config, whether it is open or not.
        left_alone: the breaker's latest event; None while the store is used.
        process_store: the proxy of the store's process; None where the store has none.
    """

    def __init__(
        self,
        config: EngineConfig,
        capacity: Capacity,
        host: HostArena,
        given: Store | None,
        closing: Closing,
        publish: Callable[[Event], None],
    ) -> None:
        """Raises PluginError; ConfigError naming the key."""
        self.left_alone: BreakerChanged | None = None
        self._name = config.store
        self._publish = publish
        self.process_store: ProcessStore | None = None
        schema = schema_of(capacity, host)
        store: Store
        if given is None and load_store(config.store).blocking:
            store = self.process_store = ProcessStore(
                config.store,
                config.store_config,
                schema,
                close_deadline_s=closing,
                open_deadline_s=max(config.store_open_deadline_s, config.store_kill_s),
            )
        else:
            own = make_store(config.store, config.store_config) if given is None else Exclusive(given)
            store = CheckedStore(own, schema)
        store = Timeout(
            store,
            call_s=config.store_deadline_s,
            kill_s=config.store_kill_s,
            open_s=config.store_open_deadline_s,
            close_s=closing,
            reap_s=0.0 if self.process_store is None else _REAP_S,
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
        self._publish(
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
        self._publish(event)

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        """Raises StoreRejected, ConfigError and PluginError for errors that no later attempt mends. Raises
        StoreUnavailable where the config requires the store; else the breaker opens the store later."""
        await self.store.open(regions)

    async def aclose(self) -> None:
        """Close the store and its wrappers; idempotent, right after a failed `open` too. Raises what closing the store
        raises, and StoreTimeout, naming calls that never ended."""
        await self.store.aclose()


def schema_of(capacity: Capacity, host: HostArena) -> BlockSchema:
    """The layout of every stored block of this runner."""
    size = capacity.block_tokens
    sections = [Section("kv", capacity.kv_dtype, (capacity.block_nbytes,), capacity.block_nbytes)]
    sections += [
        Section(spec.name, spec.dtype, (size, *spec.shape), size * spec.token_nbytes) for spec in capacity.aux_specs
    ]
    state = None
    if capacity.state_specs:
        state = Section("state", "uint8", (capacity.snapshot_nbytes,), capacity.snapshot_nbytes)
    return BlockSchema(
        layout=capacity.kv_layout,
        kv_dtype=capacity.kv_dtype,
        block_tokens=size,
        sections=tuple(sections),
        zeros=host.zeros(HOST_REGION),
        trash=host.trash(HOST_REGION),
        state=state,
    )
