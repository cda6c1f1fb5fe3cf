"""`fdasync store`: what a person sees of a file store, and what cleaning up leaves."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout

import pytest
import uvloop
import xxhash

from fdasync.cache.store.base import Item
from fdasync.cache.store.block_format import BlockSchema, Section, make_header, object_key, write_header
from fdasync.cache.store.file.layout import CLEAN, Record, Shape, encode_head, encode_record, parse_name
from fdasync.cache.store.file.recovery import lock_holder
from fdasync.cache.store.file.store import FileConfig, FileStore
from fdasync.cli.main import main
from fdasync.ipc.shared_memory import PAGE_NBYTES, Part, SharedRegion, page_aligned
from tests.support.commands import interruptible

KV_NBYTES, ROWS_NBYTES = 30_000, 512
NAMESPACES = [bytes([number]) * 16 for number in (1, 2, 0xAB)]
ZEROS = Part(0, 0, PAGE_NBYTES)
SCHEMA = BlockSchema(
    layout="test",
    kv_dtype="bfloat16",
    block_tokens=16,
    sections=(Section("kv", "uint8", (KV_NBYTES,), KV_NBYTES), Section("routing", "uint8", (16, 4, 8), ROWS_NBYTES)),
    zeros=ZEROS,
    trash=ZEROS,
)


def store(*arguments, code=0):
    """Run a command, in this process; what it printed, decoded if it is JSON."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["fdasync", "store", *map(str, arguments)])
        patch.setenv("COLUMNS", "160")
        ended = 0
        try:
            main()
        except SystemExit as error:
            ended = error.code or 0
    assert ended == code, out.getvalue() + err.getvalue()
    return json.loads(out.getvalue()) if "--json" in arguments else out.getvalue() + err.getvalue()


def block(key):
    """The bytes of a block object with this key."""
    kv, rows = random.Random(key).randbytes(KV_NBYTES), random.Random(key).randbytes(ROWS_NBYTES)
    header = make_header(SCHEMA, key, [xxhash.xxh3_64_intdigest(part) for part in (kv, rows)])
    return write_header(header) + kv.ljust(page_aligned(KV_NBYTES), b"\0") + rows.ljust(PAGE_NBYTES, b"\0")


class Opened:
    """A store that is open, on a loop that runs only when it is asked."""

    def __init__(self, path, **config):
        self.loop = uvloop.new_event_loop()
        self.region = SharedRegion.create("cli", 1 << 20)
        self.store = FileStore(FileConfig(path=str(path), **{"segment_nbytes": 200_000, **config}))

    def __enter__(self):
        self.loop.run_until_complete(self.store.open([self.region]))
        return self

    def put(self, key, data):
        self.region.view(0, len(data))[:] = data
        (outcome,) = self.loop.run_until_complete(self.store.put([Item(key, (Part(0, 0, len(data)),))]))
        assert outcome.status == "done"

    def exists(self, key):
        return bool(self.loop.run_until_complete(self.store.exists_prefix([key])))

    def __exit__(self, *error):
        self.loop.run_until_complete(self.store.aclose())
        self.loop.close()
        self.region.close()


@pytest.fixture
def keys():
    return [object_key(NAMESPACES[number % 3], bytes([number]) * 16, number % 2) for number in range(12)]


@pytest.fixture
def folder(tmp_path, keys):
    """12 blocks of three namespaces, put in this order, and one object of other bytes."""
    path = tmp_path / "store"
    with Opened(path, max_nbytes=8 << 20) as opened:
        for key in keys:
            opened.put(key, block(key))
        opened.put("other/bytes", b"no block")
    return path


def spoil(folder, key, at):
    """Flip a bit of the stored object."""
    (row,) = [row for row in store("ls", "--limit", "0", "--json", folder)["objects"] if row["key"] == key]
    with (folder / row["segment"]).open("r+b") as file:
        place = parse_name(row["segment"]).value_at(row["slot"]) + at
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))


def test_ls(folder, keys):
    listed = store("ls", "--json", folder)
    assert listed["total"] == 13
    rows = listed["objects"]
    assert [row["key"] for row in rows] == ["other/bytes", *reversed(keys)]
    assert [row["sequence"] for row in rows] == list(range(12, -1, -1))
    assert rows[0]["content"] == "other bytes"
    assert {row["content"] for row in rows[1:]} == {"kv+routing bfloat16 16 tokens"}
    assert {row["nbytes"] for row in rows[1:]} == {len(block(keys[0]))}
    assert all(0 <= row["age_s"] < 100 for row in rows)
    few = store("ls", "--json", "--limit", "2", "--namespace", "abab", folder)
    assert [row["key"] for row in few["objects"]] == [keys[11], keys[8]]
    assert few["total"] == 4
    text = store("ls", "--limit", "1", folder)
    assert "1 of 13 objects" in text
    assert "other/bytes" in text


def test_stat(folder, keys):
    (folder / "notes.txt").write_text("mine")
    seen = store("stat", "--json", folder)
    size = len(block(keys[0]))
    assert (seen["objects"], seen["nbytes"]) == (13, 12 * size + 8)
    assert seen["disk_nbytes"] == sum(path.stat().st_size for path in folder.iterdir() if parse_name(path.name))
    assert seen["namespaces"] == {
        **{name.hex(): {"objects": 4, "nbytes": 4 * size} for name in NAMESPACES},
        "": {"objects": 1, "nbytes": 8},
    }
    shape = parse_name(next(path.name for path in folder.iterdir() if path.name.startswith(str(size))))
    large = seen["strides"][str(size)]
    assert large["used"] == 12
    assert large["slots"] == large["segments"] * shape.slots >= 12
    assert seen["strides"]["4096"]["used"] == 1
    assert seen["cap_nbytes"] == 8 << 20
    assert seen["held_by"] is None
    assert seen["unknown_files"] == ["notes.txt"]
    text = store("stat", folder)
    assert "of 8.0 MiB allowed" in text
    assert "left alone" in text
    assert NAMESPACES[2].hex() in text


def test_verify_finds_what_is_damaged_and_removes_it(folder, keys):
    assert store("verify", "--json", folder)["damaged"] == {}
    assert "13 objects" in store("verify", folder)
    spoil(folder, keys[3], PAGE_NBYTES + 7)  # KV
    spoil(folder, keys[5], 40)  # its header
    spoil(folder, keys[7], PAGE_NBYTES + page_aligned(KV_NBYTES) + 1)  # rows
    spoil(folder, keys[8], PAGE_NBYTES + KV_NBYTES + 1)  # padding
    found = store("verify", "--json", folder, code=1)
    assert found["damaged"].keys() == {keys[3], keys[5], keys[7], keys[8]}
    assert "kv" in found["damaged"][keys[3]]
    assert "routing" in found["damaged"][keys[7]]
    assert (found["objects"], found["unchecked"], found["deleted"]) == (13, 1, 0)
    assert keys[3] in store("verify", folder, code=1)
    assert store("verify", "--delete", "--json", folder, code=1)["deleted"] == 4
    assert store("verify", "--json", folder)["objects"] == 9
    with Opened(folder, max_nbytes=8 << 20) as opened:
        assert [key for key in keys if not opened.exists(key)] == [keys[n] for n in (3, 5, 7, 8)]
        opened.put(keys[3], block(keys[3]))
    assert store("verify", "--json", folder)["objects"] == 10


def test_verify_finds_damaged_records_and_segments(folder, keys):
    first, *_ = sorted(path for path in folder.iterdir() if path.name.startswith(str(len(block(keys[0])))))
    shape = parse_name(first.name)
    with first.open("r+b") as file:
        file.seek(shape.record_at(1) + 30)
        file.write(b"\xff")
    (small,) = folder.glob("4096-*.seg")
    with small.open("r+b") as file:
        file.write(b"nonsense")
    damaged = store("stat", "--json", folder, code=1)["damaged"]
    assert damaged == {f"{first.name} slot 1": "its record is damaged", small.name: "its head is damaged"}
    assert store("verify", "--json", folder, code=1)["damaged"] == damaged
    assert store("verify", "--json", "--delete", folder, code=1)["deleted"] == 2
    assert not small.exists()
    assert store("stat", "--json", folder)["objects"] == 11
    assert store("verify", "--json", folder)["objects"] == 11


def test_gc(folder, keys):
    before = store("stat", "--json", folder)
    # nothing asked, nothing empty: nothing removed
    assert store("gc", "--json", folder)["objects"] == 0
    keep = ["--keep-namespace", NAMESPACES[0].hex(), "--keep-namespace", "ABAB"]
    would = store("gc", "--json", "--dry-run", *keep, folder)
    assert would["objects"] == 5
    assert store("stat", "--json", folder)["objects"] == 13, "a dry run removed something"
    done = store("gc", "--json", *keep, folder)
    assert {**done, "dry_run": True} == would
    seen = store("stat", "--json", folder)
    assert seen["namespaces"].keys() == {NAMESPACES[0].hex(), NAMESPACES[2].hex()}
    assert seen["disk_nbytes"] == done["disk_left_nbytes"] < before["disk_nbytes"], "an empty segment was left"
    assert store("gc", "--json", "--older-than", "1h", folder)["objects"] == 0
    # what was used longest ago goes first
    with Opened(folder, max_nbytes=8 << 20) as opened:
        data = Part(0, 0, len(block(keys[0])))
        (outcome,) = opened.loop.run_until_complete(opened.store.get_into([Item(keys[0], (data,))]))
        assert outcome.ok
    left = store("gc", "--json", "--max-nbytes", "0.2MB", folder)
    seen = store("stat", "--json", folder)
    assert seen["disk_nbytes"] == left["disk_left_nbytes"] <= 200_000
    assert keys[0] in [row["key"] for row in store("ls", "--json", folder)["objects"]]
    assert store("gc", "--json", "--older-than", "0s", folder)["disk_left_nbytes"] == 0
    assert "removed 0 objects" in store("gc", folder)


@pytest.mark.parametrize("name", ["zz", "0xab", "", "0123456789abcdef"])
def test_gc_keeps_nothing_by_a_slip_of_the_pen(folder, name):
    said = store("gc", "--keep-namespace", name, folder, code=2)
    assert "--keep-namespace" in said
    assert store("stat", "--json", folder)["objects"] == 13


def test_a_pipe_with_a_segments_name_holds_up_no_command(folder):
    (segment, *_) = folder.glob("*.seg")
    stride, slots, _number = segment.stem.split("-")
    os.mkfifo(folder / f"{stride}-{slots}-000000ff.seg")
    assert store("stat", "--json", folder)["objects"] == 13
    assert store("verify", "--json", folder)


def test_while_an_engine_is_live(folder, keys):
    with Opened(folder, max_nbytes=4 << 20) as opened:
        opened.put(object_key(NAMESPACES[0], b"n" * 16), block(object_key(NAMESPACES[0], b"n" * 16)))
        seen = store("stat", "--json", folder)
        assert (seen["objects"], seen["held_by"], seen["cap_nbytes"]) == (14, str(os.getpid()), 4 << 20)
        assert f"in use by process {os.getpid()}" in store("stat", folder)
        assert store("ls", "--json", folder)["total"] == 14
        for command in ("verify", "gc"):
            assert f"in use by process {os.getpid()}" in store(command, folder, code=2)
        assert opened.exists(keys[0])
    assert lock_holder(folder) == ""


def test_what_cannot_run_says_why(tmp_path):
    for command in ("ls", "stat", "verify", "gc"):
        assert "is no file store" in store(command, tmp_path, code=2)
        assert "does not exist" in store(command, tmp_path / "nowhere", code=2)
    assert not list(tmp_path.iterdir()), "looking left something behind"
    assert "is no size" in store("gc", "--max-nbytes", "10XB", tmp_path, code=2)
    assert "is no age" in store("gc", "--older-than", "7", tmp_path, code=2)


@pytest.mark.ci
def test_ctrl_c_ends_it(tmp_path):
    shape = Shape(16 << 20, 400, 1)
    with (tmp_path / shape.name).open("wb") as file:
        file.write(encode_head(shape, CLEAN))
        for slot in range(shape.slots):
            file.seek(shape.record_at(slot))
            record = Record(object_key(NAMESPACES[0], slot.to_bytes(16, "big")), shape.stride, slot, 0)
            file.write(encode_record(record, shape, slot))
        file.truncate(shape.nbytes)  # sparse: no room is taken
    command = [sys.executable, "-c", "from fdasync.cli.main import main; main()", "store", "verify", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=interruptible)
    until = time.monotonic() + 60
    while not lock_holder(tmp_path):
        assert time.monotonic() < until
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=600)
    assert process.returncode == 130
    assert told.decode().splitlines()[-1] == "interrupted"
    assert lock_holder(tmp_path) == ""
