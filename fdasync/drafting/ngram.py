"""The drafter `ngram`: what followed the last tokens of a sequence when they came before.

It looks in the sequence's own prompt and answer, and in the answers of all sequences of the same prompt and salt. The
longest suffix that came before wins, of the lengths in `orders`; of equally long ones, the occurrence entered last. An
occurrence is entered once a whole path follows it, so every path that is found has its full length.

All tokens lie in one array (`token_pages.py`). For each order, a table maps the hash of an n-gram to the position of
its last token. An entry that another n-gram, or another prompt, has overwritten is found out by comparing the tokens
themselves and the owner of their page. So the table needs no keys, entries need no removal, and a step of any number of
sequences is some thirty array operations. New tokens are written at once; their n-grams are entered when the next path
is asked for, many steps' together. Memory is fixed when the drafter is made; a table that is too full forgets old
n-grams, and pages that run out are taken from the oldest text.

Called by `planning.py` through the contract in `base.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from itertools import repeat
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from fdasync.drafting.base import Counts, Drafter, DrafterLimits, DrafterStats, Tokens
from fdasync.drafting.token_pages import BLANK, PAGE_TOKENS, TokenPages
from fdasync.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

# window of an n-gram: as many bytes as a flag for each token fill one word
_WINDOW = 8
_BACK = np.arange(1 - _WINDOW, 1)
# odd, fixed multipliers: one for each place in the window, and one for the prompt's number
_MULTIPLIERS = np.random.Generator(np.random.PCG64(20)).integers(1, 1 << 63, _WINDOW + 1, np.uint64) * 2 + 1


# n-grams wait to be entered until they are more than this, or than a share of the memory
_MOST_LATE, _LATE_SHARE = 4096, 1 / 64
# of a waiting n-gram: where it ends, and its prompt's number
_LATE_NBYTES = 16
# bytes of a page besides its tokens: its entries in arrays and lists, a prompt's and a sequence's own, and a share of
# the n-grams that wait
_PAGE_NBYTES = 1024
_ROW_NBYTES = 256
# as many sequences that begin cost less by arrays than one by one
_TOGETHER = 4


class NgramConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `NgramDrafter`.

    Attributes:
        orders: lengths of the suffixes that are looked for, falling.
        limit_nbytes: the most bytes that it holds. 64 MiB hold about 2 million tokens.
        keep_s: how long the tokens of a prompt's sequences are kept after the last of them ended; 0: no longer. What is
            over is dropped when a sequence begins or ends.
    """

    orders: Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, le=_WINDOW)], ...], msgspec.Meta(min_length=1)] = (
        8,
        4,
        2,
    )
    limit_nbytes: Annotated[int, msgspec.Meta(ge=1 << 16, le=1 << 34)] = 64 << 20
    keep_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0


class _Prompt:
    """What the sequences of a prompt share: the number that owns their pages."""

    __slots__ = ("digest", "head", "live", "number", "over_at")

    def __init__(self, digest: bytes, number: int, head: Tokens) -> None:
        self.digest = digest
        self.number = number
        # what the first page of each sequence repeats: the prompt's end
        self.head = head
        self.live = 0
        self.over_at = 0.0


class NgramDrafter(Drafter):
    """See the module."""

    config_type = NgramConfig
    config: NgramConfig

    def __init__(self, config: NgramConfig, limits: DrafterLimits) -> None:
        super().__init__(config, limits)
        if list(config.orders) != sorted(set(config.orders), reverse=True):
            raise ConfigError("drafter_config.orders", f"is {config.orders}, and must fall")
        self._path = limits.path_tokens
        # what a page repeats of the one before: the tokens whose n-grams are not entered yet, and a window
        self._overlap = self._path + _WINDOW - 1
        self._orders = np.array(config.orders, np.int64)
        pages, bits = _sizes(config.limit_nbytes, len(config.orders))
        self._most_late = min(_MOST_LATE, int(config.limit_nbytes * _LATE_SHARE) // _LATE_NBYTES)
        if self._overlap > PAGE_TOKENS // 2:
            raise ConfigError("drafter_config", f"paths of {self._path} tokens are too long", limit=PAGE_TOKENS // 2)
        self._pages = TokenPages(pages, self._overlap)
        self._shift = np.uint64(64 - bits)
        # filled, so that memory stands behind all of it: the first write to each page of zeros would cost more than a
        # token may
        self._table = np.full(len(config.orders) << bits, 0, np.int32)
        self._sections = np.arange(len(config.orders), dtype=np.int64) << bits
        # [window, order]: the multipliers of an order's last tokens, 0 before them
        inside = np.arange(_WINDOW, 0, -1)[:, None] <= self._orders
        self._weights = np.where(inside, _MULTIPLIERS[:_WINDOW, None], np.uint64(0))
        # the flags of an order's tokens as one word
        self._words = np.ascontiguousarray(inside.T).view(np.uint64).ravel()
        self._ahead = np.arange(1, self._path + 1)
        self._prompts: dict[bytes, _Prompt] = {}
        self._kept: OrderedDict[bytes, _Prompt] = OrderedDict()
        self._numbers = 0
        # sequences that were given no page are not here, and get no paths
        self._rows: dict[int, int] = {}
        self._of_row: list[_Prompt] = []
        self._free: list[int] = []
        self._cached: tuple[tuple[int, ...], npt.NDArray[np.int64]] | None = None
        self._all_held = True
        self._now = 0.0
        # n-grams that are not entered yet, from the oldest on: where they end, and the numbers of their prompts
        self._late: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | int]] = []
        self._num_late = 0
        # samples of a group begin one after the other
        self._last_asked: tuple[bytes, str, bytes] = (b"", "", b"")
        # by row: position of the next token, end of its page, number of its prompt
        self._tails = np.zeros(0, np.int64)
        self._stops = np.zeros(0, np.int64)
        self._owners = np.zeros(0, np.int64)

    def begin(self, key: int, group: int, prompt: bytes, answer: bytes, *, salt: str = "", now: float = 0.0) -> None:
        self.begin_all((key,), (group,), (prompt,), (answer,), (salt,), now=now)

    def begin_all(
        self,
        keys: tuple[int, ...],
        groups: tuple[int, ...],  # noqa: ARG002
        prompts: tuple[bytes, ...],
        answers: tuple[bytes, ...],
        salts: tuple[str, ...],
        *,
        now: float = 0.0,
    ) -> None:
        self._expire(now)
        owners = [self._join(*asked) for asked in zip(prompts, salts, strict=True)]
        texts = [np.frombuffer(answer, "<i4") for answer in answers]
        if len(keys) < _TOGETHER or max(map(len, texts)) > PAGE_TOKENS - self._overlap:
            for key, owner, text in zip(keys, owners, texts, strict=True):
                page = self._pages.take(owner.number)
                tail, stop = self._write(owner.number, page, owner.head, text) if page >= 0 else (0, 0)
                if tail:
                    self._enter([key], [owner], np.array([tail]), np.array([stop]))
                else:
                    self._let_go(owner, now)
            return
        lanes = []
        pages = self._pages.take_all([owner.number for owner in owners])
        for lane in zip(keys, owners, texts, pages, strict=True):
            if lane[3] >= 0:
                lanes.append(lane)
            else:
                self._let_go(lane[1], now)
        if lanes:
            self._begin_pages(*zip(*lanes, strict=True))

    def take(self, keys: tuple[int, ...], counts: Counts, tokens: Tokens) -> None:
        rows = self._rows_of(keys)
        if not self._all_held:
            held = rows >= 0
            tokens, rows, counts = tokens[np.repeat(held, counts)], rows[held], counts[held]
        turning = self._tails[rows] + counts > self._stops[rows]
        if turning.any():
            firsts = np.cumsum(counts) - counts
            stays = np.ones(len(rows), bool)
            for number in np.flatnonzero(turning).tolist():
                first, count = int(firsts[number]), int(counts[number])
                stays[number] = self._turn(int(rows[number]), tokens[first : first + count])
            tokens, rows, counts = tokens[np.repeat(stays, counts)], rows[stays], counts[stays]
        tails = self._tails[rows]
        if len(tokens) == len(rows) and (not len(rows) or counts.min() == 1):
            places = tails
        else:
            places = np.repeat(tails - np.cumsum(counts) + counts, counts) + np.arange(len(tokens))
        self._pages.tokens[places] = tokens
        self._tails[rows] = tails + counts
        owners = self._owners[rows]
        self._enter_late(places - self._path, owners if places is tails else np.repeat(owners, counts))

    def propose(self, keys: tuple[int, ...], most: Counts) -> tuple[Counts, Tokens]:
        rows = self._rows_of(keys)
        wants = (rows >= 0) & (most > 0)
        lengths = np.zeros(len(keys), np.int64)
        is_all = bool(wants.all())
        if not is_all:
            rows, most = rows[wants], most[wants]
        if not len(rows):
            return lengths, np.zeros(0, np.int32)
        self._settle()
        text, owners = self._pages.tokens, self._owners[rows]
        windows = text[(self._tails[rows] - 1)[:, None] + _BACK]
        found = self._table[self._slots(windows, owners)]
        # [row, order] flags of the window's tokens that are equal, as one word
        equal = (text[found[:, :, None] + _BACK] == windows[:, None, :]).view(np.uint64)[:, :, 0]
        good = (equal & self._words) == self._words
        good &= self._pages.owners[found // PAGE_TOKENS] == owners[:, None]
        every = np.arange(len(rows))
        first = good.argmax(1)
        paths = text[found[every, first][:, None] + self._ahead]
        # the page may have been blanked since, for the same prompt
        has = good[every, first] & (paths[:, -1] != BLANK)
        counts = np.where(has, np.minimum(most, self._path), 0)
        tokens = paths[self._ahead <= counts[:, None]]
        if is_all:
            return counts, tokens
        lengths[wants] = counts
        return lengths, tokens

    def end(self, key: int, *, now: float = 0.0) -> None:
        row = self._rows.get(key)
        if row is not None:
            self._pages.close((int(self._stops[row]) - 1) // PAGE_TOKENS)
            self._forget(key, row, now)
        self._expire(now)

    @property
    def outlasts(self) -> bool:
        return self.config.keep_s > 0

    def stats(self) -> DrafterStats:
        return DrafterStats(
            sequences=len(self._rows),
            prompts=len(self._prompts) + len(self._kept),
            nbytes=self._table.nbytes
            + self._pages.nbytes
            + len(self._tails) * _ROW_NBYTES
            + self._num_late * _LATE_NBYTES,
            limit_nbytes=self.config.limit_nbytes,
        )

    # -- text -------------------------------------------------------------------------------------

    def _new_prompt(self, digest: bytes, asked: Tokens) -> _Prompt:
        self._numbers += 1
        head = np.full(self._overlap, BLANK, np.int32)
        known = asked[-self._overlap :]
        head[self._overlap - len(known) :] = known
        owner = _Prompt(digest, self._numbers, head)
        page = self._pages.take(owner.number)
        if page >= 0:
            _, stop = self._write(owner.number, page, np.full(self._overlap, BLANK, np.int32), asked)
            if stop:
                self._pages.close((stop - 1) // PAGE_TOKENS)
        return owner

    def _write(self, owner: int, page: int, head: Tokens, tokens: Tokens) -> tuple[int, int]:
        """Begin a page with `head`, a page's overlap, and write the tokens behind it, over as many pages as it takes.

        Returns:
            Position of the next token, and end of its page; both 0: there was no page for all of it.
        """
        text, room, at = self._pages.tokens, PAGE_TOKENS - self._overlap, 0
        while True:
            base = page * PAGE_TOKENS
            text[base : base + self._overlap] = head
            some = tokens[at : at + room]
            first = base + self._overlap
            text[first : first + len(some)] = some
            self._enter_late(np.arange(first - self._path, first - self._path + len(some)), owner)
            at += len(some)
            if at >= len(tokens):
                return first + len(some), base + PAGE_TOKENS
            head = text[base + PAGE_TOKENS - self._overlap : base + PAGE_TOKENS].copy()
            self._pages.close(page)
            page = self._pages.take(owner)
            if page < 0:
                return 0, 0

    def _begin_pages(
        self, keys: Sequence[int], owners: Sequence[_Prompt], texts: Sequence[Tokens], pages: Sequence[int]
    ) -> None:
        """Sequences begin with these answers; each answer fits into its page."""
        text = self._pages.tokens
        bases = np.array(pages) * PAGE_TOKENS
        heads = np.concatenate([owner.head for owner in owners]).reshape(-1, self._overlap)
        text[bases[:, None] + np.arange(self._overlap)] = heads
        counts = np.array([len(one) for one in texts])
        tails = bases + self._overlap + counts
        places = np.repeat(tails - np.cumsum(counts), counts) + np.arange(int(counts.sum()))
        text[places] = np.concatenate(texts)
        self._enter_late(places - self._path, np.repeat([owner.number for owner in owners], counts))
        self._enter(keys, owners, tails, bases + PAGE_TOKENS)

    def _turn(self, row: int, tokens: Tokens) -> bool:
        """The page of a row lacks room for these tokens: begin the next one. False: the tokens are written, or the
        sequence is given up."""
        tail = int(self._tails[row])
        owner = int(self._owners[row])
        head = self._pages.tokens[tail - self._overlap : tail].copy()
        self._pages.close((int(self._stops[row]) - 1) // PAGE_TOKENS)
        page = self._pages.take(owner)
        fits = len(tokens) <= PAGE_TOKENS - self._overlap
        tail = stop = 0
        if page >= 0:
            tail, stop = self._write(owner, page, head, tokens[:0] if fits else tokens)
        if not tail:
            (key,) = [key for key, other in self._rows.items() if other == row]
            self._forget(key, row, self._now)
            return False
        self._tails[row], self._stops[row] = tail, stop
        return fits

    def _slots(self, windows: Tokens, owners: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[n, window] tokens -> [n, order] places in the table. The high bits of a sum of products spread evenly."""
        sums = windows.astype(np.uint64) @ self._weights
        sums += (owners.astype(np.uint64) * _MULTIPLIERS[_WINDOW])[:, None]
        sums >>= self._shift
        return sums.view(np.int64) + self._sections

    def _enter_late(self, ends: npt.NDArray[np.int64], owners: npt.NDArray[np.int64] | int) -> None:
        """Let the n-grams that end at these positions be entered before a path is looked for; of equal ones the last
        wins."""
        self._late.append((ends, owners))
        self._num_late += len(ends)
        if self._num_late > self._most_late:
            self._settle()

    def _settle(self) -> None:
        """Enter the n-grams that wait for it, in their order."""
        if not self._num_late:
            return
        ends = np.concatenate([ends for ends, _ in self._late])
        owners = np.concatenate([np.full(len(ends), own) if isinstance(own, int) else own for ends, own in self._late])
        self._late.clear()
        self._num_late = 0
        # of pages that were given back meanwhile, too: `propose` compares what it finds with the tokens that are there
        windows = self._pages.tokens[ends[:, None] + _BACK]
        self._table[self._slots(windows, owners)] = ends[:, None]

    def _digest(self, prompt: bytes, salt: str) -> bytes:
        if (prompt, salt) != self._last_asked[:2]:
            marks = salt.encode()
            digest = blake2b(len(marks).to_bytes(8, "little") + marks + prompt, digest_size=16).digest()
            self._last_asked = (prompt, salt, digest)
        return self._last_asked[2]

    # -- sequences and prompts --------------------------------------------------------------------

    def _join(self, prompt: bytes, salt: str) -> _Prompt:
        """One sequence more of this prompt and salt."""
        digest = self._digest(prompt, salt)
        owner = self._prompts.get(digest)
        if owner is None:
            owner = self._kept.pop(digest, None) or self._new_prompt(digest, np.frombuffer(prompt, "<i4"))
            self._prompts[digest] = owner
        owner.live += 1
        return owner

    def _enter(
        self,
        keys: Sequence[int],
        owners: Sequence[_Prompt],
        tails: npt.NDArray[np.int64],
        stops: npt.NDArray[np.int64],
    ) -> None:
        """Sequences have their pages."""
        while len(self._free) < len(keys):
            self._grow()
        taken = [self._free.pop() for _ in keys]
        self._rows.update(zip(keys, taken, strict=True))
        for row, owner in zip(taken, owners, strict=True):
            self._of_row[row] = owner
        rows = np.array(taken)
        self._tails[rows], self._stops[rows] = tails, stops
        self._owners[rows] = [owner.number for owner in owners]
        self._cached = None

    def _rows_of(self, keys: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """The row of each key; -1: it has no page."""
        cached = self._cached
        if cached is not None and (cached[0] is keys or cached[0] == keys):
            return cached[1]
        find = self._rows.get
        rows = np.fromiter(map(find, keys, repeat(-1)), np.int64, len(keys))
        self._cached = (keys, rows)
        self._all_held = bool((rows >= 0).all())
        return rows

    def _forget(self, key: int, row: int, now: float) -> None:
        """The sequence has no page any more."""
        del self._rows[key]
        self._free.append(row)
        self._cached = None
        self._let_go(self._of_row[row], now)

    def _let_go(self, owner: _Prompt, now: float) -> None:
        """One sequence less; the prompt is over with its last."""
        owner.live -= 1
        if owner.live:
            return
        del self._prompts[owner.digest]
        if not self.config.keep_s:
            self._pages.give_back(owner.number)
            return
        owner.over_at = now + self.config.keep_s
        self._kept[owner.digest] = owner

    def _expire(self, now: float) -> None:
        """Drop what was kept long enough, and the oldest where more prompts are kept than there are pages."""
        self._now = now
        while self._kept:
            owner = next(iter(self._kept.values()))
            if owner.over_at > now and len(self._kept) <= self._pages.most:
                return
            del self._kept[owner.digest]
            self._pages.give_back(owner.number)

    def _grow(self) -> None:
        old = len(self._tails)
        # each row writes to a page
        more = min(max(old, 64), self._pages.most - old)
        for name in ("_tails", "_stops", "_owners"):
            setattr(self, name, np.concatenate((getattr(self, name), np.zeros(more, np.int64))))
        self._of_row.extend([_NOBODY] * more)
        self._free.extend(range(old + more - 1, old - 1, -1))


_NOBODY = _Prompt(b"", 0, np.zeros(0, np.int32))


def _sizes(limit_nbytes: int, orders: int) -> tuple[int, int]:
    """Pages, and bits of the size of each order's table: as many tokens as have entries."""
    best = (0, 0, 0)
    for bits in range(8, 31):
        pages = (limit_nbytes - (orders * 4 << bits)) // (PAGE_TOKENS * 4 + _PAGE_NBYTES)
        best = max(best, (min(pages * PAGE_TOKENS, 1 << bits), bits, pages))
    return best[2], best[1]
