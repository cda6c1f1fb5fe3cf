"""A checkpoint of this machine that follows what a trainer publishes, version by version.

`.fdasync-pull/state.json` in it says which version it holds, and of which source. If the source is another, or the
version later than the requested one, it belongs to another run, and the checkpoint is begun anew from the engine's own;
so it is where a delta does not fit. Version 0 is the engine's own checkpoint. Blocks; a lock keeps processes of this
machine apart. Called by `child.py`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fdasync.errors import WeightsRejected
from fdasync_http.pulls.patching import PART, apply
from fdasync_http.pulls.published import Form, delta_in, folder_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_OWN = ".fdasync-pull"


class State(msgspec.Struct, frozen=True):
    """What a checkpoint holds.

    Attributes:
        version: number of it.
        source: folder that it was published in.
        base: the engine's own checkpoint, which is version 0.
        copied: it is another checkpoint as it was, and no delta was applied to it.
    """

    version: int
    source: str
    base: str
    copied: bool = False


class Pull(msgspec.Struct, frozen=True, array_like=True, tag="pull"):
    """Bring a checkpoint to a version.

    Attributes:
        form: of what is published.
        local: folder of the checkpoint; made where it is not there.
        base: the engine's own checkpoint.
        source: folder that holds the folders of versions.
        version: number of the requested version.
        last: folder of that version, where it has another name; "": the one in `source`.
    """

    form: Form
    local: str
    base: str
    source: str
    version: int
    last: str = ""


def state_of(local: str) -> State | None:
    """What a checkpoint holds; None: nothing that is whole."""
    try:
        return msgspec.json.decode((Path(local) / _OWN / "state.json").read_bytes(), type=State)
    except (OSError, msgspec.MsgspecError):
        return None


def bring(pull: Pull) -> None:
    """Do it; a version that is there already is left as it is. Raises WeightsRejected, OSError."""
    local = Path(pull.local)
    with _alone(local):
        state = state_of(pull.local)
        if state is not None and (
            (state.source, state.base) != (pull.source, pull.base) or state.version > pull.version
        ):
            state = None
        try:
            _follow(pull, local, state)
        except WeightsRejected as error:
            if state is None or state.copied:
                raise
            # what is there may be damaged, or of another run with the same folders
            try:
                _follow(pull, local, None)
            except WeightsRejected as again:
                raise WeightsRejected(f"{error.problem}; begun anew: {again.problem}") from error


def _follow(pull: Pull, local: Path, state: State | None) -> None:
    source, first = Path(pull.source), pull.version
    floor = 0 if state is None else state.version
    deltas = []
    while first > floor:
        folder = Path(pull.last) if pull.last and first == pull.version else folder_of(pull.form, source, first)
        delta = delta_in(pull.form, folder)
        if delta is None:
            _begin(pull, folder, local, first)
            break
        if (delta.version, delta.base) != (first, first - 1):
            told = f"{folder} is version {delta.version} on {delta.base}"
            raise WeightsRejected(f"{told}, where {first} on {first - 1} is due")
        deltas.append(delta)
        first -= 1
    else:
        if state is None:
            _begin(pull, Path(pull.base), local, 0)
    for delta in reversed(deltas):
        apply(delta, local)
        _keep(local, State(delta.version, pull.source, pull.base))


def _begin(pull: Pull, folder: Path, local: Path, version: int) -> None:
    """Make the checkpoint a copy of another one."""
    files = sorted([path for path in folder.iterdir() if path.is_file()]) if folder.is_dir() else []
    if not any(path.suffix == ".safetensors" for path in files):
        raise WeightsRejected(f"{folder} holds no safetensors files")
    (local / _OWN / "state.json").unlink(missing_ok=True)
    for file in files:
        part = local / (file.name + PART)
        shutil.copyfile(file, part)
        if part.stat().st_size != file.stat().st_size:
            raise WeightsRejected(f"{file} was cut short while it was copied")
        part.rename(local / file.name)
    names = {file.name for file in files}
    for path in local.iterdir():
        if path.is_file() and path.name not in names:
            path.unlink()
    _keep(local, State(version, pull.source, pull.base, copied=True))


def _keep(local: Path, state: State) -> None:
    part = local / _OWN / "state.json.part"
    with part.open("wb") as opened:
        opened.write(msgspec.json.encode(state))
        opened.flush()
        os.fsync(opened.fileno())
    part.rename(local / _OWN / "state.json")


@contextmanager
def _alone(local: Path) -> Iterator[None]:
    if local.is_dir() and not (local / _OWN).is_dir() and any(local.iterdir()):
        # files that a checkpoint does not have are removed from it
        raise WeightsRejected(f"{local} holds what was not pulled; name an empty folder, or one that is not there")
    (local / _OWN).mkdir(parents=True, exist_ok=True)
    with (local / _OWN / "lock").open("w") as lock:
        # the caller ends this process at its deadline
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
