"""Builds an engine's store from its configuration: finds it by name, gives it a process if it blocks, guards it.

From the inside out: the store itself; `CheckedStore`, which writes and checks the object format next to it; a process
of their own if the store blocks; the guard. Decides nothing. Called by `runtime.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.cache.store.block_format import BlockSchema, Section
from fdasync.cache.store.checked import CheckedStore
from fdasync.cache.store.guard import GuardedStore, GuardLimits
from fdasync.cache.store.plugins import load_store, make_store
from fdasync.cache.store.process.proxy import ProcessStore
from fdasync.ipc.shared_memory import HOST_REGION

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.cache.host_arena import HostArena
    from fdasync.cache.store.base import Store
    from fdasync.engine.config import EngineConfig
    from fdasync.events.catalog import Event
    from fdasync.ipc.deadlines import Closing
    from fdasync.runner.base import Capacity

# seconds for killing and reaping a store's process
_REAP_S = 15.0


def guarded_store(
    config: EngineConfig,
    capacity: Capacity,
    host: HostArena,
    given: Store | None,
    closing: Closing,
    publish: Callable[[Event], None],
) -> GuardedStore:
    """One engine's store, not open yet. Raises PluginError; ConfigError naming the key.

    Args:
        given: a store object in the place of the configured one; the guard owns it from now on. While another engine
            has it open, the guard waits until that engine lets go of it, and opens it then.
        closing: the deadline of `aclose`, which other parts of the engine share.
        publish: takes the guard's events.
    """
    schema = schema_of(capacity, host)
    store: Store
    blocks = given is None and load_store(config.store).blocking
    if blocks:
        store = ProcessStore(
            config.store,
            config.store_config,
            schema,
            close_deadline_s=closing,
            open_deadline_s=max(config.store_open_deadline_s, config.store_kill_s),
        )
    else:
        store = CheckedStore(make_store(config.store, config.store_config) if given is None else given, schema)
    limits = GuardLimits(
        call_s=config.store_deadline_s,
        open_s=config.store_open_deadline_s,
        kill_s=config.store_kill_s,
        reap_s=_REAP_S if blocks else 0.0,
        max_calls=config.store_calls,
        retry_s=config.store_retry_s,
        required=config.store_required,
    )
    return GuardedStore(store, limits, name=config.store, publish=publish, closing=closing)


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
