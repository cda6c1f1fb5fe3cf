"""Any store in a process of its own: `HostedStore`, the engine's side.

A store that blocks, spins, starts threads or holds the GIL does it in a child (`process/main.py`); here a verb is a
message and a wait. The regions are shared by fd, and the child computes and checks the checksums of block objects
(`checked.py`). A child that dies takes its running verbs with it, and the next verb starts another. Knows processes and
the contract, nothing of any store. Made by whoever opens an engine's stores.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from fdasync.cache.store.base import Capabilities, Item, Outcome, Store, StoreUsage
from fdasync.cache.store.process.child_handle import HostChild
from fdasync.cache.store.process.messages import (
    Call,
    Close,
    Count,
    Delete,
    ExistsPrefix,
    GetInto,
    Open,
    Outcomes,
    Put,
    Refused,
    Usage,
    Used,
    pack_error,
    unpack_error,
)
from fdasync.errors import ConfigError, DeadlineExceeded, StoreRejected, StoreUnavailable
from fdasync.ipc.deadlines import Closing, wait_within

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fdasync.cache.store.block_format import BlockSchema
    from fdasync.ipc.shared_memory import SharedRegion

A = TypeVar("A", Count, Outcomes, Used)

_MAX_REGIONS = 8  # the fds of one frame
_MAX_BATCH = 256
# how long a process that is still opening its store may take to stop that, in seconds
_UNOPENED_S = 2.0
_ENCODE = msgspec.msgpack.encode


class HostedStore(Store):
    """Proxy of a store in a child process.

    A verb that is cancelled asks the child to stop it, and ends when the child has answered or is dead and reaped: the
    rule of the contract about parts holds across the two processes. While no child is up, calls raise
    StoreUnavailable at once; the first one after `respawn_s` starts a child, and those behind it share the wait.

    Args:
        name: entry-point name of the store to host. Opened and used in the child only; who asks whether its class is
            `blocking` imports it in the engine too, so importing it should be cheap.
        store_config: its raw configuration.
        schema: of the block objects that it keeps; None for a store of plain bytes.
        close_deadline_s: how long closing the store may take before its process is killed, in seconds; or the deadline
            of what closes together with this.
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
        self._child: HostChild | None = None
        self._opening: asyncio.Task[Refused | None] | None = None
        self._not_before = 0.0
        self._down = "it is not open"
        self._number = 0
        self._closed = False

    @property
    def pid(self) -> int:
        """Of the child; -1 while there is none."""
        return -1 if self._child is None else self._child.process.pid

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        """As the hosted store's own, and again after one that failed, each time in a fresh process.

        Raises what it raises, PluginError and ConfigError; StoreUnavailable too if its process ends or does not open it
        in time.
        """
        if len(regions) > _MAX_REGIONS:
            raise StoreRejected(self._name, f"{len(regions)} regions", f"at most {_MAX_REGIONS} can be shared")
        self._regions = tuple(regions)
        if self._child is not None and self._opening is None:
            # of an opening that failed, and not reaped yet
            raise StoreUnavailable(self._name, self._child.ending or "it is open")
        refused = await self._open_once()
        if refused is not None:
            raise unpack_error(refused)

    async def exists_prefix(self, keys: Sequence[str]) -> int:
        self._check_batch(len(keys))
        answer = await self._call(
            lambda number: ExistsPrefix(number, tuple(keys)), Count, lambda answer: 0 <= answer.count <= len(keys)
        )
        return answer.count

    async def get_into(self, items: Sequence[Item]) -> list[Outcome]:
        self._check_batch(len(items))
        answer = await self._call(
            lambda number: GetInto(number, tuple(items)), Outcomes, lambda answer: len(answer.outcomes) == len(items)
        )
        return answer.outcomes

    async def put(self, items: Sequence[Item]) -> list[Outcome]:
        self._check_batch(len(items))
        answer = await self._call(
            lambda number: Put(number, tuple(items)), Outcomes, lambda answer: len(answer.outcomes) == len(items)
        )
        return answer.outcomes

    async def delete(self, keys: Sequence[str]) -> int:
        self._check_batch(len(keys))
        answer = await self._call(
            lambda number: Delete(number, tuple(keys)), Count, lambda answer: 0 <= answer.count <= len(keys)
        )
        return answer.count

    async def usage(self) -> StoreUsage:
        return (await self._call(Usage, Used, lambda _: True)).usage

    async def kill(self, why: str) -> bool:
        """SIGKILL the child and reap it; running verbs raise StoreUnavailable(why). The next verb starts another.

        False if the kernel does not let go of it: the verbs end when it does.
        """
        child = self._child
        if child is not None:
            child.ending = child.ending or why
            try:
                await child.process.kill()
            except DeadlineExceeded:
                return False
            await asyncio.wait([child.gone])
        return True

    async def aclose(self) -> None:
        """Ask the child to close its store and end; kill it at the deadline, and after a moment if it has not
        opened the store. Nothing of it is left on return.

        Raises StoreUnavailable, once, if closing the store failed there.
        """
        self._closed = True
        child, opening = self._child, self._opening
        if child is not None:
            child.ending = child.ending or "it is closed"
            self._closing.begin()
            # one that has not opened has nothing to write, and may never listen
            limit_s = self._closing.left_s if child.ready else min(self._closing.left_s, _UNOPENED_S)
            await child.process.close(_ENCODE(Close()), limit_s)
            await asyncio.wait([child.gone])
        if opening is not None:
            await asyncio.wait([opening])
        if child is not None and child.ready and child.process.exited.result() > 0:  # of a future that is done
            problem = f"closing it failed: its process ended with status {child.process.exited.result()}"
            raise StoreUnavailable(self._name, problem)

    # -- calls --------------------------------------------------------------------------------------

    def _check_batch(self, count: int) -> None:
        # before anything is sent: the frame is bounded by it
        if count > self.capabilities.max_batch:
            hint = f"at most {self.capabilities.max_batch} are taken"
            raise StoreRejected(self._name, f"{count} items in one call", hint)

    async def _call(self, make: Callable[[int], Call], kind: type[A], fits: Callable[[A], bool]) -> A:
        child = self._child
        if child is None or not child.ready or child.ending or self._closed:
            child = await self._up()
        number = self._number = self._number + 1
        try:
            payload = _ENCODE(make(number))
        except (TypeError, ValueError, OverflowError) as error:
            raise StoreRejected(self._name, f"the call cannot be sent: {error}") from None
        answer = await child.ask(number, payload, lambda answer: isinstance(answer, kind) and fits(answer))
        assert isinstance(answer, kind)
        return answer

    async def _up(self) -> HostChild:
        """The child, once it can be asked: waits for a start, nothing else. Raises StoreUnavailable, StoreRejected."""
        if self._closed:
            raise StoreUnavailable(self._name, "it is closed")
        if self._child is not None and self._child.ending:
            raise StoreUnavailable(self._name, self._child.ending)
        if self._opening is None and asyncio.get_running_loop().time() < self._not_before:
            raise StoreUnavailable(self._name, self._down)
        refused = await self._open_once()
        if refused is not None:
            error = unpack_error(refused)
            if isinstance(error, (StoreUnavailable, StoreRejected)):
                raise error
            # it opened before, and what it was made of has changed since
            raise StoreRejected(self._name, str(error))
        if self._child is None or not self._child.ready or self._child.ending:
            raise StoreUnavailable(self._name, self._down)
        return self._child

    # -- the child's life ---------------------------------------------------------------------------

    async def _open_once(self) -> Refused | None:
        """Start a child, or share a start under way; cancelling stops the waiting only."""
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._start())
        opening = self._opening
        await asyncio.wait([opening])
        return opening.result()  # of a task that is done

    async def _start(self) -> Refused | None:
        """A child with an open store; or why there is none, once nothing of it is left."""
        try:
            refused = await self._start_child()
            if refused is not None:
                self._down = str(unpack_error(refused))
                self._not_before = asyncio.get_running_loop().time() + self._respawn_s
            return refused
        except DeadlineExceeded as error:
            # the kernel does not let go of it: calls fail until it does
            return pack_error(0, self._name, StoreUnavailable(self._name, str(error)))
        finally:
            self._opening = None

    async def _start_child(self) -> Refused | None:
        loop = asyncio.get_running_loop()
        self._not_before = loop.time() + self._respawn_s
        message = Open(self._name, self.config, self._schema, tuple([region.nbytes for region in self._regions]))
        try:
            payload = _ENCODE(message)
        except (TypeError, ValueError, OverflowError) as error:
            return pack_error(0, self._name, ConfigError("store_config", f"cannot be sent to a process: {error}"))
        if self._closed:
            return pack_error(0, self._name, StoreUnavailable(self._name, "it is closed"))
        try:
            child = self._child = HostChild(loop, self._name, self._on_gone)
        except OSError as error:
            return pack_error(0, self._name, StoreUnavailable(self._name, f"no process can be started: {error}"))
        self.spawned += 1
        child.process.send(payload, [region.fd for region in self._regions])
        done, _ = await wait_within([child.opened], self._open_deadline_s)
        if not done:
            child.ending = f"opening it did not end within {self._open_deadline_s:g} s"
            await child.process.kill()
            await asyncio.wait([child.gone])
        answer = child.opened.result()  # of a future that is done
        if isinstance(answer, Refused):
            child.ending = child.ending or "it did not open"
            await child.process.close(_ENCODE(Close()), self._closing.left_s)
            await asyncio.wait([child.gone])
            return answer
        limits = answer.capabilities
        self.capabilities: Capabilities = msgspec.structs.replace(limits, max_batch=min(limits.max_batch, _MAX_BATCH))
        child.ready = True
        return None

    def _on_gone(self, why: str) -> None:
        self._child = None
        self._down = why
