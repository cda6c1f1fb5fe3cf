"""vLLM's calls that control a server, as SkyRL, prime-rl, vime and TRL make them, and what it tells of itself.

Called by `paths.py`.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import msgspec
from starlette.responses import Response

from fdasync_http.calls import Call, reply
from fdasync_http.failures import Refused
from fdasync_http.fields import Table, ignored
from fdasync_http.pulls.serve import fetched
from fdasync_http.sglang.control import sleep, woken
from fdasync_http.sglang.groups import ends_if_refused, read_update, tensors_of
from fdasync_http.vllm.groups import STATELESS
from fdasync_http.weights import folder_within

if TYPE_CHECKING:
    from starlette.requests import Request

    from fdasync import GroupTensors, PauseMode
    from fdasync_http.front import Front

Mode = Literal["abort", "wait", "keep"]
# vLLM's words for what becomes of requests that run
_MODES: dict[Mode, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "in_place"}


class Pause(Call):
    """`POST /pause?mode=abort|wait|keep&clear_cache=true`: the engine pauses.

    Attributes:
        mode: what becomes of requests that run.
        clear_cache: cached blocks are forgotten.
    """

    QUERY: ClassVar[tuple[str, ...]] = ("mode", "clear_cache")
    BODY: ClassVar[bool] = False

    mode: Mode = "abort"
    clear_cache: bool = True

    async def do(self, front: Front) -> Any:
        await front.pause(_MODES[self.mode])
        if self.clear_cache:
            await front.generator.reset_cache()
        return {"status": "paused"}


class Resume(Call):
    """`POST /resume`: the engine goes on after a pause; also where it was not paused."""

    BODY: ClassVar[bool] = False

    async def do(self, front: Front) -> Any:
        await front.generator.resume()
        return {"status": "resumed"}


class Sleep(Call):
    """`POST /sleep?level=0|1|2&mode=abort|wait|keep`: the device's memory is free when it answers.

    Attributes:
        level: 0: a pause that `/wake_up` ends; 1: weights go to host memory; 2: weights are dropped.
        mode: what becomes of requests that run.
    """

    QUERY: ClassVar[tuple[str, ...]] = ("level", "mode")

    level: Literal[0, 1, 2] = 1
    mode: Mode = "abort"

    async def do(self, front: Front) -> Any:
        await sleep(front, self.level, self.mode, None)
        return {"status": "sleeping"}


class WakeUp(Call):
    """`POST /wake_up?tags=weights&tags=kv_cache`: the engine goes on as soon as all parts are there, unless it is
    paused. 202 where an update has to bring weights first.

    Attributes:
        tags: the parts to take back; None and []: all.
    """

    QUERY: ClassVar[tuple[str, ...]] = ("tags",)

    tags: list[Literal["weights", "kv_cache", "cuda_graph", "scheduling"]] | None = None

    async def do(self, front: Front) -> Any:
        return woken(await front.generator.wake(self.tags or None))


class AbortRequests(Call):
    """`POST /abort_requests`: requests end with what they have; without names all do.

    Attributes:
        request_ids: names of requests; (): all.
    """

    STRICT: ClassVar[bool] = False

    request_ids: list[str] = msgspec.field(default_factory=list)

    async def do(self, front: Front) -> Any:
        named = [front.abort(name) for name in self.request_ids]
        return {"status": "aborted", "aborted": sum(named) if named else front.generator.abort_all()}


class ResetPrefixCache(Call):
    """`POST /reset_prefix_cache`: cached blocks are forgotten; in a pause, requests that run keep theirs.

    Attributes:
        reset_running_requests: requests that run go back to the queue first, so that their blocks are forgotten too.
    """

    QUERY: ClassVar[tuple[str, ...]] = ("reset_running_requests",)
    STRICT: ClassVar[bool] = False

    reset_running_requests: bool = False

    async def do(self, front: Front) -> Any:
        if self.reset_running_requests:
            await front.reset_running()
        else:
            await front.generator.reset_cache()
        return {"status": "reset"}


class UpdateInfo(Call):
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
    dtype_names: list[str] = msgspec.field(default_factory=list)
    shapes: list[list[int]] = msgspec.field(default_factory=list)
    group_name: str | None = None
    packed: bool = False
    bucket_nbytes: int = 0
    checksum: bool = False


class UpdateWeights(UpdateInfo):
    """`POST /update_weights`: requests that run go on, on the KV that they have. prime-rl sends the fields themselves,
    others in `update_info`.

    Attributes:
        update_info: the fields.
    """

    OBJECTS: ClassVar[Any] = {"update_info": UpdateInfo}

    update_info: UpdateInfo | None = None

    @classmethod
    async def read(cls, request: Request, front: Front) -> Self:
        return await read_update(cls, request, front, "")

    async def do(self, front: Front) -> Any:
        info = self.update_info or self
        async with ends_if_refused(front, info.group_name or ""):
            await front.generator.update_weights(
                info.weight_version, _source_of(info, front), "keep", expected=info.expected_weights_id
            )
        front.update.begins()
        return {"status": "ok", "weight_version": front.generator.facts().weight_version}


def _source_of(info: UpdateInfo, front: Front) -> str | GroupTensors:
    """The folder, or the tensors of a group, that a client names. Raises Refused (400)."""
    named = info.weight_dir or info.weights_path
    if named:
        return folder_within(front.config, named, "weight_dir")
    if info.names is None and info.target_version is not None:
        return fetched(front, info.target_version)
    if info.names is None:
        words = "is missing; give a checkpoint folder, or tensors of a group in names, dtype_names and shapes"
        raise Refused(400, words, param="weight_dir", code="not_served")
    if info.group_name is None or info.packed:
        field = "group_name" if info.group_name is None else "packed"
        raise Refused(400, STATELESS, param=field, code="not_served")
    return tensors_of(
        info.names, info.dtype_names, info.shapes, info.group_name, info.bucket_nbytes, checksum=info.checksum
    )


async def is_paused(_request: Request, front: Front) -> Response:
    """`GET /is_paused`: whether no steps are planned, for whatever reason: as vLLM means it a sleep is one, of any
    level, and here weights that broke are, too. Of several instances: at all of them. `doing` says why."""
    load = front.generator.load()
    return reply({"is_paused": load.paused, "doing": load.doing})


async def is_sleeping(_request: Request, front: Front) -> Response:
    """`GET /is_sleeping`: whether a sleep of any level has begun and not all memory is back. Of several instances: at
    any of them. `doing` says what it does, in one word."""
    load = front.generator.load()
    return reply({"is_sleeping": load.asleep, "doing": load.doing})


async def get_world_size(_request: Request, front: Front) -> Response:
    """`GET /get_world_size`: how many instances hold the weights."""
    return reply({"world_size": front.generator.facts().num_instances})


async def server_version(_request: Request, _front: Front) -> Response:
    """`GET /version`: the version of this server. A gateway takes a server that answers for vLLM's, unless `owned_by`
    says otherwise."""
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
