"""Which GPUs the worker processes of one engine take: found, locked, and told to each worker by its environment.

Rank r of a group sees the GPUs of all ranks, its own one first (`cuda:0`), the others behind it in the order of ranks;
all of them, so that ranks can open each other's device memory; and behind these all others that this process sees,
where instances read each other's devices. Loads no driver. `engine/runtime.py` makes it and hands
the environments to the workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fdasync.errors import ConfigError
from fdasync.ipc.gpu_locks import GpuLocks, held_by
from fdasync.ipc.gpus import Gpu, counted, environment_of, find, visible

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_FEWER = "lower tensor_parallel (--tp), start fewer instances, or compute on the CPU (--device cpu)"
_SHARE = "end that one, take other GPUs, or have both share them (share_gpus, --share-gpus)"


class Placement:
    """See the module.

    Args:
        wanted: a GPU for each rank, in order; "auto": the first that no other engine holds, and none on a machine that
            has no GPU.
        ranks: how many there are.
        shares: other engines that share may have the same GPUs.
        sees_all: the workers see GPUs of others too, behind their own; they only map memory of these.

    Attributes:
        gpus: of the ranks, in order; () before `take`, and where there are none.
    """

    def __init__(
        self,
        wanted: Sequence[int | str] | Literal["auto"],
        ranks: int,
        *,
        shares: bool,
        sees_all: bool = False,
    ) -> None:
        """Raises ConfigError where a GPU is not there, or there are not as many as ranks."""
        self.gpus: tuple[Gpu, ...] = ()
        self._ranks = ranks
        self._sees_all = sees_all
        self._named = None if wanted == "auto" else find(wanted)
        if self._named is not None and len(self._named) != ranks:
            # lists of several instances are divided by now
            problem = f"names {counted(len(self._named))}, and config.tensor_parallel is {ranks}"
            raise ConfigError("config.gpus", problem, limit=ranks, hint="name one for each rank")
        self._locks = GpuLocks(shares=shares)

    def take(self) -> None:
        """Lock the GPUs until `close`. Raises ConfigError naming a GPU that another engine holds, and locks none."""
        try:
            self.gpus = self._take_free() if self._named is None else self._take_named(self._named)
        except BaseException:
            self.close()
            raise

    def _take_named(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        for gpu in gpus:
            if not self._locks.take(gpu):
                raise ConfigError("config.gpus", f"{gpu} is held by {held_by(gpu)}", hint=_SHARE)
        return tuple(gpus)

    def _take_free(self) -> tuple[Gpu, ...]:
        seen = visible()
        if seen is None:
            hint = "name them in config.gpus (--gpus), or compute on the CPU by the runner's own key for it"
            raise ConfigError("config.gpus", "is 'auto', and which GPUs there are cannot be read here", hint=hint)
        if not seen:
            return ()
        taken: list[Gpu] = []
        for gpu in seen:
            if len(taken) < self._ranks and self._locks.take(gpu):
                taken.append(gpu)
        if len(taken) == self._ranks:
            return tuple(taken)
        raise too_few(seen, taken, self._ranks, f"tensor_parallel (--tp) {self._ranks} needs")

    def environments(self) -> list[Mapping[str, str]]:
        """What each rank's environment says beside this process's own."""
        own = {gpu.key for gpu in self.gpus}
        others = [gpu for gpu in (visible() or ()) if gpu.key not in own] if self._sees_all else []
        return [environment_of([*self.gpus, *others], rank) if self.gpus else {} for rank in range(self._ranks)]

    def close(self) -> None:
        """Release the GPUs; idempotent. The workers must have ended."""
        self._locks.close()
        self.gpus = ()


def too_few(seen: Sequence[Gpu], free: Sequence[Gpu], needed: int, who: str) -> ConfigError:
    """The error where fewer of the visible GPUs are free than are needed.

    Args:
        who: needs them, in words that end in "needs" or "need".
    """
    held = [f"{gpu} is held by {held_by(gpu)}" for gpu in seen if gpu not in free]
    problem = f"{who} {counted(needed)}, and this process sees {len(seen)}"
    return ConfigError(
        "config.gpus",
        "; ".join([problem, *held]),
        hint=_SHARE if held and len(seen) >= needed else _FEWER,
    )
