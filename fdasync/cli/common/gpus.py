"""GPUs on the command line: the `--gpus` option, and how several instances divide what it names.

Starts nothing. Called by `options.py` and `local/fleet.py`.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import TYPE_CHECKING, Literal

from fdasync.errors import BadInput, ConfigError
from fdasync.ipc.gpu_locks import GpuLocks
from fdasync.ipc.gpus import counted, find, visible
from fdasync.runner.group.placement import too_few

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.engine.config import EngineConfig

Gpus = tuple[int | str, ...] | Literal["auto"]
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


def parse_gpus(texts: Sequence[str]) -> tuple[Gpus | None, int]:
    """The names in all `--gpus`, one behind the other, and how many are in each; (None, 0) where none is given.

    Raises BadInput for an empty name, for "auto" beside names, and for lists of different lengths.
    """
    if not texts:
        return None, 0
    if list(texts) == ["auto"]:
        return "auto", 0
    lists = [[part.strip() for part in text.split(",")] for text in texts]
    for text, names in zip(texts, lists, strict=True):
        if "" in names or "auto" in names:
            raise BadInput("--gpus", f"{text!r} is no list of GPUs", limit="auto, or such as 0,1 or GPU-8a3f,GPU-77c0")
        if len(names) != len(lists[0]):
            raise BadInput("--gpus", f"{texts[0]!r} and {text!r} differ in length", hint="say one list per instance")
    # any other spelling of a number is refused as a name
    return tuple([int(name) if _INDEX.fullmatch(name) else name for names in lists for name in names]), len(lists[0])


def gpus_of_instances(config: EngineConfig, names: Sequence[str]) -> list[Gpus]:
    """The GPUs of each instance, in the order of `names`, from one configuration for all: the next `tensor_parallel`
    that it names; with "auto", the next free ones. "auto" for each where instances place no GPUs, or there are none.

    Raises ConfigError where there are too few or too many, and where two instances have the same one without sharing.
    """
    if not config.places_gpus or not names:
        return [config.gpus] * len(names)
    needed = len(names) * config.tensor_parallel
    given = config.gpus
    if given == "auto":
        least = config.tensor_parallel if config.share_gpus else needed
        who = _instances(1 if config.share_gpus else len(names), config.tensor_parallel)
        chosen = _free(needed, least, who, shares=config.share_gpus)
        if chosen is None:
            return ["auto"] * len(names)
        given = chosen
    if len(given) != needed:
        problem = f"names {counted(len(given))}, and {_instances(len(names), config.tensor_parallel)} {counted(needed)}"
        hint = "name one for each rank of each instance, in their order, or leave gpus (--gpus) out to take free ones"
        raise ConfigError("config.gpus", problem, limit=needed, hint=hint)
    places = [given[first : first + config.tensor_parallel] for first in range(0, needed, config.tensor_parallel)]
    if not config.share_gpus:
        _check_overlap(dict(zip(names, places, strict=True)))
    return list(places)


def most_on_one(places: Sequence[Gpus]) -> int:
    """How many instances have a GPU in common, at most; 1 where each has its own."""
    count = Counter(gpu.key for place in places if place != "auto" for gpu in find(place))
    return max(count.values(), default=1)


def _instances(count: int, ranks: int) -> str:
    if count == 1:
        return f"an instance with tensor_parallel (--tp) {ranks} needs"
    return f"{count} instances with tensor_parallel (--tp) {ranks} need"


def _check_overlap(places: dict[str, tuple[int | str, ...]]) -> None:
    owners: dict[str, str] = {}
    for name, place in places.items():
        for gpu in find(place):
            other = owners.setdefault(gpu.key, name)
            if other != name:
                hint = "give each its own, or have them share (share_gpus, --share-gpus)"
                raise ConfigError("config.gpus", f"{other} and {name} both take {gpu}", hint=hint)


def _free(needed: int, least: int, who: str, *, shares: bool) -> tuple[int, ...] | None:
    """Indices of so many GPUs that no engine holds, then from the first again; None: no GPUs. Raises ConfigError
    where fewer than `least` are free, which `who` needs."""
    seen = visible()
    if not seen:
        return None
    locks = GpuLocks(shares=shares)
    try:
        free = [index for index, gpu in enumerate(seen) if locks.take(gpu)]
    finally:
        locks.close()
    if len(free) < least:
        raise too_few(seen, [seen[index] for index in free], least, who)
    return tuple(itertools.islice(itertools.cycle(free), needed))
