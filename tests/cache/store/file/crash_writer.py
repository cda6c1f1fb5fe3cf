"""The process that is killed in `test_crash.py`: puts, gets and deletes without end, and says what it does.

Started once per test; for each line on stdin it forks, so that a run costs no imports. What a run does comes on
stdout, a line before and a line after every verb; "end" when the run and all that it started are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import random
import signal
import sys

import uvloop

from fdasync.cache.store.base import Item
from fdasync.cache.store.file.store import FileConfig, FileStore
from fdasync.cache.store.process.proxy import ProcessStore
from fdasync.ipc.shared_memory import Part, SharedRegion

WORKERS = 3
KEYS = 10
SIZES = (100, 5000, 20_000, 70_000, 300_000)
MOST = max(SIZES)
BATCH = 4
CUT = 1024
PR_SET_CHILD_SUBREAPER = 36


def keys_of(worker):
    return [f"w{worker}/{number}" for number in range(KEYS)]


def size_of(key):
    return SIZES[random.Random(key).randrange(len(SIZES))]


def value_of(key, generation):
    return generation.to_bytes(8, "little") + random.Random(f"{key} {generation}").randbytes(size_of(key) - 8)


def generation_of(key, value):
    """The generation whose value this is, whole and byte for byte. Raises AssertionError."""
    generation = int.from_bytes(value[:8], "little")
    assert value == value_of(key, generation), f"{key}: {len(value)} bytes that nobody ever put"
    return generation


def say(lines):
    os.write(1, "".join(f"{line}\n" for line in lines).encode())


class Worker:
    def __init__(self, store, region, number, config):
        self.store = store
        self.region = region
        self.number = number
        self.random = random.Random(f"{config['seed']} {number}")
        self.generation = config["base"] + number
        self.offset = number * BATCH * (MOST + CUT)

    def item(self, place, key):
        # two parts, so that a value is not one run of bytes
        at, size = self.offset + place * (MOST + CUT), size_of(key)
        return Item(key, (Part(0, at, size // 3), Part(0, at + size // 3 + CUT, size - size // 3)))

    def views(self, item):
        return [self.region.view(part.offset, part.nbytes) for part in item.parts]

    async def run(self):
        while True:
            keys = self.random.sample(keys_of(self.number), self.random.randint(1, BATCH))
            what = self.random.random()
            if what < 0.55:
                await self.put(keys)
            elif what < 0.8:
                await self.get(keys)
            else:
                say(f"delete {key}" for key in keys)
                await self.store.delete(keys)
                say(f"deleted {key}" for key in keys)

    async def put(self, keys):
        items, generations = [], []
        for place, key in enumerate(keys):
            self.generation += WORKERS
            generations.append(self.generation)
            item = self.item(place, key)
            value = value_of(key, self.generation)
            first, second = self.views(item)
            first[:], second[:] = value[: len(first)], value[len(first) :]
            items.append(item)
        say(f"put {key} {generation}" for key, generation in zip(keys, generations, strict=True))
        outcomes = await self.store.put(items)
        say(
            f"{outcome.status} {key} {generation}"
            for key, generation, outcome in zip(keys, generations, outcomes, strict=True)
        )

    async def get(self, keys):
        items = [self.item(place, key) for place, key in enumerate(keys)]
        for item, outcome in zip(items, await self.store.get_into(items), strict=True):
            if outcome.status == "done":
                try:
                    generation_of(item.key, b"".join(self.views(item)))
                except AssertionError as error:
                    say([f"WRONG {error}"])
            elif outcome.status != "miss":
                say([f"WRONG {outcome}"])


async def work(config):
    region = SharedRegion.create("crash", WORKERS * BATCH * (MOST + CUT))
    if config["own_process"]:
        store = ProcessStore("file", config["store"], close_deadline_s=300.0)
    else:
        store = FileStore(FileConfig(**config["store"]))
    await store.open([region])
    say([f"open {store.pid if config['own_process'] else os.getpid()}"])
    workers = [asyncio.ensure_future(Worker(store, region, number, config).run()) for number in range(WORKERS)]
    try:
        await asyncio.gather(*workers)
    except Exception as error:
        # the store's process was killed alone: its engine says so, and waits for its own end
        say([f"failed {error}"])
        await asyncio.Event().wait()


def main():
    # what a killed run leaves behind becomes a child of this process, and is waited for too
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for line in sys.stdin:
        config = json.loads(line)
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            uvloop.run(work(config))
            os._exit(3)
        say([f"run {pid}"])
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        say(["end"])


if __name__ == "__main__":
    main()
