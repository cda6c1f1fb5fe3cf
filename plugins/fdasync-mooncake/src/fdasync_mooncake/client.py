"""The Mooncake client, as blocking calls on addresses; the only module that imports `mooncake`.

Turns the client's codes (as measured with 0.3.13; README) into outcomes and errors of the store contract. Every call
may block for seconds, and `connect` and `close` hold the GIL: calls run in threads of the store's process, and end that
process where nothing else keeps the contract. Knows no parts and no regions. Called by `store.py`.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from fdasync.cache.store import DONE, EXISTS, MISS, Outcome
from fdasync.errors import StoreRejected, StoreUnavailable
from fdasync_mooncake.config import NAME, MooncakeConfig, parse_address

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NO_SPACE = -200
BAD_ARGUMENTS = -600
NOT_COMPLETE = -703
NOT_FOUND = -704
ALREADY_THERE = -705
EVICTED = -707
NO_TRANSFER = -800
NO_MASTER = (-900, -901)  # not reached; did not answer in time

# the client waits 60 s for the bytes of an object, whatever is set, and then says that the transfer failed while bytes
# may still come: 170 MB were seen in buffers long after the answer. A little less, for the clocks of two languages
_ABANDONED_S = 58.0

_WORDS = {
    BAD_ARGUMENTS: "the client did not take the buffers",
    EVICTED: "it was evicted while it was read",
    NO_TRANSFER: "the machine that has the memory does not answer",
    -900: "the master was not reached",
    -901: "the master did not answer",
}


class Value(msgspec.Struct, frozen=True, array_like=True):
    """An object, and the memory to copy it from or to.

    Attributes:
        key: with the prefix.
        addresses, sizes: of the pieces of memory, in order.
        nbytes: of all pieces.
    """

    key: str
    addresses: list[int]
    sizes: list[int]
    nbytes: int


class Client:
    """One connection to a pool. `connect` once, then call from any thread, `close` once when no call runs."""

    def __init__(self, config: MooncakeConfig) -> None:
        self._config = config
        self._store: Any = None
        self._replicate: Any = None
        self._registered: list[int] = []
        # set by a call that no master answered: the next one probes the master, as the client would try for 4 s again
        self._suspect = False

    def connect(self) -> None:
        """Join the pool. Raises StoreRejected if the client cannot be imported, StoreUnavailable without a master."""
        config = self._config
        # names and units of the client; variables of the operator stay
        os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
        os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(int(config.rpc_timeout_s * 1e3)))
        os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", str(config.transfer_timeout_s))
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        # first, because without a master `setup` holds the GIL for 4 s, or 90
        hostname = config.local_hostname or self._probe()
        module = import_client()
        store = module.MooncakeDistributedStore()
        code = store.setup(
            hostname,
            config.metadata_server,
            config.segment_nbytes,
            config.local_buffer_nbytes,
            config.protocol,
            config.devices,
            config.master,
        )
        if code != 0:
            problem = f"the client could not join the pool of {config.master} as {hostname} (code {code})"
            raise StoreUnavailable(NAME, problem)
        self._store = store
        self._replicate = module.ReplicateConfig()
        self._replicate.replica_num = config.replicas

    def register(self, address: int, nbytes: int) -> None:
        """Register memory that later calls name. Raises StoreRejected."""
        code = self._store.register_buffer(address, nbytes)
        if code != 0:
            hint = "rdma locks memory: see ulimit -l" if self._config.protocol == "rdma" else ""
            raise StoreRejected(NAME, f"the client could not register {nbytes} bytes (code {code})", hint)
        self._registered.append(address)

    def exists(self, keys: list[str]) -> list[bool]:
        """Whether each key's object is in the pool, complete. Raises StoreUnavailable."""
        codes = self._answered(lambda: self._store.batch_is_exist(keys))
        for code in codes:
            if code not in (0, 1):
                raise StoreUnavailable(NAME, _in_words(code))
        return [code == 1 for code in codes]

    def absent(self, values: Sequence[Value]) -> list[int]:
        """Indices of the values to put: absent, and of a key named twice the first. Raises StoreUnavailable.

        `put` cannot tell: the client answers a put of a key that exists like any other.
        """
        first = {value.key: place for place, value in reversed(list(enumerate(values)))}
        return [place for place, there in zip(first.values(), self.exists(list(first)), strict=True) if not there]

    def put(self, values: Sequence[Value]) -> list[Outcome]:
        """Put absent values, no key twice. Raises StoreUnavailable if no value was put for want of a master."""
        keys, addresses, sizes = _columns(values)
        codes = self._answered(
            lambda: self._store.batch_put_from_multi_buffers(keys, addresses, sizes, self._replicate)
        )
        return [_of_put(code) for code in codes]

    def get(self, values: Sequence[Value]) -> list[Outcome]:
        """Get values into their memory. Raises StoreUnavailable if no value was got for want of a master."""
        outcomes: list[Outcome] = [MISS] * len(values)
        # for a key that a call names twice the client fills one place only, and says that it filled both
        left = dict(enumerate(values))
        while left:
            places = {value.key: place for place, value in reversed(left.items())}.values()
            wave = [left.pop(place) for place in places]
            for place, outcome in zip(places, self._get(wave), strict=True):
                outcomes[place] = outcome
        return outcomes

    def _get(self, values: list[Value]) -> list[Outcome]:
        keys, addresses, sizes = _columns(values)
        codes = self._answered(lambda: self._store.batch_get_into_multi_buffers(keys, addresses, sizes))
        return [self._of_get(value, code) for value, code in zip(values, codes, strict=True)]

    def remove(self, keys: list[str]) -> int:
        """Remove objects; returns how many there were. Raises StoreUnavailable."""
        # forced, because the master protects an object after a read, as a rule by the reader that found it damaged
        codes = self._answered(lambda: self._store.batch_remove(keys, True))
        for code in codes:
            if code not in (0, NOT_FOUND, NOT_COMPLETE):
                raise StoreUnavailable(NAME, _in_words(code))
        return codes.count(0)

    def close(self) -> None:
        """Leave the pool, and take back the memory lent to it. Blocks for 2 s as a rule, more without a master."""
        store, self._store = self._store, None
        if store is None:
            return
        for address in self._registered:
            store.unregister_buffer(address)
        store.close()

    def _answered(self, call: Callable[[], list[int]]) -> list[int]:
        """The codes of a call. Raises StoreUnavailable if the master answered for none of its items."""
        if self._suspect:
            self._probe()
        started = time.monotonic()
        codes = call()
        if NO_TRANSFER in codes and time.monotonic() - started > _ABANDONED_S:
            _end_process()
        unanswered = [code for code in codes if code in NO_MASTER]
        self._suspect = bool(unanswered)
        if codes and len(unanswered) == len(codes):
            raise StoreUnavailable(NAME, f"{_in_words(codes[0])} ({self._config.master})")
        return codes

    def _of_get(self, value: Value, code: int) -> Outcome:
        if code == value.nbytes:
            return DONE
        if code in (NOT_FOUND, NOT_COMPLETE):
            return MISS
        if code in (BAD_ARGUMENTS, NO_TRANSFER):
            # an object of another size gives these codes as well, so ask for the size
            nbytes = self._store.get_size(value.key)
            if nbytes == NOT_FOUND:
                return MISS
            if nbytes >= 0 and nbytes != value.nbytes:
                code = nbytes
        if code >= 0:
            return Outcome("damaged", f"{code} bytes are stored, {value.nbytes} were asked for")
        return Outcome("failed", _in_words(code), transient=code != BAD_ARGUMENTS)

    def _probe(self) -> str:
        """Connect to the master's port; returns this machine's address on the way. Raises StoreUnavailable."""
        host, port = parse_address("master", self._config.master)
        try:
            with socket.create_connection((host, port), self._config.probe_timeout_s) as sock:
                return str(sock.getsockname()[0])
        except OSError as error:
            raise StoreUnavailable(NAME, f"no master at {self._config.master}: {error}") from error


def _end_process() -> NoReturn:
    """End the store's process: nothing else makes sure that the client stops writing to the caller's memory.

    The engine's proxy answers the calls once the process is reaped, and starts another.
    """
    print(
        f"the {NAME} client gave up transfers that may still be under way; its process ends, so that they do",
        file=sys.stderr,
        flush=True,
    )
    os._exit(os.EX_TEMPFAIL)


def import_client() -> Any:
    """The client's module. Raises StoreRejected that says what to install."""
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        hint = (
            "install one of mooncake-transfer-engine-non-cuda and mooncake-transfer-engine (needs CUDA), never both, "
            "in a version that pyproject.toml of fdasync-mooncake names, and the system library libibverbs1"
        )
        raise StoreRejected(NAME, f"its client cannot be imported: {error}", hint) from error


def _columns(values: Sequence[Value]) -> tuple[list[str], list[list[int]], list[list[int]]]:
    return [value.key for value in values], [value.addresses for value in values], [value.sizes for value in values]


def _of_put(code: int) -> Outcome:
    if code == 0:
        return DONE
    if code == ALREADY_THERE:
        return EXISTS
    if code == NO_SPACE:
        return Outcome("full", "no free memory in the pool, or no process lends any")
    return Outcome("failed", _in_words(code), transient=code != BAD_ARGUMENTS)


def _in_words(code: int) -> str:
    return _WORDS.get(code, f"the client says {code}")
