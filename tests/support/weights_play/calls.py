"""The kinds of control calls that callers make where they meet, and what `model.py` says of each.

Called by `meetings.py` and `explained.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tests.support.broadcast_runner import GROUP
from tests.support.weights_play.play import FIRST, NUMBERS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fdasync import Generator
    from tests.support.weights_play.meetings import Stage
    from tests.support.weights_play.model import WeightsModel

_OTHER = NUMBERS[1]


class Call(NamedTuple):
    """One kind of call.

    Attributes:
        run: makes it.
        told: what the model says of it.
        aborts: it may end requests.
        ended_by: a call that ends this one with `WeightsRejected` where both meet.
        undone_by: a call that ends this one, which then has done nothing, where both meet.
        cut: what it may have done when it was cancelled, beside all and nothing.
        merges: at a router, it may be one with an equal call that it meets.
        is_refused: it may be, where it meets another.
    """

    run: Callable[[Any, Stage], Awaitable[Any]]
    told: Callable[[WeightsModel], str]
    aborts: bool = False
    ended_by: str = ""
    undone_by: str = ""
    cut: Callable[[WeightsModel], object] | None = None
    merges: bool = False
    is_refused: bool = True


async def _abort_all(called: Generator) -> None:
    called.abort_all()


def _update(number: int, mode: Any, *, label: int | None = None, wrong: bool = False) -> Call:
    name, expected = f"w-{number}", "f" * 32 if wrong else None
    return Call(
        lambda called, stage: called.update_weights(label, str(stage.root / name), mode, expected=expected),
        lambda model: model.folder(name, "wrong" if wrong else "not", label),
        mode == "abort",
        merges=True,
    )


def _pause(mode: Any) -> Call:
    return Call(
        lambda called, _: called.pause(mode),
        lambda model: model.pause(mode),
        mode == "abort",
        # a pause that waits is over with a resume
        undone_by="resume" if mode == "wait" else "",
        is_refused=False,
    )


def _sleep(level: Any) -> Call:
    return Call(lambda called, _: called.sleep(level), lambda model: model.sleep(level, None))


CALLS = {
    "pause": _pause("in_place"),
    "pause retract": _pause("retract"),
    "pause wait": _pause("wait"),
    "pause abort": _pause("abort"),
    "resume": Call(lambda called, _: called.resume(), lambda model: model.resume(), is_refused=False),
    "update": _update(_OTHER, "keep"),
    "update abort": _update(_OTHER, "abort"),
    "update differs": _update(_OTHER, "keep", wrong=True),
    "update again": _update(FIRST, "keep", label=0),
    "label": Call(lambda called, _: called.set_weight_version(3), lambda model: model.relabel(3), merges=True),
    "sleep": _sleep(1),
    "sleep 2": _sleep(2),
    "wake": Call(lambda called, _: called.wake(), lambda model: model.wake(None, 0)),
    "reset": Call(lambda called, _: called.reset_cache(), lambda _: "", is_refused=False),
    "abort": Call(lambda called, _: _abort_all(called), lambda _: "", aborts=True, is_refused=False),
    "begin": Call(lambda called, _: called.begin_weight_update("keep"), lambda model: model.begin()),
    "end": Call(lambda called, _: called.end_weight_update(), lambda model: model.end("not")),
    "abandon": Call(lambda called, _: called.abandon_weight_update(), lambda model: model.abandon()),
    "join": Call(
        lambda called, stage: called.join_weights_group(stage.group),
        lambda model: model.join(),
        ended_by="leave",
        # whoever joins a group again leaves it first
        cut=lambda model: model.leave(),
    ),
    "leave": Call(lambda called, _: called.leave_weights_group(GROUP.name), lambda model: model.leave()),
}
#: without updates in parts, and without groups
CONTROL = tuple(CALLS)[:15]
