"""The file store and the end of its process: killed anywhere, every object is there whole or not at all."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop

from fdasync.cache.store.base import Item
from fdasync.cache.store.file.admin import survey
from fdasync.cache.store.file.store import FileConfig, FileStore
from fdasync.ipc.shared_memory import Part, SharedRegion

WRITER = Path(__file__).with_name("crash_writer.py")
_SPEC = importlib.util.spec_from_file_location("file_crash_writer", WRITER)
writer = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(writer)

ALL_KEYS = [key for number in range(writer.WORKERS) for key in writer.keys_of(number)]
LIMIT_S = 300


class Writer:
    """The process that forks those that are killed."""

    def __enter__(self):
        self.process = subprocess.Popen([sys.executable, str(WRITER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._rest = b""
        return self

    def __exit__(self, *error):
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def start(self, config):
        self.process.stdin.write(json.dumps(config).encode() + b"\n")
        self.process.stdin.flush()

    def line(self):
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self.process.stdout], [], [], LIMIT_S)
            assert ready, f"no word from the writer within {LIMIT_S} s"
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            assert data, "the writer ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()


class Expected:
    """What may be in the folder, by key: generations, and None for nothing. `forgets`: anything may be evicted."""

    def __init__(self, forgets):
        self.forgets = forgets
        self.allowed = {key: {None} for key in ALL_KEYS}
        self.words = 0

    def take(self, line):
        word, _, rest = line.partition(" ")
        assert word != "WRONG", rest
        self.words += 1
        if word in ("put", "done"):
            key, generation = rest.split()
            if word == "done":
                self.allowed[key] = {int(generation)}
            elif self.forgets or None in self.allowed[key]:
                self.allowed[key].add(int(generation))
        elif word == "delete":
            self.allowed[rest].add(None)
        elif word == "deleted":
            self.allowed[rest] = {None}

    def compare(self, found):
        """Check what is there, and go on from it."""
        for key in ALL_KEYS:
            allowed = self.allowed[key] | ({None} if self.forgets else set())
            assert found.get(key) in allowed, f"{key} is generation {found.get(key)}, not one of {allowed}"
            self.allowed[key] = {found.get(key)}


def read_disk(folder):
    """Generation by key, as the bytes on disk tell it."""
    found = {}
    for one in survey(folder).objects:
        with (folder / one.shape.name).open("rb") as file:
            file.seek(one.shape.value_at(one.slot))
            found[one.record.key] = writer.generation_of(one.record.key, file.read(one.record.nbytes))
    return found


def read_store(config):
    """Generation by key, as a store that opens the folder tells it."""

    async def read():
        region = SharedRegion.create("reader", writer.MOST)
        store = FileStore(FileConfig(**config))
        found = {}
        try:
            await store.open([region])
            for key in ALL_KEYS:
                (outcome,) = await store.get_into([Item(key, (Part(0, 0, writer.size_of(key)),))])
                if outcome.status != "miss":
                    assert outcome.status == "done", outcome
                    found[key] = writer.generation_of(key, bytes(region.view(0, writer.size_of(key))))
            store.check()
        finally:
            await store.aclose()
            region.close()
        return found

    return uvloop.run(read())


def crash_once(process, expected, config, choice):
    """One run, killed after so many words and microseconds: the store's process, its engine, or one after the other."""
    process.start(config)
    run = int(process.line().split()[1])
    pids = [run]
    # before it is open at all, in a few of the runs
    if choice.random() < 0.9:
        opened = process.line()
        assert opened.startswith("open "), opened
        pids = choice.choice([[run], [int(opened.split()[1]), run]])
        for _ in range(choice.choice([0, choice.randrange(10), choice.randrange(200)])):
            expected.take(process.line())
    for pid in dict.fromkeys(pids):
        select.select([], [], [], choice.random() * 0.004)
        os.kill(pid, signal.SIGKILL)
    while (line := process.line()) != "end":
        if not line.startswith("open "):
            expected.take(line)


CAPS = {
    # nothing is ever evicted: all that was acknowledged is there
    "roomy": {"max_nbytes": 64 << 20, "segment_nbytes": 1 << 20},
    # slots are reused, and segments of one size dropped for another, all the time
    "tiny": {"max_nbytes": 1_300_000, "segment_nbytes": 400_000},
}


def crash(folder, seed, kills, own_process):
    choice = random.Random(f"{seed} {own_process}")
    words = 0
    with Writer() as process:
        for place, cap in enumerate(CAPS):
            path = folder / cap
            expected = Expected(forgets=cap == "tiny")
            count = kills // 2 + (kills % 2) * place
            for number in range(count):
                store = {"path": str(path), **CAPS[cap], "sync": choice.choice(["none", "none", "data"])}
                config = {"seed": f"{seed} {number}", "base": (number + 1) * 1_000_000, "own_process": own_process}
                story = f"seed {seed}, {'own_process' if own_process else 'direct'}, {cap}, kill {number} of {count}"
                try:
                    crash_once(process, expected, {**config, "store": store}, choice)
                    found = read_disk(path) if path.exists() else {}
                    # opened only now and then: mostly the next run meets what the kill left
                    if choice.random() < 0.5:
                        assert read_store(store) == found, "a store finds something else than what lies there"
                    expected.compare(found)
                except BaseException as error:
                    error.add_note(story)
                    raise
            words += expected.words
    assert words > 20 * kills, "the runs did next to nothing"


class Recorder:
    """Everything that stores do to the disk, in order, so that a loss of power can be played at any moment of it.

    A write may be on the disk or not until its file was synced, page by page. Names and sizes are there at once.
    """

    def __init__(self, monkeypatch):
        self.events = []  # (what, file, ...)
        true = {name: getattr(os, name) for name in ("pwritev", "fdatasync", "fsync", "rename", "unlink")}

        def pwritev(fd, views, offset):
            data = b"".join(views)
            moved = true["pwritev"](fd, views, offset)
            self.events.append(("write", os.fstat(fd).st_ino, offset, data[:moved]))
            return moved

        def sync(fd):
            # what is recorded before the call is on the disk after it
            self.events.append(("sync", os.fstat(fd).st_ino, len(self.events)))

        def rename(old, new):
            self.events.append(("name", os.stat(old).st_ino, Path(new).name, os.stat(old).st_size))
            true["rename"](old, new)

        def unlink(path, *arguments, **options):
            self.events.append(("unlink", Path(path).name))
            true["unlink"](path, *arguments, **options)

        for name, fake in {
            "pwritev": pwritev, "fdatasync": sync, "fsync": sync, "rename": rename, "unlink": unlink,
        }.items():  # fmt: skip
            monkeypatch.setattr(os, name, fake)

    def play(self, folder, events, choice):
        """What the disk holds if the power fails after so many events."""
        names, files, pending = {}, {}, {}

        def drop(named):
            """The number of a file that is gone may be another file's next."""
            if named is not None:
                files.pop(named[0], None)
                pending.pop(named[0], None)

        for what, *rest in self.events[:events]:
            if what == "write":
                file, offset, data = rest
                pending.setdefault(file, []).append((offset, data))
            elif what == "sync":
                self._bring(files, pending.pop(rest[0], []), rest[0], lambda count: count)
            elif what == "name":
                drop(names.pop(rest[1], None))
                names[rest[1]] = (rest[0], rest[2])
            elif what == "unlink":
                drop(names.pop(rest[0], None))
        for file, writes in pending.items():
            self._bring(files, writes, file, lambda count: choice.randint(0, count))
        folder.mkdir()
        (folder / "lock").write_bytes(b"")
        for name, (file, size) in names.items():
            with (folder / name).open("wb") as out:
                out.truncate(size)
                for page, data in files.get(file, {}).items():
                    out.seek(page * 4096)
                    out.write(data)

    def _bring(self, files, writes, file, how_many):
        """Of the writes to each page the first few."""
        pages = {}
        for offset, data in writes:
            for page in range(offset // 4096, (offset + len(data) - 1) // 4096 + 1):
                start, stop = max(offset, page * 4096), min(offset + len(data), page * 4096 + 4096)
                pages.setdefault(page, []).append((start % 4096, data[start - offset : stop - offset]))
        for page, parts in pages.items():
            held = files.setdefault(file, {}).setdefault(page, bytearray(4096))
            for at, data in parts[: how_many(len(parts))]:
                held[at : at + len(data)] = data


SMALL_KEYS = [key for key in ALL_KEYS if writer.size_of(key) <= 20_000]


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("cap", list(CAPS))
@pytest.mark.parametrize("sync", ["none", "data"])
def test_loss_of_power_anywhere(tmp_path, monkeypatch, sync, cap):
    choice = random.Random(f"{sync} {cap}")
    recorder = Recorder(monkeypatch)
    config = {"path": str(tmp_path / "live"), "sync": sync, **CAPS[cap], "threads": 1}
    # small segments: without syncs, all that is in one is doubtful from the first write to it until a close
    config |= {"segment_nbytes": 30_000} | ({"max_nbytes": 100_000} if cap == "tiny" else {})
    history = []  # (events so far, what was said)

    async def live(generation):
        region = SharedRegion.create("power", 4 * 20_000)
        store = FileStore(FileConfig(**config))

        def say(words):
            history.append((len(recorder.events), words))

        await store.open([region])
        for _ in range(40):
            keys = choice.sample(SMALL_KEYS, choice.randint(1, 4))
            if choice.random() < (0.1 if cap == "tiny" else 0.3):
                for key in keys:
                    say(f"delete {key}")
                await store.delete(keys)
                for key in keys:
                    say(f"deleted {key}")
                continue
            items = []
            for place, key in enumerate(keys):
                generation += 1
                region.view(place * 20_000, writer.size_of(key))[:] = writer.value_of(key, generation)
                items.append(Item(key, (Part(0, place * 20_000, writer.size_of(key)),)))
                say(f"put {key} {generation}")
            outcomes = await store.put(items)
            for place, (key, outcome) in enumerate(zip(keys, outcomes, strict=True)):
                say(f"{outcome.status} {key} {generation - len(keys) + 1 + place}")
        await store.aclose()
        region.close()
        return generation

    generation = uvloop.run(live(0))
    generation = uvloop.run(live(generation))
    closed_at, closed = len(recorder.events), read_disk(tmp_path / "live")
    assert closed
    uvloop.run(live(generation))
    monkeypatch.undo()
    monkeypatch.setattr("fdasync.cache.store.file.recovery.boot_id", lambda: b"the boot after..")
    objects = 0
    for number in range(100):
        moment = choice.randint(0, len(recorder.events))
        place = tmp_path / f"{number}"
        recorder.play(place, moment, choice)
        found = read_disk(place)
        objects += len(found)
        # without syncs, only that nothing is mixed or cut; with them, that what was told is there
        expected = Expected(forgets=sync == "none" or cap == "tiny")
        for at, words in history:
            if at > moment:
                break
            expected.take(words)
        if sync == "data":
            expected.compare(found)
        shutil.rmtree(place)
    assert objects > (200 if sync == "data" else 0), "next to nothing was ever on the disk"
    # a folder that was closed is there whole, whatever the disk did with what was not synced
    for number in range(10):
        place = tmp_path / f"closed {number}"
        recorder.play(place, closed_at, choice)
        assert read_disk(place) == closed


@pytest.mark.ci
@pytest.mark.parametrize("own_process", [False, True], ids=["direct", "own_process"])
def test_killed_anywhere(tmp_path, own_process):
    crash(tmp_path, seed=1, kills=10, own_process=own_process)


@pytest.mark.nightly
@pytest.mark.parametrize("own_process", [False, True], ids=["direct", "own_process"])
@pytest.mark.parametrize("seed", [2, 3, 4, 5])
def test_killed_anywhere_often(tmp_path, own_process, seed):
    crash(tmp_path, seed, kills=30, own_process=own_process)
