"""`/start_profile` and `/stop_profile`: the model's processes record what they do for some seconds.

A profile ends by itself, so that none is forgotten: `/stop_profile` waits for its files, and says where they are. It
goes to the engine's own folder: no client names a place on the server. Called by `paths.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from fdasync.request import MOST_PROFILE_S
from fdasync_http.bodies import read_json
from fdasync_http.failures import Refused
from fdasync_http.fields import Table, ignored
from fdasync_http.sglang.control import reply

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from fdasync_http.front import Front


class ProfileBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `/start_profile`.

    Attributes:
        seconds: how long the profile lasts.
    """

    RULES: ClassVar[Table] = ignored(
        "a profile lasts some seconds, has all that is recorded, and goes to the engine's own folder",
        "output_dir", "start_step", "num_steps", "activities", "profile_by_stage", "profile_stages", "with_stack",
        "record_shapes", "merge_profiles", "profile_prefix",
    )  # fmt: skip

    seconds: Annotated[float, msgspec.Meta(gt=0, le=MOST_PROFILE_S)] = 5.0


async def start_profile(request: Request, front: Front) -> Response:
    """`POST /start_profile`: begins one; 409 while one is being recorded."""
    body = await read_json(request, ProfileBody, front.config)
    if front.profile is not None and not front.profile.done():
        raise Refused(409, "a profile is being recorded; /stop_profile waits for its end")
    front.profile = asyncio.ensure_future(front.generator.profile(body.seconds))
    # counts as read: no client may ask for it
    front.profile.add_done_callback(lambda done: done.cancelled() or done.exception())
    return reply({"message": f"a profile of {body.seconds:g} s has begun", "status": "ok"})


async def stop_profile(_request: Request, front: Front) -> Response:
    """`POST /stop_profile`: waits until the last profile's files are written, and tells their folder on each engine's
    machine."""
    if front.profile is None:
        return reply({"message": "no profile was begun", "status": "ok", "folders": {}})
    # bounded by the profile's own limit
    folders = await asyncio.shield(front.profile)
    return reply({"message": "the profile is written", "status": "ok", "folders": folders})
