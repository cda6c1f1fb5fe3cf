"""A store of whole, checked blocks around any store of bytes: `CheckedStore`.

It writes the header of `block_format.py` in front of the sections of a block, and returns a block that was read only
after every check has held. No copies are joined: header, sections and padding are parts. `BlockMoves` hashes, in the
threads of the store where it moves bytes in threads, else here on the loop, in pieces. It knows no files and no engine.
`process/main.py` makes it in the store's process, `engine/store_stack.py` around a store in the engine's process.
"""

from __future__ import annotations

import asyncio
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, get_args

import msgspec

from fdasync.cache.store.base import DONE, Capabilities, Item, Outcome, Store, StoreUsage
from fdasync.cache.store.block_format import (
    MAX_RANK,
    BlockSchema,
    DamagedBlock,
    DamageReason,
    check_key,
    check_schema,
    is_object_key,
    make_header,
    object_key,
    read_header,
    write_header,
)
from fdasync.cache.store.block_moves import BlockMoves, Form
from fdasync.cache.store.validation import check_items
from fdasync.errors import StoreRejected, StoreUnavailable
from fdasync.ipc.shared_memory import PAGE_NBYTES, Part, page_aligned

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fdasync.cache.store.base import Piece
    from fdasync.ipc.shared_memory import SharedRegion

# pieces of a block that one callback of the loop hashes: some 0.3 ms
_PIECES = 16
_REASONS = frozenset(get_args(DamageReason))


class CheckedStore(Store):
    """Writes and checks block objects around another store, which it owns.

    Its items have one part for the header (a page that the caller gives for this call) and one for each section, as the
    schema has them, without padding; `object_key` makes their keys. An item of a block that carries a state has one
    more part for that; an object written with a state is damaged for a reader that expects none, and the other way
    round. An object that fails a check of a read is "damaged", with the reason as the first word of the problem, and is
    deleted, so that a good one can take its place. A read does not check the padding between sections, which is no
    data; `check_value` does.
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
        forms = [_Form(schema, with_state=with_state) for with_state in (False, True)[: 1 + (schema.state is not None)]]
        # by the number of parts of an item, and of a whole object
        self._forms = {len(form.sizes): form for form in forms}
        self._whole_forms = {form.num_parts: form for form in forms}
        self._moves = BlockMoves(forms, self._view, self._write_header, self._problem)
        # a store that moves bytes in threads hashes them there; for any other store the loop hashes, in pieces
        self._beside = inner.beside(self._moves)

    @property
    def in_use(self) -> bool:
        """Whether an engine has the store inside open."""
        return self._inner.in_use

    @in_use.setter
    def in_use(self, in_use: bool) -> None:
        self._inner.in_use = in_use

    def _check_schema(self) -> None:
        schema = self._schema
        sections = schema.layout_of(with_state=True)
        names = [section.name for section in sections]
        if not names or names[0] != "kv" or len(set(names)) < len(names):
            raise StoreRejected(self._name, f"the sections of a block are kv and then aux data, not {names}")
        if any(section.nbytes < 1 for section in sections):
            raise StoreRejected(self._name, "a section of a block has no bytes")
        if schema.zeros.nbytes != PAGE_NBYTES or schema.trash.nbytes != PAGE_NBYTES:
            raise StoreRejected(self._name, "padding needs a page of zeros and a page of trash")
        try:
            # the longest table that these sections can have; a schema that it cannot express would always be damaged
            longest = make_header(schema, object_key(bytes(16), bytes(16), MAX_RANK), [2**64 - 1] * len(names))
            nbytes = schema.nbytes_of(with_state=True)
            check_schema(read_header(write_header(longest), nbytes), schema, with_state=True)
        except (DamagedBlock, ValueError) as error:
            raise StoreRejected(self._name, f"a header cannot say what a block is: {error}") from None

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        await self._inner.open(regions)
        inner, schema = self._inner.capabilities, self._schema
        self._name = inner.name
        count, nbytes = max(self._whole_forms), schema.nbytes_of(with_state=True)
        if count > inner.max_parts or nbytes > inner.max_item_nbytes:
            raise StoreRejected(
                inner.name,
                f"a block is an object of {nbytes} bytes in {count} parts; the store takes "
                f"{inner.max_item_nbytes} bytes in {inner.max_parts}",
            )
        longest = len(object_key(bytes(16), bytes(16), 0))
        if longest > inner.max_key_chars:
            raise StoreRejected(
                inner.name, f"keys of blocks have {longest} characters, the store takes {inner.max_key_chars}"
            )
        largest = self._forms[max(self._forms)]
        self.capabilities: Capabilities = msgspec.structs.replace(
            inner,
            max_parts=len(largest.sizes),
            max_item_nbytes=inner.max_item_nbytes - (nbytes - sum(largest.sizes)),
        )
        self._regions = regions

    async def exists_prefix(self, keys: Sequence[str]) -> int:
        return await self._inner.exists_prefix(keys)

    async def get_into(self, items: Sequence[Item]) -> list[Outcome]:
        self._check_items(items)
        whole = [_whole(item, self._forms[len(item.parts)].trash) for item in items]
        found = self._all(await self._inner.get_into(whole), items)
        if self._beside and found == [DONE] * len(found):
            return found
        outcomes = [await self._judge(item, outcome) for item, outcome in zip(whole, found, strict=True)]
        damaged = {item.key for item, outcome in zip(items, outcomes, strict=True) if outcome.status == "damaged"}
        if damaged:
            trouble = await self._delete(sorted(damaged))
            outcomes = [
                Outcome("damaged", outcome.problem + trouble) if outcome.status == "damaged" else outcome
                for outcome in outcomes
            ]
        return outcomes

    async def put(self, items: Sequence[Item]) -> list[Outcome]:
        self._check_items(items)
        whole = [_whole(item, self._forms[len(item.parts)].zeros) for item in items]
        if not self._beside:
            for item in whole:
                await _pass_over(self._moves.complete_in_pieces(item))
        return self._all(await self._inner.put(whole), items)

    async def delete(self, keys: Sequence[str]) -> int:
        return await self._inner.delete(keys)

    async def usage(self) -> StoreUsage:
        return await self._inner.usage()

    async def aclose(self) -> None:
        self._closed = True
        await self._inner.aclose()

    async def kill(self, why: str) -> bool:
        return await self._inner.kill(why)

    # -- parts of calls -----------------------------------------------------------------------------

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

    def _check_items(self, items: Sequence[Item]) -> None:
        """Raise StoreRejected for an item that is not one of the schema's blocks."""
        if self._closed:
            raise StoreUnavailable(self._name, "it is closed")
        if not self._beside:
            # else the store inside checks the call, before any byte is touched
            check_items(items, self.capabilities, self._regions)
        for item in items:
            sizes = [part.nbytes for part in item.parts]
            form = self._forms.get(len(sizes))
            if form is None or sizes != form.sizes:
                wanted = " or ".join(str(form.sizes) for form in self._forms.values())
                raise StoreRejected(self._name, f"the parts of {item.key} have {sizes} bytes, and a block has {wanted}")
            if not is_object_key(item.key):
                raise StoreRejected(self._name, f"{item.key!r} is not the key of a block")

    async def _judge(self, item: Item, outcome: Outcome) -> Outcome:
        """The outcome of a read of a whole item, once its bytes are checked: here, unless they were checked beside the
        read."""
        if outcome.status in ("miss", "failed"):
            return outcome
        if outcome.status == "damaged":
            checked = outcome.problem.partition(":")[0] in _REASONS
            return outcome if checked else Outcome("damaged", f"store: {outcome.problem}")
        if outcome.status != "done":
            return Outcome("failed", f"the store answered a read with {outcome.status!r}")
        if self._beside:
            return outcome
        arrival = self._moves.arrive(item)
        await _pass_over(arrival)
        return Outcome("damaged", arrival.problem) if arrival.problem else outcome

    def _header_page(self, key: str, checksums: Sequence[int]) -> bytes:
        return write_header(make_header(self._schema, key, checksums))

    def _write_header(self, item: Item, checksums: Sequence[int]) -> None:
        self._view(item.parts[0])[:] = self._header_page(item.key, checksums)

    def _problem(self, item: Item, checksums: Sequence[int]) -> str:
        page = bytes(self._view(item.parts[0]))
        form = self._whole_forms[len(item.parts)]
        if page == self._header_page(item.key, checksums):
            # what this engine would write about these bytes; anything else is looked at for the reason
            return ""
        try:
            header = read_header(page, self._schema.nbytes_of(with_state=form.with_state))
            check_key(header, item.key)
            check_schema(header, self._schema, with_state=form.with_state)
            for section, checksum in zip(header.sections, checksums, strict=True):
                if checksum != section.checksum:
                    raise DamagedBlock("checksum", f"section {section.name!r} is not what was written")
        except DamagedBlock as error:
            return str(error)
        return ""

    def _view(self, part: Part) -> memoryview:
        return self._regions[part.region].view(part.offset, part.nbytes)


class _Form(Form):
    """The objects of blocks with a recurrent state, or of blocks without one.

    Attributes:
        with_state: which of the two.
        sizes: bytes of the parts of an item: the header page, then the sections.
        zeros, trash: the padding behind each of these parts, to be written, and to be read into; some are empty.
    """

    def __init__(self, schema: BlockSchema, *, with_state: bool) -> None:
        self.with_state = with_state
        self.sizes = [PAGE_NBYTES, *[section.nbytes for section in schema.layout_of(with_state=with_state)]]
        rests = [page_aligned(nbytes) - nbytes for nbytes in self.sizes]
        self.zeros = [Part(schema.zeros.region, schema.zeros.offset, rest) for rest in rests]
        self.trash = [Part(schema.trash.region, schema.trash.offset, rest) for rest in rests]
        places = list(accumulate([2 if rest else 1 for rest in rests[:-1]]))
        super().__init__([nbytes for pair in zip(self.sizes, rests, strict=True) for nbytes in pair if nbytes], places)


def _whole(item: Item, padding: Sequence[Part]) -> Item:
    """The item of the whole object."""
    parts = []
    for part, rest in zip(item.parts, padding, strict=True):
        parts.append(part)
        if rest.nbytes:
            parts.append(rest)
    return Item(item.key, tuple(parts))


async def _pass_over(pieces: Iterable[Piece]) -> None:
    """Let the pieces of a block be hashed, on the loop, which gets a turn now and then."""
    for number, _ in enumerate(pieces, 1):
        if number % _PIECES == 0:
            await asyncio.sleep(0)
    await asyncio.sleep(0)
