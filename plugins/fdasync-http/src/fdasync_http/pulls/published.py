"""What trainers publish for an update: a whole checkpoint, or a delta to the version before it. Two forms are read.

slime's (also Miles'): `weight_v000007/`, whose `model.safetensors.index.json` says how the files' tensors are encoded;
their checksums stand in the files' headers. SkyRL's: `delta-00000007/` with a `manifest.json` that names each tensor.
Reads headers and manifests only, each within a bound. Called by `local.py`, in the child process.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec

from fdasync.errors import WeightsRejected

if TYPE_CHECKING:
    from pathlib import Path

Form = Literal["slime", "skyrl"]

_INDEX = "model.safetensors.index.json"
_MANIFEST = "manifest.json"
_MOST_NBYTES = 256 << 20
_FILE = re.compile(r"[\w-][\w.-]*\.safetensors")
_ENCODINGS = ("xor", "overwrite")


class Place(NamedTuple):
    """Where a tensor's bytes are.

    Attributes:
        file, first, nbytes: of them.
    """

    file: Path
    first: int
    nbytes: int


class Change(NamedTuple):
    """A tensor of a delta.

    Attributes:
        name: in the checkpoint.
        place: of the compressed change.
        algorithm, checksum: of the tensor's new bytes.
    """

    name: str
    place: Place
    algorithm: str
    checksum: str


class Delta(NamedTuple):
    """Changes of one version.

    Attributes:
        folder: that holds it.
        version, base: its number, and the number of the version that it is applied to.
        encoding: "xor": of the bytes before and after. "overwrite": a count, positions, and the bytes there.
        changes: by tensor.
    """

    folder: Path
    version: int
    base: int
    encoding: str
    changes: tuple[Change, ...]


class _Header(msgspec.Struct, frozen=True):
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]


class _SlimeMeta(msgspec.Struct, frozen=True):
    version: int | str
    base_version: int | str
    delta_encoding: str
    compression_format: str
    checksum_format: str


class _SlimeIndex(msgspec.Struct, frozen=True):
    metadata: dict[str, Any] = {}


class _SkyRLTensor(msgspec.Struct, frozen=True):
    name: str
    payload_file: str
    payload_key: str
    checksum: str = ""
    checksum_algorithm: str = "xxh3-128"
    # what older ones have in place of the two before
    sha256: str = ""


class _SkyRLManifest(msgspec.Struct, frozen=True):
    version: int
    base_version: int
    tensors: list[_SkyRLTensor] = []


def places_in(file: Path) -> tuple[dict[str, Place], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata. Raises WeightsRejected."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 0 < length <= min(size - 8, _MOST_NBYTES):
                raise WeightsRejected(f"{file} is no safetensors file, or not whole")
            header = msgspec.json.decode(opened.read(length), type=dict[str, msgspec.Raw])
        told = header.pop("__metadata__", None)
        metadata = {} if told is None else msgspec.json.decode(told, type=dict[str, str])
        places = {}
        for name, raw in header.items():
            begin, end = msgspec.json.decode(raw, type=_Header).data_offsets
            if not begin <= end <= size - 8 - length:
                raise WeightsRejected(f"{file} ends before its tensor {name}")
            places[name] = Place(file, 8 + length + begin, end - begin)
    except OSError as error:
        raise WeightsRejected(f"{file} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WeightsRejected(f"{file} is no safetensors file: {error}") from error
    return places, metadata


def folder_of(form: Form, source: Path, version: int) -> Path:
    """The folder of a version. Raises WeightsRejected where there is none."""
    folder = source / (f"weight_v{version:06d}" if form == "slime" else f"delta-{version:08d}")
    if not folder.is_dir():
        raise WeightsRejected(f"version {version} is not published: {folder} is no folder")
    return folder


def delta_in(form: Form, folder: Path) -> Delta | None:
    """The delta that a folder holds; None: a whole checkpoint. Raises WeightsRejected."""
    delta = _slime_delta(folder) if form == "slime" else _skyrl_delta(folder)
    if delta is not None and delta.encoding not in _ENCODINGS:
        raise WeightsRejected(f"{folder}: the encoding {delta.encoding!r:.50} is none of {', '.join(_ENCODINGS)}")
    return delta


def _decoded(file: Path, kind: Any) -> Any:
    try:
        if file.stat().st_size > _MOST_NBYTES:
            raise WeightsRejected(f"{file} is larger than {_MOST_NBYTES} bytes")
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise WeightsRejected(f"{file} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WeightsRejected(f"{file} does not say what a delta is: {error}") from error


def _slime_delta(folder: Path) -> Delta | None:
    if not (folder / _INDEX).exists():
        return None
    index: _SlimeIndex = _decoded(folder / _INDEX, _SlimeIndex)
    if "delta_encoding" not in index.metadata:
        return None
    try:
        meta = msgspec.convert(index.metadata, _SlimeMeta)
        version, base = int(meta.version), int(meta.base_version)
    except (msgspec.ValidationError, ValueError) as error:
        raise WeightsRejected(f"{folder / _INDEX}: {error}") from None
    if meta.compression_format != "zstd":
        raise WeightsRejected(f"{folder}: the compression {meta.compression_format!r:.50} is not zstd")
    changes = []
    for file in sorted(folder.glob("*.safetensors")):
        places, checksums = places_in(file)
        for name, place in places.items():
            if name not in checksums:
                raise WeightsRejected(f"{file} has no checksum of {name}")
            changes.append(Change(name, place, meta.checksum_format, checksums[name]))
    return Delta(folder, version, base, meta.delta_encoding, tuple(changes))


def _skyrl_delta(folder: Path) -> Delta:
    manifest: _SkyRLManifest = _decoded(folder / _MANIFEST, _SkyRLManifest)
    files: dict[str, dict[str, Place]] = {}
    changes = []
    for one in manifest.tensors:
        if not _FILE.fullmatch(one.payload_file):
            raise WeightsRejected(f"{folder}: {one.name} lies in {one.payload_file!r:.100}, which is no file of it")
        if one.payload_file not in files:
            files[one.payload_file] = places_in(folder / one.payload_file)[0]
        place = files[one.payload_file].get(one.payload_key)
        if place is None:
            raise WeightsRejected(f"{folder / one.payload_file} lacks {one.payload_key}")
        algorithm, checksum = (one.checksum_algorithm, one.checksum) if one.checksum else ("sha256", one.sha256)
        changes.append(Change(one.name, place, algorithm, checksum))
    return Delta(folder, manifest.version, manifest.base_version, "xor", tuple(changes))
