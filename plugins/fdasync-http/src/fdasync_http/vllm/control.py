"""vLLM's paths that control a server, as SkyRL, prime-rl, vime and TRL call them. Called by `application.py`."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
from starlette.responses import Response

from fdasync_http.bodies import decode, decode_of, read_body, read_json
from fdasync_http.failures import Refused
from fdasync_http.fields import Table, ignored
from fdasync_http.pulls.serve import fetched
from fdasync_http.sglang.control import reply, woken
from fdasync_http.sglang.control import sleep as fall_asleep
from fdasync_http.sglang.groups import ends_if_refused, tensors_of
from fdasync_http.vllm.groups import STATELESS
from fdasync_http.weights import folder_within

if TYPE_CHECKING:
    from starlette.requests import Request

    from fdasync import GroupTensors, PauseMode
    from fdasync_http.front import Front

# vLLM's words for what becomes of requests that run
_MODES: dict[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "in_place"}
_TRUE, _FALSE = ("true", "1", ""), ("false", "0")


def _flag(request: Request, name: str, default: bool) -> bool:
    value = request.query_params.get(name)
    if value is None:
        return default
    if value.lower() not in (*_TRUE, *_FALSE):
        raise Refused(400, f"{name}={value!r} is neither true nor false", param=name)
    return value.lower() in _TRUE


async def pause(request: Request, front: Front) -> Response:
    """`POST /pause?mode=abort|wait|keep&clear_cache=true`."""
    mode = request.query_params.get("mode", "abort")
    if mode not in _MODES:
        raise Refused(400, f"mode {mode!r} is none of {', '.join(_MODES)}", param="mode")
    clear = _flag(request, "clear_cache", True)
    await front.pause(_MODES[mode])
    if clear:
        await front.generator.reset_cache()
    return reply({"status": "paused"})


async def resume(_request: Request, front: Front) -> Response:
    """`POST /resume`."""
    await front.generator.resume()
    return reply({"status": "resumed"})


async def is_paused(_request: Request, front: Front) -> Response:
    """`GET /is_paused`: whether no steps are planned, for whatever reason: as vLLM means it a sleep is one, of any
    level, and here weights that broke are, too. Of several instances: at all of them. `doing` says why."""
    load = front.generator.load()
    return reply({"is_paused": load.paused, "doing": load.doing})


class SleepBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `/sleep`, for clients that send a body; the query's words go first.

    Attributes:
        level: 0: a pause that `/wake_up` ends; 1: weights go to host memory; 2: weights are dropped.
        mode: what becomes of requests that run.
    """

    level: Literal[0, 1, 2] = 1
    mode: Literal["abort", "wait", "keep"] = "abort"


async def sleep(request: Request, front: Front) -> Response:
    """`POST /sleep?level=0|1|2&mode=abort|wait|keep`: the device's memory is free when it answers."""
    body = await read_json(request, SleepBody, front.config)
    level, mode = request.query_params.get("level", str(body.level)), request.query_params.get("mode", body.mode)
    if level not in ("0", "1", "2"):
        raise Refused(400, f"level {level!r} is none of 0, 1, 2", param="level")
    if mode not in _MODES:
        raise Refused(400, f"mode {mode!r} is none of {', '.join(_MODES)}", param="mode")
    # both were looked at
    await fall_asleep(front, int(level), mode, None)  # type: ignore[arg-type]
    return reply({"status": "sleeping"})


class WakeBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `/wake_up`, for clients that send a body; the query's words go first.

    Attributes:
        tags: the parts to take back; None and []: all.
    """

    tags: list[Literal["weights", "kv_cache", "cuda_graph", "scheduling"]] | None = None


async def wake_up(request: Request, front: Front) -> Response:
    """`POST /wake_up?tags=weights&tags=kv_cache`: the engine goes on as soon as all parts are there, unless it is
    paused. 202 where an update has to bring weights first."""
    body = await read_json(request, WakeBody, front.config)
    tags: list[Any] | None = request.query_params.getlist("tags") or body.tags or None
    return woken(await front.generator.wake(tags))


async def is_sleeping(_request: Request, front: Front) -> Response:
    """`GET /is_sleeping`: whether a sleep of any level has begun and not all memory is back. Of several instances: at
    any of them. `doing` says what it does, in one word."""
    load = front.generator.load()
    return reply({"is_sleeping": load.asleep, "doing": load.doing})


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `/abort_requests`.

    Attributes:
        request_ids: names of requests; (): all.
    """

    request_ids: list[str] = []


async def abort_requests(request: Request, front: Front) -> Response:
    """`POST /abort_requests`."""
    body = await read_json(request, AbortBody, front.config)
    named = [front.abort(name) for name in body.request_ids]
    return reply({"status": "aborted", "aborted": sum(named) if named else front.generator.abort_all()})


class ResetBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `/reset_prefix_cache`.

    Attributes:
        reset_running_requests: requests that run go back to the queue first, so that their blocks are forgotten too.
    """

    reset_running_requests: bool = False


async def reset_prefix_cache(request: Request, front: Front) -> Response:
    """`POST /reset_prefix_cache`; in a pause, requests that run keep their blocks."""
    body = await read_json(request, ResetBody, front.config)
    if body.reset_running_requests or _flag(request, "reset_running_requests", False):
        await front.reset_running()
    else:
        await front.generator.reset_cache()
    return reply({"status": "reset"})


class UpdateInfo(msgspec.Struct, forbid_unknown_fields=True):
    """Fields of `/update_weights`.

    Attributes:
        weight_dir, weights_path: a checkpoint folder within `weights_root`.
        target_version: what `/fetch_weights` has brought last, as SkyRL sends it.
        weight_version: label of these weights; None: the last one, counted up.
        expected_weights_id: fingerprint that the weights must have once they are in place, 32 hex digits (503 where it
            is another, and no step uses them); None: any.
        names, dtype_names, shapes: of tensors that come by a group, in their order.
        group_name: of a group of `torch.distributed` that was joined by `/init_weight_transfer_engine`.
        packed: vLLM's own buckets, which are refused.
        bucket_nbytes, checksum: as in `fdasync.GroupTensors`.
    """

    RULES: ClassVar[Table] = {
        **ignored("without packed they mean nothing", "packed_buffer_size_bytes", "packed_num_buffers"),
        **ignored("target_version says enough", "version", "sync_dir", "uri", "update_kind"),
    }

    weight_dir: str | None = None
    weights_path: str | None = None
    target_version: int | None = None
    weight_version: str | int | None = None
    expected_weights_id: str | None = None
    names: list[str] | None = None
    dtype_names: list[str] = []
    shapes: list[list[int]] = []
    group_name: str | None = None
    packed: bool = False
    bucket_nbytes: int = 0
    checksum: bool = False


class UpdateBody(UpdateInfo, forbid_unknown_fields=True):
    """Body of `/update_weights`: prime-rl sends the fields themselves, others in `update_info`.

    Attributes:
        update_info: the fields.
    """

    OBJECTS: ClassVar[Any] = {"update_info": UpdateInfo}

    update_info: UpdateInfo | None = None


async def update_weights(request: Request, front: Front) -> Response:
    """`POST /update_weights`: requests that run go on, on the KV that they have."""
    sent = await read_body(request, front.config) or b"{}"
    async with ends_if_refused(front, _group_in(sent, front)):
        body = decode_of(request, sent, UpdateBody, front.config)
        info = body.update_info or body
        await front.generator.update_weights(
            info.weight_version, _source_of(info, front), "keep", expected=info.expected_weights_id
        )
    front.update.begins()
    return reply({"status": "ok", "weight_version": front.generator.facts().weight_version})


class _Named(msgspec.Struct):
    """The group that a body names; also read of a body that is wrong otherwise."""

    update_info: dict[str, Any] | None = None
    group_name: Any = None


def _group_in(body: bytes, front: Front) -> str:
    """The name of the group that a body names, whatever else it has; "": it names none."""
    named = _Named()
    with suppress(Refused):
        named = decode(body, _Named, front.config)
    name = named.group_name if named.update_info is None else named.update_info.get("group_name")
    return name if isinstance(name, str) else ""


def _source_of(info: UpdateInfo, front: Front) -> str | GroupTensors:
    """The folder, or the tensors of a group, that a client names. Raises Refused (400)."""
    named = info.weight_dir or info.weights_path
    if named:
        return folder_within(front.config, named, "weight_dir")
    if info.names is None and info.target_version is not None:
        return fetched(front, info.target_version)
    if info.names is None:
        words = "name a checkpoint folder in weight_dir, or tensors of a group in names, dtype_names and shapes"
        raise Refused(400, words, param="weight_dir", code="not_served")
    if info.group_name is None or info.packed:
        field = "group_name" if info.group_name is None else "packed"
        raise Refused(400, STATELESS, param=field, code="not_served")
    return tensors_of(
        info.names, info.dtype_names, info.shapes, info.group_name, info.bucket_nbytes, checksum=info.checksum
    )


async def get_world_size(_request: Request, front: Front) -> Response:
    """`GET /get_world_size`: how many instances hold the weights."""
    return reply({"world_size": front.generator.facts().num_instances})


async def weight_info(_request: Request, front: Front) -> Response:
    """`GET /weight_info`."""
    return reply({"weight_version": front.generator.facts().weight_version})


async def server_version(_request: Request, _front: Front) -> Response:
    """`GET /version`. A gateway takes a server that answers for vLLM's, unless `owned_by` says otherwise."""
    return reply({"version": f"fdasync {version('fdasync')}"})


async def ping(_request: Request, _front: Front) -> Response:
    """`GET` or `POST /ping`, `/liveness`: the front works, whatever the engine does."""
    return Response()


async def workers(request: Request, front: Front) -> Response:
    """`GET /workers`: this front, as a router with one worker would tell, at the address where the client found it."""
    entry: dict[str, Any] = {
        "id": "0",
        "url": str(request.base_url).rstrip("/"),
        "model_id": front.model,
        "worker_type": "regular",
        "is_healthy": True,
    }
    return reply({"workers": [entry]})
