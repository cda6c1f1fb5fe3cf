"""SGLang's paths for weights over a trainer's process group: join, receive, leave, and an update in parts.

The group is one of `torch.distributed`'s, under `group_name`, as slime, Miles and AReaL make it; tensors come by a
broadcast each. What a path says twice does no harm, but for a second update while one is open, which is 409. Called by
`application.py`.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from fdasync import GroupTensors, TensorMeta, WeightsGroup
from fdasync.errors import FdasyncError, UpdateUnderWay
from fdasync_http.bodies import decode, decode_of, read_body, read_json
from fdasync_http.failures import Refused, refused_of
from fdasync_http.fields import Table, ignored
from fdasync_http.replies import whole
from fdasync_http.sglang.control import SGLangBody, Updated, reply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from starlette.requests import Request
    from starlette.responses import Response

    from fdasync_http.front import Front

_NAME = "weight_update_group"
# SGLang's of modules, and Miles' of models ("all", "target")
_SELECTED: Table = {**SGLangBody.RULES, **ignored("the names of tensors say it", "selector")}


class JoinBody(SGLangBody):
    """Body of `/init_weights_update_group`.

    Attributes:
        master_address, master_port: of the trainer's store.
        rank_offset: rank of the first worker here.
        world_size: ranks of the group, the trainer's among them.
        group_name: of the group.
        backend: "gloo" or "nccl".
        timeout_s: longest that the ranks may take to meet, and that the next bytes of an update may take to come, in
            seconds; None: the server's `group_s`. SGLang has no such field.
    """

    master_address: str
    master_port: int | str
    rank_offset: int
    world_size: int
    group_name: str = _NAME
    backend: str = "nccl"
    timeout_s: float | None = None


def port_of(value: int | str) -> int:
    """A port that a client sends as a number or as its digits. Raises Refused (400)."""
    if isinstance(value, int):
        return value
    if not value.isdecimal() or len(value) > 5:
        raise Refused(400, f"{value!r:.50} is no port", param="master_port")
    return int(value)


def backend_of(value: str) -> Literal["gloo", "nccl"]:
    """Raises Refused (400) for a backend that is not served."""
    if value == "gloo" or value == "nccl":
        return "gloo" if value == "gloo" else "nccl"
    raise Refused(400, f"backend {value!r:.50} is none of gloo, nccl", param="backend")


async def told(work: Awaitable[None], front: Front) -> Response:
    """The answer of SGLang's updates: 400 or another status, with `success` false, where the work fails."""
    try:
        await work
    except (Refused, FdasyncError) as error:
        refused = refused_of(error)
        return reply(Updated(False, refused.message), refused.status)
    return reply(Updated(True, f"version {front.generator.facts().weight_version}"))


async def init_weights_update_group(request: Request, front: Front) -> Response:
    """`POST /init_weights_update_group`: answers once the ranks have met, the trainer's among them. A client that goes
    away ends it, and so does `/destroy_weights_update_group` of that group, which its answer then says."""
    body = await read_json(request, JoinBody, front.config)
    group = WeightsGroup(
        name=body.group_name,
        address=body.master_address,
        port=port_of(body.master_port),
        world_size=body.world_size,
        rank=body.rank_offset,
        backend=backend_of(body.backend),
        timeout_s=front.config.group_s if body.timeout_s is None else body.timeout_s,
    )
    return await whole(request, told(front.generator.join_weights_group(group), front))


class LeaveBody(SGLangBody):
    """Body of `/destroy_weights_update_group`.

    Attributes:
        group_name: of the group.
    """

    group_name: str = _NAME


async def destroy_weights_update_group(request: Request, front: Front) -> Response:
    """`POST /destroy_weights_update_group`: 200 where there is no such group, too. A join of it that is under way ends,
    and an open update in parts is over: a trainer that was started again need not wait for its deadline."""
    body = await read_json(request, LeaveBody, front.config)

    async def leave() -> None:
        front.update.begins()
        await front.generator.abandon_weight_update()
        await front.generator.leave_weights_group(body.group_name)

    return await told(leave(), front)


class ReceiveBody(SGLangBody):
    """Body of `/update_weights_from_distributed`.

    Attributes:
        names, dtypes, shapes: of the tensors, in the order in which they come.
        group_name: of the group.
        weight_version: label of these weights; None: the last one, counted up.
        load_format: only None and "auto" are served: a broadcast for each tensor.
        abort_all_requests: requests that run end; else they go on, on the KV that they have.
        expected_weights_id: as of `/update_weights_from_disk`; not of a part of an update.
        bucket_nbytes, checksum: as in `fdasync.GroupTensors`, for senders of `fdasync_transformers`.
    """

    RULES: ClassVar[Table] = {
        **_SELECTED,
        **ignored("cached blocks of other weights match nothing", "flush_cache"),
        **ignored("memory is the engine's own matter", "torch_empty_cache"),
    }

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = _NAME
    weight_version: str | int | None = None
    load_format: str | None = None
    abort_all_requests: bool = False
    expected_weights_id: str | None = None
    bucket_nbytes: int = 0
    checksum: bool = False


class _Named(msgspec.Struct):
    """The group that a body names; also read of a body that is wrong otherwise."""

    group_name: str | None = None


@asynccontextmanager
async def ends_if_refused(front: Front, name: str) -> AsyncIterator[None]:
    """Around an update. Where it is refused, what began ends: an open update in parts, and the group, in whose
    broadcasts the trainer waits for the ranks here. A second update while one is under way ends nothing.

    Args:
        name: of the group; "": there is none, or the update is of no group.
    """
    try:
        yield
    except UpdateUnderWay:
        raise
    except (Refused, FdasyncError) as error:
        front.update.refuse(refused_of(error).message)
        with suppress(FdasyncError):
            await front.generator.abandon_weight_update()
            if name:
                await front.generator.leave_weights_group(name)
        raise


def group_in(body: bytes, front: Front) -> str:
    """The name of the group that a body names, whatever else it has; SGLang's where it names none."""
    with suppress(Refused):
        return decode(body, _Named, front.config).group_name or _NAME
    return _NAME


def tensors_of(
    names: list[str], dtypes: list[str], shapes: list[list[int]], group: str, bucket_nbytes: int, *, checksum: bool
) -> GroupTensors:
    """The tensors that a client describes in three lists. Raises Refused (400)."""
    if not len(names) == len(dtypes) == len(shapes):
        raise Refused(400, f"{len(names)} names, {len(dtypes)} dtypes, {len(shapes)} shapes", param="names")
    metas = [
        TensorMeta(name, dtype.removeprefix("torch."), tuple(shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]
    return GroupTensors(group=group, tensors=tuple(metas), bucket_nbytes=bucket_nbytes, checksum=checksum)


async def update_weights_from_distributed(request: Request, front: Front) -> Response:
    """`POST /update_weights_from_distributed`: answers once the tensors are in their places. Several calls are one
    update where a pause or `/begin_weight_update` came before them."""
    sent = await read_body(request, front.config) or b"{}"

    group = group_in(sent, front)
    async with ends_if_refused(front, group):
        body = decode_of(request, sent, ReceiveBody, front.config)

    async def receive() -> None:
        async with ends_if_refused(front, group):
            await _receive(body, front)
        front.update.begins()

    return await told(receive(), front)


async def _receive(body: ReceiveBody, front: Front) -> None:
    if body.load_format not in (None, "auto"):
        problem = f"load_format {body.load_format!r:.50} is not served over a group; send tensors one by one"
        raise Refused(400, problem, param="load_format")
    part = tensors_of(body.names, body.dtypes, body.shapes, body.group_name, body.bucket_nbytes, checksum=body.checksum)
    mode: Literal["abort", "keep"] = "abort" if body.abort_all_requests else "keep"
    await front.generator.update_weights(body.weight_version, part, mode, expected=body.expected_weights_id)


class BeginBody(SGLangBody):
    """Body of `/begin_weight_update`."""

    RULES: ClassVar[Table] = _SELECTED


async def begin_weight_update(request: Request, front: Front) -> Response:
    """`POST /begin_weight_update`: no step runs until `/end_weight_update`."""
    await read_json(request, BeginBody, front.config)

    async def begin() -> None:
        await front.generator.begin_weight_update("keep")
        front.update.begins()

    return await told(begin(), front)


class EndBody(SGLangBody):
    """Body of `/end_weight_update`.

    Attributes:
        weight_version: label of the weights; None: that of the last part that named one.
        expected_weights_id: as of `/update_weights_from_disk`.
    """

    RULES: ClassVar[Table] = _SELECTED

    weight_version: str | int | None = None
    expected_weights_id: str | None = None


async def end_weight_update(request: Request, front: Front) -> Response:
    """`POST /end_weight_update`: the weights are whole."""
    body = await read_json(request, EndBody, front.config)
    work = front.generator.end_weight_update(body.weight_version, expected=body.expected_weights_id)
    return await told(work, front)
