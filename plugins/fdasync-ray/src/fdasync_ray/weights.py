"""Weights from memory on their way to a fleet: packed for Ray's object store, and written as a folder on each node.

A tensor's bytes are a numpy array in the object, so each process of a node reads the node's one copy. The folder lies
in memory (`/dev/shm`), has the same path on each node, and is written once on each, by the first supervisor there. A
lock on the fleet's folder lasts as long as a supervisor does; folders without one are removed by the next fleet.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fdasync.engine.weights.source import tensors_of
from fdasync.errors import BadInput
from fdasync.runner.synthetic import WEIGHTS_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fdasync.request import WeightSource

ROOT = Path("/dev/shm")
PREFIX = "fdasync-ray-"
_LOCK = "lock"
_ALIGNED = 8
# as safetensors names them
_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int16": "I16",
    "uint16": "U16", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "uint32": "U32", "float32": "F32",
    "int64": "I64", "uint64": "U64", "float64": "F64",
}  # fmt: skip


class Packed(msgspec.Struct, frozen=True):
    """Tensors as one object: names, dtypes and shapes, and the bytes of each as uint8 [nbytes]."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    data: tuple[np.ndarray[Any, np.dtype[np.uint8]], ...]


class Copied(msgspec.Struct, frozen=True):
    """A folder of weights as one object: the bytes of each file, by name."""

    files: dict[str, np.ndarray[Any, np.dtype[np.uint8]]]


def packed(source: WeightSource) -> Packed:
    """Packs tensors `(name, dtype, shape, buffer)`; copies nothing. Raises BadInput naming the tensor."""
    checked = tensors_of(source)
    for meta, _ in checked:
        if meta.dtype not in _DTYPES:
            raise BadInput("source", f"{meta.name!r}: no checkpoint has {meta.dtype}", limit=", ".join(_DTYPES))
    return Packed(
        tuple(meta.name for meta, _ in checked),
        tuple(meta.dtype for meta, _ in checked),
        tuple(tuple(meta.shape) for meta, _ in checked),
        tuple(np.frombuffer(data, np.uint8) for _, data in checked),
    )


class NodeFolder:
    """The folder of one fleet on this node. Blocks: a supervisor calls it from a thread.

    Args:
        uid: of the fleet.
        model: the checkpoint whose configuration files belong to the new weights; "": none.
        runner: whose layout of a folder is written.
    """

    def __init__(self, uid: str, model: str, runner: str) -> None:
        self._model = model
        self._runner = runner
        self._path = ROOT / f"{PREFIX}{uid}"
        self._path.mkdir(mode=0o700, exist_ok=True)
        self._held = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._held, fcntl.LOCK_SH)
        remove_abandoned()

    def has(self, path: str) -> bool:
        return Path(path).is_dir()

    def read(self, path: str) -> Copied:
        """The bytes of weights that this node has, for another node; copies nothing. Raises OSError."""
        return Copied({file.name: np.memmap(file, np.uint8, "r").view(np.ndarray) for file in Path(path).iterdir()})

    def write_once(self, path: str, weights: Packed | Copied) -> None:
        """Write the folder unless another supervisor of this node has, or is at it: then wait for that one, whose lock
        ends with its process. Raises OSError."""
        fd = os.open(self._path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # blocking: this runs in a thread, and the supervisor's caller has a deadline
            fcntl.flock(fd, fcntl.LOCK_EX)
            if not self.has(path):
                self.write(path, weights)
        finally:
            os.close(fd)

    def write(self, path: str, weights: Packed | Copied) -> None:
        """Write the folder; it appears whole, or not at all. Raises OSError."""
        final = Path(path)
        partial = final.with_name(f"{final.name}.part")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        if isinstance(weights, Copied):
            for name, data in weights.files.items():
                (partial / name).write_bytes(data.data)
        else:
            self._write_packed(partial, weights)
        partial.rename(final)

    def _write_packed(self, partial: Path, weights: Packed) -> None:
        if self._model and Path(self._model).is_dir():
            for file in Path(self._model).glob("*.json"):
                # an index names files that are not here
                if not file.name.endswith(".index.json"):
                    shutil.copyfile(file, partial / file.name)
        if self._runner == "synthetic":
            number = int.from_bytes(bytes(weights.data[0]), "little")
            (partial / WEIGHTS_FILE).write_text(json.dumps({"weights_id": number}))
        else:
            _write_safetensors(partial / "model.safetensors", weights)

    def keep_only(self, paths: Iterable[str]) -> None:
        """Remove folders of other weights."""
        kept = {Path(path).name for path in paths}
        for entry in self._path.iterdir():
            if entry.is_dir() and entry.name not in kept:
                shutil.rmtree(entry, ignore_errors=True)

    def close(self) -> None:
        """Let go of the folder; the last supervisor of the node removes it."""
        os.close(self._held)
        _remove_unheld(self._path)


def folder_path(name: str) -> str:
    """The path, on each node, of weights that the registry named "uid/number"."""
    return str(ROOT / f"{PREFIX}{name}")


def remove_abandoned() -> None:
    """Remove this user's folders of fleets whose supervisors on this node have all ended."""
    for path in ROOT.glob(f"{PREFIX}*"):
        if path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid():
            _remove_unheld(path)


def _remove_unheld(path: Path) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(fd)


def _write_safetensors(path: Path, weights: Packed) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, data in zip(weights.names, weights.dtypes, weights.shapes, weights.data, strict=True):
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [end, end + data.nbytes]}
        end += data.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNED)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for data in weights.data:
            file.write(data.data)
