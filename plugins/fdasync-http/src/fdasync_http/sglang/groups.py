"""SGLang's calls for weights over a trainer's process group: join, receive, leave, and an update in parts.

The group is one of `torch.distributed`'s, under `group_name`, as slime, Miles and AReaL make it; tensors come by a
broadcast each. What a path says twice does no harm, but for a second update while one is open, which is 409. vLLM's
calls for groups are made of the same parts. Called by `paths.py`.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import msgspec

from fdasync import GroupTensors, TensorMeta, WeightsGroup
from fdasync.errors import FdasyncError, UpdateUnderWay
from fdasync_http.bodies import decode, decode_of, read_body
from fdasync_http.calls import UpdateCall
from fdasync_http.failures import Refused, refused_of
from fdasync_http.fields import Table, ignored
from fdasync_http.sglang.control import OWN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

    from fdasync_http.calls import Call
    from fdasync_http.front import Front

CallT = TypeVar("CallT", bound="Call")

_NAME = "weight_update_group"
# SGLang's of modules, and Miles' of models ("all", "target")
_SELECTED: Table = {**OWN, **ignored("the names of tensors say it", "selector")}


class Group(UpdateCall):
    """A trainer's group, as a client describes it.

    Attributes:
        master_address, master_port: of the trainer's store.
        rank_offset: rank of the first worker here.
        world_size: ranks of the group, the trainer's among them.
        backend: "gloo" or "nccl".
        timeout_s: longest that the ranks may take to meet, and that the next bytes of an update may take to come, in
            seconds; None: the server's `group_s`. Neither SGLang nor vLLM has such a field.
    """

    master_address: str = ""
    master_port: int | str = 0
    rank_offset: int = 1
    world_size: int = 0
    backend: str = "nccl"
    timeout_s: float | None = None

    def named(self, name: str, front: Front) -> WeightsGroup:
        """The group. Raises Refused (400)."""
        return WeightsGroup(
            name=name,
            address=self.master_address,
            port=port_of(self.master_port),
            world_size=self.world_size,
            rank=self.rank_offset,
            backend=backend_of(self.backend),
            timeout_s=front.config.group_s if self.timeout_s is None else self.timeout_s,
        )


class InitGroup(Group):
    """`POST /init_weights_update_group`: answers once the ranks have met, the trainer's among them. A client that goes
    away ends it, and so does `/destroy_weights_update_group` of that group, which its answer then says.

    Attributes:
        master_address, master_port, rank_offset, world_size: see `Group`.
        group_name: of the group.
    """

    RULES: ClassVar[Table] = OWN
    ENDS_WITH_CLIENT: ClassVar[bool] = True

    master_address: str
    master_port: int | str
    rank_offset: int
    world_size: int
    group_name: str = _NAME

    @classmethod
    async def read(cls, request: Request, front: Front) -> Self:
        call = await super().read(request, front)
        # what cannot be a group is refused as any body is
        call.named(call.group_name, front)
        return call

    async def do(self, front: Front) -> Any:
        await front.generator.join_weights_group(self.named(self.group_name, front))


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
    raise Refused(400, f"{value!r:.50} is none of gloo, nccl", param="backend")


class DestroyGroup(UpdateCall):
    """`POST /destroy_weights_update_group`: 200 where there is no such group, too. A join of it that is under way ends,
    and an open update in parts is over: a trainer that was started again need not wait for its deadline.

    Attributes:
        group_name: of the group.
    """

    RULES: ClassVar[Table] = OWN

    group_name: str = _NAME

    async def do(self, front: Front) -> Any:
        front.update.begins()
        await front.generator.abandon_weight_update()
        await front.generator.leave_weights_group(self.group_name)


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


class _Named(msgspec.Struct):
    """The group that a body names; also read of a body that is wrong otherwise."""

    update_info: dict[str, Any] | None = None
    group_name: Any = None


def group_in(body: bytes, front: Front, otherwise: str) -> str:
    """The name of the group that a body names, whatever else it has; `otherwise` where it names none."""
    named = _Named()
    with suppress(Refused):
        named = decode(body, _Named, front.config)
    name = named.group_name if named.update_info is None else named.update_info.get("group_name")
    return name if isinstance(name, str) and name else otherwise


async def read_update(kind: type[CallT], request: Request, front: Front, group: str) -> CallT:
    """The call of an update; where it is refused, so is the update. `group`: of a body that names none."""
    sent = await read_body(request, front.config) or b"{}"
    async with ends_if_refused(front, group_in(sent, front, group)):
        return decode_of(request, sent, kind, front.config)


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


class ReceiveWeights(UpdateCall):
    """`POST /update_weights_from_distributed`: answers once the tensors are in their places. Several calls are one
    update where a pause or `/begin_weight_update` came before them.

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

    @classmethod
    async def read(cls, request: Request, front: Front) -> Self:
        return await read_update(cls, request, front, _NAME)

    async def do(self, front: Front) -> Any:
        async with ends_if_refused(front, self.group_name or _NAME):
            if self.load_format not in (None, "auto"):
                problem = f"{self.load_format!r:.50} is not served over a group; send tensors one by one"
                raise Refused(400, problem, param="load_format")
            part = tensors_of(
                self.names, self.dtypes, self.shapes, self.group_name, self.bucket_nbytes, checksum=self.checksum
            )
            mode: Literal["abort", "keep"] = "abort" if self.abort_all_requests else "keep"
            await front.generator.update_weights(self.weight_version, part, mode, expected=self.expected_weights_id)
        front.update.begins()


class BeginUpdate(UpdateCall):
    """`POST /begin_weight_update`: no step runs until `/end_weight_update`."""

    RULES: ClassVar[Table] = _SELECTED

    async def do(self, front: Front) -> Any:
        await front.generator.begin_weight_update("keep")
        front.update.begins()


class EndUpdate(UpdateCall):
    """`POST /end_weight_update`: the weights are whole.

    Attributes:
        weight_version: label of the weights; None: that of the last part that named one.
        expected_weights_id: as of `/update_weights_from_disk`.
    """

    RULES: ClassVar[Table] = _SELECTED

    weight_version: str | int | None = None
    expected_weights_id: str | None = None

    async def do(self, front: Front) -> Any:
        await front.generator.end_weight_update(self.weight_version, expected=self.expected_weights_id)
