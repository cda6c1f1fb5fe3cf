"""SGLang's paths that control a server: pause, abort, flush, weights from disk, versions, load.

Trainers repeat these calls until they answer 200, and add the body of any other answer to their own error. So each is
idempotent, and says what it did. Called by `application.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
from starlette.responses import Response

from fdasync.errors import ConfigError, FdasyncError
from fdasync_http.bodies import read_json
from fdasync_http.failures import JSON, Refused, refused_of
from fdasync_http.fields import Table, ignored
from fdasync_http.weights import folder_within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from fdasync import Doing, MemoryPart, PauseMode, SleepMode
    from fdasync_http.front import Front


def reply(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, media_type=JSON)


class SGLangBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What bodies of SGLang's control paths may have. Unknown keys are refused: what a client meant by one would not
    happen."""

    RULES: ClassVar[Table] = ignored("clients send SGLang's own objects as they are", "rid", "http_worker_ipc")


class PauseBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `/pause_generation`.

    Attributes:
        mode: what becomes of requests that run.
    """

    mode: Literal["abort", "retract", "in_place"] = "abort"


async def pause_generation(request: Request, front: Front) -> Response:
    """`POST /pause_generation`: no step runs when it answers; requests that come meanwhile wait."""
    mode: PauseMode = (await read_json(request, PauseBody, front.config)).mode
    await front.pause(mode)
    return reply({"message": f"paused ({mode})", "status": "ok"})


class ContinueBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `/continue_generation`."""

    RULES: ClassVar[Table] = ignored("memory is the engine's own matter", "torch_empty_cache")


async def continue_generation(request: Request, front: Front) -> Response:
    """`POST /continue_generation`."""
    await read_json(request, ContinueBody, front.config)
    await front.generator.resume()
    return reply({"message": "goes on", "status": "ok"})


async def flush_cache(_request: Request, front: Front) -> Response:
    """`GET` or `POST /flush_cache`: 200 once nothing runs and every cached block is forgotten, else 400.

    In a pause, waiting requests (new ones and retracted ones) are no hindrance. They have no blocks, and they cannot
    end before the trainer goes on.
    """
    load = front.generator.load()
    busy = min(load.running, load.live) if load.paused else load.live
    if busy:
        words = f"the cache was not flushed: {busy} requests are live; abort them, or ask again"
        raise Refused(400, words, code="busy")
    await front.generator.reset_cache()
    return Response("Cache flushed.\n", media_type="text/plain")


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `/abort_request`.

    Attributes:
        rid: name of a request; "": none.
        abort_all: every request.
        prefix: `rid` is the beginning of the names.
    """

    RULES: ClassVar[Table] = ignored("an abort has one message", "abort_message")

    rid: str | None = ""
    abort_all: bool = False
    prefix: bool = False


async def abort_request(request: Request, front: Front) -> Response:
    """`POST /abort_request`: 200 at once, whether there was such a request or not."""
    body = await read_json(request, AbortBody, front.config)
    if body.abort_all:
        front.generator.abort_all()
    elif body.rid and body.prefix:
        front.generator.abort_all(body.rid)
    elif body.rid:
        front.abort(body.rid)
    else:
        raise Refused(400, "rid or abort_all is needed", param="rid")
    return Response()


class MemoryBody(SGLangBody):
    """Body of `/release_memory_occupation` and `/resume_memory_occupation`.

    Attributes:
        tags: the parts that are meant; None and []: all.
    """

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None


async def release_memory_occupation(request: Request, front: Front) -> Response:
    """`POST /release_memory_occupation`: the device's memory is free when it answers. Weights are kept in host memory,
    so that a client that pushes none finds the old ones again; requests wait, and go on after it."""
    body = await read_json(request, MemoryBody, front.config)
    await sleep(front, 1, "keep", body.tags or None)
    return reply({"message": "memory is released", "status": "ok"})


async def resume_memory_occupation(request: Request, front: Front) -> Response:
    """`POST /resume_memory_occupation`: the engine goes on as soon as all parts are there, unless it is paused. 202
    where an update has to bring weights first."""
    body = await read_json(request, MemoryBody, front.config)
    return woken(await front.generator.wake(body.tags), "ok")


# what a wake has done, by the engine's state after it
_WOKEN: dict[Doing, str] = {
    "running": "memory is taken back",
    "paused": "memory is taken back; requests wait for the end of a pause",
    "waits_for_weights": "memory is taken back, and an update has to bring the weights: requests wait for it",
    "broken": "memory is taken back, and the weights are broken: an update has to mend them",
    "updating": "memory is taken back; an update of weights is under way",
    "asleep": "memory of these parts is taken back, that of others is still released: requests wait for it",
    "waking": "another wake is under way",
}


def woken(doing: Doing, status: str = "") -> Response:
    """The answer after a wake: 202 where weights that were dropped are still missing, which clients take for 200.

    Args:
        status: of the dialect; "": "awake" where it is, else what it does.
    """
    awake = "awake" if doing in ("running", "paused") else doing
    told = {"status": status or awake, "message": _WOKEN[doing], "doing": doing}
    return reply(told, 202 if doing == "waits_for_weights" else 200)


async def sleep(front: Front, level: Literal[0, 1, 2], mode: SleepMode, tags: Sequence[MemoryPart] | None) -> None:
    """Raises Refused with status 501 where the engine's memory cannot be released, with the reason."""
    try:
        await front.generator.sleep(level, mode, tags=tags)
    except ConfigError as error:
        raise Refused(501, str(error), code="not_served") from error


class UpdateBody(SGLangBody):
    """Body of `/update_weights_from_disk`.

    Attributes:
        model_path: a checkpoint folder within `weights_root`.
        load_format: only None and "auto" are served.
        weight_version: label of these weights; None: the last one, counted up.
        abort_all_requests: requests that run end; else they go on, on the KV that they have.
        expected_weights_id: fingerprint that the weights must have once they are in place, 32 hex digits (503 where it
            is another, and no step uses them); None: any.
    """

    RULES: ClassVar[Table] = {
        **SGLangBody.RULES,
        **ignored("cached blocks of other weights match nothing", "flush_cache"),
        **ignored("memory is the engine's own matter", "torch_empty_cache", "recapture_cuda_graph"),
        **ignored("an update pauses and goes on by itself", "keep_pause", "is_async", "token_step", "manifest"),
        **ignored("abort_all_requests says it", "abort_all_request"),
    }

    model_path: str
    load_format: str | None = None
    weight_version: str | int | None = None
    abort_all_requests: bool = False
    expected_weights_id: str | None = None


class Updated(msgspec.Struct, frozen=True):
    """The answer to every update, and to a pull.

    Attributes:
        success: the new weights are in use, or were pulled.
        message: why not, or which they are.
        num_paused_requests: always 0: no request is held back for an update.
    """

    success: bool
    message: str
    num_paused_requests: int = 0


async def update_weights_from_disk(request: Request, front: Front) -> Response:
    """`POST /update_weights_from_disk`: 400 with `success` false where the weights are not taken; then the old ones are
    in use, under their version."""
    body = await read_json(request, UpdateBody, front.config)
    try:
        if body.load_format not in (None, "auto"):
            raise Refused(400, f"load_format {body.load_format!r} is not served; send none", param="load_format")
        folder = folder_within(front.config, body.model_path, "model_path")
        mode: Literal["abort", "keep"] = "abort" if body.abort_all_requests else "keep"
        await front.generator.update_weights(body.weight_version, folder, mode, expected=body.expected_weights_id)
        front.update.begins()
    except (Refused, FdasyncError) as error:
        refused = refused_of(error)
        return reply(Updated(False, refused.message), refused.status)
    return reply(Updated(True, f"version {front.generator.facts().weight_version}"))


class VersionBody(SGLangBody):
    """Body of `/update_weight_version`.

    Attributes:
        new_version: label of the weights in use from now on.
        abort_all_requests: requests that run end, once the label is taken.
    """

    new_version: str | int
    abort_all_requests: bool = True


async def update_weight_version(request: Request, front: Front) -> Response:
    """`POST /update_weight_version`: names the weights in use."""
    body = await read_json(request, VersionBody, front.config)
    await front.generator.set_weight_version(body.new_version)
    # a label that is refused ends nothing
    if body.abort_all_requests:
        front.generator.abort_all()
    version = front.generator.facts().weight_version
    return reply({"success": True, "message": f"version {version}", "new_version": version})


def _loads(front: Front) -> list[dict[str, Any]]:
    load = front.generator.load()
    # instances tell a router what runs once a heartbeat; what is live here is known at once
    running = min(load.running, load.live)
    return [
        {
            "dp_rank": 0,
            "num_reqs": load.live,
            "num_total_reqs": load.live,
            "num_running_reqs": running,
            "num_waiting_reqs": load.live - running,
            "num_used_tokens": load.used_tokens,
            "max_total_num_tokens": load.capacity_tokens,
            "token_usage": load.used_tokens / max(load.capacity_tokens, 1),
        }
    ]


async def v1_loads(_request: Request, front: Front) -> Response:
    """`GET /v1/loads`: requests that run and wait."""
    return reply({"loads": _loads(front)})


async def get_load(_request: Request, front: Front) -> Response:
    """`GET /get_load`: the same as a bare list."""
    return reply(_loads(front))
