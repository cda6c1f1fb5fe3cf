"""One rank of a trainer's process group: it meets the others, and broadcasts from rank 0.

The keys of the store are the same as in groups made by SGLang's, slime's, Miles', AReaL's and OpenRLHF's trainers
(`torch.distributed`'s own helper behind a prefix of the group's name). The group is an object of its own, in no list of
torch's: a process may have several, of any names. gloo's port authenticates nobody, so it is open on the loopback
interface, or on a named interface. Knows bytes; knows no tensors of models. Used by both sides, `receiving.py` and
`sending.py`.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as torch_dist

from fdasync.errors import WeightsBroken, WeightsRejected
from fdasync_transformers.weights.groups.rendezvous import GLOO_CONNECTS, TimedStore, check_wanted, left_s

if TYPE_CHECKING:
    from fdasync.request import WeightsGroup

# torch declares no types of these
dist: Any = torch_dist
# broadcasts under way: some come while the one before them is put to its place
_DEPTH = {"cpu": 8, "cuda": 4}
# a rank that has told its address answers by itself, whatever its program does
_CONNECT_S = 30.0
# before what gloo says: "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:536]"
_PLACE = re.compile(r"^(\[[^\]]*\]\s*)+")
# what gloo says after its limit: of the broadcast that it ended, and of later broadcasts
_TIMED_OUT = ("Timed out waiting", "Application timeout")
_LEAST_S = 0.01
# between two looks at a broadcast
_FIRST_LOOK_S, _LAST_LOOK_S = 0.0002, 0.002
# NCCL's own limit ends the process, so it is only for what ours did not end
_BEYOND_S = 120.0


def new_store(address: str, port: int, world_size: int, timeout_s: float, *, is_trainer: bool) -> Any:
    """The trainer's store, or a connection to it. Blocks until it is there. Raises what torch raises."""
    return dist.TCPStore(
        address,
        port,
        world_size,
        is_trainer,
        timeout=timedelta(seconds=timeout_s),
        # a server that waits for its clients counts each client that connects as this one does
        wait_for_workers=not is_trainer,
    )


class _Broadcast:
    """One under way; without `work` once the group was left.

    Callers that wait hold this and not the work, which holds the group's connections open: an error that is kept holds
    the frames of its callers.
    """

    __slots__ = ("data", "limit_s", "work")

    def __init__(self, work: Any, data: torch.Tensor, limit_s: float) -> None:
        self.work = work
        self.data = data
        self.limit_s = limit_s


class JoinedGroup:
    """A rank of a group.

    Args:
        group: the group; this is its rank `group.rank`.
        interface: to listen on; "": the loopback one.
        store: the trainer's own; None: connect to it.
        limit_s: longest that the ranks may take to meet; None: `group.timeout_s`.
        stop: fd of a pipe whose end is that of the join; -1: there is none.

    Blocks until all ranks have met (NCCL's meet at the first broadcast): at most `limit_s` until each has told its
    address, and as long, or 30 s, until a rank has connected to it. Raises WeightsRejected.

    Attributes:
        spec: `group`.
        device: where broadcast bytes lie.
    """

    def __init__(
        self, group: WeightsGroup, interface: str, store: Any = None, *, limit_s: float | None = None, stop: int = -1
    ) -> None:
        self.spec = group
        on_gpu = group.backend == "nccl"
        if on_gpu and not (dist.is_nccl_available() and torch.cuda.is_available()):
            raise WeightsRejected(f"group {group.name!r}: there is no NCCL, or no GPU, in this process; use gloo")
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        limit_s = group.timeout_s if limit_s is None else limit_s
        self._backend, problem = _met(group, interface, self.device.type, store, limit_s, stop)
        if problem:
            raise WeightsRejected(
                f"group {group.name!r}: rank {group.rank} of {group.world_size} could not meet the others by the store"
                f" at {group.address}:{group.port} within {limit_s:.3g} s: {problem}"
            )
        self._under_way: deque[_Broadcast] = deque()

    def begin(self, data: torch.Tensor, limit_s: float = math.inf) -> None:
        """Begin to broadcast flat bytes on `device` from rank 0, for so long at most, and for the group's `timeout_s`.
        The tensor is the group's until `next` returned it. Raises WeightsBroken."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        limit_s = max(min(limit_s, self.spec.timeout_s), _LEAST_S)
        if self.device.type == "cpu":
            # gloo's own is for connecting; what is under way when the group is left ends by this one alone
            options.timeout = timedelta(seconds=limit_s)
        try:
            self._under_way.append(_Broadcast(self._backend.broadcast([data], options), data, limit_s))
        except RuntimeError as error:
            raise self._broken(error) from error

    @property
    def is_full(self) -> bool:
        """So many broadcasts are under way that `next` should be called first."""
        return len(self._under_way) >= _DEPTH[self.device.type]

    @property
    def is_busy(self) -> bool:
        """Whether a broadcast is under way."""
        return bool(self._under_way)

    async def next(self, until: float, what: str) -> torch.Tensor:
        """Wait for the oldest broadcast, at most until that time of the loop and for the group's `timeout_s`. Raises
        WeightsBroken. `what`: the trainer should send, for people."""
        oldest = self._under_way[0]
        loop = asyncio.get_running_loop()
        limit_s = min(until - loop.time(), self.spec.timeout_s)
        late = loop.time() + limit_s
        look_s = _FIRST_LOOK_S
        try:
            while not oldest.work.is_completed():
                if loop.time() > late:
                    raise self._silent(what, limit_s)
                # neither torch nor gloo has anything that a loop could wait for
                await asyncio.sleep(look_s)
                look_s = min(2 * look_s, _LAST_LOOK_S)
            oldest.work.wait()
        except RuntimeError as error:
            # gloo's own limit, which began with the broadcast
            if any(words in str(error) for words in _TIMED_OUT):
                raise self._silent(what, oldest.limit_s) from error
            raise self._broken(error) from error
        self._under_way.popleft()
        return oldest.data

    def _silent(self, what: str, limit_s: float) -> WeightsBroken:
        bound = f"the group's timeout_s is {self.spec.timeout_s:g}"
        return WeightsBroken(
            f"the trainer of group {self.spec.name!r} sent nothing {what} within {limit_s:.1f} s ({bound})"
        )

    def wait(self) -> None:
        """As `next`, for the trainer: blocks. The group's `timeout_s` bounds it. Raises WeightsBroken."""
        oldest = self._under_way[0]
        late = time.monotonic() + self.spec.timeout_s
        try:
            # gloo's own wait has the limit; NCCL's ends at once, whatever the device does
            while self.device.type == "cuda" and not oldest.work.is_completed():
                if time.monotonic() > late:
                    raise WeightsBroken(
                        f"group {self.spec.name!r}: nobody took the bytes for {self.spec.timeout_s:g} s"
                    )
                time.sleep(_FIRST_LOOK_S)  # blocking: in the trainer's process
            oldest.work.wait()
        except RuntimeError as error:
            raise self._broken(error) from error
        self._under_way.popleft()

    def _broken(self, error: RuntimeError) -> WeightsBroken:
        return WeightsBroken(f"group {self.spec.name!r}: a broadcast from rank 0 failed: {_words_of(error)}")

    def close(self) -> None:
        """Leave; idempotent. What is under way ends first, or is cut off: nothing writes to its tensors afterwards."""
        backend, self._backend = self._backend, None
        under_way, self._under_way = self._under_way, deque()
        if backend is None:
            return
        with suppress(RuntimeError):
            backend.abort()
        for broadcast in under_way:
            # a broadcast that was cut off has failed; gloo's own limit ends any other
            with suppress(RuntimeError):
                broadcast.work.wait()
            broadcast.work = None
        del backend


def _met(group: WeightsGroup, interface: str, kind: str, store: Any, limit_s: float, stop: int) -> tuple[Any, str]:
    """torch's object for the rank, and ""; where the ranks did not meet, None, and why. It raises nothing: an error
    that is kept keeps its frames, which hold listeners and connections here."""
    until = time.monotonic() + limit_s
    try:
        check_wanted(stop)
        if store is None:
            store = new_store(group.address, group.port, group.world_size, left_s(until), is_trainer=False)
        keys: Any = store
        for prefix in (group.name, f"{group.name}/", f"{kind}/"):
            keys = dist.PrefixStore(prefix, keys)
        if kind == "cuda":
            return _nccl(keys, group, interface), ""
        return _gloo(TimedStore(keys, until, stop), group, interface), ""
    except (RuntimeError, ValueError, OSError) as error:
        return None, _words_of(error)


def _words_of(error: BaseException) -> str:
    """What torch says, without the places in its sources, its guesses and the stack that it says it with."""
    words = _PLACE.sub("", str(error).partition("\n")[0])
    for more in (" Exception raised from ", " This is typically caused by "):
        words = words.partition(more)[0]
    return words or type(error).__name__


def _gloo(keys: Any, group: WeightsGroup, interface: str) -> Any:
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._timeout = timedelta(seconds=min(group.timeout_s, _CONNECT_S) / GLOO_CONNECTS)
    where = {"interface": interface} if interface else {"hostname": "127.0.0.1"}
    options._devices = [kind.create_device(**where)]
    return kind(keys, group.rank, group.world_size, options)


def _nccl(keys: Any, group: WeightsGroup, interface: str) -> Any:
    kind: Any = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=group.timeout_s + _BEYOND_S)
    options.is_high_priority_stream = False
    # NCCL reads these when the ranks first meet, at the first broadcast. Its service that tells people of ranks (RAS)
    # would listen for as long as the process lives, and keep a connection to each process that it has met
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface or "lo")
    os.environ.setdefault("NCCL_RAS_ENABLE", "0")
    return kind(keys, group.rank, group.world_size, options)
