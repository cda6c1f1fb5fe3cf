"""Tokens of many streams in pages of one array, so that a token's neighbours are reached by arithmetic alone.

A page overlaps the page before it: it repeats the last `overlap` tokens of it. So every window of up to `overlap + 1`
tokens lies whole in some page. A page belongs to a prompt's number, and is blank (-1) where nothing was written yet. If
no page is free, the oldest page that no stream writes is taken from its owner. Page 0 is never given out: position 0
means "nowhere".

The module knows no sequence and no n-gram. `ngram.py` calls it.
"""

from __future__ import annotations

from collections import deque

import numpy as np

BLANK = -1
NO_OWNER = -1
PAGE_TOKENS = 256
# of an entry of the list of used pages: a tuple and two numbers
_ENTRY_NBYTES = 128


class TokenPages:
    """See the module.

    Attributes:
        tokens: [pages * PAGE_TOKENS] int32.
        owners: [pages] int64: number of the prompt that each page belongs to.
        most: how many pages there are.
        in_use: how many of them have an owner.
    """

    def __init__(self, pages: int, overlap: int) -> None:
        self._overlap = overlap
        # written, so that memory stands behind all of it from the start
        self.tokens = np.full(pages * PAGE_TOKENS, BLANK, np.int32)
        self.owners = np.full(pages, NO_OWNER, np.int64)
        self.most = pages
        self._fresh = 1
        self._free: list[int] = []
        # given-out pages from the oldest on; a page that was freed meanwhile stands there under an old number of use
        self._used: deque[tuple[int, int]] = deque()
        self._uses = np.zeros(pages, np.int64)
        self._written = np.zeros(pages, bool)
        self.in_use = 0

    def take(self, owner: int) -> int:
        """A blank page; -1: streams write to all pages. The caller writes to it until `close`."""
        page = self._next()
        if page < 0:
            return -1
        self.owners[page] = owner
        self.tokens[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS] = BLANK
        self._written[page] = True
        self._uses[page] += 1
        self._used.append((page, int(self._uses[page])))
        self._count(1)
        return page

    def take_all(self, owners: list[int]) -> list[int]:
        """`take` for each of these: many pages at once cost less."""
        pages = [self._next() for _ in owners]
        had = [(page, owner) for page, owner in zip(pages, owners, strict=True) if page >= 0]
        if had:
            given = np.array(had)
            fresh = given[:, 0]
            self.owners[fresh] = given[:, 1]
            self.tokens.reshape(-1, PAGE_TOKENS)[fresh] = BLANK
            self._written[fresh] = True
            self._uses[fresh] += 1
            self._used.extend(zip(fresh.tolist(), self._uses[fresh].tolist(), strict=True))
            self._count(len(had))
        return pages

    def close(self, page: int) -> None:
        """The page is written to no more."""
        self._written[page] = False

    def give_back(self, owner: int) -> None:
        """Free the pages of an owner; no stream of it writes any more."""
        pages = np.flatnonzero(self.owners[: self._fresh] == owner)
        self.owners[pages] = NO_OWNER
        self._written[pages] = False
        self._free.extend(pages[::-1].tolist())
        self.in_use -= len(pages)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, and of the list of used pages."""
        arrays = self.tokens.nbytes + self.owners.nbytes + self._uses.nbytes + self._written.nbytes
        return arrays + len(self._used) * _ENTRY_NBYTES

    def _next(self) -> int:
        """A page for a stream, still with its old tokens; -1: there is none."""
        if self._free:
            return self._free.pop()
        if self._fresh < self.most:
            self._fresh += 1
            return self._fresh - 1
        return self._oldest()

    def _count(self, more: int) -> None:
        """So many more pages have an owner."""
        self.in_use += more
        if len(self._used) > 2 * self.most:
            self._used = deque(entry for entry in self._used if self._is_current(*entry))

    def _oldest(self) -> int:
        """Take the oldest page that no stream writes from its owner; -1: there is none."""
        for _ in range(len(self._used)):
            page, use = self._used.popleft()
            if not self._is_current(page, use):
                continue
            if self._written[page]:
                self._used.append((page, use))
                continue
            self.in_use -= 1
            return page
        return -1

    def _is_current(self, page: int, use: int) -> bool:
        return bool(self._uses[page] == use and self.owners[page] != NO_OWNER)
