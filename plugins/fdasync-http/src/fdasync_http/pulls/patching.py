"""A delta applied to a checkpoint's files: each that changes is written anew beside the old one, and checked.

No file is in its place before the new bytes of every tensor had the checksum that the delta names; then the files are
renamed. A process that dies between two renames does no harm: a tensor that has its new bytes already is left alone
when the delta is applied again. Blocks. Called by `local.py`, in the child process.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import shutil
import zlib
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash

from fdasync.errors import WeightsRejected
from fdasync_http.pulls.published import places_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from fdasync_http.pulls.published import Change, Delta, Place

#: behind the name of a file that is being written
PART = ".fdasync-part"
# what stays in a core's cache from the decompression to the checksum
_PIECE_NBYTES = 2 << 20
_POSITION = np.dtype("<u4")


class _Hash(Protocol):
    def update(self, data: Any, /) -> Any: ...

    def hexdigest(self) -> str: ...


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


_HASHES: dict[str, Callable[[], _Hash]] = {
    "xxh3-128": xxhash.xxh3_128, "sha256": hashlib.sha256, "adler32": _Adler32,
}  # fmt: skip


def places_of(folder: Path) -> dict[str, Place]:
    """The tensors of a checkpoint. Raises WeightsRejected."""
    places: dict[str, Place] = {}
    for file in sorted(folder.glob("*.safetensors")):
        places.update(places_in(file)[0])
    if not places:
        raise WeightsRejected(f"{folder} holds no safetensors files")
    return places


def apply(delta: Delta, folder: Path) -> None:
    """Apply a delta to the checkpoint in `folder`. Raises WeightsRejected, and OSError, with every file as it was."""
    places = places_of(folder)
    by_file: dict[Path, list[Change]] = {}
    for change in delta.changes:
        if change.algorithm not in _HASHES:
            known = ", ".join(_HASHES)
            raise WeightsRejected(f"{delta.folder}: the checksum {change.algorithm!r:.50} is none of {known}")
        if change.name not in places:
            raise WeightsRejected(f"{delta.folder} changes {change.name}, which the checkpoint does not have")
        by_file.setdefault(places[change.name].file, []).append(change)
    written = []
    try:
        for file, changes in by_file.items():
            part = file.with_name(file.name + PART)
            written.append((part, file))
            shutil.copyfile(file, part)
            _patch(part, changes, places, delta.encoding)
        for part, file in written:
            part.rename(file)
    except BaseException:
        for part, _ in written:
            part.unlink(missing_ok=True)
        raise


def _patch(part: Path, changes: Sequence[Change], places: dict[str, Place], encoding: str) -> None:
    with part.open("r+b") as opened:
        if os.fstat(opened.fileno()).st_size:
            with mmap.mmap(opened.fileno(), 0) as mapped:
                for change in changes:
                    place = places[change.name]
                    region = np.ndarray((place.nbytes,), np.uint8, mapped, place.first)
                    try:
                        _change(region, change, encoding)
                    finally:
                        # the file stays mapped as long as an array shows it
                        del region
                mapped.flush()
        os.fsync(opened.fileno())


def _change(region: NDArray[np.uint8], change: Change, encoding: str) -> None:
    """Give a tensor its new bytes. Raises WeightsRejected where they have another checksum."""
    before = _HASHES[change.algorithm]()
    before.update(region)
    if before.hexdigest() == change.checksum:
        return
    place = change.place
    with place.file.open("rb") as opened:
        opened.seek(place.first)
        packed = opened.read(place.nbytes)
    found = (_xor if encoding == "xor" else _overwrite)(region, packed, change)
    if found != change.checksum:
        problem = f"the new {change.name} has the checksum {found}, {place.file} says {change.checksum}"
        raise WeightsRejected(f"{problem}: it was made for other weights, or is damaged")


def _xor(region: NDArray[np.uint8], packed: bytes, change: Change) -> str:
    found = _HASHES[change.algorithm]()
    reader = _reader(packed)
    first = 0
    try:
        while piece := reader.read(_PIECE_NBYTES):
            if first + len(piece) > len(region):
                raise WeightsRejected(f"the change of {change.name} is longer than the tensor")
            into = region[first : first + len(piece)]
            into ^= np.frombuffer(piece, np.uint8)
            found.update(into)
            first += len(piece)
    except _zstd_error() as error:
        raise WeightsRejected(f"the change of {change.name} in {change.place.file} is damaged: {error}") from error
    if first != len(region):
        raise WeightsRejected(f"the change of {change.name} has {first} bytes, the tensor {len(region)}")
    return found.hexdigest()


def _overwrite(region: NDArray[np.uint8], packed: bytes, change: Change) -> str:
    most = _POSITION.itemsize + (_POSITION.itemsize + 1) * len(region)
    try:
        told = _reader(packed).read(most + 1)
    except _zstd_error() as error:
        raise WeightsRejected(f"the change of {change.name} in {change.place.file} is damaged: {error}") from error
    count = int.from_bytes(told[: _POSITION.itemsize], "little")
    values_at = _POSITION.itemsize * (1 + count)
    if len(told) < _POSITION.itemsize or len(told) != values_at + count:
        raise WeightsRejected(f"the change of {change.name} does not have the bytes that it counts")
    positions = np.frombuffer(told, _POSITION, count, _POSITION.itemsize)
    if count and int(positions.max()) >= len(region):
        raise WeightsRejected(f"the change of {change.name} writes beyond the tensor")
    region[positions] = np.frombuffer(told, np.uint8, count, values_at)
    found = _HASHES[change.algorithm]()
    found.update(region)
    return found.hexdigest()


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise WeightsRejected(
            "deltas are compressed with zstd, which needs a package: pip install 'zstandard>=0.23'"
        ) from None
    return zstandard


def _reader(packed: bytes) -> Any:
    return _zstandard().ZstdDecompressor().stream_reader(io.BytesIO(packed))


def _zstd_error() -> type[Exception]:
    kind: type[Exception] = _zstandard().ZstdError
    return kind
