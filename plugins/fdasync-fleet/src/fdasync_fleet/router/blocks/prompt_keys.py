"""Hashes prompts to the identities of their full blocks, and remembers the identities of prefixes that come again.

The samples of a group and the turns of a conversation share most of their prompts, and a look-up of 16 blocks is
fifteen times as fast as hashing them. What is remembered is bounded: the prefix that was not used for the longest time
goes first. Knows no instances. Called by `dispatch.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fdasync.cache.identity import packed_block_keys, root_key

if TYPE_CHECKING:
    from collections.abc import Sequence

# blocks that are looked up together
_RUN_BLOCKS = 16
# runs that are remembered: of 16 tokens a block, some 10 MB
_MAX_RUNS = 4096
# runs after which the loop has its turn
_SLICE_RUNS = 16


class PromptKeys:
    """See the module."""

    def __init__(self) -> None:
        # the identities of a run of blocks, by the identity of the block before it and its tokens; oldest first
        self._runs: dict[tuple[bytes, bytes], list[bytes]] = {}
        # namespace and salt of the latest prompt, and the identity of an empty prefix under them
        self._root: tuple[bytes, str, bytes] | None = None

    async def of(self, namespace: bytes, salt: str, tokens: bytes, block_tokens: int) -> Sequence[bytes]:
        """Identities of a prompt's full blocks. Yields to the loop between slices of a long prompt.

        Args:
            tokens: token ids, int32 as they lie in memory.
        """
        runs = self._runs
        root = self._root
        if root is None or root[0] != namespace or root[1] != salt:
            root = self._root = namespace, salt, root_key(namespace, salt.encode())
        parent = root[2]
        step = 4 * block_tokens * _RUN_BLOCKS
        keys: list[bytes] = []
        for number, first in enumerate(range(0, len(tokens) - 4 * block_tokens + 1, step), 1):
            if number % _SLICE_RUNS == 0:
                await asyncio.sleep(0)
            place = parent, tokens[first : first + step]
            run = runs.pop(place, None)
            if run is None:
                run = packed_block_keys(parent, place[1], block_tokens)
                if len(runs) >= _MAX_RUNS:
                    del runs[next(iter(runs))]
            runs[place] = run
            keys += run
            parent = run[-1]
        return keys
