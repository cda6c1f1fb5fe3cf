"""How the ranks of a group reach each other's GPUs: by their memory where all have access to it, else by NCCL.

The driver is asked first; of GPUs that a rank does not see (other containers' or parts of GPUs), opening the memory
tells.

Knows GPUs; knows no models. Called by `opened_runner.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from fdasync.errors import ConfigError
from fdasync_transformers.parallel.collectives import HostCollectives

if TYPE_CHECKING:
    from fdasync.ipc.exchange import Exchange
    from fdasync_transformers.parallel.collectives import Collectives

#: "auto": by peers' memory, else by NCCL
Way = Literal["auto", "peers", "nccl"]
_WAY_OUT = 'take whole GPUs that NVLink or one PCIe switch connects, or collectives="auto"'


def join(
    exchange: Exchange, device: torch.device, way: Way, row: torch.Tensor, *, may_share: bool = False
) -> tuple[Collectives, str]:
    """What the ranks do together, and a note on how; the same way on all ranks.

    Args:
        exchange: the caller's.
        device: this rank's; it is current.
        row: see `DeviceCollectives`.
        may_share: whether several ranks may have one GPU, which then gives each a while at a time: for tests.

    Raises ConfigError where two ranks have one GPU, or "peers" is asked for and GPUs have no access to each other's
    memory; RunnerError where there is no memory, or no NCCL.
    """
    host = HostCollectives(exchange)
    # this has a number, which "cuda" has not; and from here on the device's context is there
    device = torch.zeros(1, device=device).device
    names = [name.decode() for name in host.tell(_uuid(device).encode(), "names of GPUs")]
    if len(set(names)) < len(names) and not may_share:
        problem = f"{len(names)} ranks have {len(set(names))} GPUs: {', '.join(sorted(set(names)))}"
        raise ConfigError(
            "tensor_parallel", problem, hint="each rank takes a GPU of its own; tests set runner_config.ranks_share_gpu"
        )
    without = "" if way == "nccl" else without_access(host, device, names)
    if without and way == "peers":
        raise ConfigError("runner_config.collectives", without, hint=_WAY_OUT)
    if not without and way != "nccl":
        # a machine without CUDA may have no triton either
        from fdasync.gpu.peers import OutOfReach
        from fdasync_transformers.parallel.device_collectives import DeviceCollectives

        try:
            return DeviceCollectives(exchange, device, row=row), "sums in peers' memory"
        except OutOfReach as error:
            # on all ranks alike
            if way == "peers":
                raise ConfigError("runner_config.collectives", error.problem, hint=_WAY_OUT) from error
            without = error.problem
    from fdasync.gpu.nccl import NcclGroup
    from fdasync_transformers.parallel.nccl_collectives import NcclCollectives

    group = NcclGroup(exchange, device)
    return NcclCollectives(exchange, group), f"sums by NCCL: {without or 'as asked for'}"


def without_access(host: HostCollectives, device: torch.device, names: list[str]) -> str:
    """Words that name each GPU without access to another's memory, the same on all ranks; "": all have access.

    `names` are the UUIDs of the ranks' GPUs.
    """
    own = names[host.rank]
    here = {_uuid(index): index for index in range(torch.cuda.device_count())}
    # of a GPU that this process does not see, opening its memory tells
    lacking = [
        name
        for name in names
        if name != own and name in here and not torch.cuda.can_device_access_peer(device, here[name])
    ]
    told = [said.decode() for said in host.tell(", ".join(lacking).encode()[:4000], "access to other GPUs")]
    return "; ".join(
        f"GPU {names[rank]} of rank {rank} has no access to the memory of {those}"
        for rank, those in enumerate(told)
        if those
    )


def _uuid(device: torch.device | int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
