"""A store of whole, checked blocks around any store of bytes: `CheckedStore`.

It writes the header of `block_format.py` in front of the sections of a block, and returns a block that was read only
after every check has held. No copies are joined: header, sections and padding are parts. It hashes in slices, so that
no callback of its loop grows long. It knows no files and no engine. `process/main.py` makes it in the store's process,
`engine/store_stack.py` around a store in the engine's process.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

import msgspec
import xxhash

from fdasync.cache.store.base import Capabilities, Item, Outcome, Store, StoreUsage, finish
from fdasync.cache.store.block_format import (
    MAX_RANK,
    BlockSchema,
    DamagedBlock,
    check_key,
    check_schema,
    make_header,
    object_key,
    parse_key,
    read_header,
    write_header,
)
from fdasync.cache.store.validation import check_items
from fdasync.errors import BadInput, StoreRejected, StoreUnavailable
from fdasync.ipc.shared_memory import PAGE_NBYTES, Part, page_aligned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.ipc.shared_memory import SharedRegion

# most bytes that one callback of the loop hashes: some 0.3 ms
_SLICE_NBYTES = 4 << 20
# blocks of a call that go to the inner store together, so that hashing and moving bytes overlap
_GROUP = 16


class CheckedStore(Store):
    """Writes and checks block objects around another store, which it owns.

    Its items have one part for the header (a page that the caller gives for this call) and one for each section, as
    the schema has them, without padding; `object_key` makes their keys. An object that fails a check of a read is
    "damaged", with the reason as the first word of the problem, and is deleted, so that a good one can take its place.
    A read does not check the padding between sections, which is no data; `check_value` does.
    """

    config_type: ClassVar[type[msgspec.Struct]] = msgspec.Struct

    def __init__(self, inner: Store, schema: BlockSchema) -> None:
        """Raises StoreRejected for a schema that cannot be stored: its table does not fit into a page, for example."""
        super().__init__(inner.config)
        self._inner = inner
        self._schema = schema
        self._regions: Sequence[SharedRegion] = ()
        self._name = type(inner).__name__
        self._closed = False
        self._check_schema()
        self._sizes = [PAGE_NBYTES, *[section.nbytes for section in schema.sections]]
        # where these parts are among those of the whole object, which has padding between them
        self._places = []
        place = 0
        for nbytes in self._sizes:
            self._places.append(place)
            place += 1 if nbytes % PAGE_NBYTES == 0 else 2
        # problems that `_judge_now` found, by id of the whole item
        self._damage: dict[int, str] = {}
        # a store that moves bytes in threads hashes them there; for any other store the loop hashes, in slices
        self._beside = inner.beside(self._prepare_now, self._judge_now)

    def _check_schema(self) -> None:
        schema = self._schema
        names = [section.name for section in schema.sections]
        if not names or names[0] != "kv" or len(set(names)) < len(names):
            raise StoreRejected(self._name, f"the sections of a block are kv and then aux data, not {names}")
        if any(section.nbytes < 1 for section in schema.sections):
            raise StoreRejected(self._name, "a section of a block has no bytes")
        if schema.zeros.nbytes != PAGE_NBYTES or schema.trash.nbytes != PAGE_NBYTES:
            raise StoreRejected(self._name, "padding needs a page of zeros and a page of trash")
        try:
            # the longest table that these sections can have; a schema that it cannot express would always be damaged
            longest = make_header(schema, object_key(bytes(16), bytes(16), MAX_RANK), [2**64 - 1] * len(names))
            check_schema(read_header(write_header(longest), schema.object_nbytes), schema)
        except (DamagedBlock, ValueError) as error:
            raise StoreRejected(self._name, f"a header cannot say what a block is: {error}") from None

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        await self._inner.open(regions)
        inner, schema = self._inner.capabilities, self._schema
        self._name = inner.name
        padded = self._padded(tuple([Part(0, 0, nbytes) for nbytes in self._sizes]), schema.zeros)
        if len(padded) > inner.max_parts or schema.object_nbytes > inner.max_item_nbytes:
            raise StoreRejected(
                inner.name,
                f"a block is an object of {schema.object_nbytes} bytes in {len(padded)} parts; the store takes "
                f"{inner.max_item_nbytes} bytes in {inner.max_parts}",
            )
        longest = len(object_key(bytes(16), bytes(16), 0))
        if longest > inner.max_key_chars:
            raise StoreRejected(
                inner.name, f"keys of blocks have {longest} characters, the store takes {inner.max_key_chars}"
            )
        padding_nbytes = schema.object_nbytes - sum(self._sizes)
        self.capabilities: Capabilities = msgspec.structs.replace(
            inner, max_parts=len(self._sizes), max_item_nbytes=inner.max_item_nbytes - padding_nbytes
        )
        self._regions = regions

    async def exists_prefix(self, keys: Sequence[str]) -> int:
        return await self._inner.exists_prefix(keys)

    async def get_into(self, items: Sequence[Item]) -> list[Outcome]:
        self._check_items(items)
        groups = _groups(items)
        if len(groups) <= 1 or self._beside:
            return await self._get_group(items)
        # the blocks that have arrived are checked while the rest is read
        return await _all_of([asyncio.ensure_future(self._get_group(group)) for group in groups])

    async def put(self, items: Sequence[Item]) -> list[Outcome]:
        self._check_items(items)
        if self._beside:
            return await self._put_group([self._whole(item, self._schema.zeros) for item in items])
        groups = _groups(items)
        if len(groups) <= 1:
            return await self._put_group([await self._prepare(item) for item in items])
        # the blocks that have their header are written while the rest is hashed
        tasks: list[asyncio.Future[list[Outcome]]] = []
        try:
            for group in groups:
                prepared = [await self._prepare(item) for item in group]
                tasks.append(asyncio.ensure_future(self._put_group(prepared)))
        except BaseException:
            await _end(tasks)
            raise
        return await _all_of(tasks)

    async def delete(self, keys: Sequence[str]) -> int:
        return await self._inner.delete(keys)

    async def usage(self) -> StoreUsage:
        return await self._inner.usage()

    async def aclose(self) -> None:
        self._closed = True
        await self._inner.aclose()

    async def kill(self, why: str) -> bool:
        return await self._inner.kill(why)

    # -- a few items --------------------------------------------------------------------------------

    async def _get_group(self, items: Sequence[Item]) -> list[Outcome]:
        inner = [self._whole(item, self._schema.trash) for item in items]
        try:
            found = self._all(await self._inner.get_into(inner), items)
            outcomes = [await self._judge(item, outcome) for item, outcome in zip(inner, found, strict=True)]
        finally:
            for item in inner:
                self._damage.pop(id(item), None)
        damaged = {item.key for item, outcome in zip(items, outcomes, strict=True) if outcome.status == "damaged"}
        if damaged:
            trouble = await self._delete(sorted(damaged))
            outcomes = [
                Outcome("damaged", outcome.problem + trouble) if outcome.status == "damaged" else outcome
                for outcome in outcomes
            ]
        return outcomes

    async def _put_group(self, prepared: Sequence[Item]) -> list[Outcome]:
        return self._all(await self._inner.put(prepared), prepared)

    async def _delete(self, keys: Sequence[str]) -> str:
        """Delete damaged objects; "", or why that failed, to be added to the problem of their outcomes."""
        try:
            await self._inner.delete(keys)
        except Exception as error:
            return f"; and it could not be deleted: {error}"
        return ""

    def _all(self, outcomes: list[Outcome], items: Sequence[Item]) -> list[Outcome]:
        if len(outcomes) != len(items):
            raise StoreUnavailable(self._name, f"it gave {len(outcomes)} outcomes for {len(items)} items")
        return outcomes

    # -- one item -----------------------------------------------------------------------------------

    def _check_items(self, items: Sequence[Item]) -> None:
        """Raise StoreRejected for an item that is not one of the schema's blocks."""
        if self._closed:
            raise StoreUnavailable(self._name, "it is closed")
        check_items(items, self.capabilities, self._regions)
        for item in items:
            sizes = [part.nbytes for part in item.parts]
            if sizes != self._sizes:
                problem = f"the parts of {item.key} have {sizes} bytes, and a block has {self._sizes}"
                raise StoreRejected(self._name, problem)
            try:
                parse_key(item.key)
            except BadInput as error:
                raise StoreRejected(self._name, error.problem) from None

    def _padded(self, parts: tuple[Part, ...], page: Part) -> tuple[Part, ...]:
        """The parts of the whole object; padding lies in `page`."""
        padded = []
        for part in parts:
            padded.append(part)
            rest = page_aligned(part.nbytes) - part.nbytes
            if rest:
                padded.append(Part(page.region, page.offset, rest))
        return tuple(padded)

    def _whole(self, item: Item, page: Part) -> Item:
        return Item(item.key, self._padded(item.parts, page))

    # -- one whole item -----------------------------------------------------------------------------

    def _prepare_now(self, item: Item) -> None:
        """Write the header of the sections; in threads of the store inside."""
        self._write_header(item, [self._checksum_now(part) for part in self._sections(item)])

    async def _prepare(self, item: Item) -> Item:
        """Write the header of the sections, on the loop; the item with its padding."""
        whole = self._whole(item, self._schema.zeros)
        self._write_header(whole, [await self._checksum(part) for part in self._sections(whole)])
        # one block is a callback long enough
        await asyncio.sleep(0)
        return whole

    def _judge_now(self, item: Item) -> str:
        """Check what was read; the problem, or "". In threads of the store inside."""
        problem = self._problem(item, [self._checksum_now(part) for part in self._sections(item)])
        if problem:
            # the items of a call live until it ends, and so do their ids
            self._damage[id(item)] = problem
        return problem

    async def _judge(self, item: Item, outcome: Outcome) -> Outcome:
        """The outcome of a read, once its bytes are checked: here, unless they were checked beside the read."""
        if outcome.status in ("miss", "failed"):
            return outcome
        if outcome.status == "damaged":
            return Outcome("damaged", self._damage.get(id(item)) or f"store: {outcome.problem}")
        if outcome.status != "done":
            return Outcome("failed", f"the store answered a read with {outcome.status!r}")
        if not self._beside:
            problem = self._problem(item, [await self._checksum(part) for part in self._sections(item)])
            if problem:
                return Outcome("damaged", problem)
            await asyncio.sleep(0)
        return outcome

    def _sections(self, item: Item) -> list[Part]:
        return [item.parts[place] for place in self._places[1:]]

    def _write_header(self, item: Item, checksums: Sequence[int]) -> None:
        page = write_header(make_header(self._schema, item.key, checksums))
        with self._view(item.parts[0]) as view:
            view[:] = page

    def _problem(self, item: Item, checksums: Sequence[int]) -> str:
        try:
            with self._view(item.parts[0]) as view:
                header = read_header(view, self._schema.object_nbytes)
            check_key(header, item.key)
            check_schema(header, self._schema)
            for section, checksum in zip(header.sections, checksums, strict=True):
                if checksum != section.checksum:
                    raise DamagedBlock("checksum", f"section {section.name!r} is not what was written")
        except DamagedBlock as error:
            return str(error)
        return ""

    def _checksum_now(self, part: Part) -> int:
        with self._view(part) as view:
            return xxhash.xxh3_64_intdigest(view)

    async def _checksum(self, part: Part) -> int:
        """XXH3-64 of a part; yields to the loop between slices."""
        if part.nbytes <= _SLICE_NBYTES:
            return self._checksum_now(part)
        with self._view(part) as view:
            running = xxhash.xxh3_64()
            for start in range(0, part.nbytes, _SLICE_NBYTES):
                if start:
                    await asyncio.sleep(0)
                running.update(view[start : start + _SLICE_NBYTES])
            return running.intdigest()

    def _view(self, part: Part) -> memoryview:
        return self._regions[part.region].view(part.offset, part.nbytes)


def _groups(items: Sequence[Item]) -> list[Sequence[Item]]:
    return [items[start : start + _GROUP] for start in range(0, len(items), _GROUP)]


async def _all_of(tasks: Sequence[asyncio.Future[list[Outcome]]]) -> list[Outcome]:
    """The outcomes of all tasks. Raises the first error; when it raises or is cancelled, all tasks have ended."""
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await _end(tasks)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    return [outcome for task in tasks for outcome in task.result()]  # of tasks that are done


async def _end(tasks: Sequence[asyncio.Future[list[Outcome]]]) -> None:
    """Cancel the running tasks and wait for their end, even when cancelled: they use the caller's parts."""
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
    try:
        if left:
            await finish(asyncio.ensure_future(asyncio.wait(left)))
    finally:
        for task in tasks:
            # retrieved, so that asyncio does not warn
            _ = task.cancelled() or task.exception()
