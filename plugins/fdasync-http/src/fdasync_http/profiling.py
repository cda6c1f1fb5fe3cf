"""`/start_profile` and `/stop_profile`: the model's processes record what they do for some seconds.

A profile ends by itself, so that none is forgotten: `/stop_profile` waits for its files, and says where they are. It
goes to the engine's own folder: no client names a place on the server. Called by `paths.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from fdasync.request import MOST_PROFILE_S
from fdasync_http.calls import Call
from fdasync_http.failures import Refused
from fdasync_http.fields import Table, ignored

if TYPE_CHECKING:
    from fdasync_http.front import Front


class StartProfile(Call):
    """`POST /start_profile`: begins one; 409 while one is being recorded.

    Attributes:
        seconds: how long the profile lasts.
    """

    STRICT: ClassVar[bool] = False
    RULES: ClassVar[Table] = ignored(
        "a profile lasts some seconds, has all that is recorded, and goes to the engine's own folder",
        "output_dir", "start_step", "num_steps", "activities", "profile_by_stage", "profile_stages", "with_stack",
        "record_shapes", "merge_profiles", "profile_prefix",
    )  # fmt: skip

    seconds: Annotated[float, msgspec.Meta(gt=0, le=MOST_PROFILE_S)] = 5.0

    async def do(self, front: Front) -> Any:
        if front.profile is not None and not front.profile.done():
            raise Refused(409, "a profile is being recorded; /stop_profile waits for its end")
        front.profile = asyncio.ensure_future(front.generator.profile(self.seconds))
        # counts as read: no client may ask for it
        front.profile.add_done_callback(lambda done: done.cancelled() or done.exception())
        return {"message": f"a profile of {self.seconds:g} s has begun", "status": "ok"}


class StopProfile(Call):
    """`POST /stop_profile`: waits until the last profile's files are written, and tells their folder on each engine's
    machine."""

    STRICT: ClassVar[bool] = False
    BODY: ClassVar[bool] = False

    async def do(self, front: Front) -> Any:
        if front.profile is None:
            return {"message": "no profile was begun", "status": "ok", "folders": {}}
        # bounded by the profile's own limit
        folders = await asyncio.shield(front.profile)
        return {"message": "the profile is written", "status": "ok", "folders": folders}
