"""The GPUs of this machine by their names, as child processes are told of them; no driver is loaded.

Indices count the GPUs that this process's CUDA_VISIBLE_DEVICES shows, in the order of their PCI addresses, as
`nvidia-smi` does. The list of GPUs comes from the driver's files in /proc and /dev. Knows no engine and no library.
`gpu_locks.py` locks what is found here; `runner/group/placement.py` and the command line call it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fdasync.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PROC = Path("/proc/driver/nvidia/gpus")
_DEV = Path("/dev")
_VARIABLE = "CUDA_VISIBLE_DEVICES"
_NAME = re.compile(r"(GPU|MIG)-\S+")
_FIELD = re.compile(r"^(GPU UUID|Device Minor):\s*(\S+)", re.MULTILINE)


class Gpu(NamedTuple):
    """One GPU, or a part of one (MIG).

    Attributes:
        name: for people: its index among the GPUs that this process sees, or as it was given.
        key: the same for all names of one GPU: its PCI address where that is known.
        token: what CUDA_VISIBLE_DEVICES of a child calls it.
    """

    name: str
    key: str
    token: str

    def __str__(self) -> str:
        return f"GPU {self.name}" if self.key in (self.name, "") else f"GPU {self.name} ({self.key})"


def check_names(gpus: Sequence[int | str]) -> None:
    """Raise ConfigError naming the first that can be no name of a GPU."""
    for gpu in gpus:
        if gpu < 0 if isinstance(gpu, int) else not _NAME.fullmatch(gpu) or "," in gpu:
            index = re.fullmatch(r"(?:cuda:)?0*(\d{1,9})", f"{gpu}", re.ASCII)
            hint = f"an index is a plain number: {index[1]}" if index else "`nvidia-smi -L` lists indices and UUIDs"
            limit = 'an index from 0, "GPU-..." or "MIG-..."'
            raise ConfigError("config.gpus", f"{gpu!r} names no GPU", limit=limit, hint=hint)


def check_count(count: int, ranks: int) -> None:
    """Raise ConfigError unless so many GPUs serve one instance of so many ranks, or several such instances."""
    if not count or count % ranks:
        raise ConfigError(
            "config.gpus",
            f"names {counted(count)}, and config.tensor_parallel is {ranks}",
            limit=f"{ranks}, one for each rank",
            hint="name as many, leave gpus (--gpus) out to take free ones, or change tensor_parallel (--tp)",
        )


def counted(count: int) -> str:
    """So many GPUs, in words."""
    return "no GPU" if not count else "1 GPU" if count == 1 else f"{count} GPUs"


def installed() -> list[Gpu] | None:
    """The GPUs that the driver has for this machine or container, by PCI address; None where it does not tell."""
    here = _in_proc()  # blocking: a few files of the kernel's, once, at start
    if here:
        return [gpu._replace(name=f"{index}", token=gpu.token or f"{index}") for index, gpu in enumerate(here)]
    minors = sorted(_minors())
    if minors:
        return [Gpu(f"{index}", f"nvidia{minor}", f"{index}") for index, minor in enumerate(minors)]
    # a Linux inside of Windows has GPUs behind this file
    return None if (_DEV / "dxg").exists() else []


def visible() -> list[Gpu] | None:
    """The `installed` GPUs that this process's CUDA_VISIBLE_DEVICES shows, in its order; None: not known.

    A wrong entry ends the list, as it does for CUDA.
    """
    here = installed()
    told = os.environ.get(_VARIABLE)
    if told is None:
        return here
    seen: list[Gpu] = []
    for entry in map(str.strip, told.split(",")):
        gpu = _of_entry(entry, here)
        if gpu is None:
            break
        seen.append(gpu._replace(name=f"{len(seen)}"))
    return seen


def find(names: Sequence[int | str]) -> list[Gpu]:
    """The visible GPUs of these names, in the order given.

    Raises ConfigError for a GPU that is not there, and for two names of one GPU.
    """
    seen = visible()
    found: dict[str, Gpu] = {}
    for name in names:
        gpu = _of_name(name, seen)
        if gpu.key in found:
            first = found[gpu.key]
            also = "" if first.name == f"{name}" else f", as {name!r} too"
            hint = "each rank takes a GPU of its own: name another, or lower tensor_parallel (--tp)"
            raise ConfigError("config.gpus", f"names {first} twice{also}", hint=hint)
        found[gpu.key] = gpu
    return list(found.values())


def environment_of(gpus: Sequence[Gpu], own: int) -> Mapping[str, str]:
    """What a child's environment says for it to see these GPUs, `gpus[own]` as its first one and the others behind it,
    in order. All are visible: memory of a GPU that a process does not see cannot be opened everywhere."""
    order = [gpus[own], *gpus[:own], *gpus[own + 1 :]]
    # as indices are counted here
    return {_VARIABLE: ",".join(gpu.token for gpu in order), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _in_proc() -> list[Gpu]:
    """Without names; a token is the UUID, or "" while the driver does not know it."""
    found = []
    minors = _minors()
    try:
        folders = sorted(_PROC.iterdir())
    except OSError:
        return []
    for folder in folders:
        try:
            told = dict(_FIELD.findall((folder / "information").read_text()))
        except OSError:
            continue
        minor = told.get("Device Minor", "")
        if minors and minor.isdecimal() and int(minor) not in minors:
            # another container's
            continue
        uuid = told.get("GPU UUID", "")
        found.append(Gpu("", folder.name, uuid if _NAME.fullmatch(uuid) and "?" not in uuid else ""))
    return found


def _minors() -> set[int]:
    return {int(path.name[6:]) for path in _DEV.glob("nvidia[0-9]*") if path.name[6:].isdecimal()}


def _of_entry(entry: str, here: list[Gpu] | None) -> Gpu | None:
    """What an entry of the variable means; None: nothing."""
    if entry.isdecimal():
        if here is None:
            return Gpu(entry, f"index {int(entry)}", entry)
        return here[int(entry)] if int(entry) < len(here) else None
    return _of_uuid(entry, here) if _NAME.fullmatch(entry) else None


def _of_uuid(uuid: str, gpus: list[Gpu] | None) -> Gpu | None:
    """The GPU whose UUID begins so; where UUIDs are not known, the given name is believed."""
    fit = [gpu for gpu in gpus or () if gpu.token.startswith(uuid)]
    if len(fit) == 1:
        return fit[0]
    untold = gpus is None or any(gpu.token.isdecimal() for gpu in gpus)
    # parts of GPUs do not stand in the driver's files
    return Gpu(uuid, uuid, uuid) if not fit and (untold or uuid.startswith("MIG-")) else None


def _of_name(name: int | str, seen: list[Gpu] | None) -> Gpu:
    """Raises ConfigError where it is not there."""
    if isinstance(name, int):
        gpu = _of_entry(f"{name}", seen)
    elif name.startswith("MIG-") and _VARIABLE in os.environ:
        gpu = next((one for one in seen or () if one.token == name), None)
    else:
        gpu = _of_uuid(name, seen)
    if gpu is not None:
        return gpu
    hidden = _VARIABLE in os.environ
    shown = f", by {_VARIABLE}={os.environ[_VARIABLE]!r}" if hidden else ""
    count = len(seen or ())
    problem = f"{name!r} is no GPU that this process sees: it sees {count or 'none'}{shown}"
    if hidden:
        hint = f"name those by their places in {_VARIABLE}, or change it"
    elif count:
        hint = "`nvidia-smi -L` lists indices and UUIDs"
    else:
        hint = "leave gpus (--gpus) out and compute on the CPU (--device cpu), or see what `fdasync doctor` finds"
    limit = "no GPU" if not count else "0" if count == 1 else f"0 to {count - 1}"
    raise ConfigError("config.gpus", problem, limit=limit, hint=hint)
