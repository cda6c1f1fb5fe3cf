"""Any store in a process of its own: `ProcessStore`, the engine's side.

A store that blocks, spins, starts threads or holds the GIL does it in a child (`process/main.py`); here a verb is a
message and a wait. The regions are shared by fd, and the child computes and checks the checksums of block objects
(`checked.py`). A child that dies ends its running verbs, and the next verb starts another child. The module knows
processes and the contract, no store. `engine/store_stack.py` makes the proxy.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, TypeVar

import msgspec

from fdasync.cache.store.base import Capabilities, Item, Outcome, Store, StoreUsage
from fdasync.cache.store.process.main import StoreService
from fdasync.errors import (
    ConfigError,
    DeadlineExceeded,
    FdasyncError,
    ProtocolError,
    RunnerError,
    StoreRejected,
    StoreUnavailable,
    WorkerDied,
)
from fdasync.ipc.deadlines import Closing, wait_within
from fdasync.ipc.rpc import RpcClient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from fdasync.cache.store.block_format import BlockSchema
    from fdasync.ipc.shared_memory import SharedRegion

P = ParamSpec("P")
T = TypeVar("T")

# the errors of a child that ended by itself
_BROKEN = (WorkerDied, ProtocolError)
_CHILD = "fdasync.cache.store.process.main"
_MAX_REGIONS = 8  # the fds of one frame
_MAX_BATCH = 256
# how long a process that is closed while it opens its store has, in seconds
_UNOPENED_S = 2.0


class ProcessStore(Store):
    """Proxy of a store in a child process.

    A verb that is cancelled asks the child to stop it, and ends when the child has answered or is dead and reaped: the
    rule of the contract about parts holds across the two processes. While no child is up, calls raise
    StoreUnavailable at once; the first call after `respawn_s` starts a child, and the calls behind it share the wait.

    Args:
        name: entry-point name of the store. The store is opened and used in the child only. The engine imports its
            class too, to read `blocking`, so importing it should be cheap.
        store_config: its raw configuration.
        schema: of the block objects that it keeps; None for a store of plain bytes.
        close_deadline_s: how long closing the store may take before its process is killed, in seconds; or a deadline
            that it shares.
        open_deadline_s: the same for opening it, imports included.
        respawn_s: children are started at most once in this time, in seconds.

    Attributes:
        spawned: how many children were started.
    """

    config_type: ClassVar[type[msgspec.Struct]] = msgspec.Struct

    def __init__(
        self,
        name: str,
        store_config: dict[str, Any],
        schema: BlockSchema | None = None,
        *,
        close_deadline_s: float | Closing,
        open_deadline_s: float = 60.0,
        respawn_s: float = 1.0,
    ) -> None:
        super().__init__(store_config)
        self.spawned = 0
        self._name = name
        self._schema = schema
        self._closing = close_deadline_s if isinstance(close_deadline_s, Closing) else Closing(close_deadline_s)
        self._open_deadline_s = open_deadline_s
        self._respawn_s = respawn_s
        self._regions: tuple[SharedRegion, ...] = ()
        self._child: RpcClient | None = None
        # the child has opened the store
        self._ready = False
        self._opening: asyncio.Task[FdasyncError | None] | None = None
        # loop time of the next start, and why there is no child until then
        self._not_before = 0.0
        self._down = "it is not open"
        self._closed = False

    @property
    def pid(self) -> int:
        """Process id of the child; -1 while there is none."""
        return -1 if self._child is None else self._child.process.pid

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        """Start a process that opens the store; may be called again after it failed, each time in a fresh process.

        Raises the errors of the store's own `open`, PluginError and ConfigError; StoreUnavailable also if the process
        ends or does not open the store in time.
        """
        if len(regions) > _MAX_REGIONS:
            raise StoreRejected(self._name, f"{len(regions)} regions", f"at most {_MAX_REGIONS} can be shared")
        self._regions = tuple(regions)
        if self._child is not None and self._opening is None:
            # the child of an opening that failed is not reaped yet
            raise StoreUnavailable(self._name, "it is open" if self._child.ending is None else _why(self._child.ending))
        problem = await self._open_once()
        if problem is not None:
            raise problem

    async def exists_prefix(self, keys: Sequence[str]) -> int:
        self._check_batch(len(keys))
        return await self._call(Store.exists_prefix, keys)

    async def get_into(self, items: Sequence[Item]) -> list[Outcome]:
        self._check_batch(len(items))
        return await self._call(Store.get_into, items)

    async def put(self, items: Sequence[Item]) -> list[Outcome]:
        self._check_batch(len(items))
        return await self._call(Store.put, items)

    async def delete(self, keys: Sequence[str]) -> int:
        self._check_batch(len(keys))
        return await self._call(Store.delete, keys)

    async def usage(self) -> StoreUsage:
        return await self._call(Store.usage)

    async def kill(self, why: str) -> bool:
        """SIGKILL the child and reap it; running verbs raise StoreUnavailable(why). The next verb starts another child.

        False if the kernel does not let go of the child: the verbs end when it does.
        """
        if self._child is not None:
            try:
                await self._child.kill(StoreUnavailable(self._name, why))
            except DeadlineExceeded:
                return False
        return True

    async def aclose(self) -> None:
        """Ask the child to close its store and end; kill it at the deadline, or within 2 s if it has not opened the
        store. The child is gone on return.

        Raises StoreUnavailable, once, if closing the store failed there.
        """
        self._closed = True
        child, opening, ready = self._child, self._opening, self._ready
        if child is not None:
            self._closing.begin()
            # a store that is not open has nothing to write, and its process may never read the request
            limit_s = self._closing.left_s if ready else min(self._closing.left_s, _UNOPENED_S)
            await child.close(StoreUnavailable(self._name, "it is closed"), limit_s)
        if opening is not None:
            await asyncio.wait([opening])
        if child is not None and ready and child.process.exited.result() > 0:  # of a future that is done
            problem = f"closing it failed: its process ended with status {child.process.exited.result()}"
            raise StoreUnavailable(self._name, problem)

    # -- calls --------------------------------------------------------------------------------------

    def _check_batch(self, count: int) -> None:
        # checked before anything is sent: it bounds the frame
        if count > self.capabilities.max_batch:
            hint = f"at most {self.capabilities.max_batch} are taken"
            raise StoreRejected(self._name, f"{count} items in one call", hint)

    async def _call(self, verb: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        child = self._child
        if child is None or not self._ready or child.ending is not None or self._closed:
            child = await self._up()
        try:
            return await child.ask(verb, *args, **kwargs)
        except _BROKEN as error:
            raise StoreUnavailable(self._name, str(error)) from None
        except FdasyncError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise StoreRejected(self._name, f"the call cannot be sent: {error}") from None

    async def _up(self) -> RpcClient:
        """The child, once it has opened the store: waits for a start, nothing else.

        Raises StoreUnavailable, StoreRejected.
        """
        if self._closed:
            raise StoreUnavailable(self._name, "it is closed")
        if self._child is not None and self._child.ending is not None:
            raise StoreUnavailable(self._name, _why(self._child.ending))
        if self._opening is None and asyncio.get_running_loop().time() < self._not_before:
            raise StoreUnavailable(self._name, self._down)
        problem = await self._open_once()
        if isinstance(problem, (StoreUnavailable, StoreRejected)):
            raise problem
        if problem is not None:
            # the store opened before; its plugin or configuration has changed since
            raise StoreRejected(self._name, str(problem))
        if self._child is None or not self._ready or self._child.ending is not None:
            raise StoreUnavailable(self._name, self._down)
        return self._child

    # -- the child's life ---------------------------------------------------------------------------

    async def _open_once(self) -> FdasyncError | None:
        """Start a child, or share a start under way; cancelling stops the waiting only."""
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._start())
        opening = self._opening
        await asyncio.wait([opening])
        return opening.result()  # of a task that is done

    async def _start(self) -> FdasyncError | None:
        """Start a child that opens the store; the error if that failed, once the child is gone."""
        try:
            await self._start_child()
        except DeadlineExceeded as error:
            # the kernel does not let go of it: calls fail until it does
            return StoreUnavailable(self._name, str(error))
        except FdasyncError as error:
            problem = StoreUnavailable(self._name, str(error)) if isinstance(error, _BROKEN) else error
            if isinstance(problem, StoreUnavailable) and not problem.store:
                # it failed before it was told its name
                problem = StoreUnavailable(self._name, problem.problem)
            self._down = str(problem)
            self._not_before = asyncio.get_running_loop().time() + self._respawn_s
            return problem
        finally:
            self._opening = None
        return None

    async def _start_child(self) -> None:
        loop = asyncio.get_running_loop()
        self._not_before = loop.time() + self._respawn_s
        if self._closed:
            raise StoreUnavailable(self._name, "it is closed")
        try:
            child = self._child = RpcClient(loop, f"{self._name} store", _CHILD, StoreService.errors)
        except OSError as error:
            raise StoreUnavailable(self._name, f"no process can be started: {error}") from None
        child.gone.add_done_callback(self._on_gone)
        self.spawned += 1
        try:
            opened = child.call(StoreService.open, self._name, self.config, self._schema, self._regions)
        except (TypeError, ValueError, OverflowError) as error:
            problem = ConfigError("store_config", f"cannot be sent to a process: {error}")
            await child.kill(problem)
            raise problem from None
        except RunnerError as error:
            unavailable = StoreUnavailable(self._name, error.problem)
            await child.kill(unavailable)
            raise unavailable from None
        done, _ = await wait_within([opened], self._open_deadline_s)
        if not done:
            why = f"opening it did not end within {self._open_deadline_s:g} s"
            await child.kill(StoreUnavailable(self._name, why))
        if opened.exception() is not None:
            await child.close(StoreUnavailable(self._name, "it did not open"), self._closing.left_s)
        limits = opened.result()  # of a future that is done
        self.capabilities: Capabilities = msgspec.structs.replace(limits, max_batch=min(limits.max_batch, _MAX_BATCH))
        self._ready = True

    def _on_gone(self, gone: asyncio.Future[Exception]) -> None:
        self._child = None
        self._ready = False
        self._down = _why(gone.result())  # of a future that is done


def _why(error: Exception) -> str:
    return error.problem if isinstance(error, StoreUnavailable) else str(error)
