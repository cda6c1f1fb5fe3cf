"""vLLM's calls for weights over a process group, which are served for groups of `torch.distributed` alone.

vLLM's own group is a NCCL communicator whose identifier its store carries as a pickle, and prime-rl's carries the names
of tensors as one: neither is read here. A client that names a `group_name` means a group of torch's, as SGLang's
clients make it; SkyRL's, where it has deltas, names a checkpoint's folder instead. Called by `paths.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec

from fdasync_http.bodies import decode, decode_of, read_body
from fdasync_http.calls import Call
from fdasync_http.failures import Refused
from fdasync_http.fields import Table, ignored
from fdasync_http.sglang.groups import BeginUpdate, Group
from fdasync_http.weights import local_within

if TYPE_CHECKING:
    from starlette.requests import Request

    from fdasync_http.front import Front

STATELESS = (
    "vLLM's own transfer groups are not joined: their store carries a pickle, which runs its sender's code. Make a"
    " group of torch.distributed and name it in group_name, or send a checkpoint folder to /update_weights (weight_dir)"
)


class InitInfo(Group):
    """Fields of `/init_weight_transfer_engine`.

    Attributes:
        master_address, master_port, rank_offset, world_size: as of `/init_weights_update_group`.
        group_name: of a group of `torch.distributed`; None: it is one of vLLM's own, which is refused.
        backend: "gloo" or "nccl".
        timeout_s: as of `/init_weights_update_group`; vLLM has no such field.
        local_checkpoint_dir: of SkyRL's deltas, instead of a group: folder in `pulls_root` of the checkpoint that
            `/fetch_weights` writes.
    """

    RULES: ClassVar[Table] = {
        **ignored("vLLM's own groups are refused", "packed", "packed_buffer_size_bytes", "packed_num_buffers"),
        **ignored(
            "SkyRL's, of how its own server loads", "base_model_path", "cloud_download_workers",
            "checkpoint_load_format", "multi_thread_safetensors_max_workers", "override_existing_receiver",
        ),
    }  # fmt: skip

    group_name: str | None = None
    local_checkpoint_dir: str | None = None


class _AnyInit(msgspec.Struct):
    init_info: dict[str, Any]


class InitTransfer(Call):
    """`POST /init_weight_transfer_engine`: answers once the ranks have met, or a checkpoint's folder is known. A client
    that goes away ends it, and so does `/destroy_weights_update_group` of that group.

    Attributes:
        init_info: the group.
    """

    OBJECTS: ClassVar[Any] = {"init_info": InitInfo}
    ENDS_WITH_CLIENT: ClassVar[bool] = True

    init_info: InitInfo

    @classmethod
    async def read(cls, request: Request, front: Front) -> Self:
        body = await read_body(request, front.config) or b"{}"
        told = decode(body, _AnyInit, front.config).init_info
        if not {"group_name", "local_checkpoint_dir"} & told.keys():
            # whatever else it has: a transfer of vLLM's own
            raise Refused(501, STATELESS, param="init_info.group_name", code="not_served")
        return decode_of(request, body, cls, front.config)

    async def do(self, front: Front) -> Any:
        info = self.init_info
        if info.local_checkpoint_dir is not None:
            field = "init_info.local_checkpoint_dir"
            front.local_checkpoint = local_within(front.config, info.local_checkpoint_dir, field)
        elif info.group_name is None:
            raise Refused(501, STATELESS, param="init_info.group_name", code="not_served")
        else:
            await front.generator.join_weights_group(info.named(info.group_name, front))
        return {"message": "Weight transfer initialized"}


class StartUpdate(Call):
    """`POST /start_weight_update`: no step runs until `/finish_weight_update`.

    Attributes:
        is_checkpoint_format: names are a checkpoint's, or (False) the model's: both are known here.
    """

    is_checkpoint_format: bool = True

    async def do(self, front: Front) -> Any:
        await BeginUpdate().do(front)
        return {"message": "Weight update started"}


class FinishUpdate(Call):
    """`POST /finish_weight_update`: the weights are whole.

    400 where the update was refused before it. TRL reads no status of these calls, only of its requests: these are
    refused from then on, until an update begins or brings weights, since they would be answered from other weights than
    the trainer's.

    Attributes:
        weight_version: label of the weights; None: the last one, counted up.
        expected_weights_id: as of `/update_weights`.
    """

    weight_version: str | int | None = None
    expected_weights_id: str | None = None

    async def do(self, front: Front) -> Any:
        front.update.finish()
        await front.generator.end_weight_update(self.weight_version, expected=self.expected_weights_id)
        front.update.begins()
        return {"message": "Weight update finished", "weight_version": front.generator.facts().weight_version}
