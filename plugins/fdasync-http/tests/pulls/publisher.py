"""Publishes versions of a checkpoint as slime (docs and `disk_delta` of August 2026) and SkyRL (`delta_checkpoint`) do:
written down from what they write, since neither can be installed here."""

from __future__ import annotations

import hashlib
import json
import zlib

import numpy as np
import xxhash
import zstandard
from safetensors.numpy import save_file

HASHES = {
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


def flat(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def encoded(old, new, encoding):
    before, after = flat(old), flat(new)
    if encoding == "xor":
        return before ^ after
    positions = np.flatnonzero(before != after).astype("<u4")
    count = np.array([positions.size], "<u4")
    return np.concatenate([count.view(np.uint8), positions.view(np.uint8), after[positions]])


def changed(old, new):
    return [name for name in new if not np.array_equal(flat(old[name]), flat(new[name]))]


def packed(old, new, name, encoding):
    data = encoded(old[name], new[name], encoding).tobytes()
    return np.frombuffer(zstandard.ZstdCompressor(level=1).compress(data), np.uint8)


def slime(folder, version, old, new, encoding="xor", checksum="xxh3-128"):
    """A version folder of slime's."""
    where = folder / f"weight_v{version:06d}"
    where.mkdir(parents=True)
    names = changed(old, new)
    # two files, as two ranks write them
    for number, some in enumerate((names[::2], names[1::2])):
        tensors = {name: packed(old, new, name, encoding) for name in some}
        checksums = {name: HASHES[checksum](flat(new[name])) for name in some}
        if some:
            save_file(tensors, where / f"model-{number:05d}-of-00002.safetensors", checksums)
    metadata = {
        "version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": encoding,
        "compression_format": "zstd", "checksum_format": checksum,
    }  # fmt: skip
    index = {"metadata": metadata, "weight_map": {}}
    (where / "model.safetensors.index.json").write_text(json.dumps(index))
    return where


def skyrl(folder, version, old, new):
    """A version folder of SkyRL's, and what its trainer sends of it."""
    where = folder / f"delta-{version:08d}"
    where.mkdir(parents=True)
    names, file = changed(old, new), "delta-rank00000-file000000.safetensors"
    tensors = {name: packed(old, new, name, "xor") for name in names}
    save_file(tensors, where / file)
    records = [
        {"name": name, "dtype": str(new[name].dtype), "shape": list(new[name].shape),
         "uncompressed_num_bytes": new[name].nbytes, "compressed_num_bytes": tensors[name].nbytes,
         "payload_file": file, "payload_key": name, "checksum": HASHES["xxh3-128"](flat(new[name])),
         "checksum_algorithm": "xxh3-128"}
        for name in names
    ]  # fmt: skip
    manifest = {"version": version, "base_version": version - 1, "tensors": records, "payload_files": [file],
                "total_uncompressed_num_bytes": 0, "total_compressed_num_bytes": 0}  # fmt: skip
    (where / "manifest.json").write_text(json.dumps(manifest))
    return {"target_version": version, "version": version, "sync_dir": str(folder), "uri": str(where)}
