"""What callers are told at the end of a request that was handed over, whatever else ended it in the same turn."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fdasync_fleet.instance.context import InstanceContext
from fdasync_fleet.instance.responses import Responses
from fdasync_fleet.messages import Failed, Moved

D0 = "ipc:///run/d0"


class Request:
    """What `Responses` reads of a `RequestState`."""

    def __init__(self, reasons: list[str]) -> None:
        self.samples = [SimpleNamespace(finish=SimpleNamespace(reason=reason, note="full")) for reason in reasons]
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asked = None
        self.prompt = (1, 2, 3)


class Ending:
    """Answers of a request that ends, and what its caller is told."""

    def __init__(self, reasons: list[str], went_to: str) -> None:
        self.moved = {"r": went_to} if went_to else {}
        self.told: list[Any] = []
        self.begun: list[str] = []
        context: Any = SimpleNamespace(
            tell=lambda _peer, words: self.told.append(words),
            start=self._start,
            guarded=lambda work: lambda *_: work(),
        )
        prefill_service: Any = SimpleNamespace(take_moved=lambda name: self.moved.pop(name, ""))
        self.responses = Responses(context, prefill_service)
        self.request: Any = Request(reasons)

    def _start(self, work: Any, name: str) -> None:
        work.close()
        self.begun.append(name)

    async def end(self) -> None:
        caller: Any = SimpleNamespace(incarnation=b"router", is_up=True)
        self.responses._watch(caller, "r", self.request, tokens=True)
        self.request.done.set_result(None)
        await asyncio.sleep(0)


@pytest.mark.parametrize("reasons", [["handed_over"], ["abort"], ["handed_over", "abort"], ["deadline", "deadline"]])
async def test_the_instance_that_took_all_of_it_answers_alone(reasons: list[str]) -> None:
    ending = Ending(reasons, went_to=D0)
    await ending.end()
    assert ending.told == [Moved("r", D0)]
    assert not ending.begun, "its end is told twice"
    assert not ending.moved, "where it went is never forgotten"


async def test_of_an_abort_before_the_hand_over_the_end_is_told() -> None:
    ending = Ending(["abort"], went_to="")
    await ending.end()
    assert not ending.told
    assert ending.begun == ["result of r"]


async def test_a_request_that_finds_no_room_is_told_so() -> None:
    ending = Ending(["no_lease", "handed_over"], went_to="")
    await ending.end()
    (words,) = ending.told
    assert isinstance(words, Failed)
    assert words.retriable
    assert words.prompt_tokens == 3
    assert "full" in words.problem


async def test_what_a_callback_raises_ends_the_engine_and_is_not_only_logged() -> None:
    failures: list[BaseException] = []
    unused: Any = None
    loop = asyncio.get_running_loop()
    context = InstanceContext(loop, *[unused] * 8, failures.append, unused, unused)
    loop.call_soon(context.guarded(lambda: next(iter(()))))
    loop.call_soon(context.guarded(lambda: None))
    await asyncio.sleep(0)
    assert [type(failure) for failure in failures] == [StopIteration]
