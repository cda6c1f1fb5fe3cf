"""What crosses to another process, derived from signatures: `ipc/remote.py`, without a process."""

# ruff: noqa: B027 - methods of a contract

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from fdasync.cache.host_arena import HostArena
from fdasync.errors import InvariantBroken, ProtocolError
from fdasync.ipc.remote import NO_FD, Fd, Method, forwarding, marked, method_of, one_each, remote, some_of
from fdasync.ipc.shared_memory import PAGE_NBYTES, SharedRegion
from fdasync.testing.harness.leaks import no_leaks


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    number: int


class Copy(msgspec.Struct, frozen=True, array_like=True, tag="copy"):
    number: int


class Verbs(ABC):
    """A contract."""

    @remote(fits=one_each)
    async def put(self, keys: Sequence[str]) -> list[int]: ...

    @abstractmethod
    @remote(words="loading", changes=True)
    async def load(self, path: str, limit_s: float = 2.0, *, first: bool, last: bool = True) -> str: ...

    @remote()
    def start(self, work: Step | Copy) -> asyncio.Future[int]: ...

    @remote()
    def tell(self, key: int) -> None: ...

    @remote()
    async def bind(self, blocks: int, arena: HostArena | None, others: Sequence[SharedRegion] = ()) -> None: ...

    @remote()
    async def listen(self, where: str, stop: Fd = NO_FD, more: Sequence[Fd] = ()) -> None: ...

    async def close(self) -> None:
        """Not marked."""


class Told:
    """Keeps the arguments of every call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


def crossed(method: Method[Any], *args: Any, **kwargs: Any) -> Any:
    """The arguments of a call, as they arrive, and the descriptors that nobody took."""
    message, fds = method.pack(args, kwargs)
    decoder = msgspec.msgpack.Decoder(method.messages[0] if len(method.messages) == 1 else Step | Copy)
    told, came = Told(), [os.dup(fd) for fd in fds]
    method.call(told, decoder.decode(msgspec.msgpack.encode(message)), came)
    ((name, args, kwargs),) = told.calls
    assert name == method.name
    return args, kwargs, came


def test_marked_methods_are_found_by_name_in_bases_too():
    class More(Verbs):
        @remote()
        async def other(self, n: int) -> int: ...

        async def put(self, keys: Sequence[str]) -> list[int]: ...

    assert list(marked(Verbs)) == ["put", "load", "start", "tell", "bind", "listen"]
    assert list(marked(More)) == [*marked(Verbs), "other"]
    assert marked(More)["put"] is method_of(Verbs.put)


def test_arguments_arrive_by_place_by_name_and_by_default():
    load = method_of(Verbs.load)
    assert crossed(load, "a", first=True) == (("a", 2.0), {"first": True, "last": True}, [])
    assert crossed(load, "a", limit_s=1.5, first=False, last=False)[:2] == (("a", 1.5), {"first": False, "last": False})
    assert crossed(method_of(Verbs.put), ("x", "y")) == ((["x", "y"],), {}, [])
    for args, kwargs in ((("a",), {}), (("a",), {"first": True, "odd": 1}), ((), {})):
        with pytest.raises(TypeError):
            load.pack(args, kwargs)


def test_an_argument_that_is_a_message_is_not_wrapped():
    start = method_of(Verbs.start)
    assert start.messages == (Step, Copy)
    assert start.pack((Step(3),), {}) == (Step(3), [])
    assert crossed(start, Copy(4)) == ((Copy(4),), {}, [])
    assert not start.waits
    assert start.answer.decode(msgspec.msgpack.encode(7)) == 7


def test_an_answer_is_decoded_as_the_signature_says_and_fits_its_call():
    put = method_of(Verbs.put)
    message, _ = put.pack((("a", "b"),), {})
    assert put.fits([1, 2], message)
    assert not put.fits([1], message)
    with pytest.raises(msgspec.ValidationError):
        put.answer.decode(msgspec.msgpack.encode(["x"]))
    method_of(Verbs.tell).answer.decode(msgspec.msgpack.encode(None))
    assert [some_of(count, "ab") for count in (-1, 0, 2, 3)] == [False, True, True, False]


def test_memory_is_mapped_again_from_its_descriptor():
    with no_leaks():
        arena, region = HostArena.create(2, 64), SharedRegion.create("other", PAGE_NBYTES)
        arena.kv[1, :3] = (7, 8, 9)
        region.view(0, 2)[:] = b"ab"
        (blocks, theirs, (other,)), _, left = crossed(method_of(Verbs.bind), 2, arena, [region])
        assert (blocks, theirs.num_blocks, theirs.block_nbytes, left) == (2, 2, 64, [])
        assert list(theirs.kv[1, :3]) == [7, 8, 9]
        assert bytes(other.view(0, 2)) == b"ab"
        assert other.fd != region.fd
        for one in (theirs, other, arena, region):
            one.close()
    assert crossed(method_of(Verbs.bind), 2, None) == ((2, None, []), {}, [])


def test_descriptors_cross_as_themselves_and_stay_the_calls():
    listen = method_of(Verbs.listen)
    reads, writes = os.pipe()
    (where, stop, more), _, left = crossed(listen, "here", Fd(reads), [Fd(writes), Fd(writes)])
    assert where == "here"
    assert [stop, *more] == left
    assert os.fstat(stop).st_ino == os.fstat(reads).st_ino
    for fd in (reads, writes, *left):
        os.close(fd)
    assert crossed(listen, "here") == (("here", NO_FD, []), {}, [])


@pytest.mark.parametrize(("function", "args"), [(Verbs.bind, (1, (2, 64), ())), (Verbs.listen, ("here", 1, 0))])
def test_a_call_without_its_descriptors_is_refused(function, args):
    method = method_of(function)
    with pytest.raises(ProtocolError, match="without its descriptors"):
        method.call(Told(), method.messages[0](*args), [])


def test_memory_that_is_smaller_than_its_plan_is_refused():
    with no_leaks():
        small = SharedRegion.create("small", PAGE_NBYTES)
        method = method_of(Verbs.bind)
        with pytest.raises(InvariantBroken, match="are needed"):
            method.call(Told(), method.messages[0](1, (9, 1 << 20), ()), [os.dup(small.fd)])
        small.close()


@forwarding(Verbs)
class Double(Verbs):
    """Writes one method, and has the others filled."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def put(self, keys: Sequence[str]) -> list[int]:
        return [len(keys)]

    async def forward(self, method: Method[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self.told.append((method.name, args, kwargs))
        return method.options.words

    def forward_now(self, method: Method[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self.told.append((method.name, args, kwargs))


def test_what_a_class_does_not_write_is_forwarded():
    double = Double()
    assert asyncio.run(double.put("ab")) == [2]
    assert asyncio.run(double.load("a", first=True)) == "loading"
    double.tell(3)
    assert double.told == [("load", ("a",), {"first": True}), ("tell", (3,), {})]
    assert asyncio.run(double.close()) is None
    assert (Double.load.__name__, Double.load.__doc__) == ("load", Verbs.load.__doc__)


async def test_memory_of_a_call_that_cannot_be_mapped_whole_is_given_back():
    with no_leaks():
        one = SharedRegion.create("one", PAGE_NBYTES)
        method = method_of(Verbs.bind)
        fds = [os.dup(one.fd), os.dup(one.fd)]
        with pytest.raises(InvariantBroken, match="are needed"):
            method.call(Told(), method.messages[0](1, None, (PAGE_NBYTES, 2 * PAGE_NBYTES)), fds)
        one.close()
        assert fds == []


def test_more_values_than_a_method_has_are_refused():
    load = method_of(Verbs.load)
    message, _ = load.pack(("a",), {"first": True})
    data = msgspec.msgpack.encode([*msgspec.msgpack.decode(msgspec.msgpack.encode(message)), 7])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=load.messages[0])
