"""What a router shows of its instances: asked once a second, however many look on."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fdasync_fleet.messages import Seen, Watch

from fdasync.telemetry.sight.experts import experts_of
from fdasync.telemetry.sight.sight import MOST_MOMENTS
from tests.support.router_scene import in_scene, kv_batch, settle
from tests.telemetry.sight.scene import moment, picks, sight


class Shown:
    """Has a scripted instance answer."""

    def __init__(self, script: Any) -> None:
        self.asked: list[Watch] = []
        self.values: dict[str, Any] = {}
        self.silent = False
        self._script = script
        self._inner = script.on_message
        script.on_message = self._on_message

    def _on_message(self, peer: Any, message: Any, payload: Any) -> None:
        if not isinstance(message, Watch):
            self._inner(peer, message, payload)
            return
        self.asked.append(message)
        if not self.silent:
            self._script.router.send(Seen(message.number, sight(**self.values)))


@in_scene("m0", "m1")
async def test_many_who_look_are_one_question_a_second(scene):
    first, second = Shown(scene.m0), Shown(scene.m1)
    looks = await asyncio.gather(*[scene.router.watch() for _ in range(5)])
    assert len(first.asked) == len(second.asked) == 1
    assert all([one.name for one in look] == ["m0", "m1"] for look in looks)
    first.values = {"running": 7}
    assert (await scene.router.watch())[0].sight.stats.scheduler.running == 0
    await settle(1.1)
    told = await scene.router.watch()
    assert told[0].sight.stats.scheduler.running == 7
    assert told[0].age_s < 0.5
    assert len(first.asked) == 2


@in_scene("m0", "m1")
async def test_who_does_not_answer_holds_nobody_up_for_more_than_a_second(scene):
    first, second = Shown(scene.m0), Shown(scene.m1)
    first.values = {"running": 3}
    await scene.router.watch()
    await settle(1.1)
    first.silent = True
    began = asyncio.get_running_loop().time()
    told = await scene.router.watch()
    assert asyncio.get_running_loop().time() - began < 1.2
    assert told[0].sight.stats.scheduler.running == 3
    assert told[0].age_s > 1.0
    assert told[1].age_s <= 1.0
    assert second.asked
    await settle(1.1)
    # the link is lost while somebody waits
    look = asyncio.ensure_future(scene.router.watch())
    await settle(0.1)
    scene.m0.die()
    told = await look
    assert told[0].sight.stats.scheduler.running == 3


@in_scene("m0")
async def test_only_what_is_new_is_asked_for(scene):
    shown = Shown(scene.m0)
    before, now = picks([[1, 2]], "0", rows=5), picks([[3, 4]], "1", rows=7)
    shown.values = {"moments": (moment(1), moment(2)), "picks": (before,)}
    await scene.router.watch()
    await settle(1.1)
    shown.values = {"moments": (moment(3),), "picks": (picks([[2, 2]], "0", rows=6),)}
    (told,) = await scene.router.watch()
    assert [(one.since, one.past_picks) for one in shown.asked] == [(0, True), (2, False)]
    assert [one.number for one in told.sight.moments] == [1, 2, 3]
    assert [(one.version, one.rows) for one in told.sight.picks] == [("0", 6)]
    # the weights change before the router knows of it, and the answer has theirs alone
    await settle(1.1)
    shown.values = {"weight_version": "1", "picks": (now,)}
    (told,) = await scene.router.watch()
    assert not shown.asked[-1].past_picks
    assert [(one.version, one.rows) for one in told.sight.picks] == [("1", 7), ("0", 6)]
    # then the last counts under the old weights are asked for
    scene.m0.router.send(kv_batch(b"x" * 16, 1, True, (), ()))
    await settle(1.1)
    shown.values = {"weight_version": "1", "picks": (now, picks([[9, 9]], "0", rows=8))}
    (told,) = await scene.router.watch()
    assert shown.asked[-1].past_picks
    assert [(one.version, one.rows) for one in told.sight.picks] == [("1", 7), ("0", 8)]
    await settle(1.1)
    shown.values["moments"] = tuple([moment(number) for number in range(4, 4 + MOST_MOMENTS)])
    (told,) = await scene.router.watch()
    assert not shown.asked[-1].past_picks
    assert [one.number for one in told.sight.moments] == list(range(4, 4 + MOST_MOMENTS))


@in_scene("m0")
async def test_a_label_that_returns_with_other_weights_has_a_table_of_its_own(scene):
    shown = Shown(scene.m0)
    before, now = (
        msgspec.structs.replace(picks([cells], "0", rows=rows), namespace=name)
        for cells, rows, name in (([1, 2], 5, b"n" * 16), ([3, 4], 7, b"x" * 16))
    )
    shown.values = {"picks": (before,)}
    await scene.router.watch()
    scene.m0.router.send(kv_batch(b"x" * 16, 0, True, (), ()))
    await settle(1.1)
    shown.values = {"picks": (now, before)}
    await scene.router.watch()
    assert shown.asked[-1].past_picks, "the last counts under the old weights"
    await settle(1.1)
    shown.values = {"picks": (now,)}
    (told,) = await scene.router.watch()
    assert not shown.asked[-1].past_picks
    assert [(one.version, one.rows) for one in told.sight.picks] == [("0", 7), ("0", 5)]
    assert [(one.version, one.table) for one in experts_of([told.sight.picks])] == [("0", [[3, 4]]), ("0", [[1, 2]])]


@in_scene("m0")
async def test_another_process_at_the_address_begins_anew(scene):
    shown = Shown(scene.m0)
    shown.values = {"moments": (moment(70),), "running": 5}
    await scene.router.watch()
    scene.m0.die()
    await settle(4.0)
    again = Shown(scene.begin("m0"))
    again.values = {"moments": (moment(1),)}
    await settle(5.0)
    (told,) = await scene.router.watch()
    assert again.asked[0].since == 0
    assert [one.number for one in told.sight.moments] == [1]
    scene.router.remove(scene.m0.address)
    assert await scene.router.watch() == ()
